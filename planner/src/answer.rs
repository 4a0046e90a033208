//! [`Answer`]: what `plan --json` prints, the plans found and how the search went.
//!
//! The record of a search, not the search: `reports` and other programs read it. Keys follow the
//! published contract; model, cluster, request and profiles are additions that let a reader say what
//! was asked without the files it was asked with.

use std::collections::BTreeMap;
use std::path::Path;

use moefold_profiles::Cluster;
use serde::{Deserialize, Serialize};

use crate::choice::{CpComm, Graphs, Offload, RecomputePlan, ScheduleName};
use crate::layout::Order;
use crate::model::Model;
use crate::plan::{LayoutRecord, Place, PlanFileError, PlannedLayout, ProfileUsed, Request};

/// The plans of a search, best first, and its record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// The best plans, best first; empty when nothing is feasible.
    pub plans: Vec<PlannedLayout>,
    /// How the search went.
    pub search: SearchRecord,
    /// The resolved model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
    /// The resolved cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Request>,
    /// Profiles that prices came from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<ProfileUsed>,
    /// What other numbers of GPUs come to, where several were tried; the plans are of `request.gpus`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<Size>,
    /// What other lengths of sequences come to, where several were tried; the plans are of the longest that fits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lengths: Vec<Length>,
    /// What became of a layout that was asked about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Why>,
    /// How experts are best placed on the ranks of the first plan, where that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<PlacedExperts>,
}

/// How experts are best placed on expert-parallel ranks: see [`crate::experts`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedExperts {
    /// Expert-parallel ranks.
    pub ep: u32,
    /// Experts that a rank holds more than its share.
    pub copies: u32,
    /// One for each list of the routing: for each MoE layer, or one for all.
    pub layers: Vec<PlacedLayer>,
    /// The step of the first plan under the mean routing, with experts in order, seconds.
    pub in_order_step_s: f64,
    /// The same with experts as placed; absent where some are held more than once, which has no price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
}

/// The experts of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedLayer {
    /// Load of the busiest rank over the mean, with experts in order.
    pub in_order: f64,
    /// The same as they are placed.
    pub busiest: f64,
    /// What no placement goes below.
    pub at_least: f64,
    /// Experts of each rank.
    pub ranks: Vec<Vec<u32>>,
}

/// What became of a layout in a search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Why {
    /// The degrees that were asked about.
    pub asked: String,
    /// What became of them.
    pub verdict: Verdict,
    /// Rules that they break, or what they need; empty where they can be planned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<String>,
    /// The best plan of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Candidate>,
    /// What is known of that layout before it is priced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounds: Option<Bounds>,
    /// What it takes more of than the first plan, by category, of the rank of each that ends last; they sum to the
    /// difference of the steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub more_s: BTreeMap<String, f64>,
}

/// Times that no plan of a layout beats. A search looks no further at what cannot enter its ranking.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// By the work of its layers, divided as well as whole layers allow, seconds.
    pub work_s: f64,
    /// By its best split under its best schedule, without any recomputation that is not asked for, seconds.
    pub split_s: f64,
    /// The first of them that is no better than the last plan shown; absent where neither is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ruled_out: Option<RuledOut>,
}

/// Which bound rules a layout out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuledOut {
    /// That of its work.
    Work,
    /// That of its splits.
    Split,
}

/// What became of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It breaks rules.
    Refused,
    /// It does not fit.
    Memory,
    /// It is the first plan.
    First,
    /// It is another of the plans shown.
    Shown,
    /// It is behind all of these.
    Slower,
    /// It is faster than some of these by microbatches, virtual stages or splits that a search tries at the degrees of
    /// its best plan only.
    Ahead,
}

/// What the fastest plan of a number of GPUs comes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// GPUs.
    pub gpus: u32,
    /// Seconds a step.
    pub step_s: f64,
    /// Tokens a second on all of them.
    pub tokens_per_s: f64,
    /// Days to train on as many tokens as were asked for, if any were; with what failures cost, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub days: Option<f64>,
    /// Dollars for training on 10^12 tokens, where a GPU has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd_per_trillion_tokens: Option<f64>,
    /// What failures cost, where that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<FailureCost>,
}

/// What failures cost the fastest plan of a number of GPUs, saved as often as is best: see [`crate::goodput`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureCost {
    /// Hours between two failures of the job, on average.
    pub mtbf_hours: f64,
    /// Seconds for which a save holds training up.
    pub save_s: f64,
    /// Steps between two saves.
    pub save_every_steps: u64,
    /// Share of time in which steps are made that last.
    pub goodput: f64,
}

/// What the fastest plan of a length of sequences comes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Length {
    /// Tokens of a sequence.
    pub seq_len: u64,
    /// Seconds a step; absent where nothing of this length fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// Its peak memory, GiB; absent as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_gib: Option<f64>,
}

