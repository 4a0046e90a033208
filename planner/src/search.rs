//! The search over layouts: enumerate, bound, fit, price, rank.
//!
//! Every legal tuple of degrees is a unit; its children are dispatchers, recompute sets and splits.
//! Units are visited in the order of a lower bound on their step (their work, divided as well as
//! whole layers allow), children in the order of a tighter one ([`crate::simulate::lower_bound`]); a
//! child is simulated only where its bound beats the best known and its memory fits. What is left
//! when the bound passes the last place of the ranking cannot enter it, so the answer is exact for
//! the candidates considered. Results do not depend on the number of threads.

mod candidate;
mod explain;
mod mix;
mod predict;
mod recompute;
mod shape;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;
use moefold_profiles::units::Bytes;
use rayon::prelude::*;

use crate::answer::{Candidate, SearchRecord};
use crate::layout::{Illegal, Layout, Rules, space};
use crate::memory::{self, Moment, RankMemory};
use crate::model::{Layer, Model};
use crate::options::{LeastMemory, PlanError, SearchOptions};
use crate::plan::{Alternative, LayoutRecord, Objective, PlannedLayout, Recompute};
use crate::schedule::Schedule;
use crate::simulate::Simulator;
use crate::stack::Stack;

use candidate::Cut;
use predict::Choice;
use shape::{Question, Shape};

/// Units looked at together; fixed, so that results do not depend on the threads there are.
const BATCH: usize = 32;

/// Priced candidates kept for the picture of the trade-off.
const FEASIBLE_KEPT: usize = 400;

/// The plans found, best first, and how the search went.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchResult {
    /// At most as many as were wanted; never empty.
    pub plans: Vec<PlannedLayout>,
    /// Runners-up in short, with the reason each lost: one for each of `plans[1..]`.
    pub alternatives: Vec<Alternative>,
    /// Counts. `elapsed_s` is 0: the caller has a clock, this crate has not.
    pub search: SearchRecord,
}

/// Plans the training of a model on `gpus` ranks of a cluster.
pub fn plan(
    model: &Model,
    cluster: &Cluster,
    gpus: u32,
    options: &SearchOptions,
    costs: &Costs,
) -> Result<SearchResult, PlanError> {
    let question = question(model, cluster, gpus, options, costs)?;
    let mut refused: BTreeMap<String, u64> = BTreeMap::new();
    let mut examples: BTreeMap<String, String> = BTreeMap::new();
    let mut total = 0;

    let rules = Rules::new(model, &options.batch);
    let mut layouts = Vec::new();
    for degrees in space(model, gpus, &options.batch, &options.pins) {
        let children = question.children(degrees.ep);
        total += children;
        let refusal = match rules.layout(&degrees) {
            Ok(layout) => match unable(&question, &layout) {
                None => {
                    layouts.push(layout);
                    continue;
                }
                Some(refusal) => refusal,
            },
            Err(broken) => Refusal::Illegal(broken[0]),
        };
        // The sentence is written once a reason: there are many refusals.
        if let Some(count) = refused.get_mut(refusal.reason()) {
            *count += children;
        } else {
            refused.insert(refusal.reason().to_owned(), children);
            examples.insert(refusal.reason().to_owned(), refusal.to_string());
        }
    }

    let shapes = shapes(&question, &layouts);
    let moments = all_moments(&layouts);
    let mut units = units(&question, &layouts, &shapes, &moments);
    let objective = options.objective;
    units.sort_by(|a, b| a.floor.total_cmp(&b.floor).then(a.layout.cmp(b.layout)));

    let mut tally = Tally::default();
    let mut ranking: Vec<Found> = Vec::new();
    for batch in units.chunks(BATCH) {
        let limit = match ranking.get(options.top - 1) {
            Some(last) => last.score(objective),
            None => f64::INFINITY,
        };
        if batch[0].floor >= limit {
            break;
        }
        let outcomes: Vec<Outcome> = batch
            .par_iter()
            .map(|unit| visit(&question, unit, limit))
            .collect();
        for outcome in outcomes {
            tally.add(&outcome);
            ranking.extend(outcome.best);
        }
        ranking.sort_by(|a, b| {
            a.score(objective)
                .total_cmp(&b.score(objective))
                .then(a.unit.layout.cmp(b.unit.layout))
        });
        ranking.truncate(options.top);
    }

    if tally.memory > 0 {
        refused.insert("memory".to_owned(), tally.memory);
    }
    let gap = ranking.first().map_or(0.0, |best| best.gap(&question));
    let search = SearchRecord {
        space: total,
        pruned: total - refused.values().sum::<u64>() - tally.priced,
        refused,
        priced: tally.priced,
        elapsed_s: 0.0,
        optimal: true,
        gap,
        feasible: tally.feasible,
    };
    if ranking.is_empty() {
        return Err(PlanError::Infeasible {
            space: search.space,
            refused: search.refused,
            examples,
            least: tally.least,
            capacity_gib: question.capacity().gib(),
        });
    }
    let plans: Vec<PlannedLayout> = ranking
        .iter()
        .map(|found| {
            let memory = found.memory(&question);
            predict::planned(&question, &found.choice(), &memory)
        })
        .collect();
    let alternatives = plans[1..]
        .iter()
        .map(|plan| explain::alternative(&plans[0], plan, objective))
        .collect();
    Ok(SearchResult {
        plans,
        alternatives,
        search,
    })
}

