//! Whether a plan's ranks have room in this machine's memory, where they run on its CPU.
//!
//! The system gives memory page by page and ends a process that takes what is not there, in the middle of a step. So
//! what tensors of all ranks here take at their peaks, worked out again from the plan's layout ([`super::anew`]), is held to
//! what is free before anything is allocated. So is, also where ranks run on GPUs, what they offload to the host, and
//! copies of states that checkpoints and final weights are written from.

use std::fmt::Write as _;

use anyhow::anyhow;
use moefold_executor::transport::Launched;
use moefold_executor::{checkpoint, weights};
use moefold_planner::plan::{Plan, Predicted};
use moefold_profiles::TensorClass;
use moefold_profiles::units::{Bytes, GIB};

use crate::cli::{ExecuteArgs, Launch};
use crate::doctor;
use crate::failure::{Failure, failure};

/// What of the ranks' states a run copies into memory of the host.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Copies {
    /// Checkpoints are written from copies, beside training.
    pub(crate) checkpoints: bool,
    /// Weights are gathered whole at the end, in the process of rank 0.
    pub(crate) weights: bool,
}

impl Copies {
    pub(crate) fn of(args: &ExecuteArgs) -> Self {
        Self {
            checkpoints: args.save_every.is_some(),
            weights: args.save_hf.is_some(),
        }
    }
}

/// Refuses a plan that needs more memory than is free, as is `predicted` of it now: for copies, what is offloaded, and
/// where they are there for `tensors`, of ranks here.
pub(super) fn check(
    plan: &Plan,
    predicted: &Predicted,
    launch: Launch,
    tensors: bool,
    copies: Copies,
) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let (here, has_first) = match launch {
        Launch::Threads | Launch::Processes => (ranks, true),
        Launch::Env => {
            let launched = Launched::from_environment().map_err(failure)?;
            (launched.local_ranks, launched.rank == launched.local_rank)
        }
    };
    let copies = Copies {
        weights: copies.weights && has_first,
        ..copies
    };
    let free = doctor::memory_at_hand();
    check_free(plan, here.min(ranks), predicted, tensors, copies, free)
}

/// `tensors`: whether those of devices are there too.
fn check_free(
    plan: &Plan,
    here: u32,
    predicted: &Predicted,
    tensors: bool,
    copies: Copies,
    free: Bytes,
) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let mut resting_gib = predicted.host_gib.unwrap_or(0.0);
    if tensors {
        let each = &predicted.memory_gib_by_pp_rank;
        let mean = each.iter().sum::<f64>() / each.len().max(1) as f64;
        resting_gib += (mean - predicted.memory_gib[TensorClass::Overhead]).max(0.0);
    }
    let resting = Bytes((resting_gib * f64::from(here) * GIB as f64) as u64);
    let of_states = checkpoint::bytes(&plan.model) as f64 * f64::from(here) / f64::from(ranks);
    let counted = |counts: bool, bytes: f64| Bytes(if counts { bytes as u64 } else { 0 });
    // Weights are gathered once no checkpoint is written any more.
    let (copied, flag, of_copies) = [
        (
            counted(copies.checkpoints, of_states),
            "--save-every",
            "copies that checkpoints are written from",
        ),
        (
            counted(copies.weights, weights::saved_bytes(&plan.model) as f64),
            "--save-hf",
            "the weights that are gathered at the end",
        ),
    ]
    .into_iter()
    .max_by_key(|(bytes, ..)| bytes.0)
    .expect("there are two");
    let needed = resting + copied;
    if needed <= free {
        return Ok(());
    }
    if resting == Bytes::ZERO {
        return Err(Failure::Request(anyhow!(
            "{flag}: {copied} of this machine's memory are needed for {of_copies}, of {here} of {ranks} ranks, and {free} \
             are free (limits of control groups and of this process count): more machines, or another that has more, would do"
        )));
    }
    let (mut what, mut remedy) = (
        format!(
            "{} of {here} of its {ranks} ranks",
            if tensors {
                "tensors"
            } else {
                "what is offloaded"
            }
        ),
        String::new(),
    );
    if copied > Bytes::ZERO {
        write!(what, ", {copied} of it for {of_copies}").expect("a string takes any text");
        remedy = format!("; without {flag} they are not made");
    }
    Err(Failure::Request(anyhow!(
        "the plan needs {needed} of this machine's memory in {what}, and {free} are \
         free (limits of control groups and of this process count): `moefold plan --cluster local` makes plans for what this machine \
         has, and fewer layers or shorter sequences take less{remedy}"
    )))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn golden_copies_count_where_they_are_made_and_the_larger_alone() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/corpus/plan/tiny.json");
        let plan = Plan::load(&path).expect("a plan");
        let (ranks, states) = (plan.request.gpus, checkpoint::bytes(&plan.model));
        // Masters and two moments; and weights, all in f32.
        assert_eq!(weights::saved_bytes(&plan.model) * 3, states);
        let check = |tensors: bool, checkpoints, weights, free: u64| {
            let copies = Copies {
                checkpoints,
                weights,
            };
            let predicted = &plan.planned.predicted;
            check_free(&plan, ranks, predicted, tensors, copies, Bytes(free))
                .map_err(|why| why.to_string())
        };
        assert!(check(false, false, false, 0).is_ok());
        for (checkpoints, weights, bytes, said) in [
            (true, false, states, "--save-every: "),
            (true, true, states, "--save-every: "),
            (false, true, states / 3, "--save-hf: "),
        ] {
            assert_eq!(check(false, checkpoints, weights, bytes), Ok(()));
            let why = check(false, checkpoints, weights, bytes - 1).expect_err("a byte is missing");
            assert!(why.contains(said), "{why}");
        }
        let alone = (0..64).map(|power| 1 << power);
        let enough = alone
            .clone()
            .find(|&free| check(true, false, false, free).is_ok());
        let enough = enough.expect("some memory is enough");
        let why = check(true, false, true, 0).expect_err("there is none");
        assert!(
            why.contains("of it for the weights that are gathered"),
            "{why}"
        );
        assert!(check(true, true, true, enough + states).is_ok());
        // What is offloaded rests here, wherever the ranks run.
        let offloads = Predicted {
            host_gib: Some(1.0),
            ..plan.planned.predicted.clone()
        };
        let gib = u64::from(ranks) * GIB;
        let of = |tensors, free| {
            let copies = Copies::default();
            check_free(&plan, ranks, &offloads, tensors, copies, Bytes(free))
        };
        assert!(of(false, gib).is_ok() && of(true, gib + enough).is_ok());
        let why = of(false, gib - 1).expect_err("a byte is missing");
        assert!(why.to_string().contains("what is offloaded of"), "{why}");
        assert!(of(true, gib).is_err());
    }
}
