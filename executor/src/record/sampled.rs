//! [`Sampler`]: of which steps of a run it is kept how long every key took.

use moefold_profiles::Category;
use moefold_profiles::directory::Key;
use serde::{Deserialize, Serialize};

use super::span::{Detail, KeyTime, StepTime};

/// Steps at the begin of a run that are all recorded.
const FIRST: u64 = 32;
/// Of the steps after them, one of so many is: what recording costs is spread over as many.
const STRIDE: u64 = 8;
/// Steps whose keys are kept at most.
const KEPT: usize = 64;

/// The keys of one step on a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampledStep {
    /// The step.
    pub step: u64,
    /// Seconds that no key covers, waits left out: the host's.
    pub host_s: f64,
    /// By key.
    pub keys: Vec<(Key, KeyTime)>,
}

/// Chooses steps: evenly over a run of any length, the same on every rank.
#[derive(Debug, Clone)]
pub struct Sampler {
    first: u64,
    /// Of the recorded steps, one of so many is kept.
    every: u64,
    recorded: u64,
    kept: Vec<SampledStep>,
}

impl Sampler {
    /// For a run that begins with step `first`.
    pub fn new(first: u64) -> Self {
        Self {
            first,
            every: 1,
            recorded: 0,
            kept: Vec::new(),
        }
    }

    /// What to record of a step, of which a trace wants every span if it is `traced`.
    pub fn detail(&self, step: u64, traced: bool) -> Detail {
        let at = step.saturating_sub(self.first);
        match (traced, at < FIRST || at.is_multiple_of(STRIDE)) {
            (true, _) => Detail::Spans,
            (false, true) => Detail::Sums,
            (false, false) => Detail::Whole,
        }
    }

    /// Takes the keys of a recorded step.
    pub fn take(&mut self, step: u64, time: &mut StepTime) {
        let keys = std::mem::take(&mut time.keys);
        if keys.is_empty() {
            return;
        }
        let number = self.recorded;
        self.recorded += 1;
        if !number.is_multiple_of(self.every) {
            return;
        }
        if self.kept.len() == KEPT {
            let mut index = 0;
            self.kept.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.every *= 2;
            if !number.is_multiple_of(self.every) {
                return;
            }
        }
        self.kept.push(SampledStep {
            step,
            host_s: time.time.get(Category::Host).0,
            keys: keys.into_iter().collect(),
        });
    }

    /// The steps.
    pub fn into_steps(self) -> Vec<SampledStep> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::host::HostCost;

    use super::*;

    #[test]
    fn law_kept_steps_are_few_and_evenly_spread() {
        for steps in [1, 32, 33, 64, 65, 500, 5000, 40_000] {
            let mut sampler = Sampler::new(7);
            for step in 7..7 + steps {
                if sampler.detail(step, false) == Detail::Whole {
                    continue;
                }
                let mut time = StepTime::default();
                let key = Key::Host(HostCost::Launch);
                time.keys.insert(key, KeyTime::default());
                sampler.take(step, &mut time);
                assert!(time.keys.is_empty());
            }
            let recorded = steps.min(FIRST) + steps.saturating_sub(FIRST).div_ceil(STRIDE);
            assert_eq!(sampler.recorded, recorded);
            let kept: Vec<u64> = sampler.into_steps().iter().map(|s| s.step).collect();
            assert!(kept.len() <= KEPT && kept.len() as u64 >= recorded.min(KEPT as u64 / 2));
            assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
            // None of the recorded steps is far from a kept one.
            let last = 6 + steps;
            assert!(last - kept[kept.len() - 1] <= (last / KEPT as u64 + 1) * 2 * STRIDE);
        }
    }
}
