//! Prices: how long an op or a collective takes, and how that is known.

use serde::{Deserialize, Serialize};

use crate::units::Seconds;

/// How a price is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A measurement of exactly this key.
    Measured,
    /// Between measurements of the same family.
    Interpolated,
    /// Beyond every measurement, or none at all: a roofline with an efficiency.
    Extrapolated,
}

/// A price.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// How long it takes.
    pub time: Seconds,
    /// How that is known.
    pub source: Source,
}
