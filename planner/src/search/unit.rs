//! [`Unit`]: a legal layout with its children, and what is found of them.

use std::collections::BTreeMap;

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, GIB};

use super::candidate::{Case, InStep, StageSplit};
use super::predict::Choice;
use super::recompute::Sets;
use super::room::Room;
use super::schedules::Schedules;
use super::shape::{Question, Shape, Shapes};
use super::watch::Looks;
use crate::answer::Candidate;
use crate::choice::{CpComm, Objective, ScheduleName};
use crate::layout::{Layout, Order};
use crate::memory::Occupancy;
use crate::plan::LayoutRecord;

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
    pub(crate) fn case<'c>(
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

    /// How many layers its ranks have room for; none where weights rest divided.
    pub(crate) fn room<'c>(&'c self, case: Case<'c>, capacity: Bytes) -> Option<Room<'c>> {
        let moments = self.schedules.moments(self.layout, case.schedule);
        Room::new(case, moments, capacity)
    }

    /// Where each layer of a split computes again what it may by itself, seconds that it takes no less than, and the best choice where it may take
    /// less than `below_s`, as far as so many parts of all choices show.
    pub(crate) fn by_layer(
        &self,
        case: Case<'_>,
        split: &StageSplit,
        (below_s, parts): (f64, usize),
        looks: &Looks<'_>,
    ) -> InStep {
        let (layout, schedules) = (self.layout, self.schedules);
        let occupancies = schedules.occupancies(layout, case.schedule);
        let simulated = schedules.simulated(layout, case.schedule);
        let least_s = split.mixed_bound_s(case, occupancies, &simulated);
        let is_asked = parts > 0 && least_s < below_s;
        if !is_asked || looks.look().is_break() {
            return InStep {
                best: None,
                least_s,
            };
        }
        let under = (occupancies, &simulated);
        let found = split.by_layer_in_step(case, under, (below_s, parts), looks);
        InStep {
            least_s: found.least_s.max(least_s),
            ..found
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
    pub(crate) shape: &'a Shape,
    pub(crate) split: StageSplit,
    pub(crate) sets: Sets,
    pub(crate) step_s: f64,
    /// What its fullest rank holds.
    pub(crate) peak: Bytes,
}

impl Found<'_> {
    pub(crate) fn score(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput => self.step_s,
            Objective::Memory => self.peak.gib(),
        }
    }

    /// Whether no other split of its layers is left to try: there is one stage, or stages were given.
    pub(crate) fn split_is_whole(&self, question: &Question<'_>) -> bool {
        question.options.stages.is_some() || self.unit.layout.stages() == 1
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

    pub(crate) fn case<'q>(&'q self, question: &'q Question<'q>) -> Case<'q> {
        self.unit.case(question, self.shape, self.schedule)
    }
}

/// Children by their schedule, their shape and their choice of recompute sets, whatever their split.
pub(crate) type Place = (ScheduleName, usize, usize);

/// By place, seconds that no child takes less than under as much memory or less.
pub(crate) type Bounds = BTreeMap<Place, f64>;

/// What visiting a unit found.
pub(crate) struct Outcome<'a> {
    pub(crate) best: Option<Found<'a>>,
    pub(crate) priced: u64,
    pub(crate) memory: u64,
    pub(crate) feasible: Vec<Candidate>,
    /// Seconds that no child takes less than which may fit, but for the best.
    pub(crate) left_s: f64,
    /// The same by question and place.
    pub(crate) bounds: Vec<Bounds>,
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

/// What a child must score less than.
pub(crate) fn beaten(outcome: &Outcome<'_>, objective: Objective, limit: f64) -> f64 {
    let best = outcome.best.as_ref();
    best.map_or(limit, |best| best.score(objective).min(limit))
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
    pub(crate) fn host_holds(&self, peak: Bytes, on_host: Bytes) -> bool {
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
