//! Layouts other than the best: which of them may take less as some split has their layers, and which splits these are.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::least::{Open, Splits, least_of_splits_s, open_splits};
use super::shape::Question;
use super::unit::Unit;
use super::watch::Looks;
use crate::choice::Objective;
use crate::layout::Layout;
use crate::options::{Effort, SearchOptions};

/// How many are looked at at once; fixed, so that results do not depend on the threads there are.
const AT_ONCE: usize = 4;

/// A layout, and seconds that no split of its layers takes less than.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Other {
    pub(crate) layout: Layout,
    pub(crate) least_s: f64,
}

/// Whether they are asked: there is the patience to, and memory is not to be the least.
pub(crate) fn are_asked(options: &SearchOptions) -> bool {
    options.effort == Effort::Patient && options.objective != Objective::Memory
}

/// Layouts that may take less than the best plan does, those first that may take the least; the best plan's may be one. Where the search
/// is stopped meanwhile, of some only their work is known. None where they are not asked.
pub(crate) fn others(
    questions: &[Question<'_>],
    units: &[Unit<'_>],
    best_s: f64,
    looks: &Looks<'_>,
) -> Vec<Other> {
    if !are_asked(questions[0].options) {
        return Vec::new();
    }
    let below = units.partition_point(|unit| unit.floor < best_s);
    let least_s = |unit: &Unit<'_>| {
        if looks.look().is_break() {
            return unit.floor;
        }
        looks.seen(1);
        least_of_splits_s(questions, unit, best_s)
    };
    let each = units[..below].par_iter();
    let each = each.map(|unit| Other {
        layout: *unit.layout,
        least_s: least_s(unit),
    });
    let mut open: Vec<Other> = each.filter(|other| other.least_s < best_s).collect();
    open.sort_by(|a, b| {
        let by_seconds = a.least_s.total_cmp(&b.least_s);
        by_seconds.then_with(|| a.layout.cmp(&b.layout))
    });
    open
}

/// By layout, its splits that may take less than some time: a glance closes most, the others are looked at until they are closed or the
/// search is stopped.
pub(crate) fn splits_of_others(
    questions: &[Question<'_>],
    units: &[Unit<'_>],
    (others, below_s): (&[Other], f64),
    looks: &Looks<'_>,
) -> Vec<Open> {
    let by_layout: BTreeMap<&Layout, &Unit<'_>> =
        units.iter().map(|unit| (unit.layout, unit)).collect();
    let look = |open: &Open, other: &Other, which: Splits| {
        let unit = by_layout.get(&other.layout);
        let unit = unit.filter(|_| looks.look().is_continue())?;
        let mut found = open_splits(questions, unit, (below_s, which), looks);
        found.left_s = found.left_s.max(open.left_s);
        Some(found)
    };
    let unknown = |other: &Other| Open {
        left_s: other.least_s,
        ..Open::default()
    };
    let mut all: Vec<Open> = others.iter().map(unknown).collect();
    for which in [Splits::Glance, Splits::Other] {
        // Those that may take the least first.
        let mut order: Vec<usize> = (0..others.len()).collect();
        order.retain(|&place| all[place].left_s < below_s);
        order.sort_by(|&a, &b| all[a].left_s.total_cmp(&all[b].left_s));
        for some in order.chunks(AT_ONCE) {
            let each = some.par_iter();
            let each = each.map(|&place| look(&all[place], &others[place], which));
            for (place, found) in some.iter().zip(each.collect::<Vec<_>>()) {
                if let Some(found) = found {
                    all[*place] = found;
                }
                looks.seen(usize::from(which == Splits::Glance));
            }
        }
    }
    all
}
