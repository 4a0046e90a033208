//! The cases: every op of a training step at the sizes of a model.

use std::rc::Rc;

use moefold_profiles::{Dtype, Op, Pass};

use crate::check::{Case, Inputs, Work, Written};
use crate::device::TensorClass;
use crate::gemm::{Trans, gemm};
use crate::permute::RowMap;
use crate::router::{Groups, RouterRule, Score};
use crate::swiglu::Rule;
use crate::tensor::Tensor;
use crate::{
    adamw, attention, cross_entropy, elementwise, embedding, gemm, grad_norm, grouped_gemm,
    permute, reduce, rms_norm, rope, router, rows, swiglu,
};

/// Sizes of one layer's work on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// What they are of.
    pub name: &'static str,
    /// Tokens of a microbatch, in `seqs` sequences.
    pub tokens: usize,
    /// Sequences.
    pub seqs: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a query and a key.
    pub qk_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Experts on the device.
    pub experts: usize,
    /// Experts a token.
    pub topk: usize,
    /// Width of an expert.
    pub width: usize,
    /// Vocabulary entries on the device.
    pub vocab: usize,
}

impl Sizes {
    /// Sizes at the edges of tiles and below one access: for correctness. The odd ones are no
    /// multiple of 16 bytes, so that they go to the portable kernels on any architecture.
    pub fn small() -> Vec<Self> {
        vec![
            Self {
                name: "odd",
                tokens: 69,
                seqs: 3,
                hidden: 70,
                heads: 3,
                kv_heads: 1,
                qk_dim: 60,
                v_dim: 44,
                experts: 5,
                topk: 2,
                width: 35,
                vocab: 101,
            },
            Self {
                name: "ragged",
                tokens: 130,
                seqs: 2,
                hidden: 72,
                heads: 4,
                kv_heads: 2,
                qk_dim: 64,
                v_dim: 64,
                experts: 6,
                topk: 2,
                width: 40,
                vocab: 130,
            },
            Self {
                name: "wide heads",
                tokens: 67,
                seqs: 1,
                hidden: 128,
                heads: 2,
                kv_heads: 2,
                qk_dim: 192,
                v_dim: 128,
                experts: 3,
                topk: 1,
                width: 64,
                vocab: 33,
            },
        ]
    }

    /// One layer of published models on one GPU: for correctness at size, and for times.
    pub fn real() -> Vec<Self> {
        vec![
            // Qwen3-30B-A3B, experts over 8 ranks: tokens of 8 ranks reach 16 experts.
            Self {
                name: "qwen3-30b-a3b",
                tokens: 4096,
                seqs: 1,
                hidden: 2048,
                heads: 32,
                kv_heads: 4,
                qk_dim: 128,
                v_dim: 128,
                experts: 16,
                topk: 8,
                width: 768,
                vocab: 151_936,
            },
            Self {
                name: "mixtral-8x7b",
                tokens: 4096,
                seqs: 1,
                hidden: 4096,
                heads: 32,
                kv_heads: 8,
                qk_dim: 128,
                v_dim: 128,
                experts: 8,
                topk: 2,
                width: 14_336,
                vocab: 32_000,
            },
            // DeepSeek-V3 attention under TP 4, experts over 32 ranks.
            Self {
                name: "deepseek-v3",
                tokens: 4096,
                seqs: 1,
                hidden: 7168,
                heads: 32,
                kv_heads: 32,
                qk_dim: 192,
                v_dim: 128,
                experts: 8,
                topk: 8,
                width: 2048,
                vocab: 32_320,
            },
        ]
    }
}

fn case(
    name: impl Into<String>,
    op: Op,
    prepare: impl Fn(&mut Inputs<'_>) -> Work + 'static,
) -> Case {
    Case {
        name: name.into(),
        op,
        prepare: Box::new(prepare),
    }
}

/// Every op at these sizes; `dtype` is what the device stores, for the counts of bytes.
pub fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = linear(sizes, dtype);
    all.extend(experts(sizes, dtype));
    all.extend(activation(sizes, dtype));
    all.extend(routing(sizes));
    all.extend(permutation(sizes, dtype));
    all.extend(attention_core(sizes, dtype));
    all.extend(norms(sizes, dtype));
    all.extend(head(sizes, dtype));
    all.extend(pointwise(sizes, dtype));
    all
}

