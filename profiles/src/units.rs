//! Quantities that cross function boundaries, each its own type with only the arithmetic that makes
//! sense: bytes over bytes-per-second is seconds, and nothing else is.
//!
//! Counts stay plain integers (`num_ranks`, `num_experts`). Simulated time is [`Instant`] and
//! [`Span`] in integer nanoseconds, so that order and golden files do not depend on the platform;
//! a cost in [`Seconds`] is rounded once, by [`Seconds::to_span`].

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// One KiB, 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB, 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB, 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// Whole quantities stop at the largest there is: absurd input must not become a small sum.
macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident($inner:ty) by $add:path, $mul:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self($add(self.0, other.0))
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
        impl Mul<$inner> for $name {
            type Output = Self;
            fn mul(self, factor: $inner) -> Self {
                Self($mul(self.0, factor))
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::default(), Add::add)
            }
        }
        impl<'a> Sum<&'a $name> for $name {
            fn sum<I: Iterator<Item = &'a Self>>(iter: I) -> Self {
                iter.copied().sum()
            }
        }
    };
}

quantity! {
    /// A size in memory or on the wire.
    #[derive(Eq, Ord, Hash)]
    Bytes(u64) by u64::saturating_add, u64::saturating_mul
}
quantity! {
    /// Floating-point operations; a fused multiply-add counts two.
    Flops(f64) by Add::add, Mul::mul
}
quantity! {
    /// Wall time of an operation, before it is rounded into simulated time.
    Seconds(f64) by Add::add, Mul::mul
}
quantity! {
    /// A data rate; GB/s is 1e9 of these.
    BytesPerSecond(f64) by Add::add, Mul::mul
}
quantity! {
    /// A compute rate; TFLOP/s is 1e12 of these.
    FlopsPerSecond(f64) by Add::add, Mul::mul
}
quantity! {
    /// A length of simulated time, in nanoseconds.
    #[derive(Eq, Ord, Hash)]
    Span(u64) by u64::saturating_add, u64::saturating_mul
}

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// The size in GiB (2^30 bytes).
    pub fn gib(self) -> f64 {
        self.0 as f64 / GIB as f64
    }

    /// The size in MiB (2^20 bytes).
    pub fn mib(self) -> f64 {
        self.0 as f64 / MIB as f64
    }

    /// The difference, or zero where `other` is the larger.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The product with a fraction, rounded to the nearest byte.
    #[must_use]
    pub fn scale(self, factor: f64) -> Self {
        Self((self.0 as f64 * factor).round() as u64)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= GIB => write!(f, "{:.2} GiB", self.gib()),
            n if n >= MIB => write!(f, "{:.2} MiB", self.mib()),
            n if n >= KIB => write!(f, "{:.2} KiB", n as f64 / KIB as f64),
            n => write!(f, "{n} B"),
        }
    }
}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    /// The only way to get a transfer time.
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 as f64 / rate.0)
    }
}

impl Div<FlopsPerSecond> for Flops {
    type Output = Seconds;
    /// The only way to get a compute time from a rate.
    fn div(self, rate: FlopsPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<Seconds> for Flops {
    type Output = FlopsPerSecond;
    fn div(self, time: Seconds) -> FlopsPerSecond {
        FlopsPerSecond(self.0 / time.0)
    }
}

impl Div<Seconds> for Bytes {
    type Output = BytesPerSecond;
    fn div(self, time: Seconds) -> BytesPerSecond {
        BytesPerSecond(self.0 as f64 / time.0)
    }
}

impl BytesPerSecond {
    /// A rate given in GB/s (1e9 bytes a second).
    pub fn from_gb_per_s(rate: f64) -> Self {
        Self(rate * 1e9)
    }

    /// The rate in GB/s.
    pub fn gb_per_s(self) -> f64 {
        self.0 / 1e9
    }
}

impl FlopsPerSecond {
    /// A rate given in TFLOP/s (1e12).
    pub fn from_tflops(rate: f64) -> Self {
        Self(rate * 1e12)
    }

    /// The rate in TFLOP/s.
    pub fn tflops(self) -> f64 {
        self.0 / 1e12
    }
}

impl Seconds {
    /// No time.
    pub const ZERO: Self = Self(0.0);

    /// A time given in microseconds.
    pub fn from_us(us: f64) -> Self {
        Self(us * 1e-6)
    }

    /// The longer of two times.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }

    /// The shorter of two times.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// Rounds a cost to simulated nanoseconds. The one place where that happens. What does not fit
    /// is the longest span there is.
    pub fn to_span(self) -> Span {
        Span((self.0.max(0.0) * 1e9).round() as u64)
    }
}

impl Span {
    /// No time.
    pub const ZERO: Self = Self(0);

    /// The length in seconds.
    pub fn seconds(self) -> Seconds {
        Seconds(self.0 as f64 * 1e-9)
    }

    /// The difference, or zero where `other` is the longer.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// A moment of simulated or measured time, nanoseconds since the step or run began.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Instant(pub u64);

impl Add<Span> for Instant {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub for Instant {
    type Output = Span;
    /// # Panics
    /// When `other` is later: time does not run backwards in a trace.
    fn sub(self, other: Self) -> Span {
        Span(
            self.0
                .checked_sub(other.0)
                .expect("instants are subtracted later minus earlier"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_transfer_time_inverts() {
        let rate = BytesPerSecond::from_gb_per_s(50.0);
        assert_eq!(Bytes(50_000_000_000) / rate, Seconds(1.0));
        assert_eq!((Bytes(100) / Seconds(2.0)).0, 50.0);
    }

    #[test]
    fn bytes_are_spelled_in_binary_units() {
        assert_eq!(Bytes(3 * GIB / 2).to_string(), "1.50 GiB");
        assert_eq!(Bytes(17).to_string(), "17 B");
    }

    #[test]
    fn seconds_round_to_nanoseconds_once() {
        assert_eq!(Seconds(1.5e-9).to_span(), Span(2));
        assert_eq!(Seconds(-1.0).to_span(), Span::ZERO);
    }

    #[test]
    fn law_simulated_time_stops_at_the_longest_there_is() {
        let longest = Seconds(1e300).to_span();
        assert_eq!(longest, Seconds(f64::INFINITY).to_span());
        assert_eq!((longest + Span(1)) * 2, longest);
        assert_eq!(Instant(1) + longest, Instant(u64::MAX));
        assert_eq!([longest, longest].iter().sum::<Span>(), longest);
    }
}
