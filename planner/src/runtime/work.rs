//! [`Work`]: what a rank runs of a layer or an end of the model, and [`Setting`], where.

use std::collections::BTreeSet;

use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Cluster, Collective, ExchangeKernel, Op, Precision};

use crate::choice::{Capacity, CpComm, Dispatcher, Graphs, Offload};
use crate::layout::Layout;
use crate::local::Local;
use crate::mesh::{GroupKind, Placement, placement};
use crate::model::Model;

/// The piece of a layer that some work belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// A norm before a block.
    Norm,
    /// Projections into the mixer.
    Projection,
    /// Up-projections of latents and the rotary embedding after them.
    UpProjection,
    /// Attention core or recurrence.
    Core,
    /// Output projection of the mixer.
    Output,
    /// A dense MLP.
    Mlp,
    /// Router scores and choice.
    Router,
    /// Dispatch and combine of tokens, permutation included.
    Dispatch,
    /// Matrix products of the experts.
    Experts,
    /// Activation of the experts.
    ExpertActivation,
    /// The shared expert.
    Shared,
    /// Sums into the residual stream.
    Residual,
    /// Embedding, head and loss.
    Ends,
}

/// What some work is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Task {
    /// A device operation.
    Op(Op),
    /// A collective on its own.
    Collective(Collective),
    /// The host waits to read the device's memory.
    HostRead,
    /// A block's saved tensors leave for the host or come back, beside the blocks around it: forward this stands
    /// behind the block's work and is hidden by the next block's, backward it stands before its own work and is
    /// hidden by that of the block before. Of a block whose tensors stay, of no bytes.
    Transfer {
        /// Over the link to the host.
        bytes: Bytes,
        /// Whether they leave.
        leaves: bool,
    },
    /// A dispatch that sends one copy a destination: so much to ranks of the own NVLink domain, so
    /// much over the network.
    Exchange {
        /// What runs it.
        kernel: ExchangeKernel,
        /// Bytes to ranks of the own domain.
        local: Bytes,
        /// Bytes over the network.
        remote: Bytes,
        /// Bytes read and written besides, between the kernel's buffers and the tensors of experts.
        copied: Bytes,
        /// The group.
        group: Placement,
    },
}

/// A piece of work of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// What it is.
    pub task: Task,
    /// What its time counts as.
    pub category: Category,
    /// Where it belongs, where the runtime says.
    pub part: Option<Part>,
    /// The part beside whose ops it runs, where only the excess shows: the [core](Part::Core) (ring attention), or
    /// the [shared expert](Part::Shared), of which it is those that follow up to the next such work.
    pub beside: Option<Part>,
    /// Whether it only adds to gradients of weights, so that a schedule may leave it for later.
    pub of_weights: bool,
    /// Whether a pass that takes turns with another one pauses behind it.
    pub pauses: bool,
}

/// The work of one layer (or end of the model) for one microbatch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lowered {
    /// Forward.
    pub forward: Vec<Work>,
    /// Backward, nothing recomputed.
    pub backward: Vec<Work>,
    /// What runs again before it.
    pub again: Vec<Again>,
}

/// Work of a forward pass that runs again before the backward pass under some recompute sets. It counts
/// as [`Category::Recompute`].
#[derive(Debug, Clone, PartialEq)]
pub struct Again {
    /// Of the sets that were asked about, as bits.
    pub sets: u64,
    /// The work.
    pub work: Vec<Work>,
}

impl Again {
    /// Sets that can be asked about at once.
    pub const MOST: usize = 64;

    /// Some sets as bits.
    pub fn sets(chosen: impl Iterator<Item = bool>) -> u64 {
        let chosen = chosen.enumerate().filter(|(_, chosen)| *chosen);
        chosen.fold(0, |bits, (set, _)| bits | 1 << set)
    }

    /// Whether it runs under a set, by its index.
    pub fn under(&self, set: usize) -> bool {
        self.sets >> set & 1 == 1
    }
}

impl Lowered {
    /// What runs again under a set, by its index.
    pub fn again(&self, set: usize) -> impl Iterator<Item = &Work> {
        let groups = self.again.iter().filter(move |again| again.under(set));
        groups.flat_map(|again| &again.work)
    }

