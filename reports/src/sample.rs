//! Plans and runs for tests: made up, in realistic proportions, the same every time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moefold_planner::answer::{Answer, Candidate, SearchRecord, Survey, SurveyCell};
use moefold_planner::choice::{
    Dispatcher, Objective, Offload, Optimizer, Recompute, RecomputePlan, ScheduleName, StackName,
};
use moefold_planner::layout::Batch;
use moefold_planner::model::{Model, presets as models};
use moefold_planner::plan::{
    Alternative, Confidence, LayoutRecord, PLAN_VERSION, Pipeline, Plan, PlannedLayout, Predicted,
    ProfileUsed, Request,
};
use moefold_profiles::run::{RUN_VERSION, RankPeak, RunSummary, StepRecord};
use moefold_profiles::trace::TimeByCategory;
use moefold_profiles::units::{Bytes, GIB, Seconds};
use moefold_profiles::{ByClass, Category, Cluster, Precision, TensorClass, presets as clusters};

/// The degrees of a layout, the rest derived for a number of GPUs and sequences.
pub(crate) fn layout(gpus: u32, batch: u32, [tp, pp, vpp, ep, etp]: [u32; 5]) -> LayoutRecord {
    let dp = gpus / (tp * pp);
    LayoutRecord {
        tp,
        cp: 1,
        dp,
        pp,
        vpp,
        ep,
        etp,
        edp: gpus / (ep * etp * pp),
        mbs: 1,
        microbatches: batch / dp,
    }
}

/// A plan for 128 H100; `slow` stretches its time, `full` its memory.
pub(crate) fn planned(layout: LayoutRecord, slow: f64, full: f64) -> PlannedLayout {
    let mut time_s = TimeByCategory::default();
    for (category, seconds) in [
        (Category::Attention, 1.9),
        (Category::Experts, 4.1),
        (Category::Dense, 0.35),
        (Category::RouterPermute, 0.42),
        (Category::TpComm, 0.4 * f64::from(layout.tp - 1)),
        (Category::EpComm, 0.9 * slow),
        (Category::PpComm, 0.08 * f64::from(layout.pp - 1).sqrt()),
        (Category::DpComm, 0.3),
        (
            Category::Bubble,
            0.9 * f64::from(layout.pp - 1) / f64::from(layout.vpp * 4),
        ),
        (Category::Optimizer, 0.11),
        (Category::Host, 0.05),
    ] {
        time_s.add(category, Seconds(seconds * slow.sqrt()));
    }
    let step_s = time_s.total().0;
    let memory_gib = by_class([5.6, 11.2, 8.4, 28.0 * full, 1.8, 1.1, 4.0]);
    let peak_gib = memory_gib.total();
    let tokens = 256.0 * 4096.0;
    PlannedLayout {
        layout,
        pipeline: Pipeline {
            schedule: ScheduleName::of(layout.pp, layout.vpp),
            stages: even_stages(56, layout.pp * layout.vpp),
        },
        dispatcher: Dispatcher::Alltoall,
        cp_comm_type: None,
        hierarchical_context_parallel_sizes: None,
        rank_order: None,
        capacity: None,
        recompute: RecomputePlan::default(),
        offload: Offload::NONE,
        precision: Precision::Bf16,
        optimizer: Optimizer::Adam,
        grad_dtype: None,
        masters: None,
        primary_weights: None,
        optimizer_offload_fraction: None,
        zero: None,
        overlap: None,
        cuda_graph: None,
        fp8_attention: None,
        optimizer_instances: None,
        bucket_elements: None,
        stack: StackName::Megatron,
        predicted: Predicted {
            step_s,
            step_s_low: Some(0.9 * step_s),
            step_s_high: Some(1.5 * step_s),
            tokens_per_s_per_gpu: tokens / step_s / 128.0,
            model_tflops_per_gpu: 2400.0 / step_s,
            mfu: 2.4 / step_s,
            peak_gib,
            memory_gib,
            host_gib: None,
            memory_gib_by_pp_rank: (0..layout.pp)
                .map(|rank| peak_gib - 1.7 * f64::from(rank))
                .collect(),
            memory_classes_gib_by_pp_rank: Vec::new(),
            time_s,
            critical_pp_rank: None,
            busy_s: BTreeMap::new(),
            calls: BTreeMap::new(),
            confidence: Confidence {
                measured: 0.21,
                interpolated: 0.48,
                extrapolated: 0.31,
            },
            routing: None,
        },
    }
}

/// GiB in the order of the classes.
fn by_class(gib: [f64; TensorClass::ALL.len()]) -> ByClass<f64> {
    ByClass::from_fn(|class| gib[class as usize])
}

/// Layers dealt to stages as evenly as they go.
fn even_stages(layers: u32, stages: u32) -> Vec<Vec<u32>> {
    let first = |stage: u32| stage * layers / stages;
    (0..stages)
        .map(|stage| (first(stage)..first(stage + 1)).collect())
        .collect()
}

