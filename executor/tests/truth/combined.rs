//! Forward passes beside backward passes of other microbatches change no bit: losses, norms of gradients, loads and
//! weights are those of passes one after the other, gradients of weights delayed or not. What memory they take is
//! traced, and planned.

use moefold_planner::choice::{
    Dispatcher, Module, Offload, Overlap, Recompute, RecomputePlan, ScheduleName,
};
use moefold_planner::layout::Degrees;
use moefold_profiles::presets;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, cut, degrees, piped};
use crate::cuda::{self, F32};
use crate::layouts::{DEEP, compare, compare_gradients, gradients, legal, pipelines};
use crate::peak::{CPU, check, check_emulated, check_plan, losses, recomputing, unvarying};

/// Experts beside dense layers, shared experts behind a gate and without, latent attention, multi-token prediction.
const FIXTURES: [&str; 6] = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v3_mtp",
];

/// Layouts of some ranks in which tokens are sent, with and without a pipeline.
fn sending(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = legal(fixture, gpus);
    all.extend(pipelines(fixture, gpus));
    all.retain(|degrees| degrees.ep > 1);
    all
}

/// Several microbatches a step, as fixtures have sequences for.
fn several(fixture: &Fixture, degrees: &Degrees) -> bool {
    fixture.layout(degrees).microbatches() > 1
}

/// A schedule of combined passes, of those that some degrees have.
fn schedule(fixture: &Fixture, degrees: &Degrees, random: &mut ChaCha8Rng) -> ScheduleName {
    // Of fewer microbatches some of them combine nothing.
    let several = fixture.layout(degrees).microbatches() > degrees.pp;
    let all = ScheduleName::all_of(degrees.pp, degrees.vpp);
    let all = all.filter(|name| name.combines() && (several || !name.is_vee()));
    let all: Vec<ScheduleName> = all.collect();
    *all.choose(random).expect("one of any degrees")
}

/// Combined passes of a layout, whatever else goes with them, drawn: one set of every layer where a plan is to choose it.
fn combining(fixture: Fixture, degrees: &Degrees, random: &mut ChaCha8Rng) -> Fixture {
    let mut fixture = recomputing(fixture, random);
    fixture.savers.offload = Offload::NONE;
    let sets = [
        Recompute::None,
        Recompute::of(vec![Module::MoeAct]),
        Recompute::of(vec![Module::Layernorm, Module::CoreAttn]),
        Recompute::of(vec![Module::SharedExperts]),
    ];
    let shares = shares(&fixture);
    let has = |set: &&Recompute| shares || !set.covers(Module::SharedExperts);
    let sets: Vec<&Recompute> = sets.iter().filter(has).collect();
    let mut draw = |_| (*sets.choose(random).expect("none at least")).clone();
    let all = (0..fixture.model.layers.len()).map(&mut draw);
    fixture.savers.recompute = RecomputePlan::by_layer(all.collect());
    let dispatching = &mut fixture.savers.dispatching;
    dispatching.dispatcher = Dispatcher::Alltoall;
    fixture.savers.schedule = None;
    fixture.savers.schedule = Some(schedule(&fixture, degrees, random));
    fixture.savers.overlap = Overlap {
        expert_alltoall: true,
        delay_wgrad: random.random(),
        ..fixture.savers.overlap
    };
    fixture
}

fn shares(fixture: &Fixture) -> bool {
    let mut layers = fixture.model.layers.iter();
    layers.any(|layer| layer.moe().is_some_and(|moe| moe.shared.is_some()))
}

/// Trains with combined passes and without.
fn check_bits(fixture: &mut Fixture, degrees: &Degrees, random: &mut ChaCha8Rng) {
    let mut options = fixture.options();
    options.balancing = losses(random.random_range(0..5));
    let combined = fixture.train(degrees, 2, &options);
    let savers = fixture.savers.clone();
    let comes_back = savers.schedule.is_some_and(ScheduleName::is_vee);
    fixture.savers.schedule = comes_back.then_some(ScheduleName::DualpipeV);
    fixture.savers.overlap.expert_alltoall = false;
    fixture.savers.overlap.delay_wgrad = false;
    let apart = fixture.train(degrees, 2, &options);
    let what = format!("{} {degrees:?} {savers:?}", fixture.name);
    let seed = cuda::seed();
    assert_eq!(apart.steps, combined.steps, "MOEFOLD_SEED={seed} {what}");
    let same = apart.weights == combined.weights;
    assert!(same, "MOEFOLD_SEED={seed} {what}: weights");
}

/// One in `of` of all layouts of up to eight ranks.
fn check_all_bits(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in FIXTURES {
        let load = || Fixture::load(name).with_layers(4).with_batch(8);
        let all: Vec<Degrees> = [2, 4, 8]
            .into_iter()
            .flat_map(|gpus| sending(&load(), gpus))
            .filter(|degrees| several(&load(), degrees))
            .collect();
        assert!(all.len() > 20, "{name}: {}", all.len());
        let first = random.random_range(0..of.min(all.len()));
        for degrees in all.iter().skip(first).step_by(of) {
            let mut fixture = combining(load(), degrees, &mut random);
            check_bits(&mut fixture, degrees, &mut random);
        }
    }
}

