//! What is split and cut without being named: no microbatch and no virtual stages that are asked for are better than what is
//! found, and no split that is given is better than what is said to be left.

use super::{cluster, cuts, run, small};
use crate::choice::{Recompute, StackName};
use crate::layout::Batch;
use crate::model::{Model, presets};
use crate::options::{PipelineLayout, SearchOptions};
use crate::plan::PlannedLayout;
use crate::search::plan;
use crate::stack::megatron::Declared;
use moefold_profiles::pricing::Costs;

fn step_s(plans: &[PlannedLayout]) -> f64 {
    plans[0].predicted.step_s
}

/// A small model on devices with much memory is fastest in microbatches that other models cannot hold.
#[test]
fn oracle_no_microbatch_that_is_asked_for_beats_the_search() {
    let model = presets::load("granite-3.1-1b-a400m-instruct").expect("a preset");
    let cluster = cluster("dgx-b300");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 4096,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    let open = run(&model, &cluster, 8, &options);
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut fit = 0;
    for mbs in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
        options.pins.mbs = Some(mbs);
        if let Ok(found) = plan(&model, &cluster, 8, &options, &costs, &Declared) {
            assert!(step_s(&found.plans) >= step_s(&open.plans), "mbs={mbs}");
            fit += u32::from(mbs >= 16);
        }
    }
    assert!(fit >= 2, "{fit} of the larger ones fit");
}

/// Nor do virtual stages, between the fewest and the most with the same largest stage.
#[test]
fn oracle_no_virtual_stages_that_are_asked_for_beat_the_search() {
    let (model, cluster, mut options) = small();
    options.batch.global_batch = 64;
    options.pins = "tp=1,cp=1,pp=4,ep=8,etp=1,mbs=1".parse().expect("degrees");
    let open = run(&model, &cluster, 32, &options);
    for vpp in 1..=8 {
        options.pins.vpp = Some(vpp);
        let own = run(&model, &cluster, 32, &options);
        assert!(step_s(&own.plans) >= step_s(&open.plans), "vpp={vpp}");
    }
}

/// The split that is found is the best of all, but for some; and what is said to be left is no less than what the best of
/// all gains, and with one stage a rank not much more.
#[test]
fn oracle_the_gap_covers_the_best_of_all_splits() {
    let (_, cluster, options) = small();
    let costs = Costs::for_cluster(&cluster, &[]);
    let (mut cases, mut exact, mut tight) = (0, 0, [0; 2]);
    let mut worst = (0.0_f64, String::new());
    for (name, pins, gpus) in [
        ("mixtral-8x7b", "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,mbs=1", 32),
        ("mixtral-8x7b", "tp=2,cp=1,pp=2,vpp=2,ep=8,etp=1,mbs=1", 16),
        (
            "deepseek-v2-lite",
            "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,mbs=1",
            32,
        ),
        (
            "deepseek-v2-lite",
            "tp=1,cp=1,pp=2,vpp=2,ep=8,etp=1,mbs=1",
            16,
        ),
        ("qwen3-30b-a3b", "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,mbs=1", 32),
        ("gpt-oss-20b", "tp=1,cp=1,pp=4,vpp=1,ep=4,etp=1,mbs=1", 16),
    ] {
        let mut model: Model = presets::load(name).expect("a preset");
        model.layers.truncate(8);
        let whole = [32, 64, 256].map(|global_batch| (global_batch, None, None));
        let part = [0.97, 0.9, 0.8].map(|share| (64, Some(share), None));
        // More layers than any stage has.
        let again = Some((64, None, Some("block-20")));
        for (global_batch, share, recompute) in whole.into_iter().chain(part).chain(again) {
            let mut options = options.clone();
            options.batch.global_batch = global_batch;
            options.recompute = recompute.map(|plan| plan.parse().expect("a plan"));
            options.pins = pins.parse().expect("degrees");
            if let Some(share) = share {
                // Where the best of all does not fit.
                let whole = run(&model, &cluster, gpus, &options);
                options.memory_gib = Some(share * whole.plans[0].predicted.peak_gib);
            }
            let Ok(found) = plan(&model, &cluster, gpus, &options, &costs, &Declared) else {
                continue;
            };
            let layout = found.plans[0].layout;
            let each = cuts(8, layout.pp * layout.vpp, [1, 0]).into_iter();
            let each = each.filter_map(|stages| {
                options.stages = Some(PipelineLayout::from(stages));
                plan(&model, &cluster, gpus, &options, &costs, &Declared).ok()
            });
            let best_s = each.map(|given| {
                assert!(given.search.optimal && given.search.gap == 0.0);
                step_s(&given.plans)
            });
            let best_s = best_s.fold(f64::INFINITY, f64::min);
            let (found_s, gap) = (step_s(&found.plans), found.search.gap);
            assert_eq!(
                found.search.optimal,
                gap == 0.0,
                "{name} {pins} {global_batch}"
            );
            assert!(
                found_s * (1.0 - gap) <= best_s * (1.0 + 1e-9),
                "{name} {pins} {global_batch} {share:?}: {found_s} {gap} {best_s}"
            );
            cases += 1;
            tight[usize::from(layout.vpp > 1)] += usize::from(gap < 0.05);
            let off = found_s / best_s - 1.0;
            if off > worst.0 {
                let of = format!(
                    "{name} {pins} {global_batch} {share:?}: {:?}",
                    found.plans[0].recompute
                );
                worst = (off, of);
            }
            exact += usize::from(found_s <= best_s * (1.0 + 1e-9));
        }
    }
    assert!(
        cases >= 20 && exact * 4 >= cases * 3 && tight[0] >= 15 && tight[1] >= 4 && worst.0 < 0.02,
        "{exact} of {cases} are the best, worst {worst:?}; {tight:?} are bounded well"
    );
}

