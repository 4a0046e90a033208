//! From router logits to the chosen experts, their probabilities, and back.
//!
//! Scores of all experts are the softmax of the logits, or of each logit by itself its sigmoid or the
//! square root of its softplus ([`Score`]). The `topk` best are chosen, the lower index first among
//! equals: by logit; by score plus bias where there is a bias, which balances the load and enters
//! nothing else (DeepSeek-V3, arXiv 2412.19437); and among the experts of the best groups alone where
//! groups are limited ([`Groups`]). Their probabilities are, times `scale`:
//! - their scores (Switch, OLMoE, DeepSeek-V2);
//! - normalized, their scores over the sum of those (Qwen3-MoE `norm_topk_prob`, Mixtral, DeepSeek-V3);
//!   of a softmax that is the softmax over the chosen logits, which is [`Score::TopkThenSoftmax`]
//!   (Megatron-Core's default, GPT-OSS).
//!
//! The choice is piecewise constant, so backward goes through the probabilities alone, exactly. A
//! load-balancing loss reads [`Stats`], sums over tokens of each expert's share of the token's scores
//! (a softmax as it is; single scores over their sum, as Megatron-Core has it); its gradient by the
//! shares enters [`backward`].
//!
//! A device implementation: f32 throughout, the same ties; the sums of the statistics in a fixed order,
//! blocks of tokens first and those in order. On a GPU a warp has a token and one pass does all: it
//! reads `4 T E` bytes and writes `4 T E + 8 T K`, and `1 / 4` byte a score more for statistics, which a
//! second small pass sums. Backward reads the scores where they matter and writes `4 T E`. A GPU takes
//! at most [`MAX_EXPERTS`](crate::permute::MAX_EXPERTS) experts, [`MAX_TOPK`] of them chosen, in as many groups, of which
//! [`MAX_SCORED_BY`] score.

use std::ops::Range;

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// Choices of a token, and groups, on a GPU: a lane of a warp each.
pub const MAX_TOPK: usize = 32;

/// Experts that score a group on a GPU.
pub const MAX_SCORED_BY: usize = 8;

/// From logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts, then top-k.
    SoftmaxThenTopk,
    /// Top-k, then softmax over the chosen: the softmax over all, normalized.
    TopkThenSoftmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Square root of softplus of each logit.
    SqrtSoftplus,
}

impl Score {
    /// Whether scores are each by itself, rather than a distribution.
    fn is_single(self) -> bool {
        matches!(self, Self::Sigmoid | Self::SqrtSoftplus)
    }
}

/// Group-limited routing: only experts of the best groups are eligible. Groups are consecutive experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups that the experts are divided into, evenly.
    pub groups: usize,
    /// Groups kept a token.
    pub topk: usize,
    /// Experts of a group whose scores (plus bias) add up to the group's score: 1 in DeepSeek-V2, 2 in
    /// V3, `K / topk` in Megatron-Core.
    pub scored_by: usize,
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
    /// Which experts are eligible, where not all.
    pub groups: Option<Groups>,
}

impl RouterRule {
    fn normalizes(&self) -> bool {
        self.normalize || self.score == Score::TopkThenSoftmax
    }

    fn check(&self, topk: usize, experts: usize) {
        let eligible = self.groups.map_or(experts, |g| {
            assert!(
                (1..=g.groups).contains(&g.topk) && experts.is_multiple_of(g.groups),
                "router::forward: {experts} experts in {g:?}"
            );
            let size = experts / g.groups;
            assert!(
                (1..=size).contains(&g.scored_by),
                "router::forward: {g:?} with {size} experts a group"
            );
            size * g.topk
        });
        assert!(
            (1..=eligible).contains(&topk),
            "router::forward: top-{topk} of {eligible} eligible experts"
        );
    }
}

/// What a router decided.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Chosen experts, the best first: `[T, K]` i32.
    pub ids: Tensor,
    /// Their probabilities: `[T, K]`.
    pub probs: Tensor,
    /// Scores of all experts: `[T, E]`.
    pub scores: Tensor,
}

