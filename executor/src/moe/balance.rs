//! Balance of the load of experts: losses of the router ([`Losses`]), and correction biases that move with
//! the load instead ([`Biases`]).
//!
//! With `T` tokens and `K` choices a token among `E` experts, the loss of Switch Transformers (arXiv
//! 2101.03961, equation 4) is `coefficient * E / (K T²) * Σ_e (Σ_t p_te) * count_e`; counts are of the `K`
//! largest scores, whatever biases and groups have a say in the choice (DeepSeek-V3, arXiv 2412.19437,
//! equations 17 to 20). It is taken over a microbatch, over each sequence, or over the ranks of all
//! data-parallel replicas, there with the mean counts of the step's microbatches so far. Normalization is
//! Megatron-Core's (`router.py`): each microbatch and replica counts for its share of a mean. So the
//! gradient of the loss over all replicas, which each takes by its own tokens' scores, is divided by their
//! number once more. Context-parallel ranks have the tokens of one microbatch, and their gradients are averaged
//! as those of replicas are: each takes that of the whole loss as often as there are such ranks.

use std::cell::RefCell;
use std::ops::Range;

use moefold_kernels::router::Stats;
use moefold_kernels::{Tensor, TensorClass};
use moefold_planner::model::Model;
use moefold_profiles::trace::Category;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::model::Family;
use crate::rank::Context;
use crate::shares;
use crate::store::Store;

/// How the load is balanced; coefficients of 0 are off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Balancing {
    /// Of the load-balancing loss over the tokens of a microbatch.
    pub aux_loss_coef: f64,
    /// Of the same over each sequence.
    #[serde(default)]
    pub seq_aux_loss_coef: f64,
    /// Of the same over the tokens of all replicas.
    #[serde(default)]
    pub global_aux_loss_coef: f64,
    /// Of the z-loss (ST-MoE, arXiv 2202.08906, equation 5).
    #[serde(default)]
    pub z_loss_coef: f64,
    /// What a correction bias moves in a step.
    #[serde(default)]
    pub bias_update_rate: f64,
}

impl Balancing {
    /// Whether a loss of scores is on.
    pub(super) fn is_of_scores(&self) -> bool {
        [
            self.aux_loss_coef,
            self.seq_aux_loss_coef,
            self.global_aux_loss_coef,
        ]
        .iter()
        .any(|coefficient| *coefficient > 0.0)
    }
}

/// Local tokens that chose each expert.
#[derive(Debug, Clone)]
pub enum Load {
    /// As the host knows them.
    Known(Vec<u64>),
    /// First row of each expert and the end of the last, on the device: `[E + 1]` i32.
    Offsets(Tensor),
}

impl Default for Load {
    fn default() -> Self {
        Self::Known(Vec::new())
    }
}

impl Load {
    /// The tokens; the host may wait for the device.
    pub fn read(&self) -> Vec<u64> {
        match self {
            Self::Known(load) => load.clone(),
            Self::Offsets(offsets) => between(&offsets.to_i32()),
        }
    }
}

/// Rows between offsets.
pub(crate) fn between(offsets: &[i32]) -> Vec<u64> {
    let rows = offsets.windows(2).map(|ends| ends[1] - ends[0]);
    rows.map(|rows| u64::try_from(rows).expect("offsets rise"))
        .collect()
}

/// What routing one microbatch was like.
#[derive(Debug, Clone, Default)]
pub struct RoutingStats {
    /// Local tokens that chose each expert.
    pub load: Load,
    /// Tokens that chose each expert on all ranks that this one exchanges tokens with, itself among them;
    /// empty where no host of them knows.
    pub exchanged: Vec<u64>,
    /// Tokens that each expert takes of a rank, where there is a limit.
    pub limit: Option<usize>,
    /// What this rank's part of the load-balancing losses is made of; absent when off.
    pub balance: Option<Balance>,
    /// What its part of the z-loss is made of; absent when off.
    pub z: Option<ZLoss>,
}

/// The load-balancing losses of one microbatch, not multiplied out: the inner product of the sums and
/// `logged`, times the microbatches of the step.
#[derive(Debug, Clone)]
pub struct Balance {
    /// Sums of the scores of every expert over this rank's tokens, in each of some parts `[P, E]`.
    pub score_sums: Tensor,
    /// The gradient of the step's loss by every score of an expert in each part `[P, E]`.
    pub gradient: Tensor,
    /// The same, the loss over all replicas as often as there are replicas.
    pub logged: Tensor,
}

