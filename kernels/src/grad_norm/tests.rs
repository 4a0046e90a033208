//! Tests of `grad_norm` against its f64 twin in plain loops.

use super::*;
use crate::Device;
use crate::testing::{Rng, tensor};

#[test]
fn oracle_sum_and_equal_bits_at_any_threads() {
    let mut rng = Rng::new(3);
    for len in [0, 1, 15, 16, 17, 1 << 14, (1 << 14) + 1, 150_001] {
        let x = rng.values(len);
        let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let got = [1, 2, 3].map(|n| {
            let device = Device::cpu_sharing_all(n);
            sum_squares(&tensor(&device, &x, &[len]))
        });
        assert!(
            (got[0] - want).abs() <= 1e-12 * want,
            "{len}: {} not {want}",
            got[0]
        );
        assert!(
            got.iter().all(|g| g.to_bits() == got[0].to_bits()),
            "{len}: {got:?}"
        );
    }
}
