//! Sums over all elements of a tensor on a CUDA device, in f64: what [`crate::elementwise::sum`],
//! [`crate::grad_norm`] and [`crate::scalars`] share.
//!
//! Every block sums the elements of its threads in f64, and then the blocks are summed in a fixed
//! order, by the host or by a block of the device. Which thread takes which element depends on the
//! length of the tensor and on where it lies within 16 bytes, so the same tensor gives the same bits.
//! To the host: one launch and one download of at most 4 KiB.

use crate::Dtype;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::flat::{Flat, THREADS};
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("total");

/// Blocks at most: as many as four to each of the 132 multiprocessors of an H200.
const BLOCKS: usize = 528;

/// Pieces that a thread reads at once (`DEPTH` in the source).
const DEPTH: usize = 4;

/// What is summed.
#[derive(Clone, Copy)]
pub(crate) enum Of<'a> {
    Values,
    Squares,
    /// Products with the elements of another tensor of the same length and dtype.
    Products(&'a Tensor),
}

impl Of<'_> {
    /// `POWER` of the source.
    fn power(self) -> usize {
        match self {
            Self::Values => 1,
            Self::Squares => 2,
            Self::Products(_) => 0,
        }
    }
}

/// The sum over all elements of `x`, which the host waits for.
pub(crate) fn total(gpu: &Cuda, op: &'static str, x: &Tensor, of: Of<'_>) -> f64 {
    let Some(partial) = partial(gpu, op, x, of) else {
        return 0.0;
    };
    let mut sums = vec![0.0f64; partial.num_rows()];
    gpu.download(op, &partial, bytemuck::cast_slice_mut(&mut sums));
    sums.iter().sum()
}

/// One sum a block, on the device: `[blocks, 2]` words of f64, for which there is no dtype. None of
/// no elements.
pub(crate) fn partial(gpu: &Cuda, op: &'static str, x: &Tensor, of: Of<'_>) -> Option<Tensor> {
    if x.is_empty() {
        return None;
    }
    let y = match of {
        Of::Products(y) => Some(y),
        _ => None,
    };
    let read: Vec<&Tensor> = [x].into_iter().chain(y).collect();
    let flat = Flat::of(&read);
    let blocks = flat.blocks(DEPTH).min(BLOCKS);
    let device = x.device();
    let partial = device.empty(TensorClass::Transient, Dtype::I32, &[blocks, 2]);
    disjoint(op, &read, &[&partial]);
    gpu.launch(
        op,
        &program(x.dtype(), flat.define(), of.power()),
        "total",
        Grid::linear(blocks, THREADS, 8 * THREADS as usize),
        &[
            x.into(),
            Arg::optional(y),
            (&partial).into(),
            flat.len(),
            flat.head(),
        ],
    );
    Some(partial)
}

fn program(dtype: Dtype, piece: Define, power: usize) -> Program {
    SOURCE.with(&[
        Define::dtype("T", dtype),
        piece,
        Define::int("POWER", power),
    ])
}

/// What is launched, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    let mut programs = Vec::new();
    for (dtype, piece, needs) in [
        (Dtype::F32, 4, Needs::Sm80),
        (Dtype::Bf16, 8, Needs::Sm80),
        (Dtype::F32, 1, Needs::Odd),
        (Dtype::Bf16, 1, Needs::Odd),
    ] {
        for power in [0, 1, 2] {
            programs.push(Listed {
                program: program(dtype, Define::int("PIECE", piece), power),
                needs,
                entries: vec![Entry::plain("total", 64, 8 * THREADS as usize)],
            });
        }
    }
    programs
}
