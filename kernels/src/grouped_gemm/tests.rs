//! Tests of `grouped_gemm` against its f64 twin in plain loops.

use super::*;
use crate::Device;
use crate::testing::{Check, Rng, assert_bits, oracle, tensor, wide};

#[test]
fn oracle_three_products() {
    oracle(40, |device, rng| {
        let (experts, n, k) = (rng.size(1..=6), rng.size(1..=50), rng.size(1..=50));
        let rows = [0, 1, rng.size(2..=90)][rng.size(0..=2)];
        let counts = rng.counts(experts, rows);
        let (x, dy) = (rng.values(rows * k), rng.values(rows * n));
        let w = rng.values(experts * n * k);
        let (xw, dyw, ww) = (wide(&x), wide(&dy), wide(&w));
        let mut y = vec![0.0; rows * n];
        let mut dx = vec![0.0; rows * k];
        let mut dw = ww.clone();
        let mut row = 0;
        for (e, &count) in counts.iter().enumerate() {
            for _ in 0..count {
                for i in 0..n {
                    for j in 0..k {
                        let weight = e * n * k + i * k + j;
                        y[row * n + i] += xw[row * k + j] * ww[weight];
                        dx[row * k + j] += dyw[row * n + i] * ww[weight];
                        dw[weight] += dyw[row * n + i] * xw[row * k + j];
                    }
                }
                row += 1;
            }
        }
        let dw_t = tensor(device, &w, &[experts, n, k]);
        let w = tensor(device, &w, &[experts, n, k]);
        let (x, dy) = (
            tensor(device, &x, &[rows, k]),
            tensor(device, &dy, &[rows, n]),
        );
        wgrad(&dy, &x, &counts, &dw_t);
        vec![
            Check("forward", forward(&x, &w, &counts), y),
            Check("dgrad", dgrad(&dy, &w, &counts), dx),
            Check("wgrad", dw_t, dw),
        ]
    });
}

#[test]
fn law_a_row_does_not_depend_on_the_batch() {
    let device = Device::cpu(1);
    let mut rng = Rng::new(5);
    let (experts, n, k) = (3, 40, 72);
    let w = tensor(&device, &rng.values(experts * n * k), &[experts, n, k]);
    let row = rng.values(k);
    let alone = |expert: usize| {
        let mut counts = [0; 3];
        counts[expert] = 1;
        forward(&tensor(&device, &row, &[1, k]), &w, &counts).to_f32()
    };
    for expert in 0..experts {
        let want = alone(expert);
        for rows in 1..80 {
            let mut x = rng.values(rows * k);
            let place = rng.size(0..=rows - 1);
            x[place * k..][..k].copy_from_slice(&row);
            let mut counts = [0; 3];
            counts[expert] = rows;
            let y = forward(&tensor(&device, &x, &[rows, k]), &w, &counts).to_f32();
            assert_bits("row", &y[place * n..][..n], &want, rows as u64);
        }
    }
}
