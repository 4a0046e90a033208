//! The tuples of degrees a search considers, and the legal tuple nearest to an illegal one.
//!
//! Every tuple whose two grids tile the ranks is listed, legal for the model or not: the caller asks
//! [`Rules`] and counts the refusals. Nothing is priced here.

use std::ops::ControlFlow;

use super::Rules;
use crate::layout::nearest::product;
use crate::layout::{self, Batch, Degrees, PartialDegrees};
use crate::model::Model;

/// The most tokens of a microbatch that is considered while other degrees are open. Far past the size that
/// fills any device's matrix units, more gains little and costs memory.
pub const MAX_MICROBATCH_TOKENS: u64 = 1 << 16;

/// Tuples that are judged together.
pub const TOGETHER: usize = 1 << 11;

/// Which virtual stages and microbatches are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variants {
    /// Those of a [`space`].
    Few,
    /// All.
    All,
}

/// All tuples of degrees for a job, in a fixed order, that agree with the pins.
///
/// `tp`, `cp`, `pp`, `ep` and `etp` are divisors of `gpus` such that both grids tile it. `vpp` is 1
/// without a pipeline; with one, of all values that lead to the same largest stage the smallest is
/// taken, since more cut about the same work into more messages. `mbs` are the divisors of a
/// replica's share of the batch up to [`MAX_MICROBATCH_TOKENS`]. Where all other degrees are pinned, every value of
/// both is listed. A pin replaces the list of its axis and is judged only against the ranks. Where the pins by
/// themselves cannot tile them, one tuple is listed, with 1 for what is left open, so that the caller has a refusal to
/// show.
pub fn space(
    model: &Model,
    gpus: u32,
    batch: &Batch,
    pins: &PartialDegrees,
) -> impl Iterator<Item = Degrees> + use<> {
    tuples(model, gpus, batch, pins, Variants::Few)
}

/// The tuples of degrees of a [`space`], or with every value of virtual stages and microbatches, as it lists them where ranks are named.
pub fn tuples(
    model: &Model,
    gpus: u32,
    batch: &Batch,
    pins: &PartialDegrees,
    variants: Variants,
) -> impl Iterator<Item = Degrees> + use<> {
    let (layers, batch, pins) = (model.layers.len() as u32, *batch, *pins);
    let whole = variants == Variants::All || pins.names_ranks();
    let axis = divisors(gpus.into(), gpus);
    let pinned = pins.or_one(gpus);
    let impossible = layout::grids(&pinned, &mut Vec::new()).is_none();
    let grids = grids(gpus, &axis, [pins.tp, pins.cp], pins.pp, pins.dp);
    let most_tokens = if whole {
        u64::MAX
    } else {
        MAX_MICROBATCH_TOKENS
    };
    let tuples = grids.into_iter().flat_map(move |attention| {
        let [tp, cp, pp, dp] = attention;
        let experts = self::grids(gpus, &axis, [pins.etp, pins.ep], Some(pp), pins.edp);
        let vpps = pins
            .vpp
            .map_or_else(|| virtual_stages(layers, pp, whole), |vpp| vec![vpp]);
        let sizes = pins.mbs.map_or_else(
            || microbatch_sizes(&batch, dp, most_tokens),
            |mbs| vec![mbs],
        );
        let mut tuples = Vec::with_capacity(experts.len() * vpps.len() * sizes.len());
        for [etp, ep, ..] in experts {
            for &vpp in &vpps {
                tuples.extend(sizes.iter().map(|&mbs| Degrees {
                    gpus,
                    tp,
                    cp,
                    pp,
                    vpp,
                    ep,
                    etp,
                    mbs,
                }));
            }
        }
        tuples
    });
    tuples.chain(impossible.then_some(pinned))
}

/// The legal values of some pinned degrees that are closest to theirs, in doublings and halvings
/// over all of them; `None` where nothing is pinned, the ranks allow none, or `go_on` ends it, which is asked before each
/// [`TOGETHER`] candidates. Enumerates the space, so it is for error messages.
pub fn nearest_legal(
    rules: &Rules,
    model: &Model,
    pins: &PartialDegrees,
    gpus: u32,
    go_on: impl Fn() -> ControlFlow<()>,
) -> Option<PartialDegrees> {
    if *pins == PartialDegrees::default() {
        return None;
    }
    let rules = rules.of_degrees();
    let mut best: Option<(f64, PartialDegrees)> = None;
    let mut broken = Vec::new();
    let all = space(model, gpus, rules.batch(), &PartialDegrees::default());
    for (number, candidate) in all.enumerate() {
        if number.is_multiple_of(TOGETHER) && go_on().is_break() {
            return None;
        }
        // Values without replicas are at least as close, and cost no proof.
        let far = pins.distance(&PartialDegrees::exactly(&candidate));
        if best.is_none_or(|(least, _)| far < least)
            && let Some(layout) = rules.judge(&candidate, true, &mut broken)
        {
            let values = pins.values_of(&layout);
            let far = pins.distance(&values);
            if best.is_none_or(|(least, _)| far < least) {
                best = Some((far, values));
            }
        }
    }
    best.map(|(_, values)| values)
}

/// All `[a, b, pp, replicas]` of product `gpus`, each from the axis' values or its pin.
fn grids(
    gpus: u32,
    axis: &[u32],
    [pin_a, pin_b]: [Option<u32>; 2],
    pin_pp: Option<u32>,
    pin_replicas: Option<u32>,
) -> Vec<[u32; 4]> {
    let values = |pin: &Option<u32>| pin.as_ref().map_or(axis.to_vec(), |&value| vec![value]);
    let (all_a, all_b, all_pp) = (values(&pin_a), values(&pin_b), values(&pin_pp));
    let mut found = Vec::new();
    for &pp in &all_pp {
        for &a in &all_a {
            for &b in &all_b {
                let part = product(&[a, b, pp]);
                if part == 0 || !u64::from(gpus).is_multiple_of(part) || gpus == 0 {
                    continue;
                }
                let replicas = (u64::from(gpus) / part) as u32;
                if pin_replicas.is_none_or(|pin| pin == replicas) {
                    found.push([a, b, pp, replicas]);
                }
            }
        }
    }
    found
}

/// For each reachable size of the largest stage, the least virtual stages a rank that reach it, or all of them. The
/// embedding and the head may have stages of their own.
fn virtual_stages(layers: u32, pp: u32, all: bool) -> Vec<u32> {
    if pp == 1 {
        return vec![1];
    }
    let largest = |vpp: u32| layers.div_ceil(pp.saturating_mul(vpp));
    let most = (layers.saturating_add(2) / pp.max(1)).max(1);
    (1..=most)
        .filter(|&vpp| all || vpp == 1 || largest(vpp) < largest(vpp - 1))
        .collect()
}

/// Sequences of a microbatch of so many tokens at most that divide a replica's share of the batch; 1 where nothing does.
fn microbatch_sizes(batch: &Batch, dp: u32, most_tokens: u64) -> Vec<u32> {
    let share = batch.global_batch / u64::from(dp.max(1));
    let most = (most_tokens / batch.seq_len.max(1)).clamp(1, u32::MAX.into());
    divisors(share.max(1), most as u32)
}

/// The divisors of a number up to one, ascending; none of zero.
fn divisors(number: u64, most: u32) -> Vec<u32> {
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for low in (1..=u64::from(most)).take_while(|low| *low <= number / low) {
        if number.is_multiple_of(low) {
            small.push(low as u32);
            let high = number / low;
            if high != low && high <= most.into() {
                large.push(high as u32);
            }
        }
    }
    small.extend(large.into_iter().rev());
    small
}
