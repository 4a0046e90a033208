//! [`Routing`]: how tokens were routed, as the load of one expert rank over the mean of all, by MoE layer.
//!
//! Two loads matter. Time goes by the *busiest* rank: in every layer the others wait for it, so it is taken
//! layer by layer, on average over steps. Memory goes by the *fullest* rank, in the one microbatch in which
//! memory peaked: there it holds what all its layers saved. Both are worked out for every number of ranks
//! that the experts divide among, when the source is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moefold_profiles::run::{RunSummary, StepRecord};
use serde::Deserialize;

use super::PlanError;
use crate::model::Model;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Where it came from.
    source: String,
    /// Experts, where they are known.
    experts: Option<usize>,
    /// Lists there are: one for all MoE layers, or one for each.
    lists: usize,
    /// By number of expert ranks.
    by_ep: BTreeMap<u32, Loads>,
    /// Share of all tokens that each expert got, by list, on average over steps; of a layout's loads it is not known.
    shares: Histogram,
}

/// Rows of a rank's experts over the mean of all ranks, by list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Loads {
    /// Of the busiest rank of each layer, on average over steps.
    pub busiest: Vec<f64>,
    /// Of the fullest rank where memory peaks.
    pub fullest: Vec<f64>,
}

/// Tokens each expert got, a list a layer or one for all of them.
type Histogram = Vec<Vec<f64>>;

/// What a file has.
#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    One(Vec<f64>),
    Layers(Histogram),
}

