//! Softmax cross entropy over a vocabulary that may be split over ranks, in three steps.
//!
//! With logits `[T, V]` of vocabulary entries `vocab_start..vocab_start + V` on this rank:
//! 1. [`row_max`]; the caller takes the maximum over the tensor-parallel group.
//! 2. [`sum_exp_and_target`]: the sum of `exp(logit - max)`, and the target's `logit - max` (0 where
//!    the target is on another rank); the caller sums both over the group.
//! 3. [`finish`]: `loss = ln(sum_exp) - target`, and the gradient `(softmax - onehot) * scale` in
//!    place of the logits.
//!
//! A negative target is ignored: its loss and gradient are zero. (The steps are those of
//! Megatron-LM's vocabulary-parallel cross entropy, arXiv 1909.08053, section 3.)
//!
//! A device implementation: one block a row in each step, sums in f32 by a fixed tree.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The cost-table key for `logits: [T, V]`: forward is steps 1 and 2, backward step 3.
pub fn key(logits: &Tensor, pass: Pass) -> Op {
    Op::CrossEntropy {
        rows: logits.num_rows() as u64,
        vocab: logits.width() as u64,
        pass,
        dtype: logits.dtype(),
    }
}

/// The largest logit of each row: `[T, V]` to `[T]`.
pub fn row_max(logits: &Tensor) -> Tensor {
    let top = logits
        .device()
        .empty(TensorClass::Transient, Dtype::F32, &[logits.num_rows()]);
    let vocab = logits.width();
    match &logits.device().0.backend {
        Backend::Cpu(cpu) => with("cross_entropy::row_max", [logits], [&top], |[x], [top]| {
            cpu::row_max(cpu, x.f32(), top.f32(), vocab);
        }),
        Backend::Cuda(gpu) => gpu.unwritten("cross_entropy::row_max"),
    }
    top
}

/// `logits [T, V]`, `top [T]`, `targets [T]` i32 (ids of the whole vocabulary) to
/// `(sum_exp [T], target [T])`, the latter the target's `logit - top`, 0 where it is not on this
/// rank.
///
/// # Panics
/// When the shapes do not agree.
pub fn sum_exp_and_target(
    logits: &Tensor,
    top: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> (Tensor, Tensor) {
    let rows = logits.num_rows();
    expect_dims("cross_entropy::sum_exp_and_target", "top", top, &[rows]);
    assert!(
        targets.len() == rows,
        "cross_entropy::sum_exp_and_target: targets is {targets:?}, expected [{rows}]"
    );
    let device = logits.device();
    let sum_exp = device.empty(TensorClass::Transient, Dtype::F32, &[rows]);
    let target = device.empty(TensorClass::Transient, Dtype::F32, &[rows]);
    let vocab = logits.width();
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "cross_entropy::sum_exp_and_target",
            [logits, top, targets],
            [&sum_exp, &target],
            |[x, top, targets], [sum_exp, target]| {
                let (x, top, targets) = (x.f32(), top.f32(), targets.i32());
                let place = (vocab_start, vocab);
                cpu::sum_exp(cpu, x, top, targets, place, sum_exp.f32(), target.f32());
            },
        ),
        Backend::Cuda(gpu) => gpu.unwritten("cross_entropy::sum_exp_and_target"),
    }
    (sum_exp, target)
}

/// What [`finish`] needs of the steps before it, reduced over the group.
#[derive(Debug, Clone, Copy)]
pub struct Reduced<'a> {
    /// Maximum of each row over the group: `[T]`.
    pub top: &'a Tensor,
    /// Sum of `exp(logit - top)` over the group: `[T]`.
    pub sum_exp: &'a Tensor,
    /// The target's `logit - top`: `[T]`.
    pub target: &'a Tensor,
}

