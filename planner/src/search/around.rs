//! [`around`]: what is close to the best plan of a search and was no candidate of it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::asked::Asked;
use super::least::Open;
use super::predict::Priced;
use super::watch::{Aim, Progress, Watch, aimed};
use crate::answer::SearchRecord;
use crate::choice::Objective;
use crate::layout::PartialDegrees;
use crate::options::{PlanError, SearchOptions};
use crate::partition;

/// Finds the plans that score less than something, best first, of some splits or of those that it chooses.
type Search =
    dyn Fn(&Asked<'_>, f64, &[Vec<Vec<u32>>]) -> Result<(Vec<Priced>, SearchRecord), PlanError>;

/// All splits of the layout that is asked for which may take less than something; none where these are many.
type SplitsBelow = dyn Fn(&Asked<'_>, f64) -> Option<Open>;

/// How often a layer is moved at most.
const MOVES: usize = 8;
/// How many splits two moves away are tried at most.
const PAIRS: usize = 256;

/// What was found, the first of it with what its degrees come to under all virtual stages and microbatches, and with its
/// layers in other stages, where these are better. Counts are those of the search; where that was stopped, nothing is
/// tried, and stopped meanwhile, what is best so far is kept.
pub(super) fn around(
    asked: &Asked<'_>,
    (mut plans, mut search): (Vec<Priced>, SearchRecord),
    (plan, open): (&Search, &SplitsBelow),
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
    degrees(&all, plan, &mut plans, &mut search);
    if stopped.load(Ordering::Relaxed) {
        // Nothing is known of what was not tried.
        search.gap = 1.0;
    } else {
        let is_stopped = || stopped.load(Ordering::Relaxed);
        stages(&all, (plan, open, &is_stopped), &mut plans[0], &mut search);
    }
    if stopped.into_inner() {
        (search.unseen, search.optimal) = (Some(0), false);
    }
    plans.truncate(asked.options.top);
    (plans, search)
}

/// Tries virtual stages and microbatches that [`crate::rules::space`] leaves out while other degrees are open.
fn degrees(asked: &Asked<'_>, plan: &Search, plans: &mut Vec<Priced>, search: &mut SearchRecord) {
    let own = asked.options.pins;
    let best = plans[0].plan.layout.pinned();
    let pins = PartialDegrees {
        vpp: own.vpp,
        mbs: own.mbs,
        ..best
    };
    if own.names_ranks() || pins == best {
        return;
    }
    let score = plans[0].plan.predicted.score(asked.options.objective);
    let Some((found, record)) = priced(asked, plan, score, pins, &[]) else {
        return;
    };
    (search.optimal, search.gap) = (record.optimal, record.gap);
    plans.insert(0, found);
}

/// Moves layers of a plan between stages, one at a time or where that does not help two, as long as its step gets shorter. Splits
/// are balanced by what ranks are sure to take ([`crate::partition`]); what messages and the ends of a step add is known when they
/// are simulated. Then all splits are tried that may take less still, where these are few, and nothing is left to gain.
fn stages(
    asked: &Asked<'_>,
    (plan, open, is_stopped): (&Search, &SplitsBelow, &dyn Fn() -> bool),
    best: &mut Priced,
    search: &mut SearchRecord,
) {
    let options = asked.options;
    let given = options.stages.is_some() || options.objective == Objective::Memory;
    if given || search.optimal {
        return;
    }
    let (pins, step_s) = (best.plan.layout.pinned(), |priced: &Priced| {
        priced.plan.predicted.step_s
    });
    let before_s = step_s(best);
    for _ in 0..MOVES {
        let moved = partition::moves(&best.plan.pipeline.stages);
        if moved.is_empty() {
            break;
        }
        let found = priced(asked, plan, step_s(best), pins, &moved);
        // Where no move makes it shorter two may, as where fewer layers compute again then.
        let found = found.or_else(|| {
            let pairs = moved.iter().flat_map(|split| partition::moves(split));
            let mut pairs: Vec<_> = pairs.take(PAIRS + 1).collect();
            if pairs.len() > PAIRS {
                return None;
            }
            pairs.sort_unstable();
            pairs.dedup();
            priced(asked, plan, step_s(best), pins, &pairs)
        });
        match found {
            Some((found, _)) => *best = found,
            None => break,
        }
    }
    let pinned = &SearchOptions {
        pins,
        ..options.clone()
    };
    let of_layout = &Asked {
        options: pinned,
        ..*asked
    };
    if let Some(Open { splits, by_layer_s }) = open(of_layout, step_s(best)) {
        let splits: Vec<_> = splits.into_iter().collect();
        if !splits.is_empty()
            && let Some((found, _)) = priced(asked, plan, step_s(best), pins, &splits)
        {
            *best = found;
        }
        if !is_stopped() {
            search.gap = (1.0 - by_layer_s / step_s(best)).max(0.0);
            search.optimal = search.gap == 0.0;
            return;
        }
    }
    if step_s(best) < before_s {
        // What no split takes less than is the same.
        search.gap = (1.0 - (1.0 - search.gap) * before_s / step_s(best)).max(0.0);
    }
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