/// What balancing losses and load reports need, on the device: of each of some `P` parts of the tokens.
#[derive(Debug, Clone)]
pub struct Stats {
    /// Sums of the shares of a part's tokens: `[P, E]`.
    pub score_sums: Tensor,
    /// Tokens of a part that chose each expert: `[P, E]` i32.
    pub counts: Tensor,
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

/// Routes `logits [T, E]` to `topk` experts a token, chosen with `bias [E]` where there is one.
///
/// # Panics
/// When `topk` is not between 1 and the number of eligible experts, or the shapes do not agree.
pub fn forward(logits: &Tensor, topk: usize, rule: &RouterRule, bias: Option<&Tensor>) -> Routing {
    let _op = logits.device().begin(|| key(logits, topk, Pass::Forward));
    let routing = prepare(logits, topk, rule, bias);
    match &logits.device().0.backend {
        Backend::Cpu(_) => route(logits, rule, bias, &routing),
        Backend::Cuda(gpu) => cuda::forward(gpu, logits, rule, bias, &routing, None),
    }
    routing
}

/// [`forward`] with its statistics, from the same pass; `parts` are ranges of tokens that cover all of
/// them in order.
///
/// # Panics
/// As [`forward`].
pub fn forward_with_stats(
    logits: &Tensor,
    topk: usize,
    rule: &RouterRule,
    bias: Option<&Tensor>,
    parts: &[Range<usize>],
) -> (Routing, Stats) {
    let _op = logits.device().begin(|| key(logits, topk, Pass::Forward));
    let routing = prepare(logits, topk, rule, bias);
    let device = logits.device();
    let dims = [parts.len(), logits.width()];
    let new = |dtype| device.empty(TensorClass::Activations, dtype, &dims);
    let stats = Stats {
        score_sums: new(Dtype::F32),
        counts: new(Dtype::I32),
    };
    for (part, tokens) in parts.iter().enumerate() {
        let (logits, routing) = (logits.rows(tokens.clone()), routing.rows(tokens));
        let of_part = Stats {
            score_sums: stats.score_sums.rows(part..part + 1),
            counts: stats.counts.rows(part..part + 1),
        };
        part_with_stats(&logits, rule, bias, &routing, &of_part);
    }
    (routing, stats)
}

/// [`forward_with_stats`] of one part.
fn part_with_stats(
    logits: &Tensor,
    rule: &RouterRule,
    bias: Option<&Tensor>,
    routing: &Routing,
    stats: &Stats,
) {
    match &logits.device().0.backend {
        Backend::Cpu(_) => {
            route(logits, rule, bias, routing);
            let inputs = [&routing.scores, &routing.ids];
            let outputs = [&stats.score_sums, &stats.counts];
            with(
                "router::stats",
                inputs,
                outputs,
                |[scores, ids], [sums, counts]| {
                    let single = rule.score.is_single();
                    cpu::stats(scores.f32(), ids.i32(), single, sums.f32(), counts.i32());
                },
            );
        }
        Backend::Cuda(gpu) => cuda::forward(gpu, logits, rule, bias, routing, Some(stats)),
    }
}

impl Routing {
    /// Of some of the tokens.
    fn rows(&self, tokens: &Range<usize>) -> Self {
        let rows = |tensor: &Tensor| tensor.rows(tokens.clone());
        Self {
            ids: rows(&self.ids),
            probs: rows(&self.probs),
            scores: rows(&self.scores),
        }
    }
}

fn prepare(logits: &Tensor, topk: usize, rule: &RouterRule, bias: Option<&Tensor>) -> Routing {
    let &[tokens, experts] = logits.dims() else {
        panic!("router::forward: logits is {logits:?}, expected [tokens, experts]")
    };
    rule.check(topk, experts);
    if let Some(bias) = bias {
        expect_dims("router::forward", "bias", bias, &[experts]);
    }
    let device = logits.device();
    let new = |dtype, width| device.empty(TensorClass::Activations, dtype, &[tokens, width]);
    Routing {
        ids: new(Dtype::I32, topk),
        probs: new(Dtype::F32, topk),
        scores: new(Dtype::F32, experts),
    }
}

/// [`forward`] on the CPU.
fn route(logits: &Tensor, rule: &RouterRule, bias: Option<&Tensor>, routing: &Routing) {
    const OP: &str = "router::forward";
    let Routing { ids, probs, scores } = routing;
    let sizes = [logits.width(), ids.width()];
    let outputs = [ids, probs, scores];
    match bias {
        None => with(OP, [logits], outputs, |[logits], [ids, probs, scores]| {
            let (ids, probs, scores) = (ids.i32(), probs.f32(), scores.f32());
            cpu::forward(logits.f32(), None, rule, sizes, ids, probs, scores);
        }),
        Some(bias) => {
            let inputs = [logits, bias];
            with(
                OP,
                inputs,
                outputs,
                |[logits, bias], [ids, probs, scores]| {
                    let (ids, probs, scores) = (ids.i32(), probs.f32(), scores.f32());
                    let bias = Some(bias.f32());
                    cpu::forward(logits.f32(), bias, rule, sizes, ids, probs, scores);
                },
            );
        }
    }
}

/// `dprobs [T, K]` to `dlogits [T, E]`. `dshares` adds the gradient of a loss by the shares that
/// [`Stats`] sums: `[T, E]`, or `[E]` where it is the same for every token.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(
    dprobs: &Tensor,
    routing: &Routing,
    rule: &RouterRule,
    dshares: Option<&Tensor>,
) -> Tensor {
    let Routing { ids, scores, .. } = routing;
    let device = scores.device();
    let _op = device.begin(|| key(scores, ids.width(), Pass::Backward));
    let dlogits = device.empty(TensorClass::Activations, Dtype::F32, scores.dims());
    slopes(dprobs, routing, rule, dshares, &dlogits);
    dlogits
}

