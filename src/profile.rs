//! `moefold profile`: measure this machine and write a profile directory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use moefold_executor::data::{Order, Samples, TokenStream, Tokenizer};
use moefold_executor::device::DeviceSpec;
use moefold_executor::files::check_no_run;
use moefold_executor::host::Pace;
use moefold_executor::options::{Init, Savers, TrainOptions};
use moefold_executor::profile::rehearsal::{Course, Rehearsal, rehearse};
use moefold_executor::profile::training::missing;
use moefold_executor::profile::{
    self, Measured, ProfileOptions, Progress, default_sweep, gpu_sweep, host_keys,
};
use moefold_executor::support;
use moefold_executor::trace::{self, Traced};
use moefold_executor::transport::{Launched, World};
use moefold_kernels::cuda::{Architecture, Properties};
use moefold_planner::bucket::Division;
use moefold_planner::choice::{
    CpComm, Dispatcher, HostShare, Masters, Optimizer, Overlap, StackName,
};
use moefold_planner::layout::{Batch, Layout, PartialDegrees};
use moefold_planner::lower::keys::{Job, keys};
use moefold_planner::model::Model;
use moefold_planner::plan::{LayoutRecord, Plan};
use moefold_planner::runtime::Runtime as _;
use moefold_planner::stack::Stack;
use moefold_planner::stack::megatron::Declared;
use moefold_profiles::directory::Key;
use moefold_profiles::host::HostCost;
use moefold_profiles::{Cluster, Op, Precision, presets};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::{BYTE, CourseArgs, Launch, ProfileArgs, Stored, TrainArgs};
use crate::device::{self, Chosen};
use crate::execute;
use crate::failure::{Failure, failure};
use crate::launch::{self, OnSignal};
use crate::output::Output;

/// Samples of each key, as far as the budget allows.
const REPEATS: usize = 7;
/// Sequences of a rank in a step that is trained to measure.
const SEQUENCES: u64 = 8;
/// The most seconds that can be asked for.
const BUDGET_MAX_S: f64 = 7.0 * 24.0 * 3600.0;
/// Part of the time that training may take; what it leaves is for keys by themselves.
const REHEARSING: f64 = 0.8;

/// What `--json` prints.
#[derive(Serialize)]
struct ProfileJson<'a> {
    #[serde(serialize_with = "moefold_executor::files::shown")]
    directory: &'a Path,
    measured: usize,
    skipped: Vec<String>,
}

