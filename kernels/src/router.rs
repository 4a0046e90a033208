//! From router logits to the chosen experts, their probabilities, and back.
//!
//! `scores = softmax(logits)` over all experts; the `topk` largest are chosen, the lower index first
//! among equals. Their probabilities are, times `scale`:
//! - [`Score::SoftmaxThenTopk`], not normalized: the scores (Switch, OLMoE);
//! - the same, normalized: the scores over their sum (Qwen3-MoE `norm_topk_prob`, Mixtral);
//! - [`Score::TopkThenSoftmax`]: the softmax over the chosen logits, which is the same number
//!   (Megatron-Core's default).
//!
//! The choice is piecewise constant, so backward goes through the probabilities alone, exactly.
//! What a load-balancing loss needs is in [`stats`]; its gradient enters [`backward`] as the gradient
//! of the scores.
//!
//! A device implementation: one small block of work a token, f32 throughout, the same ties.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// From logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts, then top-k.
    SoftmaxThenTopk,
    /// Top-k, then softmax over the chosen.
    TopkThenSoftmax,
}

/// How a router scores and weighs its choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRule {
    /// From logits to scores.
    pub score: Score,
    /// Chosen scores are divided by their sum.
    pub normalize: bool,
    /// Factor on the probabilities.
    pub scale: f32,
}

/// What a router decided.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Chosen experts, by falling score: `[T, K]` i32.
    pub ids: Tensor,
    /// Their probabilities: `[T, K]`.
    pub probs: Tensor,
    /// Softmax over all experts: `[T, E]`.
    pub scores: Tensor,
}

/// What balancing losses and load reports need.
#[derive(Debug, Clone)]
pub struct Stats {
    /// Sum of the scores of all tokens: `[E]`.
    pub score_sums: Tensor,
    /// Tokens that chose each expert.
    pub counts: Vec<usize>,
}

/// The cost-table key for `logits: [T, E]`.
pub fn key(logits: &Tensor, topk: usize, pass: Pass) -> Op {
    Op::Router {
        rows: logits.num_rows() as u64,
        experts: logits.width() as u64,
        topk: topk as u64,
        pass,
    }
}

/// Routes `logits [T, E]` to `topk` experts a token.
///
/// # Panics
/// When `topk` is not between 1 and the number of experts.
pub fn forward(logits: &Tensor, topk: usize, rule: &RouterRule) -> Routing {
    let &[tokens, experts] = logits.dims() else {
        panic!("router::forward: logits is {logits:?}, expected [tokens, experts]")
    };
    assert!(
        (1..=experts).contains(&topk),
        "router::forward: top-{topk} of {experts} experts"
    );
    let device = logits.device();
    let new = |dtype, width| device.empty(TensorClass::Activations, dtype, &[tokens, width]);
    let ids = new(Dtype::I32, topk);
    let probs = new(Dtype::F32, topk);
    let scores = new(Dtype::F32, experts);
    match &device.0.backend {
        Backend::Cpu(_) => {
            let outputs = [&ids, &probs, &scores];
            with(
                "router::forward",
                [logits],
                outputs,
                |[logits], [ids, probs, scores]| {
                    let (ids, probs, scores) = (ids.i32(), probs.f32(), scores.f32());
                    cpu::forward(logits.f32(), *rule, [experts, topk], ids, probs, scores);
                },
            );
        }
        Backend::Cuda(gpu) => gpu.unwritten("router::forward"),
    }
    Routing { ids, probs, scores }
}

/// `dprobs [T, K]` to `dlogits [T, E]`. `dscores` adds the gradient of a loss on the scores: `[T, E]`,
/// or `[E]` where it is the same for every token.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(
    dprobs: &Tensor,
    routing: &Routing,
    rule: &RouterRule,
    dscores: Option<&Tensor>,
) -> Tensor {
    let Routing { ids, probs, scores } = routing;
    expect_dims("router::backward", "dprobs", dprobs, probs.dims());
    let (topk, experts) = (ids.width(), scores.width());
    if let Some(extra) = dscores {
        assert!(
            extra.dims() == [experts] || extra.dims() == scores.dims(),
            "router::backward: dscores is {extra:?}, expected [{experts}] or {:?}",
            scores.dims()
        );
    }
    let device = scores.device();
    let dlogits = device.empty(TensorClass::Activations, Dtype::F32, scores.dims());
    let sizes = [experts, topk];
    match &device.0.backend {
        Backend::Cpu(_) => match dscores {
            None => {
                let inputs = [dprobs, ids, scores];
                with(
                    "router::backward",
                    inputs,
                    [&dlogits],
                    |[dprobs, ids, scores], [out]| {
                        let (dprobs, ids, scores) = (dprobs.f32(), ids.i32(), scores.f32());
                        cpu::backward(dprobs, ids, scores, &[], *rule, sizes, out.f32());
                    },
                );
            }
            Some(extra) => {
                let inputs = [dprobs, ids, scores, extra];
                with(
                    "router::backward",
                    inputs,
                    [&dlogits],
                    |[dprobs, ids, scores, extra], [out]| {
                        let (dprobs, ids, scores) = (dprobs.f32(), ids.i32(), scores.f32());
                        cpu::backward(dprobs, ids, scores, extra.f32(), *rule, sizes, out.f32());
                    },
                );
            }
        },
        Backend::Cuda(gpu) => gpu.unwritten("router::backward"),
    }
    dlogits
}

