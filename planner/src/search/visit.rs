//! Visiting a unit: a legal layout with its children, of which the best that fits is found.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, GIB};

use super::candidate::{self, Case, StageSplit};
use super::floor::floor_s;
use super::predict::Choice;
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::schedules::{Schedules, Simulated};
use super::shape::{Question, Shape, Shapes};
use super::stages;
use super::watch::Looks;
use crate::answer::Candidate;
use crate::choice::{CpComm, Objective, ScheduleName};
use crate::layout::{Layout, Order};
use crate::memory::Occupancy;
use crate::plan::LayoutRecord;
use crate::stack::ByLayer;

/// Units looked at together; fixed, so that results do not depend on the threads there are.
pub(crate) const BATCH: usize = 32;

/// Priced candidates kept for the picture of the trade-off.
const FEASIBLE_KEPT: usize = 400;

/// A legal layout with its shapes.
pub(crate) struct Unit<'a> {
    pub(crate) layout: &'a Layout,
    /// By question.
    pub(crate) shapes: &'a [Shapes],
    pub(crate) schedules: &'a Schedules,
    /// No child scores less, as far as that is known before the shapes are.
    pub(crate) floor: f64,
}

impl<'a> Unit<'a> {
    /// Candidates under its degrees.
    pub(crate) fn children(&self, questions: &[Question<'_>]) -> u64 {
        let degrees = self.layout.degrees();
        let each = questions.iter();
        each.map(|question| question.ways(&degrees) * question.legal_sets())
            .sum()
    }

    /// It under a shape of its own and a schedule.
    fn case<'c>(
        &'c self,
        question: &'c Question<'c>,
        shape: &'c Shape,
        schedule: ScheduleName,
    ) -> Case<'c> {
        Case {
            question,
            layout: self.layout,
            shape,
            schedule,
        }
    }

    /// Schedules that are tried, the usual one first, with their occupancies.
    pub(crate) fn schedules(
        &self,
        question: &Question<'_>,
    ) -> impl Iterator<Item = (ScheduleName, &'a [Vec<Occupancy>])> + use<'a> {
        let (layout, schedules) = (self.layout, self.schedules);
        let names = question.schedules(layout.pp(), layout.vpp());
        names.map(move |name| (name, schedules.occupancies(layout, name)))
    }
}

/// A feasible child in the ranking.
#[derive(Clone)]
pub(crate) struct Found<'a> {
    pub(crate) unit: &'a Unit<'a>,
    /// Which question it answers.
    pub(crate) question: usize,
    pub(crate) schedule: ScheduleName,
    pub(crate) occupancies: &'a [Vec<Occupancy>],
    shape: &'a Shape,
    split: StageSplit,
    sets: Sets,
    pub(crate) step_s: f64,
    peak: Bytes,
}

impl Found<'_> {
    /// What its fullest rank holds.
    pub(crate) fn peak(&self) -> Bytes {
        self.peak
    }

    pub(crate) fn score(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput => self.step_s,
            Objective::Memory => self.peak.gib(),
        }
    }

    /// Whether no other split of its layers is left to try: there is one stage, or stages were given.
    fn split_is_whole(&self, question: &Question<'_>) -> bool {
        question.options.stages.is_some() || self.unit.layout.stages() == 1
    }

    /// What its layout could still gain, at most, as a fraction of its step: from another split, and from more ways to
    /// recompute by layer where layers may. Nothing where it is known to be the best; `None` where there is no bound.
    pub(crate) fn gap(&self, questions: &[Question<'_>]) -> Option<f64> {
        let question = &questions[self.question];
        if question.options.objective == Objective::Memory {
            return self.split_is_whole(question).then_some(0.0);
        }
        let mut bound = self.step_s;
        if question.by_layer == Some(ByLayer::Each) && !question.recompute(&self.sets).is_none() {
            let case = self.case(question);
            bound = self.split.mixed_bound_s(case, self.occupancies);
        }
        if !self.split_is_whole(question) {
            bound = bound.min(least_of_splits_s(questions, self.unit, self.step_s));
        }
        Some((1.0 - bound / self.step_s).max(0.0))
    }

    /// In short, as an answer lists it.
    pub(crate) fn candidate(&self, question: &Question<'_>) -> Candidate {
        Candidate {
            layout: LayoutRecord::from(self.unit.layout),
            recompute: question.recompute(&self.sets),
            schedule: self.schedule.chosen(),
            rank_order: Some(self.unit.layout.order()).filter(|order| *order != Order::default()),
            cp_comm_type: Some(self.shape.cp_comm)
                .filter(|way| self.unit.layout.cp() > 1 && *way != CpComm::default()),
            cuda_graph: question.options.graphs.filter(|graphs| !graphs.is_none()),
            step_s: self.step_s,
            peak_gib: self.peak.gib(),
        }
    }

    pub(crate) fn choice(&self) -> Choice<'_> {
        Choice {
            layout: self.unit.layout,
            schedule: self.schedule,
            shape: self.shape,
            split: &self.split,
            sets: &self.sets,
        }
    }

    /// The most bytes that a rank has in memory of its host.
    pub(crate) fn on_host(&self, question: &Question<'_>) -> Bytes {
        let case = self.case(question);
        self.split.on_host(case, &self.sets, self.occupancies)
    }

    pub(crate) fn memory(&self, question: &Question<'_>) -> Vec<ByClass<Bytes>> {
        let case = self.case(question);
        self.split.memory(case, &self.sets, self.occupancies)
    }

    fn case<'q>(&'q self, question: &'q Question<'q>) -> Case<'q> {
        self.unit.case(question, self.shape, self.schedule)
    }
}

