//! Tests of what a search refuses, of memory that is left free, and of what would fit.

use std::ops::ControlFlow;
use std::sync::Mutex;

use moefold_profiles::pricing::Costs;
use moefold_profiles::{Dtype, Precision};

use super::{cluster, run, small};
use crate::choice::{
    Dispatcher, HostShare, Masters, Module, Optimizer, PrimaryWeights, Recompute, StackName, Zero,
};
use crate::layout::Batch;
use crate::model::presets;
use crate::options::{Effort, MEMORY_HEADROOM, PlanError, SearchOptions};
use crate::plan::PlannedLayout;
use crate::search::{Aim, Asked, Phase, Progress, closest, plan, plan_watched};
use crate::stack::megatron::Declared;

/// Of one candidate a layout those are planned that fill no more than they may, and no others.
#[test]
fn law_plans_leave_their_headroom() {
    let (model, cluster, mut options) = small();
    options.pins = "pp=1,vpp=1,etp=1".parse().expect("degrees");
    options.recompute = Some(Recompute::Full.into());
    options.dispatcher = Some(Dispatcher::Alltoall);
    options.top = usize::MAX;
    options.memory_headroom = 0.0;
    let all = run(&model, &cluster, 32, &options);
    assert_eq!(all.search.memory_limit_gib, None);
    let peaks = || all.plans.iter().map(|plan| plan.predicted.peak_gib);
    let (least, most) = (
        peaks().fold(f64::MAX, f64::min),
        peaks().fold(0.0, f64::max),
    );
    let limit = f64::midpoint(least, most);
    options.memory_headroom = 1.0 - limit / cluster.gpu.memory_gib;
    let found = run(&model, &cluster, 32, &options);
    let told = found.search.memory_limit_gib.expect("less than all");
    assert!((told - limit).abs() < 1e-6, "{told}");
    let fit = |plan: &&PlannedLayout| plan.predicted.peak_gib <= limit;
    let expected: Vec<_> = all.plans.iter().filter(fit).cloned().collect();
    assert!(!expected.is_empty() && expected.len() < all.plans.len());
    assert_eq!(found.plans, expected);
    // Where nothing is said, something is left.
    let (_, _, asked) = small();
    assert_eq!(asked.memory_headroom, MEMORY_HEADROOM);
    let best = run(&model, &cluster, 16, &asked).plans.remove(0);
    assert!(best.predicted.peak_gib <= 0.95 * cluster.gpu.memory_gib);
}

#[test]
fn a_headroom_is_percent_below_all_and_named_where_nothing_fits() {
    let (model, cluster, mut options) = small();
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut refusal = |headroom| {
        options.memory_headroom = headroom;
        let error = plan(&model, &cluster, 16, &options, &costs, &Declared).expect_err("refused");
        error.to_string()
    };
    for (headroom, found) in [(1.0, "`100`"), (-0.5, "`-50`"), (f64::NAN, "`NaN`")] {
        let message = refusal(headroom);
        assert!(
            message.contains("`memory_headroom`") && message.contains(found),
            "{message}"
        );
    }
    let message = refusal(0.9);
    assert!(
        message.contains("a plan may fill 7.9 (`memory_headroom`)"),
        "{message}"
    );
}

#[test]
fn nothing_feasible_says_what_came_closest() {
    let model = presets::load("deepseek-v3").expect("a preset");
    let cluster = cluster("dgx-h100");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 64,
    };
    let options = SearchOptions::new(batch, StackName::Megatron);
    let costs = Costs::for_cluster(&cluster, &[]);
    let error = plan(&model, &cluster, 16, &options, &costs, &Declared).expect_err("does not fit");
    let PlanError::Infeasible { refused, least, .. } = &error else {
        panic!("{error}");
    };
    assert!(refused["memory"] > 0);
    assert!(least.as_ref().expect("a closest").peak_gib > 80.0);
    assert!(error.to_string().contains("GiB"), "{error}");
}

/// A request that nothing satisfies: model, cluster, GPUs, tokens a sequence, pinned degrees, room to leave.
type Short = (
    &'static str,
    &'static str,
    u32,
    u64,
    &'static str,
    f64,
    Option<Recompute>,
);

