//! [`Pool`]: which parts of a device's memory are free.
//!
//! Taking memory from a GPU's driver costs the host time, and giving it back costs it a wait for every
//! stream. So memory is taken in slabs, and tensors get ranges of them. A range comes from the smallest
//! free piece that holds it, of equal ones the lowest; when it returns it becomes one with the free
//! pieces beside it. What lies where follows from the order of calls and, of equal pieces in several
//! slabs, from where the driver put those; so a training step that repeats itself finds the same places,
//! and one slab divides alike in every run.
//!
//! The pool only counts: addresses are numbers to it, and pieces of different slabs are never joined, even
//! at adjacent addresses.

use std::collections::{BTreeMap, BTreeSet};

/// Ranges start and end at multiples of this: what the driver aligns its own allocations to (CUDA
/// programming guide, "Device Memory Accesses").
pub(crate) const ALIGNMENT: u64 = 256;

/// A part of a slab, which [`Pool::take`] gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    bytes: u64,
}

/// Memory that is divided.
#[derive(Debug, PartialEq, Eq)]
struct Slab {
    bytes: u64,
    /// Bytes up to the furthest end of any range so far.
    extent: u64,
}

/// Slabs, and what of them is free.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// By where they start.
    slabs: BTreeMap<u64, Slab>,
    /// Bytes of a free piece by where it starts. Free neighbours in a slab are one piece.
    free: BTreeMap<u64, u64>,
    /// The same pieces as bytes and start: the smallest first, of equal ones the lowest.
    by_size: BTreeSet<(u64, u64)>,
}

impl Pool {
    /// Adds a slab, all of it free. Both numbers are multiples of [`ALIGNMENT`].
    pub(crate) fn add(&mut self, start: u64, bytes: u64) {
        assert!(
            start.is_multiple_of(ALIGNMENT) && bytes.is_multiple_of(ALIGNMENT) && bytes > 0,
            "a slab of {bytes} bytes at {start:#x}"
        );
        self.slabs.insert(start, Slab { bytes, extent: 0 });
        self.put(start, bytes);
    }

    /// A range of at least `bytes`, and at least one; none where no free piece holds it.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Range> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let (found, start) = self.by_size.range((bytes, 0)..).next().copied()?;
        self.remove(start, found);
        if found > bytes {
            self.put(start + bytes, found - bytes);
        }
        let slab = self.slabs.range_mut(..=start).next_back();
        let (at, slab) = slab.expect("free pieces lie in slabs");
        slab.extent = slab.extent.max(start + bytes - at);
        Some(Range { start, bytes })
    }

    /// Takes a range back.
    ///
    /// # Panics
    /// When it is none of this pool's, or free already.
    pub(crate) fn give(&mut self, range: Range) {
        let Range { start, bytes } = range;
        let slab = self.slabs.range(..=start).next_back();
        let slab = slab.map(|(&at, slab)| (at, at + slab.bytes));
        let Some((slab_start, slab_end)) = slab.filter(|&(_, end)| start + bytes <= end) else {
            panic!("{range:?} lies in no slab");
        };
        let before = self.free.range(slab_start..=start).next_back();
        let before = before.map(|(&at, &bytes)| (at, bytes));
        let after = self.free.range(start + 1..slab_end).next();
        let after = after.map(|(&at, &bytes)| (at, bytes));
        let is_free = before.is_some_and(|(at, bytes)| at + bytes > start)
            || after.is_some_and(|(at, _)| at < start + bytes);
        assert!(!is_free, "{range:?} was given back before");
        let (mut from, mut to) = (start, start + bytes);
        if let Some((at, bytes)) = before.filter(|(at, bytes)| at + bytes == from) {
            self.remove(at, bytes);
            from = at;
        }
        if let Some((at, bytes)) = after.filter(|(at, _)| *at == to) {
            self.remove(at, bytes);
            to += bytes;
        }
        self.put(from, to - from);
    }

    /// Forgets the slabs of which nothing is taken, and says where they started.
    pub(crate) fn remove_idle(&mut self) -> Vec<u64> {
        let idle: Vec<(u64, u64)> = self
            .slabs
            .iter()
            .filter(|(start, slab)| self.free.get(start) == Some(&slab.bytes))
            .map(|(&start, slab)| (start, slab.bytes))
            .collect();
        for &(start, bytes) in &idle {
            self.slabs.remove(&start);
            self.remove(start, bytes);
        }
        idle.into_iter().map(|(start, _)| start).collect()
    }

    /// Bytes of all slabs.
    pub(crate) fn reserved(&self) -> u64 {
        self.slabs.values().map(|slab| slab.bytes).sum()
    }

    /// Bytes of them up to the furthest end of a range so far: what would have been enough, had it
    /// been known.
    pub(crate) fn extent(&self) -> u64 {
        self.slabs.values().map(|slab| slab.extent).sum()
    }

    /// Bytes of them that are free.
    pub(crate) fn free(&self) -> u64 {
        self.free.values().sum()
    }

    /// Bytes of the largest free piece.
    pub(crate) fn largest(&self) -> u64 {
        self.by_size.last().map_or(0, |&(bytes, _)| bytes)
    }

    fn put(&mut self, start: u64, bytes: u64) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
    }

    fn remove(&mut self, start: u64, bytes: u64) {
        self.free.remove(&start);
        self.by_size.remove(&(bytes, start));
    }
}

#[cfg(test)]
mod tests;