/// Checks what was asked against what stack and cluster can do, and gathers what a search shares.
fn question<'a>(
    model: &'a Model,
    cluster: &'a Cluster,
    gpus: u32,
    options: &'a SearchOptions,
    costs: &'a Costs,
) -> Result<Question<'a>, PlanError> {
    let stack = Stack::of(options.stack);
    let unable = |what: String, limit: String| Err(PlanError::Unable { what, limit });
    if gpus == 0 {
        return unable(
            "--gpus 0".to_owned(),
            "a job has at least one rank".to_owned(),
        );
    }
    if let Some(there) = cluster.num_gpus
        && gpus > there
    {
        return unable(
            format!("--gpus {gpus}"),
            format!("cluster {} has {there}", cluster.name),
        );
    }
    if !stack.precisions.contains(&options.precision) {
        let names: Vec<&str> = stack.precisions.iter().map(|p| p.name()).collect();
        return unable(
            format!("--precision {}", options.precision),
            format!("the chosen stack runs {}", names.join(", ")),
        );
    }
    let compute = options.precision.compute();
    if cluster.gpu.peak(compute).is_none() {
        return unable(
            format!("--precision {}", options.precision),
            format!("{} does not compute in {compute}", cluster.gpu.name),
        );
    }
    let dispatchers = match options.dispatcher {
        _ if model.num_moe_layers() == 0 => vec![stack.dispatchers[0]],
        None => stack.dispatchers.to_vec(),
        Some(wanted) if stack.dispatchers.contains(&wanted) => vec![wanted],
        Some(wanted) => {
            return unable(
                format!("--dispatcher {wanted:?}").to_lowercase(),
                format!("the chosen stack has {:?}", stack.dispatchers).to_lowercase(),
            );
        }
    };
    let sets = match &options.recompute {
        Some(set) if *set != Recompute::None && !stack.recomputes => {
            return unable(
                "--recompute".to_owned(),
                "the chosen stack recomputes nothing yet; `none` works".to_owned(),
            );
        }
        Some(set) => vec![set.clone()],
        None if stack.recomputes => recompute::sets(model),
        None => vec![Recompute::None],
    };
    let mut distinct: Vec<&Layer> = Vec::new();
    let kind_of = model
        .layers
        .iter()
        .map(|layer| {
            distinct
                .iter()
                .position(|&known| known == layer)
                .unwrap_or_else(|| {
                    distinct.push(layer);
                    distinct.len() - 1
                })
        })
        .collect();
    Ok(Question {
        model,
        cluster,
        options,
        costs,
        overlap: options.overlap.unwrap_or(stack.overlap),
        stack,
        sets,
        dispatchers,
        kind_of,
        distinct,
    })
}

