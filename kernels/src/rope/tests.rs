//! Tests of `rope` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, differences, inner, oracle, tensor, wide};

/// Sizes of one case: heads, their width, the rotated width.
type Sizes = (usize, usize, usize);

fn twin(x: &[f64], positions: &[u32], (heads, d, rotary): Sizes, theta: f64) -> Vec<f64> {
    let mut y = x.to_vec();
    for (t, &position) in positions.iter().enumerate() {
        for h in 0..heads {
            let at = (t * heads + h) * d;
            for i in 0..rotary / 2 {
                let angle = f64::from(position) / theta.powf((2 * i) as f64 / rotary as f64);
                let (a, b) = (x[at + i], x[at + i + rotary / 2]);
                y[at + i] = a * angle.cos() - b * angle.sin();
                y[at + i + rotary / 2] = a * angle.sin() + b * angle.cos();
            }
        }
    }
    y
}

#[test]
fn oracle_forward_and_backward() {
    oracle(20, |device, rng| {
        let (tokens, heads) = (rng.size(1..=12), rng.size(1..=3));
        let rotary = 2 * rng.size(1..=10);
        let d = rotary + [0, 3][rng.size(0..=1)];
        let theta = [1e4, 1e6][rng.size(0..=1)];
        let positions: Vec<u32> = (0..tokens).map(|_| rng.size(0..=5000) as u32).collect();
        let len = tokens * heads * d;
        let (x, dy) = (rng.values(len), rng.values(len));
        let sizes = (heads, d, rotary);
        let y_want = twin(&wide(&x), &positions, sizes, theta);
        let dx_want = differences(&x, |x| inner(&twin(x, &positions, sizes, theta), &dy));
        let rope = table(device, &positions, rotary, theta);
        let dims = [tokens, heads, d];
        let (y, dx) = (tensor(device, &x, &dims), tensor(device, &dy, &dims));
        forward(&y, &rope);
        backward(&dx, &rope);
        vec![Check("y", y, y_want), Check("dx", dx, dx_want)]
    });
}

#[test]
fn law_backward_undoes_forward() {
    let device = crate::Device::cpu(1);
    let x: Vec<f32> = (0..24).map(|i| i as f32 - 11.5).collect();
    let t = tensor(&device, &x, &[3, 2, 4]);
    let rope = table(&device, &[7, 0, 31], 4, 10_000.0);
    forward(&t, &rope);
    backward(&t, &rope);
    assert!(crate::testing::error(&t.to_f32(), &wide(&x)) < 1e-6);
}
