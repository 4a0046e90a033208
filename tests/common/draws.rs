//! Moments at which runs are ended, drawn from a seed.

use std::fs;
use std::time::{Duration, Instant};

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

/// Numbers that look random (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators").
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    /// One of the numbers below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// A moment to end a run at.
    pub(crate) fn moment(&mut self) -> When {
        match self.below(3) {
            0 => When::After(Duration::from_millis(self.below(150))),
            1 => When::Writing,
            _ => When::Pruning,
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