/// The dense product of as much work as the experts' first product: what the grouped one is held
/// against.
pub fn dense_peer(sizes: &Sizes) -> Case {
    let rows = sizes.tokens * sizes.topk;
    dense("dense peer of fc1", rows, 2 * sizes.width, sizes.hidden)
}

/// `y = x W^T`.
pub(super) fn dense(name: &str, m: usize, n: usize, k: usize) -> Case {
    let key = gemm::key(m, n, k, Pass::Forward);
    case(format!("gemm::forward {name}"), key, move |inputs| {
        let (x, w) = (inputs.tensor(&[m, k], 1.0), inputs.tensor(&[n, k], 0.02));
        Box::new(move || vec![Written::new("y", &gemm::forward(&x, &w))])
    })
}

/// A copy of `words` f32.
pub(super) fn copy(words: usize) -> Case {
    let op = Op::Add {
        len: words as u64,
        dtype: Dtype::F32,
    };
    case("elementwise::copy", op, move |inputs| {
        let x = inputs.statistic(&[words], 1.0);
        let y = inputs
            .device
            .empty(TensorClass::Activations, Dtype::F32, &[words]);
        Box::new(move || {
            elementwise::copy(&x, &y);
            vec![Written::new("y", &y)]
        })
    })
}

fn linear(sizes: &Sizes, _dtype: Dtype) -> Vec<Case> {
    let (m, k) = (sizes.tokens, sizes.hidden);
    let n = (sizes.heads + sizes.kv_heads) * sizes.qk_dim + sizes.kv_heads * sizes.v_dim;
    vec![
        dense("qkv", m, n, k),
        case(
            "gemm::dgrad qkv",
            gemm::key(m, k, n, Pass::Dgrad),
            move |inputs| {
                let (dy, w) = (inputs.tensor(&[m, n], 1.0), inputs.tensor(&[n, k], 0.02));
                Box::new(move || vec![Written::new("dx", &gemm::dgrad(&dy, &w))])
            },
        ),
        case(
            "gemm::wgrad qkv",
            gemm::key(n, k, m, Pass::Wgrad),
            move |inputs| {
                let (dy, x) = (inputs.tensor(&[m, n], 1.0), inputs.tensor(&[m, k], 1.0));
                let dw = inputs.statistic(&[n, k], 1.0);
                Box::new(move || {
                    gemm::wgrad(&dy, &x, &dw);
                    vec![Written::new("dw", &dw)]
                })
            },
        ),
        case(
            "gemm router logits",
            gemm::key(m, sizes.experts, k, Pass::Forward),
            {
                let experts = sizes.experts;
                move |inputs| {
                    let x = inputs.tensor(&[m, k], 1.0);
                    let w = inputs.tensor(&[experts, k], 0.02);
                    let logits = inputs.statistic(&[m, experts], 0.0);
                    Box::new(move || {
                        gemm(&x, Trans::No, &w, Trans::Yes, &logits, 0.0);
                        vec![Written::new("logits", &logits)]
                    })
                }
            },
        ),
    ]
}

/// Rows of each expert: equal but for a remainder, or falling as 1, 1/2, 1/3 with the last empty.
fn counts(rows: usize, experts: usize, skewed: bool) -> Vec<usize> {
    let weight = |e: usize| match skewed {
        true if e + 1 == experts => 0.0,
        true => 1.0 / (e + 1) as f64,
        false => 1.0,
    };
    let total: f64 = (0..experts).map(weight).sum();
    let mut counts: Vec<usize> = (0..experts)
        .map(|e| (rows as f64 * weight(e) / total) as usize)
        .collect();
    counts[0] += rows - counts.iter().sum::<usize>();
    counts
}

