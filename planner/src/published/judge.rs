//! [`Validation`]: predictions beside measurements, in sums by source, GPU, precision and use of CUDA graphs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::price::Priced;
use super::row::{Outcome, Row};
use crate::interval::{Calibrated, Class, Interval, Miss, Spread, apart, quantile};
use crate::options::MEMORY_HEADROOM;
use crate::plan::Predicted;

/// Rows named as the worst of a group.
const WORST: usize = 3;

/// Uses of CUDA graphs.
const GRAPHS: [&str; 3] = ["none", "modules", "full_iteration"];

/// That of a row.
fn graphs(row: &Row) -> &'static str {
    let graphs = row.options.fixed_graphs();
    if graphs.is_none() {
        GRAPHS[0]
    } else if graphs.is_whole() {
        GRAPHS[2]
    } else {
        GRAPHS[1]
    }
}

/// Differences of shares below which two layouts are all but one.
const ALIKE: f64 = 0.02;

/// What came of pricing rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    /// All rows together.
    pub all: Group,
    /// Rows of one source, GPU, precision and use of CUDA graphs.
    pub groups: Vec<Group>,
    /// Rows of one use of CUDA graphs: none, of modules, of whole iterations.
    pub by_graphs: Vec<Group>,
    /// Every row.
    pub rows: Vec<Verdict>,
}

/// What came of some rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Who measured.
    pub source: String,
    /// On which GPU.
    pub gpu: String,
    /// In which precision.
    pub precision: String,
    /// What CUDA graphs launch; nothing where the group is of all their uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda_graph: Option<&'static str>,
    /// How many rows.
    pub rows: usize,
    /// Errors of step time; rows of which only the order counts are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Errors>,
    /// Errors of allocated memory; rows that repeat a measurement count once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Errors>,
    /// Share of measured steps inside their interval, which comes from rows of other families.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<f64>,
    /// Pairs of layouts that answer one question.
    pub pairs: usize,
    /// Kendall's tau over them: pairs in order less pairs out of order, over all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tau: Option<f64>,
    /// Rows that ran and are said not to fit.
    pub too_large: Vec<String>,
    /// Rows that ran and fit, in more of the memory than plans fill ([`MEMORY_HEADROOM`]).
    pub tight: Vec<String>,
    /// Rows that ran and cannot be planned.
    pub refused: Vec<String>,
    /// Rows that ran out of memory and fit in what plans fill.
    pub missed: Vec<String>,
    /// Rows with the largest errors of step time.
    pub worst: Vec<String>,
}

/// Relative errors, predicted over measured less one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Errors {
    /// Of how many rows.
    pub rows: usize,
    /// Median of their size.
    pub median: f64,
    /// Mean of their size.
    pub mean: f64,
    /// 90th percentile of their size.
    pub p90: f64,
    /// The largest.
    pub worst: f64,
    /// Median with its sign: below 0 where predictions are too fast or too small.
    pub bias: f64,
}

/// A row beside its prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Its name.
    pub id: String,
    /// Who measured.
    pub source: String,
    /// Where it was published.
    pub source_ref: String,
    /// The model.
    pub model: String,
    /// The GPU.
    pub gpu: String,
    /// Ranks.
    pub gpus: u32,
    /// Precision.
    pub precision: String,
    /// Degrees that the source states.
    pub layout: String,
    /// What CUDA graphs launch: nothing, modules or whole iterations.
    pub cuda_graph: &'static str,
    /// Whether only its order counts.
    pub order_only: bool,
    /// Measured seconds a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_step_s: Option<f64>,
    /// Predicted ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_step_s: Option<f64>,
    /// The interval of the prediction, from rows of other families.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_s_low: Option<f64>,
    /// Its higher end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_s_high: Option<f64>,
    /// Measured allocated memory, GiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_gib: Option<f64>,
    /// Predicted allocated memory, GiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_gib: Option<f64>,
    /// What came of the run.
    pub outcome: Outcome,
    /// `fits`, `tight` (in more of the memory than plans fill), `too large` or `refused`.
    pub verdict: &'static str,
    /// Why it is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A row with its prediction.
#[derive(Clone, Copy)]
struct Judged<'a> {
    row: &'a Row,
    priced: &'a Priced,
    interval: Option<Interval>,
}

