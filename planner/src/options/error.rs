//! [`PlanError`]: why there is no plan.

use std::collections::BTreeMap;

use crate::layout::{Illegal, ParseDegreesError, PartialDegrees};
use crate::plan::Recompute;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A flag with a value that means nothing.
    #[error("{flag}: found `{value}`, expected {expected}")]
    Value {
        /// The flag.
        flag: &'static str,
        /// What was found.
        value: String,
        /// What would work.
        expected: String,
    },
    /// Degrees that are no degrees; the source says why.
    #[error("--layout")]
    Degrees(#[from] ParseDegreesError),
    /// A value that a later release prices.
    #[error("{flag} {value}: not supported yet; this release supports {works}")]
    Later {
        /// The flag.
        flag: &'static str,
        /// What was asked for.
        value: String,
        /// What this release has.
        works: String,
    },
    /// Pinned degrees that no layout of the job has.
    #[error("no layout has these degrees: {}", layout_text(broken, nearest.as_ref()))]
    Layout {
        /// Every rule broken.
        broken: Vec<Illegal>,
        /// The nearest legal degrees, where all were pinned and there are any.
        nearest: Option<PartialDegrees>,
    },
    /// Something the chosen stack or cluster cannot do.
    #[error("{what}: {limit}")]
    Unable {
        /// What was asked for.
        what: String,
        /// What is possible.
        limit: String,
    },
    /// A file that cannot be used.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// No layout of the space is legal and fits.
    #[error("nothing is feasible: {}", infeasible_text(refused, examples, least.as_ref(), *capacity_gib))]
    Infeasible {
        /// Candidates there were.
        space: u64,
        /// Candidates refused, by the rule or limit they broke.
        refused: BTreeMap<String, u64>,
        /// A broken rule in words, for each key of `refused`.
        examples: BTreeMap<String, String>,
        /// The legal candidate that needs the least memory.
        least: Option<LeastMemory>,
        /// Memory of one device, GiB.
        capacity_gib: f64,
    },
}

impl PlanError {
    /// A [`Self::Value`].
    pub fn value(flag: &'static str, value: &str, expected: &str) -> Self {
        Self::Value {
            flag,
            value: value.to_owned(),
            expected: expected.to_owned(),
        }
    }
}

/// The candidate that comes closest to fitting.
#[derive(Debug, Clone, PartialEq)]
pub struct LeastMemory {
    /// Its degrees in words.
    pub layout: String,
    /// What it recomputes.
    pub recompute: Recompute,
    /// What it needs, GiB.
    pub peak_gib: f64,
}

fn layout_text(broken: &[Illegal], nearest: Option<&PartialDegrees>) -> String {
    let mut sentences: Vec<String> = broken.iter().map(ToString::to_string).collect();
    sentences.extend(nearest.map(|nearest| format!("the nearest legal layout is {nearest}")));
    sentences.join("; ")
}

fn infeasible_text(
    refused: &BTreeMap<String, u64>,
    examples: &BTreeMap<String, String>,
    least: Option<&LeastMemory>,
    capacity_gib: f64,
) -> String {
    let counts: Vec<String> = refused
        .iter()
        .map(|(reason, count)| match examples.get(reason) {
            Some(example) => format!("{reason} {count}, such as: {example}"),
            None => format!("{reason} {count}"),
        })
        .collect();
    let counts = counts.join("; ");
    match least {
        Some(least) => format!(
            "the least memory of any legal layout is {:.1} GiB ({}), a device has {capacity_gib:.1} \
             GiB; more GPUs, a shorter sequence or a smaller model would fit (refused: {counts})",
            least.peak_gib, least.layout
        ),
        None => format!("no layout is legal (refused: {counts})"),
    }
}
