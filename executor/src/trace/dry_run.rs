//! [`dry_run`]: one rank's step of a plan, walked without devices.

use moefold_kernels::Device;
use moefold_planner::mesh;
use moefold_planner::plan::{Plan, PlannedRouting};
use moefold_planner::stack::Stack;
use moefold_planner::walk::{Walked, play};
use moefold_profiles::TensorClass;
use moefold_profiles::pricing::Costs;
use moefold_profiles::units::{Bytes, GIB};

use super::answers::properties;
use super::{Assumed, Tape, rank_on, step};
use crate::device::DeviceSpec;
use crate::error::Error;
use crate::options::Savers;
use crate::support;
use crate::train::prove;

/// Walks the step of a rank of a plan for this executor. Where the plan was made for a recorded routing, the
/// rank is taken to be the fullest one in every microbatch; else routing is balanced.
pub fn dry_run(plan: &Plan, rank: u32, aux_loss_coef: f64, costs: &Costs) -> Result<Walked, Error> {
    let (planned, model, cluster) = (&plan.planned, &plan.model, &plan.cluster);
    let batch = &plan.request.batch;
    let layout = prove(&planned.layout, model, batch)?;
    let dtype = planned.precision.activation();
    let (device, spec) = match properties(cluster) {
        None => (Device::meta_cpu(), DeviceSpec::CPU),
        Some(gpu) => {
            let reserve = None;
            (
                Device::meta_cuda(gpu, dtype),
                DeviceSpec::Cuda { dtype, reserve },
            )
        }
    };
    support::check(planned, model, &spec)?;
    let tape = Tape::default();
    let domain = |kind| match kind {
        Some(kind) => mesh::placement(&layout, kind, cluster).ranks_per_domain,
        None => cluster.gpus_per_domain.clamp(1, layout.gpus()),
    };
    let assumed = match &planned.predicted.routing {
        Some(PlannedRouting::Recorded { fullest, .. }) => Assumed::Loads(fullest[..].into()),
        Some(PlannedRouting::Balanced { .. }) | None => Assumed::BALANCED,
    };
    let savers = Savers::of(planned);
    let cx = rank_on(device, &layout, rank, assumed, &domain, &tape);
    let [setup, events] = step(cx, model, batch, &savers, aux_loss_coef, &tape)?;
    let stack = Stack::on(planned.stack, cluster, costs.host());
    let mut walked = play(rank, &setup, &events, costs, &stack);
    let overhead = planned.predicted.memory_gib[TensorClass::Overhead];
    walked.walk.bytes[TensorClass::Overhead] = Bytes((overhead * GIB as f64).round() as u64);
    Ok(walked)
}
