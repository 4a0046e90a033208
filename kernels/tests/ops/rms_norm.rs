//! Tests of `rms_norm` against its f64 reference in plain loops.

use moefold_kernels::rms_norm::*;
use moefold_kernels::{Device, Tensor};

use crate::support::{
    Check, Rng, differences, inner, inside, oracle_everywhere, statistic, tensor, wide,
};

fn reference(x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
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

/// Rows and their width: narrow and wide, of whole accesses and not, in one block of rows and in
/// several.
fn sizes(rng: &mut Rng) -> (usize, usize) {
    let (rows_max, d) = [
        (300, 1),
        (9, 7),
        (9, 31),
        (300, 8),
        (80, 33),
        (20, 100),
        (12, 1000),
        (12, 1032),
        (5, 2056),
    ][rng.size(0..=8)];
    let rows = [0, 1, rows_max, rng.size(2..=rows_max)][rng.size(0..=3)];
    (rows, d)
}

/// A weight, or the gradient of one: in the device's dtype or in f32.
fn parameter(device: &Device, narrow: bool, values: &[f32]) -> Tensor {
    let kind = if narrow { tensor } else { statistic };
    kind(device, values, &[values.len()])
}

#[test]
fn oracle_forward() {
    oracle_everywhere(12, |device, rng| {
        let (rows, d) = sizes(rng);
        let (x, w) = (rng.values(rows * d), rng.values(d));
        let (y_want, rstd_want) = reference(&wide(&x), &wide(&w), f64::from(1e-6f32));
        let x = inside(&tensor(device, &x, &[rows, d]), 8 - rng.size(0..=1));
        let (y, rstd) = forward(&x, &parameter(device, rng.coin(), &w), 1e-6);
        assert_eq!(y.dtype(), device.dtype());
        vec![Check("y", y, y_want), Check("rstd", rstd, rstd_want)]
    });
}

#[test]
fn oracle_backward() {
    oracle_everywhere(12, |device, rng| {
        let (rows, d) = sizes(rng);
        // A row of one element comes out as plus or minus its weight, whatever the element: what is
        // left of dx is of the size of its rounding.
        let d = d.max(3);
        // Three dims, as the norm of heads sees them.
        let dims = if rows % 2 == 0 {
            [rows / 2, 2, d]
        } else {
            [1, rows, d]
        };
        let (x, w, dy) = (rng.values(rows * d), rng.values(d), rng.values(rows * d));
        let start = rng.values(d);
        let eps = f64::from(1e-5f32);
        let dx_want: Vec<f64> = x
            .chunks(d)
            .zip(dy.chunks(d))
            .flat_map(|(x, dy)| differences(x, |x| inner(&reference(x, &wide(&w), eps).0, dy)))
            .collect();
        // y is linear in w, element by element.
        let normed = reference(&wide(&x), &vec![1.0; d], eps).0;
        let mut dw_want = wide(&start);
        for (normed, dy) in normed.chunks(d).zip(dy.chunks(d)) {
            for (dw, (normed, &dy)) in dw_want.iter_mut().zip(normed.iter().zip(dy)) {
                *dw += normed * f64::from(dy);
            }
        }
        let offset = 8 - rng.size(0..=1);
        let place = |values: &[f32]| inside(&tensor(device, values, &dims), offset);
        let (x, dy) = (place(&x), place(&dy));
        let (w, dw) = (
            parameter(device, rng.coin(), &w),
            parameter(device, rng.coin(), &start),
        );
        let (_, rstd) = forward(&x, &w, 1e-5);
        let dx = backward(&dy, &x, &w, &rstd, &dw);
        assert_eq!(dx.dims(), dims);
        assert_eq!(dx.dtype(), device.dtype());
        vec![Check("dx", dx, dx_want), Check("dw", dw, dw_want)]
    });
}

/// Two halves of rows, each with sums over both, are the halves of the whole's norm.
#[test]
fn differential_shared_rows_are_whole_ones() {
    oracle_everywhere(5, |device, rng| {
        let (rows, half) = (rng.size(1..=10), rng.size(2..=40));
        let width = 2 * half;
        let [x, dy] = [(); 2].map(|()| rng.values(rows * width));
        let w = rng.values(width);
        let eps = f64::from(1e-5f32);
        let y_want = reference(&wide(&x), &wide(&w), eps).0;
        let dx_want: Vec<f64> = x
            .chunks(width)
            .zip(dy.chunks(width))
            .flat_map(|(x, dy)| differences(x, |x| inner(&reference(x, &wide(&w), eps).0, dy)))
            .collect();
        let cut = |values: &[f32], side: usize| -> Vec<f32> {
            let rows = values.chunks(width);
            rows.flat_map(|row| &row[side * half..(side + 1) * half])
                .copied()
                .collect()
        };
        let parts =
            |values: &[f32]| [0, 1].map(|side| tensor(device, &cut(values, side), &[rows, half]));
        let (x, dy) = (parts(&x), parts(&dy));
        let w = [0, 1].map(|side| statistic(device, &w[side * half..(side + 1) * half], &[half]));
        let both = |sums: [Tensor; 2]| {
            let [a, b] = sums.map(|sums| sums.to_f32());
            let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            statistic(device, &sums, &[rows])
        };
        let over = |sums| Over {
            width,
            sums: Some(sums),
        };
        let sums = both([0, 1].map(|side| squares(&x[side], &w[side])));
        let done = [0, 1].map(|side| forward_over(&over(&sums), &x[side], &w[side], 1e-5));
        let sums = both([0, 1].map(|side| products(&dy[side], &x[side], &w[side])));
        let mut checks = Vec::new();
        for (side, (y, rstd)) in done.into_iter().enumerate() {
            let dw = statistic(device, &vec![0.0; half], &[half]);
            let dx = backward_over(&over(&sums), &dy[side], &x[side], &w[side], &rstd, &dw);
            let want = |all: &[f64]| -> Vec<f64> {
                let rows = all.chunks(width);
                rows.flat_map(|row| &row[side * half..(side + 1) * half])
                    .copied()
                    .collect()
            };
            checks.push(Check("y", y, want(&y_want)));
            checks.push(Check("dx", dx, want(&dx_want)));
        }
        checks
    });
}
