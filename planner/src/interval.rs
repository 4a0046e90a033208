//! [`Interval`]: how much longer or shorter than predicted a step may take, at 80 percent.
//!
//! Of Megatron-Core others published what it measured. What these rows took over what is predicted for
//! them is split into classes by GPU generation and precision; a class's quantiles are the interval of a
//! prediction of that class, so that a bias moves it. A class has few families of rows (one source's runs
//! of one model) whose errors are alike, so tails are widened by the number of families: of `n`
//! exchangeable values a new one is below the `j`-th with probability `j / (n + 1)`, which is the quantile
//! `(j - 1/2) / n` of theirs (Hazen's plotting position).
//!
//! Of this project's executor nothing is published. Its intervals come from how prices are known alone: see
//! [`of_prices`].

mod table;

use std::collections::BTreeSet;

use moefold_profiles::trace::{Category, TimeByCategory};
use moefold_profiles::{Cluster, Precision};

use crate::choice::StackName;
use crate::plan::Confidence;

pub use table::{Calibrated, Calibration, shipped};

/// Share of steps that an interval is to hold.
pub const COVERAGE: f64 = 0.8;

/// Of a normal distribution, how many standard deviations to either side hold [`COVERAGE`] of it.
pub const DEVIATIONS: f64 = 1.2816;

/// Families of rows that a class has at least; smaller ones are taken together.
const FAMILIES: usize = 5;

/// Standard deviation of the logarithm of an interpolated price, and of an extrapolated one: assumptions.
/// A shipped table between its points is within some 15 percent of what others measured there; a roofline
/// with an efficiency is good to half the time.
const INTERPOLATED_SIGMA: f64 = 0.15;
const EXTRAPOLATED_SIGMA: f64 = 0.40;

/// The same of rates of a device that are assumed, as those of a machine's cores are until a profile measures them: an
/// assumption, that four of five machines are within twice as fast and half as fast.
const ASSUMED_SIGMA: f64 = std::f64::consts::LN_2 / DEVIATIONS;

/// The same of a step whose prices are all known: ops beside each other are not ops alone. An assumption:
/// half of what published steps on Hopper scatter by.
const STEP_SIGMA: f64 = 0.08;

/// Runs of one layout, four of five pairs of which differ by less: two clusters of one kind in 54 pairs of
/// MLPerf results differ by 0.9 percent at the median and 2.3 at the 90th percentile.
const REPEATS: f64 = 0.016;

/// Factors on a predicted step between which the measured one is expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The lower.
    pub low: f64,
    /// The higher.
    pub high: f64,
}

impl Interval {
    /// To either side of a prediction by as many times `exp(sigma)` as hold [`COVERAGE`].
    pub fn around(sigma: f64) -> Self {
        let high = (DEVIATIONS * sigma).exp();
        Self {
            low: 1.0 / high,
            high,
        }
    }

    /// Widened by an independent error.
    #[must_use]
    pub fn widened(self, sigma: f64) -> Self {
        let middle = (self.low * self.high).sqrt();
        let half = (self.high / self.low).ln() / 2.0;
        let half = half.hypot(DEVIATIONS * sigma).exp();
        Self {
            low: middle / half,
            high: middle * half,
        }
    }

    /// Widened so that the prediction itself is inside.
    #[must_use]
    pub fn around_one(self) -> Self {
        Self {
            low: self.low.min(1.0),
            high: self.high.max(1.0),
        }
    }

    /// Whether a measured step over a predicted one is inside.
    pub fn holds(&self, ratio: f64) -> bool {
        (self.low..=self.high).contains(&ratio)
    }
}

moefold_profiles::named! {
    /// GPUs whose errors are alike.
    pub enum Generation {
        /// A100 and the like.
        Ampere = "ampere",
        /// H100 and the like.
        Hopper = "hopper",
        /// B200 and B300 in servers of their own, which share a host and air with seven others.
        Blackwell = "blackwell",
        /// GB200 and GB300 in racks with one NVLink domain.
        BlackwellRack = "blackwell-rack",
        /// Anything else.
        Other = "other",
    }
}

