//! The search over layouts: enumerate, bound, fit, price, rank.
//!
//! Every legal tuple of degrees is a unit; its children are dispatchers, recompute sets and splits.
//! Units are visited in the order of a lower bound on their step (their work, divided as well as
//! whole layers allow), children in the order of a tighter one ([`crate::simulate::lower_bound`]); a
//! child is simulated only where its bound beats the best known and its memory fits. Where a rank has
//! no room for its layers, a split is looked for that gives it fewer. What is left
//! when the bound passes the last place of the ranking cannot enter it, so the answer is exact for
//! the candidates considered. Results do not depend on the number of threads.

mod again;
mod around;
mod asked;
mod by_layer;
mod by_set;
mod candidate;
mod closest;
mod cuts;
mod explain;
mod floor;
mod front;
mod interleaved;
mod judged;
mod least;
mod line;
mod longest;
mod mix;
mod moments;
mod offload;
mod others;
mod otherwise;
mod predict;
mod questions;
mod recompute;
mod request;
mod room;
mod savers;
mod schedules;
mod shape;
mod sharded;
mod stages;
mod survey;
#[cfg(test)]
mod tests;
mod trial;
mod unit;
mod unsearched;
mod visit;
mod walk;
mod watch;
mod why;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

use moefold_profiles::Cluster;
use moefold_profiles::Precision;
use moefold_profiles::pricing::Costs;
use rayon::prelude::*;

use crate::answer::{Candidate, InsideDomain, SearchRecord, Shortage, Why};
use crate::choice::Objective;
use crate::layout::{Layout, Order, PartialDegrees};
use crate::mesh::{GroupKind, placement};
use crate::model::Model;
use crate::options::{LeastMemory, PlanError, SearchOptions};
use crate::plan::{Alternative, PlannedLayout};
use crate::rules::{Rules, Variants};
use crate::runtime::Runtime;
use crate::simulate::Simulator;

pub use again::{ENDLESS_GIB, again};
pub use asked::Asked;
pub use longest::{Lengths, longest};
pub use unsearched::unsearched;

use around::{Means, around, near, num_kept};
use floor::{ShapeWork, Weights, Works, floor_s, held};
use front::Known;
use judged::{Candidates, candidates};
use least::{Open, Splits, open_splits};
use others::{Other, are_asked, others, splits_of_others};
use predict::Priced;
use questions::questions;
use request::{nearest, nearest_gpus};
use schedules::Schedules;
use shape::{Question, ShapeKey, Shapes, by_key, shape_key};
use survey::survey;
pub use walk::{starts, walk};
pub use watch::{Aim, Phase, Progress, Watch};

use watch::{Looks, aimed};

use unit::{Found, Outcome, Tally, Unit};
use visit::{BATCH, gap_of, split_bound_s, visit};

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

