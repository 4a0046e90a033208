//! Tests of what is assumed and answered; whether a trace is the step is in `tests/truth/peak.rs`.

use std::collections::BTreeMap;

use moefold_kernels::meta::Choices;
use moefold_planner::choice::{
    Dispatcher, Overlap, Recompute, RecomputePlan, ScheduleName, StackName, Zero,
};
use moefold_planner::layout::{Batch, PartialDegrees};
use moefold_planner::mesh;
use moefold_planner::model::{Mixer, Model, presets};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::{Plan, PlannedLayout};
use moefold_planner::rules;
use moefold_planner::runtime::Runtime;
use moefold_planner::search;
use moefold_planner::stack::megatron::Declared;
use moefold_planner::walk::Walked;
use moefold_profiles::directory::{Key, Profile, Sample, Taken};
use moefold_profiles::host::HostCost;
use moefold_profiles::trace::{Category, Lane, TraceSpan};
use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{
    Cluster, CollectiveKind, Costs, Precision, TensorClass, presets as clusters,
};

use super::peers::Crowd;
use super::{Assumed, Traced, dry_run};
use crate::data::Packing;
use crate::moe::balance::Balancing;

#[test]
fn law_members_send_what_the_load_says() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 64,
    };
    let pins = PartialDegrees::default();
    let judge = rules::Rules::new(&model, &batch);
    let all = rules::space(&model, 16, &batch, &pins);
    let layouts = all.filter_map(|degrees| judge.layout(&degrees).ok());
    let mut seen = 0;
    for layout in layouts.filter(|layout| layout.pp() == 1 && layout.cp() == 1) {
        let (ep, etp) = (layout.ep() as usize, layout.etp() as usize);
        for (load, tokens) in [(1.0, 64), (1.0, 7), (1.7, 64), (100.0, 9)] {
            for rank in [0, 5, 15] {
                let at = mesh::coordinates(&layout, rank);
                let crowd = Crowd::new(&layout, &at, Assumed::Load(load));
                let choices = Choices {
                    tokens,
                    slots: 2,
                    experts: 8,
                };
                let held = 8 / ep;
                let mine = at.ep as usize * held..(at.ep as usize + 1) * held;
                let sent: Vec<_> = (0..ep * etp).map(|m| crowd.sent(choices, m)).collect();
                for rows in &sent {
                    assert_eq!(rows.iter().sum::<usize>(), 2 * tokens, "{layout:?}");
                }
                let here: usize = sent.iter().flat_map(|rows| &rows[mine.clone()]).sum();
                let all = ((2 * tokens * etp) as f64 * load).round() as usize;
                assert_eq!(here, all.min(2 * tokens * ep * etp), "{layout:?} {load}");
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

/// A read of the counts for every routed layer and microbatch, where experts are on several ranks.
#[test]
fn waits_of_the_host_are_priced() {
    let batch = Batch {
        seq_len: 128,
        global_batch: 4,
    };
    let model = presets::load("quickstart").expect("a preset");
    let cluster = clusters::cluster("dgx-h200").expect("a preset");
    let step_s = |gpus: u32, read: f64| {
        let options = SearchOptions {
            pins: format!("tp=1,pp=1,ep={gpus},mbs=1")
                .parse()
                .expect("degrees"),
            ..SearchOptions::new(batch, StackName::Moefold)
        };
        let costs = [(HostCost::Launch, 1e-9), (HostCost::Read, read)];
        let sample = |(cost, seconds)| Sample::of(Key::Host(cost), Taken::Repeated, vec![seconds]);
        let profile = Profile::of("h200", costs.map(sample).to_vec());
        let costs = Costs::for_cluster(&cluster, &[profile]);
        let runtime = Traced::new(&model, &cluster);
        let found = search::plan(&model, &cluster, gpus, &options, &costs, &runtime);
        found.expect("feasible").plans[0].predicted.step_s
    };
    let layers = model.num_moe_layers() as f64;
    for (gpus, microbatches) in [(1, 0.0), (2, 2.0)] {
        let more = step_s(gpus, 1e-3) - step_s(gpus, 1e-9);
        let expected = microbatches * layers * 1e-3;
        assert!((more - expected).abs() < 1e-4, "{gpus} ranks: {more}");
    }
}

/// Nodes of H100s on which everything fits.
fn endless() -> Cluster {
    let mut cluster = clusters::cluster("dgx-h100").expect("a preset");
    cluster.gpu.memory_gib = search::ENDLESS_GIB;
    cluster
}

/// The best plan in bf16 without recomputation, and the step of its rank 3.
fn planned_and_walked(
    traced: &Traced<'_>,
    (model, cluster, gpus): (&Model, &Cluster, u32),
    options: SearchOptions,
) -> (PlannedLayout, Walked) {
    let options = SearchOptions {
        precision: Precision::Bf16,
        recompute: Some(Recompute::None.into()),
        ..options
    };
    let costs = Costs::for_cluster(cluster, &[]);
    let runtime: &dyn Runtime = match options.stack {
        StackName::Moefold => traced,
        StackName::Megatron => &Declared,
    };
    let found = search::plan(model, cluster, gpus, &options, &costs, runtime);
    let planned = found.expect("feasible").plans.swap_remove(0);
    let plan = Plan::of(planned, model, cluster, gpus, &options);
    let walked = match options.stack {
        StackName::Moefold => {
            let (balancing, packing) = (Balancing::default(), Packing::default());
            dry_run(&plan, 3, balancing, packing, &costs, &[]).expect("it walks")
        }
        StackName::Megatron => {
            let layout = plan.layout().expect("legal");
            search::walk(&plan, &layout, 3, &costs, &Declared).expect("it walks")
        }
    };
    (plan.planned, walked)
}

/// What a search says that the shared expert hides is hidden where the step is walked, under either stack.
#[test]
fn law_a_walk_hides_dispatch_as_its_plan_does() {
    let model = presets::load("deepseek-v2-lite").expect("a preset");
    let cluster = endless();
    let traced = Traced::new(&model, &cluster);
    let batch = Batch {
        seq_len: 4096,
        global_batch: 128,
    };
    let walked = |stack: StackName, pins: &str, shared_expert: bool| {
        let unsaid = Overlap::unsaid(stack, cluster.gpu.is_cpu());
        let options = SearchOptions {
            pins: pins.parse().expect("degrees"),
            dispatcher: Some(Dispatcher::Alltoall),
            overlap: Some(Overlap {
                shared_expert,
                ..unsaid
            }),
            ..SearchOptions::new(batch, stack)
        };
        let (planned, walked) = planned_and_walked(&traced, (&model, &cluster, 32), options);
        assert_eq!(planned.overlap.is_some(), shared_expert);
        let sent_s = planned.predicted.time_s.get(Category::EpComm).0;
        (planned.predicted.step_s, sent_s, walked)
    };
    // Ranks of one node hide all of it that they can, those of several have more to hide.
    for (stack, pins) in [
        (StackName::Moefold, "tp=1,pp=1,ep=8,etp=1,mbs=1"),
        (StackName::Moefold, "tp=2,pp=1,ep=32,etp=1,mbs=1"),
        // Enough work that the host, which launches every expert's, does not decide.
        (StackName::Megatron, "tp=1,pp=1,ep=8,etp=1,mbs=4"),
    ] {
        let (apart_s, all_s, apart) = walked(stack, pins, false);
        let (beside_s, left_s, beside) = walked(stack, pins, true);
        let said = apart_s - beside_s;
        let saved = apart.walk.step_s - beside.walk.step_s;
        assert!(
            said > 0.0 && left_s < all_s,
            "{stack:?} {pins}: {said} {left_s} {all_s}"
        );
        assert!(
            (saved / said - 1.0).abs() < 0.15,
            "{stack:?} {pins}: {saved} where the plan says {said}"
        );
        // Ops run while tokens are sent.
        let spans = &beside.trace.spans;
        let sent = spans
            .iter()
            .filter(|span| span.category == Category::EpComm);
        let of_ops: Vec<_> = spans
            .iter()
            .filter(|span| span.lane == Lane::Compute && span.category == Category::Dense)
            .collect();
        let under = sent.filter(|sent| {
            let inside = |op: &&TraceSpan| op.start >= sent.start && op.start < sent.end;
            of_ops.iter().any(inside)
        });
        assert!(under.count() > 20, "{stack:?} {pins}");
    }
}

/// What a search says that combined passes hide is hidden where the step is walked, under either stack.
#[test]
fn law_a_walk_hides_exchanges_under_other_passes_as_its_plan_does() {
    let model = presets::load("qwen3-30b-a3b").expect("a preset");
    let cluster = endless();
    let traced = Traced::new(&model, &cluster);
    let batch = Batch {
        seq_len: 4096,
        global_batch: 512,
    };
    let walked = |stack: StackName, pins: &str, kinds: [bool; 2]| {
        let overlap = Overlap {
            expert_alltoall: kinds[0],
            delay_wgrad: kinds[1],
            ..Overlap::unsaid(stack, cluster.gpu.is_cpu())
        };
        let options = SearchOptions {
            pins: pins.parse().expect("degrees"),
            dispatcher: Some(Dispatcher::Alltoall),
            overlap: Some(overlap),
            // Of a pipeline of two stages a rank the one that is there with combined passes and without.
            schedule: pins
                .contains("vpp=2")
                .then(|| ScheduleName::DualpipeV.beside(overlap)),
            ..SearchOptions::new(batch, stack)
        };
        let (planned, walked) = planned_and_walked(&traced, (&model, &cluster, 32), options);
        assert_eq!(planned.pipeline.schedule.combines(), kinds[0]);
        let sent_s = planned.predicted.time_s.get(Category::EpComm).0;
        (planned.predicted.step_s, sent_s, walked)
    };
    for (stack, pins) in [
        (StackName::Moefold, "tp=1,cp=1,pp=1,ep=16,etp=1,mbs=2"),
        (StackName::Moefold, "tp=2,cp=1,pp=1,ep=8,etp=1,mbs=2"),
        (StackName::Moefold, "tp=1,cp=1,pp=2,vpp=2,ep=16,etp=1,mbs=2"),
        (StackName::Megatron, "tp=1,cp=1,pp=1,ep=16,etp=1,mbs=2"),
    ] {
        let (apart_s, all_s, apart) = walked(stack, pins, [false, false]);
        let mut before_s = apart_s;
        for delays in [false, true] {
            let (beside_s, left_s, beside) = walked(stack, pins, [true, delays]);
            let what = format!("{stack:?} {pins} {delays}");
            let said = apart_s - beside_s;
            let saved = apart.walk.step_s - beside.walk.step_s;
            assert!(left_s < 0.6 * all_s, "{what}: {left_s} of {all_s}");
            assert!(beside_s <= before_s, "{what}: {beside_s} after {before_s}");
            before_s = beside_s;
            let off = saved / said - 1.0;
            assert!(
                off.abs() < 0.1,
                "{what}: {saved} where the plan says {said}"
            );
            // Tokens of one microbatch are sent while another is computed.
            let spans = &beside.trace.spans;
            let sent = spans
                .iter()
                .filter(|span| span.category == Category::EpComm && span.name == "all_to_all");
            let of_ops: Vec<_> = spans
                .iter()
                .filter(|span| span.lane == Lane::Compute)
                .collect();
            let under = sent.filter(|sent| {
                let first = of_ops.partition_point(|op| op.start < sent.start);
                let inside = of_ops[first..].iter();
                let mut inside = inside.take_while(|op| op.start < sent.end);
                inside.any(|op| op.microbatch != sent.microbatch)
            });
            assert!(under.count() > 100, "{what}");
        }
    }
}

/// What a search says that buckets hide is hidden where the step is walked.
#[test]
fn law_a_walk_hides_what_its_plan_does() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let cluster = endless();
    let traced = Traced::new(&model, &cluster);
    let batch = Batch {
        seq_len: 4096,
        global_batch: 64,
    };
    let beside = Overlap {
        grad_reduce: true,
        param_gather: true,
        p2p: true,
        ..Overlap::default()
    };
    for pins in ["tp=1,pp=1,ep=8,etp=1,mbs=1", "tp=2,pp=1,ep=4,etp=1,mbs=1"] {
        let walked = |overlap: Overlap| {
            let options = SearchOptions {
                pins: pins.parse().expect("degrees"),
                overlap: Some(overlap),
                ..SearchOptions::new(batch, StackName::Moefold)
            };
            let (planned, walked) = planned_and_walked(&traced, (&model, &cluster, 64), options);
            let exposed_s = planned.predicted.time_s.get(Category::DpComm).0;
            (planned.predicted.step_s, walked, exposed_s)
        };
        let (apart_s, apart, exposed) = walked(Overlap {
            p2p: true,
            ..Overlap::default()
        });
        let (beside_s, beside, left) = walked(beside);
        let [off, also_off] = [apart.walk.step_s / apart_s, beside.walk.step_s / beside_s];
        assert!(
            (off / also_off - 1.0).abs() < 0.01,
            "{pins}: {off} {also_off}"
        );
        assert!(left < 0.7 * exposed, "{pins}: {left} of {exposed}");
        let saved = apart.walk.step_s - beside.walk.step_s;
        let said = apart_s - beside_s;
        assert!((saved / said - 1.0).abs() < 0.1, "{pins}: {saved} {said}");
        // Collectives run while ops do.
        let spans = &beside.trace.spans;
        let reductions = spans
            .iter()
            .filter(|span| span.name == "reduce_scatter" && span.category == Category::DpComm);
        let ends = spans
            .iter()
            .filter(|span| span.lane == Lane::Compute && span.microbatch.is_some())
            .map(|span| span.end);
        let last = ends.max().expect("ops of passes");
        assert!(reductions.clone().count() > 8 && reductions.clone().any(|span| span.end < last));
    }
}

/// The same of weights and gradients that rest divided: the step of a search is that of its walk, with gathers and
/// reductions beside compute or not, and so is every collective over replicas.
#[test]
fn law_a_walk_of_divided_weights_is_its_plan() {
    let cluster = endless();
    let batch = Batch {
        seq_len: 4096,
        global_batch: 128,
    };
    for (name, pins) in [
        ("mixtral-8x7b", "tp=1,pp=1,ep=8,etp=1,mbs=1"),
        ("mixtral-8x7b", "tp=2,pp=1,ep=4,etp=1,mbs=1"),
        ("deepseek-v2-lite", "tp=1,pp=1,ep=8,etp=1,mbs=1"),
    ] {
        let model = presets::load(name).expect("a preset");
        let traced = Traced::new(&model, &cluster);
        let walked = |words: &str, zero: Zero| {
            let options = SearchOptions {
                pins: pins.parse().expect("degrees"),
                overlap: Some(words.parse().expect("kinds")),
                zero,
                ..SearchOptions::new(batch, StackName::Moefold)
            };
            planned_and_walked(&traced, (&model, &cluster, 64), options)
        };
        let beside = "grad-reduce,param-gather,p2p";
        let off = |(planned, walked): &(PlannedLayout, Walked)| {
            let peak = Bytes((planned.predicted.peak_gib * GIB as f64).round() as u64);
            let overhead = walked.walk.bytes[TensorClass::Overhead];
            assert_eq!(walked.walk.peak_bytes, peak - overhead, "{name} {pins}");
            walked.walk.step_s / planned.predicted.step_s
        };
        let whole = off(&walked(beside, Zero::States));
        let mut exposed = Vec::new();
        for words in ["p2p", "grad-reduce,p2p", beside] {
            let both = walked(words, Zero::Fsdp);
            let divided = off(&both);
            assert!(
                (divided / whole - 1.0).abs() < 0.01,
                "{name} {pins} {words}: {divided} {whole}"
            );
            let (planned, walked) = both;
            for (kind, stem) in [
                (CollectiveKind::AllGather, "all_gather"),
                (CollectiveKind::ReduceScatter, "reduce_scatter"),
            ] {
                let ran = walked.walk.collectives.iter();
                let ran = ran.filter(|calls| calls.kind == kind);
                let calls: u64 = ran.map(|calls| calls.calls).sum();
                let said = planned.predicted.calls[stem];
                assert_eq!(calls as f64, said, "{name} {pins} {words}: {stem}");
            }
            exposed.push(planned.predicted.time_s.get(Category::DpComm).0);
        }
        // What is gathered when it is needed waits for the reduction before it, so that alone hides nothing.
        assert!(exposed[2] < 0.7 * exposed[0], "{name} {pins}: {exposed:?}");
    }
}

#[test]
fn models_that_do_not_run_are_refused_by_name() {
    use moefold_planner::runtime::Runtime as _;
    let model = presets::load("Qwen3-Next-80B-A3B-Instruct").expect("a preset");
    let local = clusters::local(1);
    let why = Traced::new(&model, &local).refuses(&model, Precision::Bf16);
    let why = why.expect("refused");
    assert!(why.contains("qwen3_next") && why.contains("bf16"), "{why}");
}

/// Every choice of a set for each layer is planned by itself, on one rank and on two of a pipeline; where gradients rest divided, of a model with a depth
/// of multi-token prediction: what is found is the fastest there as far as its gap says.
#[test]
fn oracle_recomputation_by_layer_is_the_fastest_that_fits() {
    let load = |name: &str| {
        let mut model = presets::load(name).expect("a preset");
        model.layers.truncate(4);
        model
    };
    let (mixtral, glm) = (load("mixtral-8x7b"), load("glm-4.5-air"));
    assert!(!glm.mtp.is_empty());
    let mut cluster = clusters::cluster("dgx-h100").expect("a preset");
    cluster.gpu.memory_gib = search::ENDLESS_GIB;
    let costs = Costs::for_cluster(&cluster, &[]);
    let batch = Batch {
        seq_len: 4096,
        global_batch: 8,
    };
    let sets = ["none", "layernorm", "moe_act", "layernorm+moe", "full"];
    let sets = sets.map(|words| words.parse::<Recompute>().expect("a set"));
    let layers = u32::try_from(mixtral.layers.len()).expect("few");
    let each = (0..sets.len().pow(layers)).map(|number| {
        let set = |layer| sets[number / sets.len().pow(layer) % sets.len()].clone();
        RecomputePlan::by_layer((0..layers).map(set).collect())
    });
    let each: Vec<RecomputePlan> = each.collect();
    let two = (2, "pp=2", "Ett|ttL");
    let divided = (2, "pp=1", "EttttL");
    for (model, (gpus, pins, stages), schedule, zero) in [
        (
            &mixtral,
            (1, "pp=1", "EttttL"),
            ScheduleName::None,
            Zero::States,
        ),
        (&mixtral, two, ScheduleName::OneFOneB, Zero::States),
        (&mixtral, two, ScheduleName::ZbH1, Zero::States),
        (&mixtral, divided, ScheduleName::None, Zero::Fsdp),
        (&glm, divided, ScheduleName::None, Zero::Fsdp),
    ] {
        let mut options = SearchOptions {
            precision: Precision::Bf16,
            pins: format!("{pins},tp=1,cp=1,mbs=1").parse().expect("degrees"),
            stages: Some(stages.parse().expect("stages")),
            schedule: Some(schedule),
            top: 1,
            zero,
            ..SearchOptions::new(batch, StackName::Moefold)
        };
        let runtime = Traced::new(model, &cluster);
        let plan = |options: &SearchOptions| {
            let found = search::plan(model, &cluster, gpus, options, &costs, &runtime);
            let found = found.map(|mut found| (found.plans.swap_remove(0), found.search.gap));
            found.ok()
        };
        // Whatever they take.
        let all: Vec<_> = each
            .iter()
            .map(|recompute| {
                let recompute = Some(recompute.clone());
                let options = SearchOptions {
                    recompute,
                    ..options.clone()
                };
                plan(&options).expect("legal").0.predicted
            })
            .collect();
        let peaks = all.iter().map(|predicted| predicted.peak_gib);
        let (least, most) = peaks.fold((f64::MAX, 0.0_f64), |(low, high), peak| {
            (low.min(peak), high.max(peak))
        });
        let mut by_layer = 0;
        for share in [0.02, 0.2, 0.4, 0.6, 0.8, 0.95] {
            let room = least + share * (most - least);
            options.memory_gib = Some(room);
            let (found, gap) = plan(&options).expect("feasible");
            let fitting = all.iter().filter(|predicted| predicted.peak_gib <= room);
            let fastest = fitting
                .map(|predicted| predicted.step_s)
                .fold(f64::MAX, f64::min);
            let step_s = found.predicted.step_s;
            assert!(found.predicted.peak_gib <= room);
            // Which layers compute again says what is waited for where gradients rest divided.
            let most = if zero == Zero::States {
                1e-9
            } else {
                gap + 2e-6
            };
            assert!(
                step_s * (1.0 - most) <= fastest,
                "{share}: {step_s} {gap} > {fastest}"
            );
            by_layer += u32::from(found.recompute.alike().is_none());
        }
        assert!(by_layer > 2, "{by_layer}");
    }
}

/// A layout comes to the same by itself as behind all others, whose answers are remembered.
#[test]
fn law_answers_do_not_depend_on_what_was_asked_before() {
    let batch = Batch {
        seq_len: 4096,
        global_batch: 32,
    };
    let cluster = endless();
    let costs = Costs::for_cluster(&cluster, &[]);
    for name in ["mixtral-8x7b", "deepseek-v2-lite", "glm-4.5-air"] {
        let mut model = presets::load(name).expect("a preset");
        model.layers.drain(3..);
        for zero in [Zero::States, Zero::Fsdp] {
            let options = SearchOptions {
                precision: Precision::Bf16,
                pins: "pp=1".parse().expect("degrees"),
                top: usize::MAX,
                zero,
                ..SearchOptions::new(batch, StackName::Moefold)
            };
            let plans = |options: &SearchOptions, runtime: &Traced<'_>| {
                let asked = search::Asked::new(&model, &cluster, 8, options, &costs, runtime);
                search::plan_briefly(&asked).expect("feasible").plans
            };
            let all = plans(&options, &Traced::new(&model, &cluster));
            assert!(all.len() > 40, "{}", all.len());
            for known in all.iter().step_by(7) {
                let alone = SearchOptions {
                    pins: known.layout.pinned(),
                    ..options.clone()
                };
                let own = plans(&alone, &Traced::new(&model, &cluster));
                assert_eq!(own[0].predicted, known.predicted, "{:?}", known.layout);
            }
        }
    }
}

/// Each layout under each of its schedules by itself, in much memory and in little: nothing that is ruled out by a
/// bound was the best.
#[test]
fn oracle_a_search_finds_the_best_schedule() {
    let mut model = presets::load("mixtral-8x7b").expect("a preset");
    model.layers.truncate(8);
    let mut cluster = clusters::cluster("dgx-h100").expect("a preset");
    let costs = Costs::for_cluster(&cluster, &[]);
    let batch = Batch {
        seq_len: 4096,
        global_batch: 32,
    };
    let mut won = BTreeMap::new();
    for memory_gib in [200.0, 60.0, 45.0] {
        cluster.gpu.memory_gib = memory_gib;
        let runtime = Traced::new(&model, &cluster);
        let plan = |options: &SearchOptions| {
            // Where layers are moved, only those of the first plan are.
            let asked = search::Asked::new(&model, &cluster, 8, options, &costs, &runtime);
            let found = search::plan_briefly(&asked);
            found.ok().map(|found| found.plans)
        };
        let options = SearchOptions {
            precision: Precision::Bf16,
            pins: "cp=1,etp=1,mbs=1".parse().expect("degrees"),
            top: usize::MAX,
            ..SearchOptions::new(batch, StackName::Moefold)
        };
        let all = plan(&options).expect("feasible");
        let few = SearchOptions {
            top: 3,
            ..options.clone()
        };
        assert_eq!(plan(&few).expect("feasible"), all[..3]);
        for found in &all {
            let layout = found.layout;
            let schedules = ScheduleName::all_of(layout.pp, layout.vpp);
            // Those that a search tries without a word.
            let schedules = schedules.filter(|name| !name.combines() && !name.is_vee());
            let best = schedules.filter_map(|schedule| {
                let one = SearchOptions {
                    pins: layout.pinned(),
                    schedule: Some(schedule),
                    ..few.clone()
                };
                let best = plan(&one)?.swap_remove(0);
                assert_eq!(best.pipeline.schedule, schedule);
                Some(best.predicted.step_s)
            });
            let best = best.fold(f64::MAX, f64::min);
            assert_eq!(found.predicted.step_s, best, "{memory_gib} {layout:?}");
            *won.entry(found.pipeline.schedule).or_insert(0) += 1;
        }
    }
    let wins = |schedule| won.get(&schedule).copied().unwrap_or(0);
    assert!(wins(ScheduleName::ZbH1) > 3, "{won:?}");
    assert!(wins(ScheduleName::OneFOneB) > 0, "{won:?}");
}

#[test]
fn what_no_kernel_of_a_gpu_takes_is_refused_where_there_are_gpus() {
    use moefold_planner::runtime::Runtime as _;
    let mut model = presets::load("gpt-oss-20b").expect("a preset");
    let (cpus, gpus) = (clusters::local(1), clusters::cluster("dgx-h100"));
    let gpus = gpus.expect("a preset");
    let refuses = |model: &Model, cluster: &Cluster, precision| {
        Traced::new(model, cluster).refuses(model, precision)
    };
    assert_eq!(refuses(&model, &gpus, Precision::Bf16), None);
    if let Some(Mixer::Gqa(gqa)) = &mut model.layers[3].mixer {
        gqa.head_dim = 512;
    }
    let why = refuses(&model, &gpus, Precision::Bf16).expect("wide heads");
    for part in ["512 elements of a head", "gpt-oss-20b", "at most 256"] {
        assert!(why.contains(part), "{why} lacks {part}");
    }
    assert_eq!(refuses(&model, &cpus, Precision::Fp32), None);
}
