//! bfloat16 on the host: the upper half of an f32.

/// The nearest bf16, ties to even; NaN stays NaN.
pub fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // A NaN whose set bits are all in the lower half must not become an infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    let tie_to_even = 0x7fff + ((bits >> 16) & 1);
    ((bits + tie_to_even) >> 16) as u16
}

/// The same number as an f32.
pub fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_takes_the_nearest_of_the_two_neighbours() {
        let mut bits = 0x9e37_79b9u32;
        for _ in 0..10_000 {
            bits = bits.wrapping_mul(0x2545_f491).wrapping_add(0x1234_5677);
            let value = f32::from_bits(bits);
            if !value.is_finite() || value.abs() > 3e38 {
                continue;
            }
            let (low, got) = ((bits >> 16) as u16, narrow(value));
            let error = |b: u16| (f64::from(widen(b)) - f64::from(value)).abs();
            assert!(error(got) <= error(low) && error(got) <= error(low + 1));
            if error(low) == error(low + 1) {
                assert_eq!(
                    got & 1,
                    0,
                    "{value:e} lies between two and takes the even one"
                );
            }
            assert_eq!(narrow(widen(got)), got);
        }
        assert!(widen(narrow(f32::from_bits(0x7f80_0001))).is_nan());
        assert_eq!(widen(narrow(f32::INFINITY)), f32::INFINITY);
    }
}
