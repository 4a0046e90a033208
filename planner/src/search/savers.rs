//! [`Savers`]: what layers compute again at least for want of room.
//!
//! Where each layer may recompute by itself, those of a rank are a knapsack: at every instant of a schedule they let go of as many
//! bytes as they have no room for, in the least time. Parts of layers may let go of parts of what they save here, so the ways
//! to save most in a second come first, and no whole choice takes less time.

use std::ops::Range;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Savers {
    /// By pipeline rank and instant, bytes that layers may take, and the fewest microbatches that a chunk has there.
    free: Vec<Vec<[f64; 2]>>,
    kinds: Vec<KindOfLayer>,
    /// Of all kinds, the best first.
    best: Vec<Saver>,
    /// How many layers of each kind are before each layer of the model, and in all.
    before: Vec<Vec<u32>>,
}

/// Layers that are alike.
#[derive(Debug, Clone, Default)]
pub(crate) struct KindOfLayer {
    /// Bytes whatever is computed again.
    pub(crate) state: f64,
    /// Bytes of a microbatch where nothing is.
    pub(crate) saved: f64,
    /// Of each recompute set, seconds of a microbatch that it takes more, and bytes that it saves less.
    pub(crate) ways: Vec<[f64; 2]>,
}

/// A part of what a layer saves that it lets go of for some time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saver {
    /// The kind of layer, or the class of kinds.
    pub(crate) of: usize,
    /// Of a microbatch.
    pub(crate) seconds: f64,
    pub(crate) bytes: f64,
}

impl Saver {
    /// Those of a kind or a class that may take some ways, the best first: see [`KindOfLayer::ways`].
    pub(crate) fn all(of: usize, ways: Vec<[f64; 2]>) -> impl Iterator<Item = Self> {
        let steps = best_steps(ways).into_iter();
        steps.map(move |[seconds, bytes]| Self { of, seconds, bytes })
    }
}

impl Savers {
    /// Of the layers of a model, of which the kinds are given.
    pub(crate) fn new(
        free: Vec<Vec<[f64; 2]>>,
        kinds: Vec<KindOfLayer>,
        kind_of: &[usize],
    ) -> Self {
        let mut best: Vec<Saver> = Vec::new();
        for (kind, layer) in kinds.iter().enumerate() {
            best.extend(Saver::all(kind, layer.ways.clone()));
        }
        best.sort_by(|a, b| (a.seconds * b.bytes).total_cmp(&(b.seconds * a.bytes)));
        let mut counts = vec![0; kinds.len()];
        let mut before = vec![counts.clone()];
        for &kind in kind_of {
            counts[kind] += 1;
            before.push(counts.clone());
        }
        Self {
            free,
            kinds,
            best,
            before,
        }
    }

    /// Seconds of a microbatch that a pipeline rank computes again at least where it has some layers, which follow one another.
    /// None where they have no room.
    pub(crate) fn again_s(&self, rank: usize, layers: &Range<usize>) -> Option<f64> {
        if layers.is_empty() {
            // Nothing of them runs.
            return Some(0.0);
        }
        let (from, to) = (&self.before[layers.start], &self.before[layers.end]);
        let count = |kind: usize| f64::from(to[kind] - from[kind]);
        let kinds = || self.kinds.iter().enumerate();
        let state = kinds().map(|(kind, layer)| count(kind) * layer.state);
        let saved = kinds().map(|(kind, layer)| count(kind) * layer.saved);
        self.over(rank, [state.sum(), saved.sum()], || {
            let each = self.best.iter();
            each.map(|saver| [saver.seconds, saver.bytes].map(|of| of * count(saver.of)))
        })
    }

    /// Layers of some kinds, wherever they are.
    pub(crate) fn as_lightest(&self, is_one: &dyn Fn(usize) -> bool) -> AsLightest<'_> {
        let kinds = || {
            let each = self.kinds.iter().enumerate();
            each.filter(|(kind, _)| is_one(*kind))
                .map(|(_, layer)| layer)
        };
        let least =
            |of: &dyn Fn(&KindOfLayer) -> f64| kinds().map(of).fold(f64::INFINITY, f64::min);
        let ways = kinds().flat_map(|kind| kind.ways.iter().copied());
        AsLightest {
            savers: self,
            state: least(&|kind| kind.state),
            saved: least(&|kind| kind.saved),
            best: best_steps(ways.collect()),
        }
    }

    /// Seconds in which layers of some state, which save so much of a microbatch, let go of what they have no room for at each
    /// instant, the best first; none where all that they may is not enough.
    fn over<S: Iterator<Item = [f64; 2]>>(
        &self,
        rank: usize,
        [state, saved]: [f64; 2],
        best: impl Fn() -> S,
    ) -> Option<f64> {
        let mut most = 0.0_f64;
        for &[free, live] in &self.free[rank] {
            let mut over = state + saved * live - free;
            let mut seconds = 0.0;
            for [own_s, bytes] in best() {
                if over <= 0.0 {
                    break;
                }
                let part = (over / (bytes * live)).min(1.0);
                seconds += part * own_s;
                over -= part * bytes * live;
            }
            // Sums of bytes are rounded.
            if over > 1.0 {
                return None;
            }
            most = most.max(seconds);
        }
        Some(most)
    }
}

