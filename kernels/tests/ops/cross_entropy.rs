//! Tests of `cross_entropy` against its f64 reference in plain loops.

use moefold_kernels::Tensor;
use moefold_kernels::cross_entropy::*;
use moefold_kernels::elementwise::add_into;

use crate::support::{
    Check, differences, inside, integers, oracle_everywhere, statistic, tensor, wide,
};

fn reference(logits: &[f64], target: i32) -> f64 {
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
    oracle_everywhere(16, |device, rng| {
        let (tokens, shards) = (rng.size(0..=12), rng.size(1..=3));
        let width = [1, 7, 8, 33, 100, 700][rng.size(0..=5)];
        let vocab = shards * width;
        let spread = [1.0, 32.0][rng.size(0..=1)];
        let values = rng.values(tokens * vocab);
        let logits: Vec<f32> = values.iter().map(|x| x * spread).collect();
        let mut targets = rng.ids(tokens, vocab);
        if rng.coin() && tokens > 0 {
            targets[0] = -1;
        }
        let scale = 0.25;
        let rows = || logits.chunks(vocab).zip(&targets);
        let losses_want: Vec<f64> = rows().map(|(x, &t)| reference(&wide(x), t)).collect();
        // A loss is the logarithm of a sum less a logit: next to nothing where the target is likely.
        let terms = |(x, &target): (&[f32], &i32)| {
            let logit = x.get(target as usize).map_or(0.0, |&x| f64::from(x));
            (reference(&wide(x), target) + logit).abs() + logit.abs()
        };
        // What differences of the loss say at a tenth of their cost.
        let gradient = |x: &[f32], target: i32| {
            if target < 0 {
                return vec![0.0; vocab];
            }
            let loss = reference(&wide(x), target) + f64::from(x[target as usize]);
            let softmax = |(i, &x): (usize, &f32)| {
                let one = f64::from(u8::from(i == target as usize));
                f64::from(scale) * ((f64::from(x) - loss).exp() - one)
            };
            x.iter().enumerate().map(softmax).collect()
        };

        let on_device = integers(device, &targets, &[tokens]);
        let offset = 8 - rng.size(0..=1);
        let columns = |shard: usize, values: &dyn Fn(usize) -> Vec<f64>| -> Vec<f64> {
            let range = shard * width..(shard + 1) * width;
            let row = |row| values(row)[range.clone()].to_vec();
            (0..tokens).flat_map(row).collect()
        };
        let logit = |row: usize| wide(&logits[row * vocab..(row + 1) * vocab]);
        let pieces: Vec<Tensor> = (0..shards)
            .map(|s| {
                let values: Vec<f32> = columns(s, &logit).iter().map(|&x| x as f32).collect();
                inside(&tensor(device, &values, &[tokens, width]), offset)
            })
            .collect();
        let own: Vec<Statistics> = pieces.iter().map(row_statistics).collect();
        let mut top = vec![f32::NEG_INFINITY; tokens];
        for own in &own {
            for (top, x) in top.iter_mut().zip(own.top.to_f32()) {
                *top = top.max(x);
            }
        }
        let top = statistic(device, &top, &[tokens]);
        let sums = |s: usize| rebase(&pieces[s], &own[s], &top, &on_device, s * width);
        let (sum_exp, target) = sums(0);
        for s in 1..shards {
            let (more_exp, more_target) = sums(s);
            add_into(&sum_exp, &more_exp);
            add_into(&target, &more_target);
        }
        let reduced = Reduced {
            top: &top,
            sum_exp: &sum_exp,
            target: &target,
        };
        let mut checks = Vec::new();
        for (s, piece) in pieces.iter().enumerate() {
            let losses = finish(piece, reduced, &on_device, s * width, scale);
            if s == 0 {
                let want = losses_want.clone();
                checks.push(Check::of_sums("losses", &losses, want, rows().map(terms)));
            }
        }
        let slope = |row: usize| gradient(&logits[row * vocab..(row + 1) * vocab], targets[row]);
        // Of all shards together: a shard may hold next to nothing of the gradient.
        let all: Vec<f32> = pieces.iter().flat_map(Tensor::to_f32).collect();
        let all = tensor(device, &all, &[shards, tokens * width]);
        let want = (0..shards).flat_map(|s| columns(s, &slope)).collect();
        // A likelihood near one less one cancels; of a row it is one of the terms.
        let terms = targets
            .iter()
            .map(|&t| if t < 0 { 0.0 } else { f64::from(scale) });
        checks.push(Check::of_sums("gradient", &all, want, terms));
        checks
    });
}

/// The gradient that [`finish`] leaves is the slope of the reference's loss.
#[test]
fn law_the_gradient_is_the_slope_of_the_loss() {
    let device = moefold_kernels::Device::cpu(1);
    let logits = [0.5f32, -1.0, 2.0, 0.25, 1.5];
    let piece = tensor(&device, &logits, &[1, 5]);
    let targets = integers(&device, &[3], &[1]);
    let own = row_statistics(&piece);
    let (sum_exp, target) = rebase(&piece, &own, &own.top, &targets, 0);
    let reduced = Reduced {
        top: &own.top,
        sum_exp: &sum_exp,
        target: &target,
    };
    finish(&piece, reduced, &targets, 0, 1.0);
    let want = differences(&logits, |x| reference(x, 3));
    assert!(crate::support::error(&piece.to_f32(), &want) < 1e-6);
}

/// Entries masked by minus infinity add nothing, also where they come first.
#[test]
fn masked_entries_add_nothing() {
    for device in crate::support::emulated(1)
        .into_iter()
        .chain([moefold_kernels::Device::cpu(1)])
    {
        let mut logits = vec![f32::NEG_INFINITY; 600];
        (logits[500], logits[501]) = (1.0, 1.0);
        let own = row_statistics(&tensor(&device, &logits, &[1, 600]));
        assert_eq!(own.top.to_f32(), [1.0]);
        assert_eq!(own.sum_exp.to_f32(), [2.0]);
    }
}
