//! Whether a record in a file can be one: degrees and choices that are legal, numbers that follow
//! from them, stages that hold every layer, predictions that are sizes and times and add up. Not
//! whether a prediction is right.

use std::path::Path;

use moefold_profiles::Cluster;
use serde_json::Value;

use super::{
    Alternative, LayoutRecord, PlanFileError, PlannedLayout, PlannedRouting, Predicted,
    ProfileUsed, Request,
};
use crate::choice::{CpComm, Dispatcher, Graphs, Overlap, RecomputePlan, ScheduleName, StackName};
use crate::layout::{Degrees, Layout, Order};
use crate::model::Model;
use crate::options::SearchOptions;
use crate::rules::{Rules, schedules};

/// How far a sum of written decimals may be from its total, relative.
const ROUNDING: f64 = 1e-6;

/// How far below zero the rounding of a difference may leave a number.
const DUST: f64 = 1e-12;

/// Where in which file a record stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The file.
    pub(crate) path: &'a Path,
    /// Keys before the record's own, with their dots.
    pub(crate) prefix: &'a str,
}

impl Place<'_> {
    fn contradiction(&self, key: &str, found: String, expected: String) -> PlanFileError {
        PlanFileError::Contradiction {
            path: self.path.to_owned(),
            key: format!("{}{key}", self.prefix),
            found,
            expected,
        }
    }

    /// Refuses a model that nobody has.
    pub(crate) fn check_model(&self, model: &Model) -> Result<(), PlanFileError> {
        model.check().map_err(|broken| {
            let key = format!("model.{}", broken.key);
            self.value(&key, broken.found, broken.expected)
        })
    }

    /// Refuses a cluster without GPUs in a node, a domain or on a link, and GPUs without a multiprocessor or memory.
    pub(super) fn check_cluster(&self, cluster: &Cluster) -> Result<(), PlanFileError> {
        for (key, count) in [
            ("gpu.num_sms", cluster.gpu.num_sms),
            ("gpus_per_node", cluster.gpus_per_node),
            ("gpus_per_domain", cluster.gpus_per_domain),
            ("gpus_per_host_link", cluster.gpus_per_host_link),
        ] {
            if count == 0 {
                let key = format!("cluster.{key}");
                return Err(self.value(&key, "0".to_owned(), "at least 1".to_owned()));
            }
        }
        let memory = cluster.gpu.memory_gib;
        if memory > 0.0 {
            return Ok(());
        }
        let expected = "more than 0".to_owned();
        Err(self.value("cluster.gpu.memory_gib", memory.to_string(), expected))
    }

    /// A number that no plan has.
    pub(crate) fn value(&self, key: &str, found: String, expected: String) -> PlanFileError {
        PlanFileError::Value {
            path: self.path.to_owned(),
            key: format!("{}{key}", self.prefix),
            found,
            expected,
        }
    }
}

impl LayoutRecord {
    /// The degrees of a job of so many ranks, derived ones left out.
    pub(super) fn degrees(&self, gpus: u32) -> Degrees {
        Degrees {
            gpus,
            tp: self.tp,
            cp: self.cp,
            pp: self.pp,
            vpp: self.vpp,
            ep: self.ep,
            etp: self.etp,
            mbs: self.mbs,
        }
    }
}

/// What a record says of a layout beside what all of a search have in common.
struct Claim<'a> {
    layout: &'a LayoutRecord,
    schedule: Option<ScheduleName>,
    /// None where any will do.
    dispatcher: Option<Dispatcher>,
    graphs: Graphs,
    /// None where either will do.
    order: Option<Order>,
    /// None where any will do.
    cp_comm: Option<CpComm>,
    cp_sizes: Option<[u32; 2]>,
    recompute: &'a RecomputePlan,
}

