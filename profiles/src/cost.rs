//! Prices: how long an op or a collective takes, and how that is known.

use crate::units::Seconds;

crate::named! {
    /// How a price is known, the surest first.
    pub enum Source {
        /// A measurement of exactly this key.
        Measured = "measured",
        /// Between measurements of the same family.
        Interpolated = "interpolated",
        /// Beyond every measurement, or none at all: a roofline with an efficiency.
        Extrapolated = "extrapolated",
    }
}

/// A price.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// How long it takes.
    pub time: Seconds,
    /// How that is known.
    pub source: Source,
}

impl Cost {
    /// The same price so many times over.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            time: Seconds(self.time.0 * factor),
            ..self
        }
    }
}
