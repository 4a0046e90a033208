//! Tests of `elementwise` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, oracle, tensor, wide};

#[test]
fn oracle_all() {
    oracle(20, |device, rng| {
        let len = rng.size(0..=200);
        let (a, b) = (rng.values(len), rng.values(len));
        let (aw, bw) = (wide(&a), wide(&b));
        let t = |values: &[f32]| tensor(device, values, &[len]);
        let both = |f: fn(f64, f64) -> f64| aw.iter().zip(&bw).map(|(a, b)| f(*a, *b)).collect();
        let (added, scaled, filled, axpied) = (t(&a), t(&a), t(&a), t(&a));
        add_into(&added, &t(&b));
        axpy(-0.75, &t(&b), &axpied);
        scale(&scaled, 3.0);
        fill(&filled, 2.5);
        let total = sum(&t(&a));
        assert!((total - aw.iter().sum::<f64>()).abs() < 1e-12);
        vec![
            Check("add", add(&t(&a), &t(&b)), both(|a, b| a + b)),
            Check("add_into", added, both(|a, b| a + b)),
            Check("axpy", axpied, both(|a, b| a - 0.75 * b)),
            Check("scale", scaled, both(|a, _| 3.0 * a)),
            Check("fill", filled, vec![2.5; len]),
            Check(
                "duplicate",
                duplicate(&t(&a), TensorClass::Transient),
                aw.clone(),
            ),
        ]
    });
}
