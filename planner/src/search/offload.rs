//! [`best`]: the search where what leaves for the host is open.
//!
//! Each of a few sets of modules is searched by itself, nothing first, and of each layout the best is kept. What
//! is tried: the experts' tensors, which are the largest, those of attention, and all.

use super::predict::Priced;
use crate::answer::SearchRecord;
use crate::choice::{Objective, Offload, OffloadModule};
use crate::model::Model;
use crate::options::{PlanError, SearchOptions};

/// A search under one choice.
type Search<'a> = dyn Fn(Offload) -> Result<(Vec<Priced>, SearchRecord), PlanError> + 'a;

/// The sets that are tried of a model, nothing first.
fn tried(model: &Model, options: &SearchOptions) -> Vec<Offload> {
    let mut sets = vec![Offload::NONE];
    if options.overlap.unwrap_or_default().expert_alltoall {
        // Combined passes go with no other.
        return sets;
    }
    let there = Offload::all(model);
    let (experts, attention) = (
        [OffloadModule::ExpertFc1, OffloadModule::MoeAct],
        [
            OffloadModule::QkvLinear,
            OffloadModule::CoreAttn,
            OffloadModule::AttnProj,
        ],
    );
    for modules in [&experts[..], &attention[..], &OffloadModule::ALL[..]] {
        let set = Offload::of(modules.iter().copied().filter(|m| there.covers(*m)));
        // Nothing that is computed again alone: a pinned `recompute` may leave nothing.
        let left = match &options.recompute {
            Some(recompute) => set.kept(model, &|layer| recompute.of_layer(layer)),
            None => set,
        };
        if !left.is_none() && !sets.contains(&left) {
            sets.push(left);
        }
    }
    sets
}

/// The best plans over all choices, and the counts of all searches.
pub(super) fn best(
    model: &Model,
    options: &SearchOptions,
    under: &Search<'_>,
) -> Result<(Vec<Priced>, SearchRecord), PlanError> {
    let (mut all, mut record, mut infeasible) = (Vec::new(), None::<SearchRecord>, None);
    for offload in tried(model, options) {
        let (priced, searched) = match under(offload) {
            Ok(found) => found,
            Err(error @ PlanError::Infeasible { .. }) => {
                infeasible = Some(error);
                continue;
            }
            Err(PlanError::Stopped) if record.is_some() => {
                // What was never begun may be of any speed.
                record = record.map(|record| SearchRecord {
                    unseen: Some(record.unseen.unwrap_or(0)),
                    optimal: false,
                    gap: 1.0,
                    ..record
                });
                break;
            }
            Err(error) => return Err(error),
        };
        all.extend(priced);
        record = Some(match record {
            None => searched,
            Some(before) => added(before, searched),
        });
    }
    let Some(record) = record else {
        return Err(infeasible.expect("one choice at least was searched"));
    };
    let score = |priced: &Priced| {
        let predicted = &priced.plan.predicted;
        match options.objective {
            Objective::Throughput => predicted.step_s,
            Objective::Memory => predicted.peak_gib,
        }
    };
    // Those that came first stay before others that are as good.
    all.sort_by(|a, b| score(a).total_cmp(&score(b)));
    let mut best: Vec<Priced> = Vec::new();
    for priced in all {
        if best
            .iter()
            .all(|known| known.plan.layout != priced.plan.layout)
        {
            best.push(priced);
        }
    }
    best.truncate(options.top);
    Ok((best, record))
}

/// The counts of two searches; what is said of the best plan stands only where both say it.
fn added(before: SearchRecord, searched: SearchRecord) -> SearchRecord {
    let mut refused = before.refused;
    for (reason, count) in searched.refused {
        *refused.entry(reason).or_default() += count;
    }
    let mut feasible = before.feasible;
    feasible.extend(searched.feasible);
    SearchRecord {
        space: before.space + searched.space,
        pruned: before.pruned + searched.pruned,
        priced: before.priced + searched.priced,
        unseen: match (before.unseen, searched.unseen) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(0) + b.unwrap_or(0)),
        },
        optimal: before.optimal && searched.optimal,
        gap: before.gap.max(searched.gap),
        refused,
        feasible,
        ..before
    }
}
