//! Predictions against what others measured and published, case by case.
//!
//! The tables beside this file name their sources. Memory is held to a bar; time is printed, with the
//! misses left in, and held to what the search needs of it: the order of layouts.

#![expect(
    clippy::print_stdout,
    reason = "every case is reported, `--nocapture` shows it"
)]

use moefold_planner::stack::megatron::Declared;
use std::collections::BTreeMap;

use moefold_planner::choice::{Dispatcher, Module, Optimizer, Overlap, Recompute, StackName};
use moefold_planner::layout::Batch;
use moefold_planner::model::{Mixer, Model, presets};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::PlannedLayout;
use moefold_planner::search;
use moefold_profiles::pricing::Costs;
use moefold_profiles::{Dtype, TensorClass};

/// One row of `simumax_b200.csv`.
struct Row {
    id: String,
    model: Model,
    batch: Batch,
    layout: String,
    pp: u32,
    mem_gib: f64,
    step_ms: f64,
}

/// A preset cut to a few layers, as the measured runs were.
fn cut(name: &str, layers: usize) -> Model {
    let mut model = presets::load(name).expect("a preset");
    model.mtp.clear();
    match name {
        "deepseek-v3" => {
            // One dense layer, then MoE layers.
            let (dense, moe) = (model.layers[0].clone(), model.layers[60].clone());
            model.layers = vec![moe; layers];
            model.layers[0] = dense;
        }
        "llama-3.1-405b" => {
            // The launch script has 16 key/value heads.
            for layer in &mut model.layers {
                if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
                    gqa.kv_heads = 16;
                }
            }
        }
        _ => {}
    }
    model.layers.truncate(layers);
    model
}

fn rows() -> Vec<Row> {
    include_str!("simumax_b200.csv")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .skip(1)
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let number = |index: usize| cells[index].parse::<f64>().expect("a number");
            let (tp, pp, cp, ep) = (cells[5], cells[6], cells[7], cells[8]);
            Row {
                id: cells[0].to_owned(),
                model: cut(cells[1], number(2) as usize),
                batch: Batch {
                    seq_len: number(3) as u64,
                    global_batch: number(4) as u64,
                },
                layout: format!("tp={tp},pp={pp},cp={cp},ep={ep},etp=1,vpp=1,mbs=1"),
                pp: number(6) as u32,
                mem_gib: number(9),
                step_ms: number(10),
            }
        })
        .collect()
}

fn predicted(row: &Row) -> PlannedLayout {
    let cluster = moefold_profiles::presets::cluster("dgx-b200").expect("a preset");
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut options = SearchOptions::new(row.batch, StackName::Megatron);
    options.pins = row.layout.parse().expect("degrees");
    options.recompute = Some(Recompute::None);
    options.dispatcher = Some(Dispatcher::Alltoall);
    options.overlap = Some(Overlap::default());
    // The measured runs split their layers evenly.
    let layers: Vec<u32> = (0..row.model.layers.len() as u32).collect();
    let each = layers.len() / row.pp as usize;
    let stages: Vec<Vec<u32>> = layers.chunks(each).map(<[u32]>::to_vec).collect();
    options.stages = Some(stages.into());
    let mut found =
        search::plan(&row.model, &cluster, 8, &options, &costs, &Declared).expect("fits");
    found.plans.remove(0)
}

#[test]
fn golden_memory_of_simumax_b200_runs() {
    let (mut sum, mut worst, mut distinct) = (0.0, 0.0_f64, Vec::new());
    for row in rows() {
        // Rows that only differ in the number of microbatches are one measurement.
        let key = (row.layout.clone(), row.mem_gib.to_bits());
        if distinct.contains(&key) {
            continue;
        }
        distinct.push(key);
        let plan = predicted(&row).predicted;
        // What the framework's allocator counts: without context and communicators.
        let allocated = plan.peak_gib - plan.memory_gib[TensorClass::Overhead];
        let error = allocated / row.mem_gib - 1.0;
        println!(
            "{} {}: {allocated:.2} GiB, measured {:.2} ({:+.2} %)",
            row.id,
            row.layout,
            row.mem_gib,
            100.0 * error
        );
        sum += error.abs();
        worst = worst.max(error.abs());
    }
    let mape = 100.0 * sum / distinct.len() as f64;
    println!(
        "{} layouts: MAPE {mape:.2} %, worst {:.2} %",
        distinct.len(),
        100.0 * worst
    );
    assert!(mape <= 0.5, "{mape}");
    assert!(worst <= 0.015, "{worst}");
}

/// Eight GPUs of one node and no network: what is compared is mostly products and their tails. Too
/// fast throughout: the shipped tables time kernels alone, on a cooler device than one in training.
#[test]
fn time_of_simumax_b200_runs_is_ranked_as_measured() {
    let mut pairs = Vec::new();
    let mut errors = 0.0;
    for row in rows() {
        let ms = 1e3 * predicted(&row).predicted.step_s;
        println!("{} {ms:.0} ms, measured {:.0}", row.id, row.step_ms);
        errors += (ms / row.step_ms - 1.0).abs();
        pairs.push((ms, row.step_ms));
    }
    let correlation = rank_correlation(&pairs);
    let mape = 100.0 * errors / pairs.len() as f64;
    println!("rank correlation {correlation:.3}, MAPE {mape:.1} %");
    assert!(correlation > 0.95, "{correlation}");
    assert!(mape < 30.0, "{mape}");
}

