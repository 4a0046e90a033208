//! [`LearningRate`]: the learning rate of every step, as Megatron-Core's `OptimizerParamScheduler` has it.

use serde::{Deserialize, Serialize};

/// How the rate moves after warm-up. `p` is the part of the decay that is over, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// It stays.
    #[default]
    Constant,
    /// `1 - p`.
    Linear,
    /// `(1 + cos(pi p)) / 2`.
    Cosine,
    /// As one over the square root of the steps, from the end of warm-up on.
    InverseSquareRoot,
    /// Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395, section 4): it stays until the last steps.
    Wsd,
}

/// How the rate falls in the last steps of [`Decay::Wsd`]. `p` is the part of them that is over, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anneal {
    /// `1 - p`.
    #[default]
    Linear,
    /// `(1 + cos(pi p)) / 2`.
    Cosine,
    /// `2 * 0.5^p - 1`.
    Exponential,
    /// `1 - sqrt(p)`.
    MinusSqrt,
}

/// A learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    /// The highest rate.
    pub peak: f64,
    /// Where decays end; a tenth of the peak where absent (Hoffmann et al. 2022, arXiv 2203.15556).
    pub floor: Option<f64>,
    /// Steps of linear warm-up. The first step already learns, where Megatron's has rate 0: during warm-up
    /// this schedule is a step ahead of that, and after it the same.
    pub warmup: u64,
    /// What follows.
    pub decay: Decay,
    /// Steps until decays end, warm-up included.
    pub steps: u64,
    /// How [`Decay::Wsd`] ends.
    pub anneal: Anneal,
    /// Its last steps; a fifth of those after warm-up where absent.
    pub anneal_steps: Option<u64>,
}

/// Where decays end, as a part of the peak.
const FLOOR: f64 = 0.1;
/// Last steps of [`Decay::Wsd`], as a part of those after warm-up.
const ANNEALED: f64 = 0.2;

impl LearningRate {
    /// The same rate at every step.
    pub fn constant(rate: f64) -> Self {
        Self {
            peak: rate,
            floor: None,
            warmup: 0,
            decay: Decay::Constant,
            steps: 0,
            anneal: Anneal::Linear,
            anneal_steps: None,
        }
    }

    /// The rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let after = (step - self.warmup) as f64;
        let rest = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let over = (after / rest).min(1.0);
        let floor = self.floor.unwrap_or(FLOOR * self.peak);
        let part = match self.decay {
            Decay::Constant => return self.peak,
            Decay::InverseSquareRoot => {
                // Without warm-up it would begin at infinity.
                let begun = self.warmup.max(1) as f64;
                let rate = self.peak * (begun / (begun + after)).sqrt();
                return if step <= self.steps {
                    rate.max(floor)
                } else {
                    floor
                };
            }
            Decay::Linear => 1.0 - over,
            Decay::Cosine => half_cosine(over),
            Decay::Wsd => {
                let last = self
                    .anneal_steps
                    .map_or(ANNEALED * rest, |steps| steps as f64);
                let over = ((after - (rest - last)) / last.max(1.0)).clamp(0.0, 1.0);
                match self.anneal {
                    Anneal::Linear => 1.0 - over,
                    Anneal::Cosine => half_cosine(over),
                    Anneal::Exponential => 2.0 * 0.5_f64.powf(over) - 1.0,
                    Anneal::MinusSqrt => 1.0 - over.sqrt(),
                }
            }
        };
        floor + (self.peak - floor) * part
    }
}

fn half_cosine(over: f64) -> f64 {
    0.5 * (1.0 + (std::f64::consts::PI * over).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: LearningRate = LearningRate {
        peak: 2.0,
        floor: None,
        warmup: 10,
        decay: Decay::Constant,
        steps: 110,
        anneal: Anneal::Linear,
        anneal_steps: None,
    };

    fn at(schedule: LearningRate, step: u64) -> f64 {
        (schedule.at(step) * 1e6).round() / 1e6
    }

    fn rate(decay: Decay, step: u64) -> f64 {
        at(LearningRate { decay, ..SCHEDULE }, step)
    }

    #[test]
    fn golden_warm_up_and_decays() {
        assert_eq!(rate(Decay::Constant, 0), 0.2);
        assert_eq!(rate(Decay::Cosine, 9), 2.0);
        assert_eq!(rate(Decay::Constant, 109), 2.0);
        assert_eq!(rate(Decay::Cosine, 10), 2.0);
        assert_eq!(rate(Decay::Cosine, 60), 1.1);
        assert_eq!(rate(Decay::Cosine, 110), 0.2);
        assert_eq!(rate(Decay::Linear, 60), 1.1);
        assert_eq!(rate(Decay::Linear, 85), 0.65);
        assert_eq!(rate(Decay::Linear, 500), 0.2);
        assert_eq!(rate(Decay::Wsd, 90), 2.0);
        assert_eq!(rate(Decay::Wsd, 100), 1.1);
        assert_eq!(rate(Decay::Wsd, 500), 0.2);
        // From the end of warm-up on: ten steps, then forty.
        assert_eq!(rate(Decay::InverseSquareRoot, 10), 2.0);
        assert_eq!(rate(Decay::InverseSquareRoot, 40), 1.0);
        assert_eq!(rate(Decay::InverseSquareRoot, 110), 0.603_023);
        assert_eq!(rate(Decay::InverseSquareRoot, 111), 0.2);
    }

    /// Rates that `OptimizerParamScheduler` of Megatron-Core gives for the same schedules: peak 2, floor 0.5, 10
    /// steps of warm-up, 110 of decay, the last 40 of WSD.
    #[test]
    fn golden_megatrons_ends_of_wsd() {
        for (anneal, expected) in [
            (Anneal::Linear, [2.0, 1.625, 1.25, 0.5]),
            (Anneal::Cosine, [2.0, 1.780_33, 1.25, 0.5]),
            (Anneal::Exponential, [2.0, 1.522_689, 1.121_32, 0.5]),
            (Anneal::MinusSqrt, [2.0, 1.25, 0.939_34, 0.5]),
        ] {
            let schedule = LearningRate {
                floor: Some(0.5),
                decay: Decay::Wsd,
                anneal,
                anneal_steps: Some(40),
                ..SCHEDULE
            };
            assert_eq!(
                [70, 80, 90, 110].map(|step| at(schedule, step)),
                expected,
                "{anneal:?}"
            );
        }
    }
}