fn experts(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (e, rows) = (sizes.experts, sizes.tokens * sizes.topk);
    let mut all = Vec::new();
    for skewed in [false, true] {
        let counts = Rc::new(counts(rows, e, skewed));
        let load = if skewed { "skewed" } else { "even" };
        for (name, n, k) in [
            ("fc1", 2 * sizes.width, sizes.hidden),
            ("fc2", sizes.hidden, sizes.width),
        ] {
            let key = |pass| Op::GroupedGemm {
                groups: e as u64,
                rows: rows as u64,
                n: n as u64,
                k: k as u64,
                pass,
                dtype,
            };
            let of = Rc::clone(&counts);
            all.push(case(
                format!("grouped_gemm::forward {name} {load}"),
                key(Pass::Forward),
                move |inputs| {
                    let x = inputs.tensor(&[rows, k], 1.0);
                    let w = inputs.tensor(&[e, n, k], 0.02);
                    let of = Rc::clone(&of);
                    Box::new(move || vec![Written::new("y", &grouped_gemm::forward(&x, &w, &of))])
                },
            ));
            let of = Rc::clone(&counts);
            all.push(case(
                format!("grouped_gemm::dgrad {name} {load}"),
                key(Pass::Dgrad),
                move |inputs| {
                    let dy = inputs.tensor(&[rows, n], 1.0);
                    let w = inputs.tensor(&[e, n, k], 0.02);
                    let of = Rc::clone(&of);
                    Box::new(move || vec![Written::new("dx", &grouped_gemm::dgrad(&dy, &w, &of))])
                },
            ));
            let of = Rc::clone(&counts);
            all.push(case(
                format!("grouped_gemm::wgrad {name} {load}"),
                key(Pass::Wgrad),
                move |inputs| {
                    let dy = inputs.tensor(&[rows, n], 1.0);
                    let x = inputs.tensor(&[rows, k], 1.0);
                    let dw = inputs.statistic(&[e, n, k], 1.0);
                    let of = Rc::clone(&of);
                    Box::new(move || {
                        grouped_gemm::wgrad(&dy, &x, &of, &dw);
                        vec![Written::new("dw", &dw)]
                    })
                },
            ));
        }
    }
    all
}

fn activation(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let rows = sizes.tokens * sizes.topk;
    let f = sizes.width;
    let swiglu_op = |pass| Op::Swiglu {
        rows: rows as u64,
        dim: f as u64,
        pass,
        dtype,
    };
    vec![
        case("swiglu::forward", swiglu_op(Pass::Forward), move |inputs| {
            let x = inputs.tensor(&[rows, 2 * f], 2.0);
            let probs = inputs.statistic(&[rows], 1.0);
            Box::new(move || {
                vec![Written::new(
                    "y",
                    &swiglu::forward(&x, Some(&probs), &Rule::SWIGLU),
                )]
            })
        }),
        case(
            "swiglu::backward",
            swiglu_op(Pass::Backward),
            move |inputs| {
                let x = inputs.tensor(&[rows, 2 * f], 2.0);
                let dy = inputs.tensor(&[rows, f], 1.0);
                let probs = inputs.statistic(&[rows], 1.0);
                Box::new(move || {
                    let (dx, dprobs) = swiglu::backward(&dy, &x, Some(&probs), &Rule::SWIGLU);
                    let dprobs = dprobs.expect("probabilities were given");
                    vec![Written::new("dx", &dx), Written::new("dprobs", &dprobs)]
                })
            },
        ),
        case(
            "swiglu::forward clamped, interleaved",
            swiglu_op(Pass::Forward),
            move |inputs| {
                let x = inputs.tensor(&[rows, 2 * f], 5.0);
                Box::new(move || {
                    let y = swiglu::forward(&x, None, &Rule::GPT_OSS);
                    vec![Written::new("y", &y)]
                })
            },
        ),
        case(
            "swiglu::backward clamped, interleaved",
            swiglu_op(Pass::Backward),
            move |inputs| {
                let x = inputs.tensor(&[rows, 2 * f], 5.0);
                let dy = inputs.tensor(&[rows, f], 1.0);
                Box::new(move || {
                    let (dx, _) = swiglu::backward(&dy, &x, None, &Rule::GPT_OSS);
                    vec![Written::new("dx", &dx)]
                })
            },
        ),
    ]
}

