//! Tests of what plans say of time, memory and calls.

use std::path::Path;

use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::Category;
use moefold_profiles::{Cluster, Collective, CollectiveKind, Dtype, Precision, TensorClass};

use super::{cluster, run, small};
use crate::choice::{
    CpComm, Graphs, Objective, Optimizer, Overlap, PrimaryWeights, Recompute, StackName, Zero,
};
use crate::layout::Batch;
use crate::model::{Model, presets};
use crate::options::{Effort, SearchOptions};
use crate::plan::{Plan, PlannedLayout};
use crate::search::{Asked, ENDLESS_GIB, plan, plan_briefly};
use crate::stack::megatron::Declared;

#[test]
fn law_a_breakdown_sums_to_its_step_and_memory_to_its_peak() {
    let (model, cluster, options) = small();
    for plan in run(&model, &cluster, 32, &options).plans {
        let predicted = plan.predicted;
        assert_eq!(predicted.time_s.total().0, predicted.step_s);
        for category in Category::ALL {
            assert!(predicted.time_s.get(category).0 >= 0.0, "{category:?}");
        }
        assert!((predicted.memory_gib.total() - predicted.peak_gib).abs() < 1e-9);
        let worst = predicted
            .memory_gib_by_pp_rank
            .iter()
            .copied()
            .fold(0.0, f64::max);
        assert_eq!(worst, predicted.peak_gib);
        assert!(predicted.peak_gib <= cluster.gpu.memory_gib);
        let shares = predicted.confidence;
        let sum = shares.measured + shares.interpolated + shares.extrapolated;
        assert!((sum - 1.0).abs() < 1e-9);
    }
}

/// Gradients that are reduced and weights that are gathered beside passes take 24 of 148 multiprocessors from their
/// products, which are most of what they do.
#[test]
fn law_what_hides_takes_multiprocessors() {
    let (model, _, mut options) = small();
    options.pins = "tp=1,pp=1,ep=8,etp=1,cp=1,mbs=1".parse().expect("degrees");
    let mut dp_comm_s = |overlap: Overlap| {
        options.overlap = Some(overlap);
        let found = run(&model, &cluster("dgx-b200"), 8, &options);
        found.plans[0].predicted.time_s.get(Category::DpComm).0
    };
    let apart = dp_comm_s(Overlap::default());
    let beside = dp_comm_s(Overlap {
        grad_reduce: true,
        param_gather: true,
        ..Overlap::default()
    });
    let share = beside / apart * 148.0 / 24.0;
    assert!(share > 0.5 && share < 1.0, "{beside} of {apart}: {share}");
}

/// A hundredth of spread makes the slowest of 32 GPUs take 2.1 % longer for its work, and nothing else.
#[test]
fn a_job_waits_for_its_slowest_gpu() {
    let (model, even, options) = small();
    let mut uneven = even.clone();
    uneven.gpu_speed_spread = Some(0.01);
    let time_s = |cluster: &Cluster| {
        let mut found = run(&model, cluster, 32, &options);
        found.plans.remove(0).predicted.time_s
    };
    let (even, uneven) = (time_s(&even), time_s(&uneven));
    let of = |category: Category| uneven.get(category).0 / even.get(category).0 - 1.0;
    assert!(
        (of(Category::Experts) - 0.021).abs() < 0.001,
        "{}",
        of(Category::Experts)
    );
    assert!(of(Category::TpComm).abs() < 1e-9 || even.get(Category::TpComm).0 == 0.0);
}

#[test]
fn every_preset_is_priced() {
    let cluster = cluster("dgx-b200");
    let batch = Batch {
        seq_len: 8192,
        global_batch: 1024,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    options.top = 1;
    options.pins = "cp=1,mbs=1,etp=1,vpp=1".parse().expect("degrees");
    for name in presets::names() {
        let model = presets::load(name).expect("a preset");
        let found = run(&model, &cluster, 1024, &options);
        let mfu = found.plans[0].predicted.mfu;
        // The made-up models are far too small for such a machine.
        let made_up = ["tiny", "quickstart", "bench"];
        let made_up = made_up.iter().any(|of| name.starts_with(of));
        let least = if made_up { 0.0 } else { 0.02 };
        assert!(mfu > least && mfu < 0.8, "{name}: {mfu}");
    }
}

#[test]
fn memory_as_objective_finds_less_memory() {
    let (model, cluster, mut options) = small();
    let fast = run(&model, &cluster, 16, &options);
    options.objective = Objective::Memory;
    let small = run(&model, &cluster, 16, &options);
    assert!(small.plans[0].predicted.peak_gib < fast.plans[0].predicted.peak_gib);
    assert!(small.plans[0].predicted.step_s > fast.plans[0].predicted.step_s);
}

#[test]
fn golden_mixtral_8x22b_on_128_h100_is_the_published_folding() {
    // arXiv 2504.14960, Table 3 (TP2 EP8 PP8 ETP1) and the Megatron MoE model zoo (VPP7).
    let model = presets::load("mixtral-8x22b").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    options.top = 1;
    let best = |options: &SearchOptions| {
        let mut plans = run(&model, &cluster("dgx-h100"), 128, options).plans;
        plans.remove(0)
    };
    let open = best(&options);
    // The paper cuts no sequences of 4096 tokens.
    options.pins = "cp=1".parse().expect("degrees");
    let published = best(&options);
    let layout = published.layout;
    assert_eq!(
        (layout.tp, layout.ep, layout.pp, layout.etp),
        (2, 8, 8, 1),
        "{layout:?}"
    );
    // Where they may be cut, experts and stages stay, and little is won.
    let layout = open.layout;
    assert_eq!((layout.ep, layout.pp, layout.etp), (8, 8, 1), "{layout:?}");
    let [open, published] = [open, published].map(|plan| plan.predicted.step_s);
    assert!(
        open <= published && published < 1.03 * open,
        "{open} {published}"
    );
}

#[test]
fn golden_deepseek_v3_on_1024_h100_is_folded_and_justified() {
    let model = presets::load("deepseek-v3").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 8192,
    };
    let options = SearchOptions::new(batch, StackName::Megatron);
    let cluster = cluster("dgx-h100");
    let found = run(&model, &cluster, 1024, &options);
    let best = &found.plans[0];
    let layout = best.layout;
    let experts = layout.ep * layout.etp;
    assert!(layout.ep > 1, "{layout:?}");
    // Folded: experts are laid over more ranks than the tensor group of attention.
    assert!(experts > layout.tp && layout.etp <= layout.tp, "{layout:?}");
    assert!(best.predicted.peak_gib <= cluster.gpu.memory_gib);
    let justified = found.search.inside_domain.as_ref();
    assert_eq!(justified.is_some(), experts > cluster.gpus_per_domain);
    if let Some(inside) = justified.and_then(|inside| inside.best.as_ref()) {
        assert!(inside.step_s >= best.predicted.step_s, "{inside:?}");
        assert!(inside.layout.ep * inside.layout.etp <= cluster.gpus_per_domain);
    }
    assert_eq!(found.search.optimal, found.search.gap == 0.0);
    assert!(
        (0.0..0.5).contains(&found.search.gap),
        "{}",
        found.search.gap
    );
}

