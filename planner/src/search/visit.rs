//! Visiting a unit: a legal layout with its children, of which the best that fits is found.

use std::collections::BTreeMap;

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, GIB};

use super::candidate::{self, Case, StageSplit};
use super::explain;
use super::predict::Choice;
use super::shape::{Question, Shape};
use crate::answer::Candidate;
use crate::choice::{Objective, Recompute};
use crate::layout::Layout;
use crate::memory::Occupancy;
use crate::options::LeastMemory;
use crate::plan::LayoutRecord;
use crate::schedule::Schedule;
use crate::simulate::Simulator;

/// Priced candidates kept for the picture of the trade-off.
const FEASIBLE_KEPT: usize = 400;

/// A legal layout with its shapes.
pub(crate) struct Unit<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) shapes: &'a [Shape],
    pub(crate) occupancies: &'a [Vec<Occupancy>],
    /// No child under each shape scores less.
    pub(crate) floors: Vec<f64>,
    /// The least of them.
    pub(crate) floor: f64,
}

/// A feasible child in the ranking.
pub(crate) struct Found<'a> {
    pub(crate) unit: &'a Unit<'a>,
    shape: usize,
    split: StageSplit,
    set: usize,
    pub(crate) step_s: f64,
    peak: Bytes,
}

impl Found<'_> {
    pub(crate) fn score(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput => self.step_s,
            Objective::Memory => self.peak.gib(),
        }
    }

    /// Whether no other split of this layout's layers is better balanced: there is one stage a rank
    /// (a dynamic program finds the split), all layers are alike, or the split was given. Splits are
    /// balanced by time, so where memory is the objective only a given or single stage counts.
    pub(crate) fn split_is_exact(&self, question: &Question<'_>) -> bool {
        let layout = self.unit.layout;
        let balanced = layout.vpp() == 1 || question.distinct.len() == 1;
        let by_time = question.options.objective != Objective::Memory;
        question.options.stages.is_some() || layout.pp() == 1 || (by_time && balanced)
    }

    /// What a recompute set for each layer, or where the split is not exact another one, could save
    /// on this layout, at most.
    pub(crate) fn gap(&self, question: &Question<'_>) -> f64 {
        if question.options.objective == Objective::Memory {
            return 0.0;
        }
        let (layout, shape) = (self.unit.layout, &self.unit.shapes[self.shape]);
        let mut bound = self.step_s;
        if question.sets.len() > 1 && question.sets[self.set] != Recompute::None {
            bound = self.split.mixed_bound_s(
                Case {
                    question,
                    layout,
                    shape,
                },
                self.unit.occupancies,
            );
        }
        if !self.split_is_exact(question) {
            bound = bound.min(self.unit.floors[self.shape]);
        }
        (1.0 - bound / self.step_s).max(0.0)
    }

    /// In short, as an answer lists it.
    pub(crate) fn candidate(&self, question: &Question<'_>) -> Candidate {
        Candidate {
            layout: LayoutRecord::from(self.unit.layout),
            recompute: question.sets[self.set].clone(),
            step_s: self.step_s,
            peak_gib: self.peak.gib(),
        }
    }

    pub(crate) fn choice(&self) -> Choice<'_> {
        Choice {
            layout: self.unit.layout,
            shape: &self.unit.shapes[self.shape],
            split: &self.split,
            set: self.set,
        }
    }

    pub(crate) fn memory(&self, question: &Question<'_>) -> Vec<ByClass<Bytes>> {
        let (layout, shape) = (self.unit.layout, &self.unit.shapes[self.shape]);
        self.split.memory(
            Case {
                question,
                layout,
                shape,
            },
            self.set,
            self.unit.occupancies,
        )
    }
}

/// What visiting a unit found.
pub(crate) struct Outcome<'a> {
    pub(crate) best: Option<Found<'a>>,
    pub(crate) priced: u64,
    pub(crate) memory: u64,
    pub(crate) feasible: Vec<Candidate>,
    least: Option<(Bytes, LeastMemory)>,
}

/// A child that may still win.
struct Child {
    bound_s: f64,
    shape: usize,
    set: usize,
    split: usize,
}

/// Splits under each shape that may still win.
fn splits(question: &Question<'_>, unit: &Unit<'_>, limit: f64) -> Vec<Vec<StageSplit>> {
    unit.shapes
        .iter()
        .zip(&unit.floors)
        .map(|(shape, &floor)| {
            if floor < limit {
                candidate::splits(Case {
                    question,
                    layout: unit.layout,
                    shape,
                })
            } else {
                Vec::new()
            }
        })
        .collect()
}

