//! [`Held`]: what the fullest rank of a run had of its device, from the tensors at its peak to what it
//! reserved and never used.

use std::fmt::Write as _;

use moefold_profiles::run::{RankPeak, RunSummary};
use moefold_profiles::units::Bytes;
use moefold_profiles::{ByClass, TensorClass};

use crate::format;

/// The memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    /// The rank.
    pub(crate) rank: u32,
    /// Tensors at the peak, by class; `overhead` is none of them and 0.
    pub(crate) classes: ByClass<Bytes>,
    /// What it took of its device for tensors; absent where a file does not say.
    pub(crate) pool: Option<Pool>,
    /// What it takes of its device beside tensors; 0 where that is the host.
    pub(crate) beside: Bytes,
    /// The most that its process had of the host's memory; 0 where that is not known.
    pub(crate) resident: Bytes,
}

/// Memory of a device that is taken for tensors, in use or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pool {
    /// All of it.
    pub(crate) reserved: Bytes,
    /// Between tensors: how far they reached, less those alive at the peak.
    pub(crate) holes: Bytes,
    /// Beyond what they reached.
    pub(crate) unused: Bytes,
    /// How often it grew after the first step.
    pub(crate) growths: u64,
}

impl Held {
    /// The rank whose peak is highest; none where no rank says.
    pub(crate) fn of(summary: &RunSummary) -> Option<Self> {
        let peaks = summary.peak_by_rank.iter();
        // The first of those that are alike.
        let fullest = peaks.rev().max_by_key(|peak| peak.bytes.total())?;
        Some(Self::of_rank(fullest))
    }

    fn of_rank(peak: &RankPeak) -> Self {
        let mut classes = peak.bytes;
        let beside = std::mem::take(&mut classes[TensorClass::Overhead]);
        let tensors = classes.total();
        let less = |a: Bytes, b: Bytes| Bytes(a.0.saturating_sub(b.0));
        let pool = (peak.reached > Bytes::ZERO).then(|| Pool {
            reserved: peak.reserved,
            holes: less(peak.reached, tensors),
            unused: less(peak.reserved, peak.reached),
            growths: peak.growths,
        });
        Self {
            rank: peak.rank,
            classes,
            pool,
            beside,
            resident: peak.resident,
        }
    }

    /// Whether the device is the host: there is nothing beside tensors that its account knows.
    pub(crate) fn is_host(&self) -> bool {
        self.beside == Bytes::ZERO
    }

    /// Tensors at the peak.
    pub(crate) fn tensors(&self) -> Bytes {
        self.classes.total()
    }
}

/// Where the memory of the fullest rank of a run went, for a person; nothing where the run does not say.
pub fn peak_text(summary: &RunSummary) -> String {
    let Some(held) = Held::of(summary) else {
        return String::new();
    };
    let size = |bytes: Bytes| format::gib(bytes.gib());
    let classes = held
        .classes
        .iter()
        .filter(|(_, bytes)| **bytes > Bytes::ZERO);
    let classes: Vec<String> = classes
        .map(|(class, bytes)| format!("{} {}", class.name(), size(*bytes)))
        .collect();
    let mut text = format!(
        "memory of the fullest rank ({}): {} of tensors at the peak: {}\n",
        held.rank,
        size(held.tensors()),
        classes.join(", ")
    );
    let line = |text: &mut String, words: std::fmt::Arguments| {
        writeln!(text, "  {words}").expect("writing to a string does not fail");
    };
    if let Some(pool) = held.pool {
        let what = if held.is_host() {
            // The system gives pages one tensor at a time, and they are kept for tensors to come.
            format!("{} of rounding and kept for reuse", size(pool.holes))
        } else {
            let (holes, unused) = (size(pool.holes), size(pool.unused));
            format!("{holes} of holes between them, {unused} beyond what they reached")
        };
        let growths = match pool.growths {
            0 => String::new(),
            1 => "; it grew once after the first step".to_owned(),
            times => format!("; it grew {times} times after the first step"),
        };
        let reserved = size(pool.reserved);
        line(
            &mut text,
            format_args!("taken for tensors {reserved}: {what}{growths}"),
        );
    }
    if held.beside > Bytes::ZERO {
        let beside = size(held.beside);
        line(
            &mut text,
            format_args!("beside tensors {beside}: context, libraries, workspaces, communicators"),
        );
    }
    if held.resident > Bytes::ZERO {
        let (resident, ranks) = (size(held.resident), summary.peak_by_rank.len());
        let of_all = if ranks == 1 {
            String::new()
        } else {
            let all: Bytes = summary.peak_by_rank.iter().map(tensors).sum();
            format!("; the tensors of all {ranks} ranks peak at {}", size(all))
        };
        line(
            &mut text,
            format_args!("its process had {resident} of the host's memory at most{of_all}"),
        );
    }
    text
}

fn tensors(peak: &RankPeak) -> Bytes {
    Held::of_rank(peak).tensors()
}
