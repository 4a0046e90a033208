//! [`Counts`]: where the routers of a step have sent tokens.

use moefold_kernels::{Dtype, Tensor, TensorClass, elementwise};
use moefold_planner::model::Model;
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::moe::balance::between;
use crate::moe::dispatch::Dispatching;
use crate::moe::{Load, RoutingStats};
use crate::rank::Context;

/// Where tokens have gone in a step so far.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// By MoE layer, in order.
    pub(super) load: Vec<Vec<u64>>,
    /// See [`offsets`].
    pub(super) offsets: Option<Tensor>,
    /// Tokens that each expert takes of a rank in a microbatch, by MoE layer; absent where it takes all.
    pub(super) limits: Vec<Option<usize>>,
    /// Choices dropped, by MoE layer.
    pub(super) dropped: Vec<u64>,
    /// By microbatch, tokens sent to each expert by the ranks that exchange tokens.
    pub(super) exchanged: Vec<Vec<Vec<u64>>>,
}

/// Where the routers of each of some microbatches leave their offsets `[microbatches, sum of E + 1]`, zero,
/// where the host does not ask for them within a step; `routers` are all of the model.
pub(crate) fn offsets(
    cx: &Context,
    dispatching: &Dispatching,
    routers: &[(u32, usize)],
    microbatches: usize,
) -> Option<Tensor> {
    let words: usize = routers.iter().map(|(_, experts)| experts + 1).sum();
    (words > 0 && !dispatching.needs_counts(cx)).then(|| {
        let dims = [microbatches, words];
        cx.device.zeros(TensorClass::Activations, Dtype::I32, &dims)
    })
}

/// Keeps the offsets of a router, where it left them on the device, until the end of the step.
pub(crate) fn keep_offsets(cx: &Context, stats: &RoutingStats, place: &Tensor) {
    if let Load::Offsets(offsets) = &stats.load {
        cx.op(Category::RouterPermute, || {
            elementwise::copy(offsets, place);
        });
    }
}

/// Where the offsets of a router are among those of a microbatch, and how many; `routers` are all of the model.
pub(super) fn place(routers: &[(u32, usize)], router: usize) -> [usize; 2] {
    let words = |(_, experts): &(u32, usize)| experts + 1;
    let before = routers[..router].iter().map(words).sum();
    [before, words(&routers[router])]
}

impl Counts {
    /// Reads the offsets that routers have left on the device.
    pub(super) fn read_offsets(
        &mut self,
        cx: &Context,
        routers: &[(u32, usize)],
    ) -> Result<(), Error> {
        let Some(offsets) = self.offsets.take() else {
            return Ok(());
        };
        let all = cx.to_host("counts_to_host", || offsets.to_i32());
        let microbatches = all.chunks_exact(offsets.width());
        for (words, exchanged) in microbatches.zip(&mut self.exchanged) {
            for (router, load) in self.load.iter_mut().enumerate() {
                let [start, len] = place(routers, router);
                exchanged[router] = between(&words[start..start + len]);
                add_load(load, &exchanged[router]);
                let limit = self.limits[router];
                self.dropped[router] += beyond(limit, &exchanged[router]);
            }
        }
        if cx.tp_ep.is_solo() {
            return Ok(());
        }
        let counts = self.exchanged.iter_mut().flatten().flatten();
        let mut counts: Vec<&mut u64> = counts.collect();
        let mut sums: Vec<f64> = counts.iter().map(|count| **count as f64).collect();
        cx.comm(Category::EpComm, "all_reduce", || {
            cx.tp_ep.all_reduce_f64(&mut sums)
        })?;
        for (count, sum) in counts.iter_mut().zip(sums) {
            **count = sum as u64;
        }
        Ok(())
    }
}

/// Tokens beyond what experts take.
pub(super) fn beyond(limit: Option<usize>, load: &[u64]) -> u64 {
    let beyond = |limit: usize| load.iter().map(move |n| n.saturating_sub(limit as u64));
    limit.map_or(0, |limit| beyond(limit).sum())
}

pub(super) fn add_load(sums: &mut [u64], load: &[u64]) {
    sums.iter_mut()
        .zip(load)
        .for_each(|(sum, rows)| *sum += rows);
}

/// The MoE layers of a model with their experts, then those of multi-token prediction.
pub(crate) fn routers(model: &Model) -> impl Iterator<Item = (u32, usize)> {
    let layers = model.layers.iter().chain(&model.mtp);
    (0..)
        .zip(layers)
        .filter_map(|(index, layer)| Some((index, layer.moe()?.experts as usize)))
}
