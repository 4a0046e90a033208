//! Sums over all elements of a tensor on a CUDA device, to the host in f64: what [`crate::elementwise::sum`]
//! and [`crate::grad_norm`] share.
//!
//! Every block sums the elements of its threads in f64, and the host sums the blocks in order. Which
//! thread takes which element depends on the length of the tensor and on where it lies within 16
//! bytes, so the same tensor gives the same bits. One launch and one download of at most 4 KiB.

use crate::Dtype;
use crate::cuda::Cuda;
use crate::cuda::flat::{Flat, THREADS};
use crate::cuda::program::{Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("total");

/// Blocks at most: as many as four to each of the 132 multiprocessors of an H200.
const BLOCKS: usize = 528;

/// Pieces that a thread reads at once (`DEPTH` in the source).
const DEPTH: usize = 4;

/// What is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    Values,
    Squares,
}

/// The sum over all elements of `x`.
pub(crate) fn total(gpu: &Cuda, op: &'static str, x: &Tensor, of: Of) -> f64 {
    if x.is_empty() {
        return 0.0;
    }
    let flat = Flat::of(&[x]);
    let blocks = flat.blocks(DEPTH).min(BLOCKS);
    // Words of f64, for which there is no dtype.
    let partial = x
        .device()
        .empty(TensorClass::Transient, Dtype::I32, &[blocks, 2]);
    gpu.launch(
        op,
        &program(x.dtype(), flat.define(), of),
        "total",
        Grid::linear(blocks, THREADS, 8 * THREADS as usize),
        &[x.into(), (&partial).into(), flat.len(), flat.head()],
    );
    let mut sums = vec![0.0f64; blocks];
    gpu.download(op, &partial, bytemuck::cast_slice_mut(&mut sums));
    sums.iter().sum()
}

fn program(dtype: Dtype, piece: Define, of: Of) -> Program {
    SOURCE.with(&[
        Define::dtype("T", dtype),
        piece,
        Define::flag("SQUARED", of == Of::Squares),
    ])
}

/// What is launched, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    let mut programs = Vec::new();
    for (dtype, piece) in [(Dtype::F32, 4), (Dtype::Bf16, 8)] {
        for of in [Of::Values, Of::Squares] {
            programs.push(Listed {
                program: program(dtype, Define::int("PIECE", piece), of),
                needs: Needs::Sm80,
                entries: vec![Entry {
                    name: "total",
                    registers: 64,
                    shared: 8 * THREADS,
                    shows: &[],
                }],
            });
        }
    }
    programs
}
