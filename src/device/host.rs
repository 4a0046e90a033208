//! Whether a plan's ranks have room in this machine's memory, where they run on its CPU.
//!
//! The system gives memory page by page and ends a process that takes what is not there, in the middle of a step. So
//! what tensors of all ranks here take at their peaks, as the plan says, is held to what is free before anything is
//! allocated. So are the copies that checkpoints are written from, also where ranks run on GPUs.

use anyhow::anyhow;
use moefold_executor::checkpoint;
use moefold_executor::transport::Launched;
use moefold_planner::plan::Plan;
use moefold_profiles::TensorClass;
use moefold_profiles::units::{Bytes, GIB};

use crate::cli::Launch;
use crate::doctor;
use crate::failure::{Failure, failure};

/// Refuses a plan that needs more memory than is free: for `[tensors, copies]` of ranks here, where checkpoints are
/// written from copies.
pub(super) fn check(plan: &Plan, launch: Launch, counted: [bool; 2]) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let here = match launch {
        Launch::Threads | Launch::Processes => ranks,
        Launch::Env => Launched::from_environment().map_err(failure)?.local_ranks,
    };
    check_free(plan, here.min(ranks), counted, doctor::memory_at_hand())
}

fn check_free(
    plan: &Plan,
    here: u32,
    [tensors, copies]: [bool; 2],
    free: Bytes,
) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let predicted = &plan.planned.predicted;
    let each = &predicted.memory_gib_by_pp_rank;
    let mean = each.iter().sum::<f64>() / each.len().max(1) as f64;
    let resting = (mean - predicted.memory_gib[TensorClass::Overhead]).max(0.0);
    let resting = resting * f64::from(here) * GIB as f64;
    let copied = checkpoint::bytes(&plan.model) as f64 * f64::from(here) / f64::from(ranks);
    let counted = |counts: bool, bytes: f64| Bytes(if counts { bytes as u64 } else { 0 });
    let [resting, copied] = [counted(tensors, resting), counted(copies, copied)];
    let needed = resting + copied;
    if needed <= free {
        return Ok(());
    }
    let of = format!("of {here} of its {ranks} ranks");
    let (what, remedy) = match (tensors, copies) {
        (true, false) => (format!("tensors {of}"), String::new()),
        (true, true) => (
            format!("tensors {of}, {copied} of it for copies that checkpoints are written from"),
            "; without --save-every there are no copies".to_owned(),
        ),
        (false, _) => {
            return Err(Failure::Request(anyhow!(
                "--save-every: {copied} of this machine's memory are needed for copies {of}, which checkpoints are \
                 written from, and {free} are free (the limits of control groups count): more machines, or another \
                 that has more, would do"
            )));
        }
    };
    Err(Failure::Request(anyhow!(
        "the plan needs {needed} of this machine's memory in {what}, and {free} are \
         free (the limits of control groups count): `moefold plan --cluster local` makes plans for what this machine \
         has, and fewer layers or shorter sequences take less{remedy}"
    )))
}
