//! [`HostWatch`]: what else a machine did while a run was measured on it, and how fast it was ([`Pace`]).
//!
//! Times of a machine that had more to do than it has cores are not the program's alone. Linux counts what
//! its processors did and what this process did (`/proc/stat`, `/proc/self/stat`, proc(5)); elsewhere nothing
//! is known and nothing said.

use std::fs;
use std::time::Instant;

use moefold_kernels::pace::pace_s;
use moefold_profiles::presets::Machine;
use moefold_profiles::run::HostLoad;

use crate::device::DeviceSpec;

/// Units of processor time a second in `/proc`: `USER_HZ`, which is 100 on every architecture that Linux
/// shows to programs (`include/asm-generic/param.h`).
const TICKS_PER_S: f64 = 100.0;

/// How fast the processor was before some work, where that is done on the CPU by this process alone.
#[derive(Debug, Clone, Copy)]
pub struct Pace(Option<f64>);

impl Pace {
    /// Before work on some device. `alone` says that no other process has a part in it.
    pub fn begin(device: &DeviceSpec, alone: bool) -> Self {
        Self((alone && !device.is_gpu()).then(pace_s))
    }

    /// Seconds of a fixed piece of work ([`pace_s`]) before and now.
    pub fn end(self) -> Option<[f64; 2]> {
        self.0.map(|before_s| [before_s, pace_s()])
    }
}

/// A run that began.
#[derive(Debug)]
pub struct HostWatch {
    began: Instant,
    cores: u32,
    threads: u32,
    load_before: f64,
    pace: Pace,
    /// Where other programs can be told apart.
    ticks: Option<Ticks>,
}

/// Processor time so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ticks {
    /// Of the machine.
    all: u64,
    /// Of this process.
    own: u64,
}

impl HostWatch {
    /// Begins, before a run on some device of so many computing threads in this process. `alone` says that no other process
    /// belongs to the run. `None` where the system says nothing.
    pub fn begin(device: &DeviceSpec, threads: u32, alone: bool) -> Option<Self> {
        let cores = Machine::detect().cores;
        let load_before = load()?;
        let pace = Pace::begin(device, alone);
        Some(Self {
            began: Instant::now(),
            cores,
            threads,
            load_before,
            pace,
            ticks: if alone { Ticks::now(cores) } else { None },
        })
    }

    /// Ends with the run.
    pub fn end(self) -> Option<HostLoad> {
        let seconds = self.began.elapsed().as_secs_f64();
        let others = |before: Ticks| Some(before.others(Ticks::now(self.cores)?, seconds));
        Some(HostLoad {
            cores: self.cores,
            threads: self.threads,
            load_before: self.load_before,
            load_after: load()?,
            others_busy: self.ticks.and_then(others),
            pace_s: self.pace.end(),
        })
    }
}

impl Ticks {
    /// Nothing where the process may use only a part of the machine: who else is on that part is not known.
    fn now(cores: u32) -> Option<Self> {
        let read = |path: &str| fs::read_to_string(path).ok();
        let all = all_ticks(&read("/proc/stat")?, cores)?;
        let own = own_ticks(&read("/proc/self/stat")?)?;
        Some(Self { all, own })
    }

    /// Cores that other programs kept busy on average until `end`, `seconds` later.
    fn others(self, end: Self, seconds: f64) -> f64 {
        let all = end.all.saturating_sub(self.all);
        let others = all.saturating_sub(end.own.saturating_sub(self.own));
        if seconds > 0.0 {
            others as f64 / TICKS_PER_S / seconds
        } else {
            0.0
        }
    }
}

/// Runnable threads, the mean over a minute.
fn load() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// What processors did for programs and for the system, by `/proc/stat` of a machine with `cores` of them:
/// user, nice, system, irq and softirq.
fn all_ticks(stat: &str, cores: u32) -> Option<u64> {
    let is_core = |line: &&str| {
        let digits = line.strip_prefix("cpu").unwrap_or_default();
        digits.starts_with(|c: char| c.is_ascii_digit())
    };
    if stat.lines().filter(is_core).count() != cores as usize {
        return None;
    }
    let total = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = total
        .split_whitespace()
        .map_while(|n| n.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

/// What this process did, all its threads and the children it waited for, by `/proc/self/stat`.
fn own_ticks(stat: &str) -> Option<u64> {
    // The second field is the program's name, which may have anything in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // utime, stime, cutime and cstime are the 14th to 17th of all.
    let times = fields.get(11..15)?.iter();
    times.map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  1000 50 300 9000 70 8 9 40 0 0\ncpu0 500 25 150 4500 35 4 4 20 0 0\n\
                        cpu1 500 25 150 4500 35 4 5 20 0 0\nintr 1 2\nctxt 3\n";
    const SELF: &str = "42 (a ) name) R 1 42 42 0 -1 4194304 119 0 0 0 600 20 5 3 20 0 1 0 99";

    #[test]
    fn golden_processor_time_is_read_by_what_it_was_spent_on() {
        assert_eq!(all_ticks(STAT, 2), Some(1367));
        assert_eq!(all_ticks(STAT, 1), None, "a part of the machine");
        assert_eq!(all_ticks("cpu  1 2\n", 0), None);
        assert_eq!(own_ticks(SELF), Some(628));
        assert_eq!(own_ticks("42 (name) R"), None);
    }

    #[test]
    fn golden_others_are_what_this_process_was_not() {
        let ticks = |all, own| Ticks { all, own };
        let others = |end| ticks(1000, 100).others(end, 10.0);
        assert_eq!(others(ticks(3000, 1600)), 0.5);
        // Counters are read one after the other: a little less than nothing is nothing.
        assert_eq!(others(ticks(2000, 1101)), 0.0);
    }

    #[test]
    fn a_machine_that_says_what_it_did_is_watched() {
        if let Some(watch) = HostWatch::begin(&DeviceSpec::CPU, 3, true) {
            let load = watch.end().expect("it was known before");
            assert_eq!(load.threads, 3);
            assert!(load.cores > 0 && load.load_before >= 0.0, "{load:?}");
            assert!(
                load.others_busy.is_none_or(|cores| cores >= 0.0),
                "{load:?}"
            );
            let pace_s = load.pace_s.expect("the CPU computes");
            assert!(pace_s.iter().all(|&pace_s| pace_s > 0.0), "{load:?}");
        }
    }
}