impl Judged<'_> {
    /// Predicted over measured step time, where the row's counts.
    fn step(&self) -> Option<f64> {
        let measured = self.row.step_s.filter(|_| !self.row.order_only)?;
        Some(self.priced.plan()?.predicted.step_s / measured)
    }

    /// Whether its memory is enough, and plans leave more of it free.
    fn tight(&self) -> bool {
        let filled = self.row.cluster.gpu.memory_gib * (1.0 - MEMORY_HEADROOM);
        matches!(self.priced, Priced::Fits(plan) if plan.predicted.peak_gib > filled)
    }

    fn verdict(&self) -> Verdict {
        let row = self.row;
        let predicted = self.priced.plan().map(|plan| plan.predicted.step_s);
        let end = |of: fn(Interval) -> f64| Some(predicted? * of(self.interval?));
        let (verdict, why) = match self.priced {
            Priced::Fits(_) if self.tight() => ("tight", None),
            Priced::Fits(_) => ("fits", None),
            Priced::TooLarge(_) => ("too large", None),
            Priced::Refused(why) => ("refused", Some(why.clone())),
        };
        Verdict {
            id: row.id.clone(),
            source: row.source.clone(),
            source_ref: row.source_ref.clone(),
            model: row.subject.clone(),
            gpu: row.cluster.gpu.name.clone(),
            gpus: row.gpus,
            precision: row.options.precision.name().to_owned(),
            layout: row.layout(),
            cuda_graph: graphs(row),
            order_only: row.order_only,
            measured_step_s: row.step_s,
            predicted_step_s: predicted,
            step_s_low: end(|interval| interval.low),
            step_s_high: end(|interval| interval.high),
            measured_gib: row.mem_gib,
            predicted_gib: self.priced.allocated_gib(),
            outcome: row.outcome,
            verdict,
            why,
        }
    }
}

/// Rows beside their prices, without intervals.
fn plain<'a>(rows: &'a [Row], priced: &'a [Priced]) -> impl Iterator<Item = Judged<'a>> {
    rows.iter().zip(priced).map(|(row, priced)| Judged {
        row,
        priced,
        interval: None,
    })
}

/// What published steps took over what is predicted for them.
pub fn misses(rows: &[Row], priced: &[Priced]) -> Vec<Miss> {
    let miss = |judged: Judged<'_>| {
        let row = judged.row;
        Some(Miss {
            class: Class::of(&row.cluster, row.options.precision),
            family: row.family(),
            ratio: 1.0 / judged.step()?,
        })
    };
    plain(rows, priced).filter_map(miss).collect()
}

/// How far logarithms of measured ratios of pairs are from the predicted ones, over how unlike the two
/// spend their time; pairs that are all but alike are left out.
fn ratios_missed(rows: &[Row], priced: &[Priced]) -> Vec<f64> {
    let judged: Vec<Judged<'_>> = plain(rows, priced).collect();
    let pairs = pairs(&judged);
    pairs
        .iter()
        .filter(|pair| pair.apart > ALIKE)
        .map(|pair| (pair.measured - pair.predicted).abs() / pair.apart)
        .collect()
}

/// What intervals come from, of rows and their prices; nothing where there are no pairs.
pub fn calibrated(rows: &[Row], priced: &[Priced]) -> Option<Calibrated> {
    Calibrated::of(&misses(rows, priced), &ratios_missed(rows, priced))
}

/// Judges rows by their prices. Intervals are those that misses of other families than a row's own make.
pub fn judge(rows: &[Row], priced: &[Priced], misses: &[Miss]) -> Validation {
    assert_eq!(rows.len(), priced.len(), "a row has a price");
    let mut known: BTreeMap<(Class, String), Option<Interval>> = BTreeMap::new();
    let mut judged = Vec::new();
    for (row, priced) in rows.iter().zip(priced) {
        let class = Class::of(&row.cluster, row.options.precision);
        let interval = known.entry((class, row.family())).or_insert_with(|| {
            let mut others = misses.to_vec();
            others.retain(|miss| miss.family != row.family());
            Spread::near(class, &others).map(|spread| spread.interval)
        });
        judged.push(Judged {
            row,
            priced,
            interval: *interval,
        });
    }
    let mut groups: BTreeMap<[String; 3], Vec<Judged<'_>>> = BTreeMap::new();
    for one in &judged {
        let (source, gpu) = (one.row.source.clone(), one.row.cluster.gpu.name.clone());
        let precision = one.row.options.precision.name().to_owned();
        let group = groups.entry([source, gpu, precision]).or_default();
        group.push(*one);
    }
    let all = ["all", "all", "all"].map(str::to_owned);
    Validation {
        by_graphs: by_graphs(&all, &judged),
        all: group(all, None, &judged),
        groups: groups
            .iter()
            .flat_map(|(name, rows)| by_graphs(name, rows))
            .collect(),
        rows: judged.iter().map(Judged::verdict).collect(),
    }
}

