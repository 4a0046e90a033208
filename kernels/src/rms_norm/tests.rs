//! Tests of `rms_norm` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, differences, inner, oracle, oracle_everywhere, tensor, wide};

fn twin(x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let d = w.len();
    let mut y = Vec::new();
    let mut rstd = Vec::new();
    for row in x.chunks(d) {
        let mut squares = 0.0;
        for x in row {
            squares += x * x;
        }
        let r = 1.0 / (squares / d as f64 + eps).sqrt();
        rstd.push(r);
        for (x, w) in row.iter().zip(w) {
            y.push(x * r * w);
        }
    }
    (y, rstd)
}

#[test]
fn oracle_forward() {
    oracle_everywhere(20, |device, rng| {
        let (rows, d) = (rng.size(0..=200), rng.size(1..=150));
        let (x, w) = (rng.values(rows * d), rng.values(d));
        let (y_want, rstd_want) = twin(&wide(&x), &wide(&w), f64::from(1e-6f32));
        let (y, rstd) = forward(
            &tensor(device, &x, &[rows, d]),
            &tensor(device, &w, &[d]),
            1e-6,
        );
        vec![Check("y", y, y_want), Check("rstd", rstd, rstd_want)]
    });
}

#[test]
fn oracle_backward() {
    oracle(12, |device, rng| {
        // Three dims, as the norm of heads sees them; more rows than a block of weight gradients.
        let (tokens, heads, d) = (rng.size(1..=50), rng.size(1..=3), rng.size(1..=20));
        let rows = tokens * heads;
        let (x, w, dy) = (rng.values(rows * d), rng.values(d), rng.values(rows * d));
        let start = rng.values(d);
        let eps = f64::from(1e-5f32);
        let dx_want: Vec<f64> = x
            .chunks(d)
            .zip(dy.chunks(d))
            .flat_map(|(x, dy)| differences(x, |x| inner(&twin(x, &wide(&w), eps).0, dy)))
            .collect();
        let mut dw_want = differences(&w, |w| inner(&twin(&wide(&x), w, eps).0, &dy));
        dw_want
            .iter_mut()
            .zip(&start)
            .for_each(|(d, &s)| *d += f64::from(s));
        let dims = [tokens, heads, d];
        let (x, dy) = (tensor(device, &x, &dims), tensor(device, &dy, &dims));
        let (w, dw) = (tensor(device, &w, &[d]), tensor(device, &start, &[d]));
        let (_, rstd) = forward(&x, &w, 1e-5);
        let dx = backward(&dy, &x, &w, &rstd, &dw);
        assert_eq!(dx.dims(), dims);
        vec![Check("dx", dx, dx_want), Check("dw", dw, dw_want)]
    });
}