/// What a profile says of the device's host reaches time and memory of the executor's plans.
#[test]
fn launches_reads_and_overhead_are_priced_as_measured() {
    use moefold_profiles::directory::{Key, OverheadBytes, Profile, Sample, Taken};
    use moefold_profiles::host::HostCost;
    use moefold_profiles::units::{Bytes, GIB};

    let batch = Batch {
        seq_len: 128,
        global_batch: 4,
    };
    let model = presets::load("quickstart").expect("a preset");
    let cluster = cluster("dgx-h200");
    let options = SearchOptions {
        pins: "mbs=1".parse().expect("degrees"),
        ..SearchOptions::new(batch, StackName::Moefold)
    };
    let overhead = OverheadBytes {
        context: Bytes(2 * GIB),
        workspaces: Bytes(GIB),
        other: Bytes(0),
        others: None,
    };
    let sample = |(cost, seconds)| Sample::of(Key::Host(cost), Taken::Repeated, vec![seconds]);
    let profile = |launch: f64, read: f64| {
        let costs = [(HostCost::Launch, launch), (HostCost::Read, read)];
        Profile {
            overhead: Some(overhead),
            ..Profile::of("h200", costs.map(sample).to_vec())
        }
    };
    let predicted = |profiles: &[Profile]| {
        let costs = Costs::for_cluster(&cluster, profiles);
        let found = plan(&model, &cluster, 1, &options, &costs, &Declared).expect("feasible");
        found.plans[0].predicted.clone()
    };
    let assumed = predicted(&[]);
    assert!((assumed.memory_gib[TensorClass::Overhead] - 600.0 / 1024.0).abs() < 1e-9);
    let fast = predicted(&[profile(1e-9, 1e-9)]);
    assert!((fast.memory_gib[TensorClass::Overhead] - 3.0).abs() < 1e-9);
    let slow = predicted(&[profile(1e-3, 1e-9)]);
    assert!(
        slow.step_s > 0.2 && slow.step_s > 5.0 * fast.step_s,
        "{} {}",
        slow.step_s,
        fast.step_s
    );
}

/// A walk adds up tensor by tensor what the memory model says at once, on every pipeline rank.
#[test]
fn law_a_walk_peaks_where_its_plan_does() {
    use moefold_profiles::units::{Bytes, GIB};

    let combined = "expert-alltoall,delay-wgrad,p2p,grad-reduce,param-gather";
    let of_module = |name: &str| match name {
        "deepseek-v3" => "attn,mlp,moe_router,moe_preprocess",
        _ => "none",
    };
    for (name, gpus, pins, offload, overlap, recompute) in [
        ("mixtral-8x7b", 16, "pp=1,ep=8", "none", combined, ""),
        ("deepseek-v3", 256, "pp=8,vpp=2,ep=16", "none", combined, ""),
        ("mixtral-8x7b", 32, "pp=4,vpp=2", "none", "", "block-2"),
        ("mixtral-8x7b", 16, "pp=1", "none", "", "block-30"),
        ("deepseek-v3", 256, "pp=8", "none", "", "block-3"),
    ]
    .into_iter()
    .chain(
        [
            ("mixtral-8x7b", 16, "pp=1", "none"),
            ("mixtral-8x7b", 32, "pp=4,vpp=2", "none"),
            ("qwen3-30b-a3b", 32, "pp=2,tp=2", "none"),
            ("deepseek-v3", 256, "pp=8", "none"),
            ("mixtral-8x7b", 16, "pp=1", "moe_act"),
            (
                "qwen3-30b-a3b",
                32,
                "pp=4",
                "core_attn,attn_proj,expert_fc1",
            ),
        ]
        .map(|(name, gpus, pins, offload)| (name, gpus, pins, offload, "", "")),
    ) {
        let model = presets::load(name).expect("a preset");
        let cluster = cluster("dgx-h200");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 512,
        };
        let options = SearchOptions {
            pins: pins.parse().expect("degrees"),
            top: 1,
            offload: Some(offload.parse().expect("modules")),
            recompute: (!recompute.is_empty()).then(|| recompute.parse().expect("a block")),
            graphs: Some(if !recompute.is_empty() {
                Graphs::NONE
            } else if overlap.is_empty() {
                of_module(name).parse().expect("graphs")
            } else {
                "attn,moe_router".parse().expect("graphs")
            }),
            overlap: (!overlap.is_empty()).then(|| overlap.parse().expect("kinds")),
            effort: Effort::Brief,
            ..SearchOptions::new(batch, StackName::Megatron)
        };
        let planned = run(&model, &cluster, gpus, &options).plans.remove(0);
        assert_eq!(planned.pipeline.schedule.combines(), !overlap.is_empty());
        assert_eq!(planned.offload.is_none(), offload == "none");
        assert_eq!(planned.predicted.host_gib > Some(0.0), offload != "none");
        let plan = Plan::of(planned, &model, &cluster, gpus, &options);
        let layout = plan.layout().expect("legal");
        let costs = Costs::for_cluster(&plan.cluster, &[]);
        let ranks_of_a_stage = gpus / layout.pp();
        let totals = &plan.planned.predicted.memory_gib_by_pp_rank;
        let mut worst = (0.0, None);
        for (pp, &total) in (0..).zip(totals) {
            let rank = pp * ranks_of_a_stage;
            let walked =
                crate::search::walk(&plan, &layout, rank, &costs, &Declared).expect("it walks");
            let bytes = walked.walk.bytes;
            assert_eq!(
                bytes.total().0 - bytes[TensorClass::Overhead].0,
                walked.walk.peak_bytes.0
            );
            // What is beside tensors is context, communicators and 5 percent of the tensors.
            let beside = Bytes((total * GIB as f64).round() as u64).0 - walked.walk.peak_bytes.0;
            assert!(beside > GIB, "{name} {pins} {pp}: {beside}");
            if total > worst.0 {
                worst = (total, Some(bytes));
            }
            assert!(walked.walk.ops > 0);
            let ratio = walked.walk.step_s / plan.planned.predicted.step_s;
            // Each collective waits for its own; the plan adds up what hides.
            assert!((ratio - 1.0).abs() < 0.1, "{name} {pins} {pp}: {ratio}");
        }
        let (bytes, gib) = (worst.1.expect("a rank"), plan.planned.predicted.memory_gib);
        for class in TensorClass::ALL {
            let (walked, planned) = (bytes[class].gib(), gib[class]);
            assert!(
                (walked - planned).abs() < 1e-6,
                "{name} {pins} {class:?}: {walked} {planned}"
            );
        }
    }
}

