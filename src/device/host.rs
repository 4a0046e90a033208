//! Whether a plan's ranks have room in this machine's memory, where they run on its CPU.
//!
//! The system gives memory page by page and ends a process that takes what is not there, in the middle of a step. So
//! what tensors of all ranks here take at their peaks, as the plan says, is held to what is free before anything is
//! allocated.

use anyhow::anyhow;
use moefold_executor::transport::Launched;
use moefold_planner::plan::Plan;
use moefold_profiles::TensorClass;
use moefold_profiles::units::{Bytes, GIB};

use crate::cli::Launch;
use crate::doctor;
use crate::failure::{Failure, failure};

/// Refuses a plan that needs more memory than is free.
pub(super) fn check(plan: &Plan, launch: Launch) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let here = match launch {
        Launch::Threads | Launch::Processes => ranks,
        Launch::Env => Launched::from_environment().map_err(failure)?.local_ranks,
    };
    check_free(plan, here.min(ranks), doctor::memory_at_hand())
}

fn check_free(plan: &Plan, here: u32, free: Bytes) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let predicted = &plan.planned.predicted;
    let each = &predicted.memory_gib_by_pp_rank;
    let mean = each.iter().sum::<f64>() / each.len().max(1) as f64;
    let tensors = (mean - predicted.memory_gib[TensorClass::Overhead]).max(0.0);
    let needed = Bytes((tensors * f64::from(here) * GIB as f64) as u64);
    if needed <= free {
        return Ok(());
    }
    Err(Failure::Request(anyhow!(
        "the plan needs {needed} of this machine's memory in tensors of {here} of its {ranks} ranks, and {free} are \
         free (the limits of control groups count): `moefold plan --cluster local` makes plans for what this machine \
         has, and fewer layers or shorter sequences take less"
    )))
}
