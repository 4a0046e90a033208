//! Offloading changes no bit: losses, norms of gradients, loads and weights are those without, for every set of
//! modules, in any layout and beside any recomputation; and what leaves is off the device.

use moefold_executor::trace::Traced;
use moefold_planner::choice::{Offload, OffloadModule, Recompute, StackName};
use moefold_planner::layout::Degrees;
use moefold_planner::options::SearchOptions;
use moefold_planner::search;
use moefold_profiles::trace::Category;
use moefold_profiles::{Costs, Precision, presets};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees, piped};
use crate::cuda::{self, Emulated};
use crate::layouts::{legal, pipelines};
use crate::recompute;

/// Some of the modules that a fixture's layers keep beside what they compute again; none in half of all cases.
pub(crate) fn drawn(fixture: &Fixture, random: &mut ChaCha8Rng) -> Offload {
    let (model, again) = (&fixture.model, &fixture.savers.recompute);
    let kept = Offload::all(model).kept(model, &|layer| again.of_layer(layer));
    let bits: u8 = random.random();
    let some = kept
        .modules()
        .filter(|&module| bits >> module as u8 & 1 == 1);
    let some: Vec<OffloadModule> = some.collect();
    if random.random() {
        Offload::NONE
    } else {
        Offload::of(some)
    }
}

/// Trains with and without, on devices of a kind or the CPU; gives the most that a rank had on its host.
fn check(fixture: &mut Fixture, on: Option<Emulated>, degrees: &Degrees, offload: Offload) -> u64 {
    let mut options = fixture.options();
    options.balancing.aux_loss_coef = 0.01;
    let mut train = |offload| {
        fixture.savers.offload = offload;
        let look = |trainer: &moefold_executor::train::Trainer| {
            let memory = trainer.cx.device.memory();
            assert_eq!(memory.on_host().0, 0, "all is back");
            memory.peak_on_host().0
        };
        let cpu = || options.device.open(0, degrees.gpus).expect("a CPU");
        let open = || on.map_or_else(cpu, Emulated::open);
        fixture.train_on(open, degrees, 2, &options, look)
    };
    let ((plain, _), (away, on_host)) = (train(Offload::NONE), train(offload));
    let recompute = &fixture.savers.recompute;
    let what = format!(
        "{} {degrees:?} {recompute} offloading {offload}",
        fixture.name
    );
    assert_eq!(plain.steps, away.steps, "{what}: steps");
    assert!(plain.weights == away.weights, "{what}: weights");
    on_host.into_iter().max().expect("a rank")
}

#[test]
fn law_offloading_changes_no_bit_on_one_rank() {
    for name in ["mixtral", "qwen3_moe", "deepseek_v3"] {
        let mut fixture = Fixture::load(name).with_batch(4);
        for module in Offload::all(&fixture.model).modules() {
            let one = Offload::of([module]);
            let on_host = check(&mut fixture, None, &degrees(1, 1, 1, 1, 2), one);
            assert!(on_host > 0, "{name}: {} keeps something", module.name());
        }
    }
}

/// With pipelines and recompute sets.
#[test]
fn law_offloading_changes_no_bit_in_layouts_drawn() {
    const FIXTURES: [&str; 6] = [
        "mixtral",
        "gpt_oss",
        "qwen3_moe",
        "qwen3_tied",
        "deepseek_v3_mtp",
        "qwen2_moe",
    ];
    let seed = cuda::seed();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for draw in 0..24 {
        let mut fixture = Fixture::load(FIXTURES[draw % FIXTURES.len()]).with_batch(8);
        let gpus = [2, 4, 8][random.random_range(0..3)];
        let layouts = if draw % 2 == 0 {
            fixture = fixture.with_layers(4);
            pipelines(&fixture, gpus)
        } else {
            legal(&fixture, gpus)
        };
        let degrees = layouts[random.random_range(0..layouts.len())];
        if random.random() {
            let plan = recompute::drawn(&fixture, &mut random);
            fixture = fixture.recomputing(plan);
        }
        let offload = drawn(&fixture, &mut random);
        let offload = if offload.is_none() {
            Offload::all(&fixture.model)
        } else {
            offload
        };
        let one = || check(&mut fixture, None, &degrees, offload);
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
        assert!(checked.is_ok(), "MOEFOLD_SEED {seed}, draw {draw}");
    }
}

/// Beside what the device computes, on streams that the emulator watches for races.
#[test]
fn law_offloading_changes_no_bit_on_cuda() {
    for (name, on, degrees) in [
        ("qwen3_tied", cuda::F32, degrees(1, 1, 1, 1, 1)),
        ("qwen3_moe", cuda::BF16, piped(degrees(2, 1, 1, 1, 1), 2, 1)),
    ] {
        if !on.is_there() {
            return;
        }
        let mut fixture = Fixture::load(name).with_batch(2);
        let all = Offload::all(&fixture.model);
        assert!(check(&mut fixture, Some(on), &degrees, all) > 0, "{name}");
    }
}

/// A model that fits only where something leaves is planned so when the search may.
#[test]
fn a_search_that_may_offload_finds_what_fits() {
    let fixture = Fixture::load("qwen3_moe").with_layers(4).with_batch(8);
    let (model, cluster) = (
        &fixture.model,
        presets::cluster("dgx-h100").expect("a preset"),
    );
    let costs = Costs::for_cluster(&cluster, &[]);
    let runtime = Traced::new(model, &cluster);
    let plan = |offload, memory_gib| {
        let options = SearchOptions {
            precision: Precision::Bf16,
            recompute: Some(Recompute::None.into()),
            pins: "tp=1,cp=1,pp=1,ep=1,etp=1,mbs=4".parse().expect("degrees"),
            offload,
            memory_gib,
            ..SearchOptions::new(fixture.batch(), StackName::Moefold)
        };
        let found = search::plan(model, &cluster, 1, &options, &costs, &runtime);
        found.ok().map(|found| found.plans)
    };
    let stays = &plan(Some(Offload::NONE), None).expect("it fits")[0];
    assert_eq!(stays.predicted.host_gib, None);
    assert_eq!(stays.predicted.time_s.get(Category::Offload).0, 0.0);
    let auto = plan(None, None).expect("it fits");
    assert!(auto[0].predicted.step_s <= stays.predicted.step_s);

    let all = Offload::all(model);
    let away = &plan(Some(all), None).expect("it fits")[0].predicted;
    assert!(away.peak_gib < stays.predicted.peak_gib && away.host_gib > Some(0.0));
    assert!(away.busy_s["host_copy"] > 0.0);
    // Two passes over the link, as the cluster has it, of what rests there and no more.
    let most = 2.0 * 2.0 * away.host_gib.expect("some") * f64::from(1 << 30);
    assert!(away.busy_s["host_copy"] <= most / (cluster.gpu.host_link_gb_per_s * 1e9) * 1.001);
    let between = f64::midpoint(away.peak_gib, stays.predicted.peak_gib);
    assert!(plan(Some(Offload::NONE), Some(between)).is_none());
    let found = &plan(None, Some(between)).expect("something leaves")[0];
    assert!(!found.offload.is_none() && found.predicted.peak_gib <= between);
}