/// Layers that run again whole at the beginning of a stage, by hand: those behind them work while all is there, the first
/// when nothing is left but what they saved.
#[test]
fn golden_the_first_layers_run_again_when_those_behind_are_through() {
    let (mut model, mut cluster, mut options) = small();
    cluster.gpu.memory_gib = ENDLESS_GIB;
    options.top = 1;
    options.pins = "tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1".parse().expect("degrees");
    let mut passes = |layers: usize, recompute: &str| {
        model.layers.truncate(layers);
        options.recompute = Some(recompute.parse().expect("a choice"));
        let plan = run(&model, &cluster, 8, &options).plans.remove(0);
        let (memory, time) = (plan.predicted.memory_gib, plan.predicted.time_s);
        let again = time.get(Category::Recompute).0;
        let classes = [TensorClass::Activations, TensorClass::Transient];
        let [kept, working] = classes.map(|class| memory[class]);
        [kept, working, again]
    };
    let blocks: Vec<[f64; 3]> = (1..8)
        .map(|first| passes(8, &format!("block-{first}")))
        .collect();
    let (all, none) = (passes(8, "full"), passes(8, "none"));
    // What one layer less keeps tells what a layer does, and what the head does.
    let (less_all, less_none) = (passes(7, "full"), passes(7, "none"));
    let (input, kept) = (all[0] - less_all[0], none[0] - less_none[0]);
    let head = all[0] - 8.0 * input;
    let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
    assert!(input * 10.0 < kept && near(head, none[0] - 8.0 * kept) && none[2] == 0.0);
    for (first, block) in (1..8_u32).map(f64::from).zip(&blocks) {
        let behind = head + first * input + (8.0 - first) * kept + none[1];
        let at_first = first * input + all[1];
        let found = block[0] + block[1];
        assert!(near(found, behind.max(at_first)), "{first} {block:?}");
        assert!(near(block[2], all[2] * first / 8.0), "{first} {block:?}");
    }
    // The last one may keep what it computes: where all run again, it has that back while all other inputs are there.
    let peaks = |passes: &[f64; 3]| passes[0] + passes[1];
    assert!(peaks(&blocks[0]) > peaks(&blocks[5]) && near(peaks(&blocks[6]), peaks(&all)));
}

/// Ranks of the CPU that drift apart by a fifth of what they do: the step is a fifth of its passes longer,
/// whether they meet in layers or only at the end.
#[test]
fn golden_waiting_for_others_is_a_category_and_host_time_is_not_hidden() {
    use moefold_profiles::directory::{Key, Profile, Sample, Taken, Wait};
    use moefold_profiles::host::HostCost;
    use moefold_profiles::presets::{Machine, local_on};
    use moefold_profiles::units::{Bytes, GIB};

    let model = presets::load("quickstart").expect("a preset");
    let machine = Machine {
        cores: 4,
        memory: Bytes(16 * GIB),
        flops_per_cycle: 32,
    };
    let cluster = local_on(machine, 2);
    let meeting = Key::Collective(Collective {
        kind: CollectiveKind::AllReduce,
        bytes: Bytes(1),
        ranks: 2,
        ranks_per_domain: 2,
    });
    let predicted = |layout: &str, launch: f64, waited: f64| {
        let samples = vec![
            Sample {
                waits: vec![Wait::once([waited, 1.0])],
                ..Sample::of(meeting, Taken::Training, vec![1e-5])
            },
            Sample::of(Key::Host(HostCost::Launch), Taken::Training, vec![launch]),
        ];
        let profile = Profile {
            cores: 4,
            concurrent_ranks: 2,
            ..Profile::of("cpu", samples)
        };
        let batch = Batch {
            seq_len: 128,
            global_batch: 8,
        };
        let options = SearchOptions {
            precision: Precision::Fp32,
            pins: layout.parse().expect("degrees"),
            ..SearchOptions::new(batch, StackName::Moefold)
        };
        let costs = Costs::for_cluster(&cluster, &[profile]);
        let found = plan(&model, &cluster, 2, &options, &costs, &Declared).expect("feasible");
        found.plans[0].predicted.clone()
    };
    for layout in [
        "tp=2,ep=1,etp=1,mbs=2",
        "tp=1,ep=2,mbs=2",
        "tp=1,pp=1,ep=1,etp=1,mbs=2",
    ] {
        let none = predicted(layout, 1e-9, 0.0);
        let fifth = predicted(layout, 1e-9, 0.2);
        assert_eq!(none.time_s.get(Category::Waiting).0, 0.0);
        let waiting = fifth.time_s.get(Category::Waiting).0;
        let parts = |category: Category| {
            category.is_of_a_pass() && !matches!(category, Category::Waiting | Category::Host)
        };
        let passes = Category::ALL.into_iter().filter(|c| parts(*c));
        let passes: f64 = passes.map(|c| none.time_s.get(c).0).sum();
        // Embedding and head may meet nowhere beside layers that do.
        assert!(
            (0.15..0.2001).contains(&(waiting / passes)),
            "{layout}: {waiting} of {passes}"
        );
        assert!(
            (fifth.step_s - none.step_s - waiting).abs() < 1e-6,
            "{layout}"
        );
        let host = |launch| predicted(layout, launch, 0.0).time_s.get(Category::Host).0;
        assert!((host(2e-6) / host(1e-6) - 2.0).abs() < 0.02, "{layout}");
    }
}

