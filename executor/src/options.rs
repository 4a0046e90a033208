//! [`TrainOptions`]: how to train, besides the plan; [`Savers`]: what the plan chooses beside its degrees.
//!
//! Plain data that a caller fills in. What it asks for is done elsewhere: [`mod@crate::train`] begins
//! and steps, [`mod@crate::checkpoint`] saves and resumes.

use std::ops::Range;
use std::path::PathBuf;

use moefold_planner::bucket::Division;
use moefold_planner::choice::{
    CpComm, HostShare, Masters, Offload, Optimizer, Overlap, RecomputePlan, ScheduleName, Zero,
};
use moefold_planner::layout::Layout;
use moefold_planner::plan::PlannedLayout;
use moefold_planner::schedule::Schedule;
use serde::Serialize;

use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::moe::balance::Balancing;
use crate::moe::dispatch::Dispatching;
use crate::optimizer::AdamOptions;

/// How to train, besides the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Steps of the whole run, those before a checkpoint it goes on from among them.
    pub steps: u64,
    /// Learning rate by step.
    pub lr: LearningRate,
    /// Optimizer constants.
    pub adam: AdamOptions,
    /// How the load of experts is balanced.
    pub balancing: Balancing,
    /// Weight of the losses of multi-token prediction, the mean over its depths.
    pub mtp_loss_scaling_factor: f64,
    /// Seed of random weights.
    pub seed: u64,
    /// Initial weights.
    pub init: Init,
    /// What every rank computes on.
    pub device: DeviceSpec,
    /// Steps whose spans go into the trace one by one.
    pub traced_steps: Range<u64>,
    /// Whether checkpoints are saved, and where.
    pub save: Option<Saving>,
}

impl TrainOptions {
    /// How random tokens are trained on, from which nothing is to be learnt: as a benchmark and a rehearsal do.
    pub(crate) fn unpractised(steps: u64, device: DeviceSpec) -> Self {
        Self {
            steps,
            lr: LearningRate::constant(1e-4),
            adam: AdamOptions::default(),
            balancing: Balancing::default(),
            mtp_loss_scaling_factor: MTP_LOSS_SCALING_FACTOR,
            seed: 1,
            init: Init::Random,
            device,
            traced_steps: 0..0,
            save: None,
        }
    }
}

/// Megatron-Core's default for multi-token prediction, and what DeepSeek-V3 was trained with at the end (arXiv
/// 2412.19437, section 4.2).
pub const MTP_LOSS_SCALING_FACTOR: f64 = 0.1;

/// What correction biases move in a step where nobody says otherwise (DeepSeek-V3, arXiv 2412.19437, section
/// 4.2).
pub const BIAS_UPDATE_RATE: f64 = 1e-3;

/// What a plan chooses beside its degrees: what it gives time for memory with, and how tokens go to experts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Savers {
    /// What each layer computes again in the backward pass.
    pub recompute: RecomputePlan,
    /// Whose saved tensors rest on the host between the passes.
    pub offload: Offload,
    /// What updates the weights, and what its moments are stored in.
    pub optimizer: Optimizer,
    /// What is kept of f32 masters, where weights are narrower.
    pub masters: Masters,
    /// How much of masters and moments rests on the host between steps.
    pub optimizer_offload: HostShare,
    /// How attention reaches the keys of other context-parallel ranks.
    pub cp_comm: CpComm,
    /// How tokens go to the experts.
    pub dispatching: Dispatching,
    /// What runs beside compute.
    pub overlap: Overlap,
    /// The pipeline schedule; absent, the one that degrees have where none is chosen.
    pub schedule: Option<ScheduleName>,
    /// Elements that a bucket of gradients has at least; none where each family is one.
    pub bucket_elements: Option<u64>,
    /// What data parallelism divides.
    pub zero: Zero,
}

impl Savers {
    /// How weights are divided into buckets.
    pub fn division(&self) -> Division {
        Division::of(self.zero, self.overlap, self.bucket_elements)
    }

    /// The schedule of a layout.
    pub(crate) fn schedule_of(&self, layout: &Layout) -> Schedule {
        let usual = ScheduleName::of(layout.pp(), layout.vpp());
        Schedule::of(layout, self.schedule.unwrap_or(usual))
    }

    /// Those of a plan.
    pub fn of(plan: &PlannedLayout) -> Self {
        Self {
            recompute: plan.recompute.clone(),
            offload: plan.offload,
            optimizer: plan.optimizer,
            masters: plan.masters.unwrap_or_default(),
            optimizer_offload: plan.optimizer_offload_fraction.unwrap_or_default(),
            cp_comm: plan.cp_comm(),
            dispatching: Dispatching {
                dispatcher: plan.dispatcher,
                capacity: plan.capacity,
            },
            overlap: plan.overlap.unwrap_or_default(),
            schedule: Some(plan.pipeline.schedule),
            bucket_elements: plan.bucket_elements,
            zero: plan.zero.unwrap_or_default(),
        }
    }
}

/// Where initial weights come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Init {
    /// Drawn from the seed, by global coordinates: the same under every layout.
    #[default]
    Random,
    /// A Hugging Face checkpoint folder.
    HuggingFace(PathBuf),
    /// A checkpoint of a run: training goes on after its steps, with the states it had.
    Resume(Resumed),
}

impl Init {
    /// The checkpoint that training goes on from.
    pub fn resumed(&self) -> Option<&Resumed> {
        match self {
            Self::Random | Self::HuggingFace(_) => None,
            Self::Resume(resumed) => Some(resumed),
        }
    }
}

/// A checkpoint to go on from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Resumed {
    /// Its folder.
    #[serde(serialize_with = "crate::files::shown")]
    pub checkpoint: PathBuf,
    /// Steps taken.
    pub step: u64,
}

/// When a run saves, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saving {
    /// Steps between checkpoints; there is one at the end of the run too. Without it one is saved where the run is
    /// told to ([`Control`](crate::control::Control)).
    pub every: Option<u64>,
    /// The run directory. Ranks that are processes take rank 0's.
    pub run_dir: PathBuf,
}
