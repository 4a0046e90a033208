//! Profile directories: what was measured here, with where and how.
//!
//! A profile is raw samples with provenance; medians, spread and prices are derived when it is read.

use serde::{Deserialize, Serialize};

use crate::op::{Collective, Op};

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Key {
    /// A device operation.
    Op(Op),
    /// A collective.
    Collective(Collective),
}

/// Repeated timings of one key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// What was timed.
    pub key: Key,
    /// Raw timings after warm-up, seconds each.
    pub seconds: Vec<f64>,
}

/// A profile directory's content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of this format.
    pub version: u32,
    /// The device, as [`crate::Gpu::name`] has it.
    pub device: String,
    /// The host: processor, cores, memory, system, in words.
    pub machine: String,
    /// Ranks that ran at the same time when the samples were taken.
    pub concurrent_ranks: u32,
    /// Driver, compiler and library versions, `name version` each.
    pub versions: Vec<String>,
    /// Clocks, in words, where they are known.
    pub clocks: String,
    /// When, as RFC 3339.
    pub date: String,
    /// The command that measured.
    pub command: String,
    /// Raw samples.
    pub samples: Vec<Sample>,
}
