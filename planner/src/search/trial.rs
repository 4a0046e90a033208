//! [`Trial`]: the children of a unit under one question, tried in the order of their bounds.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, GIB};

use super::candidate::{self, Case, PARTS, StageSplit};
use super::floor::floor_s;
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::schedules::Simulated;
use super::shape::{Question, Shape, Shapes};
use super::stages::{self, BEYOND};
use super::unit::{Bounds, Found, Outcome, Place, Unit, beaten, peak};
use super::watch::Looks;
use crate::choice::{Objective, ScheduleName};
use crate::memory::Occupancy;
use crate::stack::ByLayer;

/// A child that may still win.
pub(crate) struct Child {
    pub(crate) bound_s: f64,
    shape: usize,
    /// Among the choices of recompute sets; one past them is a choice by layer.
    choice: usize,
    split: usize,
}

/// By shape and choice of recompute sets, whether the layers may fit, cut in any way, where that is known before they
/// are; the last choice of each is one by layer.
pub(crate) type Fits = [Vec<bool>];

/// Splits under each shape that may still win.
pub(crate) fn splits(
    question: &Question<'_>,
    unit: &Unit<'_>,
    shapes: &Shapes,
    fits: &Fits,
    schedule: ScheduleName,
) -> Vec<Vec<StageSplit>> {
    let known = shapes.cuts(question).iter();
    let shapes = shapes.first(question).iter();
    shapes
        .zip(known)
        .zip(fits)
        .map(|((shape, known), fits)| {
            if fits.contains(&true) {
                let case = unit.case(question, shape, schedule);
                candidate::splits(case, known)
            } else {
                Vec::new()
            }
        })
        .collect()
}

/// Children under some choices of recompute sets, in the order of their bounds.
pub(crate) fn children<'s>(
    question: &Question<'_>,
    unit: &Unit<'_>,
    (schedule, occupancies): (ScheduleName, &[Vec<Occupancy>]),
    splits: &[Vec<StageSplit>],
    fits: Option<&Fits>,
    (shape, choices): (&dyn Fn(usize) -> &'s Shape, Range<usize>),
) -> Vec<Child> {
    let mut children = Vec::new();
    for (shape_index, splits) in splits.iter().enumerate() {
        for (split_index, split) in splits.iter().enumerate() {
            for choice in choices.clone() {
                if fits.is_some_and(|fits| !fits[shape_index][choice]) {
                    continue;
                }
                let case = unit.case(question, shape(shape_index), schedule);
                let bound = match question.choices.get(choice) {
                    Some(sets) => split.bound(case, sets),
                    None => match split.by_layer_bound(case, occupancies) {
                        Some(bound) => bound,
                        None => continue,
                    },
                };
                children.push(Child {
                    bound_s: bound.seconds().0,
                    shape: shape_index,
                    choice,
                    split: split_index,
                });
            }
        }
    }
    children.sort_by(|a, b| {
        let places = (a.shape, a.choice, a.split).cmp(&(b.shape, b.choice, b.split));
        a.bound_s.total_cmp(&b.bound_s).then(places)
    });
    children
}

/// What trying the children of a unit takes.
pub(crate) struct Trial<'q, 'a> {
    pub(crate) question: &'q Question<'q>,
    /// Which of all questions.
    pub(crate) number: usize,
    pub(crate) unit: &'a Unit<'a>,
    pub(crate) shapes: &'a Shapes,
    /// No child under each shape scores less.
    pub(crate) floors: Vec<f64>,
    pub(crate) limit: f64,
    pub(crate) looks: &'q Looks<'q>,
    /// Seconds that no child takes less than which may fit and was left out.
    pub(crate) left_s: f64,
    /// What is known already, under as much memory or more.
    pub(crate) known: &'q Bounds,
    /// What is found.
    pub(crate) bounds: Bounds,
    /// Children that were counted, and whether they fit.
    pub(crate) state: BTreeMap<Place, bool>,
}

/// A schedule with its occupancies, and what it is simulated by where it has been.
struct Scheduled<'a> {
    name: ScheduleName,
    occupancies: &'a [Vec<Occupancy>],
    simulated: Option<Simulated>,
}

