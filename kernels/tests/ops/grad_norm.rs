//! Tests of `grad_norm` against its f64 reference in plain loops.

use moefold_kernels::Device;
use moefold_kernels::grad_norm::*;

use crate::support::{Rng, emulated, inside, statistic, tensor};

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

#[test]
fn oracle_sum_on_every_device() {
    let mut rng = Rng::new(4);
    let x = rng.values(20_001);
    for device in emulated(4) {
        for (len, offset) in [(0, 0), (1, 0), (7, 3), (33, 8), (1000, 7), (20_001, 1)] {
            for kind in [tensor, statistic] {
                let t = inside(&kind(&device, &x[..len], &[len]), offset);
                let values = t.to_f32();
                let want: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                let got = sum_squares(&t);
                assert!(
                    (got - want).abs() <= 1e-12 * want,
                    "{len} on {device:?}: {got} not {want}"
                );
                assert_eq!(got.to_bits(), sum_squares(&t).to_bits(), "{len}");
            }
        }
    }
}