#[test]
fn law_combined_passes_change_no_bit_in_layouts_drawn() {
    check_all_bits(60);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are thousands of layouts"]
fn law_combined_passes_change_no_bit() {
    check_all_bits(1);
}

/// Losses and gradients of ranks that divide everything there is.
#[test]
fn oracle_combined_passes_equal_one_rank() {
    const STEPS: u64 = 2;
    for name in ["qwen3_moe", "deepseek_v3_mtp"] {
        let mut fixture = Fixture::load(name).with_layers(4).with_batch(8);
        let one = degrees(1, 1, 1, 1, 8);
        let single = fixture.train(&one, STEPS, &fixture.options());
        let grads = gradients(&fixture, &one);
        fixture.savers.schedule = Some(ScheduleName::Combined);
        fixture.savers.overlap.expert_alltoall = true;
        fixture.savers.overlap.delay_wgrad = true;
        for degrees in [
            degrees(4, 2, 2, 2, 1),
            cut(degrees(4, 1, 2, 1, 1), 2),
            piped(degrees(4, 1, 2, 1, 1), 2, 1),
            piped(degrees(4, 2, 2, 1, 1), 2, 2),
        ] {
            compare(&fixture, &single, &degrees, STEPS);
            compare_gradients(&fixture, &grads, &degrees);
        }
        fixture.savers.schedule = Some(ScheduleName::DualpipeVCombined);
        let turns = piped(degrees(4, 1, 2, 1, 1), 2, 2);
        compare(&fixture, &single, &turns, STEPS);
        compare_gradients(&fixture, &grads, &turns);
    }
}

/// On emulated GPUs, whose copies and collectives run beside their kernels in any order.
#[test]
fn law_combined_passes_change_no_bit_on_cuda() {
    use ScheduleName::{Combined, DualpipeV, DualpipeVCombined, None};

    if !F32.is_there() {
        return;
    }
    let one = (degrees(2, 1, 2, 1, 1), 4, [None, Combined]);
    let pipeline = piped(degrees(4, 1, 2, 1, 1), 2, 2);
    let turns = (pipeline, 6, [DualpipeV, DualpipeVCombined]);
    for (layout, batch, schedules) in [one, turns] {
        let [apart, combined] = schedules.map(|schedule| {
            let fixture = Fixture::load("qwen3_moe_raw").with_layers(2);
            let mut fixture = fixture.with_batch(batch);
            fixture.savers.schedule = Some(schedule);
            fixture.savers.overlap.expert_alltoall = schedule.combines();
            fixture.savers.overlap.delay_wgrad = schedule.combines();
            let options = fixture.options();
            let (trained, _) = fixture.train_on(|| F32.open(), &layout, 1, &options, |_| ());
            trained
        });
        assert_eq!(apart.steps, combined.steps);
        assert!(apart.weights == combined.weights, "weights");
    }
}

/// One in `of` of all layouts.
fn check_traces(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (name, layers) in DEEP.into_iter().chain([("qwen2_moe", 4)]) {
        let load = || Fixture::load(name).with_layers(layers).with_batch(8);
        for gpus in [2, 4, 8] {
            let all = sending(&load(), gpus);
            for degrees in all.iter().filter(|degrees| several(&load(), degrees)) {
                if random.random_range(0..of) > 0 {
                    continue;
                }
                let fixture = combining(load(), degrees, &mut random);
                let balancing = losses(random.random_range(0..5));
                let one = || check(&fixture, &CPU, degrees, 2, balancing);
                let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
                let what = (cuda::seed(), name, degrees, &fixture.savers);
                assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
            }
        }
    }
}

#[test]
fn law_a_traced_step_is_the_step_of_combined_passes() {
    check_traces(100);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are thousands of layouts"]
fn law_a_traced_step_is_the_step_of_combined_passes_in_every_layout() {
    check_traces(1);
}

#[test]
fn law_a_traced_step_is_that_of_combined_passes_on_cuda() {
    let mut fixture = Fixture::load("qwen3_moe_raw").with_batch(4);
    fixture.savers.schedule = Some(ScheduleName::Combined);
    fixture.savers.overlap.expert_alltoall = true;
    fixture.savers.overlap.delay_wgrad = true;
    let layout = degrees(2, 1, 2, 1, 1);
    check_emulated(&fixture, cuda::BF16, &layout, losses(0));
}

/// One in `of` of all layouts.
fn check_plans(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    let deep = [4, 5, 6, 4, 4, 4];
    for (fixture, layers) in unvarying().into_iter().zip(deep) {
        let mut fixture = fixture.with_layers(layers);
        if fixture.model.moe().is_none() {
            continue;
        }
        for gpus in [2, 4] {
            let cluster = presets::local(gpus);
            for degrees in sending(&fixture, gpus) {
                if random.random_range(0..of) > 0 {
                    continue;
                }
                fixture = combining(fixture, &degrees, &mut random);
                let one = || check_plan(&fixture, &cluster, &CPU, &degrees);
                let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
                let what = (cuda::seed(), fixture.name, degrees, &fixture.savers);
                assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
            }
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_combined_passes() {
    check_plans(12);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are hundreds of layouts"]
fn law_a_plan_says_the_peak_of_combined_passes_in_every_layout() {
    check_plans(1);
}
