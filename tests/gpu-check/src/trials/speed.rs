//! How fast is it, and was that foreseen: profiles of the GPU, and published models cut to fit it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use moefold_executor::data::{Element, write_indexed};
use moefold_executor::trace::Traced;
use moefold_kernels::cuda::survey::Survey;
use moefold_planner::choice::{Objective, StackName};
use moefold_planner::layout::{Batch, PartialDegrees};
use moefold_planner::model::{Model, hf, presets};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Plan;
use moefold_planner::search;
use moefold_profiles::directory::{Key, Profile};
use moefold_profiles::host::HostCost;
use moefold_profiles::random::SplitMix64;
use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{Costs, Precision, TensorClass, presets as clusters};
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde_json::{Value, json};

use super::{Bench, Trial, minutes};
use crate::Error;

/// The models that are cut: presets by name, and what they are called here.
const MODELS: [(&str, &str); 2] = [
    ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
];
/// What stands for them in a rehearsal.
const REHEARSED: [(&str, &str); 1] = [("quickstart", "quickstart")];
/// Of a GPU's free memory, what tensors may take: an allocator that keeps freed blocks takes more.
const FILLED: f64 = 0.8;
/// Sequences of a step, all in one microbatch.
const SEQUENCES: u64 = 2;

/// Profiles, each a directory that `plan --profile` reads: a sweep, and the shapes of each model.
pub(super) fn profile(bench: &Bench<'_>, trial: &mut Trial) {
    let small = bench.options.small;
    let budget = if small { "2" } else { "45" };
    let models = if small { &REHEARSED[..] } else { &MODELS[..] };
    let seq_len = if small { "32" } else { "4096" };
    let mut wanted = vec![("sweep", None)];
    let covered = models
        .iter()
        .filter(|(_, name)| small || bench.options.covers(name));
    wanted.extend(covered.map(|(preset, name)| (*name, Some(*preset))));
    if small {
        // Shapes of the sweep are not small.
        wanted.remove(0);
    }
    let mut table = Table::new([
        "profile",
        ">samples",
        ">seconds",
        ">launch us",
        ">read us",
        ">to device GB/s",
        ">to host GB/s",
        ">both GB/s",
    ]);
    let mut found = Vec::new();
    for (name, model) in wanted {
        let out = bench.path(name);
        let mut arguments = vec!["profile", "--device", bench.device(), "--budget-s", budget];
        arguments.extend(model.iter().flat_map(|model| ["--model", model]));
        arguments.extend(model.iter().flat_map(|_| ["--seq-len", seq_len]));
        arguments.extend(["--out", &out]);
        let began = Instant::now();
        let made = bench
            .moefold(name, &arguments, minutes(5))
            .and_then(|()| Profile::load(Path::new(&out)).map_err(|error| error.to_string()));
        match made {
            Err(why) => trial.failed(why),
            Ok(profile) => {
                trial.judge(!profile.samples.is_empty());
                table.row(profiled(name, &profile, began.elapsed()));
                found.push(
                    json!({ "name": name, "directory": out, "device": profile.device,
                    "versions": profile.versions, "clocks": profile.clocks,
                    "overhead": profile.overhead, "samples": profile.samples.len() }),
                );
            }
        }
    }
    let title = "Profiles; copies are of the largest size".to_owned();
    trial.tables.push((title, table));
    trial.data = json!(found);
}

fn profiled(name: &str, profile: &Profile, took: Duration) -> [String; 8] {
    use moefold_profiles::host::Direction;
    let host = |wanted: &dyn Fn(&HostCost) -> bool| {
        let of_host = profile
            .samples
            .iter()
            .filter_map(|sample| match &sample.key {
                Key::Host(cost) if wanted(cost) => Some((cost.bytes(), sample.median().0)),
                _ => None,
            });
        of_host.max_by_key(|(bytes, _)| *bytes)
    };
    let microseconds = |cost: HostCost| {
        host(&|found| *found == cost)
            .map_or_else(|| "-".to_owned(), |(_, s)| format!("{:.2}", s * 1e6))
    };
    let rate = |way: Direction| {
        host(&|found| matches!(found, HostCost::Copy { direction, .. } if *direction == way))
            .map_or_else(
                || "-".to_owned(),
                |(bytes, s)| format!("{:.1}", bytes.0 as f64 / s / 1e9),
            )
    };
    [
        name.to_owned(),
        profile.samples.len().to_string(),
        format!("{:.0}", took.as_secs_f64()),
        microseconds(HostCost::Launch),
        microseconds(HostCost::Read),
        rate(Direction::ToDevice),
        rate(Direction::ToHost),
        rate(Direction::Both),
    ]
}

