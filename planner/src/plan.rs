//! [`Plan`]: a layout with everything needed to run it and everything predicted about it.
//!
//! The file `plan.json` is one plan. It is written by the search, read by `execute`, `compare` and
//! people, and loaded through one door ([`Plan::load`]) that validates a hand-edited file like a
//! searched one. Keys follow the published contract; additions are allowed, changes are not.

mod check;
mod file;

use std::collections::BTreeMap;

use moefold_profiles::trace::TimeByCategory;
use moefold_profiles::{ByClass, Cluster, Dtype, Precision};
use serde::{Deserialize, Serialize};

use crate::choice::{
    Capacity, CpComm, Dispatcher, Graphs, HostShare, Masters, Objective, Offload, Optimizer,
    Overlap, PrimaryWeights, RecomputePlan, ScheduleName, StackName, Zero,
};
use crate::layout::{Batch, Order};
use crate::model::Model;
use crate::options::{Loads, MEMORY_HEADROOM, Routing, SearchOptions};

pub(crate) use check::Place;
pub use file::PlanFileError;

pub use crate::layout::LayoutRecord;

/// Version of the file format.
pub const PLAN_VERSION: u32 = 1;

/// One element of `plans`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedLayout {
    /// Degrees.
    pub layout: LayoutRecord,
    /// Schedule and the layers of each stage.
    pub pipeline: Pipeline,
    /// Token dispatcher.
    pub dispatcher: Dispatcher,
    /// How attention reaches the keys of other context-parallel ranks; absent without such ranks, and in older
    /// files, which mean `p2p`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cp_comm_type: Option<CpComm>,
    /// Of `a2a+p2p` the ranks that exchange heads, and the ranks of a ring; absent of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hierarchical_context_parallel_sizes: Option<[u32; 2]>,
    /// How many tokens an expert takes; absent where nothing is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Capacity>,
    /// How ranks are numbered; absent where that is `tp-cp-ep-dp-pp`, and in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_order: Option<Order>,
    /// What each layer computes again in the backward pass.
    pub recompute: RecomputePlan,
    /// Modules whose saved tensors rest on the host between the passes.
    pub offload: Offload,
    /// Precision.
    pub precision: Precision,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Type of the main gradients; absent where that is f32, and in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_dtype: Option<Dtype>,
    /// What is kept of f32 masters; absent where that is all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masters: Option<Masters>,
    /// What weights are that are multiplied in FP8; absent where they are wide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary_weights: Option<PrimaryWeights>,
    /// How much of the optimizer's state rests on the host; absent where none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_offload_fraction: Option<HostShare>,
    /// What data parallelism divides; absent where that is the states of the optimizer alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero: Option<Zero>,
    /// Parts of the replicas, each of which divides that by itself (Megatron's
    /// `--num-distributed-optimizer-instances`); absent where that is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_instances: Option<u32>,
    /// Communication that runs beside compute; absent where that is [`Overlap::unsaid`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlap>,
    /// What CUDA graphs launch at once; absent where nothing is a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_graph: Option<Graphs>,
    /// Whether attention multiplies in FP8; absent where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_attention: Option<bool>,
    /// Elements that a bucket of gradients has at least: see [`crate::bucket`]. Absent where each family of
    /// parameters is one bucket, and of stacks that divide nothing by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_elements: Option<u64>,
    /// What executes it.
    pub stack: StackName,
    /// What it is expected to cost.
    pub predicted: Predicted,
}

impl PlannedLayout {
    /// How attention reaches the keys of other context-parallel ranks.
    pub fn cp_comm(&self) -> CpComm {
        self.cp_comm_type.unwrap_or_default()
    }

    /// Communication that runs beside compute, on the devices of `cluster`.
    pub fn overlap(&self, cluster: &Cluster) -> Overlap {
        self.overlap
            .unwrap_or_else(|| Overlap::unsaid(self.stack, cluster.gpu.is_cpu()))
    }

    /// What it fixes beside its degrees and stages, of `batch`; what runs beside compute only where it says so.
    pub(crate) fn options(&self, batch: Batch) -> SearchOptions {
        SearchOptions {
            precision: self.precision,
            optimizer: self.optimizer,
            masters: self.masters.unwrap_or_default(),
            primary_weights: self.primary_weights.unwrap_or_default(),
            optimizer_offload: self.optimizer_offload_fraction.unwrap_or_default(),
            grad_dtype: self.grad_dtype.unwrap_or(Dtype::F32),
            dispatcher: Some(self.dispatcher),
            order: Some(self.rank_order.unwrap_or_default()),
            cp_comm: Some(self.cp_comm()),
            cp_sizes: self.hierarchical_context_parallel_sizes,
            capacity: self.capacity,
            recompute: Some(self.recompute.clone()),
            offload: Some(self.offload),
            zero: self.zero.unwrap_or_default(),
            instances: self.optimizer_instances.unwrap_or(1),
            overlap: self.overlap,
            graphs: Some(self.cuda_graph.unwrap_or_default()),
            fp8_attention: self.fp8_attention.unwrap_or(false),
            bucket_elements: self.bucket_elements,
            schedule: Some(self.pipeline.schedule),
            ..SearchOptions::new(batch, self.stack)
        }
    }

