//! [`Stack`]: what a runtime does around the math of a layer.
//!
//! The layout space and the cost engine are the same for every stack; what differs is here: bytes a
//! parameter, launch overhead, what it overlaps, what context and communicators take. What it runs and
//! allocates for a piece of the model is its [`crate::runtime::Runtime`]'s to say. Constants are physics or
//! cited measurements, none is per model.

pub mod graphs;
pub mod host;
pub mod megatron;

use moefold_profiles::units::{Bytes, MIB, Seconds};
use moefold_profiles::{Cluster, CollectiveKind, Dtype, HostTimes, Precision};

use crate::choice::{
    Dispatcher, Graphs, Masters, Optimizer, Overlap, PrimaryWeights, ScheduleName, StackName,
};
use crate::layout::{Layout, Places};
use crate::memory::StateBytes;
use crate::runtime::Lowered;

use host::{Host, Issue};

/// A runtime.
#[derive(Debug, Clone, PartialEq)]
pub enum Stack {
    /// Megatron-Core with Transformer Engine.
    Megatron(Megatron),
    /// This project's executor.
    Moefold(Moefold),
}

/// Elements that a bucket of gradients has at least where nobody says (Megatron-LM's `get_model` in
/// `megatron/training/training.py`).
pub(crate) fn usual_bucket(replicas: u32) -> u64 {
    (1_000_000 * u64::from(replicas)).max(40_000_000)
}

/// How layers of a plan may differ in what they compute again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByLayer {
    /// So many at the beginning of each stage compute all again, the others nothing (Megatron-Core's
    /// `_checkpointed_forward` in `megatron/core/transformer/transformer_block.py`).
    Block,
    /// Each as is best.
    Each,
}

/// What every stack has.
#[derive(Debug, Clone, PartialEq)]
pub struct Common {
    /// Host time to launch one kernel; a stage that launches faster than it computes hides it.
    pub launch: Seconds,
    /// Time the device idles at a host synchronization (dropless routing reads its counts back).
    pub sync: Seconds,
    /// Context and libraries of a process.
    pub context: Bytes,
    /// Buffers of one communicator of more than one rank.
    pub communicator: Bytes,
    /// What it runs beside compute where nothing is said.
    pub overlap: Overlap,
    /// Dispatchers it has, in the order a tie prefers.
    pub dispatchers: &'static [Dispatcher],
    /// Precisions it runs.
    pub precisions: &'static [Precision],
}

/// What Megatron-Core alone has.
#[derive(Debug, Clone, PartialEq)]
pub struct Megatron {
    /// See [`Common`].
    pub common: Common,
    /// What its host does to have work done.
    pub issue: Issue,
    /// Whether products with one scale a tensor want a transposed copy of FP8 weights: up to Hopper, whose FP8 products
    /// have one layout of operands (Transformer Engine, `is_non_tn_fp8_gemm_supported`).
    pub transposes: bool,
    /// Whether tensor-parallel collectives run beside the products that they feed and follow.
    pub tp_beside: bool,
    /// A workspace of a matrix library that the framework's allocator holds.
    pub workspace: Bytes,
    /// Memory the allocator reserves beyond what is allocated, as a share of that.
    pub fragmentation: f64,
}

/// What this project's executor alone has.
#[derive(Debug, Clone, PartialEq)]
pub struct Moefold {
    /// See [`Common`].
    pub common: Common,
    /// Whether the host only asks for ops, and a device does them: it then hides behind them.
    pub queues: bool,
}

/// Device memory that this project's executor is taken to need beside its tensors where no profile
/// says: a CUDA context with the kernels of one model, and a workspace of 32 MiB for cuBLASLt.
pub const ASSUMED_OVERHEAD: Bytes = Bytes(600 * MIB);

/// What this project's executor gives cuBLASLt to work in, for each rank: what NVIDIA recommends for
/// Hopper (cuBLAS documentation, `cublasSetWorkspace`).
pub const WORKSPACE: Bytes = Bytes(32 * MIB);