#[test]
fn golden_calls_are_passes_of_layers_and_microbatches() {
    let (model, mut cluster, mut options) = small();
    cluster.gpu.memory_gib = 1e3;
    options.pins = "tp=2,cp=1,pp=1,ep=8,etp=1,mbs=1".parse().expect("degrees");
    options.recompute = Some(Recompute::None.into());
    let predicted = run(&model, &cluster, 16, &options)
        .plans
        .remove(0)
        .predicted;
    assert!(predicted.calls.keys().eq(predicted.busy_s.keys()));
    // Both passes of 32 layers, in each of the microbatches of 8 replicas.
    assert_eq!(predicted.calls["router"], 2.0 * 32.0 * (32.0 / 8.0));
    // Recomputed ops are called again.
    options.recompute = Some(Recompute::Full.into());
    let again = run(&model, &cluster, 16, &options)
        .plans
        .remove(0)
        .predicted;
    assert_eq!(again.calls["router"], 3.0 * 32.0 * (32.0 / 8.0));
}

/// Parameters of Mixtral 8x7B, and of a layer of it: 8 * 3 * 4096 * 14336 of experts, 2 * 4096^2 + 2 * 4096 * 1024 of
/// attention, 8 * 4096 of the router and two norms.
const MIXTRAL: [f64; 2] = [46_702_792_704.0, 1_451_270_144.0];

/// Mixtral 8x7B on 64 GPUs that hold everything and replicate all of it, which divide that in some way.
fn replicas(zero: Zero, instances: u32, overlap: Option<&str>) -> SearchOptions {
    SearchOptions {
        zero,
        instances,
        overlap: overlap.map(|words| words.parse().expect("words")),
        pins: "tp=1,cp=1,pp=1,ep=1,etp=1,mbs=1".parse().expect("degrees"),
        recompute: Some(Recompute::Full.into()),
        top: 1,
        ..SearchOptions::new(
            Batch {
                seq_len: 4096,
                global_batch: 128,
            },
            StackName::Megatron,
        )
    }
}

fn of_replicas(options: &SearchOptions) -> (Model, Cluster, PlannedLayout) {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let mut cluster = cluster("dgx-h100");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let plan = run(&model, &cluster, 64, options).plans.swap_remove(0);
    (model, cluster, plan)
}

/// A rank has so many bytes of weights, gradients and states.
fn holds(plan: &PlannedLayout, bytes: [f64; 3]) {
    let classes = [
        TensorClass::Weights,
        TensorClass::Gradients,
        TensorClass::Optimizer,
    ];
    for (class, bytes) in classes.into_iter().zip(bytes) {
        let found = plan.predicted.memory_gib[class];
        let expected = bytes / f64::from(1 << 30);
        assert!(
            (found - expected).abs() < 1e-5,
            "{class:?}: {found} {expected}"
        );
    }
}

/// Bytes by the formula: weights, gradients and states over the replicas, two of the largest units of weights and the
/// gradients of one.
#[test]
fn golden_fully_sharded_memory_and_traffic() {
    let plan = |zero, overlap| of_replicas(&replicas(zero, 1, overlap)).2;
    let (ours, whole) = (plan(Zero::Fsdp, None), plan(Zero::States, None));
    assert_eq!((ours.zero, whole.zero), (Some(Zero::Fsdp), None));
    let [all, layer] = MIXTRAL;
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    holds(&ours, [2.0, 4.0, 12.0].map(|each| each * all / 64.0));
    let memory = &ours.predicted.memory_gib;
    let more = memory[TensorClass::Transient] - whole.predicted.memory_gib[TensorClass::Transient];
    assert!((more - gib(8.0 * layer)).abs() < 1e-5, "{more}");
    assert!(whole.predicted.peak_gib > 6.0 * gib(all));
    // Two microbatches of 34 units, experts of 32 of them apart.
    let calls = &ours.predicted.calls;
    assert_eq!(calls["all_gather"], 2.0 * 2.0 * (34.0 + 32.0));
    assert_eq!(calls["reduce_scatter"], 2.0 * (34.0 + 32.0));
    // What nothing hides is all of it, in every microbatch.
    let apart = plan(Zero::Fsdp, Some("none"));
    let busy = &apart.predicted.busy_s;
    let dp_comm = apart.predicted.time_s.get(Category::DpComm).0;
    let expected = busy["all_gather"] + busy["reduce_scatter"];
    assert!(
        (dp_comm / expected - 1.0).abs() < 1e-6,
        "{dp_comm} of {expected}"
    );
    assert!(ours.predicted.time_s.get(Category::DpComm).0 < 0.7 * dp_comm);
    // Of gradients alone all weights rest whole, and a thousand million gradients until they are reduced.
    let ours = plan(Zero::Gradients, None);
    holds(&ours, [2.0 * all, 4.0 * all / 64.0, 12.0 * all / 64.0]);
    let memory = &ours.predicted.memory_gib;
    let more = memory[TensorClass::Transient] - whole.predicted.memory_gib[TensorClass::Transient];
    assert!((more - gib(4e9)).abs() < 1e-5, "{more}");
    // Buckets of 64 million at least: of dense parameters both ends and two layers each, of experts a layer. They are
    // gathered once, and reduced in both microbatches.
    let (calls, buckets) = (&ours.predicted.calls, 18.0 + 32.0);
    assert_eq!(
        [calls["all_gather"], calls["reduce_scatter"]],
        [buckets, 2.0 * buckets]
    );
    let apart = plan(Zero::Gradients, Some("grad-reduce"));
    let gathered = apart.predicted.busy_s["all_gather"];
    let dp_comm = apart.predicted.time_s.get(Category::DpComm).0;
    assert!(dp_comm >= gathered, "{dp_comm} of {gathered}");
    assert!(ours.predicted.time_s.get(Category::DpComm).0 < dp_comm);
    assert!(ours.predicted.step_s < apart.predicted.step_s);
}

