//! [`SearchOptions`]: what a search may vary and what is fixed.
//!
//! Values are typed: whoever reads them from words (the command line) refuses words that mean nothing.
//! What cannot be planned is refused by the search, with a [`PlanError`] that names the option in
//! backticks, the value and what would work.

mod error;
mod pipeline;
mod routing;

use moefold_profiles::{Dtype, Precision};

use crate::choice::{
    Capacity, CpComm, Dispatcher, Graphs, HostShare, Masters, Objective, Offload, Optimizer,
    Overlap, PrimaryWeights, RecomputePlan, ScheduleName, StackName, Zero,
};
use crate::layout::{Batch, Order, PartialDegrees};

pub use error::{LeastMemory, PlanError};
pub use pipeline::{ParseStagesError, PipelineLayout};
pub use routing::{Loads, Routing};

/// Share of each device's memory that a plan leaves free where nothing is said: the memory model counts
/// fragmentation at its mean of 5 %, and the measurements behind that reach 9.3 %.
pub const MEMORY_HEADROOM: f64 = 0.05;

/// How long the best split of the first plan's layers is looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// For a moment.
    Brief,
    /// For some seconds: most are known by then.
    #[default]
    Usual,
    /// Until it is known, or the search is stopped.
    Patient,
}

/// What a search may vary and what is fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchOptions {
    /// Sequence length and global batch.
    pub batch: Batch,
    /// Recipe.
    pub precision: Precision,
    /// Runtime.
    pub stack: StackName,
    /// Fixed degrees.
    pub pins: PartialDegrees,
    /// Token dispatcher; `None` tries the stack's.
    pub dispatcher: Option<Dispatcher>,
    /// How ranks are numbered; `None` tries both ways of Megatron-LM.
    pub order: Option<Order>,
    /// How attention reaches the keys of other context-parallel ranks; `None` tries the stack's.
    pub cp_comm: Option<CpComm>,
    /// Of [`CpComm::Hierarchical`] the ranks that exchange heads, and the ranks of a ring; `None` exchanges inside NVLink
    /// domains, as far as heads divide.
    pub cp_sizes: Option<[u32; 2]>,
    /// How many tokens an expert takes; `None` drops nothing.
    pub capacity: Option<Capacity>,
    /// What layers compute again; `None` tries every sensible set, and by layer where the stack can.
    pub recompute: Option<RecomputePlan>,
    /// The pipeline schedule; `None` tries those that the stack has.
    pub schedule: Option<ScheduleName>,
    /// Whose saved tensors rest on the host; `None` tries it.
    pub offload: Option<Offload>,
    /// What each stage holds, where given.
    pub stages: Option<PipelineLayout>,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// What is kept of f32 masters.
    pub masters: Masters,
    /// What weights are that are multiplied in FP8.
    pub primary_weights: PrimaryWeights,
    /// How much of the optimizer's state rests on the host.
    pub optimizer_offload: HostShare,
    /// Type of the main gradients.
    pub grad_dtype: Dtype,
    /// What data parallelism divides.
    pub zero: Zero,
    /// Parts of the replicas, each of which divides that by itself.
    pub instances: u32,
    /// What runs beside compute; `None` takes all that the stack can.
    pub overlap: Option<Overlap>,
    /// What CUDA graphs launch at once; `None` searches all that the stack takes.
    pub graphs: Option<Graphs>,
    /// Whether attention multiplies in FP8 (of Megatron-Core, `--fp8-dot-product-attention`).
    pub fp8_attention: bool,
    /// Elements that a bucket of gradients has at least; `None` is the stack's.
    pub bucket_elements: Option<u64>,
    /// How tokens were routed; balanced where absent.
    pub routing: Option<Routing>,
    /// What is best.
    pub objective: Objective,
    /// Plans wanted.
    pub top: usize,
    /// Memory a plan may fill on each device, GiB; `None` is all but the headroom.
    pub memory_gib: Option<f64>,
    /// Share of each device's memory that every plan leaves free, from 0 to below 1.
    pub memory_headroom: f64,
    /// How long the best split of the first plan's layers is looked for.
    pub effort: Effort,
    /// Whether to look at every layout for a picture of them all, besides what the search needs.
    pub survey: bool,
    /// Points of the front of speed against memory that are looked for behind the fastest plan, at most.
    pub front: usize,
}

impl SearchOptions {
    /// The same, of the best plan alone.
    #[must_use]
    pub fn alone(self) -> Self {
        Self {
            top: 1,
            survey: false,
            front: 0,
            ..self
        }
    }

    /// What CUDA graphs launch where that is fixed, or nothing.
    pub fn fixed_graphs(&self) -> Graphs {
        self.graphs.unwrap_or_default()
    }

    /// The defaults for a batch on a stack.
    pub fn new(batch: Batch, stack: StackName) -> Self {
        Self {
            batch,
            precision: match stack {
                StackName::Megatron => Precision::Bf16,
                StackName::Moefold => Precision::Fp32,
            },
            stack,
            pins: PartialDegrees::default(),
            dispatcher: None,
            order: Some(Order::default()),
            cp_comm: Some(CpComm::default()),
            cp_sizes: None,
            capacity: None,
            recompute: None,
            schedule: None,
            offload: Some(Offload::NONE),
            stages: None,
            optimizer: Optimizer::Adam,
            masters: Masters::default(),
            primary_weights: PrimaryWeights::default(),
            optimizer_offload: HostShare::default(),
            grad_dtype: Dtype::F32,
            zero: Zero::default(),
            instances: 1,
            overlap: None,
            graphs: Some(Graphs::NONE),
            fp8_attention: false,
            bucket_elements: None,
            routing: None,
            objective: Objective::Throughput,
            effort: Effort::default(),
            top: 5,
            memory_gib: None,
            memory_headroom: MEMORY_HEADROOM,
            survey: false,
            front: 0,
        }
    }
}
