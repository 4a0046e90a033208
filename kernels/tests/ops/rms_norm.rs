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
