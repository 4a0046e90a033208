//! Tests of `swiglu` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, differences, inner, oracle, tensor, wide};

fn twin(x: &[f64], probs: &[f64], f: usize) -> Vec<f64> {
    let mut y = Vec::new();
    for (row, prob) in x.chunks(2 * f).zip(probs) {
        for i in 0..f {
            let (gate, up) = (row[i], row[f + i]);
            y.push(gate / (1.0 + (-gate).exp()) * up * prob);
        }
    }
    y
}

#[test]
fn oracle_forward_and_backward() {
    oracle(30, |device, rng| {
        let (rows, f) = ([0, 1, rng.size(2..=30)][rng.size(0..=2)], rng.size(1..=40));
        let mut x = rng.values(rows * 2 * f);
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
        let y_want = twin(&wide(&x), &wide(&probs), f);
        let dx_want = x
            .chunks(2 * f)
            .zip(dy.chunks(f).zip(&probs))
            .flat_map(|(x, (dy, &p))| differences(x, |x| inner(&twin(x, &[p.into()], f), dy)))
            .collect();
        let dprobs_want = differences(&probs, |p| inner(&twin(&wide(&x), p, f), &dy));
        let x = tensor(device, &x, &[rows, 2 * f]);
        let dy = tensor(device, &dy, &[rows, f]);
        let probs = with_probs.then(|| tensor(device, &probs, &[rows]));
        let y = forward(&x, probs.as_ref());
        let (dx, dprobs) = backward(&dy, &x, probs.as_ref());
        assert_eq!(dprobs.is_some(), with_probs);
        let mut checks = vec![Check("y", y, y_want), Check("dx", dx, dx_want)];
        checks.extend(dprobs.map(|d| Check("dprobs", d, dprobs_want)));
        checks
    });
}
