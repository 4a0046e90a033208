//! [`again`]: a plan priced again, under other prices.
//!
//! What a plan does not hold is taken as a search takes it where nothing is said: f32 main gradients.

use moefold_profiles::pricing::Costs;

use super::plan as search;
use crate::choice::ScheduleName;
use crate::options::{PlanError, SearchOptions};
use crate::plan::{Plan, PlannedLayout};
use crate::runtime::Runtime;

/// Memory without end, GiB: what ran has fitted, whatever is predicted of it.
pub const ENDLESS_GIB: f64 = 1e6;

/// What a plan fixes beside its degrees.
pub fn options_of(plan: &Plan) -> SearchOptions {
    let planned = &plan.planned;
    SearchOptions {
        precision: planned.precision,
        optimizer: planned.optimizer,
        masters: planned.masters.unwrap_or_default(),
        optimizer_offload: planned.optimizer_offload_fraction.unwrap_or_default(),
        dispatcher: Some(planned.dispatcher),
        cp_comm: planned.cp_comm(),
        capacity: planned.capacity,
        recompute: Some(planned.recompute.clone()),
        offload: Some(planned.offload),
        routing: planned.routing(),
        zero: planned.zero.unwrap_or_default(),
        overlap: Some(planned.overlap(&plan.cluster)),
        bucket_elements: planned.bucket_elements,
        schedule: Some(planned.pipeline.schedule),
        ..SearchOptions::new(plan.request.batch, planned.stack)
    }
}

/// Prices a plan again; it need not fit.
pub fn again(
    plan: &Plan,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<PlannedLayout, PlanError> {
    let options = SearchOptions {
        pins: plan.planned.layout.pinned(),
        stages: (plan.planned.pipeline.schedule != ScheduleName::None)
            .then(|| plan.planned.pipeline.stages.clone().into()),
        top: 1,
        ..options_of(plan)
    };
    let mut cluster = plan.cluster.clone();
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let gpus = plan.request.gpus;
    let found = search(&plan.model, &cluster, gpus, &options, costs, runtime)?;
    let first = found.plans.into_iter().next();
    Ok(first.expect("a search without a plan is an error"))
}