impl Stack {
    /// The stack of a name.
    pub fn of(name: StackName) -> Self {
        match name {
            StackName::Megatron => Self::Megatron(Megatron::new()),
            StackName::Moefold => Self::Moefold(Moefold::on_cpu()),
        }
    }

    /// The stack of a name on the devices of a cluster, with what was measured of their host: of this
    /// project's executor on GPUs, what no profile says is assumed.
    pub fn on(name: StackName, cluster: &Cluster, host: &HostTimes) -> Self {
        let mut stack = match Self::of(name) {
            Self::Moefold(stack) if !cluster.gpu.is_cpu() => Self::Moefold(stack.on_gpu(host)),
            Self::Moefold(stack) => Self::Moefold(stack.measured(host)),
            Self::Megatron(stack) => Self::Megatron(Megatron {
                issue: Issue::new(Host::of(cluster), Graphs::NONE),
                transposes: !cluster.gpu.arch.starts_with("sm_1"),
                ..stack
            }),
        };
        if let Some(factor) = host.factor {
            if let Self::Megatron(stack) = &mut stack {
                stack.issue = stack.issue.times(factor);
            }
            let (Self::Megatron(Megatron { common, .. }) | Self::Moefold(Moefold { common, .. })) =
                &mut stack;
            common.launch = Seconds(common.launch.0 * factor);
            common.sync = Seconds(common.sync.0 * factor);
        }
        stack
    }

    /// The same where some work is launched as CUDA graphs; of this project's executor none is.
    #[must_use]
    pub fn under(mut self, graphs: Graphs, overlap: Option<Overlap>) -> Self {
        if let Self::Megatron(stack) = &mut self {
            let is_shared_beside = overlap.is_some_and(|overlap| overlap.shared_expert);
            stack.issue = stack.issue.under(graphs, is_shared_beside);
            stack.tp_beside = overlap.is_some_and(|overlap| overlap.tp);
        }
        self
    }

    /// Kernels of both passes of a piece that are nodes of CUDA graphs.
    pub fn graph_nodes(&self, lowered: &Lowered) -> u64 {
        match self {
            Self::Megatron(stack) => {
                let mixer = Issue::mixer(&lowered.forward);
                let passes = lowered.forward.iter().chain(&lowered.backward);
                passes.map(|work| stack.issue.nodes(work, mixer)).sum()
            }
            Self::Moefold(_) => 0,
        }
    }

    /// Which.
    pub fn name(&self) -> StackName {
        match self {
            Self::Megatron(_) => StackName::Megatron,
            Self::Moefold(_) => StackName::Moefold,
        }
    }

    /// What every stack has.
    pub fn common(&self) -> &Common {
        match self {
            Self::Megatron(Megatron { common, .. }) | Self::Moefold(Moefold { common, .. }) => {
                common
            }
        }
    }

    /// Whether the input of attention's projection can leave alone: Megatron-Core's leaves only with the core's
    /// (`megatron/core/transformer/transformer_config.py`).
    pub fn offloads_projection_alone(&self) -> bool {
        matches!(self, Self::Moefold(_))
    }

    /// How layers may differ in what they compute again.
    pub fn recomputes(&self) -> ByLayer {
        match self {
            Self::Megatron(_) => ByLayer::Block,
            Self::Moefold(_) => ByLayer::Each,
        }
    }

    /// Whether a schedule may leave gradients of weights for later. Megatron-Core's pipelines run backward passes
    /// whole (`megatron/core/pipeline_parallel/schedules.py`).
    pub fn divides_backward(&self) -> bool {
        matches!(self, Self::Moefold(_))
    }

    /// The schedules that it has for some pipeline degrees, the usual one first.
    pub fn schedules(&self, pp: u32, vpp: u32) -> impl Iterator<Item = ScheduleName> + use<> {
        let divides = self.divides_backward();
        ScheduleName::all_of(pp, vpp).filter(move |name| divides || !name.divides_backward())
    }

    /// Whether two interleaved pipeline ranks can exchange messages only beside compute.
    pub fn pairs_need_overlap(&self) -> bool {
        matches!(self, Self::Megatron(_))
    }