/// The z-loss of one microbatch, not multiplied out: the sum of the squares, times the factor.
#[derive(Debug, Clone)]
pub struct ZLoss {
    /// Logarithms of the sums of exponentials of this rank's logits `[t]`.
    pub z: Tensor,
    /// The coefficient over the tokens of the microbatch.
    pub factor: f64,
}

/// The losses of the scores of one router.
#[derive(Debug)]
pub(super) struct Losses {
    balancing: Balancing,
    topk: usize,
    experts: usize,
    running: RefCell<Running>,
}

/// Tokens of each expert over all replicas, of some microbatches of a step.
#[derive(Debug, Default)]
struct Running {
    counts: Vec<f64>,
    microbatches: u32,
}

impl Losses {
    pub(super) fn new(balancing: Balancing, topk: usize, experts: usize) -> Self {
        Self {
            balancing,
            topk,
            experts,
            running: RefCell::default(),
        }
    }

    /// Forgets the microbatches of the step before.
    pub(super) fn begin_step(&self) {
        self.running.take();
    }

    /// The rank's `tokens` rows by what is summed apart: by sequence, or all together.
    pub(super) fn parts(&self, cx: &Context, tokens: usize) -> Vec<Range<usize>> {
        if self.balancing.seq_aux_loss_coef == 0.0 {
            return std::iter::once(0..tokens).collect();
        }
        let rows = cx.tp.index() * tokens..(cx.tp.index() + 1) * tokens;
        let len = run_len(cx, tokens);
        let part = |run: usize| {
            let start = (run * len).max(rows.start);
            let end = ((run + 1) * len).min(rows.end);
            start - rows.start..end - rows.start
        };
        (rows.start / len..rows.end.div_ceil(len))
            .map(part)
            .collect()
    }

    /// The losses of a microbatch of which this rank has `tokens` tokens, `counts` of them for each expert in
    /// each part. Their gradient by the scores is the same for every token of a part.
    pub(super) fn of(
        &self,
        cx: &Context,
        tokens: usize,
        stats: &Stats,
        counts: &[f64],
    ) -> Result<Balance, Error> {
        let Balancing {
            aux_loss_coef,
            seq_aux_loss_coef,
            global_aux_loss_coef,
            ..
        } = self.balancing;
        let [replicas, cp] = [cx.layout.dp(), cx.layout.cp()].map(f64::from);
        let experts = self.experts;
        let all = (tokens * cx.tp.size()) as f64 * cp;
        let factor = |coefficient: f64, tokens: f64| {
            let share = coefficient / f64::from(cx.layout.microbatches());
            share * experts as f64 / (self.topk as f64 * tokens * tokens)
        };
        let parts = counts.len() / experts;
        let [mut gradient, mut logged] = [(); 2].map(|()| vec![0.0; counts.len()]);
        if aux_loss_coef > 0.0 || global_aux_loss_coef > 0.0 {
            let mut of_all = vec![0.0; experts];
            for part in counts.chunks(experts) {
                of_all.iter_mut().zip(part).for_each(|(sum, n)| *sum += n);
            }
            sum_over_microbatch(cx, &mut of_all)?;
            let global = self.global(cx, &of_all)?;
            let (own, whole) = (
                factor(aux_loss_coef, all),
                factor(global_aux_loss_coef, all * replicas),
            );
            for i in 0..counts.len() {
                let [of_all, of_replicas] =
                    [own * of_all[i % experts], whole * global[i % experts]];
                gradient[i] += of_all + of_replicas;
                logged[i] += of_all + of_replicas * replicas;
            }
        }
        if seq_aux_loss_coef > 0.0 {
            let sequences = cx.layout.mbs() as usize;
            let first = cx.tp.index() * tokens / run_len(cx, tokens);
            let at = |i: usize| (first + i / experts) % sequences * experts + i % experts;
            let mut by_sequence = vec![0.0; sequences * experts];
            for (i, count) in counts.iter().enumerate() {
                by_sequence[at(i)] += count;
            }
            sum_over_microbatch(cx, &mut by_sequence)?;
            let sequences = sequences as f64;
            let factor = factor(seq_aux_loss_coef, all / sequences) / sequences;
            for i in 0..counts.len() {
                let of_sequence = factor * by_sequence[at(i)];
                gradient[i] += of_sequence;
                logged[i] += of_sequence;
            }
        }
        for gradient in &mut gradient {
            *gradient *= cp;
        }
        let tensor = |values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            let dims = [parts, experts];
            cx.device.from_f32(TensorClass::Activations, &values, &dims)
        };
        let logged_apart = cp > 1.0 || (global_aux_loss_coef > 0.0 && replicas > 1.0);
        let gradient = tensor(&gradient);
        Ok(Balance {
            score_sums: stats.score_sums.clone(),
            logged: if logged_apart {
                tensor(&logged)
            } else {
                gradient.clone()
            },
            gradient,
        })
    }

    /// Mean tokens of each expert over the step's microbatches so far, of all replicas. Zero where the loss
    /// over them is off.
    fn global(&self, cx: &Context, counts: &[f64]) -> Result<Vec<f64>, Error> {
        if self.balancing.global_aux_loss_coef == 0.0 {
            return Ok(vec![0.0; counts.len()]);
        }
        let mut counts = counts.to_vec();
        if cx.layout.dp() > 1 {
            cx.comm(Category::DpComm, "all_reduce", || {
                cx.dp_cp.all_reduce_f64(&mut counts)
            })?;
            // Context-parallel ranks brought the same.
            let times = f64::from(cx.layout.cp());
            for count in &mut counts {
                *count /= times;
            }
        }
        let mut running = self.running.borrow_mut();
        running.counts.resize(counts.len(), 0.0);
        running.microbatches += 1;
        let mean = f64::from(running.microbatches);
        for (sum, count) in running.counts.iter_mut().zip(&mut counts) {
            *sum += *count;
            *count = *sum / mean;
        }
        Ok(counts)
    }
}

