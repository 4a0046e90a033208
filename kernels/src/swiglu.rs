//! The gated activation of an MLP, optionally times a routing probability a row.
//!
//! `x [N, 2f]` holds the gate in its first half and the up projection in its second;
//! `y = silu(gate) * up * prob` (Shazeer 2020, arXiv 2002.05202). The probability is multiplied in
//! here and not into the expert's output, so that the output need not be kept (Megatron-Core's
//! memory-efficient permutation). Backward recomputes the activation from x.
//!
//! A device implementation: elementwise but for `dprobs`, a sum over each row.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The cost-table key for `x: [rows, 2 * dim]`.
pub fn key(x: &Tensor, pass: Pass) -> Op {
    Op::Swiglu {
        rows: x.num_rows() as u64,
        dim: x.width() as u64 / 2,
        pass,
        dtype: x.dtype(),
    }
}

/// `x [N, 2f]`, `probs [N]` to `y [N, f]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn forward(x: &Tensor, probs: Option<&Tensor>) -> Tensor {
    let [rows, f] = sizes("swiglu::forward", x, probs);
    let device = x.device();
    let y = device.empty(TensorClass::Activations, Dtype::F32, &[rows, f]);
    match &device.0.backend {
        Backend::Cpu(cpu) => match probs {
            Some(probs) => with("swiglu::forward", [x, probs], [&y], |[x, probs], [y]| {
                cpu::forward(cpu, x.f32(), Some(probs.f32()), y.f32(), rows, f);
            }),
            None => with("swiglu::forward", [x], [&y], |[x], [y]| {
                cpu::forward(cpu, x.f32(), None, y.f32(), rows, f);
            }),
        },
        Backend::Cuda(gpu) => gpu.unwritten("swiglu::forward"),
    }
    y
}

/// `dy [N, f]`, `x [N, 2f]`, `probs [N]` to `(dx [N, 2f], dprobs [N])`, the latter with `probs`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, x: &Tensor, probs: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
    let [rows, f] = sizes("swiglu::backward", x, probs);
    expect_dims("swiglu::backward", "dy", dy, &[rows, f]);
    let device = x.device();
    let dx = device.empty(TensorClass::Activations, Dtype::F32, &[rows, 2 * f]);
    let dprobs = probs.map(|p| device.empty(TensorClass::Activations, Dtype::F32, p.dims()));
    match &device.0.backend {
        Backend::Cpu(cpu) => match (probs, &dprobs) {
            (Some(probs), Some(dprobs)) => {
                let outputs = [&dx, dprobs];
                with(
                    "swiglu::backward",
                    [dy, x, probs],
                    outputs,
                    |[dy, x, probs], [dx, dprobs]| {
                        let (dy, x, probs) = (dy.f32(), x.f32(), probs.f32());
                        cpu::backward_probs(cpu, dy, x, probs, dx.f32(), dprobs.f32(), f);
                    },
                );
            }
            _ => with("swiglu::backward", [dy, x], [&dx], |[dy, x], [dx]| {
                cpu::backward(cpu, dy.f32(), x.f32(), dx.f32(), rows, f);
            }),
        },
        Backend::Cuda(gpu) => gpu.unwritten("swiglu::backward"),
    }
    (dx, dprobs)
}

fn sizes(op: &str, x: &Tensor, probs: Option<&Tensor>) -> [usize; 2] {
    let &[rows, width] = x.dims() else {
        panic!("{op}: x is {x:?}, expected [rows, 2f]")
    };
    assert!(
        width.is_multiple_of(2),
        "{op}: x is {x:?}, expected an even width"
    );
    if let Some(probs) = probs {
        assert!(
            probs.len() == rows,
            "{op}: probs is {probs:?}, expected one a row of {x:?}"
        );
    }
    [rows, width / 2]
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sigmoid, sum2, vectorized};

    pub(super) fn forward(
        cpu: &Cpu,
        x: &[f32],
        probs: Option<&[f32]>,
        y: &mut [f32],
        rows: usize,
        f: usize,
    ) {
        cpu.rows(rows, x.len(), [(y, f)], |range, [y]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            forward_rows(x, probs.map(|p| &p[range]), y, f);
        });
    }

    vectorized! {
        fn forward_rows(x: &[f32], probs: Option<&[f32]>, y: &mut [f32], f: usize) {
            for row in 0..y.len() / f.max(1) {
                let prob = probs.map_or(1.0, |p| p[row]);
                let (gate, up) = x[row * 2 * f..][..2 * f].split_at(f);
                let (up, y) = (&up[..f], &mut y[row * f..][..f]);
                for i in 0..f {
                    y[i] = gate[i] * sigmoid(gate[i]) * up[i] * prob;
                }
            }
        }
    }

    pub(super) fn backward(
        cpu: &Cpu,
        dy: &[f32],
        x: &[f32],
        dx: &mut [f32],
        rows: usize,
        f: usize,
    ) {
        cpu.rows(rows, 2 * x.len(), [(dx, 2 * f)], |range, [dx]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            backward_rows(&dy[range.start * f..range.end * f], x, None, dx, &mut [], f);
        });
    }

    pub(super) fn backward_probs(
        cpu: &Cpu,
        dy: &[f32],
        x: &[f32],
        probs: &[f32],
        dx: &mut [f32],
        dprobs: &mut [f32],
        f: usize,
    ) {
        let outputs = [(dx, 2 * f), (dprobs, 1)];
        cpu.rows(probs.len(), 2 * x.len(), outputs, |range, [dx, dprobs]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            let dy = &dy[range.start * f..range.end * f];
            backward_rows(dy, x, Some(&probs[range]), dx, dprobs, f);
        });
    }

    vectorized! {
        fn backward_rows(
            dy: &[f32],
            x: &[f32],
            probs: Option<&[f32]>,
            dx: &mut [f32],
            dprobs: &mut [f32],
            f: usize,
        ) {
            let width = (2 * f).max(1);
            let rows = dy.chunks_exact(f.max(1)).zip(x.chunks_exact(width));
            for (row, ((dy, x), dx)) in rows.zip(dx.chunks_exact_mut(width)).enumerate() {
                let prob = probs.map_or(1.0, |p| p[row]);
                let (gate, up) = x.split_at(f);
                let (dgate, dup) = dx.split_at_mut(f);
                let (dy, up, dup) = (&dy[..f], &up[..f], &mut dup[..f]);
                for i in 0..f {
                    let s = sigmoid(gate[i]);
                    let silu = gate[i] * s;
                    // dup is used below as silu * dy, then scaled in place.
                    dgate[i] = dy[i] * prob * up[i] * (s + silu * (1.0 - s));
                    dup[i] = dy[i] * silu;
                }
                if probs.is_some() {
                    dprobs[row] = sum2(dup, up, |d, u| d * u);
                    for d in dup {
                        *d *= prob;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
