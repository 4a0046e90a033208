//! [`LearningRate`]: the learning rate of every step.

use serde::{Deserialize, Serialize};

/// How the rate moves after warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// It stays.
    #[default]
    Constant,
    /// Half a cosine down to a tenth (Hoffmann et al. 2022, arXiv 2203.15556, use the same floor).
    Cosine,
    /// Warm-up, stable, decay: it stays for four fifths of the run, then falls linearly to a tenth
    /// (Hu et al. 2024, arXiv 2404.06395, section 4).
    Wsd,
}

/// A learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    /// The highest rate.
    pub peak: f64,
    /// Steps of linear warm-up; the first step already learns.
    pub warmup: u64,
    /// What follows.
    pub decay: Decay,
    /// Steps of the whole run.
    pub steps: u64,
}

/// Where decays end, as a part of the peak.
const FLOOR: f64 = 0.1;

impl LearningRate {
    /// The same rate at every step.
    pub fn constant(rate: f64) -> Self {
        Self {
            peak: rate,
            warmup: 0,
            decay: Decay::Constant,
            steps: 0,
        }
    }

    /// The rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let rest = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let progress = ((step - self.warmup) as f64 / rest).min(1.0);
        let part = match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => {
                FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            Decay::Wsd => 1.0 - (1.0 - FLOOR) * ((progress - 0.8) / 0.2).max(0.0),
        };
        self.peak * part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(decay: Decay, step: u64) -> f64 {
        let schedule = LearningRate {
            peak: 2.0,
            warmup: 10,
            decay,
            steps: 110,
        };
        (schedule.at(step) * 1e6).round() / 1e6
    }

    #[test]
    fn golden_warm_up_and_decays() {
        assert_eq!(rate(Decay::Constant, 0), 0.2);
        assert_eq!(rate(Decay::Cosine, 9), 2.0);
        assert_eq!(rate(Decay::Constant, 109), 2.0);
        assert_eq!(rate(Decay::Cosine, 10), 2.0);
        assert_eq!(rate(Decay::Cosine, 60), 1.1);
        assert_eq!(rate(Decay::Cosine, 110), 0.2);
        assert_eq!(rate(Decay::Wsd, 90), 2.0);
        assert_eq!(rate(Decay::Wsd, 100), 1.1);
        assert_eq!(rate(Decay::Wsd, 500), 0.2);
    }
}
