//! [`Trace`]: what happened when, on which rank, predicted or measured.
//!
//! The simulator and the executor emit the same type, so that predicted against measured compares
//! two values span by span. Writing it as Chrome trace events (for Perfetto) is [`Trace::chrome`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::directory::Key;
use crate::memory::ByClass;
use crate::units::{Bytes, Instant, Seconds, Span};

crate::named! {
    /// What a stretch of time is spent on; the keys of `time_s` in a plan, and they sum to the step. In
    /// the order reports list them.
    pub enum Category {
        /// Attention blocks: projections, core, their norms.
        Attention = "attention",
        /// Routed experts: grouped products and their activation.
        Experts = "experts",
        /// Dense and shared-expert MLPs, embedding, head and loss.
        Dense = "dense",
        /// Router, permutation and its inverse.
        RouterPermute = "router_permute",
        /// Exposed tensor-parallel (and expert-tensor-parallel) communication.
        TpComm = "tp_comm",
        /// Exposed context-parallel communication.
        CpComm = "cp_comm",
        /// Exposed expert dispatch and combine.
        EpComm = "ep_comm",
        /// Exposed pipeline sends and receives.
        PpComm = "pp_comm",
        /// Exposed gradient reduction and parameter gathering.
        DpComm = "dp_comm",
        /// Waiting for other pipeline stages.
        Bubble = "bubble",
        /// Waiting for other ranks of a group to come to a collective.
        Waiting = "waiting",
        /// Forward work done again in the backward pass.
        Recompute = "recompute",
        /// Exposed copies to and from the host.
        Offload = "offload",
        /// Gradient norm, clipping and the optimizer step.
        Optimizer = "optimizer",
        /// The host: launches that the device waits for, data, bookkeeping.
        Host = "host",
    }
}

impl Category {
    /// Whether it is exchange with other ranks.
    pub const fn is_communication(self) -> bool {
        match self {
            Self::TpComm | Self::CpComm | Self::EpComm | Self::PpComm | Self::DpComm => true,
            Self::Attention
            | Self::Experts
            | Self::Dense
            | Self::RouterPermute
            | Self::Bubble
            | Self::Waiting
            | Self::Recompute
            | Self::Offload
            | Self::Optimizer
            | Self::Host => false,
        }
    }

    /// Whether the device has nothing to do: it waits for other ranks or for the host.
    pub const fn is_waiting(self) -> bool {
        match self {
            Self::Bubble | Self::Waiting | Self::Host => true,
            Self::Attention
            | Self::Experts
            | Self::Dense
            | Self::RouterPermute
            | Self::TpComm
            | Self::CpComm
            | Self::EpComm
            | Self::PpComm
            | Self::DpComm
            | Self::Recompute
            | Self::Offload
            | Self::Optimizer => false,
        }
    }

    /// Whether it is exchange or idleness between ranks, and so no work of one.
    pub const fn is_between_ranks(self) -> bool {
        self.is_communication() || matches!(self, Self::Bubble | Self::Waiting)
    }

    /// Whether it is part of the forward and backward passes of layers, rather than of the step around
    /// them (messages between stages, waiting for them, gradients, the optimizer).
    pub const fn is_of_a_pass(self) -> bool {
        match self {
            Self::Attention
            | Self::Experts
            | Self::Dense
            | Self::RouterPermute
            | Self::TpComm
            | Self::CpComm
            | Self::EpComm
            | Self::Waiting
            | Self::Recompute
            | Self::Offload
            | Self::Host => true,
            Self::PpComm | Self::DpComm | Self::Bubble | Self::Optimizer => false,
        }
    }
}

/// Seconds of a step by category. Serializes with every key of design's `time_s` present.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimeByCategory([f64; Category::ALL.len()]);

impl TimeByCategory {
    /// Adds time to one category.
    pub fn add(&mut self, category: Category, time: Seconds) {
        self.0[category as usize] += time.0;
    }

    /// The time of one category.
    pub fn get(&self, category: Category) -> Seconds {
        Seconds(self.0[category as usize])
    }

    /// The sum over all categories.
    pub fn total(&self) -> Seconds {
        Seconds(self.0.iter().sum())
    }

    /// The same breakdown with every entry multiplied.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self(self.0.map(|t| t * factor))
    }
}

impl Serialize for TimeByCategory {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let by_name: Vec<(&str, f64)> = Category::ALL
            .iter()
            .map(|&c| (c.name(), self.get(c).0))
            .collect();
        serializer.collect_map(by_name)
    }
}

