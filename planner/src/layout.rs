//! [`Layout`]: how a job's ranks are divided among the parallel axes, proven legal.
//!
//! Anyone may write [`Degrees`]; only [`crate::rules`] makes a [`Layout`], and nothing downstream
//! checks it again. What rules refuse is an [`Illegal`]. Attention and experts are two independent
//! decompositions of the same rank numbers with identical pipeline groups (MoE Parallel Folding,
//! arXiv 2504.14960); the groups themselves are in [`crate::mesh`]. Whether a layout fits into
//! memory is not asked here.

mod grids;
mod illegal;
pub(crate) mod nearest;
mod order;
mod partial;
mod places;
mod record;

use serde::{Deserialize, Serialize};

pub(crate) use grids::grids;
pub use illegal::{Illegal, MAX_GPUS, MAX_PASSES, MAX_ROWS};
pub use order::{Axis, Order, ParseOrderError};
pub use partial::{ParseDegreesError, PartialDegrees};
pub use places::Places;
pub use record::LayoutRecord;

use crate::choice::ScheduleName;

/// Parallel degrees as someone wrote them, legal or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Degrees {
    /// Ranks of the job.
    pub gpus: u32,
    /// Tensor-parallel degree of attention and dense layers; sequence parallel whenever above 1.
    pub tp: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Pipeline-parallel degree.
    pub pp: u32,
    /// Virtual stages a pipeline rank; 1 for plain 1F1B.
    pub vpp: u32,
    /// Expert-parallel degree.
    pub ep: u32,
    /// Expert-tensor-parallel degree.
    pub etp: u32,
    /// Sequences of one microbatch on one data-parallel replica.
    pub mbs: u32,
}

/// The training job a layout serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Sequences a step.
    pub global_batch: u64,
}

/// A legal division of ranks and work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Layout {
    degrees: Degrees,
    dp: u32,
    edp: u32,
    microbatches: u32,
    /// Whether the second chunks of a pipeline come back: see [`Places`].
    is_vee: bool,
    order: Order,
}

impl Layout {
    /// The layout of degrees that rules found legal, with `(dp, edp)` and microbatches as they derived
    /// them. Only [`crate::rules`] may say so.
    pub(crate) fn proven(degrees: &Degrees, (dp, edp): (u32, u32), microbatches: u32) -> Self {
        Self {
            degrees: *degrees,
            dp,
            edp,
            microbatches,
            is_vee: false,
            order: Order::default(),
        }
    }

    /// The same with its ranks numbered otherwise; none where the two grids then disagree on pipelines: of the orders
    /// that are planned the default always goes, [`Order::DP_LAST`] where replicas of experts are as many as those of
    /// the rest, or there is no pipeline.
    pub fn numbered(self, order: Order) -> Option<Self> {
        let agree = order == Order::PP_LAST || self.pp() == 1 || self.dp == self.edp;
        agree.then_some(Self { order, ..self })
    }

    /// Which axis varies fastest along the rank numbers.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The same under a schedule that goes with its degrees, which says where stages are.
    #[must_use]
    pub fn under(self, schedule: ScheduleName) -> Self {
        Self {
            is_vee: schedule.is_vee(),
            ..self
        }
    }

    /// Which pipeline rank has which stage.
    pub fn places(&self) -> Places {
        Places::new(self.pp(), self.vpp(), self.is_vee)
    }

    /// The degrees it was made from.
    pub fn degrees(&self) -> Degrees {
        self.degrees
    }
    /// Ranks of the job.
    pub fn gpus(&self) -> u32 {
        self.degrees.gpus
    }
    /// Tensor-parallel degree.
    pub fn tp(&self) -> u32 {
        self.degrees.tp
    }
    /// Context-parallel degree.
    pub fn cp(&self) -> u32 {
        self.degrees.cp
    }
    /// Data-parallel degree: replicas that see different samples.
    pub fn dp(&self) -> u32 {
        self.dp
    }
    /// Pipeline-parallel degree.
    pub fn pp(&self) -> u32 {
        self.degrees.pp
    }
    /// Virtual stages a pipeline rank.
    pub fn vpp(&self) -> u32 {
        self.degrees.vpp
    }
    /// Stages in all: `pp * vpp`.
    pub fn stages(&self) -> u32 {
        self.degrees.pp * self.degrees.vpp
    }
    /// Expert-parallel degree.
    pub fn ep(&self) -> u32 {
        self.degrees.ep
    }
    /// Expert-tensor-parallel degree.
    pub fn etp(&self) -> u32 {
        self.degrees.etp
    }
    /// Replicas of an expert shard.
    pub fn edp(&self) -> u32 {
        self.edp
    }
    /// Sequences a microbatch.
    pub fn mbs(&self) -> u32 {
        self.degrees.mbs
    }
    /// Microbatches a step.
    pub fn microbatches(&self) -> u32 {
        self.microbatches
    }
    /// Sequence parallelism: on whenever tensor parallelism is.
    pub fn sequence_parallel(&self) -> bool {
        self.degrees.tp > 1
    }
}
