//! [`Nearest`]: the legal values on either side of one that is not, for the messages of refusals.

use std::fmt;

/// A product that stays at the top instead of wrapping: such a product divides nothing real.
pub(crate) fn product(factors: &[u32]) -> u64 {
    factors
        .iter()
        .fold(1, |product: u64, &f| product.saturating_mul(f.into()))
}

/// The legal values on either side of a value that is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nearest {
    pub(crate) below: Option<u64>,
    pub(crate) above: Option<u64>,
}

impl Nearest {
    /// How far to look; beyond that a suggestion would help nobody.
    const REACH: u64 = 1 << 16;

    /// The nearest values of at least 1 that are legal.
    pub(crate) fn around(value: u64, legal: impl Fn(u64) -> bool) -> Self {
        let lowest = value.saturating_sub(Self::REACH).max(1);
        let highest = value.saturating_add(Self::REACH);
        Self {
            below: (lowest..value).rev().find(|&v| legal(v)),
            above: (value.saturating_add(1)..=highest).find(|&v| legal(v)),
        }
    }
}

/// The divisors of `whole` nearest to `part`.
pub(crate) fn divisors(whole: u64, part: u64) -> Nearest {
    let inside = Nearest::around(part.min(whole.saturating_add(1)), |v| {
        whole.is_multiple_of(v)
    });
    Nearest {
        below: inside.below,
        above: inside.above.filter(|&v| v <= whole),
    }
}

/// The positive multiples of `unit` nearest to `value`.
pub(crate) fn multiples(value: impl Into<u64>, unit: u64) -> Nearest {
    let below = value.into() / unit.max(1) * unit;
    Nearest {
        below: Some(below).filter(|&v| v > 0),
        above: below.checked_add(unit),
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.below, self.above) {
            (Some(below), Some(above)) => write!(f, "{below} or {above}"),
            (Some(only), None) | (None, Some(only)) => write!(f, "{only}"),
            (None, None) => write!(f, "1"),
        }
    }
}
