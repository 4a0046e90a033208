//! The search over layouts: enumerate, bound, fit, price, rank.
//!
//! Every legal tuple of degrees is a unit; its children are dispatchers, recompute sets and splits.
//! Units are visited in the order of a lower bound on their step (their work without recomputation
//! under the best split, with the fill and drain no schedule avoids), children likewise; a child is
//! priced in full only where its bound beats the best known and its memory fits. What is left when
//! the bound passes the last place of the ranking cannot enter it, so the answer is exact for the
//! candidates considered. Results do not depend on the number of threads.

mod candidate;
mod explain;
mod predict;
mod recompute;
mod shape;
mod split;
mod timeline;

use std::collections::BTreeMap;

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;
use moefold_profiles::units::Bytes;
use rayon::prelude::*;

use crate::answer::{Candidate, SearchRecord};
use crate::layout::{Layout, Rules, space};
use crate::memory::{self, Moment, RankMemory};
use crate::model::{Layer, Model};
use crate::options::{LeastMemory, PlanError, SearchOptions};
use crate::plan::{Alternative, LayoutRecord, Objective, PlannedLayout, Recompute};
use crate::schedule::Schedule;
use crate::stack::Stack;

use candidate::Stages;
use predict::Choice;
use shape::{Question, Shape};
use split::Cuts;

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
    let children = (question.dispatchers.len() * question.sets.len()) as u64;
    let mut total = 0;

    let rules = Rules::new(model, &options.batch);
    let mut layouts = Vec::new();
    for degrees in space(model, gpus, &options.batch, &options.pins) {
        total += children;
        let refusal = match rules.layout(&degrees) {
            Ok(layout) => match unable(&question, &layout) {
                None => {
                    layouts.push(layout);
                    continue;
                }
                Some((reason, words)) => (reason, words),
            },
            Err(broken) => (broken[0].reason().to_owned(), broken[0].to_string()),
        };
        *refused.entry(refusal.0.clone()).or_insert(0) += children;
        examples.entry(refusal.0).or_insert(refusal.1);
    }

    let shapes = shapes(&question, &layouts);
    let moments = all_moments(&layouts);
    let mut units = units(&question, &layouts, &shapes, &moments);
    let objective = options.objective;
    units.sort_by(|a, b| {
        a.floor(objective)
            .total_cmp(&b.floor(objective))
            .then(a.layout.cmp(b.layout))
    });

    let mut tally = Tally::default();
    let mut ranking: Vec<Found> = Vec::new();
    for batch in units.chunks(BATCH) {
        let limit = match ranking.get(options.top - 1) {
            Some(last) => last.score(objective),
            None => f64::INFINITY,
        };
        if batch[0].floor(objective) >= limit {
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
    let search = SearchRecord {
        space: total,
        pruned: total - refused.values().sum::<u64>() - tally.priced,
        refused,
        priced: tally.priced,
        elapsed_s: 0.0,
        optimal: true,
        gap: 0.0,
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
        stack,
        sets,
        dispatchers,
        kind_of,
        distinct,
    })
}

/// What the stack, or given stages, refuse of a legal layout.
fn unable(question: &Question<'_>, layout: &Layout) -> Option<(String, String)> {
    let limits = [
        ("cp", layout.cp(), question.stack.max_cp),
        ("pp", layout.pp(), question.stack.max_pp),
    ];
    for (name, degree, limit) in limits {
        if let Some(limit) = limit
            && degree > limit
        {
            return Some((
                format!("stack_{name}"),
                format!("the chosen stack runs {name} up to {limit}, not {degree}"),
            ));
        }
    }
    let stages = question.options.stages.as_ref()?;
    (stages.len() != layout.stages() as usize).then(|| {
        (
            "pipeline_layout".to_owned(),
            format!(
                "the pipeline layout has {} stages, pp x vpp is {}",
                stages.len(),
                layout.stages()
            ),
        )
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
        .map(|(key, layout)| {
            // Without an exchange all dispatchers are one.
            let count = if layout.ep() == 1 {
                1
            } else {
                question.dispatchers.len()
            };
            let shapes = question.dispatchers[..count]
                .iter()
                .map(|&dispatcher| Shape::new(question, layout, dispatcher))
                .collect();
            (key, shapes)
        })
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

/// A legal layout with its shapes and splits.
struct Unit<'a> {
    layout: &'a Layout,
    shapes: &'a [Shape],
    moments: &'a [Vec<Moment>],
    /// Splits under each shape.
    splits: Vec<Vec<Cuts>>,
    /// No child takes less time.
    bound_s: f64,
    /// The least memory of any child; worked out only where memory is the objective.
    least: Bytes,
}

impl Unit<'_> {
    fn floor(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput | Objective::Cost => self.bound_s,
            Objective::Memory => self.least.gib(),
        }
    }
}

