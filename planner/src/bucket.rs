//! [`divide`]: which weights of a rank are reduced and gathered in one collective.
//!
//! A bucket is a run of units, whole layers and the ends of the model, in the order in which a forward pass uses
//! them. Gradients are whole in the opposite order, so buckets are filled from the last unit on, each until it has
//! at least so many elements (Megatron-Core, `megatron/core/distributed/param_and_grad_buffer.py`,
//! `--ddp-bucket-size`). What is left at the front is a bucket of its own.

use std::ops::Range;

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
