//! Attention sinks: a learned score `z` of every head that takes weight and gives no value (GPT-OSS, arXiv
//! 2508.10925; StreamingLLM, arXiv 2309.17453).
//!
//! `o_t = sum over s of exp(x_s) v_s / (exp(z) + sum over s of exp(x_s))` follows from attention without it
//! ([`crate::attention`]): with its `lse`, `o` shrinks by `exp(lse) / (exp(z) + exp(lse)) = sigmoid(lse - z)`, and
//! the logarithm of the denominator becomes `log(exp(lse) + exp(z))`. With these two the backward of attention
//! gives the gradients of queries, keys and values as it is: it needs the probabilities and `do . o` alone, and
//! the sink's value is zero. For the same reason `dz = -sum over t of p_t (do_t . o_t)`, `p_t = exp(z - lse_t)` the
//! sink's own probability.
//!
//! A device implementation: `lse` and sums in f32, sums in a fixed order. The floor: forward reads and writes o,
//! backward reads do and o.

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::sweep;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key of [`forward`] on `o`: it scales every element.
pub fn key(o: &Tensor) -> Op {
    sweep(SweepKind::Scale, o)
}

/// Of `o [T,h,dv]` and `lse [h,T]` of attention without sinks those with `sinks [h]`: `o` in place, `lse` new.
///
/// # Panics
/// When the shapes do not agree.
pub fn forward(o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Tensor {
    const OP: &str = "sinks::forward";
    let _op = o.device().begin(|| key(o));
    let sizes = sizes(OP, o, lse, sinks);
    let all = o
        .device()
        .empty(TensorClass::Activations, Dtype::F32, lse.dims());
    match &o.device().0.backend {
        Backend::Cpu(cpu) => with(OP, [lse, sinks], [o, &all], |[lse, sinks], [o, all]| {
            cpu::forward(cpu, o.f32(), lse.f32(), sinks.f32(), all.f32(), sizes);
        }),
        Backend::Cuda(gpu) => cuda::forward(gpu, o, [lse, sinks], &all, sizes),
    }
    all
}

/// Adds the gradient of the sinks to `dsinks [h]`, from `do [T,h,dv]`, and from `o` and `lse` with sinks.
///
/// # Panics
/// As [`forward`].
pub fn backward(d_o: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor, dsinks: &Tensor) {
    const OP: &str = "sinks::backward";
    // Elements of both.
    let _op = o.device().begin(|| Op::Sweep {
        kind: SweepKind::Sum,
        len: 2 * o.len() as u64,
        dtype: o.dtype(),
    });
    let sizes = sizes(OP, o, lse, sinks);
    expect_dims(OP, "do", d_o, o.dims());
    expect_dims(OP, "dsinks", dsinks, sinks.dims());
    match &o.device().0.backend {
        Backend::Cpu(cpu) => {
            let inputs = [d_o, o, lse, sinks];
            with(OP, inputs, [dsinks], |inputs, [dsinks]| {
                let inputs = inputs.map(crate::buffer::Input::f32);
                cpu::backward(cpu, inputs, dsinks.f32(), sizes);
            });
        }
        Backend::Cuda(gpu) => cuda::backward(gpu, [d_o, o, lse, sinks], dsinks, sizes),
    }
}

/// Tokens, heads and their width.
fn sizes(op: &str, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> [usize; 3] {
    let &[tokens, heads, width] = o.dims() else {
        panic!("{op}: o is {o:?}, expected [tokens, heads, width]")
    };
    expect_dims(op, "lse", lse, &[heads, tokens]);
    expect_dims(op, "sinks", sinks, &[heads]);
    [tokens, heads, width]
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sigmoid, sum2, vectorized};

    pub(super) fn forward(
        cpu: &Cpu,
        o: &mut [f32],
        lse: &[f32],
        sinks: &[f32],
        all: &mut [f32],
        [tokens, heads, width]: [usize; 3],
    ) {
        cpu.rows(heads, lse.len(), [(all, tokens)], |range, [all]| {
            let lse = &lse[range.start * tokens..range.end * tokens];
            for (i, (all, &lse)) in all.iter_mut().zip(lse).enumerate() {
                let sink = sinks[range.start + i / tokens];
                *all = lse.max(sink) + (-(lse - sink).abs()).exp().ln_1p();
            }
        });
        let rows = tokens * heads;
        cpu.rows(rows, 2 * o.len(), [(o, width)], |range, [o]| {
            for (row, o) in range.zip(o.chunks_exact_mut(width.max(1))) {
                let (token, head) = (row / heads, row % heads);
                scale(o, sigmoid(lse[head * tokens + token] - sinks[head]));
            }
        });
    }

    vectorized! {
        fn scale(o: &mut [f32], factor: f32) {
            for o in o {
                *o *= factor;
            }
        }
    }

    /// Heads are dealt to threads, so that each sums its tokens in order.
    pub(super) fn backward(
        cpu: &Cpu,
        [d_o, o, lse, sinks]: [&[f32]; 4],
        dsinks: &mut [f32],
        [tokens, heads, width]: [usize; 3],
    ) {
        cpu.rows(heads, 2 * o.len(), [(dsinks, 1)], |range, [dsinks]| {
            for (head, dsink) in range.zip(dsinks) {
                let mut sum = 0.0;
                for token in 0..tokens {
                    let row = (token * heads + head) * width..(token * heads + head + 1) * width;
                    let prob = (sinks[head] - lse[head * tokens + token]).exp();
                    sum += prob * inner(&d_o[row.clone()], &o[row]);
                }
                *dsink -= sum;
            }
        });
    }

    vectorized! {
        fn inner(d_o: &[f32], o: &[f32]) -> f32 {
            sum2(d_o, o, |d_o, o| d_o * o)
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::TensorClass;
    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::operand::vector;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::rms_norm;
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("sinks");
    const THREADS: u32 = 256;
    /// Tokens of a head that a block sums over (`TOKENS` in the source).
    const TOKENS: usize = 128;
    /// Bytes of the sums of a block's warps.
    const SHARED: usize = 4 * THREADS as usize / 32;

    fn program(dtype: Dtype, vector: usize) -> Program {
        SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
    }

    /// Every specialization.
    pub(crate) fn programs() -> Vec<Listed> {
        let list = |(dtype, vector, needs)| Listed {
            program: program(dtype, vector),
            needs,
            entries: vec![
                Entry::plain("sinks_forward", 48, 0),
                Entry::plain("sinks_sums", 64, SHARED),
            ],
        };
        let all = [
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 1, Needs::Odd),
            (Dtype::F32, 1, Needs::Odd),
        ];
        all.map(list).to_vec()
    }

    pub(super) fn forward(
        gpu: &Cuda,
        o: &Tensor,
        [lse, sinks]: [&Tensor; 2],
        all: &Tensor,
        [tokens, heads, width]: [usize; 3],
    ) {
        const OP: &str = "sinks::forward";
        sinks.expect_dtype(OP, o.dtype());
        disjoint(OP, &[lse, sinks], &[o, all]);
        let vector = vector(&[o]);
        let pieces = width / vector;
        let tensors = [o, lse, sinks, all].map(Arg::from);
        let arguments = [&tensors[..], &[tokens, heads, pieces].map(Arg::size)].concat();
        let blocks = (tokens * heads * pieces).div_ceil(THREADS as usize);
        let grid = Grid::linear(blocks, THREADS, 0);
        gpu.launch(
            OP,
            &program(o.dtype(), vector),
            "sinks_forward",
            grid,
            &arguments,
        );
    }

    pub(super) fn backward(
        gpu: &Cuda,
        [d_o, o, lse, sinks]: [&Tensor; 4],
        dsinks: &Tensor,
        [tokens, heads, width]: [usize; 3],
    ) {
        const OP: &str = "sinks::backward";
        sinks.expect_dtype(OP, o.dtype());
        disjoint(OP, &[d_o, o, lse, sinks], &[dsinks]);
        let blocks = tokens.div_ceil(TOKENS);
        if blocks == 0 {
            return;
        }
        let vector = vector(&[d_o, o]);
        let partial = o
            .device()
            .empty(TensorClass::Transient, Dtype::F32, &[blocks, heads]);
        let tensors = [d_o, o, lse, sinks, &partial].map(Arg::from);
        let sizes = [tokens, heads, width / vector].map(Arg::size);
        let grid = Grid::linear(blocks * heads, THREADS, SHARED);
        gpu.launch(
            OP,
            &program(o.dtype(), vector),
            "sinks_sums",
            grid,
            &[&tensors[..], &sizes].concat(),
        );
        rms_norm::add_blocks(gpu, OP, &partial, dsinks);
    }
}
