//! How rows are dealt to threads, and the launches.

use moefold_profiles::Dtype;

use super::Over;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("rms_norm", "../rms_norm.cu");

/// Blocks of rows, at most, that the weight's gradient is summed over first.
const BLOCKS: usize = 528;

/// Rows that each thread's row of such a block at least has, so that it is worth its partial sum.
const DEPTH: usize = 8;

/// Accesses of a thread to one row, at most, where the row is kept in registers.
const PIECES: usize = 4;

/// How rows of one width are dealt to threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Deal {
    /// Elements of an access.
    vec: usize,
    /// Threads that share a row.
    lanes: usize,
    /// Accesses of a thread that registers hold; 0 where the row is too wide for that.
    pieces: usize,
}

impl Deal {
    /// For rows of tensors like `rows` and their weight.
    fn of(rows: &[&Tensor], w: &Tensor) -> Self {
        let (dtype, width) = (rows[0].dtype(), rows[0].width());
        for t in rows {
            assert!(
                t.dtype() == dtype,
                "rms_norm: {t:?} beside {:?}, expected one dtype",
                rows[0]
            );
        }
        let aligned = |t: &&Tensor| t.address().0.is_multiple_of(16);
        let whole = dtype.bytes(width as u64).0.is_multiple_of(16);
        let vec = if whole && rows.iter().chain([&w]).all(aligned) {
            16 / dtype.bytes(1).0 as usize
        } else {
            1
        };
        Self::of_width(width, vec)
    }

    fn of_width(width: usize, vec: usize) -> Self {
        let pieces = width / vec;
        let lanes = pieces.div_ceil(PIECES).next_power_of_two().max(8);
        if lanes > 512 {
            return Self {
                vec,
                lanes: 512,
                pieces: 0,
            };
        }
        Self {
            vec,
            lanes,
            pieces: pieces.div_ceil(lanes).next_power_of_two(),
        }
    }

    fn threads(self) -> usize {
        if self.lanes < 64 { 256 } else { self.lanes }
    }

    /// Rows that a block has at once.
    fn rows(self) -> usize {
        self.threads() / self.lanes
    }

    fn program(self, x: Dtype, weight: Dtype) -> Program {
        SOURCE.with(&[
            Define::dtype("T", x),
            Define::dtype("WEIGHT", weight),
            Define::int("VEC", self.vec),
            Define::int("LANES", self.lanes),
            Define::int("PIECES", self.pieces),
        ])
    }
}

/// Shared memory for a value of every warp.
const SCRATCH: usize = 32 * 4;

pub(super) fn sums(
    gpu: &Cuda,
    op: &'static str,
    dy: Option<&Tensor>,
    [x, w]: [&Tensor; 2],
    sums: &Tensor,
) {
    disjoint(op, &[&[x, w], dy.as_slice()].concat(), &[sums]);
    let deal = Deal::of(&[&[x], dy.as_slice()].concat(), w);
    let (rows, width) = (x.num_rows(), x.width());
    gpu.launch(
        op,
        &deal.program(x.dtype(), w.dtype()),
        "rms_norm_sums",
        Grid::linear(rows.div_ceil(deal.rows()), deal.threads() as u32, SCRATCH),
        &[
            Arg::optional(dy),
            x.into(),
            w.into(),
            sums.into(),
            Arg::size(rows),
            Arg::size(width),
        ],
    );
}

pub(super) fn forward(
    gpu: &Cuda,
    x: &Tensor,
    w: &Tensor,
    over: &Over<'_>,
    eps: f32,
    y: &Tensor,
    rstd: &Tensor,
) {
    disjoint(
        "rms_norm::forward",
        &[&[x, w], over.sums.as_slice()].concat(),
        &[y, rstd],
    );
    let deal = Deal::of(&[x, y], w);
    let (rows, width) = (x.num_rows(), x.width());
    gpu.launch(
        "rms_norm::forward",
        &deal.program(x.dtype(), w.dtype()),
        "rms_norm_forward",
        Grid::linear(rows.div_ceil(deal.rows()), deal.threads() as u32, SCRATCH),
        &[
            x.into(),
            w.into(),
            Arg::optional(over.sums),
            y.into(),
            rstd.into(),
            Arg::size(rows),
            Arg::size(width),
            Arg::size(over.width),
            Arg::F32(eps),
        ],
    );
}

