//! Rows of a table by token id, vocabulary parallel.
//!
//! The table holds rows `vocab_start..vocab_start + V` of the vocabulary; ids outside give zeros, so
//! that the sum over the ranks of a tensor-parallel group is the embedding.
//!
//! A device implementation: backward adds the gradients of equal ids in token order (sorted by id,
//! not with atomics), so that sums have one order; in f32, rounded once to the dtype of `dtable`.

use moefold_profiles::{Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key for `tokens` rows of `table: [V, h]`.
pub fn key(table: &Tensor, tokens: usize, pass: Pass) -> Op {
    Op::Embedding {
        rows: tokens as u64,
        dim: table.width() as u64,
        pass,
        dtype: table.dtype(),
    }
}

/// `ids [T]` i32 and `table [V, h]` to `[T, h]`, in the dtype of the table.
///
/// # Panics
/// When the shapes do not agree.
pub fn forward(ids: &Tensor, table: &Tensor, vocab_start: usize) -> Tensor {
    let _op = table
        .device()
        .begin(|| key(table, ids.len(), Pass::Forward));
    let &[_, h] = table.dims() else {
        panic!("embedding::forward: table is {table:?}, expected [vocabulary, width]")
    };
    let device = table.device();
    let y = device.empty(TensorClass::Activations, table.dtype(), &[ids.len(), h]);
    match &device.0.backend {
        Backend::Cpu(_) => with(
            "embedding::forward",
            [ids, table],
            [&y],
            |[ids, table], [y]| {
                cpu::forward(ids.i32(), table.f32(), vocab_start, y.f32(), h);
            },
        ),
        Backend::Cuda(gpu) => cuda::forward(gpu, ids, table, vocab_start, &y),
    }
    y
}

/// `dtable[ids[t]] += dy[t]`: `dy [T, h]`, `ids [T]` i32 into `dtable [V, h]`, f32 or bf16.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, ids: &Tensor, dtable: &Tensor, vocab_start: usize) {
    let _op = dy.device().begin(|| key(dy, ids.len(), Pass::Backward));
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
        Backend::Cuda(gpu) => cuda::backward(gpu, dy, ids, dtable, vocab_start),
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

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::device::TensorClass;
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("embedding");

    /// Warps of a block that sorts (`WARPS` in the source).
    const WARPS: usize = 8;

    /// Blocks that sort, at most, and rows of the table that one at least has where there are more.
    const BUCKETS: usize = 256;
    const BUCKET_ROWS: usize = 256;

    fn program(dtype: Dtype, gradient: Dtype, vec: usize) -> Program {
        SOURCE.with(&[
            Define::dtype("T", dtype),
            Define::dtype("GRAD", gradient),
            Define::int("VEC", vec),
        ])
    }

    /// Elements of an access: 16 bytes of `rows`, where every row of both tensors is aligned for it.
    fn vector(rows: &Tensor, others: &Tensor) -> usize {
        let wide = 16 / rows.dtype().bytes(1).0 as usize;
        let aligned = |t: &&Tensor| t.address().0.is_multiple_of(16);
        if rows.width().is_multiple_of(wide) && [rows, others].iter().all(aligned) {
            wide
        } else {
            1
        }
    }

    /// Threads of a block for a row of so many pieces.
    fn threads(pieces: usize) -> usize {
        pieces.next_multiple_of(32).clamp(32, 256)
    }

    pub(super) fn forward(
        gpu: &Cuda,
        ids: &Tensor,
        table: &Tensor,
        vocab_start: usize,
        y: &Tensor,
    ) {
        disjoint("embedding::forward", &[ids, table], &[y]);
        let (vocab, width) = (table.dims()[0], table.width());
        let vec = vector(y, table);
        let threads = threads(width / vec);
        gpu.launch(
            "embedding::forward",
            &program(table.dtype(), Dtype::F32, vec),
            "embedding_forward",
            Grid::linear(ids.len(), threads as u32, 0),
            &[
                ids.into(),
                table.into(),
                y.into(),
                Arg::size(vocab_start),
                Arg::size(vocab),
                Arg::size(width),
            ],
        );
    }

    pub(super) fn backward(
        gpu: &Cuda,
        dy: &Tensor,
        ids: &Tensor,
        dtable: &Tensor,
        vocab_start: usize,
    ) {
        disjoint("embedding::backward", &[dy, ids], &[dtable]);
        if dy.is_empty() || dtable.is_empty() {
            return;
        }
        let (tokens, vocab, width) = (ids.len(), dtable.dims()[0], dtable.width());
        let vec = vector(dy, dtable);
        let program = program(dy.dtype(), dtable.dtype(), vec);
        // A row and a token for each place; -1 where there is none.
        let order = dy
            .device()
            .empty(TensorClass::Transient, Dtype::I32, &[tokens, 2]);
        gpu.fill_bytes("embedding::backward", &order, 0xFF);
        let buckets = buckets(vocab);
        let rows = vocab.div_ceil(buckets);
        gpu.launch(
            "embedding::backward",
            &program,
            "embedding_order",
            Grid::linear(buckets, 32 * WARPS as u32, shared(rows)),
            &[
                ids.into(),
                (&order).into(),
                Arg::size(tokens),
                Arg::size(vocab_start),
                Arg::size(vocab),
                Arg::size(rows),
                Arg::size(buckets.ilog2() as usize),
            ],
        );
        let threads = threads(width / vec);
        let columns = (width / vec).div_ceil(threads);
        let mut grid = Grid::linear(tokens, threads as u32, 0);
        grid.blocks[1] = u32::try_from(columns).expect("a row is narrower than 2^32");
        gpu.launch(
            "embedding::backward",
            &program,
            "embedding_backward",
            grid,
            &[
                dy.into(),
                (&order).into(),
                dtable.into(),
                Arg::size(tokens),
                Arg::size(width),
            ],
        );
    }

    /// Blocks that sort the ids of a table of so many rows: a power of two.
    fn buckets(vocab: usize) -> usize {
        vocab.div_ceil(BUCKET_ROWS).next_power_of_two().min(BUCKETS)
    }

    /// Shared memory of one with so many rows.
    fn shared(rows: usize) -> usize {
        4 * (32 + WARPS * rows)
    }

    /// What is launched, with its limits: for aligned rows, up to a million of them.
    pub(crate) fn programs() -> Vec<Listed> {
        let rows = (1usize << 20) / BUCKETS;
        let mut programs = Vec::new();
        for (dtype, vec, needs) in [
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 1, Needs::Odd),
            (Dtype::Bf16, 1, Needs::Odd),
        ] {
            for gradient in [Dtype::F32, Dtype::Bf16] {
                programs.push(Listed {
                    program: program(dtype, gradient, vec),
                    needs,
                    entries: vec![
                        Entry::plain("embedding_forward", 48, 0),
                        Entry::plain("embedding_order", 64, shared(rows)),
                        Entry::plain("embedding_backward", 80, 0),
                    ],
                });
            }
        }
        programs
    }
}
