//! What happens between the router's logits and the experts, and inside of experts.

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

use super::{Sizes, case, keyed};
use crate::cases::{Load, SOFTMAX_THEN_TOPK, Source as _};
use crate::check::{Case, Inputs, Written};
use crate::grouped_gemm::Rows;
use crate::permute::{self, Room, RowMap};
use crate::router::{self, Groups, RouterRule, Score};
use crate::swiglu::{self, Rule};
use crate::{expert_bias, gate, z_loss};

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = activation(sizes, dtype);
    all.extend(routing(sizes));
    all.extend(permutation(sizes, dtype));
    all.extend(unpermutation(sizes, dtype));
    all.extend(slots(sizes));
    all.extend(gates(sizes, dtype));
    all.push(biases(sizes, dtype));
    all.push(z_loss(sizes));
    all
}

/// The z-loss and its gradient.
fn z_loss(sizes: &Sizes) -> Case {
    let (t, e) = (sizes.tokens, sizes.experts);
    let op = Op::Sweep {
        kind: SweepKind::SumExp,
        len: (t * e) as u64,
        dtype: Dtype::F32,
    };
    case("z_loss::forward, z_loss::backward", op, move |inputs| {
        let [logits, dlogits] = [(); 2].map(|()| inputs.statistic(&[t, e], 2.0));
        Box::new(move || {
            let z = z_loss::forward(&logits);
            z_loss::backward(&logits, &z, 0.25, &dlogits);
            vec![Written::new("z", &z), Written::new("dlogits", &dlogits)]
        })
    })
}

/// A shared expert's output behind its gate.
fn gates(sizes: &Sizes, dtype: Dtype) -> [Case; 2] {
    let (t, h) = (sizes.tokens, sizes.hidden);
    let op = Op::Sweep {
        kind: SweepKind::Gate,
        len: (t * h) as u64,
        dtype,
    };
    [
        case("gate::add", op, move |inputs| {
            let [x, y] = [(); 2].map(|()| inputs.tensor(&[t, h], 1.0));
            let logits = inputs.statistic(&[t, 1], 2.0);
            Box::new(move || {
                gate::add(&x, &logits, &y);
                vec![Written::new("y", &y)]
            })
        }),
        case("gate::backward", op, move |inputs| {
            let [x, dy] = [(); 2].map(|()| inputs.tensor(&[t, h], 1.0));
            let logits = inputs.statistic(&[t, 1], 2.0);
            Box::new(move || {
                let (dx, dlogits) = gate::backward(&dy, &x, &logits);
                vec![Written::new("dx", &dx), Written::new("dlogits", &dlogits)]
            })
        }),
    ]
}

