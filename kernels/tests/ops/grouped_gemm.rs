//! Tests of `grouped_gemm` against its f64 reference in plain loops.

use moefold_kernels::grouped_gemm::*;
use moefold_kernels::{Device, Dtype, TensorClass, catch};

use crate::support::{
    Check, Rng, assert_bits, emulated, integers, on_every_device, oracle, oracle_everywhere,
    statistic, tensor, tensor_at, wide,
};

#[test]
fn oracle_three_products() {
    oracle(40, |device, rng| {
        let (experts, n, k) = (rng.size(1..=6), rng.size(1..=50), rng.size(1..=50));
        let rows = [0, 1, rng.size(2..=90)][rng.size(0..=2)];
        let counts = rng.counts(experts, rows);
        three_products(device, rng, &counts, [n, k], 0)
    });
}

/// Counts around the edges of tiles, experts without rows first, last and between, all rows with
/// one; rows that wide accesses can take or not, in memory that starts where they can or not; sums
/// into main gradients of either dtype.
#[test]
fn oracle_ragged_everywhere() {
    oracle_everywhere(12, |device, rng| {
        let (experts, [n, k]) = match rng.size(0..=2) {
            0 => (rng.size(1..=40), [rng.size(1..=20), rng.size(1..=20)]),
            1 => (4, [8 * rng.size(1..=4), 8 * rng.size(1..=34)]),
            _ => (3, [8 * rng.size(1..=34), 8 * rng.size(1..=4)]),
        };
        let counts = match rng.size(0..=2) {
            0 => {
                let rows = rng.size(0..=100);
                rng.counts(experts, rows)
            }
            1 => {
                let mut counts = vec![0; experts];
                counts[rng.size(0..=experts - 1)] = [1, 129, 257][rng.size(0..=2)];
                counts
            }
            _ => {
                let edges = [0, 0, 1, 63, 64, 65, 127, 129];
                let pick = |i: usize, rng: &mut Rng| if i < 4 { edges[rng.size(0..=7)] } else { 0 };
                (0..experts).map(|i| pick(i, rng)).collect()
            }
        };
        let start = [0, 0, 8, 3][rng.size(0..=3)];
        three_products(device, rng, &counts, [n, k], start)
    });
}

fn three_products(
    device: &Device,
    rng: &mut Rng,
    counts: &[usize],
    [n, k]: [usize; 2],
    start: usize,
) -> Vec<Check> {
    let (experts, rows) = (counts.len(), counts.iter().sum::<usize>());
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
    let dims = [experts, n, k];
    let dw_t = if rng.coin() {
        tensor(device, &w, &dims)
    } else {
        statistic(device, &w, &dims)
    };
    let w = tensor_at(device, start, &w, &dims);
    let x = tensor_at(device, start, &x, &[rows, k]);
    let dy = tensor(device, &dy, &[rows, n]);
    wgrad(&dy, &x, counts, &dw_t);
    vec![
        Check("forward", forward(&x, &w, counts), y),
        Check("dgrad", dgrad(&dy, &w, counts), dx),
        Check("wgrad", dw_t, dw),
    ]
}

/// Offsets on the device say what counts on the host say; rows behind the last are no expert's.
#[test]
fn differential_offsets_on_the_device() {
    on_every_device(2, |device| {
        let mut rng = Rng::new(2);
        let (n, k, rows) = (24, 16, 90);
        let counts = [0, 70, 3, 0];
        let random = |rng: &mut Rng, dims: &[usize]| {
            tensor(device, &rng.values(dims.iter().product()), dims)
        };
        let (x, dy) = (random(&mut rng, &[rows, k]), random(&mut rng, &[rows, n]));
        let w = random(&mut rng, &[4, n, k]);
        let (used_x, used_dy) = (x.rows(0..73), dy.rows(0..73));
        let offsets = integers(device, &[0, 0, 70, 73, 73], &[5]);
        let at = Rows::Offsets(&offsets);
        let got = forward_of(&x, &w, at).rows(0..73).to_f32();
        assert_bits("forward", &got, &forward(&used_x, &w, &counts).to_f32(), 2);
        let got = dgrad_of(&dy, &w, at).rows(0..73).to_f32();
        assert_bits("dgrad", &got, &dgrad(&used_dy, &w, &counts).to_f32(), 2);
        let [got, want] = [0, 1].map(|_| statistic(device, &[0.5; 4 * 24 * 16], &[4, n, k]));
        wgrad_of(&dy, &x, at, &got);
        wgrad(&used_dy, &used_x, &counts, &want);
        assert_bits("wgrad", &got.to_f32(), &want.to_f32(), 2);
    });
}

