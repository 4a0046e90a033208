//! Tests of `cross_entropy` against its f64 twin in plain loops.

use super::*;
use crate::elementwise::add_into;
use crate::testing::{Check, differences, integers, oracle, tensor, wide};

fn twin(logits: &[f64], target: i32) -> f64 {
    if target < 0 {
        return 0.0;
    }
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|x| (x - top).exp()).sum();
    total.ln() + top - logits[target as usize]
}

/// The vocabulary is split over one to three shards whose steps are reduced as a group would.
#[test]
fn oracle_loss_and_gradient_over_shards() {
    oracle(25, |device, rng| {
        let (tokens, shards, width) = (rng.size(1..=20), rng.size(1..=3), rng.size(1..=40));
        let vocab = shards * width;
        let spread = [1.0, 30.0][rng.size(0..=1)];
        let logits: Vec<f32> = rng
            .values(tokens * vocab)
            .iter()
            .map(|x| x * spread)
            .collect();
        let mut targets = rng.ids(tokens, vocab);
        if rng.coin() {
            targets[0] = -1;
        }
        let scale = 0.25;
        let rows = || logits.chunks(vocab).zip(&targets);
        let losses_want = rows().map(|(x, &t)| twin(&wide(x), t)).collect();
        let gradient_want: Vec<f64> = rows()
            .flat_map(|(x, &t)| differences(x, |x| f64::from(scale) * twin(x, t)))
            .collect();

        let targets = integers(device, &targets, &[tokens]);
        let pieces: Vec<Tensor> = (0..shards)
            .map(|s| {
                let columns: Vec<f32> = logits
                    .chunks(vocab)
                    .flat_map(|row| row[s * width..(s + 1) * width].to_vec())
                    .collect();
                tensor(device, &columns, &[tokens, width])
            })
            .collect();
        let mut top = vec![f32::NEG_INFINITY; tokens];
        for piece in &pieces {
            for (top, x) in top.iter_mut().zip(row_max(piece).to_f32()) {
                *top = top.max(x);
            }
        }
        let top = tensor(device, &top, &[tokens]);
        let (sum_exp, target) = sum_exp_and_target(&pieces[0], &top, &targets, 0);
        for (s, piece) in pieces.iter().enumerate().skip(1) {
            let (more_exp, more_target) = sum_exp_and_target(piece, &top, &targets, s * width);
            add_into(&sum_exp, &more_exp);
            add_into(&target, &more_target);
        }
        let reduced = Reduced {
            top: &top,
            sum_exp: &sum_exp,
            target: &target,
        };
        let mut losses = None;
        let gradient = tensor(device, &vec![0.0; tokens * vocab], &[tokens, vocab]);
        for (s, piece) in pieces.iter().enumerate() {
            losses = Some(finish(piece, reduced, &targets, s * width, scale));
            crate::rows::scatter_columns(piece, &gradient, s * width..(s + 1) * width);
        }
        let losses = losses.expect("there is a shard");
        vec![
            Check("losses", losses, losses_want),
            Check("gradient", gradient, gradient_want),
        ]
    });
}