impl Routing {
    /// Reads what `path` is: a run directory, or a file with `[n, n, ...]` or a list of such lists, one for
    /// each MoE layer.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, PlanError> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::of_run(path);
        }
        let text = text_of(path)?;
        let path = &path.display().to_string();
        let file: File = serde_json::from_str(&text).map_err(|_| {
            let expected = "is not a JSON list of tokens an expert, or a list of such lists";
            refuse(path, expected.to_owned())
        })?;
        let layers = match file {
            File::One(tokens) => vec![tokens],
            File::Layers(layers) => layers,
        };
        Self::new(path, &layers)
    }

    /// A histogram as numbers, a list a layer or one for all; `source` is named in errors.
    pub fn new(source: &str, layers: &[Vec<f64>]) -> Result<Self, PlanError> {
        let mut gathered = Gathered::default();
        gathered.check(source, layers)?;
        gathered.add_time(layers);
        gathered.set_memory(layers, None);
        Ok(gathered.finish(source))
    }

    /// The routing of a run: time by its steps after warm-up (all of them where it did not finish), memory
    /// by the microbatch in which its worst rank came to its peak. Where the run does not say which that
    /// was, memory goes by the last step.
    fn of_run(dir: &Path) -> Result<Self, PlanError> {
        let [steps, summary] = ["steps.jsonl", "summary.json"].map(|name| dir.join(name));
        let skipped = if summary.is_file() {
            let found = RunSummary::read(&text_of(&summary)?);
            found
                .map_err(|problem| refuse(&summary.display().to_string(), problem))?
                .warmup_steps
        } else {
            0
        };
        let numbers = |load: &[Vec<u64>]| -> Histogram {
            let floats = |list: &Vec<u64>| list.iter().map(|&tokens| tokens as f64).collect();
            load.iter().map(floats).collect()
        };
        let mut gathered = Gathered::default();
        let (mut seen, mut last, mut fullest) = (0, Histogram::new(), None);
        let text = text_of(&steps)?;
        let steps = steps.display().to_string();
        for record in StepRecord::lines(&text) {
            let record = record
                .map_err(|(line, problem)| refuse(&steps, format!("line {line}: {problem}")))?;
            let whole = numbers(&record.expert_load);
            gathered.check(&steps, &whole)?;
            if seen >= skipped {
                gathered.add_time(&whole);
            }
            seen += 1;
            last = whole;
            // Later ones are higher.
            if let Some(found) = record.fullest {
                let load = numbers(&found.load);
                gathered.check(&steps, &load)?;
                fullest = Some((load, (found.ep, found.ep_rank)));
            }
        }
        if seen <= skipped {
            let expected = format!("more than the {skipped} of warm-up");
            return Err(refuse(
                &steps,
                format!("has {seen} steps; expected {expected}"),
            ));
        }
        match fullest {
            Some((load, at)) => gathered.set_memory(&load, Some(at)),
            None => gathered.set_memory(&last, None),
        }
        Ok(gathered.finish(&dir.display().to_string()))
    }

    /// The loads of one layout, by MoE layer. For other numbers of expert ranks they are taken as they are:
    /// those of fewer ranks do not exceed them.
    pub(crate) fn of_layout(source: &str, ep: u32, loads: Loads) -> Self {
        Self {
            source: source.to_owned(),
            experts: None,
            lists: loads.busiest.len(),
            by_ep: BTreeMap::from([(ep, loads)]),
            shares: Histogram::new(),
        }
    }

    /// Share of all tokens that each expert got, on average over steps: a list for each MoE layer, or one for all. None
    /// where only the loads of one layout are known.
    pub fn shares(&self) -> Option<&[Vec<f64>]> {
        Some(&self.shares[..]).filter(|shares| !shares.is_empty())
    }

    /// The same source, had the busiest of `ep` ranks these loads in each list, and the fullest too.
    #[must_use]
    pub fn with_loads(&self, ep: u32, busiest: Vec<f64>) -> Self {
        let fullest = busiest.clone();
        Self::of_layout(&self.source, ep, Loads { busiest, fullest })
    }

    /// Where it came from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Refuses a histogram of another number of experts or layers than the model has.
    pub fn check(&self, model: &Model) -> Result<(), PlanError> {
        let Some(moe) = model.moe() else {
            let problem = format!("counts tokens of experts, and {} has none", model.name);
            return Err(refuse(&self.source, problem));
        };
        let layers = model.num_moe_layers();
        if self.lists != 1 && self.lists != layers {
            return Err(refuse(
                &self.source,
                format!(
                    "has {} lists; expected one for all layers, or {layers}, one for each MoE layer of {}",
                    self.lists, model.name
                ),
            ));
        }
        if let Some(found) = self.experts.filter(|found| *found as u64 != moe.experts) {
            return Err(refuse(
                &self.source,
                format!(
                    "has {found} numbers; expected {}, one for each expert of {}",
                    moe.experts, model.name
                ),
            ));
        }
        let shares = self.shares.iter().flatten();
        let largest = shares.copied().fold(0.0, f64::max);
        let most = 1.0 / moe.topk as f64;
        if largest > most * (1.0 + 1e-6) {
            return Err(refuse(
                &self.source,
                format!(
                    "gives one expert {:.1} % of all; expected at most {:.1}, as each token of {} goes to {} of them",
                    100.0 * largest,
                    100.0 * most,
                    model.name,
                    moe.topk
                ),
            ));
        }
        Ok(())
    }

    /// The list of the `index`-th MoE layer.
    pub(crate) fn list(&self, index: usize) -> usize {
        index.min(self.lists - 1)
    }

    /// The loads under so many expert ranks, by list: 1 for one rank, and never more than there are ranks.
    ///
    /// Ranks hold consecutive experts, as Megatron-Core places them
    /// (`local_expert_indices_offset`, `megatron/core/transformer/moe/moe_layer.py`).
    pub fn loads(&self, ep: u32) -> Loads {
        let known = self.by_ep.get(&ep).or_else(|| self.by_ep.values().next());
        let known = known.expect("a source has some");
        let most = f64::from(ep.max(1));
        let capped = |loads: &[f64]| loads.iter().map(|&load| load.min(most)).collect();
        Loads {
            busiest: capped(&known.busiest),
            fullest: capped(&known.fullest),
        }
    }
}

/// Loads, histogram by histogram.
#[derive(Debug, Default)]
struct Gathered {
    /// Lists and experts of all.
    size: Option<(usize, usize)>,
    /// Histograms that count for time.
    timed: usize,
    /// By number of ranks; of the busiest, sums.
    by_ep: BTreeMap<u32, Loads>,
    /// Sums of shares, by list and expert.
    shares: Histogram,
}

