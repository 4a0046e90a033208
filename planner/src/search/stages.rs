//! Cuts of layers into stages of which a rank has one: what no cut takes less than, and one that has room.

use std::ops::Range;

use moefold_profiles::units::Span;

use super::candidate::{Case, StageSplit, layer_weights, message, nanoseconds, weights};
use super::floor::floor_s;
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::shape::Kind;
use crate::memory::Occupancy;
use crate::partition::{self, Weights};

/// What stages weigh under some recompute sets beside the least of their layers: first layers that compute more again than
/// those behind. Nothing that a rank may not hold has a weight.
fn more<'q>(
    case: Case<'q>,
    sets: &Sets,
    most: &'q Most,
) -> impl Fn(usize, Range<usize>) -> Option<u64> + 'q {
    let first = match *sets {
        Sets::First { layers, set } => Some((layers as usize, set)),
        _ => None,
    };
    let mut before = vec![0];
    for &kind in &case.question.kind_of {
        let kind = &case.shape.kinds[kind];
        let more_s = first.map_or(0.0, |(_, set)| kind.backward_s[set] - kind.backward_s[0]);
        let more = nanoseconds(more_s.max(0.0));
        before.push(more.saturating_add(before[before.len() - 1]));
    }
    move |stage, layers| {
        let to = first.map_or(layers.start, |(first, _)| {
            layers.end.min(layers.start + first)
        });
        most.may_hold(stage, &layers)
            .then(|| before[to] - before[layers.start])
    }
}

/// Whether nothing but its layers says how long a stage takes, and what of a step comes before it: a rank has one stage, whose
/// backward passes are whole and hide nothing.
fn stages_add_up(case: Case<'_>) -> bool {
    let question = case.question;
    let hides = question.stack.hides(question.overlap).expert_alltoall;
    case.layout.vpp() == 1 && !case.schedule.divides_backward() && !hides
}

/// Seconds that no split of a layout takes less than under some recompute sets where ranks may hold so many layers at most; or
/// `within_s`, where that is less.
pub(crate) fn least_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let floor = floor_s(question, layout, &shape.work_under(question, sets));
    if stages_add_up(case) && floor < within_s {
        floor.max(least_of_cuts_s(case, sets, most, within_s))
    } else {
        floor.min(within_s)
    }
}

/// The same where `layers` at the beginning of each stage take some set and the others the first; or `within_s`, where
/// that is less. A rank of more layers than take so long by themselves takes longer, and of one that has no more, no less
/// than so great a share of its layers is computed again.
pub(crate) fn least_of_block_s(
    case: Case<'_>,
    (layers, set): (u32, usize),
    most: &Most,
    within_s: f64,
) -> f64 {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let kinds = || question.kind_of.iter().map(|&kind| &shape.kinds[kind]);
    let least = |seconds: &dyn Fn(&Kind) -> f64| kinds().map(seconds).fold(f64::INFINITY, f64::min);
    let lightest_s = least(&|kind| kind.least_s(0)[1]) * f64::from(layout.microbatches());
    let many = (within_s / lightest_s).max(1.0);
    let again_s = least(&|kind| kind.backward_s[set] - kind.backward_s[0]).max(0.0);
    let more_s = again_s * (f64::from(layers) / many).min(1.0);
    let floor = floor_s(question, layout, &shape.work_and(question, more_s, set));
    let least = if stages_add_up(case) {
        least_of_cuts_s(case, &Sets::First { layers, set }, most, within_s)
    } else {
        0.0
    };
    floor.max(least).min(within_s)
}

/// Seconds that no cut into stages takes less than, whatever else a step has than its layers; or `within_s`, where that is
/// less.
fn least_of_cuts_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    let layers = layer_weights(case, sets);
    let forward: Vec<u64> = {
        let kinds = case.question.kind_of.iter();
        kinds
            .map(|&kind| nanoseconds(case.shape.kinds[kind].forward_s))
            .collect()
    };
    let weights = weights(case, &layers, sets);
    let forward = Weights {
        layers: &forward,
        first: nanoseconds(case.shape.embedding.forward_s),
        last: nanoseconds(case.shape.head.forward_s),
        ..weights
    };
    let (stages, microbatches) = (case.layout.stages(), case.layout.microbatches());
    // Layers and ends are rounded to nanoseconds each, stages as a whole: by one at most in each pass through them.
    let passes = 3 + u64::from(microbatches) + 2 * u64::from(stages);
    let rounded = (2 * layers.len() as u64 + 2).saturating_mul(passes);
    let cap = nanoseconds(within_s).saturating_add(rounded);
    let more = more(case, sets, most);
    let message = message(case).map_or(0.0, |message| {
        case.question.costs.collective(&message).time.0
    });
    let stack = &case.question.stack;
    let hop = (
        nanoseconds(message),
        stack.sends_beside(case.question.overlap, 1),
    );
    let of = (stages, microbatches);
    let least = partition::least_of_1f1b(&weights, &forward, hop, of, cap, more);
    least.map_or(within_s, |least| {
        let least_s = Span(least.saturating_sub(rounded)).seconds().0;
        least_s.min(within_s)
    })
}

/// Tries of a split with room: a rank that has none for its layers has one less in the next.
const TRIES: usize = 8;

/// A split whose ranks have room under some recompute sets: the one whose heaviest stage is least of the cuts that a floor of
/// memory allows, with a layer less on each rank that turns out to be too full, until none is. None where none is found in a
/// few tries, or would take `below_s` or longer. Of layouts whose ranks have one stage each.
pub(crate) fn split_with_room(
    case: Case<'_>,
    sets: &Sets,
    (room, occupancies): (&Room<'_>, &[Vec<Occupancy>]),
    below_s: f64,
) -> Option<StageSplit> {
    let Case {
        question, layout, ..
    } = case;
    let capacity = question.capacity();
    let mut most = room.most(Of::Choice(sets));
    let layers = layer_weights(case, sets);
    let weights = weights(case, &layers, sets);
    let cap = nanoseconds(below_s) / u64::from(layout.microbatches());
    let cap = cap.saturating_add(layers.len() as u64);
    for _ in 0..TRIES {
        let more = more(case, sets, &most);
        let stages = partition::within(&weights, layout.stages(), cap, more)?;
        let split = StageSplit::new(case, stages);
        if split.bound(case, sets).seconds().0 >= below_s {
            return None;
        }
        let memory = split.memory(case, sets, occupancies);
        let full = (0..memory.len()).filter(|&rank| memory[rank].total() > capacity);
        let full: Vec<usize> = full.collect();
        if full.is_empty() {
            return Some(split);
        }
        for rank in full {
            let fewer = split.stages[rank].len().checked_sub(1)?;
            most.lower(rank, fewer as u64);
        }
    }
    None
}
