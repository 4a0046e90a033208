//! [`Shelf`]: memory of posts that have been read, for posts to come.
//!
//! A post of the CPU's tensors is a copy. Where it is large, fresh memory costs more than the copy, as the
//! system maps it page by page; so a rank keeps what its posts were in, once every member has read them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smaller ones are left to the allocator, which has such memory at hand.
const WORTH_KEEPING: usize = 1 << 15;

/// A step has few large posts alive at a time.
const KEPT: usize = 8;

/// What one rank keeps. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Shelf(Arc<Mutex<Vec<Vec<f32>>>>);

/// Numbers of a post, whose memory goes back to the shelf that it is from when nobody has need of them.
#[derive(Default)]
pub(crate) struct Numbers {
    values: Vec<f32>,
    shelf: Option<Shelf>,
}

impl Shelf {
    /// So many numbers, of any value.
    pub(super) fn take(&self, len: usize) -> Numbers {
        let mut kept = self.kept();
        // Not one that is much too large, so that it is there for who needs it.
        let fits = |values: &Vec<f32>| (len..=2 * len).contains(&values.capacity());
        let fitting = (0..kept.len()).filter(|&i| fits(&kept[i]));
        let found = fitting.min_by_key(|&i| kept[i].capacity());
        let mut values = found.map(|i| kept.remove(i)).unwrap_or_default();
        drop(kept);
        values.resize(len, 0.0);
        Numbers {
            values,
            shelf: Some(self.clone()),
        }
    }

    /// Nothing panics while this is held.
    fn kept(&self) -> MutexGuard<'_, Vec<Vec<f32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, values: Vec<f32>) {
        if values.capacity() < WORTH_KEEPING {
            return;
        }
        let mut kept = self.kept();
        kept.push(values);
        if kept.len() > KEPT {
            // The one that was longest of no use.
            let oldest = kept.remove(0);
            drop(kept);
            drop(oldest);
        }
    }
}

impl From<Vec<f32>> for Numbers {
    /// From no shelf.
    fn from(values: Vec<f32>) -> Self {
        Self {
            values,
            shelf: None,
        }
    }
}

impl Clone for Numbers {
    /// From no shelf.
    fn clone(&self) -> Self {
        self.values.clone().into()
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        if let Some(shelf) = &self.shelf {
            shelf.keep(std::mem::take(&mut self.values));
        }
    }
}

impl Deref for Numbers {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} numbers", self.values.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(shelf: &Shelf) -> Vec<usize> {
        let mut kept: Vec<usize> = shelf.kept().iter().map(Vec::capacity).collect();
        kept.sort_unstable();
        kept
    }

    #[test]
    fn memory_of_large_posts_is_used_again_where_it_fits() {
        let shelf = Shelf::default();
        let mut first = shelf.take(WORTH_KEEPING);
        first.fill(1.0);
        drop((first, shelf.take(WORTH_KEEPING - 1), shelf.take(0)));
        assert_eq!(kept(&shelf), [WORTH_KEEPING]);
        let large = shelf.take(2 * WORTH_KEEPING);
        let again = shelf.take(WORTH_KEEPING / 2 + 1);
        assert_eq!(again.len(), WORTH_KEEPING / 2 + 1);
        assert_eq!(again[0], 1.0, "memory of the first, as it was left");
        drop(again);
        drop(shelf.take(WORTH_KEEPING / 2 - 1));
        assert_eq!(kept(&shelf), [WORTH_KEEPING], "too large for so few");
        drop(large);
        assert_eq!(kept(&shelf), [WORTH_KEEPING, 2 * WORTH_KEEPING]);
    }

    #[test]
    fn the_last_few_are_kept() {
        let shelf = Shelf::default();
        let sizes: Vec<usize> = (1..=KEPT + 3).rev().map(|i| i * WORTH_KEEPING).collect();
        let posts: Vec<Numbers> = sizes.iter().map(|&len| shelf.take(len)).collect();
        drop(posts);
        let mut last = sizes[3..].to_vec();
        last.reverse();
        assert_eq!(kept(&shelf), last);
    }
}