/// Matrices that rest by input do what their transposes do.
#[test]
fn oracle_matrices_by_input() {
    oracle_everywhere(6, |device, rng| {
        let (n, k) = [(16, 24), (rng.size(1..=20), rng.size(1..=20)), (72, 8)][rng.size(0..=2)];
        let rows = rng.size(0..=150);
        let counts = rng.counts(3, rows);
        let at = Rows::Counts(&counts);
        let w = rng.values(3 * n * k);
        let turned = |w: &[f64]| -> Vec<f64> {
            let place = |at: usize| (at / (n * k), at % (n * k) / n, at % n);
            let of = |(e, j, i): (usize, usize, usize)| w[e * n * k + i * k + j];
            (0..w.len()).map(|at| of(place(at))).collect()
        };
        let by_input: Vec<f32> = turned(&wide(&w)).into_iter().map(|w| w as f32).collect();
        let (x, dy) = (rng.values(rows * k), rng.values(rows * n));
        let (xw, dyw, ww) = (wide(&x), wide(&dy), wide(&w));
        let (mut y, mut dx, mut dw) = (vec![0.0; rows * n], vec![0.0; rows * k], ww.clone());
        let experts = counts.iter().enumerate();
        let experts = experts.flat_map(|(e, &count)| std::iter::repeat_n(e, count));
        for (row, e) in experts.enumerate() {
            for i in 0..n {
                for j in 0..k {
                    let weight = e * n * k + i * k + j;
                    y[row * n + i] += xw[row * k + j] * ww[weight];
                    dx[row * k + j] += dyw[row * n + i] * ww[weight];
                    dw[weight] += dyw[row * n + i] * xw[row * k + j];
                }
            }
        }
        let dims = [3, k, n];
        let dw_t = statistic(device, &by_input, &dims);
        let w = tensor(device, &by_input, &dims);
        let (x, dy) = (
            tensor(device, &x, &[rows, k]),
            tensor(device, &dy, &[rows, n]),
        );
        wgrad_of(&dy, &x, at, Matrices::by_input(&dw_t));
        vec![
            Check("forward", forward_of(&x, Matrices::by_input(&w), at), y),
            Check("dgrad", dgrad_of(&dy, Matrices::by_input(&w), at), dx),
            Check("wgrad", dw_t, turned(&dw)),
        ]
    });
}

/// What one expert's rows hold, not even a NaN, reaches the results of another; and the same work
/// gives the same bits again.
#[test]
fn law_experts_do_not_meet() {
    on_every_device(4, |device| {
        let mut rng = Rng::new(4);
        let (n, k, counts) = (40, 72, [70, 3, 66]);
        let rows: usize = counts.iter().sum();
        let (mut x, mut dy) = (rng.values(rows * k), rng.values(rows * n));
        let w = tensor(device, &rng.values(3 * n * k), &[3, n, k]);
        let run = |x: &[f32], dy: &[f32]| {
            let (x, dy) = (
                tensor(device, x, &[rows, k]),
                tensor(device, dy, &[rows, n]),
            );
            let dw = device.zeros(TensorClass::Gradients, Dtype::F32, &[3, n, k]);
            wgrad(&dy, &x, &counts, &dw);
            let (y, dx) = (forward(&x, &w, &counts), dgrad(&dy, &w, &counts));
            [y, dx, dw].map(|t| t.to_f32())
        };
        let want = run(&x, &dy);
        for (again, want) in run(&x, &dy).iter().zip(&want) {
            assert_bits(&format!("again on {device:?}"), again, want, 4);
        }
        x[70 * k..73 * k].fill(f32::NAN);
        dy[70 * n..73 * n].fill(f32::INFINITY);
        let got = run(&x, &dy);
        let others = |all: &[f32], width: usize, starts: [usize; 2]| {
            [&all[..starts[0] * width], &all[starts[1] * width..]].concat()
        };
        for ((got, want), (width, starts)) in
            got.iter()
                .zip(&want)
                .zip([(n, [70, 73]), (k, [70, 73]), (n * k, [1, 2])])
        {
            let (got, want) = (others(got, width, starts), others(want, width, starts));
            assert_bits(&format!("others on {device:?}"), &got, &want, 4);
        }
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

/// Whole tiles and tiles half of which has nothing to compute, in turn, over more steps than are kept
/// in flight, in several schedules.
#[test]
fn law_idle_halves_of_tiles_keep_up() {
    for seed in 0..7 {
        let Some(device) = emulated(seed).pop() else {
            return;
        };
        let (counts, n, k) = ([131; 3], 136, 520);
        let x = tensor(&device, &vec![1.0; 393 * k], &[393, k]);
        let w = tensor(&device, &vec![0.5; 3 * n * k], &[3, n, k]);
        let y = catch(|| forward(&x, &w, &counts).to_f32());
        let y = y.unwrap_or_else(|error| panic!("{error}"));
        assert!(y.iter().all(|&y| y == 260.0), "{y:?}, seed {seed}");
    }
}