impl<'a> Trial<'_, 'a> {
    /// What a child must score less than.
    pub(crate) fn beaten(&self, outcome: &Outcome<'_>) -> f64 {
        beaten(outcome, self.question.options.objective, self.limit)
    }

    /// No child of a place that was left out takes less, nor one that may still be found there under less memory. How layers
    /// choose one by one may change with every byte, so of them nothing is kept.
    fn leave(&mut self, place: Place, seconds: f64) {
        if place.2 < self.question.choices.len() {
            self.bound(place, seconds);
        }
        self.left_s = self.left_s.min(seconds);
    }

    /// No child of a place takes less under as much memory or less.
    fn bound(&mut self, place: Place, seconds: f64) {
        let found = self.bounds.entry(place).or_insert(seconds);
        *found = found.min(seconds);
    }

    /// Which children under a schedule may fit and score less than what is beaten, whatever the split into stages.
    /// Those that do not fit are counted.
    pub(crate) fn fitting<'s>(&'s mut self, name: ScheduleName, beaten: f64) -> Vec<Vec<bool>> {
        let (question, unit): (&'s Question<'_>, &'s Unit<'_>) = (self.question, self.unit);
        let all_shapes: &'s Shapes = self.shapes;
        let by_time = question.options.objective != Objective::Memory;
        let all = question.capacity();
        // What has to be less than the best takes less.
        let capacity = if by_time {
            all
        } else {
            all.min(Bytes((beaten * GIB as f64) as u64))
        };
        let choices = question.choices.len();
        let tried = choices + usize::from(question.by_layer.is_some());
        let room = |shape: &'s Shape| {
            let case = unit.case(question, shape, name);
            unit.room(case, capacity)
        };
        let of_shape = |(index, first): (usize, &'s Shape)| {
            if by_time && self.floors[index] >= beaten {
                self.left_s = self.left_s.min(self.floors[index]);
                return vec![false; choices + 1];
            }
            let known = |choice| self.known.get(&(name, index, choice)).copied();
            let known_s = |choice| known(choice).unwrap_or(0.0);
            let is_open = |choice: usize| !by_time || known_s(choice) < beaten;
            let closed_s = (0..=choices)
                .map(known_s)
                .filter(|known_s| *known_s >= beaten);
            self.left_s = closed_s.fold(self.left_s, f64::min);
            if !(0..tried).any(is_open) {
                return vec![false; choices + 1];
            }
            let may_hold = |room: Room<'_>| room.may_hold(Of::Choice(&question.choices[0]));
            if room(first).is_none_or(may_hold) {
                return (0..=choices).map(is_open).collect();
            }
            let shape = all_shapes.all(question, index);
            let room = room(shape).expect("there was one of the first choice");
            if choices == 1 || !room.may_hold(Of::Any) {
                if capacity == all {
                    let full = (0..tried).map(|choice| (name, index, choice));
                    self.state.extend(full.clone().map(|place| (place, false)));
                    self.bounds.extend(full.map(|place| (place, f64::INFINITY)));
                }
                return vec![false; choices + 1];
            }
            let each = question.choices.iter().enumerate();
            let each = each.map(|(choice, sets)| {
                if !is_open(choice) {
                    return false;
                }
                if !room.may_hold(Of::Choice(sets)) {
                    if capacity == all {
                        let place = (name, index, choice);
                        self.state.insert(place, false);
                        self.bounds.insert(place, f64::INFINITY);
                    }
                    return false;
                }
                !by_time || {
                    let work = shape.work_under(question, sets);
                    let floor = floor_s(question, unit.layout, &work);
                    if floor >= beaten {
                        self.left_s = self.left_s.min(floor);
                    }
                    floor < beaten
                }
            });
            each.chain([is_open(choices)]).collect()
        };
        let shapes = all_shapes.first(question).iter();
        shapes.enumerate().map(of_shape).collect()
    }

    /// Tries the children under one schedule that may fit. Where it divides backward passes, their memory is asked for
    /// when a bound does not rule them out.
    pub(crate) fn under(
        &mut self,
        (name, occupancies): (ScheduleName, &'a [Vec<Occupancy>]),
        fits: &Fits,
        outcome: &mut Outcome<'a>,
    ) -> ControlFlow<()> {
        let (question, unit) = (self.question, self.unit);
        let mut schedule = Scheduled {
            name,
            occupancies,
            simulated: None,
        };
        let splits = splits(question, unit, self.shapes, fits, name);
        let children = |fits: Option<&Fits>, shape: &dyn Fn(usize) -> &'a Shape, choices| {
            let from = (name, occupancies);
            children(question, unit, from, &splits, fits, (shape, choices))
        };
        let (shapes, choices) = (self.shapes, question.choices.len());
        let first = |index: usize| &shapes.first(question)[index];
        let held = |all| move |index| shapes.held_under(question, name, (all, index));
        let tried = children(Some(fits), &first, 0..1);
        self.run(&mut schedule, &held(false), &splits, &tried, outcome)?;
        if choices == 1 {
            return ControlFlow::Continue(());
        }
        // Where the first choice cannot win no other can.
        let tried = children(None, &first, 0..1);
        let bound_s = tried.first().map(|child| child.bound_s);
        let beaten = self.beaten(outcome);
        let by_time = question.options.objective != Objective::Memory;
        if let Some(bound_s) = bound_s.filter(|bound_s| by_time && *bound_s >= beaten) {
            self.left_s = self.left_s.min(bound_s);
        } else if bound_s.is_some() {
            let all = |index| shapes.all(question, index);
            let others = children(Some(fits), &all, 1..choices);
            self.run(&mut schedule, &held(true), &splits, &others, outcome)?;
            if question.by_layer.is_some() {
                let by_layer = children(Some(fits), &held(true), choices..choices + 1);
                self.run(&mut schedule, &held(true), &splits, &by_layer, outcome)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Tries children in the order of their bounds. Where the layers of one have no room as they are split, another split
    /// is looked for that has it.
    fn run(
        &mut self,
        schedule: &mut Scheduled<'a>,
        shape: &dyn Fn(usize) -> &'a Shape,
        splits: &[Vec<StageSplit>],
        children: &[Child],
        outcome: &mut Outcome<'a>,
    ) -> ControlFlow<()> {
        let (question, unit) = (self.question, self.unit);
        let by_time = question.options.objective != Objective::Memory;
        let may_move = by_time
            && unit.layout.pp() > 1
            && question.options.stages.is_none()
            && question.splits.is_empty();
        let mut moved = BTreeSet::new();
        for child in children {
            let place = (schedule.name, child.shape, child.choice);
            if by_time && child.bound_s >= self.beaten(outcome) {
                self.leave(place, child.bound_s);
                continue;
            }
            self.looks.begin()?;
            let (shape, split) = (shape(child.shape), &splits[child.shape][child.split]);
            let case = unit.case(question, shape, schedule.name);
            let by_layer = child.choice == question.choices.len();
            // First layers of stages compute again; what all of these take at least is kept below.
            let firsts = by_layer && may_move && question.by_layer == Some(ByLayer::Block);
            let mut bound_s = child.bound_s;
            let sets = question.choices.get(child.choice).cloned().or_else(|| {
                let asked = (schedule.occupancies, self.beaten(outcome));
                self.by_layer((case, split), asked, &mut bound_s)
            });
            let tried = sets.map(|sets| {
                self.one(
                    (&mut *schedule, shape),
                    place,
                    Cow::Borrowed(split),
                    sets,
                    outcome,
                )
            });
            let has_room = tried == Some(Ok(()));
            let mut full = tried.and_then(Result::err).filter(|_| !by_layer);
            if !has_room {
                self.state.entry(place).or_insert(false);
            }
            if has_room && !firsts && (may_move || question.by_layer.is_some()) {
                // A split that has room where there is less of it takes about as long, as do more layers that compute again.
                self.leave(place, bound_s);
            }
            if !may_move || (has_room && !by_layer) || !moved.insert(place) {
                continue;
            }
            let Some(room) = unit.room(case, question.capacity()) else {
                self.leave(place, child.bound_s);
                continue;
            };
            let each: Vec<Sets> = match question.choices.get(child.choice) {
                Some(sets) => vec![sets.clone()],
                None if firsts => {
                    let each = splits[child.shape].iter();
                    let each = each.map(|split| split.firsts(question));
                    each.max_by_key(Vec::len).unwrap_or_default()
                }
                None => Vec::new(),
            };
            let mut least_s = if each.is_empty() { 0.0 } else { f64::INFINITY };
            for sets in each {
                self.looks.begin()?;
                let beaten = self.beaten(outcome);
                let mut any_s = 0.0;
                if firsts {
                    if !room.may_hold(Of::Choice(&sets)) {
                        continue;
                    }
                    any_s = stages::least_s(case, &sets, &Most::default(), BEYOND * beaten);
                    if any_s >= beaten {
                        // Those that follow take longer.
                        least_s = least_s.min(any_s);
                        break;
                    }
                }
                let room = (&room, schedule.occupancies);
                let from = (split, full.take());
                let own_s = match stages::split_with_room(case, &sets, from, room, beaten) {
                    Ok(split) => {
                        let under = (&mut *schedule, shape);
                        // Memory of the host is not looked at before: it may have no room there.
                        let _ = self.one(under, place, Cow::Owned(split), sets, outcome);
                        any_s
                    }
                    Err(own_s) => own_s,
                };
                least_s = least_s.min(own_s);
            }
            if firsts {
                self.bound(place, least_s);
            }
            self.leave(place, least_s.max(child.bound_s));
        }
        ControlFlow::Continue(())
    }

    /// The recompute sets of layers of a split that choose one by one, or of the first of stages; raises what no choice takes less than.
    fn by_layer(
        &self,
        (case, split): (Case<'_>, &StageSplit),
        (occupancies, below_s): (&[Vec<Occupancy>], f64),
        bound_s: &mut f64,
    ) -> Option<Sets> {
        let (question, unit) = (self.question, self.unit);
        let mut chosen = None;
        // Where one split alone is asked for there is time to choose in the step.
        if question.splits.len() == 1 && question.by_layer == Some(ByLayer::Each) {
            let simulated = unit.schedules.simulated(unit.layout, case.schedule);
            let (under, asked) = ((occupancies, &simulated), (below_s, PARTS));
            let found = split.by_layer_in_step(case, under, asked, self.looks);
            *bound_s = bound_s.max(found.least_s);
            chosen = found.best.map(|(_, sets)| sets);
        }
        chosen.or_else(|| split.by_layer(case, occupancies))
    }

    /// Tries a split under some recompute sets. Where it has no room, the error is what ranks take.
    fn one(
        &mut self,
        (schedule, shape): (&mut Scheduled<'a>, &'a Shape),
        place: Place,
        split: Cow<'_, StageSplit>,
        sets: Sets,
        outcome: &mut Outcome<'a>,
    ) -> Result<(), Vec<ByClass<Bytes>>> {
        let (question, unit) = (self.question, self.unit);
        let objective = question.options.objective;
        let by_time = objective != Objective::Memory;
        let capacity = question.capacity();
        let layout = unit.layout;
        let case = unit.case(question, shape, schedule.name);
        let beaten = self.beaten(outcome);
        // What a choice by layer is comes after its bound was asked for.
        if matches!(sets, Sets::First { .. }) && by_time {
            let bound_s = split.bound(case, &sets).seconds().0;
            if bound_s >= beaten {
                self.left_s = self.left_s.min(bound_s);
                return Ok(());
            }
        }
        let memory = split.memory(case, &sets, schedule.occupancies);
        let peak = peak(&memory);
        debug_assert!(
            unit.room(case, peak)
                .is_none_or(|room| room.may_hold(Of::Choice(&sets))),
            "{layout:?} {place:?} has no room for {peak:?}"
        );
        let on_host = split.on_host(case, &sets, schedule.occupancies);
        if peak > capacity || !question.host_holds(peak, on_host) {
            return Err(memory);
        }
        if !by_time && peak.gib() >= beaten {
            return Ok(());
        }
        self.state.insert(place, true);
        let times = split.times(case, &sets);
        let name = schedule.name;
        let simulated = schedule
            .simulated
            .get_or_insert_with(|| unit.schedules.simulated(layout, name));
        let step_s = simulated.simulator().run(&times).total.seconds().0;
        let found = Found {
            unit,
            question: self.number,
            schedule: name,
            occupancies: schedule.occupancies,
            shape,
            split: split.into_owned(),
            sets,
            step_s,
            peak,
        };
        outcome.feasible.push(found.candidate(question));
        let slower = if found.score(objective) < beaten {
            outcome.best.replace(found)
        } else {
            Some(found)
        };
        if let Some(slower) = slower {
            self.left_s = self.left_s.min(slower.step_s);
        }
        Ok(())
    }
}
