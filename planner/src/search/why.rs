//! [`why`]: what became of one layout in a search, against its first plan.

use std::collections::BTreeMap;

use moefold_profiles::trace::Category;

use crate::answer::{Bounds, Candidate, RuledOut, Verdict, Why};
use crate::layout::PartialDegrees;
use crate::options::PlanError;
use crate::plan::PlannedLayout;

/// What became of the best plan of some degrees beside `found`, the plans of a search with the same options. The
/// plan comes with what its layout cannot take less than, in seconds: by its work, and by its best split.
///
/// # Errors
///
/// What is wrong with the request whatever its degrees are.
pub(super) fn why(
    asked: &PartialDegrees,
    own: Result<(PlannedLayout, Option<[f64; 2]>), PlanError>,
    found: &[PlannedLayout],
) -> Result<Why, PlanError> {
    let mut why = Why {
        asked: asked.to_string(),
        verdict: Verdict::Refused,
        rules: Vec::new(),
        best: None,
        bounds: None,
        more_s: BTreeMap::new(),
    };
    let (own, bounds) = match own {
        Ok(own) => own,
        Err(PlanError::Infeasible {
            least,
            capacity_gib,
            ..
        }) => {
            why.verdict = Verdict::Memory;
            let needs = least.map(|least| {
                format!(
                    "it needs {:.1} GiB at least ({} with recompute {}), and a plan may fill {capacity_gib:.1}",
                    least.peak_gib,
                    least.layout,
                    least.recompute
                )
            });
            why.rules.extend(needs);
            return Ok(why);
        }
        Err(error) => {
            let (rules, nearest) = error.rules().ok_or(error)?;
            why.rules = rules;
            why.rules.extend(nearest);
            return Ok(why);
        }
    };
    let places = |plan: &PlannedLayout| (plan.layout, plan.cp_comm_type, plan.rank_order);
    let place = found.iter().position(|plan| places(plan) == places(&own));
    let last_s = found.last().map(|last| last.predicted.step_s);
    let step_s = own.predicted.step_s;
    why.verdict = match place {
        Some(0) => Verdict::First,
        Some(_) => Verdict::Shown,
        None if bounds.is_some() && last_s.is_some_and(|last_s| step_s < last_s) => Verdict::Ahead,
        None => Verdict::Slower,
    };
    if let Some(first) = found.first() {
        for category in Category::ALL {
            let of = |plan: &PlannedLayout| plan.predicted.time_s.get(category).0;
            let more_s = of(&own) - of(first);
            if more_s != 0.0 {
                why.more_s.insert(category.name().to_owned(), more_s);
            }
        }
    }
    why.bounds = bounds.map(|[work_s, split_s]| Bounds {
        work_s,
        // Layers that were moved may take less than the splits that it bounds.
        split_s: split_s.min(step_s),
        ruled_out: match last_s.filter(|_| why.verdict == Verdict::Slower) {
            Some(last_s) if work_s >= last_s => Some(RuledOut::Work),
            Some(last_s) if split_s >= last_s => Some(RuledOut::Split),
            _ => None,
        },
    });
    why.best = Some(Candidate::from(&own));
    Ok(why)
}
