//! Launches of `router.cu`: one pass forward, one backward, and the sum of a pass's statistics.

use moefold_profiles::Dtype;

use super::{MAX_SCORED_BY, MAX_TOPK, RouterRule, Routing, Score, Stats};
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::operand::vector;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::permute::MAX_EXPERTS;
use crate::tensor::Tensor;

const SOURCE: Source = source!("router", "../router.cu");
const THREADS: u32 = 256;
/// Warps of a block: a warp has a token.
const WARPS: usize = THREADS as usize / 32;
/// Tokens in turn of a warp that keeps statistics: those of a block are summed before they are
/// written.
const RUN: usize = 4;

/// What selects code.
#[derive(Debug, Clone, Copy)]
struct Specialized {
    score: Score,
    per_lane: usize,
    vector: usize,
    scored_by: usize,
}

impl Specialized {
    /// For these experts, with rows that start at multiples of `aligned` of them.
    fn new(experts: usize, aligned: usize, score: Score, scored_by: usize) -> Self {
        let per_lane = experts.div_ceil(32).next_power_of_two();
        Self {
            score,
            per_lane,
            vector: if per_lane >= 4 { aligned } else { 1 },
            scored_by,
        }
    }

    fn program(self) -> Program {
        let score = match self.score {
            Score::SoftmaxThenTopk | Score::TopkThenSoftmax => 0,
            Score::Sigmoid => 1,
            Score::SqrtSoftplus => 2,
        };
        SOURCE.with(&[
            Define::int("SCORE", score),
            Define::int("PER_LANE", self.per_lane),
            Define::int("VEC", self.vector),
            Define::int("BEST", self.scored_by),
        ])
    }
}

/// What the models route by, with their experts.
const MODELS: [(Score, usize, &[usize]); 5] = [
    // Mixtral, OLMoE, Qwen3, GPT-OSS, Qwen3-Coder, Qwen3-Next.
    (Score::SoftmaxThenTopk, 0, &[8, 64, 128, 160, 512]),
    // DeepSeek-V2.
    (Score::SoftmaxThenTopk, 1, &[160]),
    // Llama 4, GLM, MiniMax-M2, Kimi.
    (Score::Sigmoid, 0, &[16, 128, 256, 384]),
    // DeepSeek-V3, Ling.
    (Score::Sigmoid, 2, &[256]),
    // DeepSeek-V4.
    (Score::SqrtSoftplus, 0, &[256, 384]),
];

/// Every specialization that [`MODELS`] launch.
pub(crate) fn programs() -> Vec<Listed> {
    let list = |score, scored_by, experts| Listed {
        program: Specialized::new(experts, 4, score, scored_by).program(),
        needs: Needs::Sm80,
        entries: vec![
            Entry::plain("router_forward", 128, 4 * (1 + WARPS) * experts),
            Entry::plain("router_totals", 64, 4 * 2048),
            Entry::plain("router_backward", 96, 4 * WARPS * experts),
        ],
    };
    let of_models = MODELS.into_iter().flat_map(|(score, scored_by, all)| {
        let list = move |&experts| list(score, scored_by, experts);
        all.iter().map(list)
    });
    of_models.collect()
}

