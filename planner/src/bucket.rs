//! [`Division`]: which weights of a rank are reduced and gathered in one collective, and in which buffers those are
//! whole that rest divided.
//!
//! A bucket is a run of units, whole layers and the ends of the model, in the order in which a forward pass uses
//! them. Gradients are whole in the opposite order, so buckets are filled from the last unit on, each until it has
//! at least so many elements (Megatron-Core, `megatron/core/distributed/param_and_grad_buffer.py`,
//! `--ddp-bucket-size`). What is left at the front is a bucket of its own.
//!
//! Under full sharding (ZeRO-3, arXiv 1910.02054) every unit is a bucket, and weights and gradients rest divided over
//! their replicas. Units take turns in buffers that stay ([`buffers`]; Megatron-FSDP's double buffer), where their
//! weights are gathered before a pass and their gradients summed in it. A unit that is still in its buffer is not
//! gathered again ([`Held`]).

use std::collections::BTreeMap;
use std::ops::Range;

use crate::choice::{Overlap, Zero};
use crate::model::Model;

/// How the weights of a rank are divided into buckets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Division {
    /// Each family is one.
    #[default]
    Whole,
    /// Runs of units of at least so many elements.
    AtLeast(u64),
    /// Each unit is one, and rests divided over its replicas.
    Sharded(Turns),
}

/// Buffers in which divided units take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// Of weights: two where one is gathered beside the work on the other.
    pub weights: usize,
    /// Of gradients: two where those of one are reduced beside the work on the other.
    pub grads: usize,
}

impl Division {
    /// That of a plan, where buckets have so many elements at least.
    pub fn of(zero: Zero, overlap: Overlap, bucket_elements: Option<u64>) -> Self {
        match bucket_elements {
            _ if zero.divides_weights() => Self::Sharded(Turns {
                weights: 1 + usize::from(overlap.param_gather),
                grads: 1 + usize::from(overlap.grad_reduce),
            }),
            None => Self::Whole,
            Some(least) => Self::AtLeast(least),
        }
    }

    /// The buckets of units with so many elements each, first to last; none where there are no elements.
    pub fn buckets(self, elements: &[u64]) -> Vec<Range<usize>> {
        match self {
            Self::Whole => divide(elements, None),
            Self::AtLeast(least) => divide(elements, Some(least)),
            Self::Sharded(_) => {
                let some = elements.iter().enumerate().filter(|(_, own)| **own > 0);
                some.map(|(unit, _)| unit..unit + 1).collect()
            }
        }
    }
}

/// Whether the embedding, and the head, have matrices that other units use too, so that they have buffers of their
/// own: a tied embedding; and both where depths of multi-token prediction embed and predict.
pub fn shared_ends(model: &Model) -> [bool; 2] {
    let depths = !model.mtp.is_empty();
    [model.tied_embeddings || depths, depths]
}

/// The buffer of each of some units with so many elements, and the elements of each buffer: the units of one take
/// turns in it, the next one in the next of `turns`, and those that are `alone` have one of their own.
pub fn buffers(elements: &[u64], alone: &[bool], turns: usize) -> (Vec<usize>, Vec<u64>) {
    let mut sizes = vec![0; turns];
    let mut of_units = Vec::with_capacity(elements.len());
    for (unit, (&own, &alone)) in elements.iter().zip(alone).enumerate() {
        let buffer = if alone && own > 0 {
            sizes.push(0);
            sizes.len() - 1
        } else {
            unit % turns
        };
        sizes[buffer] = own.max(sizes[buffer]);
        of_units.push(buffer);
    }
    (of_units, sizes)
}

/// The units that buffers hold, by family and number of the buffer.
#[derive(Debug, Clone, Default)]
pub struct Held(BTreeMap<(usize, usize), usize>);

impl Held {
    /// Gives a buffer of a family to a unit: whether it has to be gathered for that.
    pub fn take(&mut self, family: usize, buffer: usize, unit: usize) -> bool {
        self.0.insert((family, buffer), unit) != Some(unit)
    }
}