    /// How tokens were routed that it was planned for, where that was not balanced.
    pub fn routing(&self) -> Option<Routing> {
        let Some(PlannedRouting::Recorded {
            source,
            busiest,
            fullest,
            ..
        }) = &self.predicted.routing
        else {
            return None;
        };
        let loads = Loads {
            busiest: busiest.clone(),
            fullest: fullest.clone(),
        };
        Some(Routing::of_layout(source, self.layout.ep, loads))
    }
}

/// Schedule and placement of layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// Which schedule.
    pub schedule: ScheduleName,
    /// For each stage (chunk by chunk: [`crate::layout::Places`] says on which rank) the decoder
    /// layers it holds. The embedding is on the first stage, norm, head and MTP on the last.
    pub stages: Vec<Vec<u32>>,
}

/// What a plan is expected to cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Seconds a step.
    pub step_s: f64,
    /// The shortest step that is to be expected: four of five steps take between this and `step_s_high`.
    /// From how prices are known, and from what published steps took over their predictions; absent in
    /// older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s_low: Option<f64>,
    /// The longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s_high: Option<f64>,
    /// Tokens a second on each GPU.
    pub tokens_per_s_per_gpu: f64,
    /// Model TFLOP/s on each GPU (recompute not counted).
    pub model_tflops_per_gpu: f64,
    /// Model FLOP/s over peak.
    pub mfu: f64,
    /// Peak memory of the worst rank, GiB.
    pub peak_gib: f64,
    /// Its parts, GiB. Of this project's executor the classes are those that its device counts: its
    /// activations are also what flows between ops, and its transients communication staging, products
    /// of backward passes and workspaces.
    pub memory_gib: ByClass<f64>,
    /// The most that a rank has in memory of its host, GiB; absent where nothing leaves the device. No part of
    /// the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_gib: Option<f64>,
    /// Peak memory of each pipeline rank, GiB.
    pub memory_gib_by_pp_rank: Vec<f64>,
    /// The parts of each; empty in older files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_classes_gib_by_pp_rank: Vec<ByClass<f64>>,
    /// Exposed seconds of the step by category; sums to `step_s`.
    pub time_s: TimeByCategory,
    /// The pipeline rank that times, ops and calls are of: the one that ends last; absent in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critical_pp_rank: Option<u32>,
    /// Busy seconds a step of the slowest rank by op or collective stem, hidden ones included.
    #[serde(default)]
    pub busy_s: BTreeMap<String, f64>,
    /// Calls a step of that rank, by the same keys; empty in older files.
    #[serde(default)]
    pub calls: BTreeMap<String, f64>,
    /// Share of the busy time from each kind of price.
    pub confidence: Confidence,
    /// How tokens are assumed to reach the experts, and what that does; absent without experts and in
    /// older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<PlannedRouting>,
}

impl Predicted {
    /// What an objective makes small: seconds of a step, or GiB of the fullest rank.
    pub fn score(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Throughput => self.step_s,
            Objective::Memory => self.peak_gib,
        }
    }
}

/// How tokens are assumed to reach the experts of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "assumed", rename_all = "lowercase", deny_unknown_fields)]
pub enum PlannedRouting {
    /// Every rank's experts get as many rows, for nothing else is known.
    Balanced {
        /// The same layout where one rank's experts get twice as many in every layer.
        doubled: Outcome,
    },
    /// As a run or a histogram had it.
    Recorded {
        /// The run directory or the file.
        source: String,
        /// Rows of the busiest rank's experts over the mean of all ranks, by MoE layer: time is priced
        /// with it.
        busiest: Vec<f64>,
        /// The same of the fullest rank, in the microbatch in which memory peaks: memory is counted with
        /// it.
        fullest: Vec<f64>,
        /// The same layout under balanced routing.
        balanced: Outcome,
    },
}

/// What a layout comes to if tokens are routed in another way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Seconds a step.
    pub step_s: f64,
    /// Peak memory of the worst rank, GiB.
    pub peak_gib: f64,
}