/// Published models, cut to their first layers, planned with what was measured of their ops and
/// trained.
pub(super) fn models(bench: &Bench<'_>, trial: &mut Trial) -> Result<(), Error> {
    let models = if bench.options.small {
        &REHEARSED[..]
    } else {
        &MODELS[..]
    };
    let mut table = Table::new([
        "model",
        ">layers",
        ">predicted ms",
        ">measured ms",
        ">error",
        ">predicted GiB",
        ">measured GiB",
        ">tokens/s",
        ">best PyTorch ms",
        ">ours over it",
    ]);
    let mut found = Vec::new();
    for (preset, name) in models {
        if !bench.options.small && !bench.options.covers(name) {
            continue;
        }
        let cut = cut(bench, preset, name)?;
        let run = match cut.run(bench) {
            Ok(run) => run,
            Err(why) => {
                trial.failed(why);
                continue;
            }
        };
        let peers = cut.peers(bench, trial);
        let best = peers
            .iter()
            .filter_map(|peer| peer["step_ms"].as_f64())
            .reduce(f64::min);
        let (predicted, measured) = (run.predicted_s * 1e3, run.measured_s * 1e3);
        table.row([
            (*name).to_owned(),
            cut.layers.to_string(),
            format!("{predicted:.2}"),
            format!("{measured:.2}"),
            format::signed_percent(predicted / measured - 1.0),
            format!("{:.2}", run.predicted_gib),
            format!("{:.2}", run.measured_gib),
            format!("{:.0}", run.tokens_per_s),
            best.map_or_else(|| "-".to_owned(), |best| format!("{best:.2}")),
            best.map_or_else(|| "-".to_owned(), |best| format!("{:.2}", measured / best)),
        ]);
        found.push(json!({
            "model": preset, "layers": cut.layers, "seq_len": cut.batch.seq_len,
            "sequences": cut.batch.global_batch, "predicted_step_s": run.predicted_s,
            "measured_step_s": run.measured_s, "predicted_gib": run.predicted_gib,
            "measured_gib": run.measured_gib, "tokens_per_s": run.tokens_per_s,
            "peers": peers, "ours_over_best_peer": best.map(|best| measured / best),
        }));
        // Memory in the arena is what the plan declares, or one of the two is wrong.
        trial.judge((run.measured_gib / run.predicted_gib - 1.0).abs() < 0.01);
    }
    if table.is_empty() {
        let names = models.iter().map(|(_, name)| *name);
        let names = names.collect::<Vec<_>>().join(", ");
        trial.notes.push(format!("none of {names} was asked for"));
    }
    if bench.options.beside.is_none() {
        trial
            .notes
            .push("no PyTorch beside: --beside SCRIPT names one".to_owned());
    }
    let title =
        "A step of models cut to fit, predicted with the profile and measured; GiB are of tensors";
    trial.tables.push((title.to_owned(), table));
    trial.data = json!(found);
    Ok(())
}

/// A model's first layers, as files.
struct Cut {
    name: String,
    config: String,
    layers: u64,
    batch: Batch,
}

struct Ran {
    predicted_s: f64,
    measured_s: f64,
    /// Tensors at the peak, without context and libraries.
    predicted_gib: f64,
    measured_gib: f64,
    tokens_per_s: f64,
}

