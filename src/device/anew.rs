//! [`Anew`]: what the planner says of a plan's layout now, so that an edited file is judged by what it says.

use moefold_executor::trace::Traced;
use moefold_planner::choice::Objective;
use moefold_planner::layout::PartialDegrees;
use moefold_planner::options::{PipelineLayout, SearchOptions};
use moefold_planner::plan::{Plan, PlannedLayout};
use moefold_planner::search;
use moefold_profiles::{Cluster, Costs, Gpu};

/// A plan that is planned again for this executor.
#[derive(Clone)]
pub(super) struct Anew<'a> {
    plan: &'a Plan,
    /// The plan's, of devices such as those at hand and without end.
    cluster: Cluster,
    /// What the planner says of the plan's layout, or the file where it has nothing to say.
    pub(super) planned: PlannedLayout,
}

impl<'a> Anew<'a> {
    /// On the plan's own devices, or on such as this one in their place.
    pub(super) fn new(plan: &'a Plan, device: Option<Gpu>) -> Self {
        let mut cluster = plan.cluster.clone();
        if let Some(device) = device {
            cluster.gpu = device;
        }
        cluster.num_gpus = None;
        // What is asked is how much, not whether.
        cluster.gpu.memory_gib = search::ENDLESS_GIB;
        cluster.host_memory_gib = search::ENDLESS_GIB;
        let mut anew = Self {
            plan,
            cluster,
            planned: plan.planned.clone(),
        };
        if let Some(found) = anew.least(plan.request.gpus, plan.planned.layout.pinned()) {
            anew.planned = found;
        }
        anew
    }

    /// The layout of least memory on `ranks` ranks under these pins that runs as the plan does, and has its
    /// stages where its pipeline is the plan's.
    pub(super) fn least(&self, ranks: u32, pins: PartialDegrees) -> Option<PlannedLayout> {
        let plan = self.plan;
        let of_plan = plan.planned.layout.pinned();
        let is_pipeline = |pins: PartialDegrees| (pins.pp, pins.vpp);
        let same = plan.planned.layout.pp > 1 && is_pipeline(pins) == is_pipeline(of_plan);
        let options = SearchOptions {
            stages: same
                .then(|| PipelineLayout::of(&plan.model, plan.planned.pipeline.stages.clone())),
            schedule: same.then_some(plan.planned.pipeline.schedule),
            objective: Objective::Memory,
            pins,
            top: 1,
            ..plan.options()
        };
        let costs = Costs::for_cluster(&self.cluster, &[]);
        let runtime = Traced::new(&plan.model, &self.cluster);
        let found = search::plan(
            &plan.model,
            &self.cluster,
            ranks,
            &options,
            &costs,
            &runtime,
        );
        let found = found.ok()?;
        found.plans.into_iter().next()
    }
}