impl Gathered {
    /// Refuses a histogram that is none, or of another size than those before.
    fn check(&mut self, source: &str, layers: &[Vec<f64>]) -> Result<(), PlanError> {
        let Some(experts) = layers.first().map(Vec::len) else {
            return Err(refuse(
                source,
                "holds no layer; expected one or more".into(),
            ));
        };
        let (lists, experts) = *self.size.get_or_insert((layers.len(), experts));
        if layers.len() != lists {
            let found = layers.len();
            return Err(refuse(
                source,
                format!("has {found} lists after one of {lists}"),
            ));
        }
        for (layer, tokens) in layers.iter().enumerate() {
            if tokens.len() != experts {
                let found = tokens.len();
                return Err(refuse(
                    source,
                    format!("list {layer} has {found} numbers; expected {experts}, as the first"),
                ));
            }
            if let Some(found) = tokens.iter().find(|n| !n.is_finite() || **n < 0.0) {
                return Err(refuse(
                    source,
                    format!("list {layer} has {found}; expected tokens, 0 or more"),
                ));
            }
            let total: f64 = tokens.iter().sum();
            if !total.is_finite() || total <= 0.0 {
                // The sum of none is -0.
                let total = total + 0.0;
                return Err(refuse(
                    source,
                    format!("list {layer} sums to {total}; expected a finite number above 0"),
                ));
            }
        }
        if self.by_ep.is_empty() {
            for ep in (1..=experts).filter(|ep| experts.is_multiple_of(*ep)) {
                let none = || vec![0.0; lists];
                let loads = Loads {
                    busiest: none(),
                    fullest: none(),
                };
                self.by_ep.insert(ep as u32, loads);
            }
        }
        Ok(())
    }

    fn add_time(&mut self, layers: &[Vec<f64>]) {
        self.timed += 1;
        self.shares.resize(layers.len(), Vec::new());
        for (sums, tokens) in self.shares.iter_mut().zip(layers) {
            sums.resize(tokens.len(), 0.0);
            let total: f64 = tokens.iter().sum();
            for (sum, tokens) in sums.iter_mut().zip(tokens) {
                *sum += tokens / total;
            }
        }
        for (&ep, loads) in &mut self.by_ep {
            for (sum, tokens) in loads.busiest.iter_mut().zip(layers) {
                *sum += by_rank(tokens, ep).into_iter().fold(0.0, f64::max);
            }
        }
    }

    /// What was routed where memory peaked, and which of how many expert ranks was the fullest there, if
    /// that is known. Of other numbers of ranks it is taken to be the one with most rows over all layers.
    fn set_memory(&mut self, layers: &[Vec<f64>], fullest: Option<(u32, u32)>) {
        for (&ep, loads) in &mut self.by_ep {
            let layers: Vec<Vec<f64>> = layers.iter().map(|tokens| by_rank(tokens, ep)).collect();
            let of = |rank: u32| layers.iter().map(move |ranks| ranks[rank as usize]);
            let known = fullest.filter(|&(ranks, rank)| ranks == ep && rank < ep);
            let rank = known.map_or_else(
                || {
                    let sum = |rank: u32| of(rank).sum::<f64>();
                    let most = (0..ep).rev().max_by(|&a, &b| sum(a).total_cmp(&sum(b)));
                    most.expect("one rank at least")
                },
                |(_, rank)| rank,
            );
            loads.fullest = of(rank).collect();
        }
    }

    fn finish(self, source: &str) -> Routing {
        let (lists, experts) = self.size.expect("a histogram was checked");
        let share = 1.0 / self.timed as f64;
        let mean = |(ep, mut loads): (u32, Loads)| {
            loads.busiest.iter_mut().for_each(|sum| *sum *= share);
            (ep, loads)
        };
        let mut shares = self.shares;
        for sum in shares.iter_mut().flatten() {
            *sum *= share;
        }
        Routing {
            source: source.to_owned(),
            experts: Some(experts),
            lists,
            shares,
            by_ep: self.by_ep.into_iter().map(mean).collect(),
        }
    }
}

/// Rows of each of `ep` ranks over their mean.
fn by_rank(tokens: &[f64], ep: u32) -> Vec<f64> {
    let total: f64 = tokens.iter().sum();
    let held = tokens.chunks(tokens.len() / ep as usize);
    let load = |held: &[f64]| held.iter().sum::<f64>() * f64::from(ep) / total;
    held.map(load).collect()
}

fn text_of(path: &Path) -> Result<String, PlanError> {
    fs::read_to_string(path).map_err(|error| refuse(&path.display().to_string(), error.to_string()))
}

fn refuse(path: &str, problem: String) -> PlanError {
    PlanError::File {
        path: path.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests;
