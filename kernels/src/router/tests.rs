//! Tests of `router` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, differences, inner, integers, oracle, tensor, wide};

const RULES: [RouterRule; 4] = [
    RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: false,
        scale: 1.0,
    },
    RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: true,
        scale: 2.5,
    },
    RouterRule {
        score: Score::TopkThenSoftmax,
        normalize: false,
        scale: 1.0,
    },
    RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: false,
        scale: 0.5,
    },
];

/// One token: `(ids, probs, scores)`.
fn twin(logits: &[f64], topk: usize, rule: RouterRule) -> (Vec<usize>, Vec<f64>, Vec<f64>) {
    let softmax = |x: &[f64]| -> Vec<f64> {
        let total: f64 = x.iter().map(|x| x.exp()).sum();
        x.iter().map(|x| x.exp() / total).collect()
    };
    let scores = softmax(logits);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let ids = order[..topk].to_vec();
    let mut probs: Vec<f64> = match rule.score {
        Score::SoftmaxThenTopk => ids.iter().map(|&i| scores[i]).collect(),
        Score::TopkThenSoftmax => softmax(&ids.iter().map(|&i| logits[i]).collect::<Vec<_>>()),
    };
    let total: f64 = if rule.normalize {
        probs.iter().sum()
    } else {
        1.0
    };
    for p in &mut probs {
        *p *= f64::from(rule.scale) / total;
    }
    (ids, probs, scores)
}

#[test]
fn oracle_forward_and_backward() {
    for rule in RULES {
        oracle(15, |device, rng| {
            let (tokens, experts) = (rng.size(1..=40), rng.size(1..=20));
            let topk = rng.size(1..=experts.min(6));
            let logits = rng.values(tokens * experts);
            let dprobs = rng.values(tokens * topk);
            let shared = rng.coin();
            let dscores = if shared {
                rng.values(experts)
            } else {
                rng.values(tokens * experts)
            };
            let with_scores = rng.coin();
            let (mut ids_want, mut probs_want, mut scores_want) = (vec![], vec![], vec![]);
            let mut dlogits_want = vec![];
            for (t, logits) in logits.chunks(experts).enumerate() {
                let (ids, probs, scores) = twin(&wide(logits), topk, rule);
                ids_want.extend(ids.iter().map(|&id| id as i32));
                probs_want.extend(probs);
                scores_want.extend(scores);
                let extra = &dscores[if shared { 0 } else { t * experts }..][..experts];
                dlogits_want.extend(differences(logits, |x| {
                    let (_, probs, scores) = twin(x, topk, rule);
                    let loss = inner(&probs, &dprobs[t * topk..][..topk]);
                    loss + if with_scores {
                        inner(&scores, extra)
                    } else {
                        0.0
                    }
                }));
            }
            let logits = tensor(device, &logits, &[tokens, experts]);
            let routing = forward(&logits, topk, &rule);
            assert_eq!(routing.ids.to_i32(), ids_want);
            let dprobs = tensor(device, &dprobs, &[tokens, topk]);
            let dims: &[usize] = if shared {
                &[experts]
            } else {
                &[tokens, experts]
            };
            let dscores = with_scores.then(|| tensor(device, &dscores, dims));
            let dlogits = backward(&dprobs, &routing, &rule, dscores.as_ref());
            let stats = stats(&routing);
            let sums = (0..experts)
                .map(|e| scores_want.iter().skip(e).step_by(experts).sum())
                .collect();
            let mut counts = vec![0; experts];
            for &id in &ids_want {
                counts[id as usize] += 1;
            }
            assert_eq!(stats.counts, counts);
            vec![
                Check("probs", routing.probs, probs_want),
                Check("scores", routing.scores, scores_want),
                Check("dlogits", dlogits, dlogits_want),
                Check("score_sums", stats.score_sums, sums),
            ]
        });
    }
}

#[test]
fn law_equal_logits_go_to_the_lower_index() {
    let device = crate::Device::cpu(1);
    let logits = tensor(&device, &[1.0, 3.0, 3.0, 1.0, 3.0, 0.0, 0.0, 0.0], &[2, 4]);
    let routing = forward(&logits, 2, &RULES[0]);
    let ids = integers(&device, &[1, 2, 0, 1], &[2, 2]);
    assert_eq!(routing.ids.to_i32(), ids.to_i32());
}

/// Chosen experts whose scores all underflow still have probabilities that sum to the scale.
#[test]
fn law_probabilities_survive_extreme_logits() {
    let device = crate::Device::cpu(1);
    let logits = tensor(&device, &[500.0, -500.0, -501.0, 0.0], &[1, 4]);
    for rule in &RULES[1..3] {
        let probs = forward(&logits, 3, rule).probs.to_f32();
        assert!(
            (probs.iter().sum::<f32>() - rule.scale).abs() < 1e-6,
            "{probs:?}"
        );
    }
}
