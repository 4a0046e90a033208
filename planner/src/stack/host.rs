//! [`Issue`]: what the host of Megatron-Core does to have work done.
//!
//! PyTorch runs a layer as operators: the Python of its modules, a dispatch and an allocation each, autograd's nodes and
//! hooks. The device waits where that takes longer than the kernels do, and after each blocking read, since the host
//! then is no longer ahead. How many operators a module has is counted from its source (Megatron-LM at d98e8a64 and
//! Transformer Engine 2.11); how long one takes is a property of the host ([`Host`]).

use moefold_profiles::trace::Category;
use moefold_profiles::units::Seconds;
use moefold_profiles::{Cluster, CollectiveKind, Dtype, Op, Pass};

use crate::choice::{GraphModule, Graphs};
use crate::runtime::{Part, Task, Work};

/// Processors that issue work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// Servers of 8 GPUs.
    X86,
    /// NVIDIA Grace, two GPUs to one.
    Grace,
}

impl Host {
    /// That of a cluster: racks whose NVLink domain is more than a node of at most four GPUs have Grace.
    pub fn of(cluster: &Cluster) -> Self {
        let node = cluster.gpus_per_node;
        if node <= 4 && cluster.gpus_per_domain > node {
            Self::Grace
        } else {
            Self::X86
        }
    }

    /// Time of one operator: 17 us is the one of 8, 11, 14, 17 and 20 that is nearest to published steps on x86, whichever
    /// of eleven sources is left out (`docs/accuracy.md`); Grace is taken to be slower by its clock, 3.1 GHz against 3.8 to
    /// 4.0.
    fn operator(self) -> Seconds {
        match self {
            Self::X86 => Seconds::from_us(17.0),
            Self::Grace => Seconds::from_us(22.0),
        }
    }
}

/// What one host does for a layer of which some modules are graphs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Issue {
    operator_s: f64,
    graphs: Graphs,
    /// Whether the shared expert runs beside the exchange of tokens, and so apart from the router.
    is_shared_beside: bool,
}

impl Issue {
    /// On a host, under some graphs.
    pub fn new(host: Host, graphs: Graphs) -> Self {
        Self {
            operator_s: host.operator().0,
            graphs,
            is_shared_beside: false,
        }
    }

    /// The same of a host that takes so many times as long.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            operator_s: self.operator_s * factor,
            ..self
        }
    }

    /// The same under other graphs, with the shared expert beside the exchange of tokens or not.
    #[must_use]
    pub fn under(self, graphs: Graphs, is_shared_beside: bool) -> Self {
        Self {
            graphs,
            is_shared_beside,
            ..self
        }
    }

    /// Whether the host waits for the device where it reads the counts of rows: what is one graph reads none.
    pub fn reads(&self) -> bool {
        !self.graphs.is_whole()
    }

    /// Seconds that the host takes to have a piece of work done.
    pub fn seconds(&self, work: &Work, mixer: GraphModule) -> f64 {
        if self.is_in_a_graph(work, mixer) {
            return 0.0;
        }
        operators(work) * self.operator_s
    }

    /// Kernels of a piece of work that are nodes of a graph.
    pub fn nodes(&self, work: &Work, mixer: GraphModule) -> u64 {
        if self.is_in_a_graph(work, mixer) {
            kernels(work)
        } else {
            0
        }
    }

    fn is_in_a_graph(&self, work: &Work, mixer: GraphModule) -> bool {
        let covers = |module| self.graphs.covers(module);
        if self.graphs.is_whole() {
            return true;
        }
        let moe = covers(GraphModule::Moe);
        let router = covers(GraphModule::MoeRouter) || moe;
        match (work.part, work.category) {
            (Some(Part::Norm), Category::RouterPermute) | (Some(Part::Router), _) => router,
            (Some(Part::Residual), Category::RouterPermute)
            | (Some(Part::Dispatch | Part::Experts | Part::ExpertActivation), _) => moe,
            (Some(Part::Norm | Part::Residual | Part::Mlp), Category::Dense) => {
                covers(GraphModule::Mlp)
            }
            (
                Some(
                    Part::Norm
                    | Part::Residual
                    | Part::Projection
                    | Part::UpProjection
                    | Part::Core
                    | Part::Output,
                ),
                _,
            ) => covers(mixer),
            (Some(Part::Shared), _) => moe || (router && !self.is_shared_beside),
            _ => false,
        }
    }

    /// The module that the mixer of a list of work is.
    pub fn mixer(list: &[Work]) -> GraphModule {
        let is_linear = |work: &Work| matches!(work.task, Task::Op(Op::LinearAttention { .. }));
        if list.iter().any(is_linear) {
            GraphModule::Mamba
        } else {
            GraphModule::Attn
        }
    }
}

