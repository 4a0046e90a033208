//! Visiting a unit: a legal layout with its children, of which the best that fits is found.

mod least;
mod trial;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, GIB};

use super::candidate::{Case, StageSplit};
use super::floor::floor_s;
use super::predict::Choice;
use super::recompute::Sets;
use super::schedules::Schedules;
use super::shape::{Question, Shape, Shapes};
use super::watch::Looks;
use crate::answer::Candidate;
use crate::choice::{CpComm, Objective, ScheduleName};
use crate::layout::{Layout, Order};
use crate::memory::Occupancy;
use crate::plan::LayoutRecord;
use crate::stack::ByLayer;

use least::least_of_splits_s;
use trial::{Trial, children, splits};

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
