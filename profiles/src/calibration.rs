//! [`Calibration`]: what measured steps say of a machine, as factors on prices.
//!
//! Physics leaves open how fast a GPU's clocks stay under load, how well a network is used and how long a
//! host takes to ask for work. A few measured steps of known layouts settle some of that. `moefold
//! calibrate` fits the factors; [`crate::Costs`] multiplies by them.

use serde::{Deserialize, Serialize};

/// Factors on times; 1 leaves a price as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// On every op.
    pub compute: f64,
    /// On every collective and exchange.
    pub network: f64,
    /// On launches and reads by the host.
    pub host: f64,
}

impl Default for Factors {
    fn default() -> Self {
        Self {
            compute: 1.0,
            network: 1.0,
            host: 1.0,
        }
    }
}

/// What was fitted to measured steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// What ran the steps (`megatron`, `moefold`): hosts and overlap are its own.
    pub stack: String,
    /// Times of ops.
    pub compute: Fitted,
    /// Times of collectives and exchanges.
    pub network: Fitted,
    /// Times of launches and reads by the host.
    pub host: Fitted,
    /// Covariance of the logarithms of the three factors, in this order, after the fit.
    pub covariance: [[f64; 3]; 3],
    /// Standard deviation of the logarithm of a step around what the fitted factors say.
    pub residual_sigma: f64,
    /// The steps it was fitted to.
    pub steps: Vec<FittedStep>,
}

/// One factor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// On times.
    pub factor: f64,
    /// Standard deviation of its logarithm after the fit.
    pub sigma: f64,
    /// The same before: what is known without steps.
    pub prior_sigma: f64,
}

/// The share of a prior's width from which a parameter counts as undetermined.
const UNDETERMINED: f64 = 0.9;

impl Fitted {
    /// Whether the steps said next to nothing of it.
    pub fn is_undetermined(&self) -> bool {
        self.sigma > UNDETERMINED * self.prior_sigma
    }
}

/// A measured step beside its prices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FittedStep {
    /// Where the plan and the measurement are from.
    pub source: String,
    /// Measured seconds.
    pub measured_s: f64,
    /// Predicted seconds without factors.
    pub before_s: f64,
    /// With them.
    pub after_s: f64,
    /// With factors fitted to the other steps, where there are at least two of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out_s: Option<f64>,
}

/// Factors and seconds beyond which none is.
const MOST: f64 = 1e12;

impl Calibration {
    /// The factors.
    pub fn factors(&self) -> Factors {
        Factors {
            compute: self.compute.factor,
            network: self.network.factor,
            host: self.host.factor,
        }
    }

    /// Standard deviation of the logarithm of a step that spends these shares of its time in ops, in
    /// communication and waiting for the host: what the factors leave open, and what they miss.
    pub fn sigma(&self, shares: [f64; 3]) -> f64 {
        let mut variance = self.residual_sigma.powi(2);
        for (row, a) in self.covariance.iter().zip(shares) {
            for (cell, b) in row.iter().zip(shares) {
                variance += a * cell * b;
            }
        }
        variance.max(0.0).sqrt()
    }

    /// The first number that no fit has, by its key.
    pub(crate) fn wrong(&self) -> Option<(String, f64)> {
        let parts = [
            ("compute", self.compute),
            ("network", self.network),
            ("host", self.host),
        ];
        let factors = parts
            .iter()
            .map(|(name, f)| (format!("{name}.factor"), f.factor));
        let sigmas = parts.iter().flat_map(|(name, f)| {
            [("sigma", f.sigma), ("prior_sigma", f.prior_sigma)]
                .map(|(key, sigma)| (format!("{name}.{key}"), sigma))
        });
        let steps = self.steps.iter().enumerate().flat_map(|(index, step)| {
            [
                ("measured_s", step.measured_s),
                ("before_s", step.before_s),
                ("after_s", step.after_s),
                ("left_out_s", step.left_out_s.unwrap_or(1.0)),
            ]
            .map(|(key, seconds)| (format!("steps[{index}].{key}"), seconds))
        });
        let residual = [("residual_sigma".to_owned(), self.residual_sigma)];
        let wrong = |(_, number): &(String, f64)| !(*number > 0.0 && *number <= MOST);
        let all = factors.chain(sigmas).chain(steps).chain(residual);
        let variances = (0..3).map(|i| (format!("covariance[{i}]"), self.covariance[i][i]));
        all.chain(variances).find(wrong)
    }
}
