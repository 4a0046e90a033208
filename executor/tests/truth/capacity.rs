//! Experts with a capacity: against plain PyTorch on one rank, padded against dropped, and under layouts. What is
//! dropped is decided among the tokens of each rank, so only layouts with the same tokens a rank agree.

use moefold_executor::moe::dispatch::Dispatching;
use moefold_planner::choice::{Capacity, Dispatcher, DropPolicy};
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use crate::common::{Fixture, Trained, assert_close, degrees};
use crate::cuda::{self, seed};
use crate::layouts::legal;

/// Relative, of losses and norms.
const TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Golden {
    microbatch: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    #[serde(rename = "case")]
    knobs: Knobs,
    steps: Vec<Step>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Knobs {
    factor: f64,
    policy: DropPolicy,
    #[serde(default)]
    aux: f64,
    #[serde(default)]
    rate: f64,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    aux_loss: f64,
    grad_norm: f64,
    dropped: Vec<u64>,
}

fn within(dispatcher: Dispatcher, factor: f64, drop_policy: DropPolicy, pad: bool) -> Dispatching {
    let capacity = Some(Capacity {
        factor,
        drop_policy,
        pad,
    });
    Dispatching {
        dispatcher,
        capacity,
    }
}

/// Some steps of a fixture whose tokens go to experts as said.
fn train(fixture: &mut Fixture, degrees: &Degrees, dispatching: Dispatching) -> Trained {
    fixture.savers.dispatching = dispatching;
    fixture.train(degrees, 2, &fixture.options())
}

/// The same first step but for the order of sums. Of later ones a token between two experts may choose the other:
/// an update makes much of the last bits of a small gradient.
fn assert_alike(found: &Trained, expected: &Trained, what: &str) {
    let (found, expected) = (&found.steps[0], &expected.steps[0]);
    assert_eq!(found.dropped, expected.dropped, "{what}");
    assert_eq!(found.expert_load, expected.expert_load, "{what}");
    assert_close(found.loss, expected.loss, 1e-6, what);
    assert_close(found.grad_norm, expected.grad_norm, 1e-5, what);
}

#[test]
fn oracle_what_experts_of_a_capacity_drop() {
    for name in ["mixtral", "glm4_moe"] {
        let mut fixture = Fixture::load(name);
        let golden: Golden = fixture.read("capacity.json");
        for (Case { knobs, steps }, pad) in golden
            .cases
            .iter()
            .flat_map(|case| [(case, false), (case, true)])
        {
            let mut options = fixture.options();
            options.balancing.aux_loss_coef = knobs.aux;
            options.balancing.bias_update_rate = knobs.rate;
            fixture.savers.dispatching =
                within(Dispatcher::Alltoall, knobs.factor, knobs.policy, pad);
            let one = degrees(1, 1, 1, 1, golden.microbatch);
            let trained = fixture.train(&one, steps.len() as u64, &options);
            for (i, (found, golden)) in trained.steps.iter().zip(steps).enumerate() {
                let what = |value| format!("{name} {knobs:?}, padded {pad}, step {i}, {value}");
                assert_eq!(found.dropped, golden.dropped, "{}", what("dropped"));
                for (value, found, golden) in [
                    ("loss", found.loss, golden.loss),
                    ("aux_loss", found.aux_loss, golden.aux_loss),
                    ("grad_norm", found.grad_norm, golden.grad_norm),
                ] {
                    if golden != 0.0 || found != 0.0 {
                        assert_close(found, golden, TOLERANCE, &what(value));
                    }
                }
            }
        }
    }
}

/// Of any layout: padding changes no result, and neither does gathering; a capacity that nobody comes to changes no
/// bit.
#[test]
fn differential_layouts_of_experts_with_a_capacity() {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    for name in ["mixtral", "qwen3_moe", "glm4_moe"] {
        let mut fixture = Fixture::load(name).with_batch(12);
        for gpus in [1, 2, 4, 8] {
            let all = legal(&fixture, gpus);
            for _ in 0..3 {
                let degrees = all[random.random_range(0..all.len())];
                let factor = [0.5, 0.9, 1.3][random.random_range(0..3)];
                let policy = DropPolicy::ALL[random.random_range(0..2)];
                let what = format!("{name} {degrees:?} {factor} {policy:?}, seed {}", seed());
                let of = |dispatcher, pad| within(dispatcher, factor, policy, pad);
                let dropped = train(&mut fixture, &degrees, of(Dispatcher::Alltoall, false));
                let padded = train(&mut fixture, &degrees, of(Dispatcher::Alltoall, true));
                let gathered = train(&mut fixture, &degrees, of(Dispatcher::Allgather, false));
                assert_alike(&padded, &dropped, &what);
                assert_alike(&gathered, &dropped, &what);
                let drops = dropped
                    .steps
                    .iter()
                    .flat_map(|step| &step.dropped)
                    .sum::<u64>();
                assert!(drops > 0, "{what}");

                let ample = within(Dispatcher::Alltoall, 1e3, policy, false);
                let ample = train(&mut fixture, &degrees, ample);
                let dropless = train(&mut fixture, &degrees, Dispatching::default());
                assert_eq!(ample.weights, dropless.weights, "{what}");
                for (ample, dropless) in ample.steps.iter().zip(&dropless.steps) {
                    assert_eq!(ample.loss.to_bits(), dropless.loss.to_bits(), "{what}");
                    assert!(ample.dropped.iter().all(|&dropped| dropped == 0), "{what}");
                }
            }
        }
    }
}

/// Layouts that divide experts differently, of the same tokens a rank.
#[test]
fn differential_the_same_tokens_a_rank_drop_the_same() {
    let mut fixture = Fixture::load("mixtral").with_batch(12);
    let mut expected = None;
    for (ep, etp) in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)] {
        for pad in [false, true] {
            let dispatching = within(Dispatcher::Alltoall, 0.8, DropPolicy::Probs, pad);
            let found = train(&mut fixture, &degrees(4, 2, ep, etp, 3), dispatching);
            let expected = expected.get_or_insert_with(|| {
                train(&mut fixture, &degrees(4, 2, ep, etp, 3), dispatching)
            });
            assert_alike(
                &found,
                expected,
                &format!("ep {ep}, etp {etp}, padded {pad}"),
            );
        }
    }
}

