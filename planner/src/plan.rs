//! [`Plan`]: a layout with everything needed to run it and everything predicted about it.
//!
//! The file `plan.json` is one plan. It is written by the search, read by `execute`, `compare` and
//! people, and loaded through one door ([`Plan::load`]) that validates a hand-edited file like a
//! searched one. Keys follow the published contract; additions are allowed, changes are not.

mod check;
mod file;

use std::collections::BTreeMap;

use moefold_profiles::trace::TimeByCategory;
use moefold_profiles::{ByClass, Cluster, Precision};
use serde::{Deserialize, Serialize};

use crate::layout::{Batch, Layout};
use crate::model::{Ffn, Mixer, Model};

pub(crate) use check::Place;
pub use file::PlanFileError;

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
    /// What is computed again in the backward pass.
    pub recompute: Recompute,
    /// Modules whose activations rest on the host; `none` so far.
    pub offload: Offload,
    /// Precision.
    pub precision: Precision,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// What executes it.
    pub stack: StackName,
    /// What it is expected to cost.
    pub predicted: Predicted,
}

/// The degrees of a plan, derived ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    missing_docs,
    reason = "the field's standard abbreviations, spelled out in layout.rs"
)]
pub struct LayoutRecord {
    pub tp: u32,
    pub cp: u32,
    pub dp: u32,
    pub pp: u32,
    pub vpp: u32,
    pub ep: u32,
    pub etp: u32,
    pub edp: u32,
    pub mbs: u32,
    pub microbatches: u32,
}

impl From<&Layout> for LayoutRecord {
    fn from(layout: &Layout) -> Self {
        Self {
            tp: layout.tp(),
            cp: layout.cp(),
            dp: layout.dp(),
            pp: layout.pp(),
            vpp: layout.vpp(),
            ep: layout.ep(),
            etp: layout.etp(),
            edp: layout.edp(),
            mbs: layout.mbs(),
            microbatches: layout.microbatches(),
        }
    }
}

/// Schedule and placement of layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// Which schedule.
    pub schedule: ScheduleName,
    /// For each stage (chunk by chunk: stage `s` is chunk `s / pp` of rank `s % pp`) the decoder
    /// layers it holds. The embedding is on the first stage, norm, head and MTP on the last.
    pub stages: Vec<Vec<u32>>,
}

/// Pipeline schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ScheduleName {
    /// No pipeline.
    #[serde(rename = "none")]
    None,
    /// One forward, one backward.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Interleaved 1F1B over virtual stages.
    #[serde(rename = "interleaved")]
    Interleaved,
}

/// How tokens reach their experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dispatcher {
    /// Permute, exchange rows, permute back.
    Alltoall,
    /// Gather every token, select locally.
    Allgather,
    /// DeepEP: one copy per destination.
    Deepep,
    /// HybridEP: one copy per destination, permutation fused.
    Hybridep,
}

impl Dispatcher {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Alltoall,
        Self::Allgather,
        Self::Deepep,
        Self::Hybridep,
    ];

    /// Its name on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alltoall => "alltoall",
            Self::Allgather => "allgather",
            Self::Deepep => "deepep",
            Self::Hybridep => "hybridep",
        }
    }
}

/// Modules whose outputs can be dropped and computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Module {
    /// The attention core.
    CoreAttn,
    /// Up-projections of latent attention.
    MlaUpProj,
    /// The norms before blocks.
    Layernorm,
    /// The experts' activation.
    MoeAct,
    /// The whole MoE layer, dispatch included.
    Moe,
    /// The dense MLP.
    Mlp,
    /// The shared expert.
    SharedExperts,
}

impl Module {
    /// All of them, in order.
    pub const ALL: [Self; 7] = [
        Self::CoreAttn,
        Self::MlaUpProj,
        Self::Layernorm,
        Self::MoeAct,
        Self::Moe,
        Self::Mlp,
        Self::SharedExperts,
    ];

