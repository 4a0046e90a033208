//! [`Order`]: which axis varies fastest along the rank numbers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A mesh axis. Both grids have all five; ep is 1 in the attention grid and cp in the expert grid,
/// and tp and dp stand for etp and edp there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Tensor parallel (attention) or expert tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Expert parallel.
    Ep,
    /// Data parallel (attention) or expert data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
}

impl Axis {
    /// The name in an order string.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tp => "tp",
            Self::Cp => "cp",
            Self::Ep => "ep",
            Self::Dp => "dp",
            Self::Pp => "pp",
        }
    }
}

/// The axes from the fastest varying to the slowest, each once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Order([Axis; 5]);

impl Order {
    /// `tp-cp-ep-dp-pp`, what Megatron-Core does unless told otherwise.
    pub const PP_LAST: Self = Self([Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp]);
    /// `tp-cp-ep-pp-dp`, Megatron's `--use-tp-pp-dp-mapping`: pipeline neighbours sit closer than
    /// replicas. The two grids then agree on pipeline groups only where PP is 1 or EDP equals DP.
    pub const DP_LAST: Self = Self([Axis::Tp, Axis::Cp, Axis::Ep, Axis::Pp, Axis::Dp]);

    /// The axes, fastest first.
    pub fn axes(self) -> [Axis; 5] {
        self.0
    }
}

impl TryFrom<String> for Order {
    type Error = ParseOrderError;

    fn try_from(words: String) -> Result<Self, ParseOrderError> {
        words.parse()
    }
}

impl From<Order> for String {
    fn from(order: Order) -> Self {
        order.to_string()
    }
}

impl Default for Order {
    fn default() -> Self {
        Self::PP_LAST
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(Axis::name).join("-"))
    }
}

/// Why a string is not an order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is not a rank order: tp, cp, ep, dp and pp once each, as in tp-cp-ep-dp-pp")]
pub struct ParseOrderError {
    found: String,
}

impl FromStr for Order {
    type Err = ParseOrderError;

    fn from_str(text: &str) -> Result<Self, ParseOrderError> {
        let error = || ParseOrderError { found: text.into() };
        let axes: Vec<Axis> = text
            .split('-')
            .filter_map(|name| Self::PP_LAST.0.into_iter().find(|a| a.name() == name))
            .collect();
        let every = |axis: &Axis| axes.contains(axis);
        let right = text.split('-').count() == 5 && Self::PP_LAST.0.iter().all(every);
        match <[Axis; 5]>::try_from(axes.as_slice()) {
            Ok(axes) if right => Ok(Self(axes)),
            _ => Err(error()),
        }
    }
}
