//! Tests of the search: laws, published layouts, refusals.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::Category;
use moefold_profiles::{Cluster, Dtype, Precision, TensorClass};

use super::{Asked, ENDLESS_GIB, Progress, SearchResult, plan, plan_watched};
use crate::choice::{
    CpComm, Dispatcher, HostShare, Masters, Module, Objective, Optimizer, Overlap, Recompute,
    StackName, Zero,
};
use crate::layout::{Batch, Order};
use crate::model::{Model, presets};
use crate::options::{MEMORY_HEADROOM, PlanError, Routing, SearchOptions};
use crate::plan::{Plan, PlannedLayout, PlannedRouting};
use crate::stack::megatron::Declared;

fn cluster(name: &str) -> Cluster {
    moefold_profiles::presets::cluster(name).expect("a preset")
}

fn run(model: &Model, cluster: &Cluster, gpus: u32, options: &SearchOptions) -> SearchResult {
    let costs = Costs::for_cluster(cluster, &[]);
    plan(model, cluster, gpus, options, &costs, &Declared).expect("something is feasible")
}

fn small() -> (Model, Cluster, SearchOptions) {
    let batch = Batch {
        seq_len: 4096,
        global_batch: 32,
    };
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let options = SearchOptions::new(batch, StackName::Megatron);
    (model, cluster("dgx-h100"), options)
}

#[test]
fn law_the_same_question_has_the_same_answer_on_any_number_of_threads() {
    let (model, cluster, mut options) = small();
    options.survey = true;
    let answer = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        let found = pool.install(|| run(&model, &cluster, 16, &options));
        serde_json::to_string(&(&found.plans, &found.alternatives, &found.search))
            .expect("serializes")
    };
    assert_eq!(answer(1), answer(4));
}

#[test]
fn law_every_candidate_is_refused_pruned_or_priced() {
    let (model, cluster, options) = small();
    let search = run(&model, &cluster, 16, &options).search;
    let refused: u64 = search.refused.values().sum();
    assert_eq!(search.space, refused + search.pruned + search.priced);
    assert!(search.pruned > 0 && search.priced > 0);
}

/// A search that is stopped after any number of looks has the best of what it saw, and bounds what it did not see.
#[test]
fn law_a_stopped_search_bounds_what_it_has_not_seen() {
    let (model, cluster, mut options) = small();
    let costs = &Costs::for_cluster(&cluster, &[]);
    for objective in [Objective::Throughput, Objective::Memory] {
        options.objective = objective;
        let score = |found: &SearchResult| match objective {
            Objective::Memory => found.plans[0].predicted.peak_gib,
            Objective::Throughput => found.plans[0].predicted.step_s,
        };
        let whole = run(&model, &cluster, 16, &options);
        let (mut stopped, mut nothing, mut ended) = (0, 0, false);
        for looks in 0..1000 {
            let left = AtomicU32::new(looks);
            let watch = |progress: &Progress| {
                assert!(progress.seen <= progress.layouts);
                match left.load(Ordering::Relaxed) {
                    0 => ControlFlow::Break(()),
                    some => {
                        left.store(some - 1, Ordering::Relaxed);
                        ControlFlow::Continue(())
                    }
                }
            };
            let asked = Asked::new(&model, &cluster, 16, &options, costs, &Declared);
            let watch = &watch;
            let found = plan_watched(&Asked { watch, ..asked });
            let found = match found {
                Err(error) => {
                    assert!(matches!(error, PlanError::Stopped), "{error}");
                    nothing += 1;
                    continue;
                }
                Ok(found) => found,
            };
            let search = &found.search;
            let refused: u64 = search.refused.values().sum();
            let Some(unseen) = search.unseen else {
                // All that is left to stop is what keeping experts in a domain would come to.
                assert_eq!((&found.plans, search.gap), (&whole.plans, whole.search.gap));
                ended = true;
                break;
            };
            assert_eq!(
                search.space,
                refused + search.pruned + search.priced + unseen
            );
            assert!(unseen > 0 && !search.optimal);
            assert!(score(&whole) >= score(&found) * (1.0 - search.gap) * (1.0 - 1e-9));
            stopped += 1;
        }
        assert!(stopped > 0 && nothing > 0 && ended, "{stopped} {nothing}");
    }
}

