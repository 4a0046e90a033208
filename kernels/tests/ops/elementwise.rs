//! Tests of `elementwise` against its f64 reference in plain loops.

use moefold_kernels::TensorClass;
use moefold_kernels::elementwise::*;

use crate::support::{Check, inside, integers, oracle_everywhere, statistic, tensor, wide};

#[test]
fn oracle_all() {
    oracle_everywhere(16, |device, rng| {
        let len = [0, 1, 7, 8, 31, 33, 1000, 9000][rng.size(0..=7)];
        let (a, b) = (rng.values(len), rng.values(len));
        let (aw, bw) = (wide(&a), wide(&b));
        // Each operand in either dtype, at any place in 16 bytes: all at the same, or not.
        let mut place = |values: &[f32], offset: usize| {
            let kind = [tensor, statistic][rng.size(0..=1)];
            inside(&kind(device, values, &[len]), offset)
        };
        let (left, right) = (place(&a, len % 9), place(&b, len % 9));
        let apart = place(&b, 1 + len % 9);
        let (added, scaled, filled, cleared, axpied) = (
            place(&a, 3),
            place(&a, 5),
            place(&a, 2),
            place(&a, 1),
            place(&a, len % 9),
        );
        let both = |f: fn(f64, f64) -> f64| aw.iter().zip(&bw).map(|(a, b)| f(*a, *b)).collect();
        add_into(&added, &apart);
        axpy(-0.75, &right, &axpied);
        scale(&scaled, 3.0);
        fill(&filled, 2.5);
        fill(&cleared, 0.0);
        let total = sum(&right);
        assert!((total - bw.iter().sum::<f64>()).abs() < 1e-12 * (1.0 + len as f64));
        let copied = place(&vec![0.0; len], 4);
        copy(&left, &copied);
        let sum = add(&left, &right);
        assert_eq!(sum.dtype(), left.dtype());
        vec![
            Check("add", sum, both(|a, b| a + b)),
            Check("add of views apart", add(&left, &apart), both(|a, b| a + b)),
            Check("add_into", added, both(|a, b| a + b)),
            Check("axpy", axpied, both(|a, b| a - 0.75 * b)),
            Check("scale", scaled, both(|a, _| 3.0 * a)),
            Check("fill", filled, vec![2.5; len]),
            Check("fill with zero", cleared, vec![0.0; len]),
            Check("copy", copied, aw.clone()),
            Check(
                "duplicate",
                duplicate(&left, TensorClass::Transient),
                aw.clone(),
            ),
        ]
    });
}

#[test]
fn integers_are_copied_and_never_converted() {
    let device = moefold_kernels::Device::cpu(1);
    let x = integers(&device, &[3, -1, 7], &[3]);
    assert_eq!(duplicate(&x, TensorClass::Transient).to_i32(), [3, -1, 7]);
}