/// The buckets of units with so many elements each, first to last; all units in one where no least size is given,
/// and none where there are no elements. A unit without elements is in the bucket of its neighbour.
pub fn divide(elements: &[u64], least: Option<u64>) -> Vec<Range<usize>> {
    let mut buckets: Vec<Range<usize>> = Vec::new();
    let (mut end, mut held) = (elements.len(), 0);
    for (unit, &own) in elements.iter().enumerate().rev() {
        held += own;
        if held > 0 && least.is_some_and(|least| held >= least) {
            buckets.push(unit..end);
            (end, held) = (unit, 0);
        }
    }
    match buckets.last_mut() {
        Some(first) if held == 0 => first.start = 0,
        _ if held > 0 => buckets.push(0..end),
        _ => {}
    }
    buckets.reverse();
    buckets
}

/// Elements of buckets when each is cut into `shards` that are multiples of `grain`; as they are where that is 0.
pub fn padded(elements: &[u64], buckets: &[Range<usize>], grain: u64, shards: u64) -> Vec<u64> {
    let own = |bucket: &Range<usize>| -> u64 { elements[bucket.clone()].iter().sum() };
    let padded = |own: u64| match grain {
        0 => own,
        _ => own.next_multiple_of(grain * shards),
    };
    buckets.iter().map(own).map(padded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_units_take_turns() {
        // Embedding and head alone; the largest of those that take turns.
        let elements = [9, 4, 0, 6, 8];
        let alone = [true, false, false, false, true];
        let (of_units, sizes) = buffers(&elements, &alone, 2);
        assert_eq!((of_units, sizes), (vec![2, 1, 0, 1, 3], vec![0, 6, 9, 8]));
        let (of_units, sizes) = buffers(&elements, &[false; 5], 1);
        assert_eq!((of_units, sizes), (vec![0; 5], vec![9]));
        let turns = Turns {
            weights: 2,
            grads: 1,
        };
        let found = Division::Sharded(turns).buckets(&elements);
        assert_eq!(found, [0..1, 1..2, 3..4, 4..5]);

        // Forward and back through four units in two buffers: the last two are still there, and then the first two.
        let mut held = Held::default();
        let mut pass = |units: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
            units.filter(|&unit| held.take(0, unit % 2, unit)).collect()
        };
        assert_eq!(pass(&mut (0..4)), [0, 1, 2, 3]);
        assert_eq!(pass(&mut (0..4).rev()), [1, 0]);
        assert_eq!(pass(&mut (0..4)), [2, 3]);
    }

    #[test]
    fn golden_buckets() {
        let ends = |elements: &[u64], least| -> Vec<[usize; 2]> {
            let buckets = divide(elements, least).into_iter();
            buckets.map(|bucket| [bucket.start, bucket.end]).collect()
        };
        // From the last unit on, each with at least so many.
        let units = [7, 4, 4, 0, 4, 6, 3];
        assert_eq!(ends(&units, Some(10)), [[0, 4], [4, 7]]);
        assert_eq!(ends(&units, Some(8)), [[0, 2], [2, 5], [5, 7]]);
        // The front is left.
        assert_eq!(ends(&units, Some(14)), [[0, 2], [2, 7]]);
        let each = [[0, 1], [1, 2], [2, 4], [4, 5], [5, 6], [6, 7]];
        assert_eq!(ends(&units, Some(1)), each);
        assert_eq!(ends(&units, Some(100)), [[0, 7]]);
        assert_eq!(ends(&units, None), [[0, 7]]);
        assert_eq!(ends(&[0, 0, 5], Some(2)), [[0, 3]]);
        assert!(divide(&[0, 0], Some(2)).is_empty() && divide(&[0, 0], None).is_empty());
        assert_eq!(padded(&units, &[0..1, 1..7], 4, 2), [8, 24]);
        assert_eq!(padded(&units, &[0..1, 1..7], 0, 2), [7, 21]);
    }
}