/// Nothing is pruned when more plans are wanted than there are layouts.
#[test]
fn oracle_pruning_leaves_the_ranking_of_the_whole_space() {
    check_pruning(None, 32);
}

/// Nor where there are more stages than layers.
#[test]
fn oracle_pruning_leaves_the_ranking_of_stages_without_layers() {
    let plans = check_pruning(None, 6);
    let empty = |plan: &PlannedLayout| plan.pipeline.stages.iter().any(Vec::is_empty);
    let more = |plan: &PlannedLayout| plan.pipeline.stages.len() > 6;
    assert!(plans.iter().filter(|plan| more(plan)).all(empty));
    assert!(plans.iter().filter(|plan| more(plan)).count() > 4);
    assert!(plans.iter().any(|plan| more(plan) && plan.layout.vpp > 1));
}

/// Nor where passes are combined, and more recomputation may hide more.
#[test]
fn oracle_pruning_leaves_the_ranking_of_combined_passes() {
    let kinds = "grad-reduce,param-gather,p2p,expert-alltoall";
    for kinds in [kinds.to_owned(), format!("{kinds},delay-wgrad")] {
        check_pruning(Some(kinds.parse().expect("kinds")), 32);
    }
}

/// Nor where replicas are several instances of the optimizer, which not all degrees allow.
#[test]
fn oracle_pruning_leaves_the_ranking_of_instances() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(8);
    options.pins = "mbs=1,cp=1".parse().expect("degrees");
    options.instances = 2;
    let few = run(&model, &cluster, 16, &options);
    options.top = usize::MAX;
    let all = run(&model, &cluster, 16, &options);
    assert!(all.plans.len() > 10 && all.search.refused["optimizer_instances"] > 0);
    assert_eq!(few.plans[..], all.plans[..few.plans.len()]);
    let cut = |plan: &PlannedLayout| {
        (plan.layout.dp * plan.layout.cp).is_multiple_of(2) && plan.layout.edp.is_multiple_of(2)
    };
    assert!(all.plans.iter().all(cut));
}

fn check_pruning(overlap: Option<Overlap>, layers: usize) -> Vec<PlannedLayout> {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(layers);
    options.overlap = overlap;
    options.pins = "mbs=1,cp=1".parse().expect("degrees");
    let few = run(&model, &cluster, 16, &options);
    options.top = usize::MAX;
    let all = run(&model, &cluster, 16, &options);
    assert!(all.plans.len() > 10, "{}", all.plans.len());
    assert_eq!(few.plans[..], all.plans[..few.plans.len()]);
    // The best of a unit is the best of its recompute sets, tried one by one.
    let best = &few.plans[0];
    for set in super::recompute::sets(&model) {
        let layout = best.layout;
        options.pins = format!(
            "tp={},pp={},vpp={},ep={},etp={},mbs={},cp=1",
            layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.mbs
        )
        .parse()
        .expect("degrees");
        options.recompute = Some(set.into());
        let costs = Costs::for_cluster(&cluster, &[]);
        if let Ok(found) = plan(&model, &cluster, 16, &options, &costs, &Declared) {
            assert!(found.plans[0].predicted.step_s >= best.predicted.step_s);
        }
    }
    all.plans
}