    /// Whether a rank goes on computing while it sends: Megatron-Core only between interleaved stages, which
    /// have other work then, and this project's executor wherever it has queues, whatever is chosen.
    pub fn sends_beside(&self, overlap: Overlap, vpp: u32) -> bool {
        match self {
            Self::Megatron(_) => overlap.p2p && vpp > 1,
            Self::Moefold(stack) => stack.queues,
        }
    }

    /// What runs beside compute where nobody says. Under Muon no reduction and no gather does: Megatron-Core 0.16 refuses
    /// both (`validate_args` in `megatron/training/arguments.py`), main takes them where they are named.
    pub fn overlap(&self, optimizer: Optimizer) -> Overlap {
        let overlap = self.common().overlap;
        let beside = !optimizer.deals_tensors();
        Overlap {
            grad_reduce: overlap.grad_reduce && beside,
            param_gather: overlap.param_gather && beside,
            ..overlap
        }
    }

    /// What of `overlap` hides: on a CPU nothing does, since its cores do the sums and copies.
    pub fn hides(&self, overlap: Overlap) -> Overlap {
        match self {
            Self::Moefold(Moefold { queues: false, .. }) => Overlap::default(),
            Self::Megatron(_) | Self::Moefold(_) => overlap,
        }
    }

    /// Communicators that a rank has for its pipeline, at most. This project's executor has one for each
    /// neighbour and direction of messages, as a send lasts until it is received and is to hold up no other,
    /// and one of both ends where they are on two ranks.
    pub fn pipeline_communicators(&self, places: Places) -> u64 {
        // Of each direction, on the rank that has most.
        let lines = match (places.pp(), places.vpp()) {
            (1, _) => return 0,
            (2, 1) => 1,
            (pp, _) if !places.parts_ends() => 2 * (pp.min(3) - 1),
            _ => 2,
        };
        match self {
            Self::Megatron(_) => 1,
            Self::Moefold(_) => u64::from(2 * lines) + u64::from(places.parts_ends()),
        }
    }

    /// Communicators that a rank has beside one for each way in which its layers and weights are divided.
    ///
    /// Of Megatron-Core those of its groups that have several ranks and run a collective in training
    /// (`initialize_model_parallel` in `megatron/core/parallel_state.py`): all ranks twice, as a job begins and for the
    /// norm of gradients (`grad_stats_parallel_group` in `megatron/core/optimizer/__init__.py`); the ranks of one
    /// replica, which agree on each step; those that share experts, which tell each other how many rows come
    /// (`preprocess` of `MoEAlltoAllTokenDispatcher` in `megatron/core/transformer/moe/token_dispatcher.py`), where DeepEP
    /// and HybridEP have one group for all; and both ends of a pipeline that have the same matrix. NCCL has buffers for
    /// each, whoever is in it.
    pub fn communicators_beside(
        &self,
        layout: &Layout,
        dispatcher: Dispatcher,
        ends_share: bool,
    ) -> u64 {
        let Self::Megatron(_) = self else { return 0 };
        let is_flex = matches!(dispatcher, Dispatcher::Deepep | Dispatcher::Hybridep);
        let several = [
            (layout.gpus() > 1, 2),
            (layout.tp() * layout.pp() > 1, 1),
            (layout.ep() * layout.etp() > 1 && !is_flex, 1),
            (layout.pp() > 1 && ends_share, 1),
        ];
        let several = several.iter().filter(|(there, _)| *there);
        several.map(|(_, number)| number).sum()
    }

    /// Elements that a bucket of gradients has at least, of parameters with so many replicas, where it divides
    /// them into any: Megatron-Core's default (`megatron/core/distributed/distributed_data_parallel.py` at
    /// d98e8a64).
    pub fn bucket_elements(&self, overlap: Overlap, replicas: u32) -> Option<u64> {
        let divides = matches!(self, Self::Moefold(_)) && overlap.of_replicas();
        divides.then(|| usual_bucket(replicas))
    }

    /// Whether units whose weights rest divided take turns in buffers that stay, so that one that is still there is
    /// not gathered again, and their gradients are added up in the shards after every pass. Megatron-FSDP's are
    /// taken to be let go of after each pass.
    pub fn keeps_units(&self) -> bool {
        matches!(self, Self::Moefold(_))
    }