/// Biases of experts, behind probabilities, and all of their gradients.
fn biases(sizes: &Sizes, dtype: Dtype) -> Case {
    let (rows, h, experts) = (sizes.tokens * sizes.topk, sizes.hidden, sizes.experts);
    let op = Op::Sweep {
        kind: SweepKind::ExpertBias,
        len: (rows * h) as u64,
        dtype,
    };
    case("expert_bias::add, grad, grad_probs", op, move |inputs| {
        let counts = Load::Skewed.counts(rows, experts);
        let [y, dy] = [(); 2].map(|()| inputs.tensor(&[rows, h], 1.0));
        let bias = inputs.tensor(&[experts, h], 1.0);
        let probs = inputs.statistic(&[rows], 1.0);
        let dbias = inputs.statistic(&[experts, h], 1.0);
        Box::new(move || {
            let of = Rows::Counts(&counts);
            expert_bias::add(&y, &bias, Some(&probs), of);
            expert_bias::grad(&dy, Some(&probs), of, &dbias);
            let dprobs = expert_bias::grad_probs(&dy, &bias, of);
            vec![
                Written::new("y", &y),
                Written::new("dbias", &dbias),
                Written::new("dprobs", &dprobs),
            ]
        })
    })
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
        keyed("swiglu::forward", swiglu_op(Pass::Forward)),
        keyed("swiglu::backward", swiglu_op(Pass::Backward)),
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

fn routing(sizes: &Sizes) -> Vec<Case> {
    let (t, e, topk) = (sizes.tokens, sizes.experts, sizes.topk);
    let router_op = |pass| Op::Router {
        rows: t as u64,
        experts: e as u64,
        topk: topk as u64,
        pass,
    };
    vec![
        keyed("router::forward", router_op(Pass::Forward)),
        case(
            "router::forward_with_stats",
            router_op(Pass::Forward),
            move |inputs| {
                let logits = inputs.statistic(&[t, e], 2.0);
                Box::new(move || {
                    let (routing, stats) = router::forward_with_stats(
                        &logits,
                        topk,
                        &SOFTMAX_THEN_TOPK,
                        None,
                        &[0..t / 3, t / 3..t],
                    );
                    vec![
                        Written::new("probs", &routing.probs),
                        Written::new("scores", &stats.score_sums),
                        Written::new("counts", &stats.counts),
                    ]
                })
            },
        ),
        keyed("router::backward", router_op(Pass::Backward)),
        deepseek_v3_choice(t),
        case(
            "router::backward sigmoid, balanced",
            router_op(Pass::Backward),
            move |inputs| {
                let rule = RouterRule {
                    score: Score::Sigmoid,
                    ..SOFTMAX_THEN_TOPK
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
        case(
            "router::backward_of_parts",
            router_op(Pass::Backward),
            move |inputs| {
                let logits = inputs.statistic(&[t, e], 2.0);
                let dprobs = inputs.statistic(&[t, topk], 1.0);
                let dshares = inputs.statistic(&[2, e], 1.0);
                let rule = &SOFTMAX_THEN_TOPK;
                let routing = router::forward(&logits, topk, rule, None);
                Box::new(move || {
                    let parts = [0..t / 3, t / 3..t];
                    let dlogits =
                        router::backward_of_parts(&dprobs, &routing, rule, &dshares, &parts);
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

/// How rows go to experts, as the device's router has it.
fn map(inputs: &mut Inputs<'_>, sizes: [usize; 3]) -> RowMap {
    let [t, e, topk] = sizes;
    let logits = inputs.statistic(&[t, e], 2.0);
    permute::map(
        &router::forward(&logits, topk, &SOFTMAX_THEN_TOPK, None).ids,
        e,
    )
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
    vec![
        case("permute::map", permute_op(Pass::Forward), move |inputs| {
            let logits = inputs.statistic(&[t, e], 2.0);
            let ids = router::forward(&logits, topk, &SOFTMAX_THEN_TOPK, None).ids;
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
        case("permute::limit", permute_op(Pass::Forward), move |inputs| {
            let logits = inputs.statistic(&[t, e], 2.0);
            let routing = router::forward(&logits, topk, &SOFTMAX_THEN_TOPK, None);
            let all = permute::map(&routing.ids, e);
            let capacity = (t * topk).div_ceil(e);
            Box::new(move || {
                let (ids, probs) = (&routing.ids, Some(&routing.probs));
                let kept = permute::limit(ids, &all, capacity, probs);
                let map = permute::map_of(&kept, 0..e, Room::Each(capacity));
                vec![
                    Written::new("kept", &kept),
                    Written::new("slot_of_row", &map.slot_of),
                    Written::new("offsets", &map.offsets),
                ]
            })
        }),
        case(
            "permute::forward",
            permute_op(Pass::Forward),
            move |inputs| {
                let (map, x) = (map(inputs, [t, e, topk]), inputs.tensor(&[t, h], 1.0));
                Box::new(move || vec![Written::new("y", &permute::forward(&x, &map))])
            },
        ),
        case(
            "permute::backward",
            permute_op(Pass::Backward),
            move |inputs| {
                let (map, dy) = (map(inputs, [t, e, topk]), inputs.tensor(&[rows, h], 1.0));
                Box::new(move || vec![Written::new("dx", &permute::backward(&dy, &map))])
            },
        ),
    ]
}

fn unpermutation(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, e, topk, h) = (sizes.tokens, sizes.experts, sizes.topk, sizes.hidden);
    let rows = t * topk;
    let unpermute_op = |pass| Op::Unpermute {
        rows: rows as u64,
        dim: h as u64,
        pass,
        dtype,
    };
    vec![
        case(
            "permute::unpermute weighted",
            unpermute_op(Pass::Forward),
            move |inputs| {
                let (map, y) = (map(inputs, [t, e, topk]), inputs.tensor(&[rows, h], 1.0));
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
                let (map, y) = (map(inputs, [t, e, topk]), inputs.tensor(&[rows, h], 1.0));
                let dx = inputs.tensor(&[t, h], 1.0);
                let weights = inputs.statistic(&[t, topk], 1.0);
                Box::new(move || {
                    let (dy, dweights) =
                        permute::unpermute_weighted_backward(&dx, &map, &y, &weights);
                    vec![Written::new("dy", &dy), Written::new("dweights", &dweights)]
                })
            },
        ),
        case(
            "permute::unpermute",
            unpermute_op(Pass::Forward),
            move |inputs| {
                let (map, y) = (map(inputs, [t, e, topk]), inputs.tensor(&[rows, h], 1.0));
                Box::new(move || vec![Written::new("x", &permute::unpermute(&y, &map, None))])
            },
        ),
        case(
            "permute::unpermute_backward",
            unpermute_op(Pass::Backward),
            move |inputs| {
                let (map, dx) = (map(inputs, [t, e, topk]), inputs.tensor(&[t, h], 1.0));
                Box::new(move || vec![Written::new("dy", &permute::unpermute_backward(&dx, &map))])
            },
        ),
    ]
}

/// One number a slot, which travels with its row.
fn slots(sizes: &Sizes) -> Vec<Case> {
    let (t, e, topk) = (sizes.tokens, sizes.experts, sizes.topk);
    let rows = t * topk;
    let slots_op = Op::Permute {
        rows: rows as u64,
        dim: 1,
        pass: Pass::Forward,
        dtype: Dtype::F32,
    };
    vec![
        case("permute::permute_slots", slots_op, move |inputs| {
            let (map, values) = (map(inputs, [t, e, topk]), inputs.statistic(&[t, topk], 1.0));
            Box::new(move || vec![Written::new("rows", &permute::permute_slots(&values, &map))])
        }),
        case("permute::unpermute_slots", slots_op, move |inputs| {
            let (map, values) = (map(inputs, [t, e, topk]), inputs.statistic(&[rows], 1.0));
            Box::new(move || {
                vec![Written::new(
                    "slots",
                    &permute::unpermute_slots(&values, &map),
                )]
            })
        }),
    ]
}
