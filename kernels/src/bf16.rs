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

/// As a model's weight is made of its master: the nearest bf16, ties away from zero, so that what it lacks of the
/// master is its lower half, a signed number of 16 bits; NaN stays NaN.
pub fn of_master(master: f32) -> u16 {
    let bits = master.to_bits();
    if master.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x8000) >> 16) as u16
}

/// The lower half of a master.
pub fn remainder(master: f32) -> u16 {
    master.to_bits() as u16
}

/// The master of a weight and its remainder; a NaN of some kind where it was one.
pub fn master(weight: u16, remainder: u16) -> f32 {
    let upper = weight.wrapping_sub(remainder >> 15);
    f32::from_bits(u32::from(upper) << 16 | u32::from(remainder))
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

    #[test]
    fn law_a_weight_and_a_remainder_are_their_master() {
        // Every upper half, with what lies at and beside a tie.
        for upper in 0..=u32::from(u16::MAX) {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let of = f32::from_bits(upper << 16 | lower);
                let weight = of_master(of);
                let again = master(weight, remainder(of));
                if of.is_nan() {
                    assert!(
                        again.is_nan() && widen(weight).is_nan(),
                        "{upper:x} {lower:x}"
                    );
                    continue;
                }
                assert_eq!(again.to_bits(), of.to_bits());
                // The nearest of its two neighbours; of two that are as near the one of the larger magnitude.
                let up = lower >= 0x8000;
                assert_eq!(u32::from(weight), upper + u32::from(up));
            }
        }
    }
}
