//! [`Sampler`]: of which steps of a run it is kept how long every key took.

use std::ops::Range;

use moefold_profiles::Category;
use moefold_profiles::directory::Key;
use serde::{Deserialize, Serialize};

use super::span::{Detail, KeyTime, StepTime};

/// Of so many steps at the begin of a run every second is recorded: between two there is one to compare them with.
const FIRST: u64 = 128;
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
        match (traced, is_recorded(at)) {
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

/// Whether more is told of a step than how long it took, by its number in the run.
fn is_recorded(at: u64) -> bool {
    at.is_multiple_of(if at < FIRST { 2 } else { STRIDE })
}

/// The share of the steps of a run that is recorded.
pub fn recorded_share(steps: u64) -> f64 {
    (0..steps).filter(|&at| is_recorded(at)).count() as f64 / steps.max(1) as f64
}

/// What recording costs a step: of the recorded steps of a run that begins with step 0, the logarithm of how long each
/// took over the geometric mean of the steps before and after it, which are not recorded. Were it free, both would be as likely
/// to be the longer, whatever else holds steps up. The first steps, which warm up, and steps about traced ones are left out.
pub fn recording_costs(step_s: &[f64], traced: &Range<u64>) -> Vec<f64> {
    const LEFT_OUT: usize = 3;
    let plain = |at: usize| !is_recorded(at as u64) && !traced.contains(&(at as u64));
    let cost = |(before, around): (usize, &[f64])| {
        let at = before + 1;
        let is_told = is_recorded(at as u64) && !traced.contains(&(at as u64));
        let counts = before >= LEFT_OUT && is_told && plain(before) && plain(at + 1);
        counts.then(|| around[1].ln() - f64::midpoint(around[0].ln(), around[2].ln()))
    };
    step_s.windows(3).enumerate().filter_map(cost).collect()
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
            let later = steps.saturating_sub(FIRST).div_ceil(STRIDE);
            let recorded = steps.min(FIRST).div_ceil(2) + later;
            assert_eq!(sampler.recorded, recorded);
            let share = recorded as f64 / steps as f64;
            assert!((recorded_share(steps) - share).abs() < 1e-12);
            let kept: Vec<u64> = sampler.into_steps().iter().map(|s| s.step).collect();
            assert!(kept.len() <= KEPT && kept.len() as u64 >= recorded.min(KEPT as u64 / 2));
            assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
            // None of the recorded steps is far from a kept one.
            let last = 6 + steps;
            assert!(last - kept[kept.len() - 1] <= (last / KEPT as u64 + 1) * 2 * STRIDE);
        }
    }

    /// Steps grow by a percent each, and recorded ones take a tenth more.
    #[test]
    fn golden_a_recorded_step_is_compared_with_those_around_it() {
        let step_s = |at: u64| {
            let factor = if is_recorded(at) { 1.1 } else { 1.0 };
            factor * 1.01_f64.powi(at as i32)
        };
        let steps: Vec<f64> = (0..154).map(step_s).collect();
        let costs = |traced| recording_costs(&steps, &traced);
        let all = costs(0..0);
        // Of 4 to 126 every second, then 128, 136, 144 and 152.
        assert_eq!(all.len(), 62 + 4);
        assert!(
            all.iter().all(|cost| (cost - 1.1_f64.ln()).abs() < 1e-9),
            "{all:?}"
        );
        // 44 and 46 have a traced neighbour, 45 or 46 itself.
        assert_eq!(costs(45..47).len(), all.len() - 2);
    }
}
