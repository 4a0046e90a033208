//! Moments at which runs are ended, drawn from a seed.

use std::fs;
use std::time::{Duration, Instant};

use moefold_profiles::random::SplitMix64;

use super::plans::Bench;

/// What `MOEFOLD_SEED` says, else 1.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("MOEFOLD_SEED").ok();
    given.and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// A moment in the life of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum When {
    /// So long after the first checkpoint.
    After(Duration),
    /// While a checkpoint is written.
    Writing,
    /// While one that is not kept is removed.
    Pruning,
}

impl When {
    /// A moment to end a run at.
    pub(crate) fn drawn(draws: &mut SplitMix64) -> Self {
        match draws.below(3) {
            0 => Self::After(Duration::from_millis(draws.below(150))),
            1 => Self::Writing,
            _ => Self::Pruning,
        }
    }
}

/// Waits for the moment of a blow. What is looked for passes quickly; where it is not seen in time, any moment is as good.
pub(crate) fn await_moment(bench: &Bench, out: &str, when: When) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        let partial = fs::read_dir(bench.path(&format!("{out}/checkpoints")));
        let partial = partial.into_iter().flatten().flatten().find_map(|entry| {
            let name = entry.file_name().display().to_string();
            name.strip_prefix("step-")?
                .strip_suffix(".partial")?
                .parse::<u64>()
                .ok()
        });
        let newest = bench.checkpoints(out).0.into_iter().max().unwrap_or(0);
        let falls = match when {
            When::After(time) => begun.elapsed() >= time,
            When::Writing => partial.is_some_and(|step| step > newest),
            When::Pruning => partial.is_some_and(|step| step < newest),
        };
        if falls {
            break;
        }
    }
}
