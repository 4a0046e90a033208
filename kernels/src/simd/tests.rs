//! Tests of the vector functions against f64.

use super::*;

vectorized! {
    fn exp_all(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = exp(x);
        }
    }
}

/// Units in the last place between an f32 and the true value.
fn ulps(got: f32, want: f64) -> f64 {
    let nearest = want as f32;
    let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
    ((f64::from(got) - want) / ulp).abs()
}

/// Every 997th f32 of the range in which the result is a finite number, against f64.
#[test]
fn oracle_exp_within_two_ulps() {
    let mut x: Vec<f32> = Vec::new();
    for bits in (0..88.72f32.to_bits()).step_by(997) {
        x.push(f32::from_bits(bits));
    }
    for bits in (0..104.0f32.to_bits()).step_by(997) {
        x.push(-f32::from_bits(bits));
    }
    let mut y = vec![0.0; x.len()];
    exp_all(&x, &mut y);
    let mut worst = (0.0, 0.0);
    for (&x, &y) in x.iter().zip(&y) {
        let error = ulps(y, f64::from(x).exp());
        if error > worst.0 {
            worst = (error, x);
        }
        assert_eq!(
            y.to_bits(),
            exp(x).to_bits(),
            "vectors and scalars differ at {x}"
        );
    }
    assert!(worst.0 <= 2.0, "{} ulp at {}", worst.0, worst.1);
}

#[test]
fn golden_exp_at_the_edges() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(-200.0), 0.0);
    assert_eq!(exp(89.0), f32::INFINITY);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert!(exp(f32::NAN).is_nan());
    assert!(exp(-103.0) > 0.0, "subnormal results are kept");
}

#[test]
fn law_reductions_see_every_element() {
    for len in 0..70 {
        let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
        assert_eq!(sum(&x, |x| x), (0..len).sum::<i32>() as f32);
        assert_eq!(dot(&x, &x), (0..len).map(|i| i * i).sum::<i32>() as f32);
        assert_eq!(
            max(&x),
            if len == 0 {
                f32::NEG_INFINITY
            } else {
                len as f32 - 1.0
            }
        );
    }
}