/// Sums the scores and counts the choices of all tokens. Brings the counts to the host.
pub fn stats(routing: &Routing) -> Stats {
    let experts = routing.scores.width();
    let device = routing.scores.device();
    let score_sums = device.empty(TensorClass::Activations, Dtype::F32, &[experts]);
    let counts = match &device.0.backend {
        Backend::Cpu(_) => {
            let inputs = [&routing.scores, &routing.ids];
            with(
                "router::stats",
                inputs,
                [&score_sums],
                |[scores, ids], [sums]| cpu::stats(scores.f32(), ids.i32(), experts, sums.f32()),
            )
        }
        Backend::Cuda(gpu) => gpu.unwritten("router::stats"),
    };
    Stats { score_sums, counts }
}

mod cpu {
    use super::{RouterRule, Score};
    use crate::simd::{exp, max, sum, vectorized};

    pub(super) fn forward(
        logits: &[f32],
        rule: RouterRule,
        [experts, topk]: [usize; 2],
        ids: &mut [i32],
        probs: &mut [f32],
        scores: &mut [f32],
    ) {
        softmax_rows(logits, scores, experts);
        let rows = ids.chunks_exact_mut(topk).zip(probs.chunks_exact_mut(topk));
        let rows = rows.zip(
            scores
                .chunks_exact(experts)
                .zip(logits.chunks_exact(experts)),
        );
        for ((ids, probs), (scores, logits)) in rows {
            choose(logits, ids);
            for (prob, &id) in probs.iter_mut().zip(&*ids) {
                *prob = scores[id as usize];
            }
            let total: f32 = match (rule.score, rule.normalize) {
                (Score::SoftmaxThenTopk, false) => 1.0,
                (Score::SoftmaxThenTopk, true) => probs.iter().sum(),
                (Score::TopkThenSoftmax, _) => {
                    // From the logits, since scores of all chosen experts may underflow.
                    let top = logits[ids[0] as usize];
                    for (prob, &id) in probs.iter_mut().zip(&*ids) {
                        *prob = exp(logits[id as usize] - top);
                    }
                    probs.iter().sum()
                }
            };
            for prob in probs {
                *prob = *prob / total * rule.scale;
            }
        }
    }

    vectorized! {
        fn softmax_rows(logits: &[f32], scores: &mut [f32], experts: usize) {
            for (x, y) in logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts)) {
                let top = max(x);
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = exp(x - top);
                }
                let inverse = 1.0 / sum(y, |y| y);
                for y in y {
                    *y *= inverse;
                }
            }
        }
    }

    /// The experts of the largest logits by falling logit, the lower index first among equals; by
    /// insertion, since few are chosen.
    fn choose(logits: &[f32], ids: &mut [i32]) {
        let mut chosen = 0;
        for (expert, &logit) in logits.iter().enumerate() {
            let beats = |&other: &i32| logit > logits[other as usize];
            let place = ids[..chosen].iter().position(beats).unwrap_or(chosen);
            if place < ids.len() {
                chosen = (chosen + 1).min(ids.len());
                ids[place..chosen].rotate_right(1);
                ids[place] = expert as i32;
            }
        }
    }

    pub(super) fn backward(
        dprobs: &[f32],
        ids: &[i32],
        scores: &[f32],
        extra: &[f32],
        rule: RouterRule,
        [experts, topk]: [usize; 2],
        dlogits: &mut [f32],
    ) {
        let normalized = rule.normalize || rule.score == Score::TopkThenSoftmax;
        let rows = dprobs.chunks_exact(topk).zip(ids.chunks_exact(topk));
        let rows = rows.zip(
            scores
                .chunks_exact(experts)
                .zip(dlogits.chunks_exact_mut(experts)),
        );
        for (row, ((dprobs, ids), (scores, dlogits))) in rows.enumerate() {
            // 1. The gradient of the scores from other losses, through the softmax over all.
            if extra.is_empty() {
                dlogits.fill(0.0);
            } else {
                let start = if extra.len() == experts {
                    0
                } else {
                    row * experts
                };
                dlogits.copy_from_slice(&extra[start..][..experts]);
            }
            if !normalized {
                for (&id, &d) in ids.iter().zip(dprobs) {
                    dlogits[id as usize] += d * rule.scale;
                }
            }
            if !extra.is_empty() || !normalized {
                let mean: f32 = dlogits.iter().zip(scores).map(|(d, s)| d * s).sum();
                for (d, s) in dlogits.iter_mut().zip(scores) {
                    *d = s * (*d - mean);
                }
            }
            // 2. Normalized probabilities are a softmax over the chosen alone.
            if normalized {
                let total: f32 = ids.iter().map(|&id| scores[id as usize]).sum();
                let share = |id: i32| scores[id as usize] / total;
                let mean: f32 = ids.iter().zip(dprobs).map(|(&id, d)| share(id) * d).sum();
                for (&id, &d) in ids.iter().zip(dprobs) {
                    dlogits[id as usize] += rule.scale * share(id) * (d - mean);
                }
            }
        }
    }

    pub(super) fn stats(
        scores: &[f32],
        ids: &[i32],
        experts: usize,
        sums: &mut [f32],
    ) -> Vec<usize> {
        let mut total = vec![0.0f64; experts];
        for row in scores.chunks_exact(experts) {
            for (total, &score) in total.iter_mut().zip(row) {
                *total += f64::from(score);
            }
        }
        for (sum, total) in sums.iter_mut().zip(total) {
            *sum = total as f32;
        }
        let mut counts = vec![0; experts];
        for &id in ids {
            counts[id as usize] += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests;