fn mixtral() -> Model {
    models::load("mixtral-8x22b").expect("a preset")
}

fn h100() -> Cluster {
    clusters::cluster("dgx-h100").expect("a preset")
}

fn request(gpus: u32) -> Request {
    Request {
        gpus,
        batch: Batch {
            seq_len: 4096,
            global_batch: 256,
        },
        objective: Objective::Throughput,
        memory_headroom: None,
    }
}

/// What a search over 128 H100 might answer, with `count` plans.
pub(crate) fn answer(count: usize) -> Answer {
    let degrees = [
        [2, 4, 7, 8, 1],
        [2, 8, 1, 8, 1],
        [4, 4, 2, 8, 1],
        [1, 8, 7, 8, 1],
        [8, 2, 1, 4, 2],
        [2, 16, 1, 4, 1],
    ];
    let plans: Vec<PlannedLayout> = (0..count)
        .map(|i| {
            let slow = 1.0 + 0.11 * i as f64;
            let full = 1.15 - 0.4 * (i as f64 * 1.7).sin().abs();
            planned(layout(128, 256, degrees[i % degrees.len()]), slow, full)
        })
        .collect();
    let feasible = (0..160)
        .map(|i| {
            let spread = f64::from(i) * 0.618_034 % 1.0;
            let other = f64::from(i) * 0.414_214 % 1.0;
            Candidate {
                schedule: None,
                rank_order: None,
                cp_comm_type: None,
                cuda_graph: None,
                layout: layout(128, 256, degrees[i as usize % degrees.len()]),
                recompute: Recompute::Full.into(),
                step_s: 9.5 + 9.0 * spread * (0.35 + other),
                peak_gib: 30.0 + 48.0 * other * (1.0 - 0.5 * spread),
            }
        })
        .collect();
    Answer {
        plans,
        sizes: Vec::new(),
        lengths: Vec::new(),
        experts: None,
        search: SearchRecord {
            unseen: None,
            told_apart: Some(0.06),
            memory_limit_gib: None,
            not_searched: Vec::new(),
            offloaded_together: Vec::new(),
            space: 18_432,
            refused: [
                ("memory", 9_120),
                ("heads % tp", 2_048),
                ("layers % pp", 4_096),
            ]
            .map(|(reason, n)| (reason.to_owned(), n))
            .into(),
            pruned: 2_600,
            priced: 568,
            elapsed_s: 1.84,
            optimal: true,
            gap: 0.0,
            gap_of_others: None,
            feasible,
            survey: Some(survey()),
            inside_domain: None,
        },
        why: None,
        model: Some(mixtral()),
        cluster: Some(h100()),
        request: Some(request(128)),
        profiles: vec![ProfileUsed {
            name: "h100-published".to_owned(),
            hash: "7c1d".to_owned(),
            pace_s: None,
        }],
    }
}

/// A cloud that thins out towards fast and small layouts.
fn survey() -> Survey {
    let cells: Vec<SurveyCell> = (8..Survey::CELLS)
        .flat_map(|column| (1..Survey::CELLS).map(move |row| (column, row)))
        .filter(|(column, row)| row <= column && (column * 7 + row * 5) % 3 > 0)
        .map(|(column, row)| SurveyCell(column, row, 1 + (column - row) * (column - row) / 40))
        .collect();
    let fitting = cells.iter().map(|cell| u64::from(cell.2)).sum();
    Survey {
        layouts: fitting + 1_200,
        fitting,
        capacity_gib: 79.6,
        fastest_s: 9.4,
        cells,
    }
}

/// A small CPU plan of four ranks, as the quickstart makes; the step takes `step_s`.
pub(crate) fn cpu_plan(degrees: [u32; 5], step_s: f64) -> Plan {
    let layout = layout(4, 8, degrees);
    let mut planned = planned(layout, 1.0, 1.0);
    let scale = step_s / planned.predicted.step_s;
    let p = &mut planned.predicted;
    p.time_s = p.time_s.scaled(scale);
    p.step_s = step_s;
    p.tokens_per_s_per_gpu = 2048.0 / step_s / 4.0;
    p.memory_gib = by_class([0.031, 0.031, 0.048, 0.094, 0.012, 0.017, 0.0]);
    p.peak_gib = p.memory_gib.total();
    p.memory_gib_by_pp_rank = vec![p.peak_gib; layout.pp as usize];
    p.busy_s = busy(step_s, |_| 1.0);
    p.calls = calls(&p.busy_s);
    let layers = mixtral().layers.len() as u32;
    planned.pipeline.stages = vec![(0..layers).collect()];
    planned.stack = StackName::Moefold;
    planned.precision = Precision::Fp32;
    Plan {
        version: PLAN_VERSION,
        planned,
        model: mixtral(),
        cluster: clusters::local(4),
        request: Request {
            gpus: 4,
            batch: Batch {
                seq_len: 256,
                global_batch: 8,
            },
            objective: Objective::Throughput,
            memory_headroom: None,
        },
        profiles: Vec::new(),
        alternatives: vec![Alternative {
            schedule: None,
            rank_order: None,
            cp_comm_type: None,
            cuda_graph: None,
            layout: self::layout(4, 8, [1, 1, 1, 2, 1]),
            recompute: RecomputePlan::default(),
            step_s: 1.2 * step_s,
            peak_gib: 0.2,
            why: "ep_comm +0.1 s".to_owned(),
        }],
    }
}

