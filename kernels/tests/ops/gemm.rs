//! Tests of `gemm` against its f64 reference in plain loops.

use std::ops::Range;

use moefold_kernels::gemm::*;
use moefold_kernels::{Device, Dtype, Tensor, TensorClass};

use crate::support::{
    Check, Rng, assert_bits, on_every_device, oracle, oracle_everywhere, product, statistic,
    statistics, tensor, tensor_at, wide,
};

#[test]
fn oracle_all_transposes_and_beta() {
    oracle(60, transposes_and_beta);
    oracle_everywhere(6, transposes_and_beta);
}

fn transposes_and_beta(device: &Device, rng: &mut Rng) -> Vec<Check> {
    let ragged = |rng: &mut Rng| match rng.size(0..=3) {
        0 => rng.size(1..=3),
        1 => rng.size(1..=40),
        _ => rng.size(1..=150),
    };
    let (m, n) = (ragged(rng), ragged(rng));
    let k = if rng.size(0..=5) == 0 {
        rng.size(500..=1100)
    } else {
        ragged(rng)
    };
    let (ta, tb) = (rng.coin(), rng.coin());
    let beta = [0.0, 1.0, -0.5][rng.size(0..=2)];
    let (a, b, c) = (rng.values(m * k), rng.values(k * n), rng.values(m * n));
    let (aw, bw, cw) = (wide(&a), wide(&b), wide(&c));
    let mut want = product(
        |i, l| if ta { aw[l * m + i] } else { aw[i * k + l] },
        |l, j| if tb { bw[j * k + l] } else { bw[l * n + j] },
        [m, n, k],
    );
    let trans = |t| if t { Trans::Yes } else { Trans::No };
    let a = tensor(device, &a, &if ta { [k, m] } else { [m, k] });
    let b = tensor(device, &b, &if tb { [n, k] } else { [k, n] });
    let c_t = if beta == 0.0 {
        device.empty(TensorClass::Activations, device.dtype(), &[m, n])
    } else {
        want.iter_mut()
            .zip(&cw)
            .for_each(|(w, c)| *w += f64::from(beta) * c);
        tensor(device, &c, &[m, n])
    };
    gemm(&a, trans(ta), &b, trans(tb), &c_t, beta);
    vec![Check("gemm", c_t, want)]
}

/// Sizes around the edges of tiles, of rows that wide accesses can take or not, in memory that
/// starts where they can or not, with the gradient of the weight in either dtype.
#[test]
fn oracle_linear_layer() {
    oracle_everywhere(10, |device, rng| {
        let edges = [1, 63, 64, 65, 127, 129, 257];
        let t = edges[rng.size(0..=6)];
        let narrow = |rng: &mut Rng| match rng.size(0..=2) {
            0 => rng.size(1..=70),
            1 => 8 * rng.size(1..=9),
            _ => 8 * rng.size(1..=34),
        };
        let (n, k) = (narrow(rng), narrow(rng));
        let start = [0, 0, 8, 3][rng.size(0..=3)];
        let (x, w, dy) = (rng.values(t * k), rng.values(n * k), rng.values(t * n));
        let (xw, ww, dyw) = (wide(&x), wide(&w), wide(&dy));
        let y_want = product(|i, l| xw[i * k + l], |l, j| ww[j * k + l], [t, n, k]);
        let dx_want = product(|i, l| dyw[i * n + l], |l, j| ww[l * k + j], [t, k, n]);
        let dw_once = product(|i, l| dyw[l * n + i], |l, j| xw[l * k + j], [n, k, t]);
        let dw_want = dw_once.iter().zip(&ww).map(|(d, w)| d + w).collect();
        let dw = if rng.coin() {
            tensor(device, &w, &[n, k])
        } else {
            statistic(device, &w, &[n, k])
        };
        let w = tensor(device, &w, &[n, k]);
        let x = tensor_at(device, start, &x, &[t, k]);
        let dy = tensor(device, &dy, &[t, n]);
        wgrad(&dy, &x, &dw);
        vec![
            Check("forward", forward(&x, &w), y_want),
            Check("dgrad", dgrad(&dy, &w), dx_want),
            Check("wgrad", dw, dw_want),
        ]
    });
}

