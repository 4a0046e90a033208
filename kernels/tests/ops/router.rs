//! Tests of `router` against its f64 reference in plain loops.

use moefold_kernels::Device;
use moefold_kernels::router::*;

use crate::support::{
    Check, Rng, assert_bits, differences, inner, integers, oracle_everywhere, statistic, wide,
};

const PLAIN: RouterRule = RouterRule {
    score: Score::SoftmaxThenTopk,
    normalize: false,
    scale: 1.0,
    groups: None,
};

const NORMALIZED: RouterRule = RouterRule {
    normalize: true,
    scale: 2.5,
    ..PLAIN
};

const TOPK_FIRST: RouterRule = RouterRule {
    score: Score::TopkThenSoftmax,
    ..PLAIN
};

/// As DeepSeek-V2.
const BEST_OF_GROUP: RouterRule = RouterRule {
    scale: 16.0,
    groups: Some(Groups {
        groups: 4,
        topk: 2,
        scored_by: 1,
    }),
    ..PLAIN
};

/// As DeepSeek-V3.
const BEST_TWO_OF_GROUP: RouterRule = RouterRule {
    score: Score::Sigmoid,
    groups: Some(Groups {
        groups: 4,
        topk: 3,
        scored_by: 2,
    }),
    ..NORMALIZED
};

/// As Llama 4.
const SIGMOID: RouterRule = RouterRule {
    score: Score::Sigmoid,
    ..PLAIN
};

/// As DeepSeek-V4.
const SQRT_SOFTPLUS: RouterRule = RouterRule {
    score: Score::SqrtSoftplus,
    ..NORMALIZED
};