pub(super) fn backward(
    gpu: &Cuda,
    [dy, x, w, rstd]: [&Tensor; 4],
    over: &Over<'_>,
    dw: &Tensor,
    dx: &Tensor,
) {
    disjoint(
        "rms_norm::backward",
        &[&[dy, x, w, rstd], over.sums.as_slice()].concat(),
        &[dw, dx],
    );
    if x.is_empty() {
        return;
    }
    let deal = Deal::of(&[dy, x, dx], w);
    let (rows, width) = (x.num_rows(), x.width());
    let rows_per_block = rows
        .div_ceil(BLOCKS)
        .max(DEPTH * deal.rows())
        .next_multiple_of(deal.rows());
    let blocks = rows.div_ceil(rows_per_block);
    let partial = x
        .device()
        .empty(TensorClass::Transient, Dtype::F32, &[blocks, width]);
    let columns = if deal.lanes <= 32 { 4 * width } else { 0 };
    gpu.launch(
        "rms_norm::backward",
        &deal.program(x.dtype(), w.dtype()),
        "rms_norm_backward",
        Grid::linear(blocks, deal.threads() as u32, SCRATCH.max(columns)),
        &[
            dy.into(),
            x.into(),
            w.into(),
            rstd.into(),
            Arg::optional(over.sums),
            dx.into(),
            (&partial).into(),
            Arg::size(rows),
            Arg::size(width),
            Arg::size(over.width),
            Arg::size(rows_per_block),
        ],
    );
    add_blocks(gpu, "rms_norm::backward", &partial, dw);
}

/// Adds the sum over the rows of `partial: [blocks, width]` to `dw`, in a fixed order.
pub(crate) fn add_blocks(gpu: &Cuda, op: &'static str, partial: &Tensor, dw: &Tensor) {
    let (blocks, width) = (partial.num_rows(), partial.width());
    gpu.launch(
        op,
        &weight_program(dw.dtype()),
        "rms_norm_weight",
        Grid::linear(
            width.div_ceil(32),
            WEIGHT_THREADS,
            4 * WEIGHT_THREADS as usize,
        ),
        &[
            partial.into(),
            dw.into(),
            Arg::size(blocks),
            Arg::size(width),
        ],
    );
}

/// Threads of a block that sums the weight's gradient (`32 * WARPS` in the source).
const WEIGHT_THREADS: u32 = 512;

fn weight_program(gradient: Dtype) -> Program {
    SOURCE.with(&[Define::dtype("GRAD", gradient)])
}

/// What is launched, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    let listed = |program, needs, entries| Listed {
        program,
        needs,
        entries,
    };
    let mut programs = Vec::new();
    for (x, weight, vec, needs) in [
        (Dtype::F32, Dtype::F32, 4, Needs::Sm80),
        (Dtype::Bf16, Dtype::Bf16, 8, Needs::Sm80),
        (Dtype::F32, Dtype::F32, 1, Needs::Odd),
        (Dtype::Bf16, Dtype::Bf16, 1, Needs::Odd),
        (Dtype::Bf16, Dtype::F32, 8, Needs::Odd),
        (Dtype::Bf16, Dtype::F32, 1, Needs::Odd),
    ] {
        for (lanes, pieces) in DEALS {
            let columns = 4 * 32 * PIECES * vec;
            programs.push(listed(
                Deal { vec, lanes, pieces }.program(x, weight),
                needs,
                vec![
                    Entry::plain("rms_norm_sums", 64, SCRATCH),
                    Entry::plain("rms_norm_forward", 64, SCRATCH),
                    Entry::plain("rms_norm_backward", 128, SCRATCH.max(columns)),
                ],
            ));
        }
    }
    for gradient in [Dtype::F32, Dtype::Bf16] {
        programs.push(listed(
            weight_program(gradient),
            Needs::Sm80,
            vec![Entry::plain(
                "rms_norm_weight",
                64,
                4 * WEIGHT_THREADS as usize,
            )],
        ));
    }
    programs
}

/// Lanes and pieces that [`Deal::of_width`] gives.
const DEALS: [(usize, usize); 10] = [
    (8, 1),
    (8, 2),
    (8, 4),
    (16, 4),
    (32, 4),
    (64, 4),
    (128, 4),
    (256, 4),
    (512, 4),
    (512, 0),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_deal_is_listed_and_covers_its_row() {
        for vec in [1, 4, 8] {
            for width in (vec..40_000).step_by(vec) {
                let deal = Deal::of_width(width, vec);
                assert!(DEALS.contains(&(deal.lanes, deal.pieces)), "{deal:?}");
                let held = deal.lanes * deal.pieces * vec;
                assert!(deal.pieces == 0 || held >= width, "{width}: {deal:?}");
            }
        }
    }
}
