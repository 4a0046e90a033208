//! [`Flat`]: how a pass over all elements of some tensors is cut into wide accesses.
//!
//! A kernel takes elements in pieces of up to 16 bytes. Views start anywhere, so the first few
//! elements, before the first place where a piece of every tensor is aligned, go one by one, as do
//! those after the last whole piece. Where the tensors have no such place in common, all do.

use crate::cuda::program::{Arg, Define, Grid};
use crate::tensor::Tensor;

/// Threads of a block of such a pass (`THREADS` in the sources).
pub(crate) const THREADS: u32 = 256;

/// Tensors of one length, walked together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flat {
    len: usize,
    /// Elements of a piece.
    piece: usize,
    /// Elements before the first piece.
    head: usize,
}

impl Flat {
    /// How `tensors` are walked together.
    pub(crate) fn of(tensors: &[&Tensor]) -> Self {
        let size = |t: &Tensor| t.dtype().bytes(1).0;
        let widest = tensors.iter().map(|t| size(t)).max().unwrap_or(1);
        let piece = 16 / widest;
        let aligned = |head: u64| {
            let aligned = |t: &&Tensor| {
                let start = t.address().0 + head * size(t);
                start.is_multiple_of(piece * size(t))
            };
            tensors.iter().all(aligned)
        };
        let len = tensors.first().map_or(0, |t| t.len());
        match (0..piece).find(|&head| aligned(head)) {
            Some(head) => Self {
                len,
                piece: piece as usize,
                head: len.min(head as usize),
            },
            None => Self {
                len,
                piece: 1,
                head: 0,
            },
        }
    }

    /// `PIECE` of the source.
    pub(crate) fn define(self) -> Define {
        Define::int("PIECE", self.piece)
    }

    /// Blocks whose threads take `depth` pieces each.
    pub(crate) fn blocks(self, depth: usize) -> usize {
        let pieces = (self.len - self.head) / self.piece;
        let least = usize::from(self.len > 0);
        pieces.div_ceil(THREADS as usize * depth).max(least)
    }

    /// A grid of that many blocks.
    pub(crate) fn grid(self, depth: usize) -> Grid {
        Grid::linear(self.blocks(depth), THREADS, 0)
    }

    /// The kernel's `len`.
    pub(crate) fn len(self) -> Arg {
        Arg::U64(self.len as u64)
    }

    /// The kernel's `head`.
    pub(crate) fn head(self) -> Arg {
        Arg::size(self.head)
    }
}
