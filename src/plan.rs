//! `moefold plan`: search, show, write the best plan.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use moefold_planner::answer::Answer;
use moefold_planner::layout::Batch;
use moefold_planner::model::Model;
use moefold_planner::options::{Flags, PlanError, SearchOptions};
use moefold_planner::plan::{Plan, ProfileUsed, Request};
use moefold_planner::search;
use moefold_profiles::{Cluster, Costs, Profile, presets};

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::output::Output;

pub(crate) fn run(args: &PlanArgs, output: Output) -> Result<(), Failure> {
    let model = Model::resolve(&args.model).map_err(Failure::request)?;
    let (cluster, gpus) = cluster(&args.cluster, args.gpus)?;
    let batch = Batch { seq_len: args.seq_len, global_batch: args.global_batch };
    let options = SearchOptions::parse(batch, &flags(args, &cluster)).map_err(refusal)?;
    let profiles = profiles(&args.profile, &cluster)?;
    let answer = answer(&model, &cluster, gpus, &options, &profiles)?;
    if let Some(path) = &args.out {
        best(&answer)?.save(path).map_err(Failure::runtime)?;
    }
    output.answer(&answer, || {
        let mut text = moefold_reports::plan_table(&answer);
        if let Some(path) = &args.out {
            text.push_str(&format!("\nThe best plan is in {}.\n", path.display()));
        }
        text
    })
}

/// Searches, and says how long that took.
pub(crate) fn answer(
    model: &Model,
    cluster: &Cluster,
    gpus: u32,
    options: &SearchOptions,
    profiles: &[Named],
) -> Result<Answer, Failure> {
    let measured: Vec<Profile> = profiles.iter().map(|named| named.profile.clone()).collect();
    let costs = Costs::for_cluster(cluster, &measured);
    let started = Instant::now();
    let found = search::plan(model, cluster, gpus, options, &costs).map_err(refusal)?;
    let mut search = found.search;
    search.elapsed_s = started.elapsed().as_secs_f64();
    Ok(Answer {
        plans: found.plans,
        search,
        model: Some(model.clone()),
        cluster: Some(cluster.clone()),
        request: Some(Request { gpus, batch: options.batch, objective: options.objective }),
        profiles: profiles.iter().map(Named::used).collect(),
    })
}
