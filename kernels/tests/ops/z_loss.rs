//! Tests of `z_loss` against its f64 reference in plain loops.

use moefold_kernels::z_loss::*;

use crate::support::{Check, differences, oracle_everywhere, statistic, wide};

fn reference(logits: &[f64], experts: usize) -> Vec<f64> {
    let rows = logits.chunks(experts);
    rows.map(|row| row.iter().map(|x| x.exp()).sum::<f64>().ln())
        .collect()
}

#[test]
fn oracle_forward_and_backward() {
    oracle_everywhere(8, |device, rng| {
        let experts = [1, 8, rng.size(2..=40), 128][rng.size(0..=3)];
        let tokens = [0, 1, rng.size(2..=12)][rng.size(0..=2)];
        let logits = rng.values(tokens * experts);
        let start = rng.values(tokens * experts);
        let loss = |logits: &[f64]| {
            let all = reference(logits, experts);
            0.25 * all.iter().map(|z| z * z).sum::<f64>()
        };
        let want: Vec<f64> = logits
            .chunks(experts)
            .flat_map(|row| differences(row, loss))
            .zip(wide(&start))
            .map(|(slope, start)| start + slope)
            .collect();
        let z_want = reference(&wide(&logits), experts);
        let [logits, dlogits] =
            [logits, start].map(|values| statistic(device, &values, &[tokens, experts]));
        let z = forward(&logits);
        backward(&logits, &z, 0.25, &dlogits);
        vec![Check("z", z, z_want), Check("dlogits", dlogits, want)]
    });
}
