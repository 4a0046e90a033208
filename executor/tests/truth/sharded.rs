//! Weights and gradients that rest divided over their replicas (ZeRO-3): one rank, ZeRO-1, and the memory of the plan.

use moefold_executor::device::DeviceSpec;
use moefold_planner::choice::{CpComm, Overlap, Zero};
use moefold_planner::layout::Degrees;
use moefold_profiles::{Precision, presets};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Trained, cut, degrees};
use crate::context;
use crate::cuda::{self, Emulated};
use crate::layouts::{compare, compare_gradients, gradients, legal};
use crate::overlap::BOTH;
use crate::peak::{CPU, Place, check, check_emulated, check_plan, losses, recomputing, unvarying};

/// Gathers when a pass comes to a unit, and reductions when it leaves it.
pub(crate) const APART: Overlap = Overlap {
    grad_reduce: false,
    param_gather: false,
    ..BOTH
};

/// Reductions beside compute alone, and both.
const WAYS: [Overlap; 3] = [
    APART,
    Overlap {
        param_gather: false,
        ..BOTH
    },
    BOTH,
];

/// Families with tied embeddings, depths that share both ends, shared heads of keys, dense layers between, sinks and
/// windows, latent attention.
const NAMES: [&str; 6] = [
    "mixtral",
    "qwen3_moe",
    "qwen3_tied",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v3_mtp",
];

/// The same fixture, its weights and gradients divided.
pub(crate) fn sharded(mut fixture: Fixture, overlap: Overlap) -> Fixture {
    fixture.savers.zero = Zero::Fsdp;
    fixture.savers.overlap = Overlap {
        shared_expert: fixture.savers.overlap.shared_expert,
        ..overlap
    };
    fixture.savers.bucket_elements = None;
    fixture
}

/// Layouts in which something has several replicas.
fn replicated(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = legal(fixture, gpus);
    all.retain(|degrees| degrees.tp < degrees.gpus || degrees.ep * degrees.etp < degrees.gpus);
    all
}

/// One in `of` of all layouts of up to eight ranks against one rank, what is recomputed and offloaded drawn with them.
fn check_some(of: usize) {
    const STEPS: u64 = 2;
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in NAMES {
        let one = degrees(1, 1, 1, 1, 24);
        let plain = Fixture::load(name);
        let single = plain.train(&one, STEPS, &plain.options());
        let grads = gradients(&plain, &one);
        let mut count = 0;
        for gpus in [2, 4, 8] {
            for degrees in replicated(&plain, gpus) {
                if random.random_range(0..of) > 0 {
                    continue;
                }
                // Nothing is dropped, so that every layout has the same losses.
                let mut fixture = recomputing(Fixture::load(name), &mut random);
                fixture.savers.optimizer = plain.savers.optimizer;
                fixture.savers.dispatching = plain.savers.dispatching;
                let overlap = WAYS[random.random_range(0..3)];
                let fixture = sharded(fixture, overlap);
                let both = std::panic::AssertUnwindSafe(|| {
                    compare(&fixture, &single, &degrees, STEPS);
                    compare_gradients(&fixture, &grads, &degrees);
                });
                let checked = std::panic::catch_unwind(both);
                let what = (cuda::seed(), degrees, &fixture.savers);
                assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
                count += 1;
            }
        }
        assert!(count > 0, "{name}: no layouts");
    }
}

#[test]
fn oracle_weights_that_rest_divided_train_as_one_rank_does() {
    check_some(24);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: hundreds of layouts"]
fn oracle_weights_that_rest_divided_train_as_one_rank_does_in_every_layout() {
    check_some(1);
}

#[test]
fn oracle_ranks_that_cut_sequences_and_divide_weights_equal_one_rank() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in ["qwen3_moe", "deepseek_v3"] {
        let plain = Fixture::load(name);
        let single = plain.train(&degrees(1, 1, 1, 1, 24), 2, &plain.options());
        for cp_comm in crate::common::WAYS {
            let mut fixture = sharded(Fixture::load(name), WAYS[random.random_range(0..3)]);
            fixture.savers.cp_comm = cp_comm;
            let all = context::drawn(&fixture, cp_comm, Some(4), &mut random);
            for degrees in all.into_iter().filter(|degrees| degrees.pp == 1) {
                compare(&fixture, &single, &degrees, 2);
            }
        }
    }
}

fn trained(fixture: &Fixture, on: Option<Emulated>, degrees: &Degrees) -> Trained {
    let mut options = fixture.options();
    // The squares of a norm are summed bucket by bucket.
    options.adam.clip = None;
    match on {
        None => fixture.train(degrees, 3, &options),
        Some(on) => {
            fixture
                .train_on(|| on.open(), degrees, 2, &options, |_| ())
                .0
        }
    }
}

/// Losses and weights of ZeRO-1 bit for bit: one microbatch, so that sums are in the same order.
fn check_bits(name: &'static str, batch: u64, on: Option<Emulated>, degrees: &Degrees) {
    let fixture = || Fixture::load(name).with_layers(3).with_batch(batch);
    assert_eq!(fixture().layout(degrees).microbatches(), 1, "{degrees:?}");
    let whole = trained(&fixture(), on, degrees);
    let ways = if on.is_some() { &WAYS[2..] } else { &WAYS };
    for &overlap in ways {
        let divided = trained(&sharded(fixture(), overlap), on, degrees);
        let what = format!("{name} {degrees:?} {overlap:?}");
        for (found, expected) in divided.steps.iter().zip(&whole.steps) {
            assert_eq!(found.loss.to_bits(), expected.loss.to_bits(), "{what}");
        }
        assert_eq!(divided.weights.len(), whole.weights.len());
        for (tensor, expected) in &whole.weights {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let found = &divided.weights[tensor];
            assert_eq!(bits(found), bits(expected), "{what}: {tensor}");
        }
    }
}