pub(super) fn forward(
    gpu: &Cuda,
    logits: &Tensor,
    rule: &RouterRule,
    bias: Option<&Tensor>,
    routing: &Routing,
    stats: Option<&Stats>,
) {
    const OP: &str = "router::forward";
    let Routing { ids, probs, scores } = routing;
    let (tokens, experts, topk) = (logits.num_rows(), logits.width(), ids.width());
    disjoint(
        OP,
        &[&[logits], bias.as_slice()].concat(),
        &[ids, probs, scores],
    );
    for input in [Some(logits), bias].into_iter().flatten() {
        input.expect_dtype(OP, Dtype::F32);
    }
    let groups = rule.groups;
    assert!(
        experts <= MAX_EXPERTS && topk <= MAX_TOPK,
        "{OP}: top-{topk} of {experts} experts, expected at most {MAX_TOPK} of {MAX_EXPERTS}"
    );
    assert!(
        groups.is_none_or(|g| g.groups <= MAX_TOPK && g.scored_by <= MAX_SCORED_BY),
        "{OP}: {groups:?}, expected at most {MAX_TOPK} groups scored by {MAX_SCORED_BY}"
    );
    let scored_by = groups.map_or(0, |g| g.scored_by);
    let aligned = vector(&[logits, scores]);
    let program = Specialized::new(experts, aligned, rule.score, scored_by).program();
    let run = if stats.is_some() { RUN } else { 1 };
    let blocks = tokens.div_ceil(WARPS * run);
    let partial = stats.map(|_| {
        let dims = [blocks, 2 * experts];
        let device = logits.device();
        device.empty(TensorClass::Transient, Dtype::F32, &dims)
    });
    // Counts, and a row of values a warp.
    let rows = usize::from(stats.is_some()) + WARPS;
    let shared = if stats.is_some() || groups.is_some() {
        4 * rows * experts
    } else {
        0
    };
    gpu.launch(
        OP,
        &program,
        "router_forward",
        Grid::linear(blocks, THREADS, shared),
        &[
            logits.into(),
            Arg::optional(bias),
            ids.into(),
            probs.into(),
            scores.into(),
            Arg::optional(partial.as_ref()),
            Arg::size(tokens),
            Arg::size(experts),
            Arg::size(topk),
            Arg::size(run),
            Arg::size(usize::from(rule.normalizes())),
            Arg::F32(rule.scale),
            Arg::size(groups.map_or(1, |g| g.groups)),
            Arg::size(groups.map_or(1, |g| g.topk)),
        ],
    );
    if let (Some(partial), Some(stats)) = (partial, stats) {
        gpu.launch(
            "router::stats",
            &program,
            "router_totals",
            Grid::linear(experts.div_ceil(32), 1024, 4 * 2048),
            &[
                (&partial).into(),
                (&stats.score_sums).into(),
                (&stats.counts).into(),
                Arg::size(experts),
                Arg::size(blocks),
            ],
        );
    }
}

pub(super) fn backward(
    gpu: &Cuda,
    dprobs: &Tensor,
    routing: &Routing,
    rule: &RouterRule,
    dshares: Option<&Tensor>,
    dlogits: &Tensor,
) {
    const OP: &str = "router::backward";
    let Routing { ids, probs, scores } = routing;
    let inputs = [&[dprobs, ids, probs, scores], dshares.as_slice()].concat();
    disjoint(OP, &inputs, &[dlogits]);
    for input in [Some(dprobs), dshares].into_iter().flatten() {
        input.expect_dtype(OP, Dtype::F32);
    }
    let (tokens, experts) = (scores.num_rows(), scores.width());
    let mut rows = vec![scores, dlogits];
    rows.extend(dshares);
    // How groups were limited does not matter any more; the program is forward's.
    let scored_by = rule.groups.map_or(0, |g| g.scored_by);
    let program = Specialized::new(experts, vector(&rows), rule.score, scored_by).program();
    let stride = dshares.map_or(0, |d| if d.dims().len() == 1 { 0 } else { experts });
    gpu.launch(
        OP,
        &program,
        "router_backward",
        Grid::linear(tokens.div_ceil(WARPS), THREADS, 4 * WARPS * experts),
        &[
            dprobs.into(),
            ids.into(),
            probs.into(),
            scores.into(),
            Arg::optional(dshares),
            Arg::size(stride),
            dlogits.into(),
            Arg::size(tokens),
            Arg::size(experts),
            Arg::size(ids.width()),
            Arg::size(usize::from(rule.normalizes())),
            Arg::F32(rule.scale),
        ],
    );
}