fn rule() -> RouterRule {
    RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: true,
        scale: 1.0,
        groups: None,
    }
}

fn routing(sizes: &Sizes) -> Vec<Case> {
    let (t, e, topk) = (sizes.tokens, sizes.experts, sizes.topk);
    let router_op = |pass| Op::Router {
        rows: t as u64,
        experts: e as u64,
        topk: topk as u64,
        pass,
    };
    vec![
        case("router::forward", router_op(Pass::Forward), move |inputs| {
            let logits = inputs.statistic(&[t, e], 2.0);
            Box::new(move || {
                let routing = router::forward(&logits, topk, &rule(), None);
                vec![
                    Written::new("ids", &routing.ids),
                    Written::new("probs", &routing.probs),
                    Written::new("scores", &routing.scores),
                ]
            })
        }),
        case(
            "router::forward_with_stats",
            router_op(Pass::Forward),
            move |inputs| {
                let logits = inputs.statistic(&[t, e], 2.0);
                Box::new(move || {
                    let (routing, stats) = router::forward_with_stats(&logits, topk, &rule(), None);
                    vec![
                        Written::new("probs", &routing.probs),
                        Written::new("scores", &stats.score_sums),
                        Written::new("counts", &stats.counts),
                    ]
                })
            },
        ),
        case(
            "router::backward",
            router_op(Pass::Backward),
            move |inputs| {
                let logits = inputs.statistic(&[t, e], 2.0);
                let dprobs = inputs.statistic(&[t, topk], 1.0);
                let routing = router::forward(&logits, topk, &rule(), None);
                Box::new(move || {
                    let dlogits = router::backward(&dprobs, &routing, &rule(), None);
                    vec![Written::new("dlogits", &dlogits)]
                })
            },
        ),
        deepseek_v3_choice(t),
        case(
            "router::backward sigmoid, balanced",
            router_op(Pass::Backward),
            move |inputs| {
                let rule = RouterRule {
                    score: Score::Sigmoid,
                    ..rule()
                };
                let logits = inputs.statistic(&[t, e], 2.0);
                let dprobs = inputs.statistic(&[t, topk], 1.0);
                let dshares = inputs.statistic(&[t, e], 1.0);
                let routing = router::forward(&logits, topk, &rule, None);
                Box::new(move || {
                    let dlogits = router::backward(&dprobs, &routing, &rule, Some(&dshares));
                    vec![Written::new("dlogits", &dlogits)]
                })
            },
        ),
    ]
}

/// The router of DeepSeek-V3. Scores differ in their last bits from device to device, and so may the
/// order of two that are all but equal; probabilities do not feel it.
fn deepseek_v3_choice(tokens: usize) -> Case {
    const EXPERTS: usize = 256;
    const TOPK: usize = 8;
    let op = Op::Router {
        rows: tokens as u64,
        experts: EXPERTS as u64,
        topk: TOPK as u64,
        pass: Pass::Forward,
    };
    case("router::forward sigmoid, bias, groups", op, move |inputs| {
        let rule = RouterRule {
            score: Score::Sigmoid,
            normalize: true,
            scale: 2.5,
            groups: Some(Groups {
                groups: 8,
                topk: 4,
                scored_by: 2,
            }),
        };
        let logits = inputs.statistic(&[tokens, EXPERTS], 2.0);
        let bias = inputs.statistic(&[EXPERTS], 0.1);
        Box::new(move || {
            let routing = router::forward(&logits, TOPK, &rule, Some(&bias));
            vec![
                Written::new("probs", &routing.probs),
                Written::new("scores", &routing.scores),
            ]
        })
    })
}

