//! [`Calibrated`]: the quantiles of published misses, as a small file that ships with the program.
//!
//! Pricing every published row takes about a second, too long for each plan. A test prices them and holds
//! the file to the result.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::{Class, Generation, Interval, Miss, Spread, Width};

/// How far measured steps are from predicted ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibrated {
    /// The misses nearest to each class, by generation and precision.
    pub classes: Vec<Calibration>,
    /// The same for a class that no row is of.
    pub any: Calibration,
    /// Pairs of published layouts that answer one question.
    pub pairs: usize,
    /// How far the logarithm of the measured ratio of such a pair is from the predicted one, over how
    /// unlike they spend their time ([`super::apart`]): no more for four pairs of five.
    pub told_apart: f64,
}

/// What one class goes by.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Of which GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    /// In which precisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Width>,
    /// Published rows.
    pub rows: usize,
    /// Of how many families.
    pub families: usize,
    /// Measured over predicted: the lower end of the interval.
    pub low: f64,
    /// Its median.
    pub median: f64,
    /// The higher end.
    pub high: f64,
}

impl Calibrated {
    /// Of misses, and of what pairs miss over how unlike they are; nothing of none of either.
    pub fn of(misses: &[Miss], pairs: &[f64]) -> Option<Self> {
        let nowhere = Class {
            generation: None,
            width: None,
        };
        let entry = |class: Class| {
            let spread = Spread::near(class, misses)?;
            Some(Calibration {
                generation: class.generation,
                precision: class.width,
                rows: spread.rows,
                families: spread.families,
                low: rounded(spread.interval.low),
                median: rounded(spread.median),
                high: rounded(spread.interval.high),
            })
        };
        let mut there: Vec<Class> = misses.iter().map(|miss| miss.class).collect();
        there.sort_unstable();
        there.dedup();
        let mut pairs = pairs.to_vec();
        pairs.sort_by(f64::total_cmp);
        let last = ((pairs.len() as f64 * super::COVERAGE).ceil() as usize).checked_sub(1)?;
        Some(Self {
            classes: there.into_iter().filter_map(entry).collect(),
            any: entry(nowhere)?,
            told_apart: rounded(*pairs.get(last)?),
            pairs: pairs.len(),
        })
    }

    /// The interval of a class.
    pub fn interval(&self, class: Class) -> Interval {
        let own = |entry: &&Calibration| {
            entry.generation == class.generation && entry.precision == class.width
        };
        let entry = self.classes.iter().find(own).unwrap_or(&self.any);
        Interval {
            low: entry.low,
            high: entry.high,
        }
    }
}

/// Three decimals: what a file of factors needs.
fn rounded(factor: f64) -> f64 {
    (factor * 1000.0).round() / 1000.0
}

/// The file that ships with the program.
pub fn shipped() -> &'static Calibrated {
    static SHIPPED: LazyLock<Calibrated> = LazyLock::new(|| {
        let text = include_str!("../../data/calibration.json");
        serde_json::from_str(text).expect("the embedded file is valid, which a test says")
    });
    &SHIPPED
}