    /// Whether it updates each bucket of a family by itself.
    pub fn updates_buckets(&self) -> bool {
        matches!(self, Self::Moefold(_))
    }

    /// Whether it sums what a step says of itself over all ranks: [`crate::lower::ends::sums`]. What Megatron-Core does so is
    /// part of its host's time.
    pub fn sums_up(&self) -> bool {
        matches!(self, Self::Moefold(_))
    }

    /// Whether it passes over gradients beside its optimizer: [`crate::lower::ends::passes_over_gradients`].
    pub fn sweeps_gradients(&self) -> bool {
        matches!(self, Self::Megatron(_))
    }

    /// Multiprocessors that a tensor-parallel collective takes beside products. Rings of Transformer Engine's gathers have
    /// one, its scatters 16 (`num_sm` of `initialize_ub` in `transformer_engine/pytorch/module/base.py`); a gather once
    /// more for gradients of weights, which has 16 there and 2 to 4 in NVIDIA's recipes, is taken for a ring.
    pub fn sms_beside_products(&self, kind: CollectiveKind) -> f64 {
        match (self, kind) {
            (Self::Megatron(_), CollectiveKind::ReduceScatter) => 16.0,
            (Self::Megatron(_), _) => 1.0,
            (Self::Moefold(_), _) => 0.0,
        }
    }

    /// Share of the device that exchanges of tokens take from compute beside them. DeepEP on 20 multiprocessors slows
    /// products by a fifth while it runs (arXiv 2603.07685, section 4.2); this project's executor measures its own.
    pub fn taken_by_exchanges(&self) -> f64 {
        match self {
            Self::Megatron(_) => 0.2,
            Self::Moefold(_) => 0.0,
        }
    }

    /// Workspaces that its allocator holds throughout. Transformer Engine has one more for each of the four streams that
    /// products of experts take turns on (`get_multi_stream_cublas_workspace` in
    /// `transformer_engine/pytorch/module/base.py`, `nvte_get_num_compute_streams` in
    /// `transformer_engine/common/util/multi_stream.cpp`).
    pub fn workspace(&self, has_experts: bool) -> Bytes {
        match self {
            Self::Megatron(stack) => stack.workspace * if has_experts { 6_u64 } else { 2 },
            Self::Moefold(_) => Bytes::ZERO,
        }
    }

    /// Memory its allocator reserves beyond what is allocated, as a share of that.
    pub fn fragmentation(&self) -> f64 {
        match self {
            Self::Megatron(stack) => stack.fragmentation,
            Self::Moefold(_) => 0.0,
        }
    }

    /// What the host adds to `device_s` seconds of work that it takes `host_s` to issue, at least.
    pub fn host_excess(&self, host_s: f64, device_s: f64) -> f64 {
        match self {
            Self::Moefold(Moefold { queues: false, .. }) => host_s,
            Self::Megatron(_) | Self::Moefold(_) => (host_s - device_s).max(0.0),
        }
    }

    /// Bytes of state a parameter takes (Megatron-LM, `docs/user-guide/features/dist_optimizer.md`;
    /// arXiv 2603.07685, section 4.1). FP8 recipes without FP8 primary weights keep a quantized copy
    /// of the weights besides: one byte, and one more for the copy along columns where there is one (NVFP4: half); with
    /// them, those copies are the weights. MXFP8 has one byte of scale for 32 values.
    /// Remainders of masters take two bytes (Transformer Engine, `FusedAdam`). Muon keeps one moment of a matrix
    /// (`muon_init_state_fn` in `megatron/core/optimizer/muon.py` of 0.16.1). Embedding, head, norms and routers are
    /// never quantized.
    pub fn state(
        &self,
        precision: Precision,
        (optimizer, masters, primary): (Optimizer, Masters, PrimaryWeights),
        grads: Dtype,
    ) -> StateBytes {
        let moment = optimizer.moments().bits() as f64 / 8.0;
        let of_matrices = optimizer.moments_of_matrices();
        let moments = of_matrices as f64 * moment;
        let adams = (2 - of_matrices) as f64 * moment;
        if precision == Precision::Fp32 {
            // Weights are their own master copies.
            return StateBytes {
                weight: 4.0,
                unquantized: 4.0,
                gradient: 4.0,
                sharded: moments,
                adams,
            };
        }
        let quantized = match precision {
            Precision::Fp32 | Precision::Bf16 => 0.0,
            Precision::Fp8 | Precision::Fp8Delayed => match self {
                Self::Megatron(stack) if !stack.transposes => 1.0,
                _ => 2.0,
            },
            Precision::Fp8Blockwise => 2.0,
            Precision::Mxfp8 => 2.0 + 2.0 / 32.0,
            Precision::Nvfp4 => 1.125,
        };
        let wide = match primary {
            PrimaryWeights::Wide => 2.0,
            PrimaryWeights::Fp8 => 0.0,
        };
        StateBytes {
            weight: wide + quantized,
            unquantized: 2.0,
            gradient: grads.bits() as f64 / 8.0,
            sharded: masters.dtype().bits() as f64 / 8.0 + moments,
            adams,
        }
    }