/// Sums of rows of one name by what CUDA graphs launch, of those uses that there are.
fn by_graphs(name: &[String; 3], rows: &[Judged<'_>]) -> Vec<Group> {
    let of = |word| {
        let own = rows.iter().filter(|one| graphs(one.row) == word);
        let own: Vec<Judged<'_>> = own.copied().collect();
        (!own.is_empty()).then(|| group(name.clone(), Some(word), &own))
    };
    GRAPHS.into_iter().filter_map(of).collect()
}

fn group(
    [source, gpu, precision]: [String; 3],
    cuda_graph: Option<&'static str>,
    rows: &[Judged<'_>],
) -> Group {
    let steps: Vec<f64> = rows.iter().filter_map(Judged::step).collect();
    let mut memory = BTreeMap::new();
    for one in rows {
        let Some((measured, predicted)) = one.row.mem_gib.zip(one.priced.allocated_gib()) else {
            continue;
        };
        let key = (one.row.family(), one.row.layout());
        memory.insert((key, measured.to_bits()), predicted / measured);
    }
    let memory: Vec<f64> = memory.into_values().collect();
    let inside: Vec<bool> = rows
        .iter()
        .filter_map(|one| Some(one.interval?.holds(1.0 / one.step()?)))
        .collect();
    let hits = inside.iter().filter(|inside| **inside).count();
    let pairs = pairs(rows);
    let order: f64 = pairs
        .iter()
        .map(|pair| (pair.measured * pair.predicted).signum())
        .sum();
    let named = |of: &dyn Fn(&Judged<'_>) -> bool| {
        let found = rows.iter().filter(|one| of(one));
        found.map(|one| one.row.id.clone()).collect()
    };
    let ran = |one: &Judged<'_>| one.row.outcome == Outcome::Ran;
    Group {
        source,
        gpu,
        precision,
        cuda_graph,
        rows: rows.len(),
        step: errors(&steps),
        memory: errors(&memory),
        inside: (!inside.is_empty()).then(|| hits as f64 / inside.len() as f64),
        pairs: pairs.len(),
        tau: (!pairs.is_empty()).then(|| order / pairs.len() as f64),
        too_large: named(&|one| ran(one) && matches!(one.priced, Priced::TooLarge(_))),
        tight: named(&|one| ran(one) && one.tight()),
        refused: named(&|one| ran(one) && matches!(one.priced, Priced::Refused(_))),
        missed: named(&|one| !ran(one) && matches!(one.priced, Priced::Fits(_)) && !one.tight()),
        worst: worst(rows),
    }
}

/// Errors of some ratios of predicted to measured; nothing of none.
fn errors(ratios: &[f64]) -> Option<Errors> {
    let mut signed: Vec<f64> = ratios.to_vec();
    signed.sort_by(f64::total_cmp);
    let mut sizes: Vec<f64> = signed.iter().map(|ratio| (ratio - 1.0).abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let count = sizes.len();
    let rank = |q: f64| sizes[((q * count as f64).ceil() as usize).clamp(1, count) - 1];
    Some(Errors {
        rows: count,
        bias: quantile(&signed, 0.5)? - 1.0,
        median: rank(0.5),
        mean: sizes.iter().sum::<f64>() / count as f64,
        p90: rank(0.9),
        worst: rank(1.0),
    })
}

/// The names of the rows that are furthest off, the furthest first.
fn worst(rows: &[Judged<'_>]) -> Vec<String> {
    let mut sizes: Vec<(f64, &str)> = rows
        .iter()
        .filter_map(|one| Some((one.step()?.ln().abs(), one.row.id.as_str())))
        .collect();
    sizes.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let first = sizes.iter().take(WORST);
    first.map(|(_, id)| (*id).to_owned()).collect()
}

/// Two rows that answer one question with different layouts.
struct Pair {
    /// Logarithm of the ratio of their measured times.
    measured: f64,
    /// The same of their predicted times.
    predicted: f64,
    /// How unlike they spend their time, see [`apart`].
    apart: f64,
}

/// Pairs of rows that answer one question. Ties, measured or predicted, say nothing of order and are left
/// out.
fn pairs(rows: &[Judged<'_>]) -> Vec<Pair> {
    let mut questions: BTreeMap<String, Vec<(f64, &Predicted)>> = BTreeMap::new();
    for one in rows {
        if let Some((measured, plan)) = one.row.step_s.zip(one.priced.plan()) {
            let own = questions.entry(one.row.question()).or_default();
            own.push((measured, &plan.predicted));
        }
    }
    let mut pairs = Vec::new();
    for rows in questions.values() {
        for (index, a) in rows.iter().enumerate() {
            for b in &rows[index + 1..] {
                let pair = Pair {
                    measured: (a.0 / b.0).ln(),
                    predicted: (a.1.step_s / b.1.step_s).ln(),
                    apart: apart(&a.1.time_s, &b.1.time_s),
                };
                if pair.measured != 0.0 && pair.predicted != 0.0 {
                    pairs.push(pair);
                }
            }
        }
    }
    pairs
}