pub(crate) fn run(args: &ProfileArgs, output: Output) -> Result<(), Failure> {
    if !(args.budget_s > 0.0 && args.budget_s <= BUDGET_MAX_S) {
        return Err(Failure::Request(anyhow!(
            "--budget-s: found {}, expected seconds above 0 and up to {BUDGET_MAX_S}, a week",
            args.budget_s
        )));
    }
    check_no_run(&args.out, "a profile is written").map_err(failure)?;
    let plan = args
        .plan
        .as_deref()
        .map(Plan::load)
        .transpose()
        .map_err(Failure::request)?;
    let chosen = device::choose(args.device, output)?;
    let precision = precision(args, plan.as_ref(), &chosen)?;
    let launched = match args.launch {
        Launch::Env => Some(launch::from_environment()?),
        Launch::Threads | Launch::Processes => None,
    };
    let spec = chosen.spec(precision.activation(), None);
    if let Some(plan) = &plan {
        support::check(&plan.planned, &plan.model, &spec).map_err(Failure::request)?;
    }
    let ranks = match &chosen {
        Chosen::Cpu => cpu_ranks(args.ranks, plan.as_ref(), launched.as_ref())?,
        Chosen::Cuda(gpus) => gpu_ranks(args, gpus.len() as u32, launched.as_ref())?,
    };
    let (world, each) = match launched {
        Some(launched) => {
            let world = World::process(launched.clone()).listen().map_err(failure)?;
            (world, launched.local_ranks)
        }
        None if args.launch == Launch::Processes => return launch::processes(ranks, OnSignal::End),
        None => (World::threads(ranks), ranks),
    };
    let mut keys = match (&plan, &args.model) {
        (Some(plan), _) => plan_keys(plan),
        (None, Some(name)) => model_keys(name, args.seq_len, [ranks, each], &chosen, precision)?,
        (None, None) => match &chosen {
            Chosen::Cpu => default_sweep(ranks, each),
            Chosen::Cuda(_) => gpu_sweep(spec.dtype(), ranks, each),
        },
    };
    if let Chosen::Cuda(_) = chosen {
        keys.extend(host_keys());
    }
    // Rank threads of the CPU can train what is planned: nothing tells more of what its ops take.
    let rehearsals = match (&chosen, args.launch) {
        (Chosen::Cpu, Launch::Threads) => match &plan {
            Some(plan) if plan.request.gpus == ranks => vec![Rehearsal::of(plan)],
            // Its layout cannot be trained on other ranks: keys are timed by themselves.
            Some(_) => Vec::new(),
            None => model_rehearsals(args, ranks)?,
        },
        _ => Vec::new(),
    };
    let seq_len = plan
        .as_ref()
        .map_or(args.seq_len, |plan| plan.request.batch.seq_len);
    let course = args.course.of(&rehearsals, seq_len, spec)?;
    let course = course
        .as_ref()
        .map(|(samples, options)| Course { samples, options });
    let measured = measure_on(
        &world,
        keys,
        &rehearsals,
        course,
        spec,
        args.budget_s,
        output,
    )?;
    let Some(MeasuredHere { measured, .. }) = measured else {
        // Rank 0's process writes.
        return Ok(());
    };
    measured.profile.save(&args.out).map_err(Failure::runtime)?;
    let answer = ProfileJson {
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

/// Ranks to measure a CPU with: those that a launcher started, or as many as asked for.
fn cpu_ranks(
    asked: Option<u32>,
    plan: Option<&Plan>,
    launched: Option<&Launched>,
) -> Result<u32, Failure> {
    let Some(launched) = launched else {
        return Ok(asked
            .or(plan.map(|plan| plan.request.gpus))
            .unwrap_or_else(cores));
    };
    match asked {
        Some(asked) if asked != launched.ranks => Err(Failure::Request(anyhow!(
            "--ranks {asked}: {} ranks were started; leave --ranks out, or start as many",
            launched.ranks
        ))),
        _ => Ok(launched.ranks),
    }
}

/// Ranks to measure `gpus` GPUs of this machine with. Threads share one of them, so more than one only
/// add collectives that say nothing of links; processes take one each.
fn gpu_ranks(args: &ProfileArgs, gpus: u32, launched: Option<&Launched>) -> Result<u32, Failure> {
    let here = match gpus {
        1 => "1 GPU".to_owned(),
        more => format!("{more} GPUs"),
    };
    match (args.launch, launched) {
        (Launch::Threads, _) => Ok(args.ranks.unwrap_or(1)),
        (_, Some(launched)) if launched.gpu >= gpus => Err(Failure::Request(anyhow!(
            "--launch env: rank {} takes GPU {}, and this machine has {here}: start as many ranks on it \
             as it has GPUs",
            launched.rank,
            launched.gpu
        ))),
        (_, Some(_)) => cpu_ranks(args.ranks, None, launched),
        (_, None) => match args.ranks {
            Some(ranks) if ranks > gpus => Err(Failure::Request(anyhow!(
                "--ranks {ranks} --launch processes: a GPU each, and this machine has {here}: \
                 --launch threads lets ranks share GPU 0, --launch env runs them on several machines"
            ))),
            asked => Ok(asked.unwrap_or(gpus)),
        },
    }
}

/// The precision that is measured: the plan's, else what was asked for or is usual on the device.
fn precision(
    args: &ProfileArgs,
    plan: Option<&Plan>,
    chosen: &Chosen,
) -> Result<Precision, Failure> {
    if *chosen == Chosen::Cpu && args.precision == Some(Stored::Bf16) {
        return Err(Failure::Request(anyhow!(
            "--precision bf16: the CPU computes in f32; use --device cuda where there is a GPU"
        )));
    }
    Ok(match (plan, chosen, args.precision) {
        (Some(plan), ..) => plan.planned.precision,
        (None, Chosen::Cpu, _) | (None, Chosen::Cuda(_), Some(Stored::Fp32)) => Precision::Fp32,
        (None, Chosen::Cuda(_), _) => Precision::Bf16,
    })
}

/// Cores of this machine.
fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// What was measured here.
pub(crate) struct MeasuredHere {
    pub(crate) measured: Measured,
    /// Seconds of each step of the last layout that was rehearsed.
    pub(crate) rehearsed_step_s: Vec<f64>,
}

/// Measures the layouts of plans for the CPU, which have as many ranks, by training them as they are to be.
pub(crate) fn measure(
    plans: &[Plan],
    course: Course<'_>,
    budget_s: f64,
    output: Output,
) -> Result<MeasuredHere, Failure> {
    let ranks = plans.first().map_or(1, |plan| plan.request.gpus);
    let keys = plans.iter().flat_map(plan_keys).collect();
    let rehearsals: Vec<Rehearsal> = plans.iter().map(Rehearsal::of).collect();
    let world = World::threads(ranks);
    let measured = measure_on(
        &world,
        keys,
        &rehearsals,
        Some(course),
        DeviceSpec::CPU,
        budget_s,
        output,
    )?;
    Ok(measured.expect("rank 0 is a thread of this process"))
}

impl CourseArgs {
    /// The training that is rehearsed, on sequences of so many tokens; nothing where no text is given. Refuses it where
    /// nothing is.
    fn of(
        &self,
        rehearsals: &[Rehearsal],
        seq_len: u64,
        device: DeviceSpec,
    ) -> Result<Option<(Samples, TrainOptions)>, Failure> {
        if self.text.is_empty() {
            return if self.train == TrainArgs::default() && self.tokenizer.as_os_str() == BYTE {
                Ok(None)
            } else {
                Err(Failure::Request(anyhow!(
                    "flags of training and --tokenizer say how --text is trained on, and there is none: add --text \
                     FILE..., or leave them out"
                )))
            };
        }
        let Some(rehearsal) = rehearsals.first() else {
            return Err(Failure::Request(anyhow!(
                "--text: nothing is trained here: expected --model of a model that this executor runs, or --plan for as \
                 many ranks as are measured, with --device cpu and --launch threads"
            )));
        };
        let samples = Tokenizer::named(&self.tokenizer)
            .and_then(|tokenizer| TokenStream::text(&self.text, &tokenizer))
            .and_then(|stream| {
                let seed = self.train.seed;
                let order = Order::Shuffled { seed };
                Samples::new(stream, seq_len, rehearsal.model.vocab_size, order)
            })
            .map_err(failure)?;
        let options = execute::options(&self.train, Init::Random, device)?;
        Ok(Some((samples, options)))
    }
}

/// What every layout of a model on so many ranks is trained for, at one sequence a microbatch and at the
/// most; nothing where this executor does not run the model.
fn model_rehearsals(args: &ProfileArgs, ranks: u32) -> Result<Vec<Rehearsal>, Failure> {
    let Some(name) = &args.model else {
        return Ok(Vec::new());
    };
    let model = Model::resolve(name).map_err(Failure::request)?;
    if Traced::on(&model, None)
        .refuses(&model, Precision::Fp32)
        .is_some()
    {
        return Ok(Vec::new());
    }
    let batch = Batch {
        seq_len: args.seq_len,
        global_batch: u64::from(ranks) * SEQUENCES,
    };
    let mut rehearsals: Vec<Rehearsal> = legal_layouts(&model, ranks, &batch, "cp=1,pp=1,vpp=1")?
        .filter(|layout| layout.microbatches() == 1 || layout.mbs() == 1)
        .map(|layout| Rehearsal::of_layout(&model, batch, LayoutRecord::from(&layout)))
        .collect();
    // Should the time not be enough for all: layouts that have the most in common with others come last.
    rehearsals.sort_by_key(|rehearsal| rehearsal.planned.layout.mbs == 1);
    Ok(rehearsals)
}

/// Measures on the ranks of `world`: by training, and what that leaves by itself. Where rank 0 is another
/// process, that one shows, writes and returns.
fn measure_on(
    world: &World,
    mut keys: Vec<Key>,
    rehearsals: &[Rehearsal],
    course: Option<Course<'_>>,
    device: DeviceSpec,
    budget_s: f64,
    output: Output,
) -> Result<Option<MeasuredHere>, Failure> {
    let mut budget = Duration::from_secs_f64(budget_s);
    let pace = Pace::begin(&device, !world.is_apart());
    let (mut trained, mut rehearsed_step_s) = (None, Vec::new());
    if !rehearsals.is_empty() {
        let bar = output.progress(rehearsals.len() as u64, "training");
        let began = Instant::now();
        let shown = |done: usize| bar.set_position(done as u64);
        let share = budget.mul_f64(REHEARSING);
        let rehearsed = rehearse(rehearsals, course, device, share, &shown).map_err(failure)?;
        bar.finish_and_clear();
        budget = budget.saturating_sub(began.elapsed());
        if rehearsed.left_out > 0 {
            output.note(&format!(
                "{} of {} layouts are too large to be trained here in the time; their ops are measured by \
                 themselves: a higher --budget-s trains more",
                rehearsed.left_out,
                rehearsals.len()
            ))?;
        }
        rehearsed_step_s = rehearsed.step_s;
        if let Some(profile) = rehearsed.profile {
            keys = missing(keys, &profile);
            trained = Some(profile);
        }
    }
    let options = ProfileOptions {
        keys,
        ranks: world.ranks(),
        device,
        warmup: 1,
        repeats: REPEATS,
        budget,
    };
    let deadline = Launched::timeout().map_err(failure)?;
    let deadline = deadline.unwrap_or_else(|| options.longest_wait());
    let world = world.clone().deadline(deadline);
    if !world.has_first() {
        profile::run_in(&world, &options, &|_| ()).map_err(failure)?;
        return Ok(None);
    }
    let bar = output.progress(options.keys.len() as u64, "measuring");
    let shown = |progress: Progress| bar.set_position(progress.done as u64);
    let mut measured = profile::run_in(&world, &options, &shown).map_err(failure)?;
    bar.finish_and_clear();
    if let Some(measured) = &mut measured {
        measured.profile.pace_s = pace.end();
        if let Some(trained) = trained {
            let alone = std::mem::take(&mut measured.profile.samples);
            measured.profile.samples = trained.samples.into_iter().chain(alone).collect();
        }
    }
    Ok(measured.map(|measured| MeasuredHere {
        measured,
        rehearsed_step_s,
    }))
}

/// What a plan's ranks run.
pub(crate) fn plan_keys(plan: &Plan) -> Vec<Key> {
    let layout = plan
        .layout()
        .expect("a plan is proven when it is made or loaded");
    let runtime = trace::runtime(plan.planned.stack, &plan.model, &plan.cluster);
    let job = Job {
        model: &plan.model,
        cluster: &plan.cluster,
        batch: &plan.request.batch,
        precision: plan.planned.precision,
        dispatcher: plan.planned.dispatcher,
        cp_comm: plan.planned.cp_comm(),
        capacity: plan.planned.capacity,
        optimizer: plan.planned.optimizer,
        masters: plan.planned.masters.unwrap_or_default(),
        optimizer_offload: plan.planned.optimizer_offload_fraction.unwrap_or_default(),
        division: Savers::of(&plan.planned).division(),
        runtime: runtime.as_ref(),
    };
    keys(&job, &layout)
}

/// What the layouts of a model run, one sequence a microbatch: on the CPU those of this many ranks; on
/// a GPU those of a node of its kind, one rank a GPU, and of the ranks that run, `each` on a machine.
fn model_keys(
    name: &Path,
    seq_len: u64,
    [ranks, each]: [u32; 2],
    chosen: &Chosen,
    precision: Precision,
) -> Result<Vec<Key>, Failure> {
    let model = Model::resolve(name).map_err(Failure::request)?;
    let nodes = match chosen {
        Chosen::Cpu => vec![ranks],
        Chosen::Cuda(_) => vec![1, 2, 4, 8, ranks],
    };
    let cluster = presets::local(each);
    let mut found = Vec::new();
    for &ranks in &nodes {
        found.extend(keys_on(
            &model, seq_len, ranks, &cluster, chosen, precision,
        )?);
    }
    found.sort_unstable();
    found.dedup();
    if found.is_empty() {
        return Err(Failure::Request(anyhow!(
            "no layout of {} is legal on {ranks} ranks at sequence length {seq_len}; \
             try another --ranks or --seq-len",
            name.display()
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
    chosen: &Chosen,
    precision: Precision,
) -> Result<Vec<Key>, Failure> {
    let batch = Batch {
        seq_len,
        global_batch: u64::from(ranks),
    };
    let gpu = matches!(chosen, Chosen::Cuda(_)).then(|| Properties::assumed(Architecture::SM90));
    let traced = Traced::on(model, gpu);
    // On GPUs a plan reduces gradients beside compute where nobody says otherwise.
    let overlap = Overlap {
        grad_reduce: matches!(chosen, Chosen::Cuda(_)),
        ..Overlap::default()
    };
    let least = Stack::of(StackName::Moefold).bucket_elements(overlap, ranks);
    let division = least.map_or(Division::Whole, Division::AtLeast);
    let job = |dispatcher| Job {
        model,
        cluster,
        batch: &batch,
        precision,
        dispatcher,
        cp_comm: CpComm::default(),
        capacity: None,
        optimizer: Optimizer::Adam,
        masters: Masters::default(),
        optimizer_offload: HostShare::default(),
        division,
        runtime: match traced.refuses(model, precision) {
            None => &traced,
            // What this executor does not run is measured as it is declared for another.
            Some(_) => &Declared,
        },
    };
    // Tokens may go either way in a plan.
    let jobs = [Dispatcher::Alltoall, Dispatcher::Allgather].map(job);
    let layouts = legal_layouts(model, ranks, &batch, "cp=1,pp=1,vpp=1,mbs=1")?;
    let all = layouts.flat_map(|layout| jobs.iter().flat_map(move |job| keys(job, &layout)));
    Ok(all.collect())
}

/// The legal layouts of a model that have the degrees of `pins`.
fn legal_layouts<'a>(
    model: &'a Model,
    ranks: u32,
    batch: &'a Batch,
    pins: &str,
) -> Result<impl Iterator<Item = Layout> + use<'a>, Failure> {
    let pins: PartialDegrees = pins
        .parse()
        .context("the pinned degrees")
        .map_err(Failure::Request)?;
    Ok(moefold_planner::rules::space(model, ranks, batch, &pins)
        .filter_map(move |degrees| Layout::new(&degrees, model, batch).ok()))
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn args(rest: &[&str]) -> ProfileArgs {
        let first = ["moefold", "profile", "--out", "d"];
        match Cli::parse_from(first.iter().chain(rest)).verb {
            Verb::Profile(args) => args,
            other => panic!("{other:?} is asked for"),
        }
    }

    #[test]
    fn a_training_is_rehearsed_where_there_is_one_and_else_refused() {
        let course = |rest: &[&str], rehearsals: &[Rehearsal]| {
            let found = args(rest).course.of(rehearsals, 16, DeviceSpec::CPU);
            found.map(|found| found.map(|(_, options)| (options.steps, options.seed)))
        };
        let refused = |rest: &[&str], rehearsals: &[Rehearsal], said: &str| {
            let error = course(rest, rehearsals).expect_err("refused").to_string();
            assert!(error.contains(said), "{error}");
        };
        assert_eq!(course(&[], &[]).ok(), Some(None));
        let text = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(text.path(), "so many words ".repeat(100)).expect("writes");
        let text = ["--text", text.path().to_str().expect("a name")];
        refused(&["--lr", "0.1"], &[], "say how --text is trained on");
        refused(
            &["--tokenizer", "o200k"],
            &[],
            "say how --text is trained on",
        );
        refused(&text, &[], "--text: nothing is trained here");
        let model = Model::resolve("quickstart").expect("a preset");
        let batch = Batch {
            seq_len: 16,
            global_batch: 4,
        };
        let layouts = legal_layouts(&model, 2, &batch, "tp=2,mbs=1").expect("pins");
        let rehearsals: Vec<Rehearsal> = layouts
            .map(|layout| Rehearsal::of_layout(&model, batch, LayoutRecord::from(&layout)))
            .collect();
        let flags = [&text[..], &["--steps", "7", "--seed", "3"]].concat();
        assert_eq!(course(&flags, &rehearsals).ok(), Some(Some((7, 3))));
        let flags = [&text[..], &["--lr=-1"]].concat();
        refused(
            &flags,
            &rehearsals,
            "--lr: found -1, expected a number of at least 0",
        );
        refused(&["--text", "/none"], &rehearsals, "/none");
    }

    #[test]
    fn processes_take_a_gpu_each_and_are_refused_one_that_is_not_there() {
        let ranks = |rest: &[&str]| {
            let args = args(rest);
            gpu_ranks(&args, 2, None).map_err(|failure| failure.to_string())
        };
        assert_eq!(ranks(&[]), Ok(1));
        assert_eq!(ranks(&["--ranks", "4"]), Ok(4), "they share one");
        let processes = ["--launch", "processes"];
        assert_eq!(ranks(&processes), Ok(2));
        let with = |number| ranks(&[&processes[..], &["--ranks", number]].concat());
        assert_eq!(with("1"), Ok(1));
        let error = with("3").expect_err("there are two");
        assert!(
            error.contains("--ranks 3 --launch processes: a GPU each, and this machine has 2 GPUs"),
            "{error}"
        );
    }
}