/// A router's gradients, whose logits have all bits of f32: rows of whole accesses and not, sums over many tokens.
#[test]
fn oracle_a_routers_gradients() {
    oracle_everywhere(4, |device, rng| {
        let experts = [10, 16][rng.size(0..=1)];
        let (hidden, tokens) = (24, [65, 512, 1024][rng.size(0..=2)]);
        let dy = statistics(rng, tokens * experts);
        let (x, w) = (rng.values(tokens * hidden), rng.values(experts * hidden));
        let before = statistics(rng, experts * hidden);
        let (dyw, xw, ww) = (wide(&dy), wide(&x), wide(&w));
        let sum = product(
            |i, l| dyw[l * experts + i],
            |l, j| xw[l * hidden + j],
            [experts, hidden, tokens],
        );
        let dw_want = sum.iter().zip(wide(&before)).map(|(s, b)| s + b).collect();
        let dx_want = product(
            |i, l| dyw[i * experts + l],
            |l, j| ww[l * hidden + j],
            [tokens, hidden, experts],
        );
        let dy = statistic(device, &dy, &[tokens, experts]);
        let x = tensor(device, &x, &[tokens, hidden]);
        let w = tensor(device, &w, &[experts, hidden]);
        let dw = statistic(device, &before, &[experts, hidden]);
        // In f32, as nothing else would show what is lost.
        let dx = device.empty(TensorClass::Activations, Dtype::F32, &[tokens, hidden]);
        wgrad(&dy, &x, &dw);
        gemm(&dy, Trans::No, &w, Trans::No, &dx, 0.0);
        vec![Check("wgrad", dw, dw_want), Check("dgrad", dx, dx_want)]
    });
}

#[test]
fn law_nothing_contracted_is_zero() {
    on_every_device(1, |device| {
        let (a, b) = (tensor(device, &[], &[2, 0]), tensor(device, &[], &[0, 3]));
        let c = tensor(device, &[1.0; 6], &[2, 3]);
        gemm(&a, Trans::No, &b, Trans::No, &c, 1.0);
        assert_eq!(c.to_f32(), [1.0; 6]);
        gemm(&a, Trans::No, &b, Trans::No, &c, 0.0);
        assert_eq!(c.to_f32(), [0.0; 6]);
    });
}

/// A row of the product has the same bits whatever rows are around it, for the shapes of forward
/// and dgrad: layouts that cut a batch differently then agree exactly in what they do by row.
#[test]
fn law_a_row_does_not_depend_on_the_batch() {
    let device = Device::cpu_sharing_all(1);
    for (seed, (n, k)) in [
        (16, 64),
        (1, 40),
        (2, 33),
        (65, 700),
        (100, 513),
        (48, 2),
        (130, 1100),
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = Rng::new(seed as u64);
        let rows = 150;
        let (x, w) = (rng.values(rows * k), rng.values(n * k));
        let x = tensor(&device, &x, &[rows, k]);
        for (dims, tb) in [([n, k], Trans::Yes), ([k, n], Trans::No)] {
            let w = tensor(&device, &w, &dims);
            let product = |a: usize, b: usize| {
                let y = device.empty(TensorClass::Activations, Dtype::F32, &[b - a, n]);
                gemm(&x.rows(a..b), Trans::No, &w, tb, &y, 0.0);
                y
            };
            let whole = product(0, rows).to_f32();
            for start in [0, 1, 7, 64] {
                for len in (1..40).chain([63, 64, 65, 86]) {
                    let part = product(start, start + len).to_f32();
                    let want = &whole[start * n..(start + len) * n];
                    assert_bits(
                        &format!("rows {start}+{len} of {n}x{k} {tb:?}"),
                        &part,
                        want,
                        0,
                    );
                }
            }
        }
    }
}

/// The same across the number of rows where a transposed operand is no longer turned first, and
/// where tall products are cut into blocks.
#[test]
fn law_a_row_does_not_depend_on_a_large_batch() {
    let mut rng = Rng::new(9);
    let (n, k, rows) = (24, 600, 1100);
    for threads in [1, 3] {
        let device = Device::cpu_sharing_all(threads);
        let x = tensor(&device, &rng.values(rows * k), &[rows, k]);
        let w = tensor(&device, &rng.values(n * k), &[n, k]);
        let whole = forward(&x, &w).to_f32();
        for len in [511, 512, 513, 1025, 1099] {
            let part = forward(&x.rows(0..len), &w).to_f32();
            assert_bits(&format!("{len} rows"), &part, &whole[..len * n], 9);
        }
    }
}