    /// Bytes of a checkpoint for each parameter. Megatron-Core saves weights, and of the optimizer f32 masters and all
    /// moments (`megatron/core/optimizer/distrib_optimizer.py`, `sharded_state_dict`), under Muon counted as those of
    /// matrices; this project's executor saves masters and moments in f32.
    pub fn saved(&self, precision: Precision, optimizer: Optimizer) -> f64 {
        let masters = Dtype::F32.bits() as f64 / 8.0;
        match self {
            Self::Megatron(_) => {
                let weights = if precision == Precision::Fp32 {
                    0.0
                } else {
                    2.0
                };
                let moment = optimizer.moments().bits() as f64 / 8.0;
                weights + masters + optimizer.moments_of_matrices() as f64 * moment
            }
            Self::Moefold(_) => 3.0 * masters,
        }
    }

    /// Buffers that stay for one weight of each shape a rank's layers have. Transformer Engine adds
    /// weight gradients into the main gradients itself and hands autograd an unused bf16 tensor,
    /// cached by shape (`get_dummy_wgrad`).
    pub fn weight_shape_buffer(&self, elements: u64) -> Bytes {
        match self {
            Self::Megatron(_) => Bytes(2 * elements),
            Self::Moefold(_) => Bytes::ZERO,
        }
    }

    /// Whether tokens are exchanged on their way to experts, so that dispatchers differ: this project's executor
    /// has one for all ranks that share an expert too, where Megatron-Core gathers for them whatever dispatches.
    pub fn exchanges(&self, ep: u32, etp: u32) -> bool {
        match self {
            Self::Megatron(_) => ep > 1,
            Self::Moefold(_) => ep * etp > 1,
        }
    }

    /// Whether the input of experts can be padded to their capacity under a dispatcher (Megatron-Core's
    /// `transformer_config.py` refuses it under `flex`).
    pub fn pads_under(&self, dispatcher: Dispatcher) -> bool {
        match dispatcher {
            Dispatcher::Alltoall => true,
            Dispatcher::Allgather => matches!(self, Self::Megatron(_)),
            Dispatcher::Deepep | Dispatcher::Hybridep => false,
        }
    }

    /// Buffers of a dispatcher besides communicators, for ranks of which so many share a domain. NCCL has some for
    /// each pair that exchanges tokens over NVLink: the first all-to-all of eight H100 took 3.28 GB of each
    /// (NVIDIA/nccl#1685), of which one communicator, which PyTorch makes when it is first needed. Nobody has published
    /// what it takes of more ranks, which are priced as eight. DeepEP and HybridEP stage messages: about 0.34 GB of
    /// NVLink buffers, as much again for the network (DeepEP `csrc/legacy/config.hpp` size hints at 20 SMs and hidden
    /// 7168; scaled by the hidden size).
    pub fn staging(&self, dispatcher: Dispatcher, hidden: u64, ranks: u32, domain: u32) -> Bytes {
        match dispatcher {
            Dispatcher::Allgather => Bytes::ZERO,
            Dispatcher::Alltoall => match self.common().communicator.0 {
                0 => Bytes::ZERO,
                own => {
                    let pairs = ranks.min(domain).min(8).saturating_sub(1);
                    Bytes((3_280_000_000 - own) / 7 * u64::from(pairs))
                }
            },
            Dispatcher::Deepep | Dispatcher::Hybridep => {
                let buffers = match ranks {
                    0 | 1 => 0.0,
                    n if n <= domain => 0.34e9,
                    _ => 0.72e9,
                };
                Bytes((buffers * hidden as f64 / 7168.0) as u64)
            }
        }
    }
}

