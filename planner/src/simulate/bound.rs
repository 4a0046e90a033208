//! A lower bound of [`super::simulate`] in closed form, for pruning a search.

use std::cmp::Reverse;

use moefold_profiles::units::Span;

use super::StageTimes;
use crate::layout::Places;

/// A time that no schedule of stages in some places over `microbatches` can beat, whatever its order.
///
/// For every pipeline rank: nothing reaches its first stage before one forward pass through all
/// stages before it; then it has all of its own work to do; and its last pass is the backward of its
/// first stage, behind which the stages before it still have theirs. After the slowest rank's
/// gradients are reduced comes the slowest optimizer step. Besides, one microbatch has to pass all
/// stages both ways. With equal stages and free messages the bound of 1F1B and of the interleaved
/// schedule is their exact time.
///
/// Where backward passes are divided ([`StageTimes::weight`]), the last of a rank that stages before it wait for is
/// the gradient of an input: gradients of weights may come after it, but those of that microbatch on the first
/// rank. Where passes are combined, all that can be hidden of exchanges is, and a divided pass is as short as can be.
pub fn lower_bound(places: Places, microbatches: u32, times: &StageTimes) -> Span {
    times.check(places.pp(), places.stages());
    let (pp, stages) = (places.pp() as usize, places.stages() as usize);
    let of_rank = |rank: usize| places.of_rank(rank as u32).map(|stage| stage as usize);
    // Of a boundary that a message crosses, by the stage before it.
    let hop = |s: usize| {
        let is_sent = places.is_sent(s as u32);
        if is_sent { times.hop[s] } else { Span::ZERO }
    };
    let forward = |s: usize| times.forward[s].min(times.first_forward[s]);
    // What stages before wait for of a backward pass.
    let backward = |s: usize| {
        let waited = times.backward[s].min(times.last_backward[s]) - times.weight(s);
        waited - times.alone(s).min(waited)
    };
    let reduce = |rank: usize| of_rank(rank).map(|s| times.reduce[s]).sum::<Span>();
    let rest = u64::from(microbatches) - 1;
    let mut reduced = Span::ZERO;
    let (mut head, mut tail) = (Span::ZERO, Span::ZERO);
    for rank in 0..pp {
        let (mut work, mut later) = (Span::ZERO, Span::ZERO);
        for s in of_rank(rank) {
            later += times.weight(s) * u64::from(microbatches);
            work += times.first_forward[s] + times.forward[s] * rest;
            work += times.last_backward[s] + times.backward[s] * rest;
            work = work - (times.most(s) * u64::from(microbatches)).min(work);
            if !times.hop_overlapped {
                let before = s.checked_sub(1).map_or(Span::ZERO, hop);
                work += (hop(s) + before) * u64::from(microbatches);
            }
        }
        // The last message of the rank is part of its work where sending holds it up.
        let last_hop = match rank.checked_sub(1) {
            Some(before) if times.hop_overlapped => times.hop[before],
            _ => Span::ZERO,
        };
        let passed_down = head + (work - later) + last_hop + tail + times.weight(0) + reduce(0);
        reduced = reduced.max(passed_down).max(head + work + reduce(rank));
        if rank + 1 < pp {
            head += forward(rank) + times.hop[rank];
            let sent = match rank.checked_sub(1) {
                Some(before) => times.hop[before],
                None => Span::ZERO,
            };
            tail += backward(rank) + sent;
        }
    }
    let there: Span = (0..stages).map(forward).sum();
    let back: Span = (0..stages).map(backward).sum();
    let hops: Span = (0..stages).map(hop).sum();
    reduced = reduced.max(there + back + hops * 2 + times.weight(0) + reduce(0));
    let slowest = times.optimizer.iter().min_by_key(|&&span| Reverse(span));
    reduced + slowest.copied().unwrap_or_default()
}