#[test]
fn law_weights_that_rest_divided_are_those_of_zero_1() {
    for name in NAMES {
        let dense = Fixture::load(name).model.num_moe_layers() == 0;
        let ep = if dense { 1 } else { 2 };
        check_bits(name, 4, None, &degrees(4, 1, ep, 1, 1));
        check_bits(name, 4, None, &degrees(4, 2, ep, 1, 2));
    }
    // Key heads that ranks share, experts with one replica, and dense parameters with one.
    check_bits("qwen3_moe", 2, None, &degrees(8, 4, 2, 2, 1));
    check_bits("qwen3_moe", 4, None, &degrees(4, 1, 4, 1, 1));
    check_bits("qwen3_moe", 2, None, &degrees(4, 4, 2, 1, 2));
    check_bits("qwen3_moe", 2, None, &cut(degrees(4, 1, 2, 1, 1), 2));
}

#[test]
fn law_weights_that_rest_divided_are_those_of_zero_1_on_cuda() {
    if cuda::BF16.is_there() {
        let two = degrees(4, 2, 2, 1, 1);
        check_bits("qwen3_moe_raw", 2, Some(cuda::BF16), &two);
        check_bits("qwen3_tied", 2, Some(cuda::F32), &degrees(2, 1, 1, 1, 1));
    }
}

#[test]
fn law_ranks_that_divide_weights_give_the_same_bits_on_any_number_of_threads() {
    let fixture = sharded(Fixture::load("qwen3_moe").with_layers(4), BOTH);
    let layout = degrees(4, 2, 2, 1, 2);
    let run = |threads| {
        let mut options = fixture.options();
        options.device = DeviceSpec::Cpu {
            threads_per_rank: Some(threads),
        };
        let trained = fixture.train(&layout, 3, &options);
        (trained.steps, trained.weights)
    };
    let first = run(1);
    assert_eq!(run(1), first, "run again");
    assert_eq!(run(2), first, "on two threads");
}

/// Memory, ops and collectives of a step are those of its trace.
#[test]
fn law_a_traced_step_is_the_step_of_ranks_that_divide_weights() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in NAMES {
        let plain = Fixture::load(name).with_batch(8);
        for gpus in [2, 4, 8] {
            let all = replicated(&plain, gpus);
            let degrees = all[random.random_range(0..all.len())];
            let fixture = recomputing(Fixture::load(name).with_batch(8), &mut random);
            let fixture = sharded(fixture, WAYS[random.random_range(0..3)]);
            let balancing = losses(random.random_range(0..5));
            let one = || check(&fixture, &CPU, &degrees, 2, balancing);
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
            let what = (cuda::seed(), name, degrees, &fixture.savers);
            assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
        }
    }
}

#[test]
fn law_a_traced_step_is_that_of_ranks_that_divide_weights_on_cuda() {
    let fixture = sharded(Fixture::load("qwen3_moe_raw").with_batch(4), BOTH);
    check_emulated(&fixture, cuda::BF16, &degrees(4, 2, 2, 1, 1), losses(0));
}

/// One in `of` of all layouts of up to four ranks: the peak of a plan, class by class, is that of a run.
fn check_plans(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (number, plain) in unvarying().into_iter().enumerate() {
        let layouts = [2, 4].into_iter().flat_map(|gpus| replicated(&plain, gpus));
        let mut layouts: Vec<Degrees> = layouts.collect();
        layouts.extend(
            context::drawn(&plain, CpComm::P2p, Some(4), &mut random)
                .into_iter()
                .filter(|degrees| degrees.pp == 1),
        );
        for degrees in layouts {
            let fixture = unvarying().into_iter().nth(number).expect("as many");
            let fixture = recomputing(fixture, &mut random);
            let fixture = sharded(fixture, WAYS[random.random_range(0..3)]);
            if random.random_range(0..of) > 0 {
                continue;
            }
            let one = || check_plan(&fixture, &presets::local(degrees.gpus), &CPU, &degrees);
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
            let what = (cuda::seed(), fixture.name, degrees, &fixture.savers);
            assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_ranks_that_divide_weights() {
    check_plans(6);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: hundreds of layouts"]
fn law_a_plan_says_the_peak_of_ranks_that_divide_weights_in_every_layout() {
    check_plans(1);
}

#[test]
fn law_a_plan_says_the_peak_of_ranks_that_divide_weights_on_cuda() {
    let on = cuda::BF16;
    if !on.is_there() {
        return;
    }
    let place = Place {
        open: &|_| on.open(),
        precision: Precision::Bf16,
    };
    let cluster = presets::cluster("dgx-a100").expect("a preset");
    let [_, experts, ..] = unvarying().map(|fixture| fixture.with_batch(2));
    let fixture = sharded(experts, BOTH);
    check_plan(&fixture, &cluster, &place, &degrees(2, 1, 1, 1, 1));
}