/// Tokens a context-parallel rank has of a sequence at least: Megatron-Core's guide advises against
/// fewer (arXiv 2603.07685, section 6.3). A pinned degree is taken as it is.
const CONTEXT_TOKENS: u64 = 4096;

/// Why a tuple of degrees is not priced.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    /// It is not legal.
    #[error("{0}")]
    Illegal(Illegal),
    /// The stack does not run it.
    #[error("the chosen stack runs {key} up to {limit}, not {degree}")]
    Stack {
        reason: &'static str,
        key: &'static str,
        degree: u32,
        limit: u32,
    },
    /// It is legal and nobody runs it: tensor parallelism across NVLink domains.
    #[error("{key} {degree} leaves the NVLink domain of {domain}; pin it to try")]
    Domain {
        reason: &'static str,
        key: &'static str,
        degree: u32,
        domain: u32,
    },
    /// Likewise context parallelism of short sequences.
    #[error("cp {cp} leaves {chunk} tokens of a sequence a rank, fewer than 4096; pin it to try")]
    ShortSequence { cp: u32, chunk: u64 },
    /// The given stages do not go with the degrees.
    #[error("the pipeline layout has {given} stages, pp x vpp is {stages}")]
    Stages { given: usize, stages: u32 },
}

impl Refusal {
    fn reason(&self) -> &'static str {
        match self {
            Self::Illegal(illegal) => illegal.reason(),
            Self::Stack { reason, .. } | Self::Domain { reason, .. } => reason,
            Self::ShortSequence { .. } => "cp_short_sequence",
            Self::Stages { .. } => "pipeline_layout",
        }
    }
}

/// What refuses a legal layout: the stack, common practice, given stages.
fn unable(question: &Question<'_>, layout: &Layout) -> Option<Refusal> {
    let (options, pins) = (question.options, &question.options.pins);
    for (reason, key, degree, limit) in [
        ("stack_cp", "cp", layout.cp(), question.stack.max_cp),
        ("stack_pp", "pp", layout.pp(), question.stack.max_pp),
    ] {
        if let Some(limit) = limit.filter(|&limit| degree > limit) {
            return Some(Refusal::Stack {
                reason,
                key,
                degree,
                limit,
            });
        }
    }
    let domain = question.cluster.gpus_per_domain;
    for (reason, key, degree, pinned) in [
        ("tp_over_domain", "tp", layout.tp(), pins.tp),
        ("etp_over_domain", "etp", layout.etp(), pins.etp),
    ] {
        if degree > domain.max(1) && pinned.is_none() {
            return Some(Refusal::Domain {
                reason,
                key,
                degree,
                domain,
            });
        }
    }
    let (cp, chunk) = (layout.cp(), options.batch.seq_len / u64::from(layout.cp()));
    if cp > 1 && chunk < CONTEXT_TOKENS && pins.cp.is_none() {
        return Some(Refusal::ShortSequence { cp, chunk });
    }
    let given = options.stages.as_ref()?.len();
    (given != layout.stages() as usize).then(|| Refusal::Stages {
        given,
        stages: layout.stages(),
    })
}

/// Shapes by the degrees they depend on, one for each dispatcher.
type Shapes = BTreeMap<[u32; 5], Vec<Shape>>;

fn shape_key(layout: &Layout) -> [u32; 5] {
    [
        layout.tp(),
        layout.cp(),
        layout.ep(),
        layout.etp(),
        layout.mbs(),
    ]
}

