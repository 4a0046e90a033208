//! Rows of a table by token id, vocabulary parallel.
//!
//! The table holds rows `vocab_start..vocab_start + V` of the vocabulary; ids outside give zeros, so
//! that the sum over the ranks of a tensor-parallel group is the embedding.
//!
//! A device implementation: backward adds the gradients of equal ids in token order (sorted by id,
//! not with atomics), so that sums have one order.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The cost-table key for `tokens` rows of `table: [V, h]`.
pub fn key(table: &Tensor, tokens: usize, pass: Pass) -> Op {
    Op::Embedding {
        rows: tokens as u64,
        dim: table.width() as u64,
        pass,
        dtype: table.dtype(),
    }
}

/// `ids [T]` i32 and `table [V, h]` to `[T, h]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn forward(ids: &Tensor, table: &Tensor, vocab_start: usize) -> Tensor {
    let &[_, h] = table.dims() else {
        panic!("embedding::forward: table is {table:?}, expected [vocabulary, width]")
    };
    let device = table.device();
    let y = device.empty(TensorClass::Activations, Dtype::F32, &[ids.len(), h]);
    match &device.0.backend {
        Backend::Cpu(_) => with(
            "embedding::forward",
            [ids, table],
            [&y],
            |[ids, table], [y]| {
                cpu::forward(ids.i32(), table.f32(), vocab_start, y.f32(), h);
            },
        ),
        Backend::Cuda(gpu) => gpu.unwritten("embedding::forward"),
    }
    y
}

/// `dtable[ids[t]] += dy[t]`: `dy [T, h]`, `ids [T]` i32 into `dtable [V, h]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, ids: &Tensor, dtable: &Tensor, vocab_start: usize) {
    let h = dtable.width();
    expect_dims("embedding::backward", "dy", dy, &[ids.len(), h]);
    match &dy.device().0.backend {
        Backend::Cpu(_) => with(
            "embedding::backward",
            [dy, ids],
            [dtable],
            |[dy, ids], [dtable]| {
                cpu::backward(dy.f32(), ids.i32(), dtable.f32(), vocab_start, h);
            },
        ),
        Backend::Cuda(gpu) => gpu.unwritten("embedding::backward"),
    }
}

mod cpu {
    /// Where id's row starts in the table, if it is in it.
    fn place(id: i32, vocab_start: usize, table_len: usize, h: usize) -> Option<usize> {
        let row = usize::try_from(id).ok()?.checked_sub(vocab_start)?;
        ((row + 1) * h <= table_len).then_some(row * h)
    }

    pub(super) fn forward(ids: &[i32], table: &[f32], vocab_start: usize, y: &mut [f32], h: usize) {
        for (&id, y) in ids.iter().zip(y.chunks_exact_mut(h.max(1))) {
            match place(id, vocab_start, table.len(), h) {
                Some(start) => y.copy_from_slice(&table[start..start + h]),
                None => y.fill(0.0),
            }
        }
    }

    pub(super) fn backward(
        dy: &[f32],
        ids: &[i32],
        dtable: &mut [f32],
        vocab_start: usize,
        h: usize,
    ) {
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(h.max(1))) {
            if let Some(start) = place(id, vocab_start, dtable.len(), h) {
                for (d, &dy) in dtable[start..start + h].iter_mut().zip(dy) {
                    *d += dy;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