fn permutation(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, e, topk, h) = (sizes.tokens, sizes.experts, sizes.topk, sizes.hidden);
    let rows = t * topk;
    let permute_op = |pass| Op::Permute {
        rows: rows as u64,
        dim: h as u64,
        pass,
        dtype,
    };
    let unpermute_op = |pass| Op::Unpermute {
        rows: rows as u64,
        dim: h as u64,
        pass,
        dtype,
    };
    let map = move |inputs: &mut Inputs<'_>| -> RowMap {
        let logits = inputs.statistic(&[t, e], 2.0);
        permute::map(&router::forward(&logits, topk, &rule(), None).ids, e)
    };
    vec![
        case("permute::map", permute_op(Pass::Forward), move |inputs| {
            let logits = inputs.statistic(&[t, e], 2.0);
            let ids = router::forward(&logits, topk, &rule(), None).ids;
            Box::new(move || {
                let map = permute::map(&ids, e);
                vec![
                    Written::new("row_of_slot", &map.row_of),
                    Written::new("slot_of_row", &map.slot_of),
                    Written::new("token_of_row", &map.token_of),
                    Written::new("offsets", &map.offsets),
                ]
            })
        }),
        case(
            "permute::forward",
            permute_op(Pass::Forward),
            move |inputs| {
                let (map, x) = (map(inputs), inputs.tensor(&[t, h], 1.0));
                Box::new(move || vec![Written::new("y", &permute::forward(&x, &map))])
            },
        ),
        case(
            "permute::backward",
            permute_op(Pass::Backward),
            move |inputs| {
                let (map, dy) = (map(inputs), inputs.tensor(&[rows, h], 1.0));
                Box::new(move || vec![Written::new("dx", &permute::backward(&dy, &map))])
            },
        ),
        case(
            "permute::unpermute weighted",
            unpermute_op(Pass::Forward),
            move |inputs| {
                let (map, y) = (map(inputs), inputs.tensor(&[rows, h], 1.0));
                let weights = inputs.statistic(&[t, topk], 1.0);
                Box::new(move || {
                    let x = permute::unpermute(&y, &map, Some(&weights));
                    vec![Written::new("x", &x)]
                })
            },
        ),
        case(
            "permute::unpermute_weighted_backward",
            unpermute_op(Pass::Backward),
            move |inputs| {
                let (map, y) = (map(inputs), inputs.tensor(&[rows, h], 1.0));
                let dx = inputs.tensor(&[t, h], 1.0);
                let weights = inputs.statistic(&[t, topk], 1.0);
                Box::new(move || {
                    let (dy, dweights) =
                        permute::unpermute_weighted_backward(&dx, &map, &y, &weights);
                    vec![Written::new("dy", &dy), Written::new("dweights", &dweights)]
                })
            },
        ),
        case("rows::gather", permute_op(Pass::Forward), move |inputs| {
            let x = inputs.tensor(&[t, h], 1.0);
            let index = inputs.ids(&[rows], t);
            Box::new(move || vec![Written::new("y", &rows::gather(&x, &index))])
        }),
    ]
}