/// Children that may still win, in the order of their bounds.
fn children(
    question: &Question<'_>,
    unit: &Unit<'_>,
    splits: &[Vec<StageSplit>],
    limit: f64,
) -> Vec<Child> {
    let by_time = question.options.objective != Objective::Memory;
    let mut children = Vec::new();
    for (shape_index, shape) in unit.shapes.iter().enumerate() {
        for (split_index, split) in splits[shape_index].iter().enumerate() {
            for set in 0..question.sets.len() {
                let bound_s = split.bound(unit.layout, shape, set).seconds().0;
                if by_time && set == 0 && bound_s >= limit {
                    // Recomputing more takes no less time.
                    break;
                }
                if !by_time || bound_s < limit {
                    children.push(Child {
                        bound_s,
                        shape: shape_index,
                        set,
                        split: split_index,
                    });
                }
            }
        }
    }
    children.sort_by(|a, b| {
        let places = (a.shape, a.set, a.split).cmp(&(b.shape, b.set, b.split));
        a.bound_s.total_cmp(&b.bound_s).then(places)
    });
    children
}

/// Tries the children of a unit in the order of their bounds.
pub(crate) fn visit<'a>(question: &Question<'_>, unit: &'a Unit<'a>, limit: f64) -> Outcome<'a> {
    let objective = question.options.objective;
    let by_time = objective != Objective::Memory;
    let capacity = question.capacity();
    let layout = unit.layout;
    let mut outcome = Outcome {
        best: None,
        priced: 0,
        memory: 0,
        feasible: Vec::new(),
        least: None,
    };
    let splits = splits(question, unit, limit);
    let children = children(question, unit, &splits, limit);
    let mut simulator = None;
    // A child is a dispatcher and a recompute set, whatever its split: counted once.
    let mut state: BTreeMap<(usize, usize), bool> = BTreeMap::new();
    for child in children {
        let best = outcome.best.as_ref();
        let beaten = best.map_or(limit, |best| best.score(objective).min(limit));
        if by_time && child.bound_s >= beaten {
            break;
        }
        let (shape, split) = (&unit.shapes[child.shape], &splits[child.shape][child.split]);
        let memory = split.memory(
            Case {
                question,
                layout,
                shape,
            },
            child.set,
            unit.occupancies,
        );
        let peak = peak(&memory);
        let place = (child.shape, child.set);
        if peak > capacity {
            state.entry(place).or_insert(false);
            if outcome
                .least
                .as_ref()
                .is_none_or(|(least, _)| peak < *least)
            {
                let words = LeastMemory {
                    layout: explain::degrees(&LayoutRecord::from(layout)),
                    recompute: question.sets[child.set].clone(),
                    peak_gib: peak.gib(),
                };
                outcome.least = Some((peak, words));
            }
            continue;
        }
        if !by_time && peak.gib() >= beaten {
            continue;
        }
        state.insert(place, true);
        let times = split.times(shape, child.set);
        let step_s = simulator
            .get_or_insert_with(|| Simulator::new(&Schedule::of(layout)))
            .run(&times)
            .total
            .seconds()
            .0;
        outcome.feasible.push(Candidate {
            layout: LayoutRecord::from(layout),
            recompute: question.sets[child.set].clone(),
            step_s,
            peak_gib: peak.gib(),
        });
        let found = Found {
            unit,
            shape: child.shape,
            split: split.clone(),
            set: child.set,
            step_s,
            peak,
        };
        if found.score(objective) < beaten {
            outcome.best = Some(found);
        }
    }
    outcome.priced = state.values().filter(|&&priced| priced).count() as u64;
    outcome.memory = state.values().filter(|&&priced| !priced).count() as u64;
    outcome
}

/// Sums over outcomes.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) priced: u64,
    pub(crate) memory: u64,
    pub(crate) feasible: Vec<Candidate>,
    least_bytes: Option<Bytes>,
    pub(crate) least: Option<LeastMemory>,
}

impl Tally {
    pub(crate) fn add(&mut self, outcome: &Outcome<'_>) {
        self.priced += outcome.priced;
        self.memory += outcome.memory;
        let room = FEASIBLE_KEPT.saturating_sub(self.feasible.len());
        self.feasible
            .extend(outcome.feasible.iter().take(room).cloned());
        if let Some((bytes, words)) = &outcome.least
            && self.least_bytes.is_none_or(|least| *bytes < least)
        {
            self.least_bytes = Some(*bytes);
            self.least = Some(words.clone());
        }
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
    pub(crate) fn capacity(&self) -> Bytes {
        let all = self.cluster.gpu.memory();
        let asked = self.options.memory_gib;
        asked.map_or(all, |gib| all.min(Bytes((gib * GIB as f64) as u64)))
    }
}