/// Replaces `logits [T, V]` by the gradient of `scale * sum of losses`, and returns the losses `[T]`
/// (unscaled).
///
/// # Panics
/// When the shapes do not agree.
pub fn finish(
    logits: &Tensor,
    reduced: Reduced<'_>,
    targets: &Tensor,
    vocab_start: usize,
    scale: f32,
) -> Tensor {
    let rows = logits.num_rows();
    let Reduced {
        top,
        sum_exp,
        target,
    } = reduced;
    for (name, t) in [("top", top), ("sum_exp", sum_exp), ("target", target)] {
        expect_dims("cross_entropy::finish", name, t, &[rows]);
    }
    assert!(
        targets.len() == rows,
        "cross_entropy::finish: targets is {targets:?}, expected [{rows}]"
    );
    let device = logits.device();
    let losses = device.empty(TensorClass::Transient, Dtype::F32, &[rows]);
    let vocab = logits.width();
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "cross_entropy::finish",
            [top, sum_exp, target, targets],
            [logits, &losses],
            |[top, sum_exp, target, targets], [x, losses]| {
                let inputs = [top.f32(), sum_exp.f32(), target.f32()];
                let place = (vocab_start, vocab);
                cpu::finish(
                    cpu,
                    inputs,
                    targets.i32(),
                    place,
                    scale,
                    x.f32(),
                    losses.f32(),
                );
            },
        ),
        Backend::Cuda(gpu) => gpu.unwritten("cross_entropy::finish"),
    }
    losses
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{exp, max, sum, vectorized};

    pub(super) fn row_max(cpu: &Cpu, x: &[f32], top: &mut [f32], vocab: usize) {
        cpu.rows(top.len(), x.len(), [(top, 1)], |range, [top]| {
            max_rows(&x[range.start * vocab..range.end * vocab], top, vocab);
        });
    }

    vectorized! {
        fn max_rows(x: &[f32], top: &mut [f32], vocab: usize) {
            for (x, top) in x.chunks_exact(vocab.max(1)).zip(top) {
                *top = max(x);
            }
        }
    }

    /// The target's place among this rank's entries, if it is one of them.
    fn place(target: i32, (vocab_start, vocab): (usize, usize)) -> Option<usize> {
        let place = usize::try_from(target).ok()?.checked_sub(vocab_start)?;
        (place < vocab).then_some(place)
    }

    pub(super) fn sum_exp(
        cpu: &Cpu,
        x: &[f32],
        top: &[f32],
        targets: &[i32],
        (vocab_start, vocab): (usize, usize),
        sum_exp: &mut [f32],
        target: &mut [f32],
    ) {
        let outputs = [(sum_exp, 1), (target, 1)];
        cpu.rows(top.len(), x.len(), outputs, |range, [sum_exp, target]| {
            let x = &x[range.start * vocab..range.end * vocab];
            sum_exp_rows(x, &top[range.clone()], sum_exp, vocab);
            let rows = x.chunks_exact(vocab.max(1)).zip(&top[range.clone()]);
            for ((target, &id), (x, top)) in target.iter_mut().zip(&targets[range]).zip(rows) {
                *target = place(id, (vocab_start, vocab)).map_or(0.0, |i| x[i] - top);
            }
        });
    }

    vectorized! {
        fn sum_exp_rows(x: &[f32], top: &[f32], sum_exp: &mut [f32], vocab: usize) {
            for ((x, &top), sum_exp) in x.chunks_exact(vocab.max(1)).zip(top).zip(sum_exp) {
                *sum_exp = sum(x, |x| exp(x - top));
            }
        }
    }

    pub(super) fn finish(
        cpu: &Cpu,
        [top, sum_exp, target]: [&[f32]; 3],
        targets: &[i32],
        (vocab_start, vocab): (usize, usize),
        scale: f32,
        x: &mut [f32],
        losses: &mut [f32],
    ) {
        let work = x.len();
        cpu.rows(
            top.len(),
            work,
            [(x, vocab), (losses, 1)],
            |range, [x, losses]| {
                let rows = x.chunks_exact_mut(vocab.max(1)).zip(losses);
                for (row, (x, loss)) in range.zip(rows) {
                    if targets[row] < 0 {
                        x.fill(0.0);
                        *loss = 0.0;
                        continue;
                    }
                    softmax_row(x, top[row], scale / sum_exp[row]);
                    if let Some(place) = place(targets[row], (vocab_start, vocab)) {
                        x[place] -= scale;
                    }
                    *loss = sum_exp[row].ln() - target[row];
                }
            },
        );
    }

    vectorized! {
        fn softmax_row(x: &mut [f32], top: f32, factor: f32) {
            for x in x {
                *x = exp(*x - top) * factor;
            }
        }
    }
}

#[cfg(test)]
mod tests;
