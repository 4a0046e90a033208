//! The AdamW step, in place.
//!
//! `g = scale * grad`; `m = b1 m + (1-b1) g`; `v = b2 v + (1-b2) g^2`;
//! `w = w (1 - lr wd) - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`, decay decoupled
//! (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2, with PyTorch's reading of eps).
//!
//! A device implementation: one elementwise pass over f32 master weights. On a device whose model
//! weights are narrower the caller copies the masters to them with [`crate::elementwise::copy`].

use moefold_profiles::Op;

use crate::buffer::with;
use crate::device::Backend;
use crate::tensor::{Tensor, expect_dims};

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adamw {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; 0 for tensors that do not decay.
    pub weight_decay: f64,
    /// The step, counted from 1.
    pub step: u64,
}

/// The cost-table key of a step on `weights`.
pub fn key(weights: &Tensor) -> Op {
    Op::Adamw {
        len: weights.len() as u64,
        dtype: weights.dtype(),
    }
}

/// One step on `weights` with `grad * scale`; updates `weights`, `m` and `v` in place.
///
/// # Panics
/// When the shapes differ or the step is 0.
pub fn step(weights: &Tensor, grad: &Tensor, m: &Tensor, v: &Tensor, rule: &Adamw, scale: f32) {
    for (name, t) in [("grad", grad), ("m", m), ("v", v)] {
        expect_dims("adamw::step", name, t, weights.dims());
    }
    assert!(
        rule.step > 0,
        "adamw::step: steps are counted from 1, got 0"
    );
    match &weights.device().0.backend {
        Backend::Cpu(cpu) => with(
            "adamw::step",
            [grad],
            [weights, m, v],
            |[grad], [w, m, v]| {
                cpu::step(cpu, grad.f32(), w.f32(), m.f32(), v.f32(), rule, scale);
            },
        ),
        Backend::Cuda(gpu) => gpu.unwritten("adamw::step"),
    }
}

mod cpu {
    use super::Adamw;
    use crate::parallel::Cpu;
    use crate::simd::vectorized;

    pub(super) fn step(
        cpu: &Cpu,
        grad: &[f32],
        w: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        rule: &Adamw,
        scale: f32,
    ) {
        let t = rule.step as f64;
        let numbers = Numbers {
            scale,
            beta1: rule.beta1 as f32,
            rest1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            rest2: (1.0 - rule.beta2) as f32,
            keep: (1.0 - rule.lr * rule.weight_decay) as f32,
            rate: (rule.lr / (1.0 - rule.beta1.powf(t))) as f32,
            root: (1.0 / (1.0 - rule.beta2.powf(t)).sqrt()) as f32,
            eps: rule.eps as f32,
        };
        let outputs = [(w, 1), (m, 1), (v, 1)];
        cpu.rows(grad.len(), 4 * grad.len(), outputs, |range, [w, m, v]| {
            update(&grad[range], w, m, v, numbers);
        });
    }

    /// The step's numbers as the loop uses them.
    #[derive(Clone, Copy)]
    struct Numbers {
        scale: f32,
        beta1: f32,
        rest1: f32,
        beta2: f32,
        rest2: f32,
        keep: f32,
        rate: f32,
        root: f32,
        eps: f32,
    }

    vectorized! {
        fn update(grad: &[f32], w: &mut [f32], m: &mut [f32], v: &mut [f32], n: Numbers) {
            let moments = m.iter_mut().zip(v.iter_mut());
            for ((w, &g), (m, v)) in w.iter_mut().zip(grad).zip(moments) {
                let g = g * n.scale;
                *m = n.beta1 * *m + n.rest1 * g;
                *v = n.beta2 * *v + n.rest2 * (g * g);
                *w = *w * n.keep - n.rate * *m / (v.sqrt() * n.root + n.eps);
            }
        }
    }
}

#[cfg(test)]
mod tests;