fn attention_core(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let Sizes {
        tokens: t,
        seqs,
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        ..
    } = *sizes;
    let scale = 1.0 / (qk_dim as f32).sqrt();
    let op = |pass| Op::Attention {
        batch: seqs as u64,
        heads: heads as u64,
        kv_heads: kv_heads as u64,
        q_len: (t / seqs) as u64,
        kv_len: (t / seqs) as u64,
        qk_dim: qk_dim as u64,
        v_dim: v_dim as u64,
        causal: true,
        pass,
        dtype,
    };
    let qkv = move |inputs: &mut Inputs<'_>| -> [Tensor; 3] {
        [
            inputs.tensor(&[t, heads, qk_dim], 1.0),
            inputs.tensor(&[t, kv_heads, qk_dim], 1.0),
            inputs.tensor(&[t, kv_heads, v_dim], 1.0),
        ]
    };
    vec![
        case("attention::forward", op(Pass::Forward), move |inputs| {
            let [q, k, v] = qkv(inputs);
            Box::new(move || {
                let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
                vec![Written::new("o", &o), Written::new("lse", &lse)]
            })
        }),
        case("attention::backward", op(Pass::Backward), move |inputs| {
            let [q, k, v] = qkv(inputs);
            let d_o = inputs.tensor(&[t, heads, v_dim], 1.0);
            let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
            Box::new(move || {
                let (dq, dk, dv) = attention::backward(&d_o, &q, &k, &v, &o, &lse, seqs, scale);
                vec![
                    Written::new("dq", &dq),
                    Written::new("dk", &dk),
                    Written::new("dv", &dv),
                ]
            })
        }),
        case(
            "rope::forward",
            Op::Rope {
                rows: (t * heads) as u64,
                dim: qk_dim as u64,
                pass: Pass::Forward,
                dtype,
            },
            move |inputs| {
                let x = inputs.tensor(&[t, heads, qk_dim], 1.0);
                let positions: Vec<u32> = (0..t as u32).collect();
                let table = rope::table(inputs.device, &positions, qk_dim, 1e6);
                Box::new(move || {
                    rope::forward(&x, &table);
                    vec![Written::new("x", &x)]
                })
            },
        ),
    ]
}

fn norms(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let norm = |pass, rows: usize, dim: usize| Op::RmsNorm {
        rows: rows as u64,
        dim: dim as u64,
        pass,
        dtype,
    };
    let heads = sizes.tokens * sizes.heads;
    let shapes = [
        ("hidden", sizes.tokens, sizes.hidden),
        ("head", heads, sizes.qk_dim),
    ];
    let mut all = Vec::new();
    for (name, rows, dim) in shapes {
        all.push(case(
            format!("rms_norm::forward {name}"),
            norm(Pass::Forward, rows, dim),
            move |inputs| {
                let (x, w) = (inputs.tensor(&[rows, dim], 1.0), inputs.tensor(&[dim], 1.0));
                Box::new(move || {
                    let (y, rstd) = rms_norm::forward(&x, &w, 1e-6);
                    vec![Written::new("y", &y), Written::new("rstd", &rstd)]
                })
            },
        ));
        all.push(case(
            format!("rms_norm::backward {name}"),
            norm(Pass::Backward, rows, dim),
            move |inputs| {
                let (x, w) = (inputs.tensor(&[rows, dim], 1.0), inputs.tensor(&[dim], 1.0));
                let (dy, dw) = (
                    inputs.tensor(&[rows, dim], 1.0),
                    inputs.statistic(&[dim], 1.0),
                );
                let (_, rstd) = rms_norm::forward(&x, &w, 1e-6);
                Box::new(move || {
                    let dx = rms_norm::backward(&dy, &x, &w, &rstd, &dw);
                    vec![Written::new("dx", &dx), Written::new("dw", &dw)]
                })
            },
        ));
    }
    all
}

