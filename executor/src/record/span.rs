//! What is kept of a span, and of a step.

use std::collections::BTreeMap;

use moefold_kernels::Event;
use moefold_planner::walk::At;
use moefold_profiles::directory::Key;
use moefold_profiles::trace::{Category, Lane, TimeByCategory};
use moefold_profiles::units::Seconds;
use serde::{Deserialize, Serialize};

/// A span that has begun.
#[derive(Debug)]
pub(super) enum Open {
    /// By the host's clock, of spans that are kept, and the own one, with what was nested before it.
    Host {
        start_ns: u64,
        own_ns: u64,
        nested_before: u64,
    },
    /// By the device's clock, with its number.
    Device { number: usize, start: Event },
    /// On a tape.
    Untimed,
}

/// What a recorder keeps of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// How long it took.
    Whole,
    /// Where its time went.
    Sums,
    /// The same and every span: a trace of all steps of a long run would not open in a viewer.
    Spans,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) step: Option<u32>,
    pub(super) microbatch: Option<u32>,
    pub(super) layer: Option<u32>,
}

impl Place {
    pub(super) fn at(self) -> At {
        At {
            microbatch: self.microbatch,
            layer: self.layer,
        }
    }
}

/// What a span is called, without when it was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label {
    pub(super) lane: Lane,
    pub(super) category: Category,
    pub(super) name: &'static str,
    pub(super) key: Option<Key>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) lane: Lane,
    pub(super) category: Category,
    pub(super) name: &'static str,
    pub(super) key: Option<Key>,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    pub(super) place: Place,
}

/// Where one step's time went on one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepTime {
    /// Wall time since it began.
    pub step: Seconds,
    /// The same by category; sums to `step`. All zero where only the whole was asked for.
    pub time: TimeByCategory,
    /// What of the collectives that the device did ran while it also computed: no part of `time`.
    pub hidden: TimeByCategory,
    /// Exclusive time by lane and span name, without waiting.
    pub busy: BTreeMap<(Lane, &'static str), Busy>,
    /// How often the host waited to read the device's memory, by span name.
    pub host_reads: BTreeMap<&'static str, f64>,
    /// The same time by key of the cost tables.
    pub keys: BTreeMap<Key, KeyTime>,
}

/// Spans of one name in a step, or on average over steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Busy {
    /// How many.
    pub calls: f64,
    /// Their seconds.
    pub seconds: f64,
}

/// What spans of one key took in a step on a rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyTime {
    /// How many.
    pub calls: u64,
    /// Their seconds, without waits.
    pub seconds: f64,
    /// Of a collective, of each: seconds waited for the last rank, and seconds since the rank had last
    /// met others.
    pub waits: Vec<[f64; 2]>,
}