/// Where nothing may be recomputed and the split that is balanced by time has no room, one that has it is found, if there is any,
/// and takes no longer than the best.
#[test]
fn oracle_a_split_with_room_is_found() {
    let (_, cluster, options) = small();
    let costs = Costs::for_cluster(&cluster, &[]);
    // With a stage a rank, and with several.
    let (mut moved, mut worst) = ([0; 2], 0.0_f64);
    for (name, gpus, pins) in [
        ("mixtral-8x7b", 32, "pp=4,vpp=1,ep=8"),
        ("deepseek-v2-lite", 32, "pp=4,vpp=1,ep=8"),
        ("gpt-oss-20b", 16, "pp=4,vpp=1,ep=4"),
        ("mixtral-8x7b", 16, "pp=2,vpp=2,ep=8"),
        ("deepseek-v2-lite", 16, "pp=2,vpp=2,ep=8"),
        ("gpt-oss-20b", 8, "pp=2,vpp=2,ep=4"),
    ] {
        let mut model: Model = presets::load(name).expect("a preset");
        model.layers.truncate(11);
        let pins = format!("tp=1,cp=1,{pins},etp=1,mbs=1");
        let mut options = SearchOptions {
            pins: pins.parse().expect("degrees"),
            recompute: Some(Recompute::None.into()),
            ..options.clone()
        };
        options.batch.global_batch = 64;
        options.memory_gib = None;
        let whole = run(&model, &cluster, gpus, &options);
        let several = whole.plans[0].layout.vpp > 1;
        let (balanced, peak_gib) = (
            whole.plans[0].pipeline.clone(),
            whole.plans[0].predicted.peak_gib,
        );
        for share in [0.99, 0.97, 0.95, 0.92, 0.89, 0.86] {
            options.memory_gib = Some(share * peak_gib);
            let plan = |stages: Option<PipelineLayout>| {
                let options = SearchOptions {
                    stages,
                    ..options.clone()
                };
                let found = plan(&model, &cluster, gpus, &options, &costs, &Declared);
                found.ok().map(|found| step_s(&found.plans))
            };
            let each = cuts(11, 4, [1, 0]).into_iter().map(PipelineLayout::from);
            let best_s = each.filter_map(|stages| plan(Some(stages)));
            let best_s = best_s.fold(f64::INFINITY, f64::min);
            let found_s = plan(None).unwrap_or(f64::INFINITY);
            assert!(
                found_s.is_finite() == best_s.is_finite(),
                "{name} {pins} {share}: {found_s} {best_s}, balanced {balanced:?}"
            );
            if found_s.is_finite() {
                moved[usize::from(several)] += 1;
                worst = worst.max(found_s / best_s - 1.0);
            }
        }
    }
    assert!(
        moved.into_iter().all(|moved| moved >= 4) && worst < 1e-9,
        "{moved:?} moved, worst {worst}"
    );
}

/// What is proven best has nothing left to gain, whatever it recomputes.
#[test]
fn law_what_is_optimal_leaves_no_gap() {
    let (mut model, cluster, mut options) = small();
    // With several stages a rank, too many to try all their splits.
    model.layers.truncate(16);
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut recomputed = 0;
    for pins in [
        "tp=2,cp=1,pp=1,ep=8,etp=1,mbs=1",
        "tp=1,cp=1,pp=2,vpp=1,ep=8,etp=1,mbs=1",
        "tp=1,cp=1,pp=2,vpp=3,ep=8,etp=1,mbs=1",
    ] {
        options.pins = pins.parse().expect("degrees");
        options.memory_gib = None;
        let peak_gib = run(&model, &cluster, 16, &options).plans[0]
            .predicted
            .peak_gib;
        for share in [1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9] {
            let memory_gib = Some(share * peak_gib);
            options.memory_gib = memory_gib;
            let found = plan(&model, &cluster, 16, &options, &costs, &Declared);
            let Ok(found) = found else {
                continue;
            };
            let search = &found.search;
            assert!(search.optimal && search.gap == 0.0, "{pins} {memory_gib:?}");
            let recompute = found.plans[0]
                .recompute
                .alike()
                .is_some_and(|set| *set != Recompute::None);
            recomputed += u32::from(recompute);
        }
    }
    assert!(recomputed > 5, "{recomputed}");
}
