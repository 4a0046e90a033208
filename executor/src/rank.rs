//! [`Context`]: one rank's place in a layout.
//!
//! Its coordinates, its communicators by purpose, its device and its recorder: all that a layer
//! needs besides its weights. Which ranks form a group is decided by `planner`'s mesh, never here.

use std::cell::Cell;
use std::rc::Rc;

use moefold_kernels::{Device, Dtype, Tensor, TensorClass};
use moefold_planner::choice::CpComm;
use moefold_planner::layout::Layout;
use moefold_planner::mesh::{self, Coordinates, GroupKind};
use moefold_profiles::trace::Category;

use crate::later::{Later, WeightGradients};
use crate::model::Family;
use crate::record::Recorder;
use crate::transport::{CollectiveLog, Communicator, RankContext};

/// One rank of a run.
#[derive(Debug, Clone)]
pub struct Context {
    /// The global rank.
    pub rank: u32,
    /// The layout it is part of.
    pub layout: Layout,
    /// Its coordinates on both grids.
    pub at: Coordinates,
    /// Where its tensors live.
    pub device: Device,
    /// Where its time is written down.
    pub recorder: Recorder,
    waited_ns: Rc<Cell<u64>>,
    collectives: CollectiveLog,
    later: Later,
    /// Tensor-parallel group.
    pub tp: Communicator,
    /// Context-parallel group: who has the other tokens of the same sequences.
    pub cp: Communicator,
    /// How attention reaches their keys.
    pub cp_comm: CpComm,
    /// Expert-parallel group.
    pub ep: Communicator,
    /// Expert-tensor-parallel group.
    pub etp: Communicator,
    /// Every rank that a token routed here may come from: `etp` fastest, then `ep`.
    pub tp_ep: Communicator,
    /// Replicas of the dense parameters.
    pub dp_cp: Communicator,
    /// Replicas of the experts held here.
    pub edp: Communicator,
    /// Pipeline ranks, for the outputs of stages on their way to the next.
    pub activations: Communicator,
    /// The same ranks, for the gradients of these outputs on their way back.
    pub gradients: Communicator,
    /// The first and the last pipeline rank, where this is one of them.
    pub ends: Communicator,
    /// All ranks of the run.
    pub world: Communicator,
    /// Stands where a tensor is that has left for the host.
    pub(crate) nothing: Tensor,
}

/// A communicator that a rank is to have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted {
    /// Of all ranks.
    Everyone,
    /// Of a group.
    Group(GroupKind),
    /// For messages from pipeline ranks to those with the next stages, or back.
    Messages { back: bool },
    /// Of the first and the last pipeline rank, where the ends of the model are on both.
    Ends,
}

impl Wanted {
    /// The kind of group that it is of or lies within; none of all ranks.
    pub(crate) fn kind(self) -> Option<GroupKind> {
        match self {
            Self::Everyone => None,
            Self::Group(kind) => Some(kind),
            Self::Messages { .. } | Self::Ends => Some(GroupKind::Pp),
        }
    }

    /// As traces call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Everyone => "world",
            Self::Group(kind) => kind.name(),
            Self::Messages { .. } => GroupKind::Pp.name(),
            Self::Ends => "ends",
        }
    }

    /// Its members, of which `rank` is one.
    pub(crate) fn ranks(self, layout: &Layout, rank: u32) -> Vec<u32> {
        match self {
            Self::Everyone => (0..layout.gpus()).collect(),
            Self::Group(kind) => mesh::group_of(layout, kind, rank),
            Self::Messages { .. } => mesh::group_of(layout, GroupKind::Pp, rank),
            Self::Ends => mesh::ends_of(layout, rank),
        }
    }

    /// Where it is for messages alone, the members that send and receive them.
    pub(crate) fn lines(self, layout: &Layout) -> Option<Vec<[usize; 2]>> {
        let Self::Messages { back } = self else {
            return None;
        };
        let pairs = layout.places().lines().into_iter();
        let pairs = pairs.map(|pair| pair.map(|member| member as usize));
        Some(
            pairs
                .map(|[from, to]| if back { [to, from] } else { [from, to] })
                .collect(),
        )
    }
}

impl Context {
    /// Joins every group of `layout` that the rank belongs to.
    pub fn join(ranks: &RankContext, layout: &Layout, device: Device, recorder: Recorder) -> Self {
        let rank = ranks.rank();
        let collectives = CollectiveLog::default();
        let waited_ns = ranks.waited_ns();
        let ranks = &ranks.on(&device).noting(&collectives);
        let group = |wanted: Wanted| {
            let (name, members) = (wanted.name(), wanted.ranks(layout, rank));
            match wanted.lines(layout) {
                Some(lines) => ranks.lines(name, &members, &lines),
                None => ranks.communicator(name, &members),
            }
        };
        Self::with_groups(
            rank,
            layout,
            device,
            recorder,
            collectives,
            &group,
            waited_ns,
        )
    }