fn units<'a>(
    question: &Question<'_>,
    layouts: &'a [Layout],
    shapes: &'a Shapes,
    moments: &'a Moments,
) -> Vec<Unit<'a>> {
    layouts
        .par_iter()
        .map(|layout| {
            let shapes = &shapes[&shape_key(layout)];
            let moments = &moments[&moments_key(layout)];
            let splits: Vec<Vec<Cuts>> = shapes
                .iter()
                .map(|shape| splits(question, layout, shape))
                .collect();
            let mut bound_s = f64::INFINITY;
            let mut least = Bytes(u64::MAX);
            for (shape, splits) in shapes.iter().zip(&splits) {
                for cuts in splits {
                    let stages = Stages::new(question, shape, cuts, question.cheapest_set());
                    bound_s = bound_s.min(stages.bound_s(layout));
                    if question.options.objective == Objective::Memory {
                        for set in 0..question.sets.len() {
                            let peak = peak(&candidate::memory(
                                question, layout, shape, cuts, set, moments,
                            ));
                            least = least.min(peak);
                        }
                    }
                }
            }
            Unit {
                layout,
                shapes,
                moments,
                splits,
                bound_s,
                least,
            }
        })
        .collect()
}

fn splits(question: &Question<'_>, layout: &Layout, shape: &Shape) -> Vec<Cuts> {
    if let Some(stages) = &question.options.stages {
        let mut cuts = vec![0];
        for stage in stages {
            cuts.push(cuts[cuts.len() - 1] + stage.len() as u32);
        }
        return vec![cuts];
    }
    let set = question.cheapest_set();
    let costs: Vec<f64> = question
        .kind_of
        .iter()
        .map(|&kind| shape.kinds[kind].forward_s + shape.kinds[kind].backward_s[set])
        .collect();
    let first = shape.embedding.forward_s + shape.embedding.backward_s[set];
    let last = shape.head.forward_s + shape.head.backward_s[set];
    split::candidates(&costs, first, last, layout.stages() as usize)
}

fn peak(ranks: &[RankMemory]) -> Bytes {
    ranks
        .iter()
        .map(RankMemory::total)
        .max()
        .unwrap_or(Bytes::ZERO)
}

impl Question<'_> {
    /// The set that adds the least time: the first, `none` where everything is tried.
    fn cheapest_set(&self) -> usize {
        0
    }

    fn capacity(&self) -> Bytes {
        predict::capacity(self)
    }
}

/// A feasible child in the ranking.
struct Found<'a> {
    unit: &'a Unit<'a>,
    shape: usize,
    cuts: usize,
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

    fn choice(&self) -> Choice<'_> {
        Choice {
            layout: self.unit.layout,
            shape: &self.unit.shapes[self.shape],
            cuts: &self.unit.splits[self.shape][self.cuts],
            set: self.set,
        }
    }

    fn memory(&self, question: &Question<'_>) -> Vec<RankMemory> {
        let choice = self.choice();
        candidate::memory(
            question,
            choice.layout,
            choice.shape,
            choice.cuts,
            choice.set,
            self.unit.moments,
        )
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

/// Tries the children of a unit in the order of their bounds.
fn visit<'a>(question: &Question<'_>, unit: &'a Unit<'a>, limit: f64) -> Outcome<'a> {
    let objective = question.options.objective;
    let capacity = question.capacity();
    let mut outcome = Outcome {
        best: None,
        priced: 0,
        memory: 0,
        feasible: Vec::new(),
        least: None,
    };
    let by_time = objective != Objective::Memory;
    let mut children = Vec::new();
    for (shape_index, shape) in unit.shapes.iter().enumerate() {
        for (cuts_index, cuts) in unit.splits[shape_index].iter().enumerate() {
            for set in 0..question.sets.len() {
                let stages = Stages::new(question, shape, cuts, set);
                let bound = stages.bound_s(unit.layout);
                if !by_time || bound < limit {
                    children.push((bound, shape_index, set, cuts_index));
                }
            }
        }
    }
    children.sort_by(|a, b| {
        a.0.total_cmp(&b.0)
            .then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3)))
    });
    // A child is a dispatcher and a recompute set, whatever its split: counted once.
    let mut state: BTreeMap<(usize, usize), bool> = BTreeMap::new();
    for (bound, shape, set, cuts) in children {
        let best = outcome.best.as_ref();
        let beaten = best.map_or(limit, |best| best.score(objective).min(limit));
        if by_time && bound >= beaten {
            break;
        }
        let mut found = Found {
            unit,
            shape,
            cuts,
            set,
            step_s: bound,
            peak: Bytes::ZERO,
        };
        found.peak = peak(&found.memory(question));
        if found.peak > capacity {
            state.entry((shape, set)).or_insert(false);
            if outcome
                .least
                .as_ref()
                .is_none_or(|(least, _)| found.peak < *least)
            {
                let words = LeastMemory {
                    layout: explain::degrees(&LayoutRecord::from(unit.layout)),
                    recompute: question.sets[set].clone(),
                    peak_gib: found.peak.gib(),
                };
                outcome.least = Some((found.peak, words));
            }
            continue;
        }
        if !by_time && found.peak.gib() >= beaten {
            continue;
        }
        state.insert((shape, set), true);
        found.step_s = predict::step(question, &found.choice()).total_s;
        outcome.feasible.push(Candidate {
            layout: LayoutRecord::from(unit.layout),
            recompute: question.sets[set].clone(),
            step_s: found.step_s,
            peak_gib: found.peak.gib(),
        });
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