/// [`backward`] where `dshares [P, E]` is the same for all tokens of each of some parts.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward_of_parts(
    dprobs: &Tensor,
    routing: &Routing,
    rule: &RouterRule,
    dshares: &Tensor,
    parts: &[Range<usize>],
) -> Tensor {
    let Routing { ids, scores, .. } = routing;
    let device = scores.device();
    let _op = device.begin(|| key(scores, ids.width(), Pass::Backward));
    let dlogits = device.empty(TensorClass::Activations, Dtype::F32, scores.dims());
    for (part, tokens) in parts.iter().enumerate() {
        let rows = |tensor: &Tensor| tensor.rows(tokens.clone());
        let dshares = dshares.rows(part..part + 1).reshape(&[scores.width()]);
        let routing = routing.rows(tokens);
        slopes(
            &rows(dprobs),
            &routing,
            rule,
            Some(&dshares),
            &rows(&dlogits),
        );
    }
    dlogits
}

/// Both, into `dlogits`.
fn slopes(
    dprobs: &Tensor,
    routing: &Routing,
    rule: &RouterRule,
    dshares: Option<&Tensor>,
    dlogits: &Tensor,
) {
    const OP: &str = "router::backward";
    let Routing { ids, probs, scores } = routing;
    expect_dims(OP, "dprobs", dprobs, probs.dims());
    let (topk, experts) = (ids.width(), scores.width());
    if let Some(extra) = dshares {
        assert!(
            extra.dims() == [experts] || extra.dims() == scores.dims(),
            "{OP}: dshares is {extra:?}, expected [{experts}] or {:?}",
            scores.dims()
        );
    }
    let sizes = [experts, topk];
    match (&scores.device().0.backend, dshares) {
        (Backend::Cpu(_), None) => {
            let inputs = [dprobs, ids, probs, scores];
            with(
                OP,
                inputs,
                [dlogits],
                |[dprobs, ids, probs, scores], [out]| {
                    let chosen = [dprobs.f32(), probs.f32()];
                    cpu::backward(chosen, ids.i32(), scores.f32(), &[], rule, sizes, out.f32());
                },
            );
        }
        (Backend::Cpu(_), Some(extra)) => {
            let inputs = [dprobs, ids, probs, scores, extra];
            with(
                OP,
                inputs,
                [dlogits],
                |[dprobs, ids, probs, scores, extra], [out]| {
                    let chosen = [dprobs.f32(), probs.f32()];
                    let (ids, scores, extra) = (ids.i32(), scores.f32(), extra.f32());
                    cpu::backward(chosen, ids, scores, extra, rule, sizes, out.f32());
                },
            );
        }
        (Backend::Cuda(gpu), _) => cuda::backward(gpu, dprobs, routing, rule, dshares, dlogits),
    }
}