/// Emulated GPUs drop what the CPU drops.
#[test]
fn oracle_capacities_on_cuda_are_those_of_the_cpu() {
    if !cuda::F32.is_there() {
        return;
    }
    let mut fixture = Fixture::load("qwen3_moe_raw").with_batch(4);
    for (degrees, dispatcher, pad) in [
        (degrees(1, 1, 1, 1, 2), Dispatcher::Alltoall, false),
        (degrees(1, 1, 1, 1, 2), Dispatcher::Alltoall, true),
        (degrees(2, 1, 2, 1, 2), Dispatcher::Alltoall, true),
        (degrees(2, 2, 1, 2, 2), Dispatcher::Allgather, false),
    ] {
        for policy in DropPolicy::ALL {
            let dispatching = within(dispatcher, 0.7, policy, pad);
            let expected = train(&mut fixture, &degrees, dispatching);
            let options = fixture.options();
            let open = || cuda::F32.open();
            let (found, _) = fixture.train_on(open, &degrees, 1, &options, |_| ());
            let what = format!("{degrees:?} {dispatching:?}");
            let (found, expected) = (&found.steps[0], &expected.steps[0]);
            assert_eq!(found.dropped, expected.dropped, "{what}");
            assert_close(found.loss, expected.loss, 1e-4, &what);
            assert_close(found.grad_norm, expected.grad_norm, 1e-3, &what);
        }
    }
}