/// Plans the training of a model on `gpus` ranks of a cluster, for the runtime that is to run it.
pub fn plan(
    model: &Model,
    cluster: &Cluster,
    gpus: u32,
    options: &SearchOptions,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<SearchResult, PlanError> {
    plan_watched(&Asked::new(model, cluster, gpus, options, costs, runtime))
}

/// The same, where somebody may watch. Stopped before its end it has the best of what it has seen, and where that is
/// nothing [`PlanError::Stopped`]. Where nothing fits, the error has the least memory that a plan needs.
///
/// What is close to the best is tried too: all virtual stages and microbatches at its degrees, and moves of layers between
/// stages, of the first plans too.
pub fn plan_watched(asked: &Asked<'_>) -> Result<SearchResult, PlanError> {
    let kept = num_kept(asked.options);
    plan_kept(asked, kept, (f64::INFINITY, &[]))
        .map(|found| {
            let means = Means {
                plan: &plan_priced,
                open: &splits_below,
                others: &others_below,
                of_others: &splits_of_others_below,
            };
            let (mut plans, mut search) = around(asked, found, means);
            say_moved(&plans, asked.options, &mut search);
            plans.truncate(asked.options.top);
            answered(asked, (plans, search))
        })
        .map_err(|mut error| {
            if let PlanError::Infeasible { least, .. } = &mut error
                && asked.cluster.gpu.memory_gib < ENDLESS_GIB
            {
                let watch = &aimed(Aim::Least, asked.watch);
                *least = least_memory(&Asked { watch, ..*asked }).map(Box::new);
            }
            error
        })
}

/// What moves of layers came to is said wherever else the same plans are: inside a domain, and on a front.
fn say_moved(plans: &[Priced], options: &SearchOptions, search: &mut SearchRecord) {
    for own in plans.iter().map(|priced| Candidate::from(&priced.plan)) {
        let inside = search.inside_domain.as_mut();
        if let Some(best) = inside.and_then(|inside| inside.best.as_mut())
            && (best.layout, best.rank_order) == (own.layout, own.rank_order)
            && own.step_s < best.step_s
        {
            best.clone_from(&own);
        }
        if options.front > 0 && !search.feasible.contains(&own) {
            search.feasible.push(own);
        }
    }
}

/// The same without what is tried around the best, and without the search for the least memory where nothing fits, which may
/// take as long again.
pub fn plan_briefly(asked: &Asked<'_>) -> Result<SearchResult, PlanError> {
    plan_priced(asked, f64::INFINITY, &[]).map(|found| answered(asked, found))
}

fn answered(asked: &Asked<'_>, (priced, mut search): (Vec<Priced>, SearchRecord)) -> SearchResult {
    let options = asked.options;
    search.told_apart = predict::told_apart(options.stack, asked.costs, &priced);
    search.offloaded_together = offload::together(asked.model, options);
    let objective = options.objective;
    let alternatives = priced[1..]
        .iter()
        .map(|runner_up| explain::alternative(&priced[0], runner_up, objective))
        .collect();
    let plans = priced.into_iter().map(|priced| priced.plan).collect();
    SearchResult {
        plans,
        alternatives,
        search,
    }
}

/// What prices are of what is asked: the slowest GPU, loads that are known, and products whose scale is of whole tensors.
fn prices<'c>(
    costs: &'c Costs,
    options: &SearchOptions,
    (cluster, gpus): (&Cluster, u32),
) -> Cow<'c, Costs> {
    let mut costs = Cow::Borrowed(costs);
    let slowest = cluster.slowest_of(gpus);
    if slowest > 1.0 {
        costs = Cow::Owned(costs.into_owned().of_slowest(slowest));
    }
    if options.routing.is_some() {
        costs = Cow::Owned(costs.into_owned().with_known_loads());
    }
    if matches!(options.precision, Precision::Fp8 | Precision::Fp8Delayed) {
        costs = Cow::Owned(costs.into_owned().with_scales_of_tensors());
    }
    costs
}

/// Plans that score less than something, best first; of some splits, where there are any, or of those that are chosen.
fn plan_priced(
    asked: &Asked<'_>,
    below: f64,
    splits: &[Vec<Vec<u32>>],
) -> Result<(Vec<Priced>, SearchRecord), PlanError> {
    plan_kept(asked, asked.options.top, (below, splits))
}

/// The same, with some more than are wanted, `kept` in all, of those that are near to the best.
fn plan_kept(
    asked: &Asked<'_>,
    kept: usize,
    (below, splits): (f64, &[Vec<Vec<u32>>]),
) -> Result<(Vec<Priced>, SearchRecord), PlanError> {
    with_questions(asked, |questions, rules| {
        let with_splits = |question| Question { splits, ..question };
        let mut questions: Vec<_> = questions.into_iter().map(with_splits).collect();
        plan_questions(asked, (kept, below), (&mut questions, rules))
    })
}

