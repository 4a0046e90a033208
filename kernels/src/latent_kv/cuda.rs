//! Launches of `latent_kv.cu`.

use moefold_profiles::Dtype;

use super::{MAX_SHARED, Sizes};
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::operand::vector;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::tensor::Tensor;

const SOURCE: Source = source!("latent_kv", "../latent_kv.cu");
const THREADS: usize = 256;
/// A warp has a head of a token.
const HEADS_PER_BLOCK: usize = THREADS / 32;

fn program(dtype: Dtype, vector: usize) -> Program {
    SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
}

/// Bytes of shared memory of a block that sums: a piece of each thread, in f32.
fn shared_of(vector: usize) -> usize {
    THREADS * vector * 4
}

/// Every specialization.
pub(crate) fn programs() -> Vec<Listed> {
    [
        (Dtype::Bf16, 8, Needs::Sm80),
        (Dtype::F32, 4, Needs::Sm80),
        (Dtype::Bf16, 1, Needs::Odd),
        (Dtype::F32, 1, Needs::Odd),
    ]
    .map(|(dtype, vector, needs)| Listed {
        program: program(dtype, vector),
        needs,
        entries: vec![
            Entry::plain("latent_kv_forward", 48, 0),
            Entry::plain("latent_kv_backward", 48, 0),
            Entry::plain("latent_kv_sum", 64, shared_of(vector)),
        ],
    })
    .into()
}

/// Elements of an access: 16 bytes where every part of every head starts at a multiple of that.
fn access(s: Sizes, tensors: &[&Tensor]) -> usize {
    let wide = vector(tensors);
    if s.nope.is_multiple_of(wide) { wide } else { 1 }
}

/// Heads in all, and the widths of their parts, in accesses.
fn numbers(s: Sizes, vector: usize) -> [Arg; 5] {
    let pieces = [s.nope, s.rope, s.v].map(|width| width / vector);
    let [nope, rope, v] = pieces.map(Arg::size);
    [
        Arg::size(s.tokens * s.heads),
        Arg::size(s.heads),
        nope,
        rope,
        v,
    ]
}

fn by_heads(s: Sizes) -> Grid {
    let blocks = (s.tokens * s.heads).div_ceil(HEADS_PER_BLOCK);
    Grid::linear(blocks, THREADS as u32, 0)
}

pub(super) fn forward(
    gpu: &Cuda,
    op: &'static str,
    s: Sizes,
    [kv, shared]: [&Tensor; 2],
    [keys, values]: [&Tensor; 2],
) {
    disjoint(op, &[kv, shared], &[keys, values]);
    shared.expect_dtype(op, kv.dtype());
    let vector = access(s, &[kv, shared, keys, values]);
    let tensors = [kv, shared, keys, values].map(Arg::from);
    let arguments = [&tensors[..], &numbers(s, vector)].concat();
    let program = program(kv.dtype(), vector);
    gpu.launch(op, &program, "latent_kv_forward", by_heads(s), &arguments);
}

pub(super) fn backward(
    gpu: &Cuda,
    op: &'static str,
    s: Sizes,
    [dkeys, dvalues]: [&Tensor; 2],
    [dkv, dshared]: [&Tensor; 2],
) {
    disjoint(op, &[dkeys, dvalues], &[dkv, dshared]);
    dvalues.expect_dtype(op, dkeys.dtype());
    assert!(
        s.rope <= MAX_SHARED,
        "{op}: parts that heads share are {} wide, expected at most {MAX_SHARED}",
        s.rope
    );
    let vector = access(s, &[dkeys, dvalues, dkv, dshared]);
    let program = program(dkeys.dtype(), vector);
    let numbers = numbers(s, vector);
    let tensors = [dkeys, dvalues, dkv].map(Arg::from);
    let arguments = [&tensors[..], &numbers].concat();
    gpu.launch(op, &program, "latent_kv_backward", by_heads(s), &arguments);
    let grid = Grid::linear(s.tokens, THREADS as u32, shared_of(vector));
    let arguments = [&[dkeys.into(), dshared.into()], &numbers[1..4]].concat();
    gpu.launch(op, &program, "latent_kv_sum", grid, &arguments);
}
