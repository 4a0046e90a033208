//! What no split of a layout takes less than.

use std::collections::BTreeSet;

use super::candidate::StageSplit;
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::shape::{Question, Shapes};
use super::stages;
use super::unit::Unit;
use crate::choice::ScheduleName;
use crate::memory::Occupancy;
use crate::stack::ByLayer;

/// Seconds that no child of a unit takes less than which may fit, however its layers are split; or `within_s`, where that
/// is less.
pub(crate) fn least_of_splits_s(questions: &[Question<'_>], unit: &Unit<'_>, within_s: f64) -> f64 {
    let mut least_s = within_s;
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        for under in unit.schedules(question) {
            for index in 0..shapes.first(question).len() {
                least_s = least_of_shape_s((question, unit), shapes, index, under, least_s);
            }
        }
    }
    least_s
}

/// The same of one of its shapes under a schedule.
fn least_of_shape_s(
    (question, unit): (&Question<'_>, &Unit<'_>),
    shapes: &Shapes,
    index: usize,
    (schedule, occupancies): (ScheduleName, &[Vec<Occupancy>]),
    within_s: f64,
) -> f64 {
    let (capacity, choices) = (question.capacity(), &question.choices);
    let case = |shape| unit.case(question, shape, schedule);
    let endless = Most::default();
    // No other choice takes less than the first.
    let first = &shapes.first(question)[index];
    let least_s = stages::least_s(case(first), &choices[0], &endless, within_s);
    if least_s >= within_s {
        return within_s;
    }
    let of = Of::Choice(&choices[0]);
    let is_least = |room: Room<'_>| {
        let most = room.may_hold(of).then(|| room.most(of));
        let of_most = |most| stages::least_s(case(first), &choices[0], &most, within_s);
        most.is_some_and(|most| of_most(most) <= least_s)
    };
    if Room::new(case(first), occupancies, capacity).is_none_or(is_least) {
        return least_s;
    }
    let shape = if choices.len() > 1 {
        &shapes.all(question)[index]
    } else {
        first
    };
    let room = Room::new(case(shape), occupancies, capacity);
    let room = room.expect("there was one of the first choice");
    // How many layers ranks may hold, where all have places.
    let most = |of: Of<'_>| room.may_hold(of).then(|| room.most(of));
    let mut least_s = within_s;
    for sets in choices {
        if stages::least_s(case(shape), sets, &endless, least_s) < least_s
            && let Some(most) = most(Of::Choice(sets))
        {
            least_s = stages::least_s(case(shape), sets, &most, least_s);
        }
    }
    match question.by_layer {
        Some(ByLayer::Each) if choices.len() > 1 => {
            if let Some(most) = most(Of::Any) {
                least_s = stages::least_s(case(shape), &choices[0], &most, least_s);
            }
        }
        Some(ByLayer::Block) if choices.len() > 1 => {
            let set = question.sets.len() - 1;
            for layers in 1..=question.kind_of.len() as u32 {
                let sets = &Sets::First { layers, set };
                // More take longer.
                if stages::least_s(case(shape), sets, &endless, least_s) >= least_s {
                    break;
                }
                if let Some(most) = most(Of::Choice(sets)) {
                    least_s = stages::least_s(case(shape), sets, &most, least_s);
                }
            }
        }
        _ => {}
    }
    least_s
}

/// Splits that may take less than some time and have room.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) splits: BTreeSet<Vec<Vec<u32>>>,
    /// Seconds that none of them takes less than where each layer computes again what it may by itself; of ways to do so some are let
    /// go of.
    pub(crate) by_layer_s: f64,
}

impl Default for Open {
    fn default() -> Self {
        Self {
            splits: BTreeSet::new(),
            by_layer_s: f64::INFINITY,
        }
    }
}

impl Open {
    /// With those of another layout.
    pub(crate) fn add(&mut self, other: Self) {
        self.splits.extend(other.splits);
        self.by_layer_s = self.by_layer_s.min(other.by_layer_s);
    }
}

/// Seconds that one split of a unit takes no less than where each layer computes again what it may by itself, in every shape and
/// under every schedule.
pub(crate) fn by_layer_bound_s(
    questions: &[Question<'_>],
    unit: &Unit<'_>,
    stages: &[Vec<u32>],
) -> f64 {
    let mut least_s = f64::INFINITY;
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        if question.by_layer != Some(ByLayer::Each) {
            continue;
        }
        for (schedule, _) in unit.schedules(question) {
            for shape in shapes.held_under(question, schedule, true) {
                let case = unit.case(question, shape, schedule);
                let split = StageSplit::new(case, stages.to_vec());
                least_s = least_s.min(unit.by_layer_bound_s(case, &split));
            }
        }
    }
    least_s
}

/// All splits of a unit that may take less than `below_s` and have room. None where these are more than `limit`.
pub(crate) fn open_splits(
    questions: &[Question<'_>],
    unit: &Unit<'_>,
    (below_s, limit): (f64, usize),
) -> Option<Open> {
    let mut open = Open::default();
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        let each = shapes.first(question).iter().enumerate();
        for ((index, first), (schedule, occupancies)) in
            each.flat_map(|shape| unit.schedules(question).map(move |under| (shape, under)))
        {
            let case = |shape| unit.case(question, shape, schedule);
            let least_s = |shape, sets: &Sets| {
                let endless = &Most::default();
                stages::least_s(case(shape), sets, endless, below_s)
            };
            // No other choice takes less than the first.
            if least_s(first, &question.choices[0]) >= below_s {
                continue;
            }
            let shape = if question.choices.len() > 1 {
                &shapes.all(question)[index]
            } else {
                first
            };
            let room = Room::new(case(shape), occupancies, question.capacity());
            let cuts = |sets: &Sets, of: Of<'_>| {
                let most = match &room {
                    Some(room) if !room.may_hold(of) => return Some(Vec::new()),
                    Some(room) => room.most(of),
                    None => Most::default(),
                };
                stages::open_cuts(case(shape), sets, &most, (below_s, limit))
            };
            for sets in &question.choices {
                if least_s(shape, sets) < below_s {
                    open.splits.extend(cuts(sets, Of::Choice(sets))?);
                }
            }
            match question.by_layer.filter(|_| question.choices.len() > 1) {
                Some(ByLayer::Each) => {
                    let held = &shapes.held_under(question, schedule, true)[index];
                    for cut in cuts(&question.choices[0], Of::Any)? {
                        let split = StageSplit::new(case(held), cut);
                        let bound_s = unit.by_layer_bound_s(case(held), &split);
                        if bound_s < below_s {
                            open.by_layer_s = open.by_layer_s.min(bound_s);
                            open.splits.insert(split.stages);
                        }
                    }
                }
                Some(ByLayer::Block) => {
                    let set = question.sets.len() - 1;
                    for layers in 1..=question.kind_of.len() as u32 {
                        let sets = Sets::First { layers, set };
                        // More take longer.
                        if least_s(shape, &sets) >= below_s {
                            break;
                        }
                        open.splits.extend(cuts(&sets, Of::Choice(&sets))?);
                    }
                }
                None => {}
            }
            if open.splits.len() > limit {
                return None;
            }
        }
    }
    Some(open)
}