impl Answer {
    /// Refuses a model that nobody has, layouts that are not legal for what was asked, and predictions that are negative or
    /// no numbers, do not add up, or are faster than the device, as a plan's file does; `path` is named in errors. An
    /// answer that does not say what was asked is not held to the rules of layouts.
    pub fn check(&self, path: &Path) -> Result<(), PlanFileError> {
        let asked = self.model.as_ref().zip(self.request.as_ref());
        if let Some(model) = &self.model {
            Place { path, prefix: "" }.check_model(model)?;
        }
        for (index, plan) in self.plans.iter().enumerate() {
            let prefix = &format!("plans[{index}].");
            let place = Place { path, prefix };
            match asked {
                Some((model, request)) => plan.check(&place, model, request, &self.profiles)?,
                None => plan.check_predicted(&place, &self.profiles)?,
            }
        }
        let sizes = self.sizes.iter().map(|size| {
            let failures = size.failures.as_ref();
            vec![
                ("step_s", Some(size.step_s)),
                ("tokens_per_s", Some(size.tokens_per_s)),
                ("days", size.days),
                ("usd_per_trillion_tokens", size.usd_per_trillion_tokens),
                ("failures.mtbf_hours", failures.map(|own| own.mtbf_hours)),
                ("failures.save_s", failures.map(|own| own.save_s)),
                ("failures.goodput", failures.map(|own| own.goodput)),
            ]
        });
        let lengths = self.lengths.iter();
        let lengths = lengths.map(|own| vec![("step_s", own.step_s), ("peak_gib", own.peak_gib)]);
        let untried = self.search.not_searched.iter();
        let untried = untried.map(|own| vec![("step_s", own.step_s), ("peak_gib", own.peak_gib)]);
        let sizes = sizes.enumerate().map(|each| ("sizes", each));
        let lengths = lengths.enumerate().map(|each| ("lengths", each));
        let untried = untried.enumerate();
        let untried = untried.map(|each| ("search.not_searched", each));
        for (list, (index, numbers)) in sizes.chain(lengths).chain(untried) {
            let prefix = &format!("{list}[{index}].");
            let place = Place { path, prefix };
            for (key, found) in numbers {
                if let Some(found) = found.filter(|found| !found.is_finite() || *found < 0.0) {
                    let expected = "a finite number of at least 0".to_owned();
                    return Err(place.value(key, found.to_string(), expected));
                }
            }
        }
        let inside = self.search.inside_domain.as_ref();
        let inside = inside.and_then(|inside| inside.best.as_ref());
        let inside = inside.map(|best| ("search.inside_domain.best.".to_owned(), best));
        let feasible = self.search.feasible.iter().enumerate();
        let feasible = feasible.map(|(index, c)| (format!("search.feasible[{index}]."), c));
        for (prefix, candidate) in feasible.chain(inside) {
            let place = Place {
                path,
                prefix: &prefix,
            };
            for (key, found) in [
                ("step_s", candidate.step_s),
                ("peak_gib", candidate.peak_gib),
            ] {
                if !found.is_finite() || found < 0.0 {
                    let expected = "a finite number of at least 0".to_owned();
                    return Err(place.value(key, found.to_string(), expected));
                }
            }
            // Runners-up share the best plan's precision, stack and the rest.
            if let Some(((model, request), best)) = asked.zip(self.plans.first()) {
                let of = (&candidate.layout, &candidate.recompute);
                let chosen = (
                    candidate.schedule,
                    candidate.rank_order,
                    candidate.cp_comm_type,
                    candidate.cuda_graph,
                );
                best.prove_candidate(&place, model, request, of, chosen)?;
            }
        }
        Ok(())
    }
}

/// How a search went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchRecord {
    /// Candidates there were.
    pub space: u64,
    /// Candidates refused, by the short key of the rule or limit they broke.
    pub refused: BTreeMap<String, u64>,
    /// Candidates dropped because a bound showed that they cannot win.
    pub pruned: u64,
    /// Candidates priced in full.
    pub priced: u64,
    /// Candidates not looked at, where the search was stopped; absent where it came to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen: Option<u64>,
    /// Wall seconds of the search; the caller's clock, 0 where the output must not depend on it.
    pub elapsed_s: f64,
    /// Whether the first plan is proven best among the candidates, under the cost model: each was
    /// priced, refused, or ruled out by a bound, but for what a millionth of its step could gain, and `gap` is 0.
    pub optimal: bool,
    /// What the first plan's layout could still gain, at most, if its layers were split into other stages
    /// or, where each may, chose their recompute sets in other ways; as a fraction of its step time. 0 where
    /// memory is the objective: no bound is known. Where the search was stopped, also what it has not looked at.
    pub gap: f64,
    /// The same of all other layouts, whose layers are split by a rule where nobody looks closer: what they could gain on the first plan. Absent
    /// where this was not asked, which takes a time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_of_others: Option<f64>,
    /// By how much of its step time, at least, the second plan must be slower than the first to be told
    /// apart from it; absent of a single plan. See [`crate::plan::Predicted::step_s_low`] for how sure
    /// each is by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_apart: Option<f64>,
    /// What a plan was allowed to fill of each device's memory, GiB; absent where that is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_gib: Option<f64>,
    /// What is tried only where it is named and was not, the fastest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_searched: Vec<Untried>,
    /// Where what leaves for the host was open, what left together: every union of these that is legal was tried, and no
    /// other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offloaded_together: Vec<Offload>,
    /// Layouts that were priced and fit, in no particular order, for the picture of the trade-off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub feasible: Vec<Candidate>,
    /// All layouts at a glance, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survey: Option<Survey>,
    /// Where the first plan's experts reach past one NVLink domain: what keeping them inside costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside_domain: Option<InsideDomain>,
}