/// What is said to fit is planned when it is asked for, and what is said not to is not.
#[test]
fn oracle_changes_that_are_said_to_fit_do_and_others_do_not() {
    let one = "tp=1,pp=1,ep=1,etp=1";
    check_changes(
        &[
            ("mixtral-8x7b", "dgx-h100", 4, 4096, "", 0.05, None),
            ("mixtral-8x7b", "dgx-h100", 8, 4096, "", 0.05, None),
            ("mixtral-8x7b", "dgx-h200", 8, 4096, "", 0.6, None),
            (
                "mixtral-8x22b",
                "dgx-h100",
                8,
                4096,
                "cp=1,mbs=1",
                0.05,
                None,
            ),
            ("mixtral-8x22b", "dgx-h200", 8, 8192, "", 0.05, None),
            ("qwen3-30b-a3b", "dgx-h100", 2, 4096, "", 0.05, None),
            ("qwen3-30b-a3b", "dgx-h100", 4, 4096, "", 0.05, None),
            ("qwen3-30b-a3b", "dgx-h100", 8, 4096, one, 0.05, None),
            (
                "qwen3-30b-a3b",
                "dgx-h100",
                8,
                65_536,
                "cp=1",
                0.05,
                Some(Recompute::None),
            ),
            ("deepseek-v2-lite", "dgx-h100", 2, 4096, "", 0.05, None),
        ],
        4,
    );
}

#[test]
#[ignore = "takes minutes; smaller ones are above"]
fn oracle_changes_of_large_requests_that_are_said_to_fit_do() {
    check_changes(
        &[
            ("mixtral-8x22b", "dgx-h100", 16, 4096, "", 0.05, None),
            ("mixtral-8x22b", "dgx-h100", 24, 4096, "", 0.4, None),
            ("qwen3-30b-a3b", "dgx-h100", 8, 262_144, "cp=1", 0.05, None),
            ("deepseek-v3", "dgx-h100", 128, 4096, "", 0.05, None),
        ],
        3,
    );
}

/// Changes of so many kinds at least are said to fit.
fn check_changes(cases: &[Short], kinds: usize) {
    let mut seen = std::collections::BTreeSet::new();
    for (name, on, gpus, seq_len, pins, headroom, recompute) in cases.iter().cloned() {
        let model = presets::load(name).expect("a preset");
        let cluster = cluster(on);
        let costs = Costs::for_cluster(&cluster, &[]);
        let batch = Batch {
            seq_len,
            global_batch: 64,
        };
        let asked = SearchOptions {
            pins: pins.parse().expect("degrees"),
            recompute: recompute.map(Into::into),
            memory_headroom: headroom,
            top: 1,
            effort: Effort::Brief,
            ..SearchOptions::new(batch, StackName::Megatron)
        };
        let planned = |gpus, options: &SearchOptions| {
            plan(&model, &cluster, gpus, options, &costs, &Declared).is_ok()
        };
        let what = format!("{name} on {gpus}, {pins}");
        let all = Asked::new(&model, &cluster, gpus, &asked, &costs, &Declared);
        let least = match plan_watched(&all) {
            Err(PlanError::Infeasible { least, .. }) => least,
            other => panic!("{what}: {other:?}"),
        };
        let shortage = crate::search::closest(&all, least.as_deref());
        assert!(
            !shortage.savers[0].fits && shortage.savers[0].change == "none",
            "{what}"
        );
        for saver in &shortage.savers {
            let mut options = asked.clone();
            for change in saver.change.split(", ") {
                match change {
                    "none" => {}
                    "`memory_headroom` 0" => options.memory_headroom = 0.0,
                    "`recompute` auto" => options.recompute = None,
                    "`offload` auto" => options.offload = None,
                    "`optimizer_offload_fraction` 1" => {
                        options.optimizer_offload = HostShare(1.0);
                    }
                    "`masters` remainder" => options.masters = Masters::Remainder,
                    "`zero` fsdp" => options.zero = Zero::Fsdp,
                    "`primary_weights` fp8" => options.primary_weights = PrimaryWeights::Fp8,
                    "`num_distributed_optimizer_instances` 1" => options.instances = 1,
                    "`grad_dtype` bf16" => options.grad_dtype = Dtype::Bf16,
                    "`optimizer` adam-bf16-moments" => {
                        options.optimizer = Optimizer::AdamBf16Moments;
                    }
                    "without `layout`" => options.pins = "".parse().expect("degrees"),
                    more => assert_eq!(more, format!("`gpus` {}", saver.gpus)),
                }
            }
            let fits = planned(saver.gpus, &options);
            assert_eq!(fits, saver.fits, "{what}: {saver:?}");
            if saver.fits {
                seen.insert(saver.change.split(' ').next().map(str::to_owned));
            }
        }
    }
    assert!(seen.len() >= kinds, "{seen:?}");
}