    /// Its name on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CoreAttn => "core_attn",
            Self::MlaUpProj => "mla_up_proj",
            Self::Layernorm => "layernorm",
            Self::MoeAct => "moe_act",
            Self::Moe => "moe",
            Self::Mlp => "mlp",
            Self::SharedExperts => "shared_experts",
        }
    }

    /// The modules that some layer of a model has, MTP depths included; sorted.
    pub fn of(model: &Model) -> Vec<Self> {
        let mut found = Vec::new();
        for layer in model.layers.iter().chain(&model.mtp) {
            match &layer.mixer {
                Some(Mixer::Mla(_) | Mixer::SharedKv(_)) => {
                    found.extend([Self::CoreAttn, Self::MlaUpProj]);
                }
                Some(Mixer::Gqa(_) | Mixer::Linear(_)) => found.push(Self::CoreAttn),
                None => {}
            }
            match &layer.ffn {
                Some(Ffn::Dense(_)) => found.push(Self::Mlp),
                Some(Ffn::Moe(moe)) => {
                    found.extend([Self::MoeAct, Self::Moe]);
                    found.extend(moe.shared.as_ref().map(|_| Self::SharedExperts));
                }
                None => {}
            }
            found.push(Self::Layernorm);
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// What is computed again in the backward pass. In JSON: `"none"`, `"full"` or a list of modules.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "RecomputeRecord", into = "RecomputeRecord")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Every layer from its input.
    Full,
    /// The listed modules, sorted.
    Modules(Vec<Module>),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum RecomputeRecord {
    Word(RecomputeWord),
    Modules(Vec<Module>),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RecomputeWord {
    None,
    Full,
}

impl From<RecomputeRecord> for Recompute {
    fn from(record: RecomputeRecord) -> Self {
        match record {
            RecomputeRecord::Word(RecomputeWord::None) => Self::None,
            RecomputeRecord::Word(RecomputeWord::Full) => Self::Full,
            RecomputeRecord::Modules(modules) => Self::of(modules),
        }
    }
}

impl From<Recompute> for RecomputeRecord {
    fn from(recompute: Recompute) -> Self {
        match recompute {
            Recompute::None => Self::Word(RecomputeWord::None),
            Recompute::Full => Self::Word(RecomputeWord::Full),
            Recompute::Modules(modules) => Self::Modules(modules),
        }
    }
}

impl Recompute {
    /// The set of some modules; an empty set is [`Recompute::None`].
    pub fn of(mut modules: Vec<Module>) -> Self {
        modules.sort_unstable();
        modules.dedup();
        if modules.is_empty() {
            Self::None
        } else {
            Self::Modules(modules)
        }
    }

    /// Whether a module's output is computed again.
    pub fn covers(&self, module: Module) -> bool {
        match self {
            Self::None => false,
            Self::Full => true,
            Self::Modules(modules) => modules.contains(&module),
        }
    }
}

/// Offloading; only `none` exists so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Nothing leaves the device.
    #[default]
    None,
}

/// Optimizers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Optimizer {
    /// AdamW with f32 moments.
    #[default]
    Adam,
    /// AdamW with bf16 moments.
    AdamBf16Moments,
}

/// What runs a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StackName {
    /// Megatron-Core with Transformer Engine.
    #[default]
    Megatron,
    /// This project's executor.
    Moefold,
}

impl StackName {
    /// Its name on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Megatron => "megatron",
            Self::Moefold => "moefold",
        }
    }
}

/// What a plan is expected to cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Seconds a step.
    pub step_s: f64,
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
    /// Peak memory of each pipeline rank, GiB.
    pub memory_gib_by_pp_rank: Vec<f64>,
    /// Exposed seconds of the step by category; sums to `step_s`.
    pub time_s: TimeByCategory,
    /// Busy seconds a step of the slowest rank by op or collective stem, hidden ones included.
    #[serde(default)]
    pub busy_s: BTreeMap<String, f64>,
    /// Share of the busy time from each kind of price.
    pub confidence: Confidence,
}

/// Shares of time by how the price is known; they sum to 1.
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
}

/// What a search maximizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Tokens a second.
    #[default]
    Throughput,
    /// Tokens a dollar.
    Cost,
    /// Least peak memory.
    Memory,
}

/// A profile that prices came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileUsed {
    /// Name of the shipped table or of the directory.
    pub name: String,
    /// Hash of its content.
    pub hash: String,
}

/// A runner-up, short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
    /// Degrees.
    pub layout: LayoutRecord,
    /// What it recomputes.
    pub recompute: Recompute,
    /// Seconds a step.
    pub step_s: f64,
    /// Peak memory, GiB.
    pub peak_gib: f64,
    /// Why it lost: which costs, averaged over pipeline ranks, are higher than the winner's.
    pub why: String,
}
