//! `moefold profile`: measure this machine and write a profile directory.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use moefold_executor::profile::{self, Measured, ProfileOptions, default_sweep};
use moefold_executor::support;
use moefold_planner::layout::{Batch, Layout, PartialDegrees};
use moefold_planner::lower::keys::{Job, keys};
use moefold_planner::model::Model;
use moefold_planner::plan::{Dispatcher, Plan};
use moefold_profiles::directory::Key;
use moefold_profiles::{Precision, presets};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ProfileArgs;
use crate::execute::{CPU, failure};
use crate::failure::Failure;
use crate::output::Output;

/// Samples of each key, as far as the budget allows.
const REPEATS: usize = 7;

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    directory: &'a Path,
    measured: usize,
    skipped: Vec<String>,
}

pub(crate) fn run(args: &ProfileArgs, output: Output) -> Result<(), Failure> {
    if !args.budget_s.is_finite() || args.budget_s <= 0.0 {
        return Err(Failure::Request(anyhow!(
            "--budget-s: found {}, expected seconds above 0",
            args.budget_s
        )));
    }
    let plan = args
        .plan
        .as_deref()
        .map(Plan::load)
        .transpose()
        .map_err(Failure::request)?;
    if let Some(plan) = &plan {
        support::check(&plan.planned, &plan.model, &CPU).map_err(Failure::request)?;
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let ranks = match (args.ranks, &plan) {
        (Some(ranks), _) => ranks,
        (None, Some(plan)) => plan.request.gpus,
        (None, None) => cores,
    };
    let keys = match (&plan, &args.model) {
        (Some(plan), _) => plan_keys(plan),
        (None, Some(name)) => model_keys(name, args.seq_len, ranks)?,
        (None, None) => default_sweep(ranks),
    };
    let measured = measure(keys, ranks, args.budget_s, output)?;
    measured.profile.save(&args.out).map_err(Failure::runtime)?;
    let skipped = |(key, reason): &(Key, &str)| format!("{}: {reason}", name(key));
    let answer = Answer {
        directory: &args.out,
        measured: measured.profile.samples.len(),
        skipped: measured.skipped.iter().map(skipped).collect(),
    };
    output.answer(&answer, || {
        let mut text = table(&measured);
        for skipped in &answer.skipped {
            writeln!(text, "not measured: {skipped}").expect("a string takes any text");
        }
        writeln!(
            text,
            "\n{} keys under {ranks} concurrent ranks in {}; plan with --profile {}",
            answer.measured,
            args.out.display(),
            args.out.display()
        )
        .expect("a string takes any text");
        text
    })
}

/// Measures keys under `ranks` concurrent rank threads.
pub(crate) fn measure(
    keys: Vec<Key>,
    ranks: u32,
    budget_s: f64,
    output: Output,
) -> Result<Measured, Failure> {
    let bar = output.progress(keys.len() as u64, "measuring");
    let options = ProfileOptions {
        keys,
        ranks,
        device: CPU,
        warmup: 1,
        repeats: REPEATS,
        budget: Duration::from_secs_f64(budget_s),
    };
    let measured = profile::run(&options, &|progress| bar.set_position(progress.done as u64))
        .map_err(failure)?;
    bar.finish_and_clear();
    Ok(measured)
}

/// What a plan's ranks run.
pub(crate) fn plan_keys(plan: &Plan) -> Vec<Key> {
    let layout = plan
        .layout()
        .expect("a plan is proven when it is made or loaded");
    let job = Job {
        model: &plan.model,
        cluster: &plan.cluster,
        batch: &plan.request.batch,
        precision: plan.planned.precision,
        dispatcher: plan.planned.dispatcher,
    };
    keys(&job, &layout)
}

/// What every unpinned layout of a model on this many local ranks runs, one sequence a microbatch.
fn model_keys(name: &str, seq_len: u64, ranks: u32) -> Result<Vec<Key>, Failure> {
    let model = Model::resolve(name).map_err(Failure::request)?;
    let cluster = presets::local(ranks);
    let batch = Batch {
        seq_len,
        global_batch: u64::from(ranks),
    };
    let job = Job {
        model: &model,
        cluster: &cluster,
        batch: &batch,
        precision: Precision::Fp32,
        dispatcher: Dispatcher::Alltoall,
    };
    let pins: PartialDegrees = "cp=1,pp=1,vpp=1,mbs=1"
        .parse()
        .context("the pinned degrees")
        .map_err(Failure::Request)?;
    let mut found: Vec<Key> = moefold_planner::layout::space(&model, ranks, &batch, &pins)
        .filter_map(|degrees| Layout::new(&degrees, &model, &batch).ok())
        .flat_map(|layout| keys(&job, &layout))
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() {
        return Err(Failure::Request(anyhow!(
            "no layout of {name} is legal on {ranks} ranks at sequence length {seq_len}; \
             try another --ranks or --seq-len"
        )));
    }
    Ok(found)
}

fn name(key: &Key) -> String {
    match key {
        Key::Op(op) => op.stem().to_owned(),
        Key::Collective(collective) => collective.kind.stem().to_owned(),
    }
}

/// One line a key: median, spread and rate.
fn table(measured: &Measured) -> String {
    let mut table = Table::new([
        "op",
        "pass",
        ">size",
        ">median us",
        ">spread",
        ">GFLOP/s",
        ">GB/s",
    ]);
    for sample in &measured.profile.samples {
        let median = sample.median();
        let (pass, size, gflops, bytes) = match &sample.key {
            Key::Op(op) => (
                op.pass()
                    .map_or_else(String::new, |pass| format!("{pass:?}").to_lowercase()),
                format!("{:.2} MFLOP", op.flops().0 / 1e6),
                op.flops().0 / median.0 / 1e9,
                op.bytes().0 as f64,
            ),
            Key::Collective(collective) => (
                format!("{} ranks", collective.ranks),
                collective.bytes.to_string(),
                0.0,
                collective.wire_bytes(),
            ),
        };
        table.row([
            name(&sample.key),
            pass,
            size,
            format!("{:.1}", median.0 * 1e6),
            format!("{:.0} %", sample.spread() * 100.0),
            if gflops > 0.0 {
                format!("{gflops:.1}")
            } else {
                "-".to_owned()
            },
            format!("{:.2}", bytes / median.0 / 1e9),
        ]);
    }
    table.text()
}
