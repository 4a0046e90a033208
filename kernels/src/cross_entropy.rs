//! Softmax cross entropy over a vocabulary that may be split over ranks, in three steps.
//!
//! With logits `[T, V]` of vocabulary entries `vocab_start..vocab_start + V` on this rank:
//! 1. [`row_statistics`]: in one read of the logits the largest of each row, and the sum of
//!    `exp(logit - largest)`; the caller takes the maximum of the largest over the tensor-parallel group.
//! 2. [`rebase`]: the sum of `exp(logit - max)`, and the target's `logit - max` (0 where the target is
//!    on another rank), which reads of the logits the targets' alone; the caller sums both over the group.
//! 3. [`finish`]: `loss = ln(sum_exp) - target`, and the gradient `(softmax - onehot) * scale` in
//!    place of the logits.
//!
//! A negative target is ignored: its loss and gradient are zero. (The steps are those of
//! Megatron-LM's vocabulary-parallel cross entropy, arXiv 1909.08053, section 3.)
//!
//! A device implementation: logits in the device's dtype, statistics in f32; one block a row in each
//! step, sums in f32 by a fixed tree.

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::sweep;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key for `logits: [T, V]`: forward is steps 1 and 2, backward step 3.
pub fn key(logits: &Tensor, pass: Pass) -> Op {
    Op::CrossEntropy {
        rows: logits.num_rows() as u64,
        vocab: logits.width() as u64,
        pass,
        dtype: logits.dtype(),
    }
}

/// What one read of a rank's logits says of each row.
#[derive(Debug, Clone)]
pub struct Statistics {
    /// The largest logit: `[T]`.
    pub top: Tensor,
    /// The sum of `exp(logit - top)`: `[T]`.
    pub sum_exp: Tensor,
}

/// The largest logit of each row and the sum of `exp(logit - largest)`, in one read of
/// `logits [T, V]`.
pub fn row_statistics(logits: &Tensor) -> Statistics {
    let _op = logits.device().begin(|| sweep(SweepKind::SumExp, logits));
    let device = logits.device();
    let rows = [logits.num_rows()];
    let top = device.empty(TensorClass::Transient, Dtype::F32, &rows);
    let sum_exp = device.empty(TensorClass::Transient, Dtype::F32, &rows);
    let vocab = logits.width();
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "cross_entropy::row_statistics",
            [logits],
            [&top, &sum_exp],
            |[x], [top, sum_exp]| {
                cpu::statistics(cpu, x.f32(), top.f32(), sum_exp.f32(), vocab);
            },
        ),
        Backend::Cuda(gpu) => cuda::statistics(gpu, logits, &top, &sum_exp),
    }
    Statistics { top, sum_exp }
}

/// From what [`row_statistics`] gave for `logits [T, V]`, a largest logit `top [T]` that is at least the own one, and
/// `targets [T]` i32 (ids of the whole vocabulary) to `(sum_exp [T], target [T])`: `sum_exp * exp(own top - top)`, and
/// the target's `logit - top`, 0 where it is not on this rank.
///
/// # Panics
/// When the shapes do not agree.
pub fn rebase(
    logits: &Tensor,
    own: &Statistics,
    top: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> (Tensor, Tensor) {
    let _op = logits.device().begin(|| sweep(SweepKind::Scale, top));
    let rows = logits.num_rows();
    for (name, t) in [
        ("own.top", &own.top),
        ("own.sum_exp", &own.sum_exp),
        ("top", top),
    ] {
        expect_dims("cross_entropy::rebase", name, t, &[rows]);
    }
    assert!(
        targets.len() == rows,
        "cross_entropy::rebase: targets is {targets:?}, expected [{rows}]"
    );
    let device = logits.device();
    let sum_exp = device.empty(TensorClass::Transient, Dtype::F32, &[rows]);
    let target = device.empty(TensorClass::Transient, Dtype::F32, &[rows]);
    let vocab = logits.width();
    match &device.0.backend {
        Backend::Cpu(_) => with(
            "cross_entropy::rebase",
            [logits, &own.top, &own.sum_exp, top, targets],
            [&sum_exp, &target],
            |[x, own_top, own_sum, top, targets], [sum_exp, target]| {
                let own = (own_top.f32(), own_sum.f32());
                let (x, top, targets) = (x.f32(), top.f32(), targets.i32());
                cpu::rebase(own, top, sum_exp.f32());
                cpu::targets(x, top, targets, (vocab_start, vocab), target.f32());
            },
        ),
        Backend::Cuda(gpu) => {
            let inputs = [logits, &own.top, &own.sum_exp, top, targets];
            cuda::rebase(gpu, inputs, vocab_start, &sum_exp, &target);
        }
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
    let _op = logits.device().begin(|| key(logits, Pass::Backward));
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
        Backend::Cuda(gpu) => {
            cuda::finish(gpu, logits, reduced, targets, vocab_start, scale, &losses);
        }
    }
    losses
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{exp, max, sum, vectorized};

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

    /// Each row's `logit - top` of its target, 0 where that is not here.
    pub(super) fn targets(
        x: &[f32],
        top: &[f32],
        ids: &[i32],
        entries: (usize, usize),
        target: &mut [f32],
    ) {
        let rows = x.chunks_exact(entries.1.max(1)).zip(top);
        for ((target, &id), (x, top)) in target.iter_mut().zip(ids).zip(rows) {
            *target = place(id, entries).map_or(0.0, |i| x[i] - top);
        }
    }

    pub(super) fn statistics(
        cpu: &Cpu,
        x: &[f32],
        top: &mut [f32],
        sum_exp: &mut [f32],
        vocab: usize,
    ) {
        let outputs = [(top, 1), (sum_exp, 1)];
        cpu.rows(
            outputs[0].0.len(),
            x.len(),
            outputs,
            |range, [top, sum_exp]| {
                let x = &x[range.start * vocab..range.end * vocab];
                let rows = x.chunks(vocab.max(1));
                for (x, (top, sum_exp)) in rows.zip(top.chunks_mut(1).zip(sum_exp.chunks_mut(1))) {
                    max_rows(x, top, vocab);
                    sum_exp_rows(x, top, sum_exp, vocab);
                }
            },
        );
    }

    pub(super) fn rebase((own_top, own_sum): (&[f32], &[f32]), top: &[f32], sum_exp: &mut [f32]) {
        let own = own_top.iter().zip(own_sum);
        for ((sum_exp, top), (own_top, own_sum)) in sum_exp.iter_mut().zip(top).zip(own) {
            *sum_exp = own_sum * exp(own_top - top);
        }
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

mod cuda;
