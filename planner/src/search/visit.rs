//! Visiting a unit: of its children the best that fits is found.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::floor::floor_s;
use super::least::least_of_splits_s;
use super::room::Of;
use super::shape::{Question, Shape, Shapes};
use super::trial::{Trial, children, splits};
use super::unit::{Bounds, Found, Outcome, Unit, beaten};
use super::watch::Looks;
use crate::choice::Objective;
use crate::stack::ByLayer;

/// Units looked at together; fixed, so that results do not depend on the threads there are.
pub(crate) const BATCH: usize = 32;

/// Tries the children of a unit under each question, and of each under its schedules: those of the first choice of
/// recompute sets, and where recomputing more may still win, for it takes no less time, those of the others, and last a
/// choice by layer. A question is left out where no layout under one above it can win. Whether the search goes on is asked
/// before whatever takes long. By question, what was `known` of its places under as much memory or more is not asked again.
pub(crate) fn visit<'a>(
    questions: &[Question<'_>],
    unit: &'a Unit<'a>,
    limit: f64,
    looks: &Looks<'_>,
    known: &[Bounds],
) -> Outcome<'a> {
    let mut outcome = Outcome {
        best: None,
        priced: 0,
        memory: 0,
        feasible: Vec::new(),
        left_s: f64::INFINITY,
        bounds: known.to_vec(),
        stopped: false,
    };
    outcome.bounds.resize(questions.len(), Bounds::new());
    if try_all(questions, unit, limit, looks, &mut outcome).is_break() {
        outcome.left_s = outcome.left_s.min(unit.floor);
        outcome.stopped = true;
    }
    looks.seen(1);
    outcome
}

fn try_all<'a>(
    questions: &[Question<'_>],
    unit: &'a Unit<'a>,
    limit: f64,
    looks: &Looks<'_>,
    outcome: &mut Outcome<'a>,
) -> ControlFlow<()> {
    looks.begin()?;
    // By question: seconds that no child takes less than.
    let mut floors_s: Vec<f64> = Vec::with_capacity(questions.len());
    for (number, (question, shapes)) in questions.iter().zip(unit.shapes).enumerate() {
        let objective = question.options.objective;
        let by_time = objective != Objective::Memory;
        let beaten = beaten(outcome, objective, limit);
        let above = question.above.iter().map(|&above| floors_s[above]);
        let above = above.fold(0.0, f64::max);
        if by_time && above >= beaten {
            floors_s.push(above);
            outcome.left_s = outcome.left_s.min(above);
            continue;
        }
        let is_new = outcome.bounds[number].is_empty();
        if by_time && question.limit.is_some() && is_new && !may_fit(question, unit, shapes) {
            // No time is told, which may rule out a question that follows.
            floors_s.push(0.0);
            continue;
        }
        let floor = |shape: &Shape| {
            if by_time {
                floor_s(question, unit.layout, &shape.work(question))
            } else {
                unit.floor
            }
        };
        let floors: Vec<f64> = shapes.first(question).iter().map(floor).collect();
        floors_s.push(floors.iter().copied().fold(f64::INFINITY, f64::min));
        let mut bounds = std::mem::take(&mut outcome.bounds[number]);
        let mut trial = Trial {
            question,
            number,
            unit,
            shapes,
            floors,
            limit,
            looks,
            left_s: f64::INFINITY,
            known: &bounds,
            bounds: Bounds::new(),
            state: BTreeMap::new(),
        };
        let tried = unit.schedules(question).try_for_each(|schedule| {
            looks.begin()?;
            let fits = trial.fitting(schedule.0, trial.beaten(outcome));
            if fits.iter().any(|shape| shape.contains(&true)) {
                trial.under(schedule, &fits, outcome)?;
            }
            ControlFlow::Continue(())
        });
        outcome.left_s = outcome.left_s.min(trial.left_s);
        let state = trial.state.values();
        outcome.priced += state.clone().filter(|&&priced| priced).count() as u64;
        outcome.memory += state.filter(|&&priced| !priced).count() as u64;
        let found = trial.bounds;
        bounds.extend(found);
        outcome.bounds[number] = bounds;
        tried?;
    }
    ControlFlow::Continue(())
}

/// Whether a unit may fit under some recompute sets, by what it holds alone: under less and less memory most of what is left
/// does not.
fn may_fit(question: &Question<'_>, unit: &Unit<'_>, shapes: &Shapes) -> bool {
    let capacity = question.capacity();
    unit.schedules(question).any(|(schedule, _)| {
        let mut each = shapes.untimed(question).iter();
        each.any(|shape| {
            let case = unit.case(question, shape, schedule);
            let room = unit.room(case, capacity);
            room.is_none_or(|room| room.may_hold(Of::Any))
        })
    })
}

/// Seconds that no child of a unit takes less than: of all its schedules, splits and shapes under the choice of
/// recompute sets that takes least.
pub(crate) fn split_bound_s(question: &Question<'_>, unit: &Unit<'_>, shapes: &Shapes) -> f64 {
    let first = shapes.first(question);
    let fits = vec![vec![true]; first.len()];
    unit.schedules(question)
        .filter_map(|scheduled| {
            let splits = splits(question, unit, shapes, &fits, scheduled.0);
            let shape = |index: usize| &first[index];
            let found = children(question, unit, scheduled, &splits, None, (&shape, 0..1));
            found.first().map(|child| child.bound_s)
        })
        .fold(f64::INFINITY, f64::min)
}

/// What the layout of a plan could still gain, at most, as a fraction of its step: from another split, and from more ways to
/// recompute by layer where layers may. Nothing where it is known to be the best; `None` where there is no bound.
pub(crate) fn gap_of(found: &Found<'_>, questions: &[Question<'_>]) -> Option<f64> {
    let question = &questions[found.question];
    if !question.splits.is_empty() {
        // Of some splits nobody asks what others gain.
        return None;
    }
    if question.options.objective == Objective::Memory {
        return found.split_is_whole(question).then_some(0.0);
    }
    if found.split_is_whole(question) && question.by_layer != Some(ByLayer::Each) {
        return Some(0.0);
    }
    let bound_s = least_of_splits_s(questions, found.unit, found.step_s);
    Some((1.0 - bound_s / found.step_s).max(0.0))
}