fn shapes(question: &Question<'_>, layouts: &[Layout]) -> Shapes {
    let mut first: BTreeMap<[u32; 5], &Layout> = BTreeMap::new();
    for layout in layouts {
        first.entry(shape_key(layout)).or_insert(layout);
    }
    let work: Vec<([u32; 5], &Layout)> = first.into_iter().collect();
    work.into_par_iter()
        .map(|(key, layout)| (key, Shape::all(question, layout)))
        .collect::<Vec<_>>()
        .into_iter()
        .collect()
}

/// Worst moments by pipeline degree, virtual stages and (as far as they matter) microbatches.
type Moments = BTreeMap<[u32; 3], Vec<Vec<Moment>>>;

/// Warm-up is over within two groups of `pp` microbatches and what follows repeats itself.
fn moments_key(layout: &Layout) -> [u32; 3] {
    let matter = layout.microbatches().min(4 * layout.pp());
    [layout.pp(), layout.vpp(), matter]
}

fn all_moments(layouts: &[Layout]) -> Moments {
    let mut first: BTreeMap<[u32; 3], &Layout> = BTreeMap::new();
    for layout in layouts {
        first.entry(moments_key(layout)).or_insert(layout);
    }
    let work: Vec<([u32; 3], &Layout)> = first.into_iter().collect();
    work.into_par_iter()
        .map(|(key, layout)| {
            let name = crate::plan::ScheduleName::of(layout);
            let schedule = Schedule::new(name, key[0], key[1], key[2]);
            (key, memory::moments(&schedule, key[0], key[1]))
        })
        .collect::<Vec<_>>()
        .into_iter()
        .collect()
}

/// A legal layout with its shapes.
struct Unit<'a> {
    layout: &'a Layout,
    shapes: &'a [Shape],
    moments: &'a [Vec<Moment>],
    /// No child under each shape scores less.
    floors: Vec<f64>,
    /// The least of them.
    floor: f64,
}

fn units<'a>(
    question: &Question<'_>,
    layouts: &'a [Layout],
    shapes: &'a Shapes,
    moments: &'a Moments,
) -> Vec<Unit<'a>> {
    let work: BTreeMap<[u32; 5], Vec<(f64, f64)>> = shapes
        .iter()
        .map(|(&key, shapes)| {
            let work = shapes.iter().map(|shape| shape.work_s(question)).collect();
            (key, work)
        })
        .collect();
    layouts
        .iter()
        .map(|layout| {
            let key = shape_key(layout);
            let floors: Vec<f64> = work[&key]
                .iter()
                .map(|(all, lightest)| match question.options.objective {
                    Objective::Memory => 0.0,
                    // Layers are whole: the busiest rank holds at least its rounded-up share.
                    Objective::Throughput | Objective::Cost => {
                        let share = all / f64::from(layout.pp());
                        let layers = question.kind_of.len() as u32;
                        let whole = f64::from(layers.div_ceil(layout.pp())) * lightest;
                        f64::from(layout.microbatches()) * share.max(whole)
                    }
                })
                .collect();
            let floor = floors.iter().copied().fold(f64::INFINITY, f64::min);
            Unit {
                layout,
                shapes: &shapes[&key],
                moments: &moments[&moments_key(layout)],
                floors,
                floor,
            }
        })
        .collect()
}

fn peak(ranks: &[RankMemory]) -> Bytes {
    ranks
        .iter()
        .map(RankMemory::total)
        .max()
        .unwrap_or(Bytes::ZERO)
}

impl Question<'_> {
    /// Dispatchers times recompute sets.
    fn children(&self, ep: u32) -> u64 {
        (self.dispatchers_for(ep).len() * self.sets.len()) as u64
    }

    fn capacity(&self) -> Bytes {
        self.cluster.gpu.memory()
    }
}

/// A feasible child in the ranking.
struct Found<'a> {
    unit: &'a Unit<'a>,
    shape: usize,
    cut: Cut,
    set: usize,
    step_s: f64,
    peak: Bytes,
}

