//! [`Stack`]: what a runtime does around the math of a layer.
//!
//! The layout space and the cost engine are the same for every stack; what differs is data in here:
//! which tensors it keeps ([`megatron`], [`moefold`]), bytes a parameter, launch overhead, what it
//! overlaps, what context and communicators take. Constants are physics or cited measurements, none
//! is per model.

pub mod megatron;
pub mod moefold;

use moefold_profiles::units::{Bytes, GIB, MIB, Seconds};
use moefold_profiles::{Cluster, Dtype, HostTimes, Precision};

use self::moefold::{Device, Site};
use crate::choice::{Dispatcher, Optimizer, Overlap, Recompute, StackName};
use crate::local::Local;
use crate::memory::passes::Passes;
use crate::memory::tape::Level;
use crate::memory::{StageMemory, StateBytes, WorkingSets};
use crate::model::{Layer, Model};
use crate::saved::SavedTensor;
use crate::shard;

/// A runtime.
#[derive(Debug, Clone, PartialEq)]
pub struct Stack {
    /// Which.
    pub name: StackName,
    /// Host time to launch one kernel; a stage that launches faster than it computes hides it.
    pub launch: Seconds,
    /// Time the device idles at a host synchronization (dropless routing reads its counts back).
    pub sync: Seconds,
    /// Kernels of one router beyond its product: scores, top-k, maps, losses, both passes.
    pub router_kernels: u32,
    /// Context and libraries of a process.
    pub context: Bytes,
    /// Workspaces of matrix libraries that the framework's allocator holds.
    pub workspace: Bytes,
    /// Buffers of one communicator of more than one rank.
    pub communicator: Bytes,
    /// Memory the allocator reserves beyond what is allocated, as a share of that.
    pub fragmentation: f64,
    /// What it can run beside compute.
    pub overlap: Overlap,
    /// Dispatchers it has, in the order a tie prefers.
    pub dispatchers: &'static [Dispatcher],
    /// Precisions it runs.
    pub precisions: &'static [Precision],
    /// Largest context- and pipeline-parallel degrees it runs; `None` for no limit.
    pub max_cp: Option<u32>,
    /// See `max_cp`.
    pub max_pp: Option<u32>,
    /// Whether it can recompute.
    pub recomputes: bool,
    /// Whether the experts' products are one launch; else one a group.
    pub grouped: bool,
    /// What runs the ops of this project's executor; nothing of the other depends on it.
    pub device: Device,
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
            StackName::Megatron => Self::megatron(),
            StackName::Moefold => Self::moefold(),
        }
    }

    /// The stack of a name on the devices of a cluster, with what was measured of their host: of this
    /// project's executor on GPUs, what no profile says is assumed.
    pub fn on(name: StackName, cluster: &Cluster, host: &HostTimes) -> Self {
        let stack = Self::of(name);
        if name == StackName::Megatron || cluster.gpu.is_cpu() {
            return stack;
        }
        let megatron = Self::megatron();
        Self {
            // An op is about one kernel; that of the other runtime where nothing was measured.
            launch: host.launch.unwrap_or(megatron.launch),
            sync: host.read.unwrap_or(megatron.sync),
            context: host.overhead.unwrap_or(ASSUMED_OVERHEAD),
            communicator: megatron.communicator,
            device: Device::of(&cluster.gpu),
            ..stack
        }
    }

    fn megatron() -> Self {
        Self {
            name: StackName::Megatron,
            // The per-kernel floor NVIDIA's GB200 DeepSeek-V3 guide works with (about 5 us).
            launch: Seconds::from_us(5.0),
            // One device-to-host copy and the refill of the launch stream.
            sync: Seconds::from_us(20.0),
            // Fused router and auxiliary loss: 31 kernels a layer, 72 unfused (same guide).
            router_kernels: 31,
            // CUDA context and loaded libraries.
            context: Bytes(3 * GIB / 2),
            // cuBLAS through PyTorch, and through Transformer Engine: 32 MiB each.
            workspace: Bytes(64 * MIB),
            // NCCL: 342 to 392 MB at 2 to 8 ranks (ai-dynamo/aiconfigurator system files).
            communicator: Bytes(392_000_000),
            // Mean of reserved over allocated in SimuMax's ten B200 layouts (2.8 to 9.3 %;
            // github.com/MooreThreads/SimuMax@4dcaae5, b200_release_v1.2_summary.json).
            fragmentation: 0.05,
            overlap: Overlap {
                grad_reduce: true,
                param_gather: true,
                p2p: true,
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
            max_cp: None,
            max_pp: None,
            recomputes: true,
            grouped: false,
            device: Device::Cpu,
        }
    }

    fn moefold() -> Self {
        Self {
            name: StackName::Moefold,
            // Calls into kernels are function calls.
            launch: Seconds::ZERO,
            sync: Seconds::ZERO,
            router_kernels: 0,
            context: Bytes::ZERO,
            workspace: Bytes::ZERO,
            communicator: Bytes::ZERO,
            fragmentation: 0.0,
            overlap: Overlap::default(),
            dispatchers: &[Dispatcher::Alltoall],
            // bf16 needs a GPU.
            precisions: &[Precision::Fp32, Precision::Bf16],
            max_cp: Some(1),
            max_pp: Some(1),
            recomputes: false,
            grouped: true,
            device: Device::Cpu,
        }
    }

    /// Bytes of state a parameter takes (Megatron-LM, `docs/user-guide/features/dist_optimizer.md`;
    /// arXiv 2603.07685, section 4.1). FP8 recipes without FP8 primary weights keep a quantized copy
    /// of the weights besides: one byte, and one more for the transposed copy (NVFP4: half).
    pub fn state(&self, precision: Precision, optimizer: Optimizer, grads: Dtype) -> StateBytes {
        let grain = match self.name {
            StackName::Megatron => 0,
            StackName::Moefold => moefold::GRAIN,
        };
        if precision == Precision::Fp32 {
            // Weights are their own master copies.
            return StateBytes {
                weight: 4.0,
                gradient: 4.0,
                sharded: 8.0,
                grain,
            };
        }
        let quantized = match precision {
            Precision::Fp32 | Precision::Bf16 => 0.0,
            Precision::Fp8 | Precision::Fp8Delayed | Precision::Fp8Blockwise | Precision::Mxfp8 => {
                2.0
            }
            Precision::Nvfp4 => 1.125,
        };
        StateBytes {
            weight: 2.0 + quantized,
            gradient: grads.bits() as f64 / 8.0,
            sharded: match optimizer {
                Optimizer::Adam => 12.0,
                Optimizer::AdamBf16Moments => 8.0,
            },
            grain,
        }
    }

    /// A decoder layer on one rank.
    pub fn layer_memory(
        &self,
        model: &Model,
        layer: &Layer,
        local: &Local,
        precision: Precision,
        recompute: &Recompute,
    ) -> StageMemory {
        let shard = shard::layer(model, layer, local);
        match self.name {
            StackName::Megatron => {
                let saved = saved(self.name, model, layer, local, precision, recompute);
                let saved = saved.iter().map(SavedTensor::bytes).sum();
                let (forward, backward) =
                    megatron::transient(model, layer, local, precision, recompute);
                StageMemory {
                    shard,
                    passes: Passes::keeping(saved),
                    sets: WorkingSets {
                        forward,
                        backward,
                        ..WorkingSets::default()
                    },
                    ..StageMemory::default()
                }
            }
            StackName::Moefold => StageMemory {
                shard,
                padding: moefold::layer_padding(model, layer, local),
                passes: Site::new(model, local, precision, self.device).layer(layer),
                ..StageMemory::default()
            },
        }
    }

    /// The embedding on one rank.
    pub fn embedding_memory(
        &self,
        model: &Model,
        local: &Local,
        precision: Precision,
    ) -> StageMemory {
        let shard = shard::embedding(model, local);
        match self.name {
            StackName::Megatron => StageMemory {
                shard,
                ..StageMemory::default()
            },
            StackName::Moefold => StageMemory {
                shard,
                padding: moefold::embedding_padding(model, local),
                passes: Site::new(model, local, precision, self.device).embedding(),
                ..StageMemory::default()
            },
        }
    }

    /// Final norm, head and loss on one rank. A tied head on one rank with the embedding is the same
    /// matrix; the caller takes it off.
    pub fn head_memory(&self, model: &Model, local: &Local, precision: Precision) -> StageMemory {
        let shard = shard::head(model, local);
        match self.name {
            StackName::Megatron => {
                let wide = precision.activation();
                let vocab = shard::vocab(model, local);
                // An unused weight gradient in bf16 keeps autograd's hooks firing
                // (`megatron/core/tensor_parallel/layers.py`), beside the gathered input and its gradient.
                let head = 2 * vocab * model.hidden + 4 * local.tokens * model.hidden;
                StageMemory {
                    shard,
                    // Input and output of the final norm.
                    passes: Passes::keeping(wide.bytes(2 * local.tokens_local * model.hidden)),
                    sets: WorkingSets {
                        logits: self.logits(model, local, precision),
                        head: Bytes(head),
                        ..WorkingSets::default()
                    },
                    ..StageMemory::default()
                }
            }
            StackName::Moefold => StageMemory {
                shard,
                padding: moefold::head_padding(model, local),
                passes: Site::new(model, local, precision, self.device).head(),
                ..StageMemory::default()
            },
        }
    }

    /// Logits between a head's forward and backward.
    pub fn logits(&self, model: &Model, local: &Local, precision: Precision) -> Bytes {
        let elements = local.tokens * shard::vocab(model, local);
        match self.name {
            // Transformer Engine's cross entropy turns wide logits into their gradient in place.
            StackName::Megatron => Bytes(2 * elements),
            // As activations are, turned into their gradient in place.
            StackName::Moefold => precision.activation().bytes(elements),
        }
    }

    /// What a rank holds throughout a step of so many microbatches beside its state, and the highest of
    /// what follows the last backward pass.
    pub fn step_memory(
        &self,
        model: &Model,
        local: &Local,
        precision: Precision,
        microbatches: u32,
    ) -> (Level, Level) {
        match self.name {
            StackName::Megatron => (Level::default(), Level::default()),
            StackName::Moefold => {
                let site = Site::new(model, local, precision, self.device);
                (site.standing(u64::from(microbatches)), site.update())
            }
        }
    }

    /// Buffers that stay for one weight of each shape a rank's layers have. Transformer Engine adds
    /// weight gradients into the main gradients itself and hands autograd an unused bf16 tensor,
    /// cached by shape (`get_dummy_wgrad`).
    pub fn weight_shape_buffer(&self, elements: u64) -> Bytes {
        match self.name {
            StackName::Megatron => Bytes(2 * elements),
            StackName::Moefold => Bytes::ZERO,
        }
    }

    /// Buffers of a dispatcher besides communicators. DeepEP and HybridEP stage messages: about
    /// 0.34 GB of NVLink buffers, as much again for the network (DeepEP `csrc/legacy/config.hpp`
    /// size hints at 20 SMs and hidden 7168; scaled by the hidden size).
    pub fn staging(&self, dispatcher: Dispatcher, hidden: u64, ranks: u32, domain: u32) -> Bytes {
        match dispatcher {
            Dispatcher::Alltoall | Dispatcher::Allgather => Bytes::ZERO,
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

/// What the modules of one layer keep for the backward pass of one microbatch on one rank.
pub fn saved(
    stack: StackName,
    model: &Model,
    layer: &Layer,
    local: &Local,
    precision: Precision,
    recompute: &Recompute,
) -> Vec<SavedTensor> {
    match stack {
        StackName::Megatron => megatron::saved(model, layer, local, precision, recompute),
        StackName::Moefold => {
            // What is saved is the same on every device, and nothing is recomputed.
            let device = moefold::Device::Cpu;
            moefold::Site::new(model, local, precision, device).saved(layer)
        }
    }
}