/// A published throughput and what is predicted for its layout, TFLOP/s a GPU.
struct Throughput {
    id: String,
    /// Rows that can be compared with each other: same model, system and source.
    group: String,
    measured: f64,
    predicted: f64,
}

/// `auto`, `none` or modules with a plus between them.
fn recompute(words: &str) -> Option<Recompute> {
    let module = |word: &str| {
        let named = |module: &Module| module.name() == word;
        Module::ALL.into_iter().find(named).expect("a module")
    };
    match words {
        "auto" => None,
        "none" => Some(Recompute::None),
        _ => Some(Recompute::of(words.split('+').map(module).collect())),
    }
}

fn throughputs() -> Vec<Throughput> {
    include_str!("published_layouts.csv")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .skip(1)
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let number = |index: usize| cells[index].parse::<u64>().expect("a number");
            let batch = Batch {
                seq_len: number(4),
                global_batch: number(5),
            };
            let mut layout = format!(
                "tp={},cp={},pp={},ep={},etp={},mbs=1",
                cells[6], cells[7], cells[8], cells[10], cells[11]
            );
            if cells[9] != "0" {
                layout = format!("{layout},vpp={}", cells[9]);
            }
            let mut options = SearchOptions::new(batch, StackName::Megatron);
            options.pins = layout.parse().expect("degrees");
            options.recompute = recompute(cells[12]);
            let dispatcher = |name: &&Dispatcher| name.name() == cells[13];
            options.dispatcher = Dispatcher::ALL.iter().find(dispatcher).copied();
            options.top = 1;
            if cells[0] == "mb-card-001" {
                options.stages = Some("Et|(tt|)*30mL".parse().expect("stages"));
                options.optimizer = Optimizer::AdamBf16Moments;
                options.grad_dtype = Dtype::Bf16;
            }
            let model = presets::load(cells[1]).expect("a preset");
            let cluster = moefold_profiles::presets::cluster(cells[2]).expect("a preset");
            let costs = Costs::for_cluster(&cluster, &[]);
            let gpus = number(3) as u32;
            let found = search::plan(&model, &cluster, gpus, &options, &costs, &Declared)
                .unwrap_or_else(|error| panic!("{line}: {error}"));
            let source = cells[0].split('-').next().unwrap_or_default();
            Throughput {
                id: cells[0].to_owned(),
                group: format!("{source} {} {}", cells[1], cells[2]),
                measured: cells[14].parse().expect("a number"),
                predicted: found.plans[0].predicted.model_tflops_per_gpu,
            }
        })
        .collect()
}

/// Spearman's rank correlation; equal values share their mean rank.
fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        values
            .iter()
            .map(|value| {
                let below = values.iter().filter(|other| *other < value).count();
                let same = values.iter().filter(|other| *other == value).count();
                below as f64 + (same as f64 - 1.0) / 2.0
            })
            .collect()
    };
    let a = ranks(pairs.iter().map(|pair| pair.0).collect());
    let b = ranks(pairs.iter().map(|pair| pair.1).collect());
    let mean = (pairs.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum()
    };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

#[test]
fn published_layouts_are_ranked_as_measured() {
    let rows = throughputs();
    let mut groups: BTreeMap<&str, Vec<&Throughput>> = BTreeMap::new();
    for row in &rows {
        groups.entry(&row.group).or_default().push(row);
    }
    let mut errors = 0.0;
    for (group, rows) in &groups {
        for row in rows {
            let ratio = row.predicted / row.measured;
            println!(
                "{} {:.0} TFLOP/s, measured {:.0} ({ratio:.2})",
                row.id, row.predicted, row.measured
            );
            errors += (ratio - 1.0).abs();
            // Conventions of FLOPs differ by up to 1.7 in arXiv 2504.14960; elsewhere a model
            // without fitted factors is expected within a third.
            assert!(
                row.id.starts_with("mpf") || (ratio - 1.0).abs() < 0.4,
                "{}",
                row.id
            );
        }
        let pairs: Vec<(f64, f64)> = rows.iter().map(|r| (r.predicted, r.measured)).collect();
        if pairs.len() > 2 {
            let correlation = rank_correlation(&pairs);
            println!(
                "{group}: rank correlation {correlation:.3} over {}",
                pairs.len()
            );
            assert!(correlation > 0.9, "{group}: {correlation}");
        }
    }
    println!("MAPE {:.1} %", 100.0 * errors / rows.len() as f64);
}

#[test]
fn folding_beats_its_unfolded_twin_wherever_it_was_measured_to() {
    let rows = throughputs();
    let get = |id: u32| {
        let id = format!("mpf-{id:03}");
        rows.iter().find(|row| row.id == id).expect("a row")
    };
    // Unfolded and folded runs of the same model, GPUs and batch (arXiv 2504.14960).
    let twins = [(4, 5), (9, 10), (21, 25), (22, 26), (23, 27), (24, 28)]
        .into_iter()
        .chain((37..42).map(|id| (id, id + 5)))
        .chain((82..86).map(|id| (id, id + 4)));
    for (unfolded, folded) in twins {
        let (unfolded, folded) = (get(unfolded), get(folded));
        assert!(folded.measured > unfolded.measured);
        assert!(folded.predicted > unfolded.predicted, "{}", folded.id);
    }
}
