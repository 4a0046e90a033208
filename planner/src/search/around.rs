//! [`around`]: what is close to the best plans of a search and was no candidate of it.

use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::asked::Asked;
use super::candidate::NEAR;
use super::least::{Open, Splits};
use super::others::{Other, are_asked};
use super::predict::Priced;
use super::watch::{Aim, Progress, Watch, aimed, unwatched};
use crate::answer::{Candidate, InsideDomain, SearchRecord};
use crate::choice::Objective;
use crate::layout::PartialDegrees;
use crate::options::{PlanError, SearchOptions};
use crate::partition;
use crate::plan::LayoutRecord;

/// Finds the plans that score less than something, best first, of some splits or of those that it chooses.
type Search = dyn Fn(&Asked<'_>, f64, &[Vec<Vec<u32>>]) -> Result<(Vec<Priced>, SearchRecord), PlanError>
    + Sync;

/// Splits of the layout that is asked for which may take less than something; none where that cannot be told.
type SplitsBelow = dyn Fn(&Asked<'_>, f64, Splits) -> Option<Open> + Sync;

/// Layouts that may take less than something; none where they are not asked, or that cannot be told.
type OthersBelow = dyn Fn(&Asked<'_>, f64) -> Option<Vec<Other>> + Sync;

/// By layout, splits of some that may take less than something.
type SplitsOfOthers = dyn Fn(&Asked<'_>, (&[Other], f64)) -> Option<Vec<Open>> + Sync;

/// What is asked of a search.
#[derive(Clone, Copy)]
pub(super) struct Means<'m> {
    pub(super) plan: &'m Search,
    pub(super) open: &'m SplitsBelow,
    pub(super) others: &'m OthersBelow,
    pub(super) of_others: &'m SplitsOfOthers,
}

/// Of how many plans layers are moved.
const MOVED: usize = 8;
/// By what share such a plan may take longer than the best where ranks have several stages, whose splits are not exact: moves made
/// steps up to 2.1 % shorter (Qwen3-30B on 64 H100, two ranks of four stages).
const CLOSE: f64 = 0.03;
/// The same where ranks have one stage, and splits are the best by what ranks are sure to take: moves made steps 0.7 % shorter
/// (DeepSeek-V3 on 256), and those of #1 too.
const CLOSE_OF_ONE_STAGE: f64 = 0.005;
/// By what share plans of several stages a rank may take longer for which better splits are looked for: with few microbatches those made steps up to 7.1 % shorter (Qwen3-Next on 72
/// H100, three ranks of four stages).
const CLOSE_TO_SPLIT: f64 = 0.08;
/// The same of plans that are looked at once more when the best split of the best is known.
const CLOSE_TO_FIRST: f64 = 0.01;
/// How often a layer is moved at most.
const MOVES: usize = 8;
/// How many splits two moves away are tried at most.
const PAIRS: usize = 256;
/// How often another layout may become the best as all are looked at.
const TURNS: usize = 4;

/// How many plans a search has to keep, so that the best does not depend on how many are shown: those too that moves of layers may
/// make the best.
pub(super) fn num_kept(options: &SearchOptions) -> usize {
    options.top.max(if may_move(options) { MOVED } else { 1 })
}

/// What a plan that another split may make the best takes at most, where the best takes so long.
pub(super) fn near(best: f64) -> f64 {
    (1.0 + CLOSE_TO_SPLIT) * best
}

/// Whether layers may be moved between stages.
fn may_move(options: &SearchOptions) -> bool {
    options.stages.is_none() && options.objective != Objective::Memory
}

/// What was found, the first of it with what its degrees come to under all virtual stages and microbatches, and the first ones with
/// their layers in other stages, where these are better. Counts are those of the search; where that was stopped, nothing is
/// tried, and stopped meanwhile, what is best so far is kept.
pub(super) fn around(
    asked: &Asked<'_>,
    (mut plans, mut search): (Vec<Priced>, SearchRecord),
    means: Means<'_>,
) -> (Vec<Priced>, SearchRecord) {
    if search.unseen.is_some() {
        return (plans, search);
    }
    let (aimed, stopped) = (aimed(Aim::Around, asked.watch), AtomicBool::new(false));
    let watch: &Watch<'_> = &|progress: &Progress| {
        let go_on = aimed(progress);
        stopped.fetch_or(go_on.is_break(), Ordering::Relaxed);
        go_on
    };
    let options = &asked.options.clone().alone();
    let all = Asked {
        options,
        watch,
        ..*asked
    };
    let variants = degrees(&all, means, &mut plans, &mut search);
    if stopped.load(Ordering::Relaxed) {
        // Nothing is known of what was not tried.
        search.gap = 1.0;
    } else {
        let is_stopped = || stopped.load(Ordering::Relaxed);
        let among = (&mut plans, variants);
        if !stages(&all, (means, &is_stopped), among, &mut search) {
            // What could be gained is known all the same.
            return (plans, search);
        }
    }
    if stopped.into_inner() {
        (search.unseen, search.optimal) = (Some(0), false);
    }
    (plans, search)
}

/// Tries virtual stages and microbatches that [`crate::rules::space`] leaves out while other degrees are open. Those that take little
/// longer than the best are left to be split otherwise.
fn degrees(
    asked: &Asked<'_>,
    means: Means<'_>,
    plans: &mut Vec<Priced>,
    search: &mut SearchRecord,
) -> Vec<Priced> {
    let own = asked.options.pins;
    let best = plans[0].plan.layout.pinned();
    let pins = PartialDegrees {
        vpp: own.vpp,
        mbs: own.mbs,
        ..best
    };
    if own.names_ranks() || pins == best {
        return Vec::new();
    }
    let options = &SearchOptions {
        pins,
        top: MOVED,
        ..asked.options.clone()
    };
    let score = plans[0].plan.predicted.score(asked.options.objective);
    let below = if may_move(asked.options) {
        near(score)
    } else {
        score
    };
    let asked = &Asked { options, ..*asked };
    let found = (means.plan)(asked, below, &[]);
    let Ok((mut found, record)) = found else {
        return Vec::new();
    };
    if record.unseen.is_some() {
        return Vec::new();
    }
    if found[0].plan.predicted.score(asked.options.objective) < score {
        (search.optimal, search.gap) = (record.optimal, record.gap);
        plans.insert(0, found.remove(0));
    }
    found
}

/// Moves layers of the first plans between stages, looks for better splits of those that have several stages a rank, of `variants` of the
/// best too and of those of what becomes the best by that, and last for what splits of the best may take less still: all where these are few, else the best of all. Then once more for
/// better splits of those that take hardly longer, and for splits of `others` that take less. Whether the search was stopped before that.
fn stages(
    asked: &Asked<'_>,
    (means, is_stopped): (Means<'_>, &dyn Fn() -> bool),
    (plans, variants): (&mut Vec<Priced>, Vec<Priced>),
    search: &mut SearchRecord,
) -> bool {
    let Means { plan, open, .. } = means;
    if asked.options.objective == Objective::Memory {
        return is_stopped();
    }
    // What no split of the best layout takes less than.
    let mut floor_s = least_s(&plans[0], search);
    let is_whole = search.optimal;
    let mut are_tried = true;
    if may_move(asked.options) {
        let (mut before, mut variants) = (plans[0].plan.layout, variants);
        for turn in 0..TURNS {
            let mut first = |plans: &mut [Priced], place: usize| {
                floor_s = put_first(asked, plan, (plans, place), search);
            };
            if turn == 0 {
                move_layers(asked, plan, plans, is_whole, &mut first);
            }
            split_briefly(asked, (plan, open), (plans, variants), &mut first);
            if divides_alike(&plans[0].plan.layout, &before) || is_stopped() {
                break;
            }
            before = plans[0].plan.layout;
            let best_s = step_s(&plans[0]);
            variants = degrees(asked, means, plans, search);
            if step_s(&plans[0]) < best_s {
                floor_s = least_s(&plans[0], search);
            }
            are_tried = !is_stopped();
        }
    }
    let was_stopped = is_stopped();
    floor_s = prove(asked, (plan, open), plans, floor_s);
    let mut is_other = false;
    for place in 1..plans.len().min(MOVED) {
        if is_stopped() {
            break;
        }
        let is_next =
            plans[place].plan.layout.vpp > 1 && is_within(&plans[place], &plans[0], CLOSE_TO_FIRST);
        let below = (step_s(&plans[0]), Splits::Next);
        let found = is_next.then(|| split_below(asked, (plan, open), &plans[place], below).0);
        if let Some(found) = found.flatten() {
            plans[place] = found;
            floor_s = put_first(asked, plan, (plans, place), search);
            is_other = true;
        }
    }
    if is_other {
        floor_s = prove(asked, (plan, open), plans, floor_s);
    }
    let means = (means, is_stopped);
    let others_s;
    (floor_s, others_s) = of_others(asked, means, plans, (floor_s, search));
    if let Some(found) = chosen_in_step(asked, plan, &plans[0]) {
        plans[0] = found;
    }
    let gap = |least_s: f64| {
        let gap = 1.0 - least_s / step_s(&plans[0]);
        if gap < NEAR { 0.0 } else { gap }
    };
    // Nothing is known of what was not tried.
    search.gap = if are_tried { gap(floor_s) } else { 1.0 };
    search.gap_of_others = are_asked(asked.options).then(|| gap(others_s));
    search.optimal = search.gap == 0.0 && search.gap_of_others.unwrap_or(0.0) == 0.0;
    was_stopped
}

/// Looks for splits of other layouts that take less than the best plan does. What that of the best takes no less than then, which was known of
/// it before to take no less than `floor_s`, and what the others do not.
fn of_others(
    asked: &Asked<'_>,
    (means, is_stopped): (Means<'_>, &dyn Fn() -> bool),
    plans: &mut Vec<Priced>,
    (mut floor_s, search): (f64, &mut SearchRecord),
) -> (f64, f64) {
    let Some(mut others) = (means.others)(asked, step_s(&plans[0])) else {
        return (floor_s, 0.0);
    };
    // What was the best before takes no less than was known of it then.
    let mut before_s = f64::INFINITY;
    for turn in 0.. {
        let best_s = step_s(&plans[0]);
        others.retain(|other| other.least_s < best_s * (1.0 - NEAR) && !is_of(&plans[0], other));
        if others.is_empty() || turn == TURNS || is_stopped() {
            break;
        }
        let Some(opened) = (means.of_others)(asked, (&others, best_s)) else {
            break;
        };
        let mut found: Vec<Priced> = Vec::new();
        for (other, open) in others.iter_mut().zip(opened) {
            if !open.is_empty() {
                let pins = LayoutRecord::from(&other.layout).pinned();
                found.extend(of_open(asked, means.plan, (best_s, pins), &open));
            }
            other.least_s = open.left_s;
        }
        put_among(plans, found);
        let is_better = |next: &Priced| step_s(next) < best_s;
        if !plans.get(1).is_some_and(is_better) {
            break;
        }
        before_s = before_s.min(floor_s);
        floor_s = put_first(asked, means.plan, (plans, 1), search);
        floor_s = prove(asked, (means.plan, means.open), plans, floor_s);
    }
    let best = &plans[0];
    let others = others.iter().filter(|other| !is_of(best, other));
    let each = others.map(|other| other.least_s);
    (floor_s, each.fold(before_s, f64::min))
}

/// Whether a plan is of a layout.
fn is_of(own: &Priced, other: &Other) -> bool {
    let order = own.plan.rank_order.unwrap_or_default();
    own.plan.layout == LayoutRecord::from(&other.layout) && order == other.layout.order()
}

/// Looks for the best split of the best plan. What no split of its layout takes less than, of which so much is known before.
fn prove(
    asked: &Asked<'_>,
    (plan, open): (&Search, &SplitsBelow),
    plans: &mut [Priced],
    floor_s: f64,
) -> f64 {
    let best_s = step_s(&plans[0]);
    if floor_s >= best_s {
        return floor_s;
    }
    let (found, left_s) = split_below(asked, (plan, open), &plans[0], (best_s, Splits::All));
    if let Some(found) = found {
        plans[0] = found;
    }
    floor_s.max(left_s)
}

/// A plan of several stages a rank whose layers compute again one by one, where they choose so that its step gets shorter: as they do where one
/// split is all that is tried.
fn chosen_in_step(asked: &Asked<'_>, plan: &Search, own: &Priced) -> Option<Priced> {
    let recompute = &own.plan.recompute;
    let is_by_layer = recompute.alike().is_none() && recompute.block().is_none();
    if !is_by_layer || own.plan.layout.vpp == 1 {
        return None;
    }
    let split = &own.plan.pipeline.stages;
    let found = priced(
        asked,
        plan,
        step_s(own),
        own.plan.layout.pinned(),
        std::slice::from_ref(split),
    );
    found.map(|(found, _)| found)
}

/// Whether moves of layers may make a plan take less than the best.
fn may_win(own: &Priced, best: &Priced) -> bool {
    let close = match own.plan.layout.vpp {
        1 => CLOSE_OF_ONE_STAGE,
        _ => CLOSE,
    };
    is_within(own, best, close)
}

/// Whether a plan takes longer than the best by no more than some share.
fn is_within(own: &Priced, best: &Priced, share: f64) -> bool {
    step_s(own) <= (1.0 + share) * step_s(best)
}

/// Moves layers of the first plans between stages. Splits are balanced by what ranks are sure to take ([`crate::partition`]); what
/// messages and the ends of a step add is known when they are simulated, and may put another layout first.
fn move_layers(
    asked: &Asked<'_>,
    plan: &Search,
    plans: &mut [Priced],
    is_whole: bool,
    put_first: &mut dyn FnMut(&mut [Priced], usize),
) {
    let first = usize::from(is_whole);
    let each = plans[..plans.len().min(MOVED)].par_iter().enumerate();
    // Fewer may win when those before them are moved.
    let all_moved: Vec<Option<Priced>> = each
        .map(|(place, own)| {
            let is_tried = place >= first && may_win(own, &plans[0]);
            is_tried.then(|| moved(asked, plan, own)).flatten()
        })
        .collect();
    for (place, found) in all_moved.into_iter().enumerate() {
        let Some(found) = found.filter(|_| may_win(&plans[place], &plans[0])) else {
            continue;
        };
        plans[place] = found;
        if step_s(&plans[place]) < step_s(&plans[0]) {
            put_first(plans, place);
        }
    }
    sort(&mut plans[1..]);
}

/// Looks for a moment for better splits of plans that take little longer than the best and have several stages a rank, of the best, of
/// those behind it and of others.
fn split_briefly(
    asked: &Asked<'_>,
    (plan, open): (&Search, &SplitsBelow),
    (plans, variants): (&mut Vec<Priced>, Vec<Priced>),
    put_first: &mut dyn FnMut(&mut [Priced], usize),
) {
    let best_s = step_s(&plans[0]);
    let variants = variants
        .iter()
        .filter(|own| plans.iter().all(|plan| !is_same(plan, own)));
    let others = plans.iter().take(MOVED).chain(variants);
    let is_near =
        |own: &&Priced| own.plan.layout.vpp > 1 && is_within(own, &plans[0], CLOSE_TO_SPLIT);
    let others: Vec<&Priced> = others.filter(is_near).collect();
    let briefly = |own| split_below(asked, (plan, open), own, (best_s, Splits::Better)).0;
    let others: Vec<Priced> = others.into_par_iter().filter_map(briefly).collect();
    put_among(plans, others);
    let is_better = |next: &Priced| step_s(next) < step_s(&plans[0]);
    if plans.get(1).is_some_and(is_better) {
        put_first(plans, 1);
        sort(&mut plans[1..]);
    }
    if let Some(found) = moved(asked, plan, &plans[0]) {
        plans[0] = found;
    }
}

/// Puts plans where slower ones of their layouts were, and sorts all but the best.
fn put_among(plans: &mut Vec<Priced>, found: Vec<Priced>) {
    for found in found {
        match plans.iter_mut().find(|plan| is_same(plan, &found)) {
            Some(plan) if step_s(plan) <= step_s(&found) => {}
            Some(plan) => *plan = found,
            None => plans.push(found),
        }
    }
    sort(&mut plans[1..]);
}

/// The fastest first.
fn sort(plans: &mut [Priced]) {
    plans.sort_by(|a, b| step_s(a).total_cmp(&step_s(b)));
}

/// Puts a plan first that is the best now, and says how many seconds its layout takes no less than.
fn put_first(
    asked: &Asked<'_>,
    plan: &Search,
    (plans, place): (&mut [Priced], usize),
    search: &mut SearchRecord,
) -> f64 {
    let pins = plans[place].plan.layout.pinned();
    let whole = priced(asked, plan, f64::INFINITY, pins, &[]);
    let floor_s = whole
        .as_ref()
        .map_or(0.0, |(found, record)| least_s(found, record));
    // Where experts reach past a domain now, and did not before, those of before are the best inside.
    let before = search.inside_domain.take();
    let reaches = whole.and_then(|(_, record)| record.inside_domain);
    search.inside_domain = reaches.map(|reach| {
        before.unwrap_or_else(|| InsideDomain {
            best: Some(Candidate::from(&plans[0].plan)),
            ..reach
        })
    });
    plans[..=place].rotate_right(1);
    floor_s
}

/// The layout of a plan with the split that takes the least, where it is found to take less than something, and seconds that no
/// split of it takes less than that was not tried.
fn split_below(
    asked: &Asked<'_>,
    (plan, open): (&Search, &SplitsBelow),
    own: &Priced,
    (below_s, of): (f64, Splits),
) -> (Option<Priced>, f64) {
    let pins = own.plan.layout.pinned();
    let mut options = SearchOptions {
        pins,
        ..asked.options.clone()
    };
    if of == Splits::Better {
        let plan = &own.plan;
        options.dispatcher = Some(plan.dispatcher);
        let is_one = plan.recompute.alike().is_some() || plan.recompute.block().is_some();
        options.recompute = is_one.then(|| plan.recompute.clone()).or(options.recompute);
    }
    let options = &options;
    let Some(open) = open(&Asked { options, ..*asked }, below_s, of) else {
        return (None, 0.0);
    };
    (of_open(asked, plan, (below_s, pins), &open), open.left_s)
}

/// The best of splits that are open, at some degrees, where it takes less than something.
fn of_open(
    asked: &Asked<'_>,
    plan: &Search,
    (below_s, pins): (f64, PartialDegrees),
    open: &Open,
) -> Option<Priced> {
    // What was found is not lost where the search was stopped meanwhile.
    let asked = &Asked {
        watch: &unwatched,
        ..*asked
    };
    let mut best: Option<Priced> = None;
    for (stages, recompute) in &open.chosen {
        let options = &SearchOptions {
            recompute: Some(recompute.clone()),
            ..asked.options.clone()
        };
        let below_s = best.as_ref().map_or(below_s, step_s);
        let asked = &Asked { options, ..*asked };
        let found = priced(asked, plan, below_s, pins, std::slice::from_ref(stages));
        best = found.map(|(found, _)| found).or(best);
    }
    if open.splits.is_empty() {
        return best;
    }
    let splits: Vec<_> = open.splits.iter().cloned().collect();
    let below_s = best.as_ref().map_or(below_s, step_s);
    let found = priced(asked, plan, below_s, pins, &splits);
    found.map(|(found, _)| found).or(best)
}

/// A plan with layers moved one at a time, or where that does not help two, as long as its step gets shorter; none where it does not.
fn moved(asked: &Asked<'_>, plan: &Search, own: &Priced) -> Option<Priced> {
    let pins = own.plan.layout.pinned();
    let mut best: Option<Priced> = None;
    for _ in 0..MOVES {
        let known = best.as_ref().unwrap_or(own);
        let moved = partition::moves(&known.plan.pipeline.stages);
        if moved.is_empty() {
            break;
        }
        let found = priced(asked, plan, step_s(known), pins, &moved);
        // Where no move makes it shorter two may, as where fewer layers compute again then.
        let found = found.or_else(|| {
            let pairs = moved.iter().flat_map(|split| partition::moves(split));
            let mut pairs: Vec<_> = pairs.take(PAIRS + 1).collect();
            if pairs.len() > PAIRS {
                return None;
            }
            pairs.sort_unstable();
            pairs.dedup();
            priced(asked, plan, step_s(known), pins, &pairs)
        });
        match found {
            Some((found, _)) => best = Some(found),
            None => break,
        }
    }
    best
}

/// Seconds that the layout of a plan takes no less than, by the search that found it.
fn least_s(best: &Priced, search: &SearchRecord) -> f64 {
    (1.0 - search.gap) * step_s(best)
}

/// Whether two layouts divide ranks alike: all their degrees are the same but virtual stages and microbatches.
fn divides_alike(a: &LayoutRecord, b: &LayoutRecord) -> bool {
    let [a, b] = [a, b].map(|own| PartialDegrees {
        vpp: None,
        mbs: None,
        ..own.pinned()
    });
    a == b
}

/// Whether two plans are of one layout.
fn is_same(a: &Priced, b: &Priced) -> bool {
    let [a, b] = [a, b].map(|own| (own.plan.layout, own.plan.rank_order));
    a == b
}

fn step_s(priced: &Priced) -> f64 {
    priced.plan.predicted.step_s
}

/// The best of what is asked at some degrees, where it scores less than something and the search came to its end.
fn priced(
    asked: &Asked<'_>,
    plan: &Search,
    below: f64,
    pins: PartialDegrees,
    splits: &[Vec<Vec<u32>>],
) -> Option<(Priced, SearchRecord)> {
    let options = &SearchOptions {
        pins,
        ..asked.options.clone()
    };
    let (mut plans, record) = plan(&Asked { options, ..*asked }, below, splits).ok()?;
    let found = plans.swap_remove(0);
    let is_better = found.plan.predicted.score(options.objective) < below;
    (is_better && record.unseen.is_none()).then_some((found, record))
}