/// On a device, too, a row has the same bits whatever rows are around it, and every time.
#[test]
fn law_a_row_does_not_depend_on_the_batch_on_any_device() {
    on_every_device(3, |device| {
        for (n, k) in [(136, 72), (33, 50)] {
            let mut rng = Rng::new(3);
            let rows = 140;
            let x = tensor(device, &rng.values(rows * k), &[rows, k]);
            let w = tensor(device, &rng.values(n * k), &[n, k]);
            let whole = forward(&x, &w).to_f32();
            for range in [0..rows, 0..1, 8..72, 75..rows] {
                let part = forward(&x.rows(range.clone()), &w).to_f32();
                let want = &whole[range.start * n..range.end * n];
                assert_bits(
                    &format!("rows {range:?} of {n}x{k} on {device:?}"),
                    &part,
                    want,
                    3,
                );
            }
        }
    });
}

/// The router's products: f32 on one side, bf16 on the other.
#[test]
fn oracle_mixed_dtypes() {
    oracle_everywhere(2, |device, rng| {
        let (t, n, k) = (rng.size(1..=70), rng.size(1..=20), rng.size(1..=70));
        let (x, w, dy) = (
            rng.values(t * k),
            statistics(rng, n * k),
            statistics(rng, t * n),
        );
        let (xw, ww, dyw) = (wide(&x), wide(&w), wide(&dy));
        let y_want = product(|i, l| xw[i * k + l], |l, j| ww[j * k + l], [t, n, k]);
        let dx_want = product(|i, l| dyw[i * n + l], |l, j| ww[l * k + j], [t, k, n]);
        let dw_want = product(|i, l| dyw[l * n + i], |l, j| xw[l * k + j], [n, k, t]);
        let (x, w) = (tensor(device, &x, &[t, k]), statistic(device, &w, &[n, k]));
        let dy = statistic(device, &dy, &[t, n]);
        let empty = |dtype, dims: &[usize]| device.empty(TensorClass::Activations, dtype, dims);
        let (y, dw) = (empty(Dtype::F32, &[t, n]), empty(Dtype::F32, &[n, k]));
        let dx = empty(device.dtype(), &[t, k]);
        gemm(&x, Trans::No, &w, Trans::Yes, &y, 0.0);
        gemm(&dy, Trans::No, &w, Trans::No, &dx, 0.0);
        gemm(&dy, Trans::Yes, &x, Trans::No, &dw, 0.0);
        vec![
            Check("forward", y, y_want),
            Check("dgrad", dx, dx_want),
            Check("wgrad", dw, dw_want),
        ]
    });
}

/// Products of some columns of wider tensors, at aligned and at odd places, with a bias or without: what
/// is beside the columns of C stays what it was.
#[test]
fn oracle_columns_and_bias() {
    oracle(20, columns_and_bias);
    oracle_everywhere(10, columns_and_bias);
}

