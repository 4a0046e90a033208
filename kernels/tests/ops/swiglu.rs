//! Tests of `swiglu` against its f64 reference in plain loops.

use moefold_kernels::swiglu::*;

use crate::support::{Check, differences, inner, oracle_everywhere, statistic, tensor, wide};

/// Every number of the rule at work, and either order of the columns.
const RULES: [Rule; 4] = [
    Rule::SWIGLU,
    Rule::GPT_OSS,
    Rule {
        interleaved: true,
        ..Rule::SWIGLU
    },
    Rule {
        limit: 0.75,
        interleaved: false,
        ..Rule::GPT_OSS
    },
];

fn reference(x: &[f64], probs: &[f64], f: usize, rule: &Rule) -> Vec<f64> {
    let limit = f64::from(rule.limit);
    let mut y = Vec::new();
    for (row, prob) in x.chunks(2 * f).zip(probs) {
        for i in 0..f {
            let (gate, up) = if rule.interleaved {
                (row[2 * i], row[2 * i + 1])
            } else {
                (row[i], row[f + i])
            };
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            let sigmoid = 1.0 / (1.0 + (-f64::from(rule.alpha) * gate).exp());
            y.push(gate * sigmoid * (up + f64::from(rule.offset)) * prob);
        }
    }
    y
}

#[test]
fn oracle_forward_and_backward() {
    for rule in &RULES {
        oracle_everywhere(12, |device, rng| {
            // Any width, whole 16-byte pieces, and more of those than a warp has lanes.
            let f = [rng.size(1..=40), 8 * rng.size(1..=5), 272][rng.size(0..=2)];
            let rows = [0, 1, rng.size(2..=12)][rng.size(0..=2)];
            let mut x = rng.values(rows * 2 * f);
            // Differences across a bound are neither slope.
            for x in &mut x {
                if (x.abs() - rule.limit).abs() < 1e-3 {
                    *x = 0.0;
                }
            }
            if let Some(x) = x.first_mut() {
                *x = [90.0, -90.0][rng.size(0..=1)];
            }
            let dy = rng.values(rows * f);
            let with_probs = rng.coin();
            let probs = if with_probs {
                rng.values(rows)
            } else {
                vec![1.0; rows]
            };
            let y_want = reference(&wide(&x), &wide(&probs), f, rule);
            let dx_want = x
                .chunks(2 * f)
                .zip(dy.chunks(f).zip(&probs))
                .flat_map(|(x, (dy, &p))| {
                    differences(x, |x| inner(&reference(x, &[p.into()], f, rule), dy))
                })
                .collect();
            let dprobs_want =
                differences(&probs, |p| inner(&reference(&wide(&x), p, f, rule), &dy));
            let activations = reference(&wide(&x), &vec![1.0; rows], f, rule);
            let terms: Vec<f64> = activations
                .iter()
                .zip(&dy)
                .map(|(y, &dy)| y * f64::from(dy))
                .collect();
            let norm = |terms: &[f64]| terms.iter().map(|t| t * t).sum::<f64>().sqrt();
            let x = tensor(device, &x, &[rows, 2 * f]);
            let dy = tensor(device, &dy, &[rows, f]);
            let probs = with_probs.then(|| statistic(device, &probs, &[rows]));
            let y = forward(&x, probs.as_ref(), rule);
            let (dx, dprobs) = backward(&dy, &x, probs.as_ref(), rule);
            assert_eq!(dprobs.is_some(), with_probs);
            let mut checks = vec![Check("y", y, y_want), Check("dx", dx, dx_want)];
            checks.extend(dprobs.map(|sums| {
                Check::of_sums("dprobs", &sums, dprobs_want, terms.chunks(f).map(norm))
            }));
            checks
        });
    }
}

/// What diverges must be seen to: clamping does not turn NaN into a number.
#[test]
fn law_nan_stays_nan() {
    let device = moefold_kernels::Device::cpu(1);
    let ones = tensor(&device, &[1.0; 1], &[1, 1]);
    for x in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
        let x = tensor(&device, &x, &[1, 2]);
        assert!(forward(&x, None, &Rule::GPT_OSS).to_f32()[0].is_nan());
        let (dx, _) = backward(&ones, &x, None, &Rule::GPT_OSS);
        assert!(dx.to_f32().iter().any(|dx| dx.is_nan()));
    }
}