/// Tokens of one sequence in a row among those of the tensor-parallel group, where the rank has `tokens`.
fn run_len(cx: &Context, tokens: usize) -> usize {
    shares::run_len(cx, tokens * cx.tp.size())
}

/// Sums over the ranks that have the tokens of a microbatch.
fn sum_over_microbatch(cx: &Context, counts: &mut [f64]) -> Result<(), Error> {
    let groups = [(&cx.tp, Category::TpComm), (&cx.cp, Category::CpComm)];
    for (group, category) in groups.into_iter().filter(|(group, _)| !group.is_solo()) {
        cx.comm(category, "all_reduce", || group.all_reduce_f64(counts))?;
    }
    Ok(())
}

/// The correction biases of a rank's routers, as the host knows them: they move with the load, by the sign
/// of what an expert lacks to the mean (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
#[derive(Debug)]
pub struct Biases {
    rate: f64,
    values: Vec<f32>,
    /// Of each router here that has one: its place among all MoE layers, and that of its bias in
    /// the buffer.
    routers: Vec<(usize, Range<usize>)>,
}

impl Biases {
    /// Those of `store`, which are zero until they are [`read`](Self::read).
    pub fn new(model: &Model, store: &Store, rate: f64) -> Self {
        let routers = store.shard.family(Family::Balance).map(|bias| {
            let layer = bias.layer.expect("a bias is a layer's");
            let before = (0..layer).filter(|&before| model.layer(before).moe().is_some());
            (before.count(), bias.range())
        });
        Self {
            rate,
            routers: routers.collect(),
            values: vec![0.0; store.shard.buffer_len(Family::Balance)],
        }
    }

    /// Reads them.
    pub fn read(&mut self, store: &Store) {
        if !self.values.is_empty() {
            self.values = store.flat(Family::Balance).weights.to_f32();
        }
    }

    /// Moves them by the `load` of a step, tokens of all ranks by MoE layer and expert.
    pub fn step(&mut self, store: &Store, load: &[Vec<u64>]) {
        if self.rate == 0.0 || self.values.is_empty() {
            return;
        }
        for (layer, range) in &self.routers {
            let load = &load[*layer];
            let mean = load.iter().sum::<u64>() as f64 / load.len() as f64;
            for (bias, &tokens) in self.values[range.clone()].iter_mut().zip(load) {
                let lacking = mean - tokens as f64;
                if lacking != 0.0 {
                    *bias += (self.rate * lacking.signum()) as f32;
                }
            }
        }
        store
            .flat(Family::Balance)
            .weights
            .copy_from_f32(&self.values);
    }

    /// The least and the greatest of those here; NaN where there are none.
    pub fn extremes(&self) -> [f64; 2] {
        let ranges = self.routers.iter();
        let all = ranges.flat_map(|(_, range)| &self.values[range.clone()]);
        all.fold([f64::NAN; 2], |[least, most], &bias| {
            [least.min(bias.into()), most.max(bias.into())]
        })
    }
}