/// PyTorch's FSDP2 has narrow gradients, those of the layer that runs twice, and copies what it gathers and reduces.
#[test]
fn golden_fsdp2_copies_what_it_gathers_and_reduces() {
    let options = SearchOptions {
        grad_dtype: Dtype::Bf16,
        ..replicas(Zero::Fsdp2, 1, None)
    };
    let (_, _, ours) = of_replicas(&options);
    let [fsdp, whole] =
        [Zero::Fsdp, Zero::States].map(|zero| of_replicas(&replicas(zero, 1, None)).2);
    let [all, layer] = MIXTRAL;
    holds(&ours, [2.0, 2.0, 12.0].map(|each| each * all / 64.0));
    let [ours_gib, whole_gib] =
        [&ours, &whole].map(|plan| plan.predicted.memory_gib[TensorClass::Transient]);
    let expected = (2.0 + 2.0 + 2.0 * 2.0) * layer / f64::from(1 << 30);
    let more = ours_gib - whole_gib;
    assert!((more - expected).abs() < 1e-5, "{more} {expected}");
    let calls = &ours.predicted.calls;
    assert_eq!(calls["all_gather"], 2.0 * 2.0 * (34.0 + 32.0));
    assert_eq!(calls["reduce_scatter"], 2.0 * (34.0 + 32.0));
    // Of each unit two copies of weights and one of gradients a microbatch; one of all gradients.
    let usual = fsdp.predicted.calls.get("copy").copied().unwrap_or(0.0);
    assert_eq!(calls["copy"] - usual, 2.0 * 3.0 * (34.0 + 32.0) + 1.0);
}

/// Heads are exchanged inside nodes as far as they divide, and across them keys go around; the levels of a plan are those of
/// its groups, cut one by one.
#[test]
fn levels_of_context_parallel_ranks_are_those_of_nodes() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let mut cluster = cluster("dgx-h100");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let plan = |cp_comm, cp_sizes, pins: &str| {
        let options = SearchOptions {
            cp_comm: Some(cp_comm),
            cp_sizes,
            pins: pins.parse().expect("degrees"),
            recompute: Some(Recompute::Full.into()),
            top: 1,
            ..SearchOptions::new(
                Batch {
                    seq_len: 1 << 20,
                    global_batch: 64,
                },
                StackName::Megatron,
            )
        };
        let found = run(&model, &cluster, 64, &options).plans.swap_remove(0);
        Plan::of(found, &model, &cluster, 64, &options)
    };
    let pins = |tp: u32, cp: u32| format!("tp={tp},cp={cp},pp=1,ep=8,etp=1,mbs=1");
    for ([tp, cp], sizes) in [
        ([1, 16], [8, 2]),
        ([2, 32], [4, 8]),
        ([4, 16], [2, 8]),
        ([1, 4], [4, 1]),
    ] {
        let found = plan(CpComm::Hierarchical, None, &pins(tp, cp));
        let own = found.planned.hierarchical_context_parallel_sizes;
        assert_eq!(own, Some(sizes), "{tp} {cp}");
        let layout = found.layout().expect("legal");
        let mut groups = crate::runtime::LayerGroups::new(&layout, &cluster);
        groups.cp_inside = sizes[0];
        let cut = crate::mesh::cut(&layout, crate::mesh::GroupKind::Cp, sizes[1], &cluster);
        assert_eq!(groups.cp_levels(CpComm::Hierarchical), cut, "{tp} {cp}");
        // Said, they are the same plan.
        let said = plan(CpComm::Hierarchical, own, &pins(tp, cp));
        assert_eq!(said.planned, found.planned);
        let text = serde_json::to_string(&found).expect("plain data");
        let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
        assert_eq!(read.options().cp_sizes, own);
    }
    // The ring of eight neighbours and two nodes sends all keys over the network; in levels an eighth of them.
    let step_s = |plan: &Plan| plan.planned.predicted.step_s;
    let ring = plan(CpComm::P2p, None, &pins(1, 64));
    let levels = plan(CpComm::Hierarchical, None, &pins(1, 64));
    assert!(step_s(&levels) < step_s(&ring));
    // One level alone is a ring.
    let alone = plan(CpComm::Hierarchical, Some([1, 64]), &pins(1, 64));
    assert_eq!(
        alone.planned.predicted.time_s,
        ring.planned.predicted.time_s
    );
}

