//! The launches.

use moefold_profiles::Dtype;

use super::Reduced;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::tensor::Tensor;

const SOURCE: Source = source!("cross_entropy", "../cross_entropy.cu");

const THREADS: u32 = 256;

/// Shared memory for a value of every warp.
const SCRATCH: usize = 32 * 4;

fn program(dtype: Dtype) -> Program {
    SOURCE.with(&[
        Define::dtype("T", dtype),
        Define::int("PIECE", 16 / dtype.bytes(1).0 as usize),
    ])
}

/// A block for every row.
fn rows(logits: &Tensor) -> Grid {
    Grid::linear(logits.num_rows(), THREADS, SCRATCH)
}

pub(super) fn statistics(gpu: &Cuda, logits: &Tensor, top: &Tensor, sum_exp: &Tensor) {
    disjoint("cross_entropy::row_statistics", &[logits], &[top, sum_exp]);
    gpu.launch(
        "cross_entropy::row_statistics",
        &program(logits.dtype()),
        "cross_entropy_statistics",
        rows(logits),
        &[
            logits.into(),
            top.into(),
            sum_exp.into(),
            Arg::size(logits.width()),
        ],
    );
}

pub(super) fn rebase(
    gpu: &Cuda,
    [logits, own_top, own_sum, top, targets]: [&Tensor; 5],
    vocab_start: usize,
    sum_exp: &Tensor,
    target: &Tensor,
) {
    let inputs = [logits, own_top, own_sum, top, targets];
    disjoint("cross_entropy::rebase", &inputs, &[sum_exp, target]);
    let rows = logits.num_rows();
    gpu.launch(
        "cross_entropy::rebase",
        &program(logits.dtype()),
        "cross_entropy_rebase",
        Grid::linear(rows.div_ceil(THREADS as usize), THREADS, 0),
        &[
            logits.into(),
            own_top.into(),
            own_sum.into(),
            top.into(),
            targets.into(),
            sum_exp.into(),
            target.into(),
            Arg::size(rows),
            Arg::size(vocab_start),
            Arg::size(logits.width()),
        ],
    );
}

pub(super) fn finish(
    gpu: &Cuda,
    logits: &Tensor,
    reduced: Reduced<'_>,
    targets: &Tensor,
    vocab_start: usize,
    scale: f32,
    losses: &Tensor,
) {
    let Reduced {
        top,
        sum_exp,
        target,
    } = reduced;
    let inputs = [top, sum_exp, target, targets];
    disjoint("cross_entropy::finish", &inputs, &[logits, losses]);
    gpu.launch(
        "cross_entropy::finish",
        &program(logits.dtype()),
        "cross_entropy_finish",
        rows(logits),
        &[
            logits.into(),
            top.into(),
            sum_exp.into(),
            target.into(),
            targets.into(),
            losses.into(),
            Arg::size(vocab_start),
            Arg::size(logits.width()),
            Arg::F32(scale),
        ],
    );
}

/// What is launched, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    let entries = [
        Entry::plain("cross_entropy_statistics", 64, SCRATCH),
        Entry::plain("cross_entropy_rebase", 64, 0),
        Entry::plain("cross_entropy_finish", 64, SCRATCH),
    ];
    Vec::from([Dtype::F32, Dtype::Bf16].map(|dtype| Listed {
        program: program(dtype),
        needs: Needs::Sm80,
        entries: entries.to_vec(),
    }))
}
