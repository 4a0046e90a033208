//! The choice of layers that compute again one by one under which the step is the shortest where gradients rest divided.
//!
//! Which layers take longer then says what passes wait for. So choices are looked at in parts, the one first that may take the least (best-first branch
//! and bound): in a part each layer takes one of some ways, which follow one another in time. None of its choices takes less than to compute as the
//! fastest that fits and wait as under the slowest ways, nor less than the fastest ways take ([`StageSplit::times_with`]). It is divided at the layer whose
//! slowest way hides the most.

use super::in_step::InStep;
use super::{Case, NEAR, StageSplit};
use crate::memory::Occupancy;
use crate::search::by_layer::{LayersWay, Looked};
use crate::search::recompute::Sets;
use crate::search::schedules::Simulated;
use crate::search::watch::Looks;
use crate::simulate::StageTimes;

/// The pipeline rank, and its stage, where there is one.
const ALONE: usize = 0;

/// All choices of a split, and the best that is known.
struct Choices<'s> {
    split: &'s StageSplit,
    case: Case<'s>,
    occupancies: &'s [Occupancy],
    simulated: &'s Simulated,
    best: Option<(f64, Sets)>,
}

/// Choices of which each layer takes one of some ways.
struct Part<'s> {
    /// By layer, the fastest first.
    ways: Vec<&'s [LayersWay]>,
    /// Seconds of the step that none takes less than.
    least_s: f64,
}

impl StageSplit {
    /// See [`Self::by_layer_in_step`].
    pub(super) fn by_layer_with_waits(
        &self,
        case: Case<'_>,
        (occupancies, simulated): (&[Occupancy], &Simulated),
        (below_s, parts): (f64, usize),
        looks: &Looks<'_>,
    ) -> InStep {
        let mut choices = Choices {
            split: self,
            case,
            occupancies,
            simulated,
            best: None,
        };
        let all = self.ways(case.shape, ALONE);
        let mut open: Vec<Part<'_>> = choices.part(all, 0.0).into_iter().collect();
        let mut left_s = f64::INFINITY;
        for looked in (1..).step_by(2) {
            let best_s = choices
                .best
                .as_ref()
                .map_or(below_s, |best| best.0.min(below_s));
            open.retain(|part| part.least_s < best_s * (1.0 - NEAR));
            let each = open.iter().enumerate();
            let next = each.min_by(|(_, a), (_, b)| a.least_s.total_cmp(&b.least_s));
            let Some((next, _)) = next else {
                break;
            };
            if looked >= parts || looks.look().is_break() {
                let left = open.iter().map(|part| part.least_s);
                left_s = left.fold(left_s, f64::min);
                break;
            }
            let part = open.swap_remove(next);
            // What is no longer divided was tried.
            let halves = choices.divided(&part).into_iter().flatten();
            open.extend(halves.filter_map(|ways| choices.part(ways, part.least_s)));
        }
        let best = choices.best.filter(|best| best.0 < below_s);
        let best_s = best.as_ref().map_or(below_s, |best| best.0);
        InStep {
            best,
            least_s: left_s.min(best_s),
        }
    }
}

impl<'s> Choices<'s> {
    /// A part, of another that takes no less than `least_s`, if any choice of it fits. Its fastest may be the best.
    fn part(&mut self, ways: Vec<&'s [LayersWay]>, least_s: f64) -> Option<Part<'s>> {
        let (split, case) = (self.split, self.case);
        let own = split.among(case, (ALONE, self.occupancies), &ways);
        let (fastest, all_s) = own.fastest(&own.alike(), Looked::Few);
        if all_s == f64::INFINITY {
            return None;
        }
        for sets in fastest.into_iter().flat_map(|(_, sets)| sets) {
            let sets = Sets::each(sets);
            let step_s = self.step_s(&split.times(case, &sets));
            if self.best.as_ref().is_none_or(|best| step_s < best.0) {
                self.best = Some((step_s, sets));
            }
        }
        let fastest_s: f64 = ways.iter().map(|ways| ways[0].seconds()).sum();
        // Sums are rounded.
        let more_s = (all_s * (1.0 - 1e-12) - fastest_s).max(0.0);
        let [fastest, slowest] = ends(&ways).map(Sets::Each);
        let times = split.times_with(case, [&fastest, &slowest], &[more_s]);
        Some(Part {
            least_s: self.step_s(&times).max(least_s),
            ways,
        })
    }

    fn step_s(&self, times: &StageTimes) -> f64 {
        self.simulated.simulator().run(times).total.seconds().0
    }

    /// The ways of a part in two, of the layer whose slowest way hides the most; none where there is one choice.
    fn divided(&self, part: &Part<'s>) -> Option<[Vec<&'s [LayersWay]>; 2]> {
        let [fastest, slowest] = ends(&part.ways);
        let [most_s, least_s] = [&fastest, &slowest].map(|sets| self.waited_s(sets.clone()));
        let hides_s = |layer: usize| {
            let [mut only, mut others] = [fastest.clone(), slowest.clone()];
            (only[layer], others[layer]) = (slowest[layer], fastest[layer]);
            f64::max(
                most_s - self.waited_s(only),
                self.waited_s(others) - least_s,
            )
        };
        let open = (0..part.ways.len()).filter(|&layer| part.ways[layer].len() > 1);
        let each = open.map(|layer| (layer, hides_s(layer)));
        let (layer, _) = each.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let own = part.ways[layer];
        let middle_s = 0.5 * (own[0].seconds() + own[own.len() - 1].seconds());
        let at = own.partition_point(|way| way.seconds() <= middle_s);
        let (fast, slow) = own.split_at(at.clamp(1, own.len() - 1));
        Some([fast, slow].map(|own| {
            let mut ways = part.ways.clone();
            ways[layer] = own;
            ways
        }))
    }

    /// Seconds of a step that passes wait for.
    fn waited_s(&self, sets: Vec<usize>) -> f64 {
        let (split, case, sets) = (self.split, self.case, &Sets::Each(sets));
        let waits = split.waits(case, ALONE, sets);
        let across_s = split.reduced_across_s(case, ALONE, sets);
        waits.passes_s(case.layout.microbatches()) + waits.reduce + across_s
    }
}

/// The sets under which each layer takes the fastest of its ways, and those under which it takes the slowest.
fn ends(ways: &[&[LayersWay]]) -> [Vec<usize>; 2] {
    let fastest = ways.iter().map(|ways| ways[0].set());
    let slowest = ways.iter().map(|ways| ways[ways.len() - 1].set());
    [fastest.collect(), slowest.collect()]
}
