//! [`again`]: a plan priced again, under other prices.

use moefold_profiles::pricing::Costs;

use super::plan as search;
use crate::options::PlanError;
use crate::plan::{Plan, PlannedLayout};
use crate::runtime::Runtime;

/// Memory without end, GiB: what ran has fitted, whatever is predicted of it.
pub const ENDLESS_GIB: f64 = 1e6;

/// Prices a plan again; it need not fit.
pub fn again(
    plan: &Plan,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<PlannedLayout, PlanError> {
    let mut cluster = plan.cluster.clone();
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let gpus = plan.request.gpus;
    let found = search(&plan.model, &cluster, gpus, &plan.pinned(), costs, runtime)?;
    let first = found.plans.into_iter().next();
    Ok(first.expect("a search without a plan is an error"))
}