moefold_profiles::named! {
    /// Precisions whose errors are alike.
    pub enum Width {
        /// 16 bits and more.
        Wide = "bf16",
        /// 8 bits and less.
        Narrow = "fp8",
    }
}

/// Predictions whose errors are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// Of which GPUs; any where absent.
    pub generation: Option<Generation>,
    /// In which precisions; any where absent.
    pub width: Option<Width>,
}

impl Class {
    /// The class of a training.
    pub fn of(cluster: &Cluster, precision: Precision) -> Self {
        let generation = match cluster.gpu.arch.as_str() {
            "sm_80" => Generation::Ampere,
            "sm_90" => Generation::Hopper,
            arch if arch.starts_with("sm_10") => {
                if cluster.gpus_per_domain > cluster.gpus_per_node {
                    Generation::BlackwellRack
                } else {
                    Generation::Blackwell
                }
            }
            _ => Generation::Other,
        };
        let width = match precision {
            Precision::Fp32 | Precision::Bf16 => Width::Wide,
            _ => Width::Narrow,
        };
        Self {
            generation: Some(generation),
            width: Some(width),
        }
    }

    /// Itself, and what it is a part of.
    pub fn levels(self) -> [Self; 3] {
        let generation = Self {
            width: None,
            ..self
        };
        let all = Self {
            generation: None,
            ..generation
        };
        [self, generation, all]
    }
}

/// What a published step took over what is predicted for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Miss {
    /// Its class.
    pub class: Class,
    /// What it shares its error with.
    pub family: String,
    /// Measured over predicted.
    pub ratio: f64,
}

/// Quantiles of misses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// How many.
    pub rows: usize,
    /// Of how many families.
    pub families: usize,
    /// The median.
    pub median: f64,
    /// Between which a new family's is expected.
    pub interval: Interval,
}

impl Spread {
    /// The spread of some misses; nothing of none.
    pub fn of<'a>(misses: impl IntoIterator<Item = &'a Miss>) -> Option<Self> {
        let misses: Vec<&Miss> = misses.into_iter().collect();
        let mut ratios: Vec<f64> = misses.iter().map(|miss| miss.ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let families: BTreeSet<&str> = misses.iter().map(|miss| miss.family.as_str()).collect();
        let count = families.len() as f64;
        let tail = ((1.0 - COVERAGE) / 2.0 * (count + 1.0) - 0.5) / count.max(1.0);
        let tail = tail.max(0.0);
        Some(Self {
            rows: misses.len(),
            families: families.len(),
            median: quantile(&ratios, 0.5)?,
            interval: Interval {
                low: quantile(&ratios, tail)?,
                high: quantile(&ratios, 1.0 - tail)?,
            },
        })
    }

    /// The spread of the misses nearest to a class: its own where they are of enough families, else those
    /// of its generation, else all.
    pub fn near(class: Class, misses: &[Miss]) -> Option<Self> {
        let spreads = class.levels().map(|level| {
            let own = misses
                .iter()
                .filter(|miss| miss.class.levels().contains(&level));
            Self::of(own)
        });
        let [.., all] = spreads;
        let enough = |spread: &Self| spread.families >= FAMILIES;
        let first = spreads.into_iter().flatten().find(enough);
        first.or(all)
    }
}

/// The quantile `q` of sorted values at Hazen's plotting position, between neighbours on a logarithmic
/// scale; nothing of none.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)? as f64;
    let position = (q * sorted.len() as f64 - 0.5).clamp(0.0, last);
    let (below, above) = (
        sorted[position.floor() as usize],
        sorted[position.ceil() as usize],
    );
    Some(below * (above / below).powf(position.fract()))
}

