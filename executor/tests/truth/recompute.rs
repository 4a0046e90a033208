//! Recomputing changes no bit: losses, norms of gradients, loads and weights are those without, for every
//! set of modules.

use moefold_planner::choice::{Module, Recompute, RecomputePlan};
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees};
use crate::cuda;
use crate::layouts::{legal, pipelines};

/// Every set of modules that some layer of a model has, the empty one apart, and all of it.
pub(crate) fn sets(fixture: &Fixture) -> Vec<Recompute> {
    let modules = Module::of(&fixture.model);
    let chosen = |bits: u32| {
        let chosen = modules.iter().enumerate();
        let chosen = chosen.filter(|(index, _)| bits >> index & 1 == 1);
        Recompute::of(chosen.map(|(_, &module)| module).collect())
    };
    let mut sets: Vec<Recompute> = (1..1 << modules.len()).map(chosen).collect();
    sets.push(Recompute::Full);
    sets
}

/// One set for all layers or one for each, the empty one among them.
pub(crate) fn drawn(fixture: &Fixture, random: &mut ChaCha8Rng) -> RecomputePlan {
    let mut sets = sets(fixture);
    sets.push(Recompute::None);
    let mut draw = |_| sets[random.random_range(0..sets.len())].clone();
    let all: Vec<Recompute> = (0..fixture.model.layers.len()).map(&mut draw).collect();
    if random.random() {
        RecomputePlan::by_layer(all)
    } else {
        all[0].clone().into()
    }
}

/// Trains with and without, with a load-balancing loss or not.
fn check(load: &dyn Fn() -> Fixture, degrees: &Degrees, plan: &RecomputePlan, aux_loss_coef: f64) {
    let train = |fixture: Fixture| {
        let mut options = fixture.options();
        options.balancing.aux_loss_coef = aux_loss_coef;
        fixture.train(degrees, 2, &options)
    };
    let (plain, again) = (train(load()), train(load().recomputing(plan.clone())));
    let what = format!("{} {degrees:?} {plan}", load().name);
    assert_eq!(plain.steps, again.steps, "{what}: steps");
    assert!(plain.weights == again.weights, "{what}: weights");
}

#[test]
fn law_recomputing_changes_no_bit_on_one_rank() {
    for name in ["mixtral", "qwen3_moe", "qwen3_tied", "qwen2_moe"] {
        let load = || Fixture::load(name).with_batch(4);
        for (i, set) in sets(&load()).iter().enumerate() {
            let aux = 0.01 * (i % 2) as f64;
            check(&load, &degrees(1, 1, 1, 1, 2), &set.clone().into(), aux);
        }
    }
}

/// With pipelines, and of families whose sets are many.
#[test]
fn law_recomputing_changes_no_bit_in_layouts_drawn() {
    const FIXTURES: [&str; 10] = [
        "gpt_oss",
        "mixtral",
        "qwen3_moe",
        "qwen3_tied",
        "qwen2_moe",
        "olmoe",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v3_mtp",
    ];
    let seed = cuda::seed();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for draw in 0..40 {
        let name = FIXTURES[draw % FIXTURES.len()];
        let has_pipeline = draw % 3 == 0;
        let load = || {
            let fixture = Fixture::load(name).with_batch(8);
            if has_pipeline {
                fixture.with_layers(4)
            } else {
                fixture
            }
        };
        let gpus = [2, 4, 8][random.random_range(0..3)];
        let layouts = if has_pipeline {
            pipelines(&load(), gpus)
        } else {
            legal(&load(), gpus)
        };
        let degrees = layouts[random.random_range(0..layouts.len())];
        let plan = drawn(&load(), &mut random);
        let one = || check(&load, &degrees, &plan, 0.01 * (draw % 2) as f64);
        let checked = std::panic::catch_unwind(one);
        assert!(checked.is_ok(), "MOEFOLD_SEED {seed}, draw {draw}");
    }
}