/// A schedule whose stages come back, which rules of degrees depend on; whether another goes with the rest comes later.
fn coming_back(found: &LayoutRecord, schedule: Option<ScheduleName>) -> Option<ScheduleName> {
    schedule.filter(|name| name.is_vee() && name.goes_with(found.pp, found.vpp))
}

impl PlannedLayout {
    /// Refuses a plan that no search makes: see the module's documentation.
    pub(crate) fn check(
        &self,
        place: &Place<'_>,
        model: &Model,
        request: &Request,
        profiles: &[ProfileUsed],
    ) -> Result<(), PlanFileError> {
        let pipeline = &self.pipeline;
        let comes_back = coming_back(&self.layout, Some(pipeline.schedule));
        let layout = self.prove(place, model, request, &self.claim(comes_back))?;
        let known = schedules(self.stack, layout.pp(), layout.vpp());
        if !known.contains(&pipeline.schedule) {
            let names: Vec<&str> = known.iter().map(|name| name.name()).collect();
            return Err(place.contradiction(
                "pipeline.schedule",
                pipeline.schedule.name().to_owned(),
                names.join(" or "),
            ));
        }
        // What the schedule does not go with, after what is wrong whatever it is.
        let schedule = Some(pipeline.schedule);
        self.prove(place, model, request, &self.claim(schedule))?;
        let stages = pipeline.stages.len();
        if stages != layout.stages() as usize {
            let expected = format!("{} stages (pp x vpp)", layout.stages());
            return Err(place.contradiction(
                "pipeline.stages",
                format!("{stages} stages"),
                expected,
            ));
        }
        let held: Vec<u32> = pipeline.stages.iter().flatten().copied().collect();
        let layers = model.layers.len() as u32;
        if !held.iter().copied().eq(0..layers) {
            let first = (0..layers).find(|&layer| held.get(layer as usize) != Some(&layer));
            return Err(place.contradiction(
                "pipeline.stages",
                match first {
                    Some(layer) => format!("wrong at layer {layer}"),
                    None => format!("{} layers", held.len()),
                },
                format!("each of layers 0 to {} once, in order", layers - 1),
            ));
        }
        let recompute = &self.recompute;
        let kept = (self.offload).kept(model, &|layer| recompute.of_layer(layer));
        if kept != self.offload {
            let (found, expected) = (self.offload.to_string(), kept.to_string());
            return Err(place.contradiction("offload", found, expected));
        }
        self.check_routing(place, model)?;
        self.check_predicted(place, profiles)
    }

    /// Refuses loads that no routing has: of another number of layers, or more than all rows on one rank.
    fn check_routing(&self, place: &Place<'_>, model: &Model) -> Result<(), PlanFileError> {
        let Some(PlannedRouting::Recorded {
            busiest, fullest, ..
        }) = &self.predicted.routing
        else {
            return Ok(());
        };
        let layers = model.num_moe_layers();
        let most = f64::from(self.layout.ep) * (1.0 + ROUNDING);
        for (key, loads) in [("busiest", busiest), ("fullest", fullest)] {
            let key = format!("predicted.routing.{key}");
            if loads.len() != layers {
                let found = format!("{} entries", loads.len());
                let expected = format!("{layers}, one for each MoE layer");
                return Err(place.value(&key, found, expected));
            }
            if let Some(load) = loads.iter().find(|&&load| load > most) {
                let expected = format!("at most ep = {}", self.layout.ep);
                return Err(place.value(&key, load.to_string(), expected));
            }
        }
        Ok(())
    }

