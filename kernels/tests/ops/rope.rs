//! Tests of `rope` against its f64 reference in plain loops.

use moefold_kernels::TensorClass;
use moefold_kernels::rope::*;

use crate::support::{Check, differences, inner, inside, oracle_everywhere, tensor, wide};

/// Sizes of one case: heads, their width, the rotated width, and what passes before it.
type Sizes = [usize; 4];

/// What is rotated, and how.
struct Rule<'a> {
    positions: &'a [u32],
    sizes: Sizes,
    theta: f64,
    amplitude: f64,
    pairing: Pairing,
}

fn reference(x: &[f64], rule: &Rule<'_>) -> Vec<f64> {
    let &Rule {
        positions,
        sizes: [heads, d, rotary, skipped],
        theta,
        amplitude,
        pairing,
    } = rule;
    let mut y = x.to_vec();
    for (t, &position) in positions.iter().enumerate() {
        for h in 0..heads {
            let at = (t * heads + h) * d + skipped;
            for i in 0..rotary / 2 {
                let angle = f64::from(position) / theta.powf((2 * i) as f64 / rotary as f64);
                let (first, second) = match pairing {
                    Pairing::Halves => (at + i, at + i + rotary / 2),
                    Pairing::Neighbours => (at + 2 * i, at + 2 * i + 1),
                };
                let (a, b) = (x[first], x[second]);
                y[first] = amplitude * (a * angle.cos() - b * angle.sin());
                y[second] = amplitude * (a * angle.sin() + b * angle.cos());
            }
        }
    }
    y
}

#[test]
fn oracle_forward_and_backward() {
    oracle_everywhere(24, |device, rng| {
        let (tokens, heads) = (rng.size(0..=12), rng.size(1..=6));
        // Halves of whole accesses and not, a part of a head and all of it.
        let rotary = [2, 6, 14, 16, 64][rng.size(0..=4)];
        let skipped = [0, 0, 5, 16][rng.size(0..=3)];
        let d = skipped + rotary + [0, 3, 16][rng.size(0..=2)];
        let positions: Vec<u32> = (0..tokens).map(|_| rng.size(0..=5000) as u32).collect();
        let rule = Rule {
            positions: &positions,
            sizes: [heads, d, rotary, skipped],
            theta: [1e4, 1e6][rng.size(0..=1)],
            amplitude: [1.0, 1.3][rng.size(0..=1)],
            pairing: [Pairing::Halves, Pairing::Neighbours][rng.size(0..=1)],
        };
        let len = tokens * heads * d;
        let (x, dy) = (rng.values(len), rng.values(len));
        let y_want = reference(&wide(&x), &rule);
        let dx_want = differences(&x, |x| inner(&reference(x, &rule), &dy));
        let frequencies = frequencies(rotary, rule.theta);
        let positions = positions.iter().copied();
        let mut rope = table(device, &positions, &frequencies, rule.amplitude);
        if rng.coin() {
            // The same of a table in another order, with rows that nobody takes.
            let order: Vec<usize> = (0..tokens).rev().chain([0]).collect();
            let among = order
                .iter()
                .map(|&token| rule.positions.get(token).copied());
            let among: Vec<u32> = among.map(Option::unwrap_or_default).collect();
            rope = table(device, &among.into_iter(), &frequencies, rule.amplitude);
            let rows: Vec<i32> = (0..tokens as i32).rev().collect();
            rope = rope.at(device.from_i32(TensorClass::Activations, &rows, &[tokens]));
        }
        let rope = rope.pairing(rule.pairing).skipping(skipped);
        let offset = 8 - rng.size(0..=1);
        let place = |values: &[f32]| inside(&tensor(device, values, &[tokens, heads, d]), offset);
        let (y, dx) = (place(&x), place(&dy));
        forward(&y, &rope);
        backward(&dx, &rope);
        vec![Check("y", y, y_want), Check("dx", dx, dx_want)]
    });
}

#[test]
fn law_backward_undoes_forward() {
    let device = moefold_kernels::Device::cpu(1);
    let x: Vec<f32> = (0..24).map(|i| i as f32 - 11.5).collect();
    let t = tensor(&device, &x, &[3, 2, 4]);
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        let frequencies = frequencies(4, 10_000.0);
        let rope = table(&device, &[7, 0, 31].into_iter(), &frequencies, 1.0).pairing(pairing);
        forward(&t, &rope);
        backward(&t, &rope);
        assert!(crate::support::error(&t.to_f32(), &wide(&x)) < 1e-6);
    }
}