/// One look at each layout tells those that fit as the whole search does, and changes nothing else.
#[test]
fn differential_a_survey_counts_the_layouts_that_fit() {
    let (model, cluster, mut options) = small();
    options.pins = "mbs=1,cp=1,vpp=1".parse().expect("degrees");
    options.top = usize::MAX;
    let all = run(&model, &cluster, 16, &options);
    assert!(all.search.survey.is_none());
    options.survey = true;
    let mut surveyed = run(&model, &cluster, 16, &options);
    let survey = surveyed.search.survey.take().expect("asked for");
    assert_eq!(surveyed, all);
    // Each plan is the best of its layout. Splits may differ, and fit where the other does not.
    let (found, fitting) = (all.plans.len() as u64, survey.fitting);
    assert!(
        found > 10 && fitting.abs_diff(found) * 20 <= found,
        "{fitting} {found}"
    );
    assert!(fitting <= survey.layouts);
    let counted: u64 = survey.cells.iter().map(|cell| u64::from(cell.2)).sum();
    assert_eq!(counted, fitting);
    assert!(survey.cells.iter().all(|cell| cell.0 < 64 && cell.1 < 64));
    assert!(
        survey.cells.iter().any(|cell| cell.1 == 63),
        "the fastest is at the edge"
    );
    let fastest = all.plans[0].predicted.step_s;
    assert!(survey.fastest_s <= 1.02 * fastest && survey.fastest_s > 0.8 * fastest);
}

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
    let limit = 0.7 * cluster.gpu.memory_gib;
    options.memory_headroom = 0.3;
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
        message.contains("a plan may fill 8.0 (`memory_headroom`)"),
        "{message}"
    );
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
fn memory_as_objective_finds_less_memory() {
    let (model, cluster, mut options) = small();
    let fast = run(&model, &cluster, 16, &options);
    options.objective = Objective::Memory;
    let small = run(&model, &cluster, 16, &options);
    assert!(small.plans[0].predicted.peak_gib < fast.plans[0].predicted.peak_gib);
    assert!(small.plans[0].predicted.step_s > fast.plans[0].predicted.step_s);
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
    check_changes(&[
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
    ]);
}

#[test]
#[ignore = "takes minutes; smaller ones are above"]
fn oracle_changes_of_large_requests_that_are_said_to_fit_do() {
    check_changes(&[
        ("mixtral-8x22b", "dgx-h100", 16, 4096, "", 0.05, None),
        ("mixtral-8x22b", "dgx-h100", 24, 4096, "", 0.4, None),
        ("qwen3-30b-a3b", "dgx-h100", 8, 262_144, "cp=1", 0.05, None),
        ("deepseek-v3", "dgx-h100", 128, 4096, "", 0.05, None),
    ]);
}

fn check_changes(cases: &[Short]) {
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
        let shortage = super::closest(&all, least.as_deref());
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
    assert!(seen.len() >= 4, "{seen:?}");
}