/// Writes the configuration of as many layers as have room, and random tokens.
fn cut(bench: &Bench<'_>, preset: &str, name: &str) -> Result<Cut, Error> {
    let batch = Batch {
        seq_len: if bench.options.small { 32 } else { 4096 },
        global_batch: SEQUENCES,
    };
    let preset = presets::find(preset)?;
    let mut config: Value = serde_json::from_str(preset.config())?;
    let room = room(bench);
    let whole = config["num_hidden_layers"].as_u64().unwrap_or(1);
    let mut layers = 1;
    for more in 2..=whole.min(if bench.options.small { 2 } else { whole }) {
        config["num_hidden_layers"] = more.into();
        let model = parsed(name, &config)?;
        if tensors(&model, batch, &bench.cluster, precision(bench)) > room {
            break;
        }
        layers = more;
    }
    config["num_hidden_layers"] = layers.into();
    let vocabulary = config["vocab_size"].as_u64().unwrap_or(2);
    let path = bench.folder.join(format!("{name}.json"));
    fs::write(&path, config.to_string()).map_err(Error::of_trial(&path))?;
    tokens(&bench.folder.join(name), vocabulary, batch)?;
    Ok(Cut {
        name: name.to_owned(),
        config: path.display().to_string(),
        layers,
        batch,
    })
}

fn parsed(name: &str, config: &Value) -> Result<Model, Error> {
    Ok(hf::parse(name, &config.to_string())?)
}

fn precision(bench: &Bench<'_>) -> Precision {
    if bench.options.rehearse {
        Precision::Fp32
    } else {
        Precision::Bf16
    }
}

/// What tensors may take here.
fn room(bench: &Bench<'_>) -> Bytes {
    let survey = Survey::take();
    let gpu = survey.devices.get(bench.options.device as usize);
    let free = gpu.and_then(|gpu| {
        let used = gpu.memory_used.unwrap_or(Bytes::ZERO);
        Some(gpu.memory?.0.saturating_sub(used.0))
    });
    Bytes((free.unwrap_or(4 * GIB) as f64 * FILLED) as u64)
}

/// Tensors of one rank that trains the model, by the planner.
fn tensors(model: &Model, batch: Batch, cluster: &str, precision: Precision) -> Bytes {
    let Ok(mut cluster) = clusters::resolve(cluster) else {
        return Bytes(u64::MAX);
    };
    cluster.gpu.memory_gib = 1e9;
    let options = SearchOptions {
        precision,
        objective: Objective::Memory,
        pins: PartialDegrees {
            mbs: Some(batch.global_batch as u32),
            ..PartialDegrees::default()
        },
        top: 1,
        ..SearchOptions::new(batch, StackName::Moefold)
    };
    let costs = Costs::for_cluster(&cluster, &[]);
    let runtime = Traced::new(model, &cluster);
    search::plan(model, &cluster, 1, &options, &costs, &runtime).map_or(Bytes(u64::MAX), |found| {
        let memory = found.plans[0].predicted.memory_gib;
        Bytes(((memory.total() - memory[TensorClass::Overhead]) * GIB as f64) as u64)
    })
}

/// Steps of a run: enough for a median after warm-up.
const STEPS: u64 = 12;

/// Tokens drawn evenly from the vocabulary, so that experts are loaded evenly as the plan assumes.
fn tokens(prefix: &Path, vocabulary: u64, batch: Batch) -> Result<(), Error> {
    let count = STEPS * batch.global_batch * (batch.seq_len + 1);
    let mut random = SplitMix64::new(1);
    let ids: Vec<i32> = (0..count)
        .map(|_| random.below(vocabulary) as i32)
        .collect();
    Ok(write_indexed(prefix, Element::I32, &[&ids])?)
}

impl Cut {
    /// Plans the layout of one rank and one microbatch.
    fn plan(&self, bench: &Bench<'_>, log: &str, rest: &[&str]) -> Result<(), String> {
        let seq_len = self.batch.seq_len.to_string();
        let batch = self.batch.global_batch.to_string();
        let layout = format!("mbs={batch}");
        let precision = precision(bench).to_string();
        let asked = [
            "plan",
            "--model",
            &self.config,
            "--cluster",
            &bench.cluster,
            "--gpus",
            "1",
            "--stack",
            "moefold",
            "--precision",
            &precision,
            "--seq-len",
            &seq_len,
            "--global-batch",
            &batch,
            "--layout",
            &layout,
        ];
        let arguments = [&asked[..], rest].concat();
        bench.moefold(&format!("{}-{log}", self.name), &arguments, minutes(1))
    }

