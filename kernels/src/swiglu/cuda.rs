//! Launches of `swiglu.cu`.

use moefold_profiles::Dtype;

use super::Rule;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::operand::vector;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::tensor::Tensor;

const SOURCE: Source = source!("swiglu", "../swiglu.cu");
const THREADS: u32 = 256;
/// A warp has a row.
const ROWS_PER_BLOCK: usize = THREADS as usize / 32;

fn program(dtype: Dtype, vector: usize, interleaved: bool) -> Program {
    SOURCE.with(&[
        Define::dtype("T", dtype),
        Define::int("VEC", vector),
        Define::flag("INTERLEAVED", interleaved),
    ])
}

/// Every specialization.
pub(crate) fn programs() -> Vec<Listed> {
    let list = |(dtype, vector, needs, interleaved)| Listed {
        program: program(dtype, vector, interleaved),
        needs,
        entries: vec![
            Entry::plain("swiglu_forward", 48, 0),
            Entry::plain("swiglu_backward", 64, 0),
        ],
    };
    let all = [
        (Dtype::Bf16, 8, Needs::Sm80),
        (Dtype::F32, 4, Needs::Sm80),
        (Dtype::Bf16, 1, Needs::Odd),
        (Dtype::F32, 1, Needs::Odd),
    ];
    let forms = |(dtype, vector, needs)| [false, true].map(|form| (dtype, vector, needs, form));
    all.into_iter().flat_map(forms).map(list).collect()
}

/// The program, the width of `y` in its accesses, and what else every launch has.
fn specialized(
    op: &'static str,
    tensors: &[&Tensor],
    y: &Tensor,
    probs: Option<&Tensor>,
    rule: &Rule,
) -> (Program, Grid, [Arg; 5]) {
    for tensor in tensors {
        tensor.expect_dtype(op, y.dtype());
    }
    if let Some(probs) = probs {
        probs.expect_dtype(op, Dtype::F32);
    }
    let rows = y.num_rows();
    let vector = vector(tensors).min(vector(&[y]));
    let numbers = [
        Arg::size(rows),
        Arg::size(y.width() / vector),
        Arg::F32(rule.alpha),
        Arg::F32(rule.offset),
        Arg::F32(rule.limit),
    ];
    let grid = Grid::linear(rows.div_ceil(ROWS_PER_BLOCK), THREADS, 0);
    (program(y.dtype(), vector, rule.interleaved), grid, numbers)
}

pub(super) fn forward(gpu: &Cuda, x: &Tensor, probs: Option<&Tensor>, y: &Tensor, rule: &Rule) {
    const OP: &str = "swiglu::forward";
    disjoint(OP, &[&[x], probs.as_slice()].concat(), &[y]);
    let (program, grid, numbers) = specialized(OP, &[x], y, probs, rule);
    let tensors = [x.into(), Arg::optional(probs), y.into()];
    let arguments = [&tensors[..], &numbers].concat();
    gpu.launch(OP, &program, "swiglu_forward", grid, &arguments);
}

pub(super) fn backward(
    gpu: &Cuda,
    [dy, x]: [&Tensor; 2],
    probs: Option<&Tensor>,
    dx: &Tensor,
    dprobs: Option<&Tensor>,
    rule: &Rule,
) {
    const OP: &str = "swiglu::backward";
    let inputs = [&[dy, x], probs.as_slice()].concat();
    disjoint(OP, &inputs, &[&[dx], dprobs.as_slice()].concat());
    let (program, grid, numbers) = specialized(OP, &[x, dx], dy, probs, rule);
    let tensors = [
        dy.into(),
        x.into(),
        Arg::optional(probs),
        dx.into(),
        Arg::optional(dprobs),
    ];
    let arguments = [&tensors[..], &numbers].concat();
    gpu.launch(OP, &program, "swiglu_backward", grid, &arguments);
}