/// Each layout asked for by itself is no better than what is found where it is open, however short its sequences
/// are cut and however far its groups reach.
#[test]
fn oracle_nothing_that_is_open_is_left_out() {
    let model = presets::load("mixtral-8x22b").expect("a preset");
    let cluster = cluster("dgx-h100");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    options.top = 1;
    let best = run(&model, &cluster, 128, &options).plans.remove(0);
    for pins in [
        "cp=1",
        "cp=2",
        "cp=4",
        "cp=64",
        "tp=16",
        "etp=16",
        "tp=16,etp=16,cp=2",
    ] {
        options.pins = pins.parse().expect("degrees");
        let costs = Costs::for_cluster(&cluster, &[]);
        let Ok(found) = plan(&model, &cluster, 128, &options, &costs, &Declared) else {
            continue;
        };
        let step_s = found.plans[0].predicted.step_s;
        assert!(step_s >= best.predicted.step_s, "{pins}: {step_s}");
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
        let set = plan.recompute.alike().expect("all layers do the same");
        assert!(*set == Recompute::Full || !set.covers(Module::MoeAct));
    }
    options.precision = Precision::Fp8;
    let search = run(&model, &cluster, 16, &options).search;
    assert!(!search.refused.contains_key("moe_act_under_delayed_fp8"));
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
    // Dense and sparse layers cannot be split over virtual stages exactly.
    assert_eq!(found.search.optimal, layout.vpp == 1);
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
    for (name, gpus, pins, offload, overlap) in [
        ("mixtral-8x7b", 16, "pp=1,ep=8", "none", combined),
        ("deepseek-v3", 256, "pp=8,vpp=2,ep=16", "none", combined),
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
        .map(|(name, gpus, pins, offload)| (name, gpus, pins, offload, "")),
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
            overlap: (!overlap.is_empty()).then(|| overlap.parse().expect("kinds")),
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
            let walked = super::walk(&plan, &layout, rank, &costs, &Declared).expect("it walks");
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

/// Ranks of the CPU that drift apart by a fifth of what they do: the step is a fifth of its passes longer,
/// whether they meet in layers or only at the end.
#[test]
fn golden_waiting_for_others_is_a_category_and_host_time_is_not_hidden() {
    use moefold_profiles::directory::{Key, Profile, Sample, Taken};
    use moefold_profiles::host::HostCost;
    use moefold_profiles::presets::{Machine, local_on};
    use moefold_profiles::units::{Bytes, GIB};
    use moefold_profiles::{Collective, CollectiveKind};

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
                waits: vec![[waited, 1.0]],
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
        "tp=1,pp=1,ep=1,mbs=2",
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
/// One layout of a model, routed as said.
fn routed(pp: u32, lists: Option<Vec<Vec<f64>>>) -> PlannedLayout {
    let (model, mut cluster, mut options) = small();
    cluster.gpu.memory_gib = 1e3;
    let pins = format!("tp=2,cp=1,pp={pp},vpp=1,ep=8,etp=1,mbs=1");
    options.pins = pins.parse().expect("degrees");
    options.recompute = Some(Recompute::None.into());
    options.routing = lists.map(|lists| Routing::new("h.json", &lists).expect("a histogram"));
    run(&model, &cluster, 32, &options).plans.remove(0)
}

#[test]
fn law_even_histograms_are_balanced_routing() {
    let balanced = routed(2, None);
    for lists in [1, 32] {
        let mut even = routed(2, Some(vec![vec![7.0; 8]; lists]));
        let Some(PlannedRouting::Recorded {
            source,
            busiest,
            fullest,
            balanced: outcome,
        }) = even.predicted.routing.take()
        else {
            panic!("a histogram was given");
        };
        assert_eq!(source, "h.json");
        assert_eq!((busiest, fullest), (vec![1.0; 32], vec![1.0; 32]));
        let p = &balanced.predicted;
        assert_eq!((outcome.step_s, outcome.peak_gib), (p.step_s, p.peak_gib));
        // Layers are priced one by one or all at once; sums are rounded in another order.
        assert_eq!(even.predicted.memory_gib, p.memory_gib);
        assert!((even.predicted.step_s / p.step_s - 1.0).abs() < 1e-9);
    }
}

#[test]
fn law_what_is_not_even_costs_in_the_layers_that_have_it() {
    let uneven = || {
        let mut tokens = vec![1.0; 8];
        tokens[2] = 9.0;
        tokens
    };
    let only = |layers: usize| {
        let list = |layer| {
            if layer < layers {
                uneven()
            } else {
                vec![1.0; 8]
            }
        };
        let predicted = routed(1, Some((0..32).map(list).collect())).predicted;
        let Some(PlannedRouting::Recorded {
            busiest, balanced, ..
        }) = &predicted.routing
        else {
            panic!("a histogram was given");
        };
        let heavy = busiest.iter().filter(|&&load| load == 4.5).count();
        assert_eq!(heavy, layers);
        (
            predicted.step_s - balanced.step_s,
            predicted.peak_gib - balanced.peak_gib,
        )
    };
    let (two, four, all) = (only(2), only(4), only(32));
    assert!(two.0 > 0.0 && two.1 > 0.0, "{two:?}");
    // Twice as many layers cost twice as much.
    assert!((four.0 / two.0 - 2.0).abs() < 1e-6, "{two:?} {four:?}");
    assert!(all.0 > 4.0 * two.0 && all.1 > four.1, "{four:?} {all:?}");
    let whole = routed(1, Some(vec![uneven()])).predicted;
    let Some(PlannedRouting::Recorded { balanced, .. }) = &whole.routing else {
        panic!("a histogram was given");
    };
    assert!((whole.step_s - balanced.step_s - all.0).abs() < 1e-9 * whole.step_s);
    assert!((whole.peak_gib - balanced.peak_gib - all.1).abs() < 1e-9);
}

#[test]
fn oracle_what_twice_the_load_takes_is_a_histogram_that_has_it() {
    let balanced = routed(2, None).predicted;
    let Some(PlannedRouting::Balanced { doubled }) = &balanced.routing else {
        panic!("nothing was given");
    };
    // One of eight has a quarter.
    let mut twice = vec![3.0; 8];
    twice[7] = 7.0;
    let twice = routed(2, Some(vec![twice])).predicted;
    assert_eq!(
        (doubled.step_s, doubled.peak_gib),
        (twice.step_s, twice.peak_gib)
    );
    assert!(doubled.step_s > balanced.step_s && doubled.peak_gib > balanced.peak_gib);
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

/// Bytes by the formula: weights, gradients and states over the replicas, two of the largest units of weights and the
/// gradients of one.
#[test]
fn golden_fully_sharded_memory_and_traffic() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let mut cluster = cluster("dgx-h100");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let plan = |zero, overlap: Option<&str>| {
        let options = SearchOptions {
            zero,
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
        };
        run(&model, &cluster, 64, &options).plans.swap_remove(0)
    };
    let (ours, whole) = (plan(Zero::Fsdp, None), plan(Zero::States, None));
    assert_eq!((ours.zero, whole.zero), (Some(Zero::Fsdp), None));
    // 46.7027923e9 parameters; a layer has 8 * 3 * 4096 * 14336 of experts, 2 * 4096^2 + 2 * 4096 * 1024 of attention,
    // 8 * 4096 of the router and two norms.
    let (all, layer) = (46_702_792_704.0_f64, 1_451_270_144.0);
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let memory = &ours.predicted.memory_gib;
    for (class, bytes) in [
        (TensorClass::Weights, 2.0 * all / 64.0),
        (TensorClass::Gradients, 4.0 * all / 64.0),
        (TensorClass::Optimizer, 12.0 * all / 64.0),
    ] {
        assert!(
            (memory[class] - gib(bytes)).abs() < 1e-5,
            "{class:?}: {}",
            memory[class]
        );
    }
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
    assert!(ours.predicted.step_s < apart.predicted.step_s);
}

/// The other order is legal where replicas are as many as those of experts, its plans say it, and their groups are its.
#[test]
fn oracle_plans_in_the_other_order_are_of_its_groups() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(8);
    options.pins = "mbs=1,cp=1,vpp=1".parse().expect("degrees");
    options.top = usize::MAX;
    let both = [Order::PP_LAST, Order::DP_LAST].map(|order| {
        options.order = Some(order);
        run(&model, &cluster, 32, &options).plans
    });
    let legal = |plan: &&PlannedLayout| plan.layout.pp == 1 || plan.layout.dp == plan.layout.edp;
    let expected = both[0].iter().filter(legal).count();
    assert!(both[1].len() == expected && expected < both[0].len());
    let staged = both[1].iter().find(|plan| plan.layout.pp == 4);
    let staged = staged.expect("some");
    let plan = Plan::of(staged.clone(), &model, &cluster, 32, &options);
    let text = serde_json::to_string(&plan).expect("plain data");
    assert!(text.contains(r#""rank_order":"tp-cp-ep-pp-dp""#), "{text}");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    let layout = read.layout().expect("legal");
    let stride = layout.tp();
    let pipeline = crate::mesh::group_of(&layout, crate::mesh::GroupKind::Pp, 0);
    assert_eq!(pipeline, [0, stride, 2 * stride, 3 * stride]);
    let costs = Costs::for_cluster(&cluster, &[]);
    let again = super::again(&read, &costs, &Declared).expect("prices");
    assert_eq!(again.predicted.step_s, staged.predicted.step_s);
}

/// With orders of ranks and ways to keys open, each layout has the best of all, each priced by a call of its own; and
/// the ranking of a few is theirs.
#[test]
fn oracle_open_orders_and_ways_to_keys_are_the_best_of_all() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(4);
    options.batch = Batch {
        seq_len: 65_536,
        global_batch: 8,
    };
    options.pins = "mbs=1,vpp=1,etp=1".parse().expect("degrees");
    options.recompute = Some(Recompute::Full.into());
    (options.order, options.cp_comm) = (None, None);
    let few = run(&model, &cluster, 16, &options);
    options.top = usize::MAX;
    let open = run(&model, &cluster, 16, &options);
    assert!(open.plans.len() > few.plans.len());
    assert_eq!(few.plans[..], open.plans[..few.plans.len()]);
    let search = &open.search;
    assert_eq!(
        search.priced + search.pruned + search.refused.values().sum::<u64>(),
        search.space
    );

    let costs = Costs::for_cluster(&cluster, &[]);
    let mut alone = std::collections::BTreeMap::new();
    let every = SearchOptions {
        order: Some(Order::PP_LAST),
        ..options.clone()
    };
    for plan in run(&model, &cluster, 16, &every).plans {
        let pins = plan.layout.pinned();
        let mut best: Option<(f64, Order, CpComm)> = None;
        for (cp_comm, order) in CpComm::ALL
            .into_iter()
            .flat_map(|way| [(way, Order::PP_LAST), (way, Order::DP_LAST)])
        {
            let own = SearchOptions {
                order: Some(order),
                cp_comm: Some(cp_comm),
                pins,
                ..options.clone()
            };
            let Ok(found) = super::plan(&model, &cluster, 16, &own, &costs, &Declared) else {
                continue;
            };
            let step_s = found.plans[0].predicted.step_s;
            if best.is_none_or(|(least, ..)| step_s < least) {
                best = Some((step_s, order, cp_comm));
            }
        }
        alone.insert(format!("{:?}", plan.layout), best.expect("one"));
    }
    assert_eq!(open.plans.len(), alone.len());
    let mut seen = [0; 2];
    for plan in &open.plans {
        let (step_s, order, cp_comm) = alone[&format!("{:?}", plan.layout)];
        assert_eq!(plan.predicted.step_s, step_s, "{:?}", plan.layout);
        seen[0] += usize::from(plan.rank_order.is_some());
        seen[1] += usize::from(plan.cp_comm() != CpComm::P2p);
        // What of a tie is taken does not matter, what wins alone does.
        if order != Order::PP_LAST {
            assert_eq!(plan.rank_order, Some(order), "{:?}", plan.layout);
        }
        if plan.layout.cp > 1 && cp_comm != CpComm::P2p {
            assert_ne!(plan.cp_comm(), CpComm::P2p, "{:?}", plan.layout);
        }
    }
    assert!(seen.iter().all(|&seen| seen > 0), "{seen:?}");

    // Runners-up may be what the plan itself is not, and are read.
    let (best, rest) = (few.plans[0].clone(), few.alternatives);
    let mut plan = Plan::of(best, &model, &cluster, 16, &options);
    plan.alternatives = rest;
    let text = serde_json::to_string(&plan).expect("plain data");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    assert_eq!(read.alternatives, plan.alternatives);
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

/// Replicas in eight instances, each a node: what is divided over eight ranks and gathered there, and reduced over nodes
/// once a step. Under ZeRO-1 only the states are divided so.
#[test]
fn golden_instances_of_the_optimizer_divide_inside_and_reduce_across() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let mut cluster = cluster("dgx-h100");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let options = |zero, instances| SearchOptions {
        zero,
        instances,
        overlap: Some("none".parse().expect("words")),
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
    };
    let plan = |zero, instances| {
        let options = options(zero, instances);
        let found = run(&model, &cluster, 64, &options);
        found.plans.into_iter().next().expect("one")
    };
    let all = 46_702_792_704.0_f64;
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let costs = Costs::for_cluster(&cluster, &[]);
    for (zero, whole, [gathers, reductions, buckets]) in [
        (Zero::States, 1.0, [2.0, 2.0, 2.0]),
        (Zero::Fsdp, 8.0, [4.0 * 66.0, 2.0 * 66.0, 66.0]),
    ] {
        let (ours, one) = (plan(zero, 8), plan(zero, 1));
        assert_eq!(
            (ours.optimizer_instances, one.optimizer_instances),
            (Some(8), None)
        );
        let memory = &ours.predicted.memory_gib;
        for (class, bytes) in [
            (TensorClass::Weights, 2.0 * all / whole),
            (TensorClass::Gradients, 4.0 * all / whole),
            (TensorClass::Optimizer, 12.0 * all / 8.0),
        ] {
            let found = memory[class];
            assert!(
                (found - gib(bytes)).abs() < 1e-5,
                "{zero:?} {class:?}: {found}"
            );
        }
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
        // What nothing hides is all of it.
        let dp_comm = ours.predicted.time_s.get(Category::DpComm).0;
        let expected = busy["all_gather"] + busy["reduce_scatter"] + busy["all_reduce"];
        assert!(
            (dp_comm / expected - 1.0).abs() < 1e-6,
            "{dp_comm} of {expected}"
        );
        if zero == Zero::States {
            // Each rank's eighth of f32 gradients, over eight nodes.
            let experts = 32.0 * 8.0 * 3.0 * 4096.0 * 14336.0;
            let across = |parameters: f64| {
                let reduce = moefold_profiles::Collective {
                    kind: moefold_profiles::CollectiveKind::AllReduce,
                    bytes: Dtype::F32.bytes((parameters / 8.0) as u64),
                    ranks: 8,
                    ranks_per_domain: 1,
                };
                costs.collective(&reduce).time.0
            };
            let expected = across(experts) + across(all - experts);
            let found = busy["all_reduce"];
            assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        }
        let planned = Plan::of(ours, &model, &cluster, 64, &options(zero, 8));
        let text = serde_json::to_string(&planned).expect("plain data");
        let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
        assert_eq!(read.options().instances, 8);
        let again = super::again(&read, &costs, &Declared).expect("prices");
        assert_eq!(again.predicted.step_s, planned.planned.predicted.step_s);
        let layout = read.layout().expect("legal");
        assert!(super::walk(&read, &layout, 0, &costs, &Declared).is_err());
    }
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

/// The longest sequence that is found fits, the next length does not, and no other of the grid that fits is longer.
#[test]
fn oracle_the_longest_sequence_is_the_longest_of_all_lengths() {
    let model = presets::load("tiny-mixtral").expect("a preset");
    let cluster = cluster("dgx-h100");
    let costs = Costs::for_cluster(&cluster, &[]);
    let options = |seq_len: u64, memory_gib: Option<f64>, objective: Objective| SearchOptions {
        top: 1,
        memory_gib,
        objective,
        ..SearchOptions::new(
            Batch {
                seq_len,
                global_batch: 8,
            },
            StackName::Megatron,
        )
    };
    for (gpus, there, from) in [(4, 700_u64, 64_u64), (8, 333, 100), (6, 48, 48)] {
        let least = options(there, None, Objective::Memory);
        let least = plan(&model, &cluster, gpus, &least, &costs, &Declared).expect("fits");
        let limit = Some(least.plans[0].predicted.peak_gib);
        let asked = options(from, limit, Objective::Throughput);
        let asked = Asked::new(&model, &cluster, gpus, &asked, &costs, &Declared);
        let found = super::longest(&asked).expect("the shortest fits");
        assert!(!found.stopped);
        let fits = |seq_len: u64| {
            let options = options(seq_len, limit, Objective::Throughput);
            plan(&model, &cluster, gpus, &options, &costs, &Declared)
                .ok()
                .map(|found| found.plans[0].predicted.step_s)
        };
        let grain = 2 * u64::from(gpus);
        let longest = found.longest();
        assert!(longest >= there / grain * grain, "{gpus}: {found:?}");
        // Every length of the grid up to twice as far.
        let multiples = (1..).map(|n| n * grain).skip_while(|&n| n <= from);
        let all = multiples.take_while(|&n| n <= 2 * longest + grain);
        let best = all.filter(|&n| fits(n).is_some()).max().unwrap_or(from);
        assert_eq!(longest, best, "{gpus}: {found:?}");
        for length in &found.tried {
            assert_eq!(length.step_s, fits(length.seq_len), "{gpus}: {length:?}");
        }
    }
}