/// PyTorch operators of a piece of work, its share of the modules around it included.
fn operators(work: &Work) -> f64 {
    let of_pass = |pass: Pass, [forward, backward]: [f64; 2]| match pass {
        Pass::Forward => forward,
        Pass::Backward | Pass::Dgrad | Pass::Wgrad => backward,
    };
    let narrow = |dtype: Dtype| dtype.bits() < 16;
    match work.task {
        Task::Op(op) => match op {
            Op::Gemm { pass, dtype, .. } => {
                of_pass(pass, [12.0, 7.0])
                    + if narrow(dtype) {
                        of_pass(pass, [8.0, 5.0])
                    } else {
                        0.0
                    }
            }
            Op::GroupedGemm {
                groups,
                pass,
                dtype,
                ..
            } => {
                let groups = groups as f64;
                // A library goes through groups: a product each, and one operand quantized, of inputs or of gradients
                // (NVIDIA/TransformerEngine@0069563f, `_GroupedLinear` in `transformer_engine/pytorch/module/
                // grouped_linear.py`: splits, casts and workspaces of weights go through groups in Python too, one call
                // of `general_grouped_gemm` launches all products, one of `fused_multi_quantize` all quantized inputs).
                let each = if narrow(dtype) { 2.0 } else { 1.0 };
                of_pass(pass, [20.0, 12.0]) + each * groups
            }
            Op::Attention { pass, .. } => of_pass(pass, [25.0, 15.0]),
            Op::LinearAttention { pass, .. } => of_pass(pass, [40.0, 30.0]),
            Op::Router { .. } => 20.0,
            Op::Permute { .. } | Op::Unpermute { .. } => 8.0,
            // Of biases of experts, each by itself: forward a product and a sum, and back those of three gradients and what
            // is done for a parameter, in two pieces; no module is around them.
            Op::Add { .. } if work.part == Some(Part::Experts) => 3.0,
            Op::RmsNorm { .. } | Op::Rope { .. } | Op::Swiglu { .. } | Op::Add { .. } => 6.0,
            Op::CrossEntropy { .. } => 15.0,
            Op::Sweep { .. } => 0.0,
            _ => 4.0,
        },
        Task::Exchange { .. } => 25.0,
        Task::Collective(collective) => match collective.kind {
            CollectiveKind::AllToAll => 12.0,
            _ => 4.0,
        },
        Task::HostRead => 2.0,
        Task::Transfer { .. } => 6.0,
    }
}

/// Kernels that a piece of work launches, about: a product in few bits quantizes its operands.
fn kernels(work: &Work) -> u64 {
    let quantizes = |dtype: Dtype| if dtype.bits() < 16 { 2 } else { 0 };
    let of_pass = |pass: Pass, [forward, backward]: [u64; 2]| match pass {
        Pass::Forward => forward,
        Pass::Backward | Pass::Dgrad | Pass::Wgrad => backward,
    };
    match work.task {
        Task::Op(op) => match op {
            Op::Gemm { dtype, .. } => 1 + quantizes(dtype),
            Op::GroupedGemm { groups, dtype, .. } => groups * (1 + quantizes(dtype)),
            Op::Attention { pass, .. } => of_pass(pass, [1, 3]),
            Op::LinearAttention { pass, .. } => of_pass(pass, [5, 8]),
            Op::Router { .. } => 6,
            Op::CrossEntropy { .. } => 4,
            Op::Permute { .. } | Op::Unpermute { .. } => 2,
            Op::RmsNorm { pass, .. } => of_pass(pass, [1, 2]),
            _ => 1,
        },
        Task::Exchange { .. } => 3,
        Task::Collective(_) | Task::Transfer { .. } => 1,
        Task::HostRead => 0,
    }
}

/// Host and device as two queues, of work that repeats: the host issues a piece after the other, the device begins one
/// when it is issued and the one before has ended.
#[derive(Debug, Clone, Default)]
pub struct Queues {
    /// What the host takes for each piece, what the device does, and how long a read before it blocks.
    pieces: Vec<(f64, f64, Option<f64>)>,
}