/// What visiting a unit found.
pub(crate) struct Outcome<'a> {
    pub(crate) best: Option<Found<'a>>,
    pub(crate) priced: u64,
    pub(crate) memory: u64,
    pub(crate) feasible: Vec<Candidate>,
    /// Seconds that no child takes less than which may fit, but for the best.
    pub(crate) left_s: f64,
    /// Whether the search was stopped before all children were tried.
    pub(crate) stopped: bool,
}

impl Outcome<'_> {
    /// Children of the unit that were not tried, though no bound rules them out.
    pub(crate) fn unseen(&self, unit: &Unit<'_>, questions: &[Question<'_>]) -> u64 {
        if self.stopped {
            unit.children(questions) - self.priced - self.memory
        } else {
            0
        }
    }
}

/// A child that may still win.
struct Child {
    bound_s: f64,
    shape: usize,
    /// Among the choices of recompute sets; one past them is a choice by layer.
    choice: usize,
    split: usize,
}

/// By shape and choice of recompute sets, whether the layers may fit, cut in any way, where that is known before they
/// are; the last choice of each is one by layer.
type Fits = [Vec<bool>];

/// Splits under each shape that may still win.
fn splits(
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

/// Children under some choices of recompute sets that may still win, in the order of their bounds; and what of the
/// others that may fit none takes less than.
fn children(
    question: &Question<'_>,
    unit: &Unit<'_>,
    (schedule, occupancies): (ScheduleName, &[Vec<Occupancy>]),
    splits: &[Vec<StageSplit>],
    fits: Option<&Fits>,
    (shapes, choices): (&[Shape], Range<usize>),
    limit: f64,
) -> (Vec<Child>, f64) {
    let by_time = question.options.objective != Objective::Memory;
    let (mut children, mut left_s) = (Vec::new(), f64::INFINITY);
    for (shape_index, (shape, splits)) in shapes.iter().zip(splits).enumerate() {
        for (split_index, split) in splits.iter().enumerate() {
            for choice in choices.clone() {
                if fits.is_some_and(|fits| !fits[shape_index][choice]) {
                    continue;
                }
                let case = unit.case(question, shape, schedule);
                let bound = match question.choices.get(choice) {
                    Some(sets) => split.bound(case, sets),
                    None => match split.by_layer_bound(case, occupancies) {
                        Some(bound) => bound,
                        None => continue,
                    },
                };
                let bound_s = bound.seconds().0;
                if !by_time || bound_s < limit {
                    children.push(Child {
                        bound_s,
                        shape: shape_index,
                        choice,
                        split: split_index,
                    });
                } else {
                    left_s = left_s.min(bound_s);
                }
            }
        }
    }
    children.sort_by(|a, b| {
        let places = (a.shape, a.choice, a.split).cmp(&(b.shape, b.choice, b.split));
        a.bound_s.total_cmp(&b.bound_s).then(places)
    });
    (children, left_s)
}

/// Tries the children of a unit under each question, and of each under its schedules: those of the first choice of
/// recompute sets, and where recomputing more may still win, for it takes no less time, those of the others, and last a
/// choice by layer. A question is left out where no layout under one above it can win. Whether the search goes on is asked
/// before whatever takes long.
pub(crate) fn visit<'a>(
    questions: &[Question<'_>],
    unit: &'a Unit<'a>,
    limit: f64,
    looks: &Looks<'_>,
) -> Outcome<'a> {
    let mut outcome = Outcome {
        best: None,
        priced: 0,
        memory: 0,
        feasible: Vec::new(),
        left_s: f64::INFINITY,
        stopped: false,
    };
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
    let mut least_s: Vec<f64> = Vec::with_capacity(questions.len());
    for (number, (question, shapes)) in questions.iter().zip(unit.shapes).enumerate() {
        let objective = question.options.objective;
        let by_time = objective != Objective::Memory;
        let beaten = beaten(outcome, objective, limit);
        let above = question.above.iter().map(|&above| least_s[above]);
        let above = above.fold(0.0, f64::max);
        if by_time && above >= beaten {
            least_s.push(above);
            outcome.left_s = outcome.left_s.min(above);
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
        least_s.push(floors.iter().copied().fold(f64::INFINITY, f64::min));
        let mut trial = Trial {
            question,
            number,
            unit,
            shapes,
            floors,
            limit,
            looks,
            left_s: f64::INFINITY,
            state: BTreeMap::new(),
        };
        let tried = unit.schedules(question).try_for_each(|schedule| {
            looks.begin()?;
            let fits = trial.fitting(schedule, trial.beaten(outcome));
            if fits.iter().any(|shape| shape.contains(&true)) {
                trial.under(schedule, &fits, outcome)?;
            }
            ControlFlow::Continue(())
        });
        outcome.left_s = outcome.left_s.min(trial.left_s);
        let state = trial.state.values();
        outcome.priced += state.clone().filter(|&&priced| priced).count() as u64;
        outcome.memory += state.filter(|&&priced| !priced).count() as u64;
        tried?;
    }
    ControlFlow::Continue(())
}

/// What a child must score less than.
fn beaten(outcome: &Outcome<'_>, objective: Objective, limit: f64) -> f64 {
    let best = outcome.best.as_ref();
    best.map_or(limit, |best| best.score(objective).min(limit))
}

/// Seconds that no child of a unit takes less than: of all its schedules, splits and shapes under the choice of
/// recompute sets that takes least.
pub(crate) fn split_bound_s(question: &Question<'_>, unit: &Unit<'_>, shapes: &Shapes) -> f64 {
    let first = shapes.first(question);
    let fits = vec![vec![true]; first.len()];
    unit.schedules(question)
        .filter_map(|scheduled| {
            let splits = splits(question, unit, shapes, &fits, scheduled.0);
            let own = (first, 0..1);
            let limit = f64::INFINITY;
            let (found, _) = children(question, unit, scheduled, &splits, None, own, limit);
            found.first().map(|child| child.bound_s)
        })
        .fold(f64::INFINITY, f64::min)
}

/// Seconds that no child of a unit takes less than which may fit, however its layers are split; or `within_s`, where that
/// is less.
fn least_of_splits_s(questions: &[Question<'_>], unit: &Unit<'_>, within_s: f64) -> f64 {
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
                let of = |most: &Most, within_s| {
                    stages::least_of_block_s(case(shape), (layers, set), most, within_s)
                };
                // More take longer.
                if of(&endless, least_s) >= least_s {
                    break;
                }
                if let Some(most) = most(Of::Choice(&Sets::First { layers, set })) {
                    least_s = of(&most, least_s);
                }
            }
        }
        _ => {}
    }
    least_s
}