    /// What it claims of itself.
    fn claim(&self, schedule: Option<ScheduleName>) -> Claim<'_> {
        Claim {
            layout: &self.layout,
            schedule,
            dispatcher: Some(self.dispatcher),
            graphs: self.cuda_graph.unwrap_or_default(),
            order: Some(self.rank_order.unwrap_or_default()),
            cp_comm: Some(self.cp_comm()),
            cp_sizes: self.hierarchical_context_parallel_sizes,
            recompute: &self.recompute,
        }
    }

    /// Proves a runner-up of the same search legal.
    pub(crate) fn prove_runner_up(
        &self,
        place: &Place<'_>,
        model: &Model,
        request: &Request,
        runner_up: &Alternative,
    ) -> Result<Layout, PlanFileError> {
        let graphs = runner_up.cuda_graph.unwrap_or_default();
        let claim = Claim {
            layout: &runner_up.layout,
            schedule: coming_back(&runner_up.layout, runner_up.schedule),
            dispatcher: graphs.is_whole().then_some(Dispatcher::Hybridep),
            graphs,
            order: Some(runner_up.rank_order.unwrap_or_default()),
            cp_comm: Some(runner_up.cp_comm_type.unwrap_or(self.cp_comm())),
            // Its own are what its ranks and heads allow.
            cp_sizes: None,
            recompute: &runner_up.recompute,
        };
        self.prove(place, model, request, &claim)
    }

    /// Proves a candidate of the same search legal, under some order of ranks and way to keys where it says none.
    pub(crate) fn prove_candidate(
        &self,
        place: &Place<'_>,
        model: &Model,
        request: &Request,
        (layout, recompute): (&LayoutRecord, &RecomputePlan),
        (schedule, order, cp_comm, graphs): (
            Option<ScheduleName>,
            Option<Order>,
            Option<CpComm>,
            Option<Graphs>,
        ),
    ) -> Result<Layout, PlanFileError> {
        let graphs = graphs.unwrap_or_default();
        let claim = Claim {
            layout,
            schedule: coming_back(layout, schedule),
            dispatcher: graphs.is_whole().then_some(Dispatcher::Hybridep),
            graphs,
            order,
            cp_comm,
            cp_sizes: None,
            recompute,
        };
        self.prove(place, model, request, &claim)
    }

    fn prove(
        &self,
        place: &Place<'_>,
        model: &Model,
        request: &Request,
        claim: &Claim<'_>,
    ) -> Result<Layout, PlanFileError> {
        let (found, recompute) = (claim.layout, claim.recompute);
        if let Some(headroom) = request
            .memory_headroom
            .filter(|share| !(0.0..1.0).contains(share))
        {
            let expected = "a share of memory, from 0 to below 1".to_owned();
            return Err(place.value("request.memory_headroom", headroom.to_string(), expected));
        }
        // Where some stages are empty, they were given.
        let stages = u64::from(found.pp) * u64::from(found.vpp);
        let given = stages > model.layers.len() as u64 + 2;
        let stages = given.then(|| self.pipeline.stages.clone().into());
        let options = SearchOptions {
            schedule: claim.schedule,
            stages,
            dispatcher: claim.dispatcher,
            graphs: Some(claim.graphs),
            order: claim.order,
            cp_comm: claim.cp_comm,
            cp_sizes: claim.cp_sizes,
            recompute: Some(recompute.clone()),
            offload: Some(self.offload.kept(model, &|layer| recompute.of_layer(layer))),
            overlap: self.overlap.or(match self.stack {
                StackName::Megatron => None,
                StackName::Moefold => Some(Overlap::default()),
            }),
            ..self.options(request.batch)
        };
        let layout = Rules::of(model, &options)
            .layout(&found.degrees(request.gpus))
            .map_err(|broken| PlanFileError::Illegal {
                path: place.path.to_owned(),
                key: format!("{}layout", place.prefix),
                broken,
            })?;
        let derived = LayoutRecord::from(&layout);
        for (key, found, expected) in [
            ("layout.dp", found.dp, derived.dp),
            ("layout.edp", found.edp, derived.edp),
            (
                "layout.microbatches",
                found.microbatches,
                derived.microbatches,
            ),
        ] {
            if found != expected {
                let (found, expected) = (found.to_string(), expected.to_string());
                return Err(place.contradiction(key, found, expected));
            }
        }
        Ok(layout)
    }

    /// Refuses predictions that are negative or no numbers, do not add up, or are faster than the device. What `profiles`
    /// say of its speed is the user's, and of tokens that a capacity drops the model FLOPs count all.
    pub(crate) fn check_predicted(
        &self,
        place: &Place<'_>,
        profiles: &[ProfileUsed],
    ) -> Result<(), PlanFileError> {
        let Predicted {
            step_s,
            step_s_low,
            step_s_high,
            mfu,
            time_s,
            memory_gib_by_pp_rank,
            memory_classes_gib_by_pp_rank,
            ..
        } = &self.predicted;
        // Serialized, every number of the record is walked, also those added later.
        let value = serde_json::to_value(&self.predicted)
            .map_err(|error| place.value("predicted", error.to_string(), "numbers".to_owned()))?;
        numbers(place, "predicted", &value)?;
        let is_bounded = profiles.is_empty() && self.capacity.is_none();
        if *mfu <= 0.0 || is_bounded && *mfu > 1.0 {
            let expected = if is_bounded {
                "a fraction of the peak, above 0 and at most 1"
            } else {
                "a fraction of the peak, above 0"
            };
            return Err(place.value("predicted.mfu", mfu.to_string(), expected.to_owned()));
        }
        let sum = time_s.total().0;
        if (sum - step_s).abs() > ROUNDING * sum.max(*step_s) {
            let expected = format!("the {step_s} s of predicted.step_s");
            let found = format!("a sum of {sum} s");
            return Err(place.value("predicted.time_s", found, expected));
        }
        if let (Some(low), Some(high)) = (step_s_low, step_s_high)
            && low > high
        {
            let expected = format!("at least the {low} s of predicted.step_s_low");
            return Err(place.value("predicted.step_s_high", high.to_string(), expected));
        }
        let ranks = self.layout.pp;
        let classes = Some(memory_classes_gib_by_pp_rank.len()).filter(|entries| *entries > 0);
        for (key, entries) in [
            ("memory_gib_by_pp_rank", Some(memory_gib_by_pp_rank.len())),
            ("memory_classes_gib_by_pp_rank", classes),
        ] {
            if let Some(found) = entries.filter(|entries| *entries != ranks as usize) {
                let expected = format!("{ranks}, one for each pipeline rank");
                let found = format!("{found} entries");
                return Err(place.value(&format!("predicted.{key}"), found, expected));
            }
        }
        let each = memory_gib_by_pp_rank.iter();
        for (rank, (all, parts)) in each.zip(memory_classes_gib_by_pp_rank).enumerate() {
            let sum = parts.total();
            if (sum - all).abs() > ROUNDING * sum.max(*all) {
                let key = format!("predicted.memory_classes_gib_by_pp_rank[{rank}]");
                let expected = format!("the {all} GiB of predicted.memory_gib_by_pp_rank");
                return Err(place.value(&key, format!("a sum of {sum} GiB"), expected));
            }
        }
        Ok(())
    }
}

/// Refuses any number in a value that is negative or not finite; the latter serialize as null.
fn numbers(place: &Place<'_>, key: &str, value: &Value) -> Result<(), PlanFileError> {
    let fits = match value {
        Value::Object(parts) => {
            return parts
                .iter()
                .try_for_each(|(name, part)| numbers(place, &format!("{key}.{name}"), part));
        }
        Value::Array(parts) => {
            return parts
                .iter()
                .enumerate()
                .try_for_each(|(index, part)| numbers(place, &format!("{key}[{index}]"), part));
        }
        Value::Number(number) => number.as_f64().is_some_and(|n| n.is_finite() && n >= -DUST),
        Value::Null => false,
        Value::Bool(_) | Value::String(_) => true,
    };
    if fits {
        return Ok(());
    }
    let found = match value {
        Value::Null => "not a finite number".to_owned(),
        other => other.to_string(),
    };
    let expected = "a finite number of at least 0".to_owned();
    Err(place.value(key, found, expected))
}