/// A choice that a search held as it is, and what the degrees of the first plan come to under it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Untried {
    /// The option.
    pub option: String,
    /// What to name.
    pub value: String,
    /// Seconds a step; absent where it does not fit, is not legal for these degrees, or was not priced before the
    /// search was stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// Memory of the fullest rank, GiB; the least that it needs where it does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_gib: Option<f64>,
    /// Whether it fits; absent as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
}

impl Untried {
    /// What to name, as a flag of `plan`.
    pub fn flag(&self) -> String {
        format!("--{} {}", self.option.replace('_', "-"), self.value)
    }
}

/// Why nothing fits, and what would: what `plan --json` prints then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shortage {
    /// Memory of a device, GiB.
    pub device_gib: f64,
    /// What a plan may fill of it, GiB.
    pub limit_gib: f64,
    /// The request as it is, and with one change each: savers of memory first, then more GPUs until it fits.
    pub savers: Vec<Saver>,
}

impl Shortage {
    /// The first change that fits: they are in order of what they ask for.
    pub fn smallest(&self) -> Option<&Saver> {
        self.savers.iter().find(|saver| saver.fits)
    }
}

/// What a request needs at least after one change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saver {
    /// The option that changes, or `none`.
    pub change: String,
    /// Ranks.
    pub gpus: u32,
    /// Degrees that need the least memory found.
    pub layout: LayoutRecord,
    /// What they compute again.
    pub recompute: RecomputePlan,
    /// What rests on the host; absent where nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offload>,
    /// That memory of the fullest rank, GiB.
    pub peak_gib: f64,
    /// Whether it fits.
    pub fits: bool,
}

/// Every legal layout worth trying, once: at the fastest recompute set that fits, under a split
/// found in one pass, timed by a lower bound instead of a simulated step. Those that fit are counted
/// in a grid of memory by speed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Survey {
    /// Layouts looked at.
    pub layouts: u64,
    /// Those that fit.
    pub fitting: u64,
    /// Memory at the grid's right edge, GiB: what a device has.
    pub capacity_gib: f64,
    /// Step time at the grid's upper edge, seconds: the least bound.
    pub fastest_s: f64,
    /// Cells that hold a layout.
    pub cells: Vec<SurveyCell>,
}

/// A cell of a [`Survey`]: column (memory from `column` to `column + 1` of [`Survey::CELLS`]-ths of
/// the capacity), row (speed likewise, of the fastest), and the layouts in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurveyCell(pub u32, pub u32, pub u32);

impl Survey {
    /// Columns and rows of the grid.
    pub const CELLS: u32 = 64;

    /// The column or row of a share of the whole; the whole itself is in the last.
    pub fn cell(share: f64) -> u32 {
        let cell = (share * f64::from(Self::CELLS)).floor().max(0.0) as u32;
        cell.min(Self::CELLS - 1)
    }
}

/// The best layout whose experts (expert times expert tensor parallel ranks) stay inside one NVLink
/// domain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InsideDomain {
    /// GPUs of a domain.
    pub gpus_per_domain: u32,
    /// The layout; absent where none is feasible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Candidate>,
}

/// A priced layout that fits, without its breakdown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// Degrees.
    pub layout: LayoutRecord,
    /// What it recomputes.
    pub recompute: RecomputePlan,
    /// Its pipeline schedule; absent where the degrees say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleName>,
    /// How its ranks are numbered; absent where that is `tp-cp-ep-dp-pp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_order: Option<Order>,
    /// How its attention reaches the keys of other context-parallel ranks; absent where there are none, or around a ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cp_comm_type: Option<CpComm>,
    /// What CUDA graphs launch of it; absent where nothing is a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_graph: Option<Graphs>,
    /// Seconds a step.
    pub step_s: f64,
    /// Peak memory of the worst rank, GiB.
    pub peak_gib: f64,
}

impl From<&PlannedLayout> for Candidate {
    fn from(planned: &PlannedLayout) -> Self {
        Self {
            layout: planned.layout,
            recompute: planned.recompute.clone(),
            schedule: planned.pipeline.schedule.chosen(),
            rank_order: planned.rank_order,
            cp_comm_type: Some(planned.cp_comm()).filter(|way| *way != CpComm::default()),
            cuda_graph: planned.cuda_graph,
            step_s: planned.predicted.step_s,
            peak_gib: planned.predicted.peak_gib,
        }
    }
}