/// Mixtral over 64 replicas, by hand. Dense tensors are 1 norm, 32 pairs of norms, routers, outputs (4096 x 4096) and
/// queries with keys and values (6144 x 4096), and 2 matrices of the vocabulary. Dealt over 64 there and back, the second
/// replica has a pair of norms, a 6144 x 4096 and a vocabulary: most state. The first has the last norm and two 6144 x 4096: most
/// products. Of 256 matrices of experts of either kind each has 4.
#[test]
fn golden_muon_has_one_moment_of_matrices_and_products_of_its_own() {
    let plan = |optimizer| {
        of_replicas(&SearchOptions {
            optimizer,
            ..replicas(Zero::States, 1, Some("none"))
        })
    };
    let ((_, cluster, muon), (_, _, adam)) = (plan(Optimizer::Muon), plan(Optimizer::Adam));
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let [all, _] = MIXTRAL;
    let qkv = 6144.0 * 4096.0;
    let experts = 4.0 * (28672.0 * 4096.0 + 4096.0 * 14336.0);
    let state = 8.0 * (qkv + experts) + 12.0 * (32000.0 * 4096.0 + 2.0 * 4096.0);
    holds(&muon, [2.0 * all, 4.0 * all, state]);
    let memory = &muon.predicted.memory_gib;
    // After the passes, gradients of them gone: all weights of experts, which are the larger family, and those that are sent.
    let buffers = 2.0 * (32.0 * 8.0 * 3.0 * 4096.0 * 14336.0 + experts);
    let transient = memory[TensorClass::Transient];
    assert!(transient > gib(buffers) - 1e-5, "{transient}");
    let (ours, theirs) = (&muon.predicted.calls, &adam.predicted.calls);
    assert_eq!((ours["all_reduce"], ours["all_gather"]), (2.0, 2.0));
    assert!(!ours.contains_key("reduce_scatter") && theirs["reduce_scatter"] == 2.0);
    // Three products of five iterations: of six matrices of two tensors, and of eight.
    assert_eq!(ours["gemm"] - theirs["gemm"], 15.0 * (6.0 + 8.0));
    let costs = Costs::for_cluster(&cluster, &[]);
    let iterations = |rows: u64, columns: u64| -> f64 {
        let (m, n) = (rows.min(columns), rows.max(columns));
        let product = |n, k| {
            let op = moefold_profiles::Op::Gemm {
                m,
                n,
                k,
                pass: moefold_profiles::Pass::Forward,
                dtype: Dtype::Bf16,
            };
            costs.op(&op).time.0
        };
        5.0 * (product(m, n) + product(m, m) + product(n, m))
    };
    let products = 2.0 * (iterations(4096, 4096) + 2.0 * iterations(1024, 4096))
        + 4.0 * (iterations(28672, 4096) + iterations(4096, 14336));
    let busy = muon.predicted.busy_s["gemm"] - adam.predicted.busy_s["gemm"];
    assert!((busy / products - 1.0).abs() < 1e-9, "{busy} {products}");
    let [ours, theirs] =
        [&muon, &adam].map(|plan| plan.predicted.time_s.get(Category::Optimizer).0);
    let more = (ours - theirs) / products;
    assert!((1.0..1.5).contains(&more), "{more}");
    assert_eq!(muon.overlap, Some(crate::choice::Overlap::default()));
}

/// NVIDIA's measurements on GB300 under MXFP8 (developer.nvidia.com, "Advancing Emerging Optimizers for Accelerated LLM Training
/// with NVIDIA Megatron", table 1): Kimi-K2 does 1051 model TFLOP/s a GPU with AdamW and 1029 with Muon, Qwen3-30B-A3B 713 and
/// 686. Batches are those of Megatron-Bridge's settings for these layouts (`scripts/performance/configs`), which the page does
/// not name.
#[test]
fn golden_what_muon_adds_to_published_steps() {
    let cluster = cluster("gb300-nvl72");
    for (name, gpus, global_batch, pins, published) in [
        (
            "kimi-k2-instruct",
            256,
            4096,
            "tp=1,cp=1,pp=4,vpp=4,ep=64,etp=1,mbs=1",
            1051.0 / 1029.0,
        ),
        (
            "qwen3-30b-a3b",
            8,
            512,
            "tp=1,cp=1,pp=1,ep=8,etp=1,mbs=8",
            713.0 / 686.0,
        ),
    ] {
        let model = presets::load(name).expect("a preset");
        let step_s = |optimizer| {
            let batch = Batch {
                seq_len: 4096,
                global_batch,
            };
            let options = SearchOptions {
                optimizer,
                precision: Precision::Mxfp8,
                dispatcher: Some(crate::choice::Dispatcher::Hybridep),
                pins: pins.parse().expect("degrees"),
                recompute: Some(Recompute::None.into()),
                top: 1,
                ..SearchOptions::new(batch, StackName::Megatron)
            };
            let found = run(&model, &cluster, gpus, &options);
            found.plans[0].predicted.step_s
        };
        let more = step_s(Optimizer::Muon) / step_s(Optimizer::Adam) - 1.0;
        let of_published = more / (published - 1.0);
        assert!((0.65..1.5).contains(&of_published), "{name}: {more}");
    }
}

/// Who does not say what runs beside compute has no reduction and no gather there under Muon, which the release that is
/// exported for refuses.
#[test]
fn muon_reduces_and_gathers_beside_compute_where_it_is_named() {
    let (model, cluster, options) = small();
    let plan = |overlap: Option<&str>| {
        let options = SearchOptions {
            optimizer: Optimizer::Muon,
            overlap: overlap.map(|words| words.parse().expect("words")),
            pins: "tp=1,pp=1,cp=1,ep=8".parse().expect("degrees"),
            ..options.clone()
        };
        run(&model, &cluster, 32, &options).plans.swap_remove(0)
    };
    let (unsaid, named) = (plan(None), plan(Some("grad-reduce,param-gather,p2p")));
    let overlap = unsaid.overlap.expect("said");
    assert!(!overlap.of_replicas() && overlap.p2p);
    assert!(named.predicted.step_s < unsaid.predicted.step_s);
}

/// What each of 64 GPUs has an eighth of, over eight nodes of eight.
fn over_nodes(cluster: &Cluster, kind: CollectiveKind, dtype: Dtype, elements: u64) -> f64 {
    let collective = Collective {
        kind,
        bytes: dtype.bytes(elements / 8),
        ranks: 8,
        ranks_per_domain: 1,
    };
    Costs::for_cluster(cluster, &[])
        .collective(&collective)
        .time
        .0
}