    /// The distinct shapes `(n, k)` of the weights its forward products read.
    pub fn weight_shapes(&self) -> BTreeSet<(u64, u64)> {
        self.forward
            .iter()
            .filter_map(|work| match work.task {
                Task::Op(Op::Gemm { n, k, .. } | Op::GroupedGemm { n, k, .. }) => Some((n, k)),
                _ => None,
            })
            .collect()
    }
}

/// The groups that a layer's collectives run over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerGroups {
    /// Tensor parallel.
    pub tp: Placement,
    /// Context parallel.
    pub cp: Placement,
    /// Neighbours of these among which heads are exchanged, where the others are reached around a ring
    /// ([`crate::choice::CpComm::Hierarchical`]); of other ways 1, which says nothing.
    pub cp_inside: u32,
    /// Expert parallel.
    pub ep: Placement,
    /// Expert tensor parallel.
    pub etp: Placement,
    /// Expert and expert tensor parallel together.
    pub tp_ep: Placement,
}

impl LayerGroups {
    /// The groups of a layout on a cluster.
    pub fn new(layout: &Layout, cluster: &Cluster) -> Self {
        let of = |kind| placement(layout, kind, cluster);
        Self {
            tp: of(GroupKind::Tp),
            cp: of(GroupKind::Cp),
            cp_inside: 1,
            ep: of(GroupKind::Ep),
            etp: of(GroupKind::Etp),
            tp_ep: of(GroupKind::TpEp),
        }
    }
}

impl LayerGroups {
    /// Context-parallel ranks that exchange heads, and those of a ring, under a way to reach keys.
    pub fn cp_levels(&self, cp_comm: CpComm) -> [Placement; 2] {
        let cp = self.cp;
        let inside = match cp_comm {
            CpComm::P2p | CpComm::Allgather => 1,
            CpComm::A2a => cp.ranks,
            CpComm::Hierarchical => self.cp_inside,
        };
        // Neighbours share as much of a domain as divides both.
        let cut = |sharing: u32| {
            let inside_of = gcd(inside, sharing);
            [inside_of, sharing / inside_of]
        };
        let (domain, node) = (cut(cp.ranks_per_domain), cut(cp.ranks_per_node));
        [0, 1].map(|level| Placement {
            ranks: [inside, cp.ranks / inside][level],
            ranks_per_domain: domain[level],
            ranks_per_node: node[level],
        })
    }
}

/// The greatest number that divides both.
pub(crate) fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Everything a lowering reads besides the layer.
#[derive(Debug, Clone, Copy)]
pub struct Setting<'a> {
    /// The model.
    pub model: &'a Model,
    /// A layout of this shape.
    pub layout: &'a Layout,
    /// The shape of a microbatch on a rank.
    pub local: &'a Local,
    /// Where the groups sit.
    pub groups: &'a LayerGroups,
    /// The recipe.
    pub precision: Precision,
    /// How tokens travel.
    pub dispatcher: Dispatcher,
    /// How attention reaches the keys of other context-parallel ranks.
    pub cp_comm: CpComm,
    /// How many experts take, as `local` has it.
    pub capacity: Option<Capacity>,
    /// Whether the shared expert runs while tokens are sent to the others.
    pub shared_beside: bool,
    /// Whether dense weights rest divided over their replicas, so that their gradients are completed after every
    /// backward pass.
    pub sharded: bool,
    /// Whose saved tensors leave for the host.
    pub offload: Offload,
    /// What CUDA graphs launch at once.
    pub graphs: Graphs,
    /// Whether attention multiplies in FP8.
    pub fp8_attention: bool,
}

impl<'a> Setting<'a> {
    /// A layout in bf16 with nothing chosen beside it: tokens are exchanged all to all.
    pub(crate) fn plain(
        model: &'a Model,
        layout: &'a Layout,
        local: &'a Local,
        groups: &'a LayerGroups,
    ) -> Self {
        Self {
            model,
            layout,
            local,
            groups,
            precision: Precision::Bf16,
            dispatcher: Dispatcher::Alltoall,
            cp_comm: CpComm::default(),
            capacity: None,
            shared_beside: false,
            sharded: false,
            offload: Offload::NONE,
            graphs: Graphs::NONE,
            fp8_attention: false,
        }
    }
}
