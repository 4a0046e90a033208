//! What a rank computes again at least where each layer chooses by itself: whole layers do, which a program has parts of.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::line::Line;
use super::program::{Limits, Point, Row, Unsolved};
use super::{Again, Interleaved, StageSplit, own};

/// Of how many ways to divide the layers of a rank between its stages, at most, the least is looked for.
const DIVISIONS: usize = 64;
impl Interleaved<'_> {
    /// How much ranks compute again at least within some limits, as near as can be where a point has their layers.
    ///
    /// # Errors
    /// Where one of them has no room for any layers that it may have.
    pub(super) fn least_again(
        &self,
        limits: &Limits,
        point: &Point,
        found: &mut Again,
    ) -> Result<Vec<Row>, Unsolved> {
        if !self.asks_for_whole {
            return Ok(Vec::new());
        }
        let mut rows = Vec::new();
        for rank in 0..limits.ranks.len() {
            let Some(points) = self.least_of_rank(limits, rank, found) else {
                continue;
            };
            if points.is_empty() {
                return Err(Unsolved::NoPoint);
            }
            let line = Line::below(&points, self.of_rank(point, rank));
            let stages = own(self.case.layout, rank);
            rows.push(Row::of_again(&self.classes, stages, line));
        }
        Ok(rows)
    }

    /// By how many layers a rank may have within some limits, where these have room, seconds that it computes again at least. None where they
    /// are divided in too many ways, or of kinds that differ by where its stages begin.
    pub(super) fn least_of_rank(
        &self,
        limits: &Limits,
        rank: usize,
        found: &mut Again,
    ) -> Option<Vec<[f64; 2]>> {
        let stages: Vec<usize> = own(self.case.layout, rank).collect();
        let ends = limits.boundaries(self.classes.layers());
        let ways = stages.iter().map(|&stage| {
            let [fewest, most] = limits.stages[stage];
            (most - fewest) as usize + 1
        });
        if ways.fold(1, usize::saturating_mul) > DIVISIONS {
            return None;
        }
        let mut divisions: Vec<Vec<Range<usize>>> = vec![Vec::new()];
        for &stage in &stages {
            let from = stage.checked_sub(1).map_or([0, 0], |before| ends[before]);
            let [fewest, most] = limits.stages[stage];
            let mut with = Vec::new();
            for layers in fewest..=most {
                // So many do not begin where they would go past the last.
                let last = from[1].min(self.classes.layers() - layers);
                let places = (from[0]..=last).map(|from| from as usize..(from + layers) as usize);
                let mut places = places;
                let Some(first) = places.next() else {
                    continue;
                };
                let kinds = |place: &Range<usize>| &self.case.question.kind_of[place.clone()];
                if places.any(|place| kinds(&place) != kinds(&first)) {
                    return None;
                }
                let first = std::slice::from_ref(&first);
                with.extend(divisions.iter().map(|before| [before, first].concat()));
            }
            divisions = with;
        }
        let mut least = BTreeMap::new();
        let [fewest, most] = limits.ranks[rank];
        for division in divisions {
            let layers: u32 = division.iter().map(|stage| stage.len() as u32).sum();
            if (fewest..=most).contains(&layers) {
                let seconds = self.again_of(rank, division, found);
                let known = least.entry(layers).or_insert(f64::INFINITY);
                *known = seconds.min(*known);
            }
        }
        let points = least
            .into_iter()
            .filter(|(_, seconds)| *seconds < f64::INFINITY);
        Some(
            points
                .map(|(layers, seconds)| [layers.into(), seconds])
                .collect(),
        )
    }

    /// Seconds that a rank computes again at least with some layers in each of its stages.
    fn again_of(&self, rank: usize, layers: Vec<Range<usize>>, found: &mut Again) -> f64 {
        let kinds = layers
            .iter()
            .map(|own| self.case.question.kind_of[own.clone()].to_vec());
        let key = (rank, kinds.collect());
        if let Some(seconds) = self.known_again.get(&key).or_else(|| found.get(&key)) {
            return *seconds;
        }
        let mut all = vec![Vec::new(); self.case.layout.stages() as usize];
        for (stage, own) in own(self.case.layout, rank).zip(layers) {
            all[stage] = own.map(|layer| layer as u32).collect();
        }
        let split = StageSplit::new(self.case, all);
        let seconds = split.again_at_least_s(self.case, rank, &self.occupancies[rank]);
        found.insert(key, seconds);
        seconds
    }
}