/// A plan of parts is read back and priced the same, and is not walked. What nothing hides is all of its collectives; gives that.
fn check_of_parts(options: &SearchOptions) -> (Cluster, PlannedLayout, f64) {
    let (model, cluster, ours) = of_replicas(options);
    let busy = &ours.predicted.busy_s;
    let dp_comm = ours.predicted.time_s.get(Category::DpComm).0;
    let collectives = ["all_gather", "reduce_scatter", "all_reduce"];
    let expected: f64 = collectives.iter().filter_map(|stem| busy.get(*stem)).sum();
    assert!(
        (dp_comm / expected - 1.0).abs() < 1e-6,
        "{dp_comm} of {expected}"
    );
    let planned = Plan::of(ours.clone(), &model, &cluster, 64, options);
    let text = serde_json::to_string(&planned).expect("plain data");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    let kept = (read.options().instances, read.options().zero);
    assert_eq!(kept, (options.instances, options.zero));
    let costs = Costs::for_cluster(&cluster, &[]);
    let again = crate::search::again(&read, &costs, &Declared).expect("prices");
    assert_eq!(again.predicted.step_s, ours.predicted.step_s);
    let layout = read.layout().expect("legal");
    assert!(crate::search::walk(&read, &layout, 0, &costs, &Declared).is_err());
    (cluster, ours, dp_comm)
}

/// What shows of replicas' collectives where they run beside compute.
fn beside_s(zero: Zero) -> f64 {
    let options = replicas(zero, 8, Some("grad-reduce,param-gather"));
    let (_, _, plan) = of_replicas(&options);
    plan.predicted.time_s.get(Category::DpComm).0
}

/// Replicas in eight instances, each a node: what is divided over eight ranks and gathered there, and reduced over nodes
/// once a step. Under ZeRO-1 only the states are divided so.
#[test]
fn golden_instances_of_the_optimizer_divide_inside_and_reduce_across() {
    let [all, _] = MIXTRAL;
    for (zero, whole, [gathers, reductions, buckets]) in [
        (Zero::States, 1.0, [2.0, 2.0, 2.0]),
        (Zero::Fsdp, 8.0, [4.0 * 66.0, 2.0 * 66.0, 66.0]),
    ] {
        let (cluster, ours, dp_comm) = check_of_parts(&replicas(zero, 8, Some("none")));
        let across =
            |elements| over_nodes(&cluster, CollectiveKind::AllReduce, Dtype::F32, elements);
        let (_, _, one) = of_replicas(&replicas(zero, 1, Some("none")));
        assert_eq!(
            (ours.optimizer_instances, one.optimizer_instances),
            (Some(8), None)
        );
        holds(
            &ours,
            [2.0 * all / whole, 4.0 * all / whole, 12.0 * all / 8.0],
        );
        let calls = &ours.predicted.calls;
        assert_eq!(calls["all_gather"], gathers, "{zero:?}");
        assert_eq!(calls["reduce_scatter"], reductions, "{zero:?}");
        assert_eq!(calls["all_reduce"], buckets, "{zero:?}");
        // A node's links are faster than the network from each of its GPUs.
        let busy = &ours.predicted.busy_s;
        assert!(
            busy["all_gather"] < one.predicted.busy_s["all_gather"],
            "{zero:?}"
        );
        if zero == Zero::States {
            let experts = 32 * 8 * 3 * 4096 * 14336;
            let expected = across(experts) + across(all as u64 - experts);
            let found = busy["all_reduce"];
            assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        } else {
            // Of the last unit, the embedding, each rank's eighth is reduced over nodes when all passes are over.
            let (last_s, shown_s) = (across(32_000 * 4096), beside_s(zero));
            assert!((last_s..dp_comm).contains(&shown_s), "{shown_s} {last_s}");
        }
    }
}

/// What instances divide too is scattered over them once a step, and gathered once; each rank updates a 64th.
#[test]
fn golden_states_are_divided_over_instances_too() {
    let [all, _] = MIXTRAL;
    let (cluster, ours, dp_comm) = check_of_parts(&replicas(Zero::Hybrid, 8, Some("none")));
    let (_, _, inside) = of_replicas(&replicas(Zero::Fsdp, 8, Some("none")));
    holds(&ours, [2.0 * all / 8.0, 4.0 * all / 8.0, 12.0 * all / 64.0]);
    let calls = &ours.predicted.calls;
    assert_eq!(calls["all_gather"], 5.0 * 66.0);
    assert_eq!(calls["reduce_scatter"], 3.0 * 66.0);
    assert!(!calls.contains_key("all_reduce"), "{calls:?}");
    let (experts, end) = (8 * 3 * 4096 * 14336, 32_000 * 4096);
    let dense = (all as u64 - 32 * experts - 2 * end - 4096) / 32;
    let units = [
        (end, 1.0),
        (dense, 32.0),
        (experts, 32.0),
        (end + 4096, 1.0),
    ];
    for (stem, kind, dtype) in [
        ("all_gather", CollectiveKind::AllGather, Dtype::Bf16),
        ("reduce_scatter", CollectiveKind::ReduceScatter, Dtype::F32),
    ] {
        let each =
            units.map(|(elements, count)| count * over_nodes(&cluster, kind, dtype, elements));
        let expected = inside.predicted.busy_s[stem] + each.iter().sum::<f64>();
        let found = ours.predicted.busy_s[stem];
        assert!(
            (found / expected - 1.0).abs() < 1e-9,
            "{stem} {found} {expected}"
        );
    }
    let update = |plan: &PlannedLayout| plan.predicted.busy_s["adamw"];
    assert!(update(&ours) < 0.2 * update(&inside));
    // Beside compute: what the first unit waits for and the last leaves.
    let ends = [
        (CollectiveKind::AllGather, Dtype::Bf16),
        (CollectiveKind::ReduceScatter, Dtype::F32),
    ];
    let ends_s = ends.map(|(kind, dtype)| over_nodes(&cluster, kind, dtype, end));
    let (least_s, shown_s) = (ends_s.iter().sum::<f64>(), beside_s(Zero::Hybrid));
    assert!((least_s..dp_comm).contains(&shown_s), "{shown_s} {least_s}");
}

