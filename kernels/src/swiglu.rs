//! The gated activation of an MLP, optionally times a routing probability a row.
//!
//! With `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`,
//! `y = g sigmoid(alpha g) (u + offset) prob`. With the rule [`Rule::SWIGLU`] that is
//! `silu(gate) * up * prob` (Shazeer 2020, arXiv 2002.05202); GPT-OSS has numbers of its own
//! ([`Rule::GPT_OSS`]). `x [N, 2f]` holds the gate in its first half and the up projection in its
//! second, or both alternating. The probability is multiplied in here and not into the expert's output,
//! so that the output need not be kept (Megatron-Core's memory-efficient permutation). Backward
//! recomputes the activation from x; what was clamped has no gradient.
//!
//! A device implementation: elementwise but for `dprobs`, a sum over each row. The floor: forward reads
//! x and writes y (3 N f elements), backward reads x and dy and writes dx (5 N f).

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The numbers of the formula, and where gate and up lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Factor in the sigmoid.
    pub alpha: f32,
    /// Added to up.
    pub offset: f32,
    /// Bound of the gate from above and of up from both sides; infinity for none.
    pub limit: f32,
    /// Whether the columns of x are gate, up, gate, up, .. rather than its halves.
    pub interleaved: bool,
}

impl Rule {
    /// `silu(gate) * up`, by halves.
    pub const SWIGLU: Self = Self {
        alpha: 1.0,
        offset: 0.0,
        limit: f32::INFINITY,
        interleaved: false,
    };

    /// GPT-OSS: clamped at 7, one added to up, gate and up alternating.
    pub const GPT_OSS: Self = Self {
        alpha: 1.702,
        offset: 1.0,
        limit: 7.0,
        interleaved: true,
    };
}

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
pub fn forward(x: &Tensor, probs: Option<&Tensor>, rule: &Rule) -> Tensor {
    const OP: &str = "swiglu::forward";
    let _op = x.device().begin(|| key(x, Pass::Forward));
    let [rows, f] = sizes(OP, x, probs);
    let device = x.device();
    let y = device.empty(TensorClass::Activations, x.dtype(), &[rows, f]);
    match &device.0.backend {
        Backend::Cpu(cpu) => match probs {
            Some(probs) => with(OP, [x, probs], [&y], |[x, probs], [y]| {
                cpu::forward(cpu, x.f32(), Some(probs.f32()), y.f32(), [rows, f], rule);
            }),
            None => with(OP, [x], [&y], |[x], [y]| {
                cpu::forward(cpu, x.f32(), None, y.f32(), [rows, f], rule);
            }),
        },
        Backend::Cuda(gpu) => cuda::forward(gpu, x, probs, &y, rule),
    }
    y
}

