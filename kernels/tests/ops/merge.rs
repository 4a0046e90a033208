//! Tests of `merge` against its f64 reference in plain loops, and of `attention` over keys in parts.

use moefold_kernels::attention::{self, Mask};
use moefold_kernels::merge::*;

use crate::support::{Check, oracle_everywhere, statistic, tensor, wide};

#[test]
fn oracle_of_parts() {
    oracle_everywhere(12, |device, rng| {
        let (heads, width) = (rng.size(1..=3), [5, 16, 64][rng.size(0..=2)]);
        let (before, tokens, after) = (rng.size(0..=3), rng.size(0..=9), rng.size(0..=3));
        let all = before + tokens + after;
        let (o, part) = (
            rng.values(all * heads * width),
            rng.values(tokens * heads * width),
        );
        // Some far apart: all of the weight is in one of them.
        let far = [1.0, 60.0][rng.size(0..=1)];
        let statistics = |values: Vec<f32>| values.into_iter().map(|x| far * x).collect::<Vec<_>>();
        let (lse, part_lse) = (
            statistics(rng.values(heads * all)),
            statistics(rng.values(heads * tokens)),
        );
        let (mut o_want, mut lse_want) = (wide(&o), wide(&lse));
        for token in 0..tokens {
            for head in 0..heads {
                let at = head * all + before + token;
                let [a, b] = [lse_want[at], f64::from(part_lse[head * tokens + token])];
                // Without overflow: as the larger plus the logarithm of what is left.
                let whole = a.max(b) + (-(a - b).abs()).exp().ln_1p();
                for i in 0..width {
                    let own = &mut o_want[((before + token) * heads + head) * width + i];
                    let part = f64::from(part[(token * heads + head) * width + i]);
                    *own = (a - whole).exp() * *own + (b - whole).exp() * part;
                }
                lse_want[at] = whole;
            }
        }
        let o = tensor(device, &o, &[all, heads, width]);
        let part = tensor(device, &part, &[tokens, heads, width]);
        let lse = statistic(device, &lse, &[heads, all]);
        let part_lse = statistic(device, &part_lse, &[heads, tokens]);
        merge(&part, &part_lse, before, &o, &lse);
        vec![Check("o", o, o_want), Check("lse", lse, lse_want)]
    });
}

/// The second half of a sequence: causal over its own keys, and all of the first half's.
#[test]
fn differential_attention_in_parts_is_attention() {
    oracle_everywhere(2, |device, rng| {
        let (half, heads, width) = (rng.size(1..=70), 2, 16);
        let [q, k, v] = [(); 3].map(|()| rng.values(2 * half * heads * width));
        let [q, k, v] = [q, k, v].map(|x| tensor(device, &x, &[2 * half, heads, width]));
        let (whole, whole_lse) = attention::forward(Mask::Causal, &q, &k, &v, 1, 0.25);
        let [first, second] = [0, half].map(|at| [&q, &k, &v].map(|x| x.rows(at..at + half)));
        let (o, lse) =
            attention::forward(Mask::Causal, &second[0], &second[1], &second[2], 1, 0.25);
        let (part, part_lse) =
            attention::forward(Mask::Full, &second[0], &first[1], &first[2], 1, 0.25);
        merge(&part, &part_lse, 0, &o, &lse);
        let lse_want = whole_lse.to_f32();
        let lse_want: Vec<f32> = lse_want
            .chunks(2 * half)
            .flat_map(|head| head[half..].to_vec())
            .collect();
        vec![
            Check("o", o, wide(&whole.rows(half..2 * half).to_f32())),
            Check("lse", lse, wide(&lse_want)),
        ]
    });
}