impl Megatron {
    fn new() -> Self {
        Self {
            common: Common {
                // The per-kernel floor NVIDIA's GB200 DeepSeek-V3 guide works with (about 5 us).
                launch: Seconds::from_us(5.0),
                // One device-to-host copy and the refill of the launch stream.
                sync: Seconds::from_us(20.0),
                // CUDA context and loaded libraries: 0.59 to 0.74 GiB on H100, GH200, H200 and B200 beside what
                // PyTorch had reserved in processes without NCCL (its messages in Lightning-AI/litgpt#1892,
                // ali-vilab/VACE#56 and the pages on debugging of stas00/ml-engineering).
                context: Bytes(650 * MIB),
                // NCCL: 342 to 392 MB at 2 to 8 ranks (ai-dynamo/aiconfigurator system files).
                communicator: Bytes(392_000_000),
                overlap: Overlap {
                    grad_reduce: true,
                    param_gather: true,
                    p2p: true,
                    // Its own defaults (`moe_shared_expert_overlap`, `overlap_moe_expert_parallel_comm`), for
                    // tensors live longer.
                    ..Overlap::default()
                },
                dispatchers: &[
                    Dispatcher::Alltoall,
                    Dispatcher::Deepep,
                    Dispatcher::Hybridep,
                    Dispatcher::Allgather,
                ],
                precisions: &[
                    Precision::Bf16,
                    Precision::Fp8,
                    Precision::Fp8Delayed,
                    Precision::Fp8Blockwise,
                    Precision::Mxfp8,
                    Precision::Nvfp4,
                ],
            },
            issue: Issue::new(Host::X86, Graphs::NONE),
            transposes: true,
            tp_beside: false,
            // cuBLAS through PyTorch, and through Transformer Engine: 32 MiB each.
            workspace: Bytes(32 * MIB),
            // Mean of reserved over allocated in SimuMax's ten B200 layouts (2.8 to 9.3 %;
            // github.com/MooreThreads/SimuMax@4dcaae5, b200_release_v1.2_summary.json).
            fragmentation: 0.05,
        }
    }
}

impl Moefold {
    fn on_cpu() -> Self {
        Self {
            common: Common {
                // Calls into kernels are function calls.
                launch: Seconds::ZERO,
                sync: Seconds::ZERO,
                context: Bytes::ZERO,
                communicator: Bytes::ZERO,
                overlap: Overlap::default(),
                dispatchers: &[Dispatcher::Alltoall, Dispatcher::Allgather],
                // bf16 needs a GPU.
                precisions: &[Precision::Fp32, Precision::Bf16],
            },
            queues: false,
        }
    }

    /// On a CPU an op is a function call, and what the host does between two of them is time of the step;
    /// none where no profile says.
    fn measured(mut self, host: &HostTimes) -> Self {
        self.common.launch = host.launch.unwrap_or(Seconds::ZERO);
        self
    }

    /// What no profile says of the host and of memory beside tensors is taken from the other runtime: an
    /// op is about one kernel.
    fn on_gpu(mut self, host: &HostTimes) -> Self {
        let Common {
            launch,
            sync,
            communicator,
            ..
        } = Megatron::new().common;
        self.common.launch = host.launch.unwrap_or(launch);
        self.common.sync = host.read.unwrap_or(sync);
        self.common.context = host.overhead.unwrap_or(ASSUMED_OVERHEAD);
        self.common.communicator = communicator;
        self.common.overlap = Overlap {
            grad_reduce: true,
            param_gather: true,
            p2p: true,
            ..Overlap::default()
        };
        self.queues = true;
        self
    }
}
