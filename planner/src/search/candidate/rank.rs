//! What a pipeline rank has for the end of a step: its weights in units and buckets, and what is done with them.

use std::ops::Range;

use crate::bucket::{self, Division, Turns};
use crate::layout::Layout;
use crate::lower::ends::{Held, StepWork};
use crate::shard::Shard;
use crate::tensors::Dealt;

/// The weights of a pipeline rank, as they are reduced and gathered.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RankWeights {
    /// Units of which buckets are made, in order of use; all in one where nothing is divided.
    pub(super) units: Vec<Unit>,
    /// Runs of units: of dense parameters, of experts.
    pub(super) buckets: [Vec<Range<usize>>; 2],
    /// Where replicas divide whole tensors, what they update of dense ones and of experts.
    pub(super) dealt: Option<[Dealt; 2]>,
}

/// Weights that are in one bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Unit {
    /// Parameters.
    pub(super) shard: Shard,
    /// The same with what is between them where they rest.
    pub(super) resting: Shard,
    /// Whether gradients of dense parameters are completed after the last pass: where both ends of a pipeline
    /// have them, and where tensor-parallel ranks share heads of keys.
    pub(super) late: bool,
    /// Whether other units use its matrices too, so that where it rests divided it has buffers of its own.
    pub(super) alone: bool,
}

impl RankWeights {
    pub(super) fn new(units: Vec<Unit>, division: Division) -> Self {
        let of = |own: fn(&Shard) -> u64| {
            let elements: Vec<u64> = units.iter().map(|unit| own(&unit.resting)).collect();
            division.buckets(&elements)
        };
        Self {
            buckets: [of(Shard::dense), of(|shard| shard.experts)],
            units,
            dealt: None,
        }
    }

    /// Elements of each bucket where they rest, of dense parameters and of experts, cut over so many ranks each.
    pub(super) fn resting(&self, grain: u64, shards: [u64; 2]) -> [Vec<u64>; 2] {
        let [dense, experts] = &self.buckets;
        let of = |own: fn(&Shard) -> u64, buckets: &[Range<usize>], shards| -> Vec<u64> {
            let elements: Vec<u64> = self.units.iter().map(|unit| own(&unit.resting)).collect();
            bucket::padded(&elements, buckets, grain, shards)
        };
        [
            of(Shard::dense, dense, shards[0]),
            of(|shard| shard.experts, experts, shards[1]),
        ]
    }

    /// The buffers of units that take turns, by unit, and the elements of each buffer; of buckets of a family that
    /// have so many elements.
    pub(super) fn in_turns(
        &self,
        family: usize,
        elements: &[u64],
        turns: usize,
    ) -> (Vec<usize>, Vec<u64>) {
        let mut whole = vec![0; self.units.len()];
        for (bucket, &elements) in self.buckets[family].iter().zip(elements) {
            whole[bucket.start] = elements;
        }
        let alone: Vec<bool> = self.units.iter().map(|unit| unit.alone).collect();
        bucket::buffers(&whole, &alone, turns)
    }

    /// Elements of the buffers in which units are whole that rest divided, of weights and of gradients; of families
    /// with several replicas.
    pub(super) fn whole(
        &self,
        turns: Turns,
        resting: &[Vec<u64>; 2],
        several: [bool; 2],
    ) -> [u64; 2] {
        [turns.weights, turns.grads].map(|turns| {
            let families = (0..2).filter(|&family| several[family]);
            let sizes = families.map(|family| self.in_turns(family, &resting[family], turns).1);
            sizes.flatten().sum()
        })
    }

    pub(super) fn held(&self, updated_apart: bool) -> Held {
        let units = self.units.iter().map(|unit| unit.shard);
        let [dense, experts] = &self.buckets;
        Held {
            dealt: self.dealt.clone(),
            ..Held::of(units, [dense, experts], updated_apart)
        }
    }

    pub(super) fn total(&self) -> Shard {
        let units = self.units.iter();
        units.fold(Shard::default(), |sum, unit| sum + unit.shard)
    }

    /// Of each collective of a list, over buckets of families with several replicas, its units and whether it
    /// waits for the end of all passes.
    pub(super) fn of_collectives(&self, several: [bool; 2]) -> Vec<(Range<usize>, bool)> {
        let families = self.buckets.iter().zip(several).enumerate();
        let families = families.filter(|(_, (_, several))| *several);
        families
            .flat_map(|(family, (buckets, _))| buckets.iter().map(move |bucket| (family, bucket)))
            .map(|(family, bucket)| {
                let late = self.units[bucket.clone()].iter().any(|unit| unit.late);
                (bucket.clone(), family == 0 && late)
            })
            .collect()
    }
}

/// The end of a step on one pipeline rank, in seconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankEnd {
    pub(crate) work: StepWork,
    /// Gradient reductions and weight gathers, each by itself; reductions nothing hides; norm and update.
    pub(super) reduce_s: Vec<f64>,
    /// Reductions over instances of the optimizer, of every bucket.
    pub(super) across_s: Vec<f64>,
    pub(super) gather_s: Vec<f64>,
    /// Those over instances that divide the states, before them, of every bucket.
    pub(super) gather_across_s: Vec<f64>,
    /// The share of multiprocessors that reductions and gathers take while they run, on average.
    pub(super) taken: f64,
    pub(crate) exposed_s: f64,
    pub(crate) update_s: f64,
    /// What states that rest on the host take on their ways beyond the update beside them.
    pub(crate) streamed_s: f64,
    /// Waiting for ranks that met nowhere before.
    pub(crate) waiting_s: f64,
}

/// Whether dense parameters and experts have several replicas.
pub(super) fn several(layout: &Layout) -> [bool; 2] {
    [layout.dp() * layout.cp(), layout.edp()].map(|replicas| replicas > 1)
}