fn columns_and_bias(device: &Device, rng: &mut Rng) -> Vec<Check> {
    let eights = rng.coin();
    let size = |rng: &mut Rng, most: usize| {
        if eights {
            8 * rng.size(1..=most.div_ceil(8))
        } else {
            rng.size(1..=most)
        }
    };
    let rows = [1, 9, 70, 131][rng.size(0..=3)];
    let (m, n, k) = (rows, size(rng, 140), size(rng, 70));
    let (ta, tb) = (eights && rng.coin(), rng.coin());
    // A transposed operand has m columns, which must be whole pieces for the wide kernels.
    let m = if ta { size(rng, 140) } else { m };
    let has_bias = rng.coin();
    let beta = [0.0, 1.0, -0.5][rng.size(0..=2)];
    let stored = |t, rows, columns| if t { (columns, rows) } else { (rows, columns) };
    let fused = |rng: &mut Rng, (rows, columns): (usize, usize)| {
        let (before, after) = (size(rng, 24), size(rng, 24));
        let pitch = before + columns + after;
        let values = rng.values(rows * pitch);
        (
            tensor(device, &values, &[rows, pitch]),
            wide(&values),
            before..before + columns,
        )
    };
    let (a, aw, columns_a) = fused(rng, stored(ta, m, k));
    let (b, bw, columns_b) = fused(rng, stored(tb, k, n));
    let (c, mut want, columns_c) = fused(rng, (m, n));
    let bias = rng.values(n);
    let bias_t = tensor(device, &bias, &[n]);
    let at = |data: &[f64],
              (tensor, columns): (&Tensor, &Range<usize>),
              row: usize,
              column: usize| { data[row * tensor.width() + columns.start + column] };
    for i in 0..m {
        for j in 0..n {
            let product: f64 = (0..k)
                .map(|l| {
                    let (ra, ca) = stored(ta, i, l);
                    let (rb, cb) = stored(tb, l, j);
                    at(&aw, (&a, &columns_a), ra, ca) * at(&bw, (&b, &columns_b), rb, cb)
                })
                .sum();
            let place = i * c.width() + columns_c.start + j;
            let bias = if has_bias { f64::from(bias[j]) } else { 0.0 };
            want[place] = product + bias + f64::from(beta) * want[place];
        }
    }
    let trans = |t| if t { Trans::Yes } else { Trans::No };
    let (view_a, view_b) = (View::columns(&a, columns_a), View::columns(&b, columns_b));
    let view_c = View::columns(&c, columns_c);
    if has_bias {
        gemm_bias(view_a, trans(ta), view_b, trans(tb), &bias_t, view_c, beta);
    } else {
        gemm(view_a, trans(ta), view_b, trans(tb), view_c, beta);
    }
    vec![Check("columns", c, want)]
}

/// The layer with a bias: its output, and the bias's gradient from all columns of dy and from some.
#[test]
fn oracle_bias_of_a_layer() {
    oracle(10, bias_of_a_layer);
    oracle_everywhere(6, bias_of_a_layer);
}

fn bias_of_a_layer(device: &Device, rng: &mut Rng) -> Vec<Check> {
    let t = [0, 1, 63, 70, 200][rng.size(0..=4)];
    let (n, k) = (rng.size(1..=40) * [1, 8][rng.size(0..=1)], rng.size(1..=40));
    let (x, w, bias) = (rng.values(t * k), rng.values(n * k), rng.values(n));
    let (dy, db, db_all) = (rng.values(t * n), rng.values(n), rng.values(n));
    let (xw, ww, dyw) = (wide(&x), wide(&w), wide(&dy));
    let product = product(|i, l| xw[i * k + l], |l, j| ww[j * k + l], [t, n, k]);
    let biased = product.iter().zip(bias.iter().cycle());
    let y_want = biased.map(|(y, b)| y + f64::from(*b)).collect();
    let sum = |j: usize| -> f64 { (0..t).map(|i| dyw[i * n + j]).sum() };
    let first = rng.size(0..=n - 1);
    let of = |before: &[f32], columns: Range<usize>| -> Vec<f64> {
        columns
            .zip(before)
            .map(|(j, b)| f64::from(*b) + sum(j))
            .collect()
    };
    let (all_want, some_want) = (of(&db_all, 0..n), of(&db, first..n));
    let dy = tensor(device, &dy, &[t, n]);
    let db_all = statistic(device, &db_all, &[n]);
    let db = tensor(device, &db[..n - first], &[n - first]);
    bias_grad(&dy, &db_all);
    bias_grad(View::columns(&dy, first..n), &db);
    let (x, w) = (tensor(device, &x, &[t, k]), tensor(device, &w, &[n, k]));
    let bias = tensor(device, &bias, &[n]);
    vec![
        Check("forward", forward_bias(&x, &w, &bias), y_want),
        Check("gradient", db_all, all_want),
        Check("gradient of some", db, some_want),
    ]
}

#[test]
#[should_panic(expected = "a bias")]
fn law_a_bias_is_as_long_as_a_row() {
    let device = Device::cpu(1);
    let x = tensor(&device, &[1.0; 6], &[2, 3]);
    forward_bias(&x, &x, &tensor(&device, &[0.0; 3], &[3]));
}
