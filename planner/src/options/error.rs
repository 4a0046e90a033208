//! [`PlanError`]: why there is no plan.

use std::collections::BTreeMap;

use crate::choice::{Offload, RecomputePlan};
use crate::layout::{Illegal, LayoutRecord, PartialDegrees};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The search was stopped before it found a plan.
    #[error("the search was stopped before it found a plan")]
    Stopped,
    /// An option with a value that means nothing.
    #[error("`{option}`: found `{value}`, expected {expected}")]
    Value {
        /// The option.
        option: &'static str,
        /// What was found.
        value: String,
        /// What would work.
        expected: String,
    },
    /// Rules that the request breaks, whatever is chosen for what it leaves open.
    #[error("this cannot be planned:{}", lines(broken.iter().map(ToString::to_string), nearest.as_ref()))]
    Layout {
        /// Every rule broken.
        broken: Vec<Illegal>,
        /// The nearest legal values of the pinned degrees, where there are any.
        nearest: Option<PartialDegrees>,
    },
    /// Each candidate breaks some rule, if not the same one.
    #[error("no layout is legal:{}", lines(refused.iter().map(|(reason, count)| counted(reason, *count, examples)).chain(gpus_text(gpus)), nearest.as_deref()))]
    NoneLegal {
        /// Candidates refused, by the first rule they broke.
        refused: BTreeMap<String, u64>,
        /// A broken rule in words, for each key of `refused`.
        examples: BTreeMap<String, String>,
        /// The nearest legal values of the pinned degrees, where there are any.
        nearest: Option<Box<PartialDegrees>>,
        /// The nearest numbers of GPUs on which some layout is legal.
        gpus: Vec<u32>,
    },
    /// Something the chosen stack or cluster cannot do.
    #[error("{what}: {limit}")]
    Unable {
        /// What was asked for.
        what: String,
        /// What is possible.
        limit: String,
    },
    /// A share of the optimizer that hosts have no room for under any layout.
    #[error(
        "nothing is feasible: `optimizer_offload_fraction` {share} takes {least_gib:.1} GiB of each node's memory at least, \
         and {cluster} has {there_gib:.1} (`host_memory_gib`); a smaller share may fit, or more nodes"
    )]
    Hosts {
        /// The share.
        share: f64,
        /// Memory of a node that it takes at least, GiB.
        least_gib: f64,
        /// What a node has, GiB.
        there_gib: f64,
        /// The cluster.
        cluster: String,
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
    #[error("nothing is feasible: {}", infeasible_text(refused, examples, least.as_deref(), [*capacity_gib, *device_gib]))]
    Infeasible {
        /// Candidates there were.
        space: u64,
        /// Candidates refused, by the rule or limit they broke.
        refused: BTreeMap<String, u64>,
        /// A broken rule in words, for each key of `refused`.
        examples: BTreeMap<String, String>,
        /// The legal candidate that needs the least memory.
        least: Option<Box<LeastMemory>>,
        /// Memory of one device that a plan may fill, GiB.
        capacity_gib: f64,
        /// All of its memory, GiB.
        device_gib: f64,
    },
}

impl PlanError {
    /// The rules that a request breaks, a sentence each, and one on the nearest legal degrees where there are any; nothing
    /// where something else is wrong.
    pub fn rules(&self) -> Option<(Vec<String>, Option<String>)> {
        let (sentences, nearest): (_, Option<&PartialDegrees>) = match self {
            Self::Layout { broken, nearest } => (
                broken.iter().map(ToString::to_string).collect(),
                nearest.as_ref(),
            ),
            Self::NoneLegal {
                examples, nearest, ..
            } => (examples.values().cloned().collect(), nearest.as_deref()),
            _ => return None,
        };
        Some((sentences, nearest.map(nearest_text)))
    }
}

/// The candidate that comes closest to fitting.
#[derive(Debug, Clone, PartialEq)]
pub struct LeastMemory {
    /// Its degrees.
    pub layout: LayoutRecord,
    /// What it recomputes.
    pub recompute: RecomputePlan,
    /// What rests on the host, if anything does.
    pub offload: Option<Offload>,
    /// What it needs, GiB.
    pub peak_gib: f64,
}

/// Sentences after a colon: one goes on in its line, more have a line each.
fn lines(sentences: impl Iterator<Item = String>, nearest: Option<&PartialDegrees>) -> String {
    let mut sentences: Vec<String> = sentences.collect();
    sentences.extend(nearest.map(nearest_text));
    let before = if sentences.len() == 1 { " " } else { "\n  " };
    sentences
        .iter()
        .flat_map(|sentence| [before, sentence])
        .collect()
}

fn nearest_text(nearest: &PartialDegrees) -> String {
    format!("the nearest legal degrees are {nearest}")
}

fn gpus_text(gpus: &[u32]) -> Option<String> {
    let numbers: Vec<String> = gpus.iter().map(u32::to_string).collect();
    (!gpus.is_empty()).then(|| format!("some layout is legal on {} GPUs", numbers.join(" or ")))
}

fn counted(reason: &str, count: u64, examples: &BTreeMap<String, String>) -> String {
    match examples.get(reason) {
        Some(example) => format!("{reason} {count}, such as: {example}"),
        None => format!("{reason} {count}"),
    }
}

fn infeasible_text(
    refused: &BTreeMap<String, u64>,
    examples: &BTreeMap<String, String>,
    least: Option<&LeastMemory>,
    [capacity_gib, device_gib]: [f64; 2],
) -> String {
    let counts = refused
        .iter()
        .map(|(reason, count)| format!("\n  {}", counted(reason, *count, examples)));
    let refused: String = counts.collect();
    match least {
        Some(least) => format!(
            "the least memory found of any legal layout is {:.1} GiB ({}), a device has {device_gib:.1} \
             GiB{}; refused:{refused}",
            least.peak_gib,
            least.layout,
            if capacity_gib < device_gib {
                format!(", of which a plan may fill {capacity_gib:.1} (`memory_headroom`)")
            } else {
                String::new()
            }
        ),
        None => format!("no legal layout is worth trying; refused:{refused}"),
    }
}
