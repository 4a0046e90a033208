//! `moefold profile`: measure this machine and write a profile directory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use moefold_executor::device::DeviceSpec;
use moefold_executor::profile::{
    self, Measured, ProfileOptions, default_sweep, gpu_sweep, host_keys,
};
use moefold_executor::support;
use moefold_planner::layout::{Batch, Layout, PartialDegrees};
use moefold_planner::lower::keys::{Job, keys};
use moefold_planner::model::Model;
use moefold_planner::plan::{Dispatcher, Plan};
use moefold_profiles::directory::Key;
use moefold_profiles::host::HostCost;
use moefold_profiles::{Cluster, Op, Precision, presets};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::{ProfileArgs, Stored};
use crate::device::{self, Chosen};
use crate::execute::failure;
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
    let chosen = device::choose(args.device, output)?;
    let precision = match (&plan, &chosen, args.precision) {
        (Some(plan), ..) => plan.planned.precision,
        (None, Chosen::Cpu, _) | (None, Chosen::Cuda(_), Some(Stored::Fp32)) => Precision::Fp32,
        (None, Chosen::Cuda(_), _) => Precision::Bf16,
    };
    if chosen == Chosen::Cpu && args.precision == Some(Stored::Bf16) {
        return Err(Failure::Request(anyhow!(
            "--precision bf16: the CPU computes in f32; use --device cuda where there is a GPU"
        )));
    }
    let spec = chosen.spec(precision.activation(), None);
    if let Some(plan) = &plan {
        support::check(&plan.planned, &plan.model, &spec).map_err(Failure::request)?;
    }
    // On a GPU ops are measured alone; several ranks only add collectives among ranks that share it.
    let ranks = match (args.ranks, &plan, &chosen) {
        (Some(ranks), ..) => ranks,
        (None, _, Chosen::Cuda(_)) => 1,
        (None, Some(plan), Chosen::Cpu) => plan.request.gpus,
        (None, None, Chosen::Cpu) => cores(),
    };
    let mut keys = match (&plan, &args.model) {
        (Some(plan), _) => plan_keys(plan),
        (None, Some(name)) => model_keys(name, args.seq_len, ranks, &chosen, precision)?,
        (None, None) => match &chosen {
            Chosen::Cpu => default_sweep(ranks),
            Chosen::Cuda(_) => gpu_sweep(spec.dtype(), ranks),
        },
    };
    if let Chosen::Cuda(_) = chosen {
        keys.extend(host_keys());
    }
    let measured = measure(keys, ranks, spec, args.budget_s, output)?;
    measured.profile.save(&args.out).map_err(Failure::runtime)?;
    let answer = Answer {
        directory: &args.out,
        measured: measured.profile.samples.len(),
        skipped: skipped(&measured),
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

/// What was not measured and why, one line for all keys of one op and reason.
fn skipped(measured: &Measured) -> Vec<String> {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (key, reason) in &measured.skipped {
        *counts.entry((key.stem(), reason)).or_default() += 1;
    }
    let line = |((stem, reason), count): ((&str, &str), usize)| match count {
        1 => format!("{stem}: {reason}"),
        _ => format!("{stem}, {count} shapes: {reason}"),
    };
    counts.into_iter().map(line).collect()
}

/// Cores of this machine.
fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// Measures keys on `device` with `ranks` rank threads.
pub(crate) fn measure(
    keys: Vec<Key>,
    ranks: u32,
    device: DeviceSpec,
    budget_s: f64,
    output: Output,
) -> Result<Measured, Failure> {
    let bar = output.progress(keys.len() as u64, "measuring");
    let options = ProfileOptions {
        keys,
        ranks,
        device,
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

/// What the layouts of a model run, one sequence a microbatch: on the CPU those of this many ranks; on
/// a GPU those of a node of its kind, one rank a GPU.
fn model_keys(
    name: &str,
    seq_len: u64,
    ranks: u32,
    chosen: &Chosen,
    precision: Precision,
) -> Result<Vec<Key>, Failure> {
    let model = Model::resolve(name).map_err(Failure::request)?;
    let nodes = match chosen {
        Chosen::Cpu => vec![ranks],
        Chosen::Cuda(_) => vec![1, 2, 4, 8],
    };
    let cluster = presets::local(ranks);
    let mut found = Vec::new();
    for &ranks in &nodes {
        found.extend(keys_on(&model, seq_len, ranks, &cluster, precision)?);
    }
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

/// What every unpinned layout of a model on this many ranks runs.
fn keys_on(
    model: &Model,
    seq_len: u64,
    ranks: u32,
    cluster: &Cluster,
    precision: Precision,
) -> Result<Vec<Key>, Failure> {
    let batch = Batch {
        seq_len,
        global_batch: u64::from(ranks),
    };
    let job = Job {
        model,
        cluster,
        batch: &batch,
        precision,
        dispatcher: Dispatcher::Alltoall,
    };
    let pins: PartialDegrees = "cp=1,pp=1,vpp=1,mbs=1"
        .parse()
        .context("the pinned degrees")
        .map_err(Failure::Request)?;
    Ok(moefold_planner::layout::space(model, ranks, &batch, &pins)
        .filter_map(|degrees| Layout::new(&degrees, model, &batch).ok())
        .flat_map(|layout| keys(&job, &layout))
        .collect())
}

/// An op's work, or the bytes it moves where it is no product.
fn size(op: &Op, skew: Option<f64>) -> String {
    let flops = op.flops().0;
    let size = match flops {
        0.0 => op.bytes().to_string(),
        small if small < 1e9 => format!("{:.2} MFLOP", flops / 1e6),
        _ => format!("{:.2} GFLOP", flops / 1e9),
    };
    match skew {
        Some(skew) => format!("{size}, skew {skew:.1}"),
        None => size,
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
                size(op, sample.skew),
                op.flops().0 / median.0 / 1e9,
                op.bytes().0 as f64,
            ),
            Key::Collective(collective) => (
                format!("{} ranks", collective.ranks),
                collective.bytes.to_string(),
                0.0,
                collective.wire_bytes(),
            ),
            Key::Host(cost) => (
                match cost {
                    HostCost::Copy { direction, .. } => direction.name().to_owned(),
                    HostCost::Launch | HostCost::Read => String::new(),
                },
                match cost {
                    HostCost::Copy { bytes, .. } => bytes.to_string(),
                    HostCost::Launch | HostCost::Read => String::new(),
                },
                0.0,
                cost.bytes().0 as f64,
            ),
        };
        table.row([
            sample.key.stem().to_owned(),
            pass,
            size,
            format!("{:.1}", median.0 * 1e6),
            format!("{:.0} %", sample.spread() * 100.0),
            if gflops > 0.0 {
                format!("{gflops:.1}")
            } else {
                "-".to_owned()
            },
            if bytes > 0.0 {
                format!("{:.2}", bytes / median.0 / 1e9)
            } else {
                "-".to_owned()
            },
        ]);
    }
    table.text()
}