    /// A rank whose communicators `group` makes.
    pub(crate) fn with_groups(
        rank: u32,
        layout: &Layout,
        device: Device,
        recorder: Recorder,
        collectives: CollectiveLog,
        group: &dyn Fn(Wanted) -> Communicator,
        waited_ns: Rc<Cell<u64>>,
    ) -> Self {
        let everyone = group(Wanted::Everyone);
        let messages = |back| group(Wanted::Messages { back });
        let (activations, gradients) = (messages(false), messages(true));
        let ends = group(Wanted::Ends);
        let group = |kind| group(Wanted::Group(kind));
        Self {
            rank,
            layout: *layout,
            at: mesh::coordinates(layout, rank),
            recorder: recorder.on(&device),
            nothing: device.empty(TensorClass::Transient, Dtype::F32, &[0]),
            device,
            waited_ns,
            collectives,
            later: Later::default(),
            tp: group(GroupKind::Tp),
            cp: group(GroupKind::Cp),
            cp_comm: CpComm::default(),
            ep: group(GroupKind::Ep),
            etp: group(GroupKind::Etp),
            tp_ep: group(GroupKind::TpEp),
            dp_cp: group(GroupKind::DpCp),
            edp: group(GroupKind::Edp),
            activations,
            gradients,
            ends,
            world: everyone,
        }
    }

    /// The ranks that hold copies of this rank's parameters of a family.
    pub fn replicas(&self, family: Family) -> &Communicator {
        match family {
            Family::Dense | Family::Balance => &self.dp_cp,
            Family::Expert => &self.edp,
        }
    }

    /// Runs ops, each of which is a span with its key that counts as `category`.
    pub fn op<T>(&self, category: Category, work: impl FnOnce() -> T) -> T {
        self.recorder.counting(category, work)
    }

    /// Runs ops that only add to gradients of weights, which count as `category`: at once, or where a schedule
    /// divides the backward pass later.
    pub fn of_weights(&self, category: Category, work: impl FnOnce() + 'static) {
        self.later.run(&self.recorder, category, work);
    }

    /// Runs a backward pass without what it leaves for [`WeightGradients::run`].
    pub fn leaving_weights<T>(&self, pass: impl FnOnce() -> T) -> (T, WeightGradients) {
        self.later.keeping(pass)
    }

    /// From here on lets gradients of weights of a backward pass wait until they are [asked
    /// for](Context::settle_weights).
    pub(crate) fn delay_weights(&self) {
        self.later.delay();
    }

    /// Runs gradients of weights that wait, where any do.
    pub(crate) fn settle_weights(&self) {
        self.later.settle(&self.recorder);
    }

    /// Whether gradients of weights wait.
    pub(crate) fn weights_wait(&self) -> bool {
        self.later.is_delayed()
    }

    /// Runs those that wait, and lets none wait from here on.
    pub(crate) fn end_delay(&self) {
        self.later.end().run(&self.recorder);
    }

    /// Runs a module of a forward pass again; all its time counts as [`Category::Recompute`].
    pub fn again<T>(&self, work: impl FnOnce() -> T) -> T {
        self.recorder.again(work)
    }

    /// Runs what lets the device wait for a transfer to or from its host, as a span: on a device whose work is
    /// queued it is as long as the device stands still for it.
    pub(crate) fn wait_for_transfer<T>(&self, number: u64, work: impl FnOnce() -> T) -> T {
        if !self.device.is_queued() {
            return work();
        }
        self.recorder.transferred(number);
        self.recorder.span(Category::Offload, "host_copy", work)
    }

    /// Runs what may make the host wait for the device, as a span of that name, and counts how often
    /// it did. Nothing else in a step does.
    pub fn to_host<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let before = self.device.host_reads();
        let result = self.recorder.span(Category::Host, name, work);
        let reads = self.device.host_reads() - before;
        self.recorder.count_host_reads(name, reads);
        result
    }

    /// Runs a collective, or the start of one or the wait for several, as a span of the communication lane.
    /// What passes until the other ranks are there is set apart from the exchange itself, and when a device
    /// did it from how long its compute stream stood still.
    pub fn comm<T>(&self, category: Category, stem: &'static str, work: impl FnOnce() -> T) -> T {
        let waited_before = self.waited_ns.get();
        self.recorder.communication(category, stem, || {
            self.collectives.take();
            let result = work();
            let waited_ns = self.waited_ns.get() - waited_before;
            let mut noted = self.collectives.take();
            noted.waited_ns = waited_ns;
            (result, noted)
        })
    }
}
