//! Tests of `sinks`, with the attention that it mends, against softmax with one score more, in f64.

use moefold_kernels::attention::{self, Mask};
use moefold_kernels::sinks::*;

use crate::support::{Check, Rng, differences, inner, oracle_everywhere, statistic, tensor, wide};

/// `[sequences, tokens of one, query heads, key/value heads, width]`.
type Sizes = [usize; 5];

/// Attention by definition where a head's sink takes its part of the weight: `(o [T,h,d], lse [h,T])`.
fn reference(
    [seqs, len, heads, kv_heads, width]: Sizes,
    window: usize,
    [q, k, v, sinks]: [&[f64]; 4],
) -> (Vec<f64>, Vec<f64>) {
    let tokens = seqs * len;
    let (mut o, mut lse) = (vec![0.0; tokens * heads * width], vec![0.0; heads * tokens]);
    for t in 0..tokens {
        let seen = (t + 1).saturating_sub(window).max(t / len * len)..=t;
        for h in 0..heads {
            let kv = h * kv_heads / heads;
            let score = |j: usize| {
                let both = (0..width)
                    .map(|c| q[(t * heads + h) * width + c] * k[(j * kv_heads + kv) * width + c]);
                (both.sum::<f64>() / (width as f64).sqrt()).exp()
            };
            let total = sinks[h].exp() + seen.clone().map(score).sum::<f64>();
            for j in seen.clone() {
                for c in 0..width {
                    let value = v[(j * kv_heads + kv) * width + c];
                    o[(t * heads + h) * width + c] += score(j) / total * value;
                }
            }
            lse[h * tokens + t] = total.ln();
        }
    }
    (o, lse)
}

fn drawn(rng: &mut Rng, longest: usize) -> (Sizes, usize) {
    let kv_heads = rng.size(1..=2);
    let (seqs, len) = (rng.size(1..=2), rng.size(1..=longest));
    let heads = kv_heads * rng.size(1..=2);
    // Rows that are aligned and rows that are not.
    let width = [5, 16][rng.size(0..=1)];
    (
        [seqs, len, heads, kv_heads, width],
        [len, rng.size(1..=len)][rng.size(0..=1)],
    )
}

#[test]
fn oracle_forward_and_gradients() {
    oracle_everywhere(6, |device, rng| {
        let (sizes, window) = drawn(rng, 9);
        let [seqs, len, heads, kv_heads, width] = sizes;
        let tokens = seqs * len;
        let [q, d_o] = [(); 2].map(|()| rng.values(tokens * heads * width));
        let [k, v] = [(); 2].map(|()| rng.values(tokens * kv_heads * width));
        // Sinks that take nearly nothing, some and nearly all.
        let sinks: Vec<f32> = rng.values(heads).iter().map(|sink| 4.0 * sink).collect();
        let [qw, kw, vw, sw] = [&q, &k, &v, &sinks].map(|x| wide(x));
        let (o_want, lse_want) = reference(sizes, window, [&qw, &kw, &vw, &sw]);
        let loss = |of: [&[f64]; 4]| inner(&reference(sizes, window, of).0, &d_o);
        let dq_want = differences(&q, |q| loss([q, &kw, &vw, &sw]));
        let dk_want = differences(&k, |k| loss([&qw, k, &vw, &sw]));
        let dv_want = differences(&v, |v| loss([&qw, &kw, v, &sw]));
        let dsinks_want = differences(&sinks, |sinks| loss([&qw, &kw, &vw, sinks]));

        let queries = |x: &[f32]| tensor(device, x, &[tokens, heads, width]);
        let keys = |x: &[f32]| tensor(device, x, &[tokens, kv_heads, width]);
        let (q, d_o, k, v) = (queries(&q), queries(&d_o), keys(&k), keys(&v));
        let sinks = tensor(device, &sinks, &[heads]);
        let (mask, scale) = (Mask::Window(window), (width as f32).sqrt().recip());
        let (o, lse) = attention::forward(mask, &q, &k, &v, seqs, scale);
        let lse = forward(&o, &lse, &sinks);
        let (dq, dk, dv) = attention::backward(mask, &d_o, &q, &k, &v, &o, &lse, seqs, scale);
        let dsinks = statistic(device, &vec![1.0; heads], &[heads]);
        backward(&d_o, &o, &lse, &sinks, &dsinks);
        // It is as exact as o, which rests in the device's dtype.
        let dsinks = tensor(device, &dsinks.to_f32(), &[heads]);

        // Sums of as many terms of about one.
        let of_terms = |terms: usize| std::iter::repeat((terms as f64).sqrt());
        let dsinks_want = dsinks_want.into_iter().map(|d| d + 1.0).collect();
        vec![
            Check("o", o, o_want),
            Check("lse", lse, lse_want),
            Check::of_sums("dq", &dq, dq_want, of_terms(window).take(dq.len())),
            Check::of_sums("dk", &dk, dk_want, of_terms(window * 2).take(dk.len())),
            Check("dv", dv, dv_want),
            Check::of_sums("dsinks", &dsinks, dsinks_want, of_terms(tokens).take(heads)),
        ]
    });
}

/// More tokens than a block of the sum has, where differences would take too long: by the formula of the gradient.
#[test]
fn oracle_sums_over_many_tokens() {
    oracle_everywhere(3, |device, rng| {
        let (tokens, heads, width) = (rng.size(120..=300), rng.size(1..=3), 8);
        let [o, d_o] = [(); 2].map(|()| rng.values(tokens * heads * width));
        let (lse, sinks) = (rng.values(heads * tokens), rng.values(heads));
        let mut want = vec![0.0; heads];
        let mut norms = vec![0.0; heads];
        for (row, (o, d_o)) in o.chunks(width).zip(d_o.chunks(width)).enumerate() {
            let (token, head) = (row / heads, row % heads);
            let prob = f64::from(sinks[head] - lse[head * tokens + token]).exp();
            let both = prob * inner(&wide(o), d_o);
            want[head] -= both;
            norms[head] += both * both;
        }
        let dims = [tokens, heads, width];
        let [o, d_o] = [o, d_o].map(|x| tensor(device, &x, &dims));
        let lse = statistic(device, &lse, &[heads, tokens]);
        let sinks = tensor(device, &sinks, &[heads]);
        let dsinks = statistic(device, &vec![0.0; heads], &[heads]);
        backward(&d_o, &o, &lse, &sinks, &dsinks);
        let norms = norms.into_iter().map(f64::sqrt);
        vec![Check::of_sums("dsinks", &dsinks, want, norms)]
    });
}

/// Scores whose exponentials overflow or vanish.
#[test]
fn law_far_sinks_take_all_or_nothing() {
    crate::support::on_every_device(5, |device| {
        let ones = || tensor(device, &[1.0; 8], &[1, 1, 8]);
        for (sink, lse, left, all) in [
            (300.0, -300.0, 0.0, 300.0),
            (-300.0, 300.0, 1.0, 300.0),
            (-300.0, -280.0, 1.0, -280.0),
        ] {
            let o = ones();
            let sinks = tensor(device, &[sink], &[1]);
            let lse = forward(&o, &statistic(device, &[lse], &[1, 1]), &sinks);
            assert_eq!(o.to_f32(), [left; 8]);
            assert!((lse.to_f32()[0] - all).abs() < 1e-3, "{lse:?}");
        }
    });
}
