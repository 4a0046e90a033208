//! [`room`]: memory that a rank on a GPU takes for its tensors before the first step.
//!
//! The planner declares the most that is alive at once. Where tensors lie there are holes between them,
//! and how many rows a rank's experts are sent varies from step to step, so a rank takes more than is
//! declared: as much again as its largest tensor, and something for rounding. That is from replaying what
//! the planner declares of whole steps (every tensor taken and given back, in order) in the arena's own
//! way. Ten layouts of Mixtral 8x7B, Qwen3 30B-A3B and the quickstart model were replayed, cut to 2 layers
//! and whole, with the rows of every layer and microbatch alike and varying by 40 percent. The holes at the
//! worst instant came to 0.00 to 0.99 of the largest tensor, which is 0.01 to 14 percent of the peak, least
//! where there are many layers. What a rank takes and how far its tensors reached is in the summary of a run.

use moefold_kernels::cuda::{Architecture, Properties};
use moefold_planner::choice::CpComm;
use moefold_planner::layout::{Batch, Layout};
use moefold_planner::model::Model;
use moefold_planner::plan::{PlannedLayout, PlannedRouting};
use moefold_profiles::units::{Bytes, GIB, MIB};
use moefold_profiles::{Precision, TensorClass};

use crate::error::Error;
use crate::moe::dispatch::Dispatching;
use crate::options::Savers;
use crate::trace::Traced;
use crate::train::prove;

/// Tensors begin at multiples of 256 bytes: enough for 8192 of any sizes at once.
const ROUNDING: Bytes = Bytes(2 * MIB);

/// Memory for the tensors of one rank of a plan, by what the plan predicts of them.
///
/// Refuses a layout that is not legal.
pub fn room(planned: &PlannedLayout, model: &Model, batch: &Batch) -> Result<Bytes, Error> {
    let layout = prove(planned, model, batch)?;
    let memory = &planned.predicted.memory_gib;
    let tensors =
        Bytes(((memory.total() - memory[TensorClass::Overhead]) * GIB as f64).ceil() as u64);
    let load = match &planned.predicted.routing {
        Some(PlannedRouting::Recorded { fullest, .. }) => {
            fullest.iter().copied().fold(0.0, f64::max)
        }
        Some(PlannedRouting::Balanced { .. }) | None => 1.0,
    };
    let Savers {
        cp_comm,
        dispatching,
        ..
    } = Savers::of(planned);
    let precision = planned.precision;
    let largest = largest(&layout, model, batch, precision, cp_comm, dispatching, load);
    Ok(room_for(tensors, largest))
}

/// The same for tensors of which `alive` bytes are alive at most, the largest of so many.
pub fn room_for(alive: Bytes, largest: Bytes) -> Bytes {
    alive + largest + ROUNDING
}

/// The largest tensor that a step allocates beside the state, where the experts of a rank get `load` times
/// the mean of all.
pub fn largest(
    layout: &Layout,
    model: &Model,
    batch: &Batch,
    precision: Precision,
    cp_comm: CpComm,
    dispatching: Dispatching,
    load: f64,
) -> Bytes {
    // Of the GPU only workspaces depend, which are small.
    let gpu = Properties::assumed(Architecture::SM90);
    Traced::on(model, Some(gpu)).largest(layout, batch, precision, cp_comm, dispatching, load)
}