impl Queues {
    /// Adds a piece of work.
    pub fn push(&mut self, host_s: f64, device_s: f64, read_s: Option<f64>) {
        self.pieces.push((host_s, device_s, read_s));
    }

    /// What the device waits for the host, seconds, where such a list follows others like it.
    pub fn waits_s(&self, backward: bool) -> f64 {
        let mut ends = [0.0; 3];
        let (mut host, mut device) = (0.0_f64, 0.0_f64);
        for end in &mut ends {
            let mut play = |&(host_s, device_s, read_s): &(f64, f64, Option<f64>)| {
                if let Some(read_s) = read_s {
                    host = host.max(device) + read_s;
                }
                host += host_s;
                if device_s > 0.0 {
                    device = device.max(host) + device_s;
                }
            };
            if backward {
                self.pieces.iter().rev().for_each(&mut play);
            } else {
                self.pieces.iter().for_each(&mut play);
            }
            *end = device.max(host);
        }
        let device_s: f64 = self.pieces.iter().map(|piece| piece.1).sum();
        (ends[2] - ends[1] - device_s).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::presets;

    use super::*;
    use Category::{Attention, Dense, Experts, RouterPermute};

    /// By hand, in seconds: what the host takes for a piece, what the device does, and a read before it.
    #[test]
    fn golden_what_a_device_waits_for_its_host() {
        let waits = |pieces: &[(f64, f64, Option<f64>)]| {
            let mut queues = Queues::default();
            for &(host_s, device_s, read_s) in pieces {
                queues.push(host_s, device_s, read_s);
            }
            queues.waits_s(false)
        };
        // A host that is ahead is not waited for; one that is behind is the longer by the difference.
        assert_eq!(waits(&[(1.0, 3.0, None), (1.0, 2.0, None)]), 0.0);
        assert_eq!(waits(&[(3.0, 1.0, None), (2.0, 1.0, None)]), 3.0);
        // After a read it is ahead no more: 1 until the piece behind it is issued, and the read itself.
        assert_eq!(waits(&[(1.0, 3.0, Some(0.5)), (1.0, 2.0, None)]), 1.5);
        // A short piece behind a read leaves the next one waiting too: 5 of 10 on the device, 1 + 4 apart.
        assert_eq!(waits(&[(1.0, 1.0, Some(0.0)), (5.0, 9.0, None)]), 5.0);
    }

    #[test]
    fn small_nodes_of_larger_domains_have_grace() {
        let of = |name: &str, domain: u32| {
            let cluster = presets::cluster(name).expect("a preset");
            Host::of(&Cluster {
                gpus_per_domain: domain,
                ..cluster
            })
        };
        assert_eq!(of("gb200-nvl72", 72), Host::Grace);
        assert_eq!(of("gb200-nvl72", 4), Host::X86);
        assert_eq!(of("dgx-h100", 8), Host::X86);
        assert_eq!(of("dgx-h100", 16), Host::X86);
    }

    #[test]
    fn what_is_a_graph_takes_no_operators() {
        let work = |part, category| Work {
            task: Task::HostRead,
            category,
            part: Some(part),
            beside: None,
            of_weights: false,
            pauses: false,
        };
        let seconds = |words: &str, part, category| {
            let issue = Issue::new(Host::X86, words.parse().expect("graphs"));
            issue.seconds(&work(part, category), GraphModule::Attn)
        };
        assert!(seconds("none", Part::Core, Attention) > 0.0);
        assert_eq!(seconds("attn", Part::Core, Attention), 0.0);
        assert!(seconds("mamba", Part::Core, Attention) > 0.0);
        assert_eq!(seconds("moe_router", Part::Norm, RouterPermute), 0.0);
        assert!(seconds("moe_router", Part::Experts, Experts) > 0.0);
        assert_eq!(seconds("moe", Part::Router, RouterPermute), 0.0);
        assert_eq!(seconds("moe", Part::Experts, Experts), 0.0);
        assert_eq!(seconds("moe_router", Part::Shared, Dense), 0.0);
        let beside = Issue::new(Host::X86, "moe_router".parse().expect("graphs"));
        let beside = beside.under("moe_router".parse().expect("graphs"), true);
        assert!(beside.seconds(&work(Part::Shared, Dense), GraphModule::Attn) > 0.0);
        assert_eq!(seconds("full_iteration", Part::Experts, Experts), 0.0);
    }
}
