//! The pool against a twin that knows every granule.

use proptest::prelude::*;

use super::*;

/// The same pool, by brute force: who holds each granule of each slab.
#[derive(Default)]
struct Twin(Vec<(u64, Vec<Option<u32>>)>);

impl Twin {
    fn add(&mut self, start: u64, granules: u64) {
        self.0.push((start, vec![None; granules as usize]));
        self.0.sort_by_key(|(start, _)| *start);
    }

    /// Free runs of granules: their length, the address, the slab and the place in it.
    fn free(&self) -> Vec<(u64, u64, usize, usize)> {
        let mut runs = Vec::new();
        for (number, (start, granules)) in self.0.iter().enumerate() {
            let mut at = 0;
            while at < granules.len() {
                let length = granules[at..].iter().take_while(|g| g.is_none()).count();
                if length > 0 {
                    let address = start + at as u64 * ALIGNMENT;
                    runs.push((length as u64 * ALIGNMENT, address, number, at));
                }
                at += length.max(1);
            }
        }
        runs
    }

    fn take(&mut self, bytes: u64, holder: u32) -> Option<u64> {
        let granules = bytes.max(1).div_ceil(ALIGNMENT);
        let mut runs = self.free();
        runs.retain(|(length, ..)| *length >= granules * ALIGNMENT);
        let &(_, address, slab, at) = runs.iter().min()?;
        let taken = &mut self.0[slab].1[at..at + granules as usize];
        assert!(taken.iter().all(Option::is_none));
        taken.fill(Some(holder));
        Some(address)
    }

    fn give(&mut self, holder: u32) {
        let all = self.0.iter_mut().flat_map(|(_, granules)| granules);
        all.filter(|granule| **granule == Some(holder))
            .for_each(|granule| *granule = None);
    }

    fn remove_idle(&mut self) -> Vec<u64> {
        let idle = |granules: &[Option<u32>]| granules.iter().all(Option::is_none);
        let gone = self.0.iter().filter(|(_, granules)| idle(granules));
        let gone = gone.map(|(start, _)| *start).collect();
        self.0.retain(|(_, granules)| !idle(granules));
        gone
    }

    fn reserved(&self) -> u64 {
        let granules: usize = self.0.iter().map(|(_, granules)| granules.len()).sum();
        granules as u64 * ALIGNMENT
    }
}

#[derive(Debug, Clone)]
enum Call {
    /// A slab of so many granules, touching the last or not.
    Add(u64, bool),
    /// So many bytes.
    Take(u64),
    /// What was taken, by its place among what is held.
    Give(prop::sample::Index),
    RemoveIdle,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        1 => (1..40_u64, any::<bool>()).prop_map(|(granules, touches)| Call::Add(granules, touches)),
        8 => (0..12 * ALIGNMENT).prop_map(Call::Take),
        6 => any::<prop::sample::Index>().prop_map(Call::Give),
        1 => Just(Call::RemoveIdle),
    ];
    prop::collection::vec(call, 1..200)
}