/// `dy [N, f]`, `x [N, 2f]`, `probs [N]` to `(dx [N, 2f], dprobs [N])`, the latter with `probs`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    probs: Option<&Tensor>,
    rule: &Rule,
) -> (Tensor, Option<Tensor>) {
    const OP: &str = "swiglu::backward";
    let _op = x.device().begin(|| key(x, Pass::Backward));
    let [rows, f] = sizes(OP, x, probs);
    expect_dims(OP, "dy", dy, &[rows, f]);
    let device = x.device();
    let dx = device.empty(TensorClass::Activations, x.dtype(), &[rows, 2 * f]);
    let dprobs = probs.map(|p| device.empty(TensorClass::Activations, Dtype::F32, p.dims()));
    match &device.0.backend {
        Backend::Cpu(cpu) => match (probs, &dprobs) {
            (Some(probs), Some(dprobs)) => {
                let outputs = [&dx, dprobs];
                with(OP, [dy, x, probs], outputs, |[dy, x, p], [dx, dprobs]| {
                    let inputs = [dy.f32(), x.f32(), p.f32()];
                    cpu::backward_probs(cpu, inputs, dx.f32(), dprobs.f32(), f, rule);
                });
            }
            _ => with(OP, [dy, x], [&dx], |[dy, x], [dx]| {
                cpu::backward(cpu, [dy.f32(), x.f32()], dx.f32(), [rows, f], rule);
            }),
        },
        Backend::Cuda(gpu) => cuda::backward(gpu, [dy, x], probs, &dx, dprobs.as_ref(), rule),
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

/// Every slice that a loop indexes is cut to `f` before it: a bound that is checked inside keeps the
/// loop from being vectorized.
mod cpu {
    use super::Rule;
    use crate::parallel::Cpu;
    use crate::simd::{sigmoid, sum, vectorized};

    pub(super) fn forward(
        cpu: &Cpu,
        x: &[f32],
        probs: Option<&[f32]>,
        y: &mut [f32],
        [rows, f]: [usize; 2],
        rule: &Rule,
    ) {
        cpu.rows(rows, x.len(), [(y, f)], |range, [y]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            forward_rows(x, probs.map(|p| &p[range]), y, f, *rule);
        });
    }

    vectorized! {
        fn forward_rows(x: &[f32], probs: Option<&[f32]>, y: &mut [f32], f: usize, rule: Rule) {
            let mut halves = scratch(f, rule);
            for row in 0..y.len() / f.max(1) {
                let prob = probs.map_or(1.0, |p| p[row]);
                let (gate, up) = in_halves(&x[row * 2 * f..][..2 * f], &mut halves);
                let (gate, up) = (&gate[..f], &up[..f]);
                let y = &mut y[row * f..][..f];
                for i in 0..f {
                    let (g, u) = clamp(gate[i], up[i], rule);
                    y[i] = g * sigmoid(rule.alpha * g) * u * prob;
                }
            }
        }
    }

    pub(super) fn backward(
        cpu: &Cpu,
        [dy, x]: [&[f32]; 2],
        dx: &mut [f32],
        [rows, f]: [usize; 2],
        rule: &Rule,
    ) {
        cpu.rows(rows, 2 * x.len(), [(dx, 2 * f)], |range, [dx]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            let dy = &dy[range.start * f..range.end * f];
            backward_rows(dy, x, None, dx, &mut [], f, *rule);
        });
    }

    pub(super) fn backward_probs(
        cpu: &Cpu,
        [dy, x, probs]: [&[f32]; 3],
        dx: &mut [f32],
        dprobs: &mut [f32],
        f: usize,
        rule: &Rule,
    ) {
        let outputs = [(dx, 2 * f), (dprobs, 1)];
        cpu.rows(probs.len(), 2 * x.len(), outputs, |range, [dx, dprobs]| {
            let x = &x[range.start * 2 * f..range.end * 2 * f];
            let dy = &dy[range.start * f..range.end * f];
            backward_rows(dy, x, Some(&probs[range]), dx, dprobs, f, *rule);
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
            rule: Rule,
        ) {
            let width = (2 * f).max(1);
            let mut halves = scratch(f, rule);
            let mut gradients = scratch(f, rule);
            let mut terms = vec![0.0; f];
            let rows = dy.chunks_exact(f.max(1)).zip(x.chunks_exact(width));
            for (row, ((dy, x), dx)) in rows.zip(dx.chunks_exact_mut(width)).enumerate() {
                let prob = probs.map_or(1.0, |p| p[row]);
                let (gate, up) = in_halves(x, &mut halves);
                let by_halves = if rule.interleaved { &mut gradients[..] } else { &mut *dx };
                let (dgate, dup) = by_halves.split_at_mut(f);
                let (dy, gate, up, dup) = (&dy[..f], &gate[..f], &up[..f], &mut dup[..f]);
                for i in 0..f {
                    let (g, u) = clamp(gate[i], up[i], rule);
                    let s = sigmoid(rule.alpha * g);
                    let silu = g * s;
                    let slope = s + rule.alpha * silu * (1.0 - s);
                    let free = |x: f32| if x > rule.limit { 0.0 } else { prob };
                    dgate[i] = dy[i] * free(gate[i]) * u * slope;
                    dup[i] = dy[i] * silu * free(up[i].abs());
                    terms[i] = dy[i] * silu * u;
                }
                if probs.is_some() {
                    dprobs[row] = sum(&terms, |term| term);
                }
                if rule.interleaved {
                    for (i, pair) in dx.chunks_exact_mut(2).enumerate() {
                        pair.copy_from_slice(&[gradients[i], gradients[f + i]]);
                    }
                }
            }
        }
    }

    /// What the activation is computed from. NaN stays NaN.
    #[inline]
    fn clamp(gate: f32, up: f32, rule: Rule) -> (f32, f32) {
        let g = if gate > rule.limit { rule.limit } else { gate };
        let u = if up > rule.limit { rule.limit } else { up };
        let u = if u < -rule.limit { -rule.limit } else { u };
        (g, u + rule.offset)
    }

    /// Room for a row by halves, where it does not come so.
    #[inline]
    fn scratch(f: usize, rule: Rule) -> Vec<f32> {
        vec![0.0; if rule.interleaved { 2 * f } else { 0 }]
    }

    /// Gates and ups of a row; sorted into `scratch` where it has room.
    #[inline]
    fn in_halves<'a>(x: &'a [f32], scratch: &'a mut [f32]) -> (&'a [f32], &'a [f32]) {
        let f = x.len() / 2;
        if scratch.is_empty() {
            return x.split_at(f);
        }
        for (i, pair) in x.chunks_exact(2).enumerate() {
            scratch[i] = pair[0];
            scratch[f + i] = pair[1];
        }
        scratch.split_at(f)
    }
}

pub(crate) mod cuda;
