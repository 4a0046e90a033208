//! Offloading changes no bit: losses, norms of gradients, loads and weights are those without, for every set of
//! modules, in any layout and beside any recomputation; and what leaves is off the device.

use moefold_executor::trace::Traced;
use moefold_planner::choice::{
    HostShare, Masters, Offload, OffloadModule, Optimizer, Recompute, StackName, Zero,
};
use moefold_planner::layout::{Batch, Degrees};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Predicted;
use moefold_planner::runtime::Runtime;
use moefold_planner::search;
use moefold_planner::stack::megatron::Declared;
use moefold_profiles::trace::Category;
use moefold_profiles::{Costs, Precision, TensorClass, presets};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees, piped};
use crate::cuda::{self, Emulated};
use crate::layouts::{legal, pipelines};
use crate::overlap::BOTH;
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

/// Trains with states of the optimizer on the host and without.
fn check_states(fixture: &mut Fixture, on: Option<Emulated>, degrees: &Degrees, share: HostShare) {
    let options = fixture.options();
    let mut train = |share| {
        fixture.savers.optimizer_offload = share;
        let look = |trainer: &moefold_executor::train::Trainer| {
            let memory = trainer.cx.device.memory();
            let on_host = memory.on_host();
            assert_eq!(
                memory.peak_on_host(),
                on_host,
                "no more than what rests there"
            );
            [memory.live(TensorClass::Optimizer), on_host].map(|bytes| bytes.0)
        };
        let cpu = || options.device.open(0, degrees.gpus).expect("a CPU");
        let open = || on.map_or_else(cpu, Emulated::open);
        fixture.train_on(open, degrees, 3, &options, look)
    };
    let ((plain, all), (away, parts)) = (train(HostShare::default()), train(share));
    let what = format!("{} {degrees:?} {share:?}", fixture.name);
    assert_eq!(plain.steps, away.steps, "{what}: steps");
    assert!(plain.weights == away.weights, "{what}: masters");
    for ([all, nothing], [kept, on_host]) in all.into_iter().zip(parts) {
        assert_eq!((nothing, kept + on_host), (0, all), "{what}: bytes");
        // Each of two families keeps less than a grain more than its share.
        let least = share.0 * all as f64 - 2.0 * 130.0 * 12.0;
        assert!(on_host as f64 >= least, "{what}: {on_host} of {all}");
    }
}

#[test]
fn law_states_on_the_host_change_no_bit_in_layouts_drawn() {
    const FIXTURES: [&str; 5] = [
        "mixtral",
        "qwen3_moe",
        "qwen3_tied",
        "deepseek_v3_mtp",
        "gpt_oss",
    ];
    let seed = cuda::seed();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for draw in 0..15 {
        let mut fixture = Fixture::load(FIXTURES[draw % FIXTURES.len()]).with_batch(8);
        let gpus = [1, 2, 4, 8][random.random_range(0..4)];
        let layouts = legal(&fixture, gpus);
        let degrees = layouts[random.random_range(0..layouts.len())];
        if random.random() {
            fixture.savers.optimizer = Optimizer::AdamBf16Moments;
        }
        match random.random_range(0..3) {
            0 => {}
            1 => {
                fixture.savers.overlap = BOTH;
                fixture.savers.bucket_elements = Some(1000);
            }
            _ => {
                fixture.savers.overlap = BOTH;
                fixture.savers.zero = Zero::Fsdp;
            }
        }
        let share = HostShare([0.1, 0.5, 1.0][random.random_range(0..3)]);
        let one = || check_states(&mut fixture, None, &degrees, share);
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
        assert!(checked.is_ok(), "MOEFOLD_SEED {seed}, draw {draw}");
    }
}

/// Beside what is updated on streams that the emulator watches for races; the bits are the device's own.
#[test]
fn law_states_on_the_host_change_no_bit_on_cuda() {
    for (name, on, degrees, masters, share) in [
        (
            "qwen3_tied",
            cuda::F32,
            degrees(1, 1, 1, 1, 1),
            Masters::Fp32,
            1.0,
        ),
        (
            "qwen3_moe_raw",
            cuda::BF16,
            degrees(2, 2, 2, 1, 1),
            Masters::Fp32,
            0.5,
        ),
        (
            "qwen3_moe_raw",
            cuda::HOPPER,
            degrees(2, 1, 2, 1, 1),
            Masters::Remainder,
            0.7,
        ),
    ] {
        if !on.is_there() {
            return;
        }
        let mut fixture = Fixture::load(name).with_batch(2);
        fixture.savers.masters = masters;
        check_states(&mut fixture, Some(on), &degrees, HostShare(share));
    }
}

/// What rests on the host fits more on the device, and its ways take the time of the link beyond the update.
#[test]
fn states_on_the_host_are_planned() {
    let model = &moefold_planner::model::presets::load("qwen3-30b-a3b").expect("a preset");
    let cluster = presets::cluster("dgx-h100").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 8,
    };
    let costs = Costs::for_cluster(&cluster, &[]);
    let traced = Traced::new(model, &cluster);
    for (stack, runtime) in [
        (StackName::Moefold, &traced as &dyn Runtime),
        (StackName::Megatron, &Declared),
    ] {
        let plan = |share| {
            let options = SearchOptions {
                precision: Precision::Bf16,
                recompute: Some(Recompute::Full.into()),
                pins: "tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1".parse().expect("degrees"),
                optimizer_offload: HostShare(share),
                memory_gib: Some(1e9),
                ..SearchOptions::new(batch, stack)
            };
            let mut cluster = cluster.clone();
            cluster.gpu.memory_gib = 1e9;
            let found = search::plan(model, &cluster, 8, &options, &costs, runtime);
            found.expect("it fits").plans.swap_remove(0)
        };
        let [stays, half, all] = [0.0, 0.5, 1.0].map(plan);
        assert_eq!(stays.optimizer_offload_fraction, None);
        assert_eq!(half.optimizer_offload_fraction, Some(HostShare(0.5)));
        let [stays, half, all] = [stays.predicted, half.predicted, all.predicted];
        let state = |of: &Predicted| of.memory_gib[TensorClass::Optimizer];
        assert_eq!(stays.host_gib, None);
        let host = |of: &Predicted| of.host_gib.expect("some");
        assert_eq!(host(&all), state(&stays), "all of them");
        assert!((host(&half) / host(&all) - 0.5).abs() < 0.01);
        assert!(
            all.peak_gib < stays.peak_gib && stays.step_s < half.step_s && half.step_s < all.step_s
        );
        let ways = 2.0 * host(&all) * f64::from(1 << 30) / (cluster.gpu.host_link_gb_per_s * 1e9);
        let copied = all.busy_s["host_copy"];
        assert!((copied / ways - 1.0).abs() < 0.02, "{copied} for {ways}");
        let offload = all.time_s.get(Category::Offload).0;
        assert!(offload > 0.0 && offload <= copied);
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