/// Shares of busy time by how its price is known; they sum to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confidence {
    /// Exactly this key was measured.
    pub measured: f64,
    /// Between measurements.
    pub interpolated: f64,
    /// Beyond them, or from a roofline.
    pub extrapolated: f64,
}

/// The file `plan.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Format version.
    pub version: u32,
    /// The plan itself.
    #[serde(flatten)]
    pub planned: PlannedLayout,
    /// The resolved model.
    pub model: Model,
    /// The resolved cluster.
    pub cluster: Cluster,
    /// What was asked for.
    pub request: Request,
    /// Profiles that prices came from.
    pub profiles: Vec<ProfileUsed>,
    /// Runners-up.
    pub alternatives: Vec<Alternative>,
}

impl Plan {
    /// A layout that was found of a model on so many ranks of a cluster, as a plan: priced by no profile, and beside
    /// no other.
    pub fn of(
        planned: PlannedLayout,
        model: &Model,
        cluster: &Cluster,
        gpus: u32,
        options: &SearchOptions,
    ) -> Self {
        Self {
            version: PLAN_VERSION,
            planned,
            model: model.clone(),
            cluster: cluster.clone(),
            request: Request::of(gpus, options),
            profiles: Vec::new(),
            alternatives: Vec::new(),
        }
    }

    /// What it fixes beside its degrees and stages.
    pub fn options(&self) -> SearchOptions {
        SearchOptions {
            routing: self.planned.routing(),
            overlap: Some(self.planned.overlap(&self.cluster)),
            ..self.planned.options(self.request.batch)
        }
    }

    /// What was asked for, as far as it holds that: what no search chooses unless it is told to, and a schedule that none
    /// tries unless it is named. The routing is of its layout, and left out, as are sizes that follow from it.
    pub fn asked(&self) -> SearchOptions {
        let (planned, request) = (&self.planned, &self.request);
        let schedule = planned.pipeline.schedule;
        let whole_graphs = planned.cuda_graph.is_some_and(Graphs::is_whole);
        SearchOptions {
            // Graphs of a whole step go with the dispatcher that bounds rows.
            dispatcher: whole_graphs.then_some(planned.dispatcher),
            order: None,
            cp_sizes: None,
            recompute: None,
            // Modules that a search has chosen are no less searched than the rest.
            offload: (planned.offload == Offload::NONE).then_some(Offload::NONE),
            schedule: schedule.is_vee().then_some(schedule),
            objective: request.objective,
            memory_headroom: request.memory_headroom.unwrap_or(MEMORY_HEADROOM),
            ..planned.options(request.batch)
        }
    }

    /// The same with its degrees and stages: all that a search could choose, pinned.
    pub fn pinned(&self) -> SearchOptions {
        let pipeline = &self.planned.pipeline;
        SearchOptions {
            pins: self.planned.layout.pinned(),
            stages: (pipeline.schedule != ScheduleName::None)
                .then(|| pipeline.stages.clone().into()),
            top: 1,
            ..self.options()
        }
    }
}

/// What was asked of the planner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Ranks.
    pub gpus: u32,
    /// Sequence length and global batch.
    #[serde(flatten)]
    pub batch: Batch,
    /// What is best.
    pub objective: Objective,
    /// Share of each device's memory that it leaves free; absent where that is [`MEMORY_HEADROOM`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_headroom: Option<f64>,
}

impl Request {
    /// What `options` ask for on so many ranks.
    pub fn of(gpus: u32, options: &SearchOptions) -> Self {
        let headroom = options.memory_headroom;
        Self {
            gpus,
            batch: options.batch,
            objective: options.objective,
            memory_headroom: (headroom != MEMORY_HEADROOM).then_some(headroom),
        }
    }
}

/// A profile that prices came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileUsed {
    /// Name of the shipped table or of the directory.
    pub name: String,
    /// Hash of its content.
    pub hash: String,
    /// Its [`pace_s`](moefold_profiles::Profile::pace_s).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace_s: Option<[f64; 2]>,
}

/// A runner-up, short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
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
    /// How its attention reaches the keys of other context-parallel ranks; absent where the plan does so too, or there
    /// are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cp_comm_type: Option<CpComm>,
    /// What CUDA graphs launch of it; absent where nothing is a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_graph: Option<Graphs>,
    /// Seconds a step.
    pub step_s: f64,
    /// Peak memory, GiB.
    pub peak_gib: f64,
    /// Why it lost: which costs, averaged over pipeline ranks, are higher than the winner's.
    pub why: String,
}
