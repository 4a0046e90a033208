//! Tests of `gate` against its f64 reference in plain loops.

use moefold_kernels::gate::*;

use crate::support::{Check, differences, inner, oracle_everywhere, statistic, tensor, wide};

fn reference(x: &[f64], logits: &[f64], y: &[f64]) -> Vec<f64> {
    let width = x.len() / logits.len().max(1);
    let mut sum = y.to_vec();
    for (row, logit) in logits.iter().enumerate() {
        for i in row * width..(row + 1) * width {
            sum[i] += x[i] / (1.0 + (-logit).exp());
        }
    }
    sum
}

#[test]
fn oracle_forward_and_backward() {
    oracle_everywhere(12, |device, rng| {
        let width = [rng.size(1..=40), 8 * rng.size(1..=5), 272][rng.size(0..=2)];
        let rows = [0, 1, rng.size(2..=12)][rng.size(0..=2)];
        let [x, y, dy] = [(); 3].map(|()| rng.values(rows * width));
        let logits = rng.values(rows);
        let zero = vec![0.0; rows * width];
        let want = reference(&wide(&x), &wide(&logits), &wide(&y));
        let dx_want = differences(&x, |x| inner(&reference(x, &wide(&logits), &zero), &dy));
        let dlogits_want = differences(&logits, |l| inner(&reference(&wide(&x), l, &zero), &dy));
        let terms: Vec<f64> = x
            .iter()
            .zip(&dy)
            .map(|(&x, &dy)| 0.25 * f64::from(x) * f64::from(dy))
            .collect();
        let norm = |terms: &[f64]| terms.iter().map(|t| t * t).sum::<f64>().sqrt();
        let [x, y, dy] = [x, y, dy].map(|values| tensor(device, &values, &[rows, width]));
        let logits = statistic(device, &logits, &[rows, 1]);
        add(&x, &logits, &y);
        let (dx, dlogits) = backward(&dy, &x, &logits);
        vec![
            Check("y", y, want),
            Check("dx", dx, dx_want),
            Check::of_sums(
                "dlogits",
                &dlogits,
                dlogits_want,
                terms.chunks(width).map(norm),
            ),
        ]
    });
}
