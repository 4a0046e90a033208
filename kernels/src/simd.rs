//! Loops compiled for the widest vectors of the machine, and the arithmetic they share.
//!
//! [`vectorized!`] compiles a plain loop three times (AVX-512, AVX2, baseline) and picks at run
//! time. Reductions run in [`LANES`] partial sums in a fixed order and no product is contracted
//! into a fused multiply-add, so that all three give the same bits.

#![expect(
    clippy::inline_always,
    reason = "inlined into each of the three compilations"
)]

/// Partial sums of a reduction: one AVX-512 register, two of AVX2, four of SSE.
pub(crate) const LANES: usize = 16;

/// The vector instructions found on this machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// AVX-512 F, VL, BW and DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the target always has.
    Baseline,
}

/// Looks the instructions up (the standard library caches them).
#[inline]
pub(crate) fn isa() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
        {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return Isa::Avx2;
        }
    }
    Isa::Baseline
}

/// Defines a function whose body is compiled for every [`Isa`] and picked at run time.
macro_rules! vectorized {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?)
        $(-> $result:ty)? $body:block) => {
        $(#[$attribute])*
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }
            match $crate::simd::isa() {
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx512 => {
                    // SAFETY: `isa` found the instructions.
                    #[expect(unsafe_code, reason = "the instructions were found")]
                    let result = unsafe { avx512($($argument),*) };
                    result
                }
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 => {
                    // SAFETY: `isa` found the instructions.
                    #[expect(unsafe_code, reason = "the instructions were found")]
                    let result = unsafe { avx2($($argument),*) };
                    result
                }
                $crate::simd::Isa::Baseline => body($($argument),*),
            }
        }
    };
}
pub(crate) use vectorized;

/// Folds the partial results of a reduction pairwise, always in the same order.
#[inline(always)]
pub(crate) fn fold(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = combine(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of `value(x[i], y[i])`.
#[inline(always)]
pub(crate) fn sum2(x: &[f32], y: &[f32], value: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for i in 0..LANES {
            lanes[i] += value(x[i], y[i]);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_tail.iter().zip(y_tail)) {
        *lane += value(x, y);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of `value(x[i])`.
#[inline(always)]
pub(crate) fn sum(x: &[f32], value: impl Fn(f32) -> f32) -> f32 {
    sum2(x, x, |x, _| value(x))
}

/// Scalar product.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    sum2(x, y, |x, y| x * y)
}

/// The largest element; minus infinity for none.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let pick = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = pick(lanes[i], x[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = pick(*lane, x);
    }
    fold(lanes, pick)
}

/// `e^x`, without branches so that loops over it vectorize.
///
/// Range reduction by `n = round(x / ln 2)` in two parts (Cody and Waite), then the degree-7
/// polynomial of Cephes `expf`. Within 2 ulp of the true value over the whole range, subnormal
/// results and overflow to infinity included; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 split so that `n * LN2_HI` is exact (Cephes).
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Beyond these the result is 0 or infinity; written so that NaN passes.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // 2^n in two factors, since n reaches from -150 to 128.
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) << 23) as u32);
    y * power(half) * power(n.wrapping_sub(half))
}

/// The logistic function `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests;