/// What trying the children of a unit takes.
struct Trial<'q, 'a> {
    question: &'q Question<'q>,
    /// Which of all questions.
    number: usize,
    unit: &'a Unit<'a>,
    shapes: &'a Shapes,
    /// No child under each shape scores less.
    floors: Vec<f64>,
    limit: f64,
    looks: &'q Looks<'q>,
    /// Seconds that no child takes less than which may fit and was left out.
    left_s: f64,
    /// A child is a schedule, a dispatcher and a choice of recompute sets, whatever its split: counted once.
    /// Whether it fits.
    state: BTreeMap<(ScheduleName, usize, usize), bool>,
}

/// A schedule with its occupancies, and what it is simulated by where it has been.
struct Scheduled<'a> {
    name: ScheduleName,
    occupancies: &'a [Vec<Occupancy>],
    simulated: Option<Simulated>,
}

impl<'a> Trial<'_, 'a> {
    /// What a child must score less than.
    fn beaten(&self, outcome: &Outcome<'_>) -> f64 {
        beaten(outcome, self.question.options.objective, self.limit)
    }

    /// Which children under a schedule may fit and score less than what is beaten, whatever the split into stages.
    /// Those that do not fit are counted.
    fn fitting<'s>(
        &'s mut self,
        (name, occupancies): (ScheduleName, &'s [Vec<Occupancy>]),
        beaten: f64,
    ) -> Vec<Vec<bool>> {
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
        let room = |shape: &'s Shape| {
            let case = unit.case(question, shape, name);
            Room::new(case, occupancies, capacity)
        };
        let of_shape = |(index, first): (usize, &'s Shape)| {
            if by_time && self.floors[index] >= beaten {
                self.left_s = self.left_s.min(self.floors[index]);
                return vec![false; choices + 1];
            }
            let may_hold = |room: Room<'_>| room.may_hold(Of::Choice(&question.choices[0]));
            if room(first).is_none_or(may_hold) {
                return vec![true; choices + 1];
            }
            let shape = &all_shapes.all(question)[index];
            let room = room(shape).expect("there was one of the first choice");
            if choices == 1 || !room.may_hold(Of::Any) {
                if capacity == all {
                    let children = 0..choices + usize::from(question.by_layer.is_some());
                    let state = &mut self.state;
                    state.extend(children.map(|choice| ((name, index, choice), false)));
                }
                return vec![false; choices + 1];
            }
            let each = question.choices.iter().enumerate();
            let each = each.map(|(choice, sets)| {
                if !room.may_hold(Of::Choice(sets)) {
                    if capacity == all {
                        self.state.insert((name, index, choice), false);
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
            each.chain([true]).collect()
        };
        let shapes = all_shapes.first(question).iter();
        shapes.enumerate().map(of_shape).collect()
    }

    /// Tries the children under one schedule that may fit. Where it divides backward passes, their memory is asked for
    /// when a bound does not rule them out.
    fn under(
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
        let children = |fits: Option<&Fits>, from: (&[Shape], Range<usize>), limit| {
            let schedule = (name, occupancies);
            children(question, unit, schedule, &splits, fits, from, limit)
        };
        let shapes = self.shapes;
        let held = |all| shapes.held_under(question, name, all);
        let first = (shapes.first(question), 0..1);
        let (tried, left_s) = children(Some(fits), first.clone(), self.beaten(outcome));
        self.left_s = self.left_s.min(left_s);
        if !tried.is_empty() {
            self.run(&mut schedule, held(false), &splits, tried, outcome)?;
        }
        let beaten = self.beaten(outcome);
        // Where the first choice cannot win no other can.
        let (open, left_s) = children(None, first, beaten);
        let open = !open.is_empty();
        let choices = question.choices.len();
        if choices > 1 {
            self.left_s = self.left_s.min(left_s);
        }
        if open && choices > 1 {
            let others = (shapes.all(question), 1..choices);
            let (tried, left_s) = children(Some(fits), others, beaten);
            self.left_s = self.left_s.min(left_s);
            if !tried.is_empty() {
                self.run(&mut schedule, held(true), &splits, tried, outcome)?;
            }
            if question.by_layer.is_some() {
                let shapes = held(true);
                let by_layer = (shapes, choices..choices + 1);
                let (tried, left_s) = children(Some(fits), by_layer, self.beaten(outcome));
                self.left_s = self.left_s.min(left_s);
                self.run(&mut schedule, shapes, &splits, tried, outcome)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Tries children in the order of their bounds. Where the layers of one have no room as they are split, another split
    /// is looked for that has it.
    fn run(
        &mut self,
        schedule: &mut Scheduled<'a>,
        shapes: &'a [Shape],
        splits: &[Vec<StageSplit>],
        children: Vec<Child>,
        outcome: &mut Outcome<'a>,
    ) -> ControlFlow<()> {
        let (question, unit) = (self.question, self.unit);
        let by_time = question.options.objective != Objective::Memory;
        // A rank of several stages may hold them in more ways than are gone through.
        let may_move = by_time
            && unit.layout.stages() > 1
            && unit.layout.vpp() == 1
            && question.options.stages.is_none()
            && question.splits.is_empty();
        let mut moved = BTreeSet::new();
        for child in children {
            let beaten = self.beaten(outcome);
            let is_beaten = by_time && child.bound_s >= beaten;
            if is_beaten || may_move {
                // A split that has room where there is less of it takes about as long.
                self.left_s = self.left_s.min(child.bound_s);
            }
            if is_beaten {
                break;
            }
            self.looks.begin()?;
            let (shape, split) = (&shapes[child.shape], &splits[child.shape][child.split]);
            let case = unit.case(question, shape, schedule.name);
            let place = (schedule.name, child.shape, child.choice);
            let by_layer = child.choice == question.choices.len();
            let sets = if by_layer {
                split.by_layer(case, schedule.occupancies)
            } else {
                Some(question.choices[child.choice].clone())
            };
            let has_room = sets.is_some_and(|sets| {
                self.one(
                    (&mut *schedule, shape),
                    place,
                    Cow::Borrowed(split),
                    sets,
                    outcome,
                )
            });
            if !has_room {
                self.state.entry(place).or_insert(false);
            }
            if !may_move || (has_room && !by_layer) || !moved.insert(place) {
                continue;
            }
            let each: Vec<Sets> = match question.choices.get(child.choice) {
                Some(sets) => vec![sets.clone()],
                None if question.by_layer == Some(ByLayer::Block) => split.firsts(question),
                None => Vec::new(),
            };
            let Some(room) = Room::new(case, schedule.occupancies, question.capacity()) else {
                continue;
            };
            for sets in each {
                self.looks.begin()?;
                let beaten = self.beaten(outcome);
                // Those that follow take longer.
                let endless = &Most::default();
                if by_layer && stages::least_s(case, &sets, endless, beaten) >= beaten {
                    break;
                }
                let room = (&room, schedule.occupancies);
                if let Some(split) = stages::split_with_room(case, &sets, room, beaten) {
                    self.one(
                        (&mut *schedule, shape),
                        place,
                        Cow::Owned(split),
                        sets,
                        outcome,
                    );
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Tries a split under some recompute sets. False where it has no room.
    fn one(
        &mut self,
        (schedule, shape): (&mut Scheduled<'a>, &'a Shape),
        place: (ScheduleName, usize, usize),
        split: Cow<'_, StageSplit>,
        sets: Sets,
        outcome: &mut Outcome<'a>,
    ) -> bool {
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
                return true;
            }
        }
        let memory = split.memory(case, &sets, schedule.occupancies);
        let peak = peak(&memory);
        debug_assert!(
            Room::new(case, schedule.occupancies, peak)
                .is_none_or(|room| room.may_hold(Of::Choice(&sets))),
            "{layout:?} {place:?} has no room for {peak:?}"
        );
        let on_host = split.on_host(case, &sets, schedule.occupancies);
        if peak > capacity || !question.host_holds(peak, on_host) {
            return false;
        }
        if !by_time && peak.gib() >= beaten {
            return true;
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
        true
    }
}

/// Sums over outcomes.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) priced: u64,
    pub(crate) memory: u64,
    pub(crate) feasible: Vec<Candidate>,
}

impl Tally {
    pub(crate) fn add(&mut self, outcome: &Outcome<'_>) {
        self.priced += outcome.priced;
        self.memory += outcome.memory;
        let room = FEASIBLE_KEPT.saturating_sub(self.feasible.len());
        self.feasible
            .extend(outcome.feasible.iter().take(room).cloned());
    }
}

/// Memory of the fullest rank.
pub(crate) fn peak(ranks: &[ByClass<Bytes>]) -> Bytes {
    ranks
        .iter()
        .map(ByClass::total)
        .max()
        .unwrap_or(Bytes::ZERO)
}

impl Question<'_> {
    /// Whether the ranks of a node find room on their host for what each has there: beside what they compute
    /// in, where they are CPUs.
    fn host_holds(&self, peak: Bytes, on_host: Bytes) -> bool {
        if self.cluster.gpu.is_cpu() {
            return peak + on_host <= self.capacity();
        }
        let all = on_host.gib() * f64::from(self.cluster.gpus_per_node);
        all <= self.cluster.host_memory_gib
    }

    /// What a plan may fill of each device's memory.
    pub(crate) fn capacity(&self) -> Bytes {
        let free = self.options.memory_headroom;
        let all = self.cluster.gpu.memory().scale(1.0 - free);
        let asked = self.options.memory_gib;
        let all = asked.map_or(all, |gib| all.min(Bytes((gib * GIB as f64) as u64)));
        self.limit.map_or(all, |limit| all.min(limit))
    }
}