/// Standard deviation of the logarithm of a step whose prices are known so: errors of one kind of price are
/// taken to be the same throughout, those of different kinds to be independent. `samples` is the relative
/// spread of what was measured.
pub fn of_prices(known: &Confidence, samples: f64) -> f64 {
    [
        known.measured * samples,
        known.interpolated * INTERPOLATED_SIGMA,
        known.extrapolated * EXTRAPOLATED_SIGMA,
        STEP_SIGMA,
    ]
    .into_iter()
    .fold(0.0, f64::hypot)
}

/// How the prices of a prediction are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Known<'a> {
    /// Shares of busy time by kind of price.
    pub confidence: &'a Confidence,
    /// Relative spread of the samples of a profile, where prices come from one.
    pub samples: Option<f64>,
    /// Standard deviation of the logarithm of a step, where steps of the machine were fitted.
    pub fitted: Option<f64>,
    /// Whether what the device can do is assumed.
    pub assumed: bool,
}

/// The interval of a prediction.
///
/// A fitted machine has its own: what steps leave open of its parameters and what they miss. Else
/// Megatron-Core has that of the published rows of the class. A measured profile replaces prices that these
/// rows were predicted with, so it may take a bias away, but no published row says so: the interval
/// stretches to the prediction itself, and its samples' spread comes on top. This project's executor has
/// that of its prices.
pub fn of(stack: StackName, class: Class, known: &Known<'_>) -> Interval {
    if let Some(sigma) = known.fitted {
        return Interval::around(sigma);
    }
    match (stack, known.samples) {
        (StackName::Moefold, samples) => {
            let sigma = of_prices(known.confidence, samples.unwrap_or(0.0));
            let assumed = if known.assumed { ASSUMED_SIGMA } else { 0.0 };
            Interval::around(sigma.hypot(known.confidence.extrapolated * assumed))
        }
        (StackName::Megatron, None) => shipped().interval(class),
        (StackName::Megatron, Some(samples)) => shipped()
            .interval(class)
            .around_one()
            .widened(known.confidence.measured * samples),
    }
}

/// By how much, relative, two layouts of one machine must differ in predicted time to be told apart.
///
/// Their errors are mostly the same (clocks, hosts, efficiencies), and what is the same does not move their
/// order. With an error `e` on each category of time, alike in both, the logarithm of the ratio of their
/// times is off by the sum of `e` times the difference of that category's shares: errors of independent
/// categories grow with the length of the vector of differences ([`apart`]). Of Megatron-Core four of five
/// pairs of published layouts that answer one question are off by no more than [`Calibrated::told_apart`]
/// times that length; of this project's executor `sigma` is that of a category. Runs of one layout differ
/// by themselves, which comes on top.
pub fn told_apart(
    stack: StackName,
    first: &TimeByCategory,
    second: &TimeByCategory,
    sigma: f64,
) -> f64 {
    let error = match stack {
        StackName::Megatron => shipped().told_apart,
        StackName::Moefold => DEVIATIONS * sigma,
    };
    (error * apart(first, second)).hypot(REPEATS)
}

/// Shares of a step that ops take, communication, and waiting for the host: what the factors of a
/// [`moefold_profiles::Calibration`] act on. A bubble is ops of other stages.
pub fn shares(time: &TimeByCategory) -> [f64; 3] {
    let total = time.total().0;
    let network = Category::ALL
        .into_iter()
        .filter(|category| category.name().ends_with("_comm"))
        .map(|category| time.get(category).0)
        .sum::<f64>();
    let host = time.get(Category::Host).0;
    [total - network - host, network, host].map(|seconds| seconds / total)
}

/// How unlike two steps spend their time: the length of the vector of differences of shares, 0 to the root
/// of 2.
pub fn apart(first: &TimeByCategory, second: &TimeByCategory) -> f64 {
    let share = |time: &TimeByCategory, category| time.get(category).0 / time.total().0;
    let differences =
        Category::ALL.map(|category| share(second, category) - share(first, category));
    differences.into_iter().fold(0.0, f64::hypot)
}

#[cfg(test)]
mod tests;