impl Found<'_> {
    fn score(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput | Objective::Cost => self.step_s,
            Objective::Memory => self.peak.gib(),
        }
    }

    /// What a recompute set for each layer could save on this layout, at most.
    fn gap(&self, question: &Question<'_>) -> f64 {
        let by_time = question.options.objective != Objective::Memory;
        if !by_time || question.sets.len() == 1 || question.sets[self.set] == Recompute::None {
            return 0.0;
        }
        let (layout, shape) = (self.unit.layout, &self.unit.shapes[self.shape]);
        let bound = self
            .cut
            .mixed_bound_s(question, layout, shape, self.unit.moments);
        (1.0 - bound / self.step_s).max(0.0)
    }

    fn choice(&self) -> Choice<'_> {
        Choice {
            layout: self.unit.layout,
            shape: &self.unit.shapes[self.shape],
            cut: &self.cut,
            set: self.set,
        }
    }

    fn memory(&self, question: &Question<'_>) -> Vec<RankMemory> {
        let (layout, shape) = (self.unit.layout, &self.unit.shapes[self.shape]);
        self.cut
            .memory(question, layout, shape, self.set, self.unit.moments)
    }
}

/// What visiting a unit found.
struct Outcome<'a> {
    best: Option<Found<'a>>,
    priced: u64,
    memory: u64,
    feasible: Vec<Candidate>,
    least: Option<(Bytes, LeastMemory)>,
}

/// A child that may still win.
struct Child {
    bound_s: f64,
    shape: usize,
    set: usize,
    cut: usize,
}

/// Tries the children of a unit in the order of their bounds.
fn visit<'a>(question: &Question<'_>, unit: &'a Unit<'a>, limit: f64) -> Outcome<'a> {
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
    let cuts: Vec<Vec<Cut>> = unit
        .shapes
        .iter()
        .zip(&unit.floors)
        .map(|(shape, &floor)| {
            if floor < limit {
                candidate::cuts(question, layout, shape)
            } else {
                Vec::new()
            }
        })
        .collect();
    let mut children = Vec::new();
    for (shape_index, shape) in unit.shapes.iter().enumerate() {
        for (cut_index, cut) in cuts[shape_index].iter().enumerate() {
            for set in 0..question.sets.len() {
                let bound_s = cut.bound(layout, shape, set).seconds().0;
                if by_time && set == 0 && bound_s >= limit {
                    // Recomputing more takes no less time.
                    break;
                }
                if !by_time || bound_s < limit {
                    children.push(Child {
                        bound_s,
                        shape: shape_index,
                        set,
                        cut: cut_index,
                    });
                }
            }
        }
    }
    children.sort_by(|a, b| {
        let places = (a.shape, a.set, a.cut).cmp(&(b.shape, b.set, b.cut));
        a.bound_s.total_cmp(&b.bound_s).then(places)
    });
    let mut simulator = None;
    // A child is a dispatcher and a recompute set, whatever its split: counted once.
    let mut state: BTreeMap<(usize, usize), bool> = BTreeMap::new();
    for child in children {
        let best = outcome.best.as_ref();
        let beaten = best.map_or(limit, |best| best.score(objective).min(limit));
        if by_time && child.bound_s >= beaten {
            break;
        }
        let (shape, cut) = (&unit.shapes[child.shape], &cuts[child.shape][child.cut]);
        let memory = cut.memory(question, layout, shape, child.set, unit.moments);
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
        let times = cut.times(shape, child.set);
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
            cut: cut.clone(),
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
struct Tally {
    priced: u64,
    memory: u64,
    feasible: Vec<Candidate>,
    least_bytes: Option<Bytes>,
    least: Option<LeastMemory>,
}

impl Tally {
    fn add(&mut self, outcome: &Outcome<'_>) {
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