fn head(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h, vocab) = (sizes.tokens, sizes.hidden, sizes.vocab);
    let cross = |pass| Op::CrossEntropy {
        rows: t as u64,
        vocab: vocab as u64,
        pass,
        dtype,
    };
    let embed = |pass| Op::Embedding {
        rows: t as u64,
        dim: h as u64,
        pass,
        dtype,
    };
    vec![
        case(
            "cross_entropy::sum_exp_and_target",
            cross(Pass::Forward),
            move |inputs| {
                let logits = inputs.tensor(&[t, vocab], 4.0);
                let targets = inputs.ids(&[t], vocab);
                Box::new(move || {
                    let top = cross_entropy::row_max(&logits);
                    let (sum_exp, target) =
                        cross_entropy::sum_exp_and_target(&logits, &top, &targets, 0);
                    vec![
                        Written::new("top", &top),
                        Written::new("sum_exp", &sum_exp),
                        Written::new("target", &target),
                    ]
                })
            },
        ),
        case(
            "cross_entropy::finish",
            cross(Pass::Backward),
            move |inputs| {
                let logits = inputs.tensor(&[t, vocab], 4.0);
                let targets = inputs.ids(&[t], vocab);
                let top = cross_entropy::row_max(&logits);
                let (sum_exp, target) =
                    cross_entropy::sum_exp_and_target(&logits, &top, &targets, 0);
                Box::new(move || {
                    let reduced = cross_entropy::Reduced {
                        top: &top,
                        sum_exp: &sum_exp,
                        target: &target,
                    };
                    let loss = cross_entropy::finish(&logits, reduced, &targets, 0, 1.0);
                    vec![
                        Written::new("loss", &loss),
                        Written::new("dlogits", &logits),
                    ]
                })
            },
        ),
        case("embedding::forward", embed(Pass::Forward), move |inputs| {
            let (ids, table) = (inputs.ids(&[t], vocab), inputs.tensor(&[vocab, h], 1.0));
            Box::new(move || vec![Written::new("y", &embedding::forward(&ids, &table, 0))])
        }),
        case(
            "embedding::backward",
            embed(Pass::Backward),
            move |inputs| {
                let (ids, dy) = (inputs.ids(&[t], vocab), inputs.tensor(&[t, h], 1.0));
                let dtable = inputs.statistic(&[vocab, h], 1.0);
                Box::new(move || {
                    embedding::backward(&dy, &ids, &dtable, 0);
                    vec![Written::new("dtable", &dtable)]
                })
            },
        ),
    ]
}

fn pointwise(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h) = (sizes.tokens, sizes.hidden);
    let len = sizes.hidden * sizes.width;
    let on = |len: usize, dtype| Op::Add {
        len: len as u64,
        dtype,
    };
    let copies = Op::Permute {
        rows: t as u64,
        dim: h as u64,
        pass: Pass::Forward,
        dtype,
    };
    let step = Op::Adamw {
        len: len as u64,
        dtype: Dtype::F32,
    };
    vec![
        case("elementwise::add", on(t * h, dtype), move |inputs| {
            let (a, b) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            Box::new(move || vec![Written::new("sum", &elementwise::add(&a, &b))])
        }),
        case("elementwise::axpy", on(t * h, dtype), move |inputs| {
            let (x, y) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            Box::new(move || {
                elementwise::axpy(0.5, &x, &y);
                vec![Written::new("y", &y)]
            })
        }),
        case("reduce::sum_ordered", on(t * h, dtype), move |inputs| {
            let (a, b) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            let sum = inputs.tensor(&[t, h], 0.0);
            Box::new(move || {
                reduce::sum_ordered(&[&a, &b], &sum);
                vec![Written::new("sum", &sum)]
            })
        }),
        case("reduce::copy_all", copies, move |inputs| {
            let (src, dst) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 0.0));
            let cut = t / 3;
            Box::new(move || {
                let parts = |x: &Tensor, at| [x.rows(0..at), x.rows(at..t)];
                let [[first, rest], [front, back]] = [parts(&src, cut), parts(&dst, t - cut)];
                reduce::copy_all(&[(&first, &back), (&rest, &front)]);
                vec![Written::new("copies", &dst)]
            })
        }),
        case("adamw::step", step, {
            move |inputs| {
                let [w, g, m] = [1.0, 0.1, 0.1].map(|scale| inputs.statistic(&[len], scale));
                let v = inputs.statistic(&[len], 0.0);
                let rule = || adamw::Adamw {
                    lr: 1e-3,
                    beta1: 0.9,
                    beta2: 0.95,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step: 3,
                };
                Box::new(move || {
                    adamw::step(&w, &g, &m, &v, &rule(), 0.5);
                    vec![
                        Written::new("weights", &w),
                        Written::new("m", &m),
                        Written::new("v", &v),
                    ]
                })
            }
        }),
        case(
            "grad_norm::sum_squares",
            Op::GradNorm { len: len as u64 },
            move |inputs| {
                let g = inputs.statistic(&[len], 1.0);
                Box::new(move || {
                    vec![Written::host(
                        "sum of squares",
                        vec![grad_norm::sum_squares(&g)],
                    )]
                })
            },
        ),
    ]
}