impl<'de> Deserialize<'de> for TimeByCategory {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let by_category = BTreeMap::<Category, f64>::deserialize(deserializer)?;
        let mut time = Self::default();
        for (category, seconds) in by_category {
            time.add(category, Seconds(seconds));
        }
        Ok(time)
    }
}

/// Which stream of a rank a span ran on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Compute.
    Compute,
    /// Collectives and sends.
    Communication,
    /// Copies to and from the host.
    Copy,
    /// The host itself.
    Host,
}

/// One stretch of work on one lane of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceSpan {
    /// The rank.
    pub rank: u32,
    /// The stream.
    pub lane: Lane,
    /// Stem of the op or collective, or the phase (`forward`, `backward`).
    pub name: String,
    /// What the time counts as.
    pub category: Category,
    /// What ran, as cost tables know it; absent for phases and for what no table prices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
    /// Microbatch, where it belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microbatch: Option<u32>,
    /// Model layer, where it belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// Training step, in a measured trace of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
}

impl TraceSpan {
    /// How long it took.
    pub fn duration(&self) -> Span {
        self.end - self.start
    }
}

/// Bytes alive on a rank at an instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySample {
    /// The rank.
    pub rank: u32,
    /// When.
    pub at: Instant,
    /// Bytes by class.
    pub bytes: ByClass<Bytes>,
}

/// Where a trace comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator.
    Predicted,
    /// A run.
    Measured,
}

/// Spans of one or several steps, in no particular order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Simulated or measured.
    pub origin: Origin,
    /// The spans.
    pub spans: Vec<TraceSpan>,
}

impl Trace {
    /// Time by span name, summed over the spans of `rank`, in the order of names.
    pub fn by_name(&self, rank: u32) -> BTreeMap<String, Seconds> {
        let mut total = BTreeMap::new();
        for span in self.spans.iter().filter(|span| span.rank == rank) {
            *total.entry(span.name.clone()).or_insert(Seconds::ZERO) += span.duration().seconds();
        }
        total
    }

    /// The trace as a Chrome trace-event document, one process a rank and one thread a lane
    /// (Trace Event Format, complete events `"ph": "X"`, times in microseconds).
    pub fn chrome(&self) -> serde_json::Value {
        self.chrome_with(&[])
    }

    /// The same with memory as a counter track (`"ph": "C"`, bytes by class).
    pub fn chrome_with(&self, memory: &[MemorySample]) -> serde_json::Value {
        use serde_json::json;
        let mut events = Vec::with_capacity(self.spans.len() + 8);
        let mut lanes: Vec<(u32, Lane)> = self.spans.iter().map(|s| (s.rank, s.lane)).collect();
        lanes.sort_unstable();
        lanes.dedup();
        for &(rank, lane) in &lanes {
            events.push(json!({"ph": "M", "name": "process_name", "pid": rank,
                "args": {"name": format!("rank {rank}")}}));
            events.push(
                json!({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane as u32,
                "args": {"name": lane}}),
            );
        }
        for span in &self.spans {
            let mut args = serde_json::Map::new();
            for (key, value) in [
                ("microbatch", span.microbatch),
                ("layer", span.layer),
                ("step", span.step),
            ] {
                if let Some(value) = value {
                    args.insert(key.to_owned(), value.into());
                }
            }
            if let Some(key) = &span.key {
                args.insert("key".to_owned(), json!(key));
            }
            events.push(
                json!({"ph": "X", "name": span.name, "cat": span.category.name(),
                "pid": span.rank, "tid": span.lane as u32, "ts": span.start.0 as f64 / 1e3,
                "dur": span.duration().0 as f64 / 1e3, "args": args}),
            );
        }
        for sample in memory {
            events.push(
                json!({"ph": "C", "name": "memory_bytes", "pid": sample.rank,
                "ts": sample.at.0 as f64 / 1e3, "args": sample.bytes}),
            );
        }
        json!({"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"origin": self.origin}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_by_category_names_every_key_and_round_trips() {
        let mut time = TimeByCategory::default();
        time.add(Category::Bubble, Seconds(0.25));
        let text = serde_json::to_string(&time).expect("serializes");
        for category in Category::ALL {
            assert!(
                text.contains(category.name()),
                "{text} lacks {}",
                category.name()
            );
        }
        assert_eq!(
            serde_json::from_str::<TimeByCategory>(&text).expect("parses"),
            time
        );
    }
}