    /// Plans, measures what the plan runs, plans again with that, and trains.
    fn run(&self, bench: &Bench<'_>) -> Result<Ran, String> {
        let name = &self.name;
        let path = |what: &str| bench.path(&format!("{name}-{what}"));
        let (first, plan) = (path("unmeasured-plan.json"), path("plan.json"));
        let (profile, run, report) = (path("profile"), path("run"), path("report"));
        self.plan(bench, "unmeasured-plan", &["--out", &first])?;
        let budget = if bench.options.small { "1" } else { "30" };
        bench.moefold(
            &format!("{name}-profile"),
            &[
                "profile",
                "--plan",
                &first,
                "--device",
                bench.device(),
                "--budget-s",
                budget,
                "--out",
                &profile,
            ],
            minutes(4),
        )?;
        self.plan(bench, "plan", &["--profile", &profile, "--out", &plan])?;
        let (data, steps) = (bench.path(name), STEPS.to_string());
        bench.moefold(
            &format!("{name}-run"),
            &[
                "execute",
                &plan,
                "--data",
                &data,
                "--no-shuffle",
                "--device",
                bench.device(),
                "--steps",
                &steps,
                "--lr",
                "1e-4",
                "--out",
                &run,
            ],
            minutes(6),
        )?;
        // The page says where the two differ, op by op.
        bench.moefold(
            &format!("{name}-compare"),
            &["compare", &run, "--out", &report],
            minutes(1),
        )?;
        let planned = Plan::load(Path::new(&plan)).map_err(|error| error.to_string())?;
        let predicted = &planned.planned.predicted;
        let summary = bench.summary(&format!("{name}-run"))?;
        let peak = summary.peak_by_rank.iter().map(|rank| {
            (rank.bytes.total().0 - rank.bytes[TensorClass::Overhead].0) as f64 / GIB as f64
        });
        Ok(Ran {
            predicted_s: predicted.step_s,
            measured_s: summary.step_s,
            predicted_gib: predicted.peak_gib - predicted.memory_gib[TensorClass::Overhead],
            measured_gib: peak.fold(0.0, f64::max),
            tokens_per_s: summary.tokens_per_s,
        })
    }

    /// The same model and tokens a step in every mode of the script beside, as far as time goes.
    fn peers(&self, bench: &Bench<'_>, trial: &mut Trial) -> Vec<Value> {
        let Some(script) = &bench.options.beside else {
            return Vec::new();
        };
        let began = Instant::now();
        let mut found = Vec::new();
        for compiled in [false, true] {
            for experts in ["grouped_mm", "batched_mm", "eager"] {
                let mode = format!(
                    "{}-{experts}{}",
                    self.name,
                    if compiled { "-compiled" } else { "" }
                );
                let left = PEERS_DEADLINE.saturating_sub(began.elapsed());
                if left.is_zero() {
                    trial
                        .notes
                        .push(format!("{mode}: not run, the time for PyTorch was over"));
                    continue;
                }
                let mut command = Command::new(&bench.options.python);
                command.arg(script).args([
                    "--config",
                    &self.config,
                    "--seq-len",
                    &self.batch.seq_len.to_string(),
                    "--micro-batch",
                    &self.batch.global_batch.to_string(),
                    "--steps",
                    "10",
                    "--device",
                    bench.device(),
                    "--experts",
                    experts,
                    "--dtype",
                    if bench.options.rehearse {
                        "fp32"
                    } else {
                        "bf16"
                    },
                ]);
                command.args(compiled.then_some("--compile"));
                command.env("CUDA_VISIBLE_DEVICES", bench.options.device.to_string());
                match bench.logged(&mode, command, left.min(minutes(2))) {
                    Err(why) => trial.notes.push(why),
                    Ok(said) => {
                        let line = said
                            .lines()
                            .rev()
                            .find_map(|line| serde_json::from_str(line).ok());
                        match line {
                            Some(line) => found.push(line),
                            None => trial.notes.push(format!("{mode}: it printed no JSON")),
                        }
                    }
                }
            }
        }
        found
    }
}

/// Time for all modes of PyTorch on one model.
const PEERS_DEADLINE: Duration = Duration::from_mins(3);