/// Layers of some kinds, all as light as the lightest of these, and as ready to let go as the readiest.
#[derive(Debug, Clone)]
pub(crate) struct AsLightest<'s> {
    savers: &'s Savers,
    state: f64,
    saved: f64,
    /// Seconds and bytes of a layer, the best first.
    best: Vec<[f64; 2]>,
}

impl AsLightest<'_> {
    /// Seconds of a microbatch that a pipeline rank computes again at least where it has so many of them; of more it is no less. None
    /// where they have no room.
    pub(crate) fn again_s(&self, rank: usize, layers: usize) -> Option<f64> {
        let layers = layers as f64;
        let held = [self.state, self.saved].map(|of| of * layers);
        self.savers.over(rank, held, || {
            self.best.iter().map(|step| step.map(|of| of * layers))
        })
    }
}

/// Of ways that take so many seconds more and let go of so many bytes, the steps from one to the next on their upper hull, those of
/// most bytes a second first: where parts of a step may be taken no way is better than so many of them.
pub(crate) fn best_steps(mut ways: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    ways.sort_by(|a, b| a[0].total_cmp(&b[0]).then(b[1].total_cmp(&a[1])));
    let step = |[from, to]: [[f64; 2]; 2]| [to[0] - from[0], to[1] - from[1]];
    let mut hull = vec![[0.0; 2]];
    for way in ways {
        if way[1] <= hull[hull.len() - 1][1] {
            continue;
        }
        while let [.., before, middle] = hull[..] {
            let (first, both) = (step([before, middle]), step([before, way]));
            if first[1] * both[0] > both[1] * first[0] {
                break;
            }
            hull.pop();
        }
        hull.push(way);
    }
    let steps = hull.windows(2);
    steps.map(|pair| step([pair[0], pair[1]])).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::search::mix::{self, Alike, Way};

    /// Bytes that are one here: where one more or less is rounding, it is nothing.
    const UNIT: f64 = 1_048_576.0;

    proptest! {
        /// At one instant it is the linear program's optimum, and at several no more.
        #[test]
        fn differential_the_best_first_are_the_optimum_of_the_relaxation(
            kinds in prop::collection::vec((0_u32..4, 0_u32..9, prop::collection::vec((0_u32..9, 0_u32..9), 0..5)), 1..4),
            kind_of in prop::collection::vec(0_usize..3, 1..8),
            instants in prop::collection::vec((0_u32..90, 1_u32..4), 1..4),
        ) {
            let kind_of: Vec<usize> = kind_of.iter().map(|kind| kind % kinds.len()).collect();
            let own: Vec<KindOfLayer> = kinds
                .iter()
                .map(|(state, saved, ways)| KindOfLayer {
                    state: UNIT * f64::from(*state),
                    saved: UNIT * f64::from(*saved),
                    ways: ways
                        .iter()
                        .map(|&(seconds, bytes)| [f64::from(seconds), UNIT * f64::from(bytes.min(*saved))])
                        .collect(),
                })
                .collect();
            let free = instants.iter().map(|&(free, live)| [UNIT * f64::from(free), f64::from(live)]);
            let savers = Savers::new(vec![free.collect()], own.clone(), &kind_of);
            let (all, layers) = (0..kind_of.len(), kind_of.len());
            let found = savers.again_s(0, &all);
            let state: f64 = kind_of.iter().map(|&kind| own[kind].state).sum();
            let groups: Vec<Alike> = own
                .iter()
                .enumerate()
                .map(|(place, kind)| Alike {
                    layers: kind_of.iter().filter(|kind| **kind == place).count() as u32,
                    live: instants.iter().map(|&(_, live)| live).collect(),
                    ways: [[0.0; 2]]
                        .iter()
                        .chain(&kind.ways)
                        .map(|&[seconds, bytes]| Way { seconds, gib: (kind.saved - bytes) / UNIT })
                        .collect(),
                })
                .filter(|group| group.layers > 0)
                .collect();
            let rooms: Vec<f64> = instants.iter().map(|&(free, _)| f64::from(free) - state / UNIT).collect();
            // A byte more is taken for rounding.
            let whole: Vec<f64> = rooms.iter().map(|room| room + 1.0 / UNIT).collect();
            if let Some(optimum) = mix::least_work(&groups, &rooms) {
                let found = found.expect("there is room");
                prop_assert!(found <= optimum + 1e-6, "{found} {optimum}");
                prop_assert!(instants.len() > 1 || found >= optimum - 1e-6, "{found} {optimum}");
            } else if instants.len() == 1 {
                prop_assert!(found.is_none() || mix::least_work(&groups, &whole).is_some());
            }
            // Wherever they are, layers of some kinds take no more; and more of them no less.
            let is_one = |kind: usize| kind != 1 || kinds.len() < 3;
            let alike = savers.as_lightest(&is_one);
            let mut fewer = 0.0;
            for from in (0..layers).rev() {
                let [own, counted] = [
                    savers.again_s(0, &(from..layers)),
                    alike.again_s(0, kind_of[from..].iter().filter(|kind| is_one(**kind)).count()),
                ]
                .map(|seconds| seconds.unwrap_or(f64::INFINITY));
                prop_assert!(counted <= own + 1e-9, "{counted} {own}");
                prop_assert!(fewer <= counted + 1e-9, "{fewer} {counted}");
                fewer = counted;
            }
        }
    }
}