fn best(values: &[f64], candidates: &[usize], count: usize) -> Vec<usize> {
    let mut order = candidates.to_vec();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

fn scores(logits: &[f64], rule: &RouterRule) -> Vec<f64> {
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: &f64| match rule.score {
        Score::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Score::SqrtSoftplus => (1.0 + x.exp()).ln().sqrt(),
        _ => x.exp() / total,
    };
    logits.iter().map(score).collect()
}

fn choice(logits: &[f64], bias: Option<&[f64]>, topk: usize, rule: &RouterRule) -> Vec<usize> {
    let mut values = scores(logits, rule);
    for (value, bias) in values.iter_mut().zip(bias.unwrap_or_default()) {
        *value += bias;
    }
    let all: Vec<usize> = (0..logits.len()).collect();
    let Some(groups) = rule.groups else {
        return best(&values, &all, topk);
    };
    let size = logits.len() / groups.groups;
    let score = |group: &[f64]| -> f64 {
        let mut sorted = group.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted[..groups.scored_by].iter().sum()
    };
    let group_scores: Vec<f64> = values.chunks(size).map(score).collect();
    let kept = best(&group_scores, &all[..groups.groups], groups.topk);
    let eligible: Vec<usize> = all
        .into_iter()
        .filter(|e| kept.contains(&(e / size)))
        .collect();
    best(&values, &eligible, topk)
}

/// Probabilities of the chosen and shares of all.
fn weights(logits: &[f64], ids: &[usize], rule: &RouterRule) -> (Vec<f64>, Vec<f64>) {
    let scores = scores(logits, rule);
    let whole: f64 = scores.iter().sum();
    let mut probs: Vec<f64> = ids.iter().map(|&id| scores[id]).collect();
    let normalizes = rule.normalize || rule.score == Score::TopkThenSoftmax;
    let total: f64 = if normalizes { probs.iter().sum() } else { 1.0 };
    for p in &mut probs {
        *p *= f64::from(rule.scale) / total;
    }
    (probs, scores.iter().map(|s| s / whole).collect())
}

/// One case: everything forward and backward of `tokens` over `experts`.
fn case(device: &Device, rng: &mut Rng, rule: &RouterRule, experts: usize) -> Vec<Check> {
    let tokens = [0, 1, rng.size(2..=40)][rng.size(0..=2)];
    let groups = |g: Groups| (experts / g.groups) * g.topk;
    let topk = rng.size(1..=rule.groups.map_or(experts, groups).min(9));
    let (logits, dprobs) = (rng.values(tokens * experts), rng.values(tokens * topk));
    let bias = rng.coin().then(|| rng.values(experts));
    let with_shares = rng.coin();
    // The tokens are of two parts, either of which may be empty.
    let cut = rng.size(0..=tokens);
    let part_of = |t: usize| usize::from(t >= cut);
    // The same for all tokens, for those of a part, or for none.
    let rows = [1, 2, tokens][rng.size(0..=2)];
    let row_of = |t: usize| match rows {
        1 => 0,
        2 => part_of(t),
        _ => t,
    };
    let dshares = rng.values(rows * experts);

    let (mut ids_want, mut probs_want, mut scores_want) = (vec![], vec![], vec![]);
    let (mut dlogits_want, both) = (vec![], 2 * experts);
    let (mut sums, mut counts) = (vec![0.0; both], vec![0; both]);
    for (t, logits) in logits.chunks(experts).enumerate() {
        let bias = bias.as_ref().map(|b| wide(b));
        let ids = choice(&wide(logits), bias.as_deref(), topk, rule);
        let (probs, shares) = weights(&wide(logits), &ids, rule);
        let extra = &dshares[row_of(t) * experts..][..experts];
        dlogits_want.extend(differences(logits, |x| {
            let (probs, shares) = weights(x, &ids, rule);
            let extra = if with_shares {
                inner(&shares, extra)
            } else {
                0.0
            };
            inner(&probs, &dprobs[t * topk..][..topk]) + extra
        }));
        for (sum, share) in sums[part_of(t) * experts..].iter_mut().zip(shares) {
            *sum += share;
        }
        for &id in &ids {
            counts[part_of(t) * experts + id] += 1;
        }
        ids_want.extend(ids.iter().map(|&id| id as i32));
        probs_want.extend(probs);
        scores_want.extend(scores(&wide(logits), rule));
    }

    let logits = statistic(device, &logits, &[tokens, experts]);
    let bias = bias.map(|bias| statistic(device, &bias, &[experts]));
    let routing = forward(&logits, topk, rule, bias.as_ref());
    let parts = [0..cut, cut..tokens];
    let (again, stats) = forward_with_stats(&logits, topk, rule, bias.as_ref(), &parts);
    assert_eq!(routing.ids.to_i32(), ids_want);
    assert_eq!(again.ids.to_i32(), ids_want);
    assert_eq!(again.probs.to_f32(), routing.probs.to_f32());
    assert_eq!(stats.counts.to_i32(), counts);
    let dprobs = statistic(device, &dprobs, &[tokens, topk]);
    let dims: &[usize] = match rows {
        1 => &[experts],
        _ => &[rows, experts],
    };
    let dshares = with_shares.then(|| statistic(device, &dshares, dims));
    let dlogits = match &dshares {
        Some(dshares) if rows == 2 => backward_of_parts(&dprobs, &routing, rule, dshares, &parts),
        _ => backward(&dprobs, &routing, rule, dshares.as_ref()),
    };
    vec![
        Check("probs", routing.probs, probs_want),
        Check("scores", routing.scores, scores_want),
        Check("dlogits", dlogits, dlogits_want),
        Check("score_sums", stats.score_sums, sums),
    ]
}

#[test]
fn oracle_softmax() {
    for rule in [PLAIN, NORMALIZED, TOPK_FIRST] {
        oracle_everywhere(8, |device, rng| {
            let experts = [rng.size(1..=20), 4 * rng.size(17..=32)][rng.size(0..=1)];
            case(device, rng, &rule, experts)
        });
    }
}

#[test]
fn oracle_single_scores_and_groups() {
    for rule in [BEST_OF_GROUP, BEST_TWO_OF_GROUP, SIGMOID, SQRT_SOFTPLUS] {
        oracle_everywhere(6, |device, rng| {
            let experts = 4 * rng.size(17..=32);
            case(device, rng, &rule, experts)
        });
    }
}

#[test]
fn oracle_many_experts() {
    for rule in [NORMALIZED, BEST_TWO_OF_GROUP] {
        oracle_everywhere(2, |device, rng| {
            let experts = 4 * rng.size(129..=150);
            case(device, rng, &rule, experts)
        });
    }
}

/// On every device: equal logits, and logits so far apart that most scores underflow.
#[test]
fn oracle_edges() {
    oracle_everywhere(1, |device, _| {
        let equal = [1.0, 3.0, 3.0, 1.0, 3.0, 0.0, -0.0, 0.0];
        let routing = forward(&statistic(device, &equal, &[2, 4]), 2, &PLAIN, None);
        assert_eq!(routing.ids.to_i32(), [1, 2, 0, 1]);

        // Chosen experts whose scores all underflow still have probabilities that sum to the scale.
        let far = statistic(device, &[500.0, -500.0, -501.0, 0.0], &[1, 4]);
        let away = statistic(device, &[-1e9, 0.0, 0.0, -1e9], &[4]);
        for rule in [NORMALIZED, TOPK_FIRST] {
            for bias in [None, Some(&away)] {
                let probs = forward(&far, 2, &rule, bias).probs.to_f32();
                let sum: f32 = probs.iter().sum();
                assert!((sum - rule.scale).abs() < 1e-6, "{bias:?}: {probs:?}");
            }
        }

        // NaN is chosen last, and every choice is an expert's.
        let lost = statistic(
            device,
            &[f32::NAN, f32::NEG_INFINITY, 1.0, f32::NAN],
            &[1, 4],
        );
        assert_eq!(forward(&lost, 4, &SIGMOID, None).ids.to_i32(), [2, 1, 0, 3]);
        Vec::new()
    });
}

/// Whatever the order in which warps and blocks run, statistics have the same bits.
#[test]
fn oracle_statistics_are_the_same_every_time() {
    oracle_everywhere(2, |device, rng| {
        let logits = statistic(device, &rng.values(150 * 68), &[150, 68]);
        let sums = || {
            let whole = std::iter::once(0..150).collect::<Vec<_>>();
            let (_, stats) = forward_with_stats(&logits, 3, &NORMALIZED, None, &whole);
            stats.score_sums.to_f32()
        };
        assert_bits("score_sums", &sums(), &sums(), 0);
        Vec::new()
    });
}

/// Two experts of four choose between themselves alike, whatever the others are like.
#[test]
fn law_ineligible_groups_change_nothing() {
    let device = Device::cpu(1);
    let rule = RouterRule {
        groups: Some(Groups {
            groups: 2,
            topk: 1,
            scored_by: 2,
        }),
        ..NORMALIZED
    };
    let ids = integers(&device, &[3, 2], &[1, 2]);
    for other in [-1.0, -100.0] {
        let logits = statistic(&device, &[0.5, other, 0.4, 0.6], &[1, 4]);
        let routing = forward(&logits, 2, &rule, None);
        assert_eq!(routing.ids.to_i32(), ids.to_i32());
    }
}