mod cpu {
    use super::{Groups, RouterRule, Score};
    use crate::simd::{exp, max, sigmoid, sum, vectorized};

    /// Added to sums of single scores that are divided by, as all may underflow (Megatron-Core).
    const TINY: f32 = 1e-20;

    pub(super) fn forward(
        logits: &[f32],
        bias: Option<&[f32]>,
        rule: &RouterRule,
        [experts, topk]: [usize; 2],
        ids: &mut [i32],
        probs: &mut [f32],
        scores: &mut [f32],
    ) {
        match rule.score {
            Score::SoftmaxThenTopk | Score::TopkThenSoftmax => {
                softmax_rows(logits, scores, experts);
            }
            Score::Sigmoid => sigmoids(logits, scores),
            Score::SqrtSoftplus => {
                for (score, &x) in scores.iter_mut().zip(logits) {
                    *score = (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt();
                }
            }
        }
        let by_score = rule.groups.is_some_and(|g| g.scored_by > 1);
        let mut values = vec![0.0; experts];
        let rows = ids.chunks_exact_mut(topk).zip(probs.chunks_exact_mut(topk));
        let rows = rows.zip(
            scores
                .chunks_exact(experts)
                .zip(logits.chunks_exact(experts)),
        );
        for ((ids, probs), (scores, logits)) in rows {
            match bias {
                Some(bias) => {
                    for ((value, &score), &bias) in values.iter_mut().zip(scores).zip(bias) {
                        *value = score + bias;
                    }
                }
                None => values.copy_from_slice(if by_score { scores } else { logits }),
            }
            match rule.groups {
                Some(groups) => choose_in_groups(&values, groups, ids),
                None => choose(&values, 0..experts, ids),
            }
            weigh(logits, scores, rule, ids, probs);
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

    vectorized! {
        fn sigmoids(logits: &[f32], scores: &mut [f32]) {
            for (y, &x) in scores.iter_mut().zip(logits) {
                *y = sigmoid(x);
            }
        }
    }

    /// The probabilities of the chosen.
    fn weigh(logits: &[f32], scores: &[f32], rule: &RouterRule, ids: &[i32], probs: &mut [f32]) {
        let softmax = !rule.score.is_single();
        let of_chosen = ids.iter().map(|&id| logits[id as usize]);
        // Normalized from the logits, since scores of all chosen experts may underflow.
        let top = of_chosen.fold(f32::NEG_INFINITY, f32::max);
        for (prob, &id) in probs.iter_mut().zip(ids) {
            *prob = if softmax && rule.normalizes() {
                exp(logits[id as usize] - top)
            } else {
                scores[id as usize]
            };
        }
        let total = match (rule.normalizes(), softmax) {
            (false, _) => 1.0,
            (true, true) => probs.iter().sum(),
            (true, false) => probs.iter().sum::<f32>() + TINY,
        };
        for prob in probs {
            *prob = *prob / total * rule.scale;
        }
    }

    /// NaN is below every number.
    fn beats(a: f32, b: f32) -> bool {
        a > b || (b.is_nan() && !a.is_nan())
    }

    /// The candidates (in rising order) of the largest values by falling value, the lower index first
    /// among equals; by insertion, since few are chosen.
    fn choose(values: &[f32], candidates: impl Iterator<Item = usize>, ids: &mut [i32]) {
        let mut chosen = 0;
        for candidate in candidates {
            let better = |&other: &i32| beats(values[candidate], values[other as usize]);
            let place = ids[..chosen].iter().position(better).unwrap_or(chosen);
            if place < ids.len() {
                chosen = (chosen + 1).min(ids.len());
                ids[place..chosen].rotate_right(1);
                ids[place] = candidate as i32;
            }
        }
    }

    fn choose_in_groups(values: &[f32], groups: Groups, ids: &mut [i32]) {
        let size = values.len() / groups.groups;
        let mut best = vec![0; groups.scored_by];
        let mut scores = Vec::with_capacity(groups.groups);
        for group in values.chunks_exact(size) {
            choose(group, 0..size, &mut best);
            scores.push(best.iter().map(|&i| group[i as usize]).sum());
        }
        let mut kept = vec![0; groups.topk];
        choose(&scores, 0..groups.groups, &mut kept);
        let eligible = |expert: &usize| kept.contains(&((expert / size) as i32));
        choose(values, (0..values.len()).filter(eligible), ids);
    }

    /// The slope of a single score by its logit, over the score.
    fn single_slope(score: Score, value: f32) -> f32 {
        match score {
            Score::Sigmoid => 1.0 - value,
            // softplus = value^2, and its slope is 1 - e^-softplus.
            Score::SqrtSoftplus if value == 0.0 => 0.5,
            Score::SqrtSoftplus => -0.5 * (-value * value).exp_m1() / (value * value),
            _ => unreachable!("a softmax has no slope of one score"),
        }
    }

    pub(super) fn backward(
        [dprobs, probs]: [&[f32]; 2],
        ids: &[i32],
        scores: &[f32],
        extra: &[f32],
        rule: &RouterRule,
        [experts, topk]: [usize; 2],
        dlogits: &mut [f32],
    ) {
        let (normalized, single) = (rule.normalizes(), rule.score.is_single());
        let chosen = dprobs.chunks_exact(topk).zip(probs.chunks_exact(topk));
        let chosen = chosen.zip(ids.chunks_exact(topk));
        let all = scores
            .chunks_exact(experts)
            .zip(dlogits.chunks_exact_mut(experts));
        for (row, (((dprobs, probs), ids), (scores, dlogits))) in chosen.zip(all).enumerate() {
            // 1. The gradient by the scores, or by their shares, through all of them.
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
            let by_score = !single && !normalized;
            if by_score {
                for (&id, &d) in ids.iter().zip(dprobs) {
                    dlogits[id as usize] += d * rule.scale;
                }
            }
            if by_score || !extra.is_empty() {
                let total = if single {
                    scores.iter().sum::<f32>() + TINY
                } else {
                    1.0
                };
                let product: f32 = dlogits.iter().zip(scores).map(|(d, s)| d * s).sum();
                let mean = product / total;
                for (d, &s) in dlogits.iter_mut().zip(scores) {
                    *d = s * (*d - mean) / total;
                    if single {
                        *d *= single_slope(rule.score, s);
                    }
                }
            }
            if by_score {
                continue;
            }
            // 2. Through the probabilities of the chosen alone.
            let mut mean = 0.0;
            let total: f32 = probs.iter().sum();
            if normalized && total != 0.0 {
                let product: f32 = probs.iter().zip(dprobs).map(|(p, d)| p * d).sum();
                mean = product / total;
            }
            for ((&id, &d), &p) in ids.iter().zip(dprobs).zip(probs) {
                let slope = if single {
                    single_slope(rule.score, scores[id as usize])
                } else {
                    1.0
                };
                dlogits[id as usize] += p * (d - mean) * slope;
            }
        }
    }

    pub(super) fn stats(
        scores: &[f32],
        ids: &[i32],
        single: bool,
        sums: &mut [f32],
        counts: &mut [i32],
    ) {
        let mut total = vec![0.0f64; sums.len()];
        for row in scores.chunks_exact(sums.len()) {
            let whole = if single {
                row.iter().map(|&s| f64::from(s)).sum::<f64>() + f64::from(TINY)
            } else {
                1.0
            };
            for (total, &score) in total.iter_mut().zip(row) {
                *total += f64::from(score) / whole;
            }
        }
        for (sum, total) in sums.iter_mut().zip(total) {
            *sum = total as f32;
        }
        counts.fill(0);
        for &id in ids {
            counts[id as usize] += 1;
        }
    }
}

pub(crate) mod cuda;