proptest! {
    #[test]
    fn oracle_best_fit_of_granules(calls in calls()) {
        let (mut pool, mut twin) = (Pool::default(), Twin::default());
        let mut held: Vec<(u32, Range)> = Vec::new();
        let mut end = ALIGNMENT;
        for (number, call) in calls.iter().enumerate() {
            match call {
                Call::Add(granules, touches) => {
                    let start = end + if *touches { 0 } else { 7 * ALIGNMENT };
                    end = start + granules * ALIGNMENT;
                    pool.add(start, granules * ALIGNMENT);
                    twin.add(start, *granules);
                }
                Call::Take(bytes) => {
                    let found = pool.take(*bytes);
                    let expected = twin.take(*bytes, number as u32);
                    prop_assert_eq!(found.map(|range| range.start), expected);
                    if let Some(range) = found {
                        prop_assert!(range.bytes >= *bytes && range.bytes > 0);
                        prop_assert!(range.start.is_multiple_of(ALIGNMENT));
                        let overlaps = |other: &Range| {
                            range.start < other.start + other.bytes
                                && other.start < range.start + range.bytes
                        };
                        prop_assert!(!held.iter().any(|(_, other)| overlaps(other)));
                        held.push((number as u32, range));
                    }
                }
                Call::Give(_) if held.is_empty() => {}
                Call::Give(which) => {
                    let (holder, range) = held.swap_remove(which.index(held.len()));
                    pool.give(range);
                    twin.give(holder);
                }
                Call::RemoveIdle => prop_assert_eq!(pool.remove_idle(), twin.remove_idle()),
            }
            let runs = twin.free();
            let lengths = || runs.iter().map(|(length, ..)| *length);
            prop_assert_eq!(pool.reserved(), twin.reserved());
            prop_assert_eq!(pool.free(), lengths().sum::<u64>());
            prop_assert_eq!(pool.largest(), lengths().max().unwrap_or(0));
            prop_assert_eq!(pool.free.len(), runs.len(), "free neighbours are one piece");
        }
        // All given back is one piece a slab again.
        for (_, range) in held {
            pool.give(range);
        }
        let slabs = pool.slabs.iter().map(|(&start, slab)| (start, slab.bytes));
        prop_assert_eq!(&pool.free, &slabs.collect());
        prop_assert_eq!(pool.remove_idle().len(), twin.0.len());
        prop_assert_eq!((pool.reserved(), pool.free(), pool.largest()), (0, 0, 0));
    }
}

#[test]
fn golden_the_smallest_piece_that_holds_it_is_taken() {
    let mut pool = Pool::default();
    pool.add(0x1000, 10 * ALIGNMENT);
    let sizes = [1, 3, 1, 2, 1, 2];
    let ranges = sizes.map(|granules| pool.take(granules * ALIGNMENT).expect("ten granules"));
    assert_eq!((pool.take(1), pool.free()), (None, 0));
    for hole in [1, 3, 5] {
        pool.give(ranges[hole]);
    }
    // Holes of three, two and two: the lower of the two that fit best.
    let two = pool.take(ALIGNMENT + 1).expect("it fits");
    assert_eq!(two, ranges[3]);
    assert_eq!(pool.take(3 * ALIGNMENT), Some(ranges[1]));
    assert_eq!(
        (pool.take(3 * ALIGNMENT), pool.free()),
        (None, 2 * ALIGNMENT)
    );
}

#[test]
fn golden_the_extent_is_how_far_ranges_have_reached() {
    let mut pool = Pool::default();
    pool.add(0x1000, 10 * ALIGNMENT);
    pool.add(0x9000, 4 * ALIGNMENT);
    assert_eq!(pool.extent(), 0);
    let first = pool.take(3 * ALIGNMENT).expect("it fits");
    let second = pool.take(5 * ALIGNMENT).expect("it fits");
    assert_eq!(pool.extent(), 8 * ALIGNMENT);
    pool.give(first);
    pool.give(second);
    pool.take(ALIGNMENT).expect("it fits");
    assert_eq!(pool.extent(), 8 * ALIGNMENT);
    pool.remove_idle();
    assert_eq!(
        (pool.extent(), pool.reserved()),
        (3 * ALIGNMENT, 4 * ALIGNMENT)
    );
}

#[test]
#[should_panic(expected = "was given back before")]
fn what_is_given_back_twice_is_found() {
    let mut pool = Pool::default();
    pool.add(0, 4 * ALIGNMENT);
    let range = pool.take(1).expect("it fits");
    pool.give(range);
    pool.give(range);
}

#[test]
#[should_panic(expected = "lies in no slab")]
fn what_is_of_no_slab_is_found() {
    let mut pool = Pool::default();
    pool.add(0, 4 * ALIGNMENT);
    let range = pool.take(1).expect("it fits");
    pool.give(range);
    pool.remove_idle();
    pool.give(range);
}
