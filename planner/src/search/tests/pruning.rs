//! Tests of what a search leaves out: nothing that could win, and all of it counted.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use moefold_profiles::pricing::Costs;

use super::{cluster, run, small};
use crate::choice::{Objective, Overlap, StackName};
use crate::layout::Batch;
use crate::model::presets;
use crate::options::{PlanError, SearchOptions};
use crate::plan::PlannedLayout;
use crate::search::{Aim, Asked, Progress, SearchResult, plan, plan_watched};
use crate::stack::megatron::Declared;

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
        let score = |found: &SearchResult| found.plans[0].predicted.score(objective);
        let whole = run(&model, &cluster, 16, &options);
        let (mut stopped, mut nothing, mut ended) = (0, 0, false);
        // Each of the first few looks, then ever fewer of the many.
        let some = std::iter::successors(Some(0), |looks| Some(looks + 1 + looks / 16));
        for looks in some.take_while(|looks| *looks < 100_000) {
            let left = AtomicU32::new(looks);
            let around = AtomicBool::new(false);
            let watch = |progress: &Progress| {
                assert!(progress.seen <= progress.all);
                around.fetch_or(progress.aim == Aim::Around, Ordering::Relaxed);
                let fewer = |some: u32| some.checked_sub(1);
                match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
                    Err(_) => ControlFlow::Break(()),
                    Ok(_) => ControlFlow::Continue(()),
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
            assert!(score(&whole) >= score(&found) * (1.0 - search.gap) * (1.0 - 1e-9));
            let Some(unseen) = search.unseen else {
                // All that is left to stop is what other splits could gain, and what keeping experts in a domain would come to.
                let is_whole = (&found.plans, search.gap) == (&whole.plans, whole.search.gap);
                assert!(is_whole || search.gap >= whole.search.gap);
                if is_whole {
                    ended = true;
                    break;
                }
                continue;
            };
            assert_eq!(
                search.space,
                refused + search.pruned + search.priced + unseen
            );
            // No layout is left where what is around the best is.
            assert!(!search.optimal && (unseen > 0 || around.load(Ordering::Relaxed)));
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
    for set in crate::search::recompute::sets(&model) {
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
        let found = crate::search::longest(&asked).expect("the shortest fits");
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