/// More stages than layers leave the first and the last to the ends of the model, as Megatron-Core does where it
/// counts these as layers; a layout that is given may leave any stage empty.
#[test]
fn golden_stages_without_layers() {
    let model = presets::load("llama-3.1-405b").expect("a preset");
    let mut cluster = cluster("gb200-nvl72");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let batch = Batch {
        seq_len: 8192,
        global_batch: 1536,
    };
    let mut options = SearchOptions {
        precision: Precision::Mxfp8,
        pins: "tp=4,cp=1,pp=16,vpp=8,mbs=1".parse().expect("degrees"),
        recompute: Some(Recompute::None.into()),
        grad_dtype: Dtype::Bf16,
        ..SearchOptions::new(batch, StackName::Megatron)
    };
    let found = run(&model, &cluster, 256, &options).plans.remove(0);
    let sizes: Vec<usize> = found.pipeline.stages.iter().map(Vec::len).collect();
    let mut expected = vec![1; 128];
    (expected[0], expected[127]) = (0, 0);
    assert_eq!(sizes, expected);
    // Without pins too: stages of the given layout are divided among ranks.
    options.pins = "tp=4,cp=1,pp=16,mbs=1".parse().expect("degrees");
    options.stages = Some("E|(t|)*126L".parse().expect("a layout"));
    let given = run(&model, &cluster, 256, &options).plans.remove(0);
    assert_eq!(given.pipeline.stages, found.pipeline.stages);
    assert_eq!(given.predicted.step_s, found.predicted.step_s);
    // Stages that do nothing are as good as none, but for messages.
    options.stages = Some("E|(t|)*126(|)*16L".parse().expect("a layout"));
    let empty = run(&model, &cluster, 256, &options).plans.remove(0);
    assert_eq!((empty.layout.vpp, empty.pipeline.stages.len()), (9, 144));
    assert!(empty.predicted.step_s > found.predicted.step_s);
    let plan = Plan::of(empty, &model, &cluster, 256, &options);
    let text = serde_json::to_string(&plan).expect("plain data");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    assert_eq!(read.layout().expect("legal").stages(), 144);
}

/// Embedding and head, 129280 x 7168 each and in a pipeline one more for the depth behind the head, stay in bf16: a copy in
/// FP8 costs 2.0625 bytes of each weight beside them, and FP8 primary weights save 2 of each.
#[test]
fn golden_matrices_of_a_vocabulary_are_not_quantized() {
    let model = presets::load("deepseek-v3").expect("a preset");
    let mut cluster = cluster("gb200-nvl72");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let weights_gib = |precision, primary_weights| {
        let options = SearchOptions {
            precision,
            primary_weights,
            pins: "tp=1,cp=1,pp=1,ep=64,etp=1,mbs=1".parse().expect("degrees"),
            recompute: Some(Recompute::Full.into()),
            top: 1,
            ..SearchOptions::new(
                Batch {
                    seq_len: 4096,
                    global_batch: 64,
                },
                StackName::Megatron,
            )
        };
        let found = run(&model, &cluster, 64, &options).plans.swap_remove(0);
        found.predicted.memory_gib[TensorClass::Weights]
    };
    let wide = weights_gib(Precision::Bf16, PrimaryWeights::Wide);
    // Routers of 59 layers; norms of 62, and of the end and the depth; an embedding and a head.
    let others = 59 * 256 * 7168 + (2 * 62 + 1 + 3) * 7168;
    let ends = 2.0 * f64::from(2 * 129_280 * 7168 + others) / f64::from(1 << 30);
    let copies = weights_gib(Precision::Mxfp8, PrimaryWeights::Wide);
    let expected = wide + (wide - ends) / 2.0 * 2.0625;
    assert!((copies - expected).abs() < 1e-5, "{copies} {expected}");
    let narrow = weights_gib(Precision::Mxfp8, PrimaryWeights::Fp8);
    let expected = ends + (wide - ends) / 2.0 * 2.0625;
    assert!((narrow - expected).abs() < 1e-5, "{narrow} {expected}");
}

/// About 7 GB for DeepSeek-V3 on GB200 with attention, router and preprocessing as graphs (arXiv 2603.07685, the section
/// on CUDA graphs), and above 10 GB where pipelines are deep (Megatron-Bridge, `docs/training/cuda-graphs.md`).
#[test]
fn golden_memory_of_graphs_of_deepseek_v3() {
    let model = presets::load("deepseek-v3").expect("a preset");
    let mut cluster = cluster("gb200-nvl72");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let peak_gib = |graphs: &str, pins: &str| {
        let options = SearchOptions {
            precision: Precision::Mxfp8,
            pins: pins.parse().expect("degrees"),
            dispatcher: Some(crate::choice::Dispatcher::Hybridep),
            recompute: Some(Recompute::None.into()),
            graphs: Some(graphs.parse().expect("graphs")),
            top: 1,
            ..SearchOptions::new(
                Batch {
                    seq_len: 4096,
                    global_batch: 4096,
                },
                StackName::Megatron,
            )
        };
        let costs = Costs::for_cluster(&cluster, &[]);
        let asked = Asked::new(&model, &cluster, 256, &options, &costs, &Declared);
        // Of the same stages.
        let found = plan_briefly(&asked).expect("feasible").plans.remove(0);
        (found.predicted.peak_gib, found.predicted.step_s)
    };
    let published = "tp=1,cp=1,pp=4,vpp=4,ep=64,etp=1,mbs=1";
    let modules = "attn,moe_router,moe_preprocess";
    let ((none, slow), (some, fast)) = (peak_gib("none", published), peak_gib(modules, published));
    let more_gb = (some - none) * 1.073_741_824;
    assert!((5.0..9.0).contains(&more_gb), "{more_gb}");
    assert!(fast < slow, "{fast} {slow}");
    // Each set takes no less than one that it has all of, and none is free.
    let sets = ["none", "moe_router", "moe_router,moe_preprocess", modules];
    let peaks = sets.map(|graphs| peak_gib(graphs, published).0);
    assert!(peaks.windows(2).all(|pair| pair[0] <= pair[1]), "{peaks:?}");
    assert!(peaks[0] < peaks[1] && peaks[2] < peaks[3], "{peaks:?}");
    // Without a pipeline one graph serves all microbatches.
    let alone = "tp=1,cp=1,pp=1,ep=64,etp=1,mbs=1";
    let more = |pins| peak_gib(modules, pins).0 - peak_gib("none", pins).0;
    let [deep, alone] = [published, alone].map(more);
    assert!(alone < deep, "{alone} {deep}");
    assert!(peak_gib("full_iteration", published).0 > none);
}