#[test]
fn numbers_of_gpus_nearby_are_named_where_none_will_do() {
    let (model, cluster, options) = small();
    let costs = Costs::for_cluster(&cluster, &[]);
    let named = |gpus| match plan(&model, &cluster, gpus, &options, &costs, &Declared) {
        Err(PlanError::NoneLegal { gpus, .. }) => Some(gpus),
        Ok(_) | Err(PlanError::Infeasible { .. }) => None,
        Err(other) => panic!("{gpus}: {other}"),
    };
    let found = named(63).expect("no layout is legal");
    let [below, above] = found[..] else {
        panic!("{found:?}");
    };
    assert!(below < 63 && 63 < above, "{found:?}");
    for gpus in below..=above {
        let is_named = found.contains(&gpus);
        assert_eq!(named(gpus).is_none(), is_named, "{gpus}: {found:?}");
    }
}

#[test]
fn impossible_pins_are_refused_with_every_broken_rule() {
    let (model, cluster, mut options) = small();
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut refusal = |pins: &str, seq_len, global_batch| {
        options.pins = pins.parse().expect("degrees");
        options.batch = Batch {
            seq_len,
            global_batch,
        };
        let error = plan(&model, &cluster, 128, &options, &costs, &Declared).expect_err(pins);
        assert!(!matches!(error, PlanError::Infeasible { .. }), "{error}");
        error.to_string()
    };
    for (pins, seq_len, global_batch, expected) in [
        (
            "tp=3",
            4096,
            128,
            &["128 GPUs are not divisible by tp x cp x pp = 3 x 1 x 1"] as &[&str],
        ),
        (
            "tp=3,ep=5",
            4096,
            128,
            &[
                "tp x cp x pp = 3",
                "etp x ep x pp = 1 x 5 x 1",
                "8 key/value heads",
                "8 experts are not divisible by ep = 5",
                "the nearest legal degrees are tp=4,ep=4",
            ],
        ),
        (
            "ep=16",
            4096,
            128,
            &[
                "8 experts are not divisible by ep = 16",
                "the nearest legal degrees are ep=8",
            ],
        ),
        // Each tuple breaks one of several rules.
        (
            "vpp=32",
            4096,
            128,
            &[
                "no layout is legal:\n  ",
                "empty_stages",
                "vpp_without_pp",
                "degrees are vpp=",
            ],
        ),
        (
            "tp=2,cp=1,pp=1,vpp=2,ep=16,etp=1,mbs=1",
            4096,
            128,
            &[
                "8 experts are not divisible by ep = 16",
                "vpp = 2 needs a pipeline",
                "the nearest legal degrees are tp=2,cp=1,pp=",
            ],
        ),
        ("", 0, 128, &["`seq_len`: found `0`, expected at least 1"]),
        (
            "",
            4096,
            0,
            &["`global_batch`: found `0`, expected at least 1"],
        ),
    ] {
        let message = refusal(pins, seq_len, global_batch);
        for expected in expected {
            assert!(message.contains(expected), "{pins}: {message}");
        }
    }
}

#[test]
fn sets_that_a_precision_excludes_are_counted_and_not_planned() {
    let (model, cluster, mut options) = small();
    options.precision = Precision::Fp8Delayed;
    options.top = 20;
    let found = run(&model, &cluster, 16, &options);
    let search = &found.search;
    assert!(search.refused["moe_act_under_delayed_fp8"] > 0);
    let refused: u64 = search.refused.values().sum();
    assert_eq!(search.space, refused + search.pruned + search.priced);
    for plan in &found.plans {
        let legal = |set: &&Recompute| **set == Recompute::Full || !set.covers(Module::MoeAct);
        assert!(plan.recompute.sets().iter().all(legal));
    }
    options.precision = Precision::Fp8;
    let search = run(&model, &cluster, 16, &options).search;
    assert!(!search.refused.contains_key("moe_act_under_delayed_fp8"));
}

