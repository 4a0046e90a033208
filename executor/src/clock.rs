//! [`Clock`]: what a rank's time is measured by.

use std::time::Instant;

use moefold_profiles::units::Seconds;
use rustix::time::{ClockId, clock_gettime};

/// The clock of one rank, on its thread. Where ranks outnumber cores, wall time says little of a stretch of
/// work: the rank may have had no core in it. The own clock then tells how long the thread ran, and a
/// stretch of it counts ranks over cores times, which is what it takes of the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    epoch: Instant,
    /// Threads for each core, where that is above 1.
    stretch: Option<f64>,
}

impl Clock {
    /// A clock whose wall time counts from `epoch`, of one of `stretch` times as many threads as cores.
    pub(crate) fn new(epoch: Instant, stretch: f64) -> Self {
        Self {
            epoch,
            stretch: (stretch > 1.0).then_some(stretch),
        }
    }

    /// The same with other threads beside.
    pub(crate) fn stretched(self, stretch: f64) -> Self {
        Self::new(self.epoch, stretch)
    }

    /// Since when its wall time counts.
    pub(crate) fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Whether the thread shares its core.
    pub(crate) fn is_shared(&self) -> bool {
        self.stretch.is_some()
    }

    /// Nanoseconds of wall time.
    pub(crate) fn wall_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Nanoseconds of the thread's own time; only differences mean something.
    pub(crate) fn own_ns(&self) -> u64 {
        if self.stretch.is_none() {
            return self.wall_ns();
        }
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// What a stretch of own time counts.
    pub(crate) fn counted(&self, own_ns: u64) -> Seconds {
        Seconds(own_ns as f64 * 1e-9 * self.stretch.unwrap_or(1.0))
    }
}
