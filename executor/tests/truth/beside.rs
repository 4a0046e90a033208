//! The shared expert beside the exchange of tokens changes no bit: losses, norms of gradients, loads and weights are
//! those without.

use moefold_planner::choice::{Module, Recompute};
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, cut, degrees, piped};
use crate::cuda::{F32, seed};
use crate::layouts::legal;

/// Shared experts behind a gate, and without one, beside latent attention and not.
const FIXTURES: [&str; 3] = ["qwen2_moe", "glm4_moe", "deepseek_v3_mtp"];

/// Trains with and without.
fn check(load: &dyn Fn() -> Fixture, degrees: &Degrees) {
    let train = |beside: bool| {
        let mut fixture = load();
        fixture.savers.overlap.shared_expert = beside;
        fixture.train(degrees, 2, &fixture.options())
    };
    let (plain, beside) = (train(false), train(true));
    let what = format!("{} {degrees:?}", load().name);
    assert_eq!(plain.steps, beside.steps, "{what}: steps");
    assert!(plain.weights == beside.weights, "{what}: weights");
}

#[test]
fn law_the_shared_expert_beside_dispatch_changes_no_bit() {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    for name in FIXTURES {
        let again = [
            Recompute::None,
            Recompute::of(vec![Module::MoeAct, Module::Layernorm]),
            Recompute::of(vec![Module::Moe]),
            Recompute::Full,
        ];
        let set = again[random.random_range(0..again.len())].clone();
        let load = || {
            let fixture = Fixture::load(name).with_layers(4).with_batch(8);
            fixture.recomputing(set.clone())
        };
        let mut layouts = vec![
            degrees(4, 2, 2, 2, 2),
            piped(degrees(4, 1, 2, 1, 2), 2, 1),
            cut(degrees(4, 2, 4, 1, 2), 2),
        ];
        let legal = legal(&load(), 4);
        layouts.push(legal[random.random_range(0..legal.len())]);
        for degrees in layouts {
            let one = std::panic::AssertUnwindSafe(|| check(&load, &degrees));
            let checked = std::panic::catch_unwind(one);
            let what = (seed(), name, degrees, &set);
            assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
        }
    }
}

/// On emulated GPUs, whose copies and collectives run beside their kernels in any order.
#[test]
fn law_the_shared_expert_beside_dispatch_changes_no_bit_on_cuda() {
    if !F32.is_there() {
        return;
    }
    let layout = degrees(2, 2, 2, 1, 2);
    let train = |beside: bool| {
        let mut fixture = Fixture::load("qwen2_moe").with_batch(2);
        fixture.savers.overlap.shared_expert = beside;
        let options = fixture.options();
        let (trained, _) = fixture.train_on(|| F32.open(), &layout, 1, &options, |_| ());
        trained
    };
    let (plain, beside) = (train(false), train(true));
    assert_eq!(plain.steps, beside.steps);
    assert!(plain.weights == beside.weights, "weights");
}