/// What nothing has room for, by what whoever watches hears: states of each aim and phase, ever further; and a stop in any
/// of them ends the search with what is known.
#[test]
fn law_a_watch_hears_how_far_every_phase_is_and_may_stop_in_any() {
    let model = presets::load("qwen3-30b-a3b").expect("a preset");
    let cluster = cluster("dgx-h100");
    let costs = Costs::for_cluster(&cluster, &[]);
    let batch = Batch {
        seq_len: 65_536,
        global_batch: 64,
    };
    // Its states have room, and what passes save has not.
    let options = SearchOptions {
        pins: "cp=1".parse().expect("degrees"),
        recompute: Some(Recompute::None.into()),
        top: 1,
        ..SearchOptions::new(batch, StackName::Megatron)
    };
    // Stopped once that is heard for the first time; the states that are, and whether the least memory is known.
    let heard = |stop: Option<(Aim, Phase)>| {
        let states = Mutex::new(Vec::<Progress>::new());
        let watch = |progress: &Progress| {
            let mut states = states.lock().expect("nobody panicked");
            assert!(progress.seen <= progress.all, "{progress:?}");
            if !states.contains(progress) {
                states.push(*progress);
            }
            let is_over = states.iter().any(|own| Some((own.aim, own.phase)) == stop);
            if is_over {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let asked = Asked::new(&model, &cluster, 8, &options, &costs, &Declared);
        let watch = &watch;
        let asked = &Asked { watch, ..asked };
        let found = match plan_watched(asked) {
            Err(PlanError::Infeasible { least, .. }) => {
                let savers = closest(asked, least.as_deref()).savers;
                Some((least.is_some(), savers.len()))
            }
            Err(PlanError::Stopped) => None,
            other => panic!("{other:?}"),
        };
        (states.into_inner().expect("nobody panicked"), found)
    };
    let (all, found) = heard(None);
    let (known, savers) = found.expect("no room");
    assert!(known && savers > 5, "{savers} savers");
    for aim in [Aim::Best, Aim::Least, Aim::Fit] {
        let of = |phase| {
            let states = all
                .iter()
                .filter(|own| own.aim == aim && own.phase == phase);
            states.count()
        };
        let phases = [
            Phase::Judging,
            Phase::Scheduling,
            Phase::Pricing,
            Phase::Bounding,
        ];
        let each = phases.map(of);
        assert!(each.iter().all(|&states| states >= 2), "{aim:?}: {each:?}");
        assert!(of(Phase::Looking) >= 10, "{aim:?}: {}", of(Phase::Looking));
        for phase in phases.into_iter().chain([Phase::Looking]) {
            let (states, found) = heard(Some((aim, phase)));
            assert!(states.len() < all.len());
            let (known, fewer) = found.unwrap_or_default();
            assert_eq!(known, aim == Aim::Fit, "{aim:?} {phase:?}");
            assert!(fewer < savers, "{aim:?} {phase:?}: {fewer} savers");
            assert_eq!(found.is_none(), aim == Aim::Best, "{aim:?} {phase:?}");
        }
    }
}

#[test]
fn what_no_device_and_no_host_can_is_refused_by_its_name() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let asked = |cluster: &moefold_profiles::Cluster, options: SearchOptions| {
        let costs = Costs::for_cluster(cluster, &[]);
        let error = plan(&model, cluster, 64, &options, &costs, &Declared).expect_err("refused");
        error.to_string()
    };
    let mut cluster = cluster("dgx-h100");
    let options = SearchOptions::new(batch, StackName::Megatron);
    let said = asked(
        &cluster,
        SearchOptions {
            precision: Precision::Mxfp8,
            ..options.clone()
        },
    );
    assert!(
        said.contains("mxfp8") && said.contains("fp8-blockwise"),
        "{said}"
    );
    // 46.7 billion parameters of 12 bytes on eight nodes are 65.2 GiB on each.
    cluster.host_memory_gib = 64.0;
    let said = asked(
        &cluster,
        SearchOptions {
            optimizer_offload: HostShare(1.0),
            ..options
        },
    );
    for part in [
        "`optimizer_offload_fraction` 1",
        "65.2 GiB",
        "64.0 (",
        "more nodes",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
