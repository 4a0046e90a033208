//! The gradient of a bias: sums of columns, over blocks of rows and then over the blocks.

use moefold_profiles::Dtype;

use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::gemm::View;
use crate::rms_norm;
use crate::tensor::Tensor;

const SOURCE: Source = source!("gemm_bias", "../../gemm_bias.cu");

/// Threads of a block (`32 * WARPS` in the source).
const THREADS: u32 = 256;

/// Blocks of rows, at most.
const BLOCKS: usize = 528;

/// Rows of a block, at least, so that they are worth their partial sum.
const DEPTH: usize = 64;

pub(crate) fn grad(gpu: &Cuda, dy: View<'_>, db: &Tensor) {
    const OP: &str = "gemm::bias_grad";
    disjoint(OP, &[dy.tensor], &[db]);
    let (rows, width) = (dy.num_rows(), dy.width);
    if rows == 0 || width == 0 {
        return;
    }
    let vec = if dy.is_wide() {
        16 / dy.dtype().bytes(1).0 as usize
    } else {
        1
    };
    let rows_per_block = rows.div_ceil(BLOCKS).max(DEPTH);
    let blocks = rows.div_ceil(rows_per_block);
    let partial = db
        .device()
        .empty(TensorClass::Transient, Dtype::F32, &[blocks, width]);
    let grid = Grid {
        blocks: [width.div_ceil(32 * vec) as u32, blocks as u32, 1],
        threads: THREADS,
        shared: shared(vec),
    };
    let arguments = [
        Arg::Address(dy.address()),
        (&partial).into(),
        Arg::size(rows),
        Arg::size(width),
        Arg::size(dy.pitch()),
        Arg::size(rows_per_block),
    ];
    gpu.launch(
        OP,
        &program(dy.dtype(), vec),
        "gemm_bias_sums",
        grid,
        &arguments,
    );
    rms_norm::add_blocks(gpu, OP, &partial, db);
}

fn shared(vec: usize) -> u32 {
    4 * THREADS * vec as u32
}

fn program(dtype: Dtype, vec: usize) -> Program {
    SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vec)])
}

/// What is launched, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    let all = [
        (Dtype::F32, 1),
        (Dtype::F32, 4),
        (Dtype::Bf16, 1),
        (Dtype::Bf16, 8),
    ];
    let listed = all.map(|(dtype, vec)| Listed {
        program: program(dtype, vec),
        needs: Needs::Sm80,
        entries: vec![Entry::plain("gemm_bias_sums", 128, shared(vec) as usize)],
    });
    listed.to_vec()
}
