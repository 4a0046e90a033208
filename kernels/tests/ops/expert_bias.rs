//! Tests of `expert_bias` against its f64 reference in plain loops.

use moefold_kernels::expert_bias::*;
use moefold_kernels::grouped_gemm::Rows;

use crate::support::{
    Check, Rng, assert_bits, integers, on_every_device, oracle_everywhere, statistic, tensor, wide,
};

#[test]
fn oracle_all_three() {
    oracle_everywhere(12, |device, rng| {
        let width = [rng.size(1..=40), 8 * rng.size(1..=5), 272][rng.size(0..=2)];
        let experts = [1, rng.size(2..=5), 40][rng.size(0..=2)];
        let rows = [0, 1, rng.size(2..=60)][rng.size(0..=2)];
        let counts = rng.counts(experts, rows);
        let [y, dy] = [(); 2].map(|()| rng.values(rows * width));
        let (bias, probs) = (rng.values(experts * width), rng.values(rows));
        let weighted = rng.coin();
        let (mut y_want, mut dbias_want) = (wide(&y), vec![1.0; bias.len()]);
        let mut dprobs_want = vec![0.0; rows];
        let (mut of_biases, mut of_probs) = (vec![1.0; bias.len()], vec![0.0; rows]);
        let experts_of = counts.iter().enumerate();
        let experts_of = experts_of.flat_map(|(e, &count)| std::iter::repeat_n(e, count));
        for (row, expert) in experts_of.enumerate() {
            let prob = if weighted { f64::from(probs[row]) } else { 1.0 };
            for i in 0..width {
                let (at, of) = (row * width + i, expert * width + i);
                let (dy, bias) = (f64::from(dy[at]), f64::from(bias[of]));
                y_want[at] += prob * bias;
                dbias_want[of] += prob * dy;
                dprobs_want[row] += dy * bias;
                of_biases[of] += (prob * dy).powi(2);
                of_probs[row] += (dy * bias).powi(2);
            }
        }

        let [y, dy] = [y, dy].map(|values| tensor(device, &values, &[rows, width]));
        let dims = [experts, width];
        let bias = tensor(device, &bias, &dims);
        let probs = statistic(device, &probs, &[rows]);
        let probs = weighted.then_some(&probs);
        let of = Rows::Counts(&counts);
        add(&y, &bias, probs, of);
        let dbias = statistic(device, &vec![1.0; experts * width], &dims);
        grad(&dy, probs, of, &dbias);
        let dprobs = grad_probs(&dy, &bias, of);
        let roots = |squares: Vec<f64>| squares.into_iter().map(f64::sqrt);
        vec![
            Check("y", y, y_want),
            Check::of_sums("dbias", &dbias, dbias_want, roots(of_biases)),
            Check::of_sums("dprobs", &dprobs, dprobs_want, roots(of_probs)),
        ]
    });
}

/// Rows behind the last expert's are neither read nor written.
#[test]
fn law_rows_behind_the_last_are_left_alone() {
    on_every_device(3, |device| {
        let mut rng = Rng::new(3);
        let (width, rows) = (24, 40);
        let values = rng.values(rows * width);
        let bias = tensor(device, &rng.values(4 * width), &[4, width]);
        let offsets = integers(device, &[0, 0, 20, 33, 33], &[5]);
        let run = |rows: usize, of: Rows<'_>| {
            let y = tensor(device, &values[..rows * width], &[rows, width]);
            let dbias = statistic(device, &[0.5; 4 * 24], &[4, width]);
            grad(&y, None, of, &dbias);
            let dprobs = grad_probs(&y, &bias, of);
            add(&y, &bias, None, of);
            [dbias, dprobs, y].map(|x| x.to_f32())
        };
        let [dbias, dprobs, y] = run(rows, Rows::Offsets(&offsets));
        let [dbias_want, dprobs_want, y_want] = run(33, Rows::Counts(&[0, 20, 13, 0]));
        assert_bits("dbias", &dbias, &dbias_want, 3);
        assert_bits("dprobs", &dprobs[..33], &dprobs_want, 3);
        assert_bits("y", &y[..33 * width], &y_want, 3);
        let before = tensor(device, &values[33 * width..], &[7, width]);
        assert_bits("y", &y[33 * width..], &before.to_f32(), 3);
    });
}