/// Eight calls of each, but one of the optimizer.
fn calls(busy: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let times = |stem: &str| if stem == "adamw" { 1.0 } else { 8.0 };
    let stems = busy.keys();
    stems.map(|stem| (stem.clone(), times(stem))).collect()
}

fn busy(step_s: f64, factor: impl Fn(usize) -> f64) -> BTreeMap<String, f64> {
    [
        ("grouped_gemm", 0.41),
        ("gemm", 0.22),
        ("attention", 0.11),
        ("all_to_all", 0.06),
        ("cross_entropy", 0.04),
        ("adamw", 0.03),
        ("reduce_scatter", 0.022),
        ("all_gather", 0.018),
        ("permute", 0.016),
        ("swiglu", 0.012),
        ("rms_norm", 0.009),
        ("rope", 0.003),
        ("router", 0.0009),
    ]
    .iter()
    .enumerate()
    .map(|(i, &(name, share))| (name.to_owned(), share * step_s * factor(i)))
    .collect()
}

/// Writes a run directory of a CPU plan whose measured step is `measured` times the predicted.
pub(crate) fn write_run(dir: &Path, plan: &Plan, measured: f64, steps: u64) -> PathBuf {
    let predicted = &plan.planned.predicted;
    let step_s = predicted.step_s * measured;
    let mut lines = String::new();
    for step in 0..steps {
        let x = step as f64;
        let noise = (x * 12.9898).sin() * 0.5;
        let record = StepRecord {
            step,
            loss: 2.6 + 6.4 * (-x / 14.0).exp() + 0.08 * noise,
            mtp_losses: Vec::new(),
            aux_loss: 0.01,
            z_loss: 0.0,
            grad_norm: 0.8 + 3.0 * (-x / 6.0).exp() + 0.2 * noise.abs(),
            lr: 1e-3,
            step_s: step_s * (1.0 + 0.08 * noise + if step < 2 { 0.5 } else { 0.0 }),
            tokens_per_s: 2048.0 / step_s,
            peak_bytes: Bytes(GIB / 4),
            expert_load: vec![vec![10, 30, 20, 20], vec![20; 4]],
            correction_bias: None,
            fullest: None,
            dropped: 0,
            dropped_by_layer: Vec::new(),
            validation: None,
        };
        lines.push_str(&serde_json::to_string(&record).expect("serializes"));
        lines.push('\n');
    }
    let peak_by_rank = (0..4)
        .map(|rank| {
            let bytes = |gib: f64| Bytes((gib * GIB as f64) as u64);
            let m = &predicted.memory_gib;
            RankPeak {
                rank,
                pp_rank: 0,
                reserved: Bytes(GIB / 2),
                reached: Bytes(GIB / 2),
                growths: 0,
                resident: Bytes(3 * GIB / 4),
                host_bytes: None,
                bytes: ByClass::from_fn(|class| match class {
                    TensorClass::Activations => bytes(m[class] * (0.92 + 0.05 * f64::from(rank))),
                    TensorClass::Transient => bytes(m[class] * 1.4),
                    TensorClass::Overhead => Bytes::ZERO,
                    _ => bytes(m[class]),
                }),
            }
        })
        .collect();
    let busy_s = busy(predicted.step_s, |i| measured * (0.75 + 0.06 * i as f64));
    let summary = RunSummary {
        version: RUN_VERSION,
        steps,
        warmup_steps: 2.min(steps),
        step_s,
        tokens_per_s: 2048.0 / step_s,
        time_s: predicted.time_s.scaled(measured),
        hidden_s: BTreeMap::new(),
        calls: calls(&busy_s),
        busy_s,
        host_reads: BTreeMap::new(),
        peak_by_rank,
        final_loss: 2.6,
        validation: None,
        host: None,
    };
    std::fs::create_dir_all(dir).expect("a directory");
    let write = |name: &str, text: String| std::fs::write(dir.join(name), text).expect("written");
    write("plan.json", json(plan));
    write("steps.jsonl", lines);
    write("summary.json", json(&summary));
    write("env.json", r#"{"device": "cpu", "cores": 2}"#.to_owned());
    dir.to_owned()
}

/// Writes a value as JSON and gives the path.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> PathBuf {
    std::fs::write(path, json(value)).expect("written");
    path.to_owned()
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).expect("serializes")
}
