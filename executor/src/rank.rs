//! [`Context`]: one rank's place in a layout.
//!
//! Its coordinates, its communicators by purpose, its device and its recorder: all that a layer
//! needs besides its weights. Which ranks form a group is decided by `planner`'s mesh, never here.

use std::cell::Cell;
use std::rc::Rc;

use moefold_kernels::Device;
use moefold_planner::layout::Layout;
use moefold_planner::mesh::{self, Coordinates, GroupKind};
use moefold_profiles::trace::Category;

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
    /// Tensor-parallel group.
    pub tp: Communicator,
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
    /// All ranks of the run.
    pub world: Communicator,
}

impl Context {
    /// Joins every group of `layout` that the rank belongs to.
    pub fn join(ranks: &RankContext, layout: &Layout, device: Device, recorder: Recorder) -> Self {
        let rank = ranks.rank();
        let collectives = CollectiveLog::default();
        let waited_ns = ranks.waited_ns();
        let ranks = &ranks.on(&device).noting(&collectives);
        let everyone: Vec<u32> = (0..ranks.ranks()).collect();
        let group = |kind: Option<GroupKind>, name: &str| match kind {
            Some(kind) => ranks.communicator(name, &mesh::group_of(layout, kind, rank)),
            None => ranks.communicator(name, &everyone),
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

    /// A rank whose communicators `group` makes, by kind and name; of all ranks where no kind is said.
    pub(crate) fn with_groups(
        rank: u32,
        layout: &Layout,
        device: Device,
        recorder: Recorder,
        collectives: CollectiveLog,
        group: &dyn Fn(Option<GroupKind>, &str) -> Communicator,
        waited_ns: Rc<Cell<u64>>,
    ) -> Self {
        let everyone = group(None, "world");
        let group = |kind, name| group(Some(kind), name);
        Self {
            rank,
            layout: *layout,
            at: mesh::coordinates(layout, rank),
            recorder: recorder.on(&device),
            device,
            waited_ns,
            collectives,
            tp: group(GroupKind::Tp, "tp"),
            ep: group(GroupKind::Ep, "ep"),
            etp: group(GroupKind::Etp, "etp"),
            tp_ep: group(GroupKind::TpEp, "tp-ep"),
            dp_cp: group(GroupKind::DpCp, "dp-cp"),
            edp: group(GroupKind::Edp, "edp"),
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

    /// Runs a module of a forward pass again; all its time counts as [`Category::Recompute`].
    pub fn again<T>(&self, work: impl FnOnce() -> T) -> T {
        self.recorder.again(work)
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
