//! Tests of `scalars` against plain loops in f64.

use moefold_kernels::scalars::*;
use moefold_kernels::{Device, TensorClass};

use crate::support::{Rng, emulated, inside, on_every_device, statistic, tensor};

/// Relative error that a number may have: its roundings to f32, where it is kept so.
fn close(device: &Device, got: f64, want: f64) -> bool {
    let bound = if device.name() == "cpu" { 1e-12 } else { 1e-6 };
    (got - want).abs() <= bound * want.abs()
}

#[test]
fn oracle_sums_squares_and_products_add_up_without_a_read_by_the_host() {
    on_every_device(7, |device| {
        let mut rng = Rng::new(7);
        let numbers = Scalars::zeros(device, TensorClass::Optimizer, 4);
        let mut want = [0.0; 4];
        let reads = device.host_reads();
        // Few elements, more than a block takes at once, and more blocks than a block has threads.
        for (len, offset, factor) in [
            (0, 0, 1.0),
            (1, 3, 0.25),
            (1000, 1, 1.0 / 3.0),
            (20_001, 0, 2.0),
        ] {
            let all: Vec<f32> = rng.values(len).iter().map(|x| x.abs()).collect();
            let x = inside(&tensor(device, &all, &[len]), offset);
            let y = inside(&statistic(device, &all, &[len]), offset + 1);
            let (seen, exact) = (x.to_f32(), y.to_f32());
            numbers.add_sum(0, factor, &x);
            numbers.add_squares(1, factor, &x);
            numbers.add_products(3, factor, &y, &statistic(device, &all, &[len]));
            let sum = |f: &dyn Fn(f64) -> f64, of: &[f32]| -> f64 {
                of.iter().map(|&x| f(f64::from(x))).sum()
            };
            want[0] += factor * sum(&|x| x, &seen);
            want[1] += factor * sum(&|x| x * x, &seen);
            want[3] += factor * sum(&|x| x * x, &exact);
        }
        if device.name() == "cuda" {
            // `inside` and `to_f32` above read; the sums did not.
            assert_eq!(
                device.host_reads() - reads,
                4 * 4,
                "reads by the test itself"
            );
        }
        let got = numbers.read();
        for (got, want) in got.iter().zip(want) {
            assert!(close(device, *got, want), "{got} not {want} on {device:?}");
        }
        assert_eq!(got[2], 0.0);
        numbers.clear();
        assert_eq!(numbers.read(), [0.0; 4]);
        numbers.write(&[1.0, 2.0, 3.0, 4.5]);
        assert_eq!(numbers.read(), [1.0, 2.0, 3.0, 4.5]);
    });
}

/// More than the blocks of one launch, which then go round: on the largest emulated case alone.
#[test]
fn oracle_the_same_numbers_again() {
    for device in emulated(3) {
        let x = tensor(&device, &Rng::new(3).values(40_000), &[40_000]);
        let sum = || {
            let numbers = Scalars::zeros(&device, TensorClass::Transient, 1);
            numbers.add_squares(0, 0.1, &x);
            numbers.read()[0].to_bits()
        };
        assert_eq!(sum(), sum());
    }
}
