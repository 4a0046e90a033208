//! What a run begins with, and what `--continue` goes on from.

use std::path::Path;

use anyhow::anyhow;
use moefold_executor::checkpoint;
use moefold_executor::options::{Init, TrainOptions};
use moefold_planner::plan::Plan;
use moefold_profiles::run::RunSummary;

use crate::cli::ExecuteArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;

/// Refuses to go on in the directory of a run of another model.
pub(super) fn same_model(args: &ExecuteArgs, plan: &Plan) -> Result<(), Failure> {
    let Some(dir) = args.out.as_deref().filter(|_| args.again.goes_on) else {
        return Ok(());
    };
    // What is no plan of ours is no run's.
    let Ok(other) = Plan::load(&dir.join("plan.json")) else {
        return Ok(());
    };
    checkpoint::of_other_model(&other.model, &plan.model).map_or(Ok(()), |differs| {
        Err(Failure::Request(anyhow!(
            "--out {}: found a run of another model, and --continue goes on with its own: {differs}; choose another \
             directory",
            dir.display()
        )))
    })
}

/// What a run begins with, as the flags say; the choice of a checkpoint is shown on `output`.
pub(super) fn init(args: &ExecuteArgs, output: Option<Output>) -> Result<Init, Failure> {
    let (mut found, mut passed_over) = (None, Vec::new());
    if let (true, Some(dir)) = (args.again.goes_on, &args.out) {
        (found, passed_over) = checkpoint::newest(dir).map_err(failure)?;
        if found.is_none() && !passed_over.is_empty() {
            // They have lost files: to begin again would throw the run away.
            checkpoint::find(dir).map_err(failure)?;
        }
    }
    if let (None, Some(path)) = (&found, &args.resume) {
        let other = checkpoint::find(path).map_err(failure)?;
        passed_over.extend(other.passed_over);
        found = Some(other.resumed);
    }
    if let Some(output) = output {
        for why in &passed_over {
            Output::warn(why)?;
        }
        if let Some(from) = &found {
            output.say(&format!(
                "going on from {}, after {} steps",
                from.checkpoint.display(),
                from.step
            ))?;
        }
    }
    Ok(match (found, args.init.to_str()) {
        (Some(from), _) => Init::Resume(from),
        (None, Some("random")) => Init::Random,
        (None, _) => Init::HuggingFace(args.init.clone()),
    })
}

/// The summary of a run that is to go on and has all its steps, with its directory.
pub(super) fn finished<'a>(
    args: &'a ExecuteArgs,
    options: &TrainOptions,
) -> Option<(&'a Path, RunSummary)> {
    let dir = args.out.as_deref().filter(|_| args.again.goes_on)?;
    let from = options.init.resumed()?;
    let wants_more = args.save_hf.is_some() || args.profile_out.is_some();
    if wants_more || from.step < options.steps || !from.checkpoint.starts_with(dir) {
        return None;
    }
    let text = std::fs::read_to_string(dir.join("summary.json")).ok()?;
    Some((dir, RunSummary::read(&text).ok()?))
}