/// Does something with the questions that a request comes to, under its prices.
fn with_questions<T>(
    asked: &Asked<'_>,
    work: impl FnOnce(Vec<Question<'_>>, &Rules) -> Result<T, PlanError>,
) -> Result<T, PlanError> {
    let options = asked.options;
    let costs = &*prices(asked.costs, options, (asked.cluster, asked.gpus));
    let rules = Rules::of(asked.model, options);
    let variants = offload::variants(asked);
    let questions = questions(&Asked { costs, ..*asked }, &rules, &variants)?;
    work(questions, &rules)
}

fn plan_questions(
    asked: &Asked<'_>,
    (kept, below): (usize, f64),
    (questions, rules): (&mut [Question<'_>], &Rules),
) -> Result<(Vec<Priced>, SearchRecord), PlanError> {
    let Asked {
        cluster,
        gpus,
        options,
        watch,
        ..
    } = *asked;
    offload::fits_on_hosts(&questions[0], gpus)?;
    let Candidates {
        layouts,
        space: total,
        refusals,
        too_large,
        any_legal,
    } = candidates(questions, (gpus, Variants::Few), rules, watch)?;
    let counts = refusals.iter().map(|r| (r.reason.to_owned(), r.count));
    let mut refused: BTreeMap<String, u64> = counts.collect();
    let sentences = refusals
        .into_iter()
        .map(|r| (r.reason.to_owned(), r.example));
    let examples: BTreeMap<String, String> = sentences.collect();
    if !any_legal {
        return Err(PlanError::NoneLegal {
            refused,
            examples,
            nearest: nearest(asked, rules).map(Box::new),
            gpus: nearest_gpus(asked, rules),
        });
    }

    let shapes = shapes(&layouts, questions);
    let schedules = Schedules::new(&questions[0], &layouts, watch).ok_or(PlanError::Stopped)?;
    let units = units(questions, &layouts, &shapes, &schedules, watch)?;

    let mut tally = Tally::default();
    let mut known = Known::new(if options.front > 0 { &units } else { &[] });
    let Ranked { ranking, unseen } = rank(
        questions,
        (units.iter(), units.len()),
        ([options.top, kept], below),
        (&mut tally, &mut known),
        watch,
    );
    if unseen.is_some() && ranking.is_empty() {
        return Err(PlanError::Stopped);
    }
    if tally.memory + too_large > 0 {
        refused.insert("memory".to_owned(), tally.memory + too_large);
    }
    let capacity = questions[0].capacity();
    let Some(best) = ranking.first() else {
        return Err(PlanError::Infeasible {
            space: total,
            refused,
            examples,
            least: None,
            capacity_gib: capacity.gib(),
            device_gib: cluster.gpu.memory_gib,
        });
    };
    let inside_domain = (!experts_inside_domain(&questions[0], best.unit.layout))
        .then(|| inside_domain(questions, &units, watch))
        .flatten();
    let of_layout = gap_of(best, questions);
    let mut gap = of_layout.unwrap_or(0.0);
    if let Some(left) = unseen {
        gap = gap.max(1.0 - left.floor / best.score(options.objective));
    }
    let unseen = unseen.map(|left| left.children);
    let priced = all_priced(questions, &ranking);
    let mut search = SearchRecord {
        told_apart: None,
        not_searched: Vec::new(),
        offloaded_together: Vec::new(),
        memory_limit_gib: (capacity < cluster.gpu.memory()).then(|| capacity.gib()),
        space: total,
        pruned: total - refused.values().sum::<u64>() - tally.priced - unseen.unwrap_or(0),
        unseen,
        refused,
        priced: tally.priced,
        elapsed_s: 0.0,
        optimal: unseen.is_none() && of_layout == Some(0.0),
        gap,
        gap_of_others: None,
        feasible: tally.feasible,
        survey: (options.survey && unseen.is_none())
            .then(|| survey(questions, &units, watch))
            .flatten(),
        inside_domain,
    };
    if unseen.is_none() {
        let (feasible, steps) = (&mut search.feasible, options.front);
        known.front(questions, &units, best, (feasible, steps), watch);
    }
    Ok((priced, search))
}

/// Splits of the layout that is asked for which may take less than so many seconds; none where that cannot be told.
fn splits_below(asked: &Asked<'_>, below_s: f64, which: Splits) -> Option<Open> {
    let layouts = |questions: &[Question<'_>], rules: &Rules| {
        let found = candidates(questions, (asked.gpus, Variants::Few), rules, asked.watch);
        found.ok().map(|found| found.layouts)
    };
    with_units(asked, layouts, |questions, units| {
        let looks = Looks::new(asked.watch, Phase::Looking, units.len());
        let mut open = Open::default();
        for unit in units {
            open.add(open_splits(questions, unit, (below_s, which), &looks));
        }
        Some(open)
    })
}

/// Layouts that may take less than a plan as some split has their layers, of all virtual stages and microbatches; nothing where they are not asked,
/// or the search is stopped.
fn others_below(asked: &Asked<'_>, best_s: f64) -> Option<Vec<Other>> {
    if !are_asked(asked.options) {
        return None;
    }
    let layouts = |questions: &[Question<'_>], rules: &Rules| {
        let found = candidates(questions, (asked.gpus, Variants::All), rules, asked.watch);
        found.ok().map(|found| found.layouts)
    };
    with_units(asked, layouts, |questions, units| {
        let looks = Looks::new(asked.watch, Phase::Bounding, units.len());
        Some(others(questions, units, best_s, &looks))
    })
}

/// By layout, splits of some that may take less than so many seconds; nothing where the search is stopped.
fn splits_of_others_below(asked: &Asked<'_>, below: (&[Other], f64)) -> Option<Vec<Open>> {
    let layouts = below.0.iter().map(|other| other.layout);
    let layouts = |_: &[Question<'_>], _: &Rules| Some(layouts.collect());
    with_units(asked, layouts, |questions, units| {
        let looks = Looks::new(asked.watch, Phase::Looking, units.len());
        Some(splits_of_others(questions, units, below, &looks))
    })
}

/// Does something with some layouts of a request; nothing where it is refused or the search is stopped.
fn with_units<T>(
    asked: &Asked<'_>,
    layouts: impl FnOnce(&[Question<'_>], &Rules) -> Option<Vec<Layout>>,
    work: impl FnOnce(&[Question<'_>], &[Unit<'_>]) -> Option<T>,
) -> Option<T> {
    let worked = with_questions(asked, |questions, rules| {
        let Some(layouts) = layouts(&questions, rules) else {
            return Ok(None);
        };
        let shapes = shapes(&layouts, &questions);
        let schedules = Schedules::new(&questions[0], &layouts, asked.watch);
        let schedules = schedules.ok_or(PlanError::Stopped)?;
        let units = units(&questions, &layouts, &shapes, &schedules, asked.watch)?;
        Ok(work(&questions, &units))
    });
    worked.ok().flatten()
}

/// Candidates that were found, priced in full.
fn all_priced(questions: &[Question<'_>], ranking: &[Found<'_>]) -> Vec<Priced> {
    let price = |found: &Found<'_>, simulator: &Simulator| {
        let question = &questions[found.question];
        let (memory, on_host) = (found.memory(question), found.on_host(question));
        let choice = found.choice();
        let mut priced = predict::planned(question, &choice, simulator, &memory, on_host);
        priced.plan.predicted.routing = otherwise::routing(question, found, simulator);
        priced
    };
    // Many are under one schedule, which may be long.
    let mut by_schedule: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (place, found) in ranking.iter().enumerate() {
        let layout = found.unit.layout;
        let key = [layout.pp(), layout.vpp(), layout.microbatches()];
        let under = by_schedule.entry((found.schedule, key)).or_default();
        under.push(place);
    }
    let under = |places: Vec<usize>| -> Vec<(usize, Priced)> {
        let first = &ranking[places[0]];
        let simulated = first
            .unit
            .schedules
            .simulated(first.unit.layout, first.schedule);
        let simulator = simulated.simulator();
        let each = places.into_iter();
        each.map(|place| (place, price(&ranking[place], simulator)))
            .collect()
    };
    let each = by_schedule.into_values().collect::<Vec<_>>();
    let each = each.into_par_iter().flat_map_iter(under);
    let priced: BTreeMap<usize, Priced> = each.collect();
    priced.into_values().collect()
}

/// The best plan, had a device memory without end; none where the search was stopped.
fn endless(asked: &Asked<'_>, gpus: u32, options: &SearchOptions) -> Option<PlannedLayout> {
    let mut cluster = asked.cluster.clone();
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let options = &options.clone().alone();
    let endless = Asked {
        cluster: &cluster,
        gpus,
        options,
        ..*asked
    };
    let found = plan_briefly(&endless).ok()?;
    let is_whole = found.search.unseen.is_none();
    found.plans.into_iter().next().filter(|_| is_whole)
}

/// The layout that needs the least memory, had a device memory without end.
fn least_memory(asked: &Asked<'_>) -> Option<LeastMemory> {
    let endless = |gpus, options: &SearchOptions| endless(asked, gpus, options);
    closest::least(asked.cluster, asked.gpus, asked.options, &endless)
}

/// What a request that nothing satisfies for want of memory needs at least, and what would fit: beside `least`, which
/// its error has. See [`Shortage`].
pub fn closest(asked: &Asked<'_>, least: Option<&LeastMemory>) -> Shortage {
    let watch = &aimed(Aim::Fit, asked.watch);
    let asked = &Asked { watch, ..*asked };
    closest::closest(asked, least, &|gpus, options| endless(asked, gpus, options))
}

/// What became of the best layout of degrees that were asked about, beside `found`, the plans of a search of the same.
/// See [`Why`].
///
/// # Errors
///
/// What is wrong with the request whatever its degrees are.
pub fn why(
    asked: &Asked<'_>,
    about: &PartialDegrees,
    found: &[PlannedLayout],
) -> Result<Why, PlanError> {
    let options = &SearchOptions {
        pins: *about,
        ..asked.options.clone().alone()
    };
    let asked = &Asked { options, ..*asked };
    let own = plan_watched(asked).map(|mut result| {
        let own = result.plans.remove(0);
        let bounds = bounds(asked, &own);
        (own, bounds)
    });
    why::why(about, own, found)
}

/// Seconds that a layout cannot take less than, as a search knows them before it prices it: by its work, and by the
/// best split that it tries under its best schedule. None where a search looks for the least memory.
fn bounds(asked: &Asked<'_>, own: &PlannedLayout) -> Option<[f64; 2]> {
    if asked.options.objective == Objective::Memory {
        return None;
    }
    let layouts = |_: &[Question<'_>], rules: &Rules| {
        let degrees = own.layout.pinned().complete(asked.gpus)?;
        let layout = rules.layout(&degrees).ok()?;
        Some(vec![layout.numbered(own.rank_order.unwrap_or_default())?])
    };
    with_units(asked, layouts, |questions, units| {
        let unit = units.first()?;
        let each = questions.iter().zip(unit.shapes);
        let bounds = each.map(|(question, shapes)| split_bound_s(question, unit, shapes));
        Some([unit.floor, bounds.fold(f64::INFINITY, f64::min)])
    })
}

/// Layouts whose steps are bounded between two looks at the watch.
const BOUNDED: usize = 1 << 6;

/// The best of some units, best first.
struct Ranked<'a> {
    ranking: Vec<Found<'a>>,
    /// What was not looked at, where the search was stopped.
    unseen: Option<Unseen>,
}

/// What a search has left.
#[derive(Debug, Clone, Copy)]
struct Unseen {
    /// Candidates that no bound rules out.
    children: u64,
    /// None of them scores less.
    floor: f64,
}

/// Ranks units of those that score less than something, which come in the order of their floors: so many, and more of those that are
/// near to the best, `kept` in all.
fn rank<'a>(
    questions: &[Question<'_>],
    (mut units, layouts): (impl Iterator<Item = &'a Unit<'a>>, usize),
    ([top, kept], below): ([usize; 2], f64),
    (tally, known): (&mut Tally, &mut Known<'a>),
    watch: &Watch<'_>,
) -> Ranked<'a> {
    let objective = questions[0].options.objective;
    let limit = |ranking: &[Found<'a>]| {
        let score = |place: usize| {
            let found = ranking.get(place);
            found.map_or(below, |found| found.score(objective))
        };
        score(top - 1).max(near(score(0)).min(score(kept - 1)))
    };
    let mut ranking: Vec<Found<'a>> = Vec::new();
    let mut unseen: Option<Unseen> = None;
    let mut looks = Looks::new(watch, Phase::Looking, layouts);
    for number in 0.. {
        let batch: Vec<&'a Unit<'a>> = units.by_ref().take(BATCH).collect();
        let limit = limit(&ranking);
        if batch.first().is_none_or(|first| first.floor >= limit) {
            break;
        }
        looks.best_s = ranking.first().map(|best| best.step_s);
        let outcomes: Vec<Outcome<'a>> = batch
            .par_iter()
            .map(|unit| visit(questions, unit, limit, &looks, &[]))
            .collect();
        let left = batch.iter().zip(&outcomes);
        if let Some((first, _)) = left.clone().find(|(_, outcome)| outcome.stopped) {
            let begun = left.map(|(unit, outcome)| outcome.unseen(unit, questions));
            unseen = Some(Unseen {
                children: begun.sum(),
                floor: first.floor,
            });
        }
        for (place, outcome) in (number * BATCH..).zip(outcomes) {
            tally.add(&outcome);
            known.learn(place, &outcome);
            ranking.extend(outcome.best);
        }
        ranking.sort_by(|a, b| {
            a.score(objective)
                .total_cmp(&b.score(objective))
                .then(a.unit.layout.cmp(b.unit.layout))
        });
        if questions[0].options.order.is_none() {
            // Of a layout the better order.
            let mut seen = BTreeSet::new();
            ranking.retain(|found| seen.insert(found.unit.layout.numbered(Order::PP_LAST)));
        }
        ranking.truncate(kept);
        if unseen.is_some() {
            break;
        }
    }
    if let Some(unseen) = &mut unseen {
        let limit = limit(&ranking);
        let left = units.filter(|unit| unit.floor < limit);
        unseen.children += left.map(|unit| unit.children(questions)).sum::<u64>();
    }
    let most = limit(&ranking);
    ranking.truncate(ranking.partition_point(|found| found.score(objective) <= most));
    Ranked { ranking, unseen }
}

fn experts_inside_domain(question: &Question<'_>, layout: &Layout) -> bool {
    placement(layout, GroupKind::TpEp, question.cluster).inside_domain()
}

/// What keeping the experts inside one NVLink domain would come to, priced as everything else; nothing where the
/// search is stopped before.
fn inside_domain(
    questions: &[Question<'_>],
    units: &[Unit<'_>],
    watch: &Watch<'_>,
) -> Option<InsideDomain> {
    let near = units
        .iter()
        .filter(|unit| experts_inside_domain(&questions[0], unit.layout));
    let unsaid = (&mut Tally::default(), &mut Known::new(&[]));
    let watch = &aimed(Aim::InsideDomain, watch);
    let only = ([1, 1], f64::INFINITY);
    let Ranked { ranking, unseen } = rank(questions, (near, units.len()), only, unsaid, watch);
    unseen.is_none().then(|| InsideDomain {
        gpus_per_domain: questions[0].cluster.gpus_per_domain,
        best: ranking
            .first()
            .map(|found| found.candidate(&questions[found.question])),
    })
}

/// Shapes by what they depend on, and by question.
type ByKey = BTreeMap<ShapeKey, Vec<Shapes>>;

fn shapes(layouts: &[Layout], questions: &[Question<'_>]) -> ByKey {
    let key = |layout: &Layout| shape_key(&questions[0], layout);
    let of_each = |layout| questions.iter().map(|_| Shapes::new(layout)).collect();
    let found = by_key(layouts, key).into_iter();
    found.map(|(key, layout)| (key, of_each(layout))).collect()
}

/// Layouts by their floors, lowest first.
fn units<'a>(
    questions: &[Question<'_>],
    layouts: &'a [Layout],
    shapes: &'a ByKey,
    schedules: &'a Schedules,
    watch: &Watch<'_>,
) -> Result<Vec<Unit<'a>>, PlanError> {
    let question = &questions[0];
    let all = || shapes.values().map(|shapes| shapes[0].layout());
    // No layout takes less time under one below another.
    let fastest = questions.iter().filter(|of| of.above.is_empty());
    let works: Option<Vec<(&Question<'_>, Works)>> = fastest
        .map(|of| Some((of, Works::new(of, all(), watch)?)))
        .collect();
    let works = works.ok_or(PlanError::Stopped)?;
    let objective = question.options.objective;
    let of_shape = |shapes: &Vec<Shapes>| -> Vec<ShapeWork> {
        let each = works.iter();
        each.flat_map(|(of, works)| works.of(of, shapes[0].layout()))
            .collect()
    };
    let known: BTreeMap<ShapeKey, _> = shapes
        .par_iter()
        .map(|(&key, shapes)| (key, (of_shape(shapes), shapes)))
        .collect();
    let looks = Looks::new(watch, Phase::Bounding, layouts.len());
    let unit = |weights: &mut Weights, layout: &'a Layout, is_stopped| {
        let (work, shapes) = &known[&shape_key(question, layout)];
        let floor = match objective {
            // Nobody looks at it.
            _ if is_stopped => 0.0,
            Objective::Throughput => {
                // The schedules are the same.
                let floors = work.iter().map(|work| floor_s(question, layout, work));
                floors.fold(f64::INFINITY, f64::min)
            }
            Objective::Memory => held(question, layout, weights).gib(),
        };
        Unit {
            layout,
            shapes,
            schedules,
            floor,
        }
    };
    let is_stopped = AtomicBool::new(false);
    let each = layouts.par_iter().enumerate().with_min_len(BOUNDED);
    let mut units: Vec<Unit<'a>> = each
        .map_init(Weights::new, |weights, (number, layout)| {
            if number.is_multiple_of(BOUNDED) {
                is_stopped.fetch_or(looks.look().is_break(), Ordering::Relaxed);
                looks.seen(BOUNDED.min(layouts.len() - number));
            }
            let is_stopped = is_stopped.load(Ordering::Relaxed);
            unit(weights, layout, is_stopped)
        })
        .collect();
    // However few there are, some progress is heard.
    if is_stopped.into_inner() || looks.look().is_break() {
        return Err(PlanError::Stopped);
    }
    units.par_sort_unstable_by(|a, b| a.floor.total_cmp(&b.floor).then(a.layout.cmp(b.layout)));
    Ok(units)
}
