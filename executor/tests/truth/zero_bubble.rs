//! Gradients of weights that wait for the bubbles of a pipeline change no bit: losses, norms of gradients, loads and
//! weights are those of whole backward passes, and equal one rank's.

use moefold_planner::choice::{CpComm, ScheduleName};
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees, piped};
use crate::context;
use crate::cuda::{self, F32};
use crate::layouts::{DEEP, compare, compare_gradients, gradients, pipelines};
use crate::peak::{losses, recomputing};

/// Layouts that the schedule goes with.
fn divided(fixture: &Fixture) -> Vec<Degrees> {
    let all = (2..=8).flat_map(|gpus| pipelines(fixture, gpus));
    all.filter(|degrees| ScheduleName::ZbH1.goes_with(degrees.pp, degrees.vpp))
        .collect()
}

/// Trains with whole backward passes and with divided ones, under losses of routers drawn at random.
fn check_bits(fixture: &mut Fixture, degrees: &Degrees, random: &mut ChaCha8Rng) {
    let mut options = fixture.options();
    options.balancing = losses(random.random_range(0..5));
    let mut train = |schedule| {
        fixture.savers.schedule = Some(schedule);
        fixture.train(degrees, 2, &options)
    };
    let [whole, divided] = [ScheduleName::OneFOneB, ScheduleName::ZbH1].map(&mut train);
    let what = format!("{} {degrees:?} {:?}", fixture.name, fixture.savers);
    let seed = cuda::seed();
    assert_eq!(whole.steps, divided.steps, "MOEFOLD_SEED={seed} {what}");
    let same = whole.weights == divided.weights;
    assert!(same, "MOEFOLD_SEED={seed} {what}: weights");
}

/// Every kind of module and of division, one in `of` of all layouts, whatever else a plan chooses.
fn check_all_bits(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (name, layers) in DEEP.into_iter().chain([("deepseek_v2", 4)]) {
        let mut fixture = Fixture::load(name).with_layers(layers).with_batch(12);
        let all = divided(&fixture);
        let first = random.random_range(0..of.min(all.len()));
        for degrees in all.iter().skip(first).step_by(of) {
            fixture = recomputing(fixture, &mut random);
            check_bits(&mut fixture, degrees, &mut random);
        }
    }
    for name in context::KINDS {
        let mut fixture = Fixture::load(name).with_layers(2).with_batch(6);
        for cp_comm in CpComm::ALL {
            let mut all = context::drawn(&fixture, cp_comm, None, &mut random);
            all.retain(|degrees| ScheduleName::ZbH1.goes_with(degrees.pp, degrees.vpp));
            let first = random.random_range(0..of.min(all.len()));
            for degrees in all.iter().skip(first).step_by(of) {
                fixture = recomputing(fixture, &mut random);
                fixture.savers.cp_comm = cp_comm;
                check_bits(&mut fixture, degrees, &mut random);
            }
        }
    }
}

#[test]
fn law_divided_backward_passes_change_no_bit_in_layouts_drawn() {
    check_all_bits(150);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are hundreds of layouts"]
fn law_divided_backward_passes_change_no_bit() {
    check_all_bits(1);
}

/// Losses and gradients of pipelines of two and four ranks.
#[test]
fn oracle_divided_backward_passes_equal_one_rank() {
    const STEPS: u64 = 2;
    for (name, layers) in [("qwen3_tied", 5), ("deepseek_v3_mtp", 4)] {
        let mut fixture = Fixture::load(name).with_layers(layers).with_batch(12);
        let one = degrees(1, 1, 1, 1, 12);
        let single = fixture.train(&one, STEPS, &fixture.options());
        let grads = gradients(&fixture, &one);
        fixture.savers.schedule = Some(ScheduleName::ZbH1);
        for degrees in [
            piped(degrees(4, 2, 1, 1, 3), 2, 1),
            piped(degrees(4, 1, 1, 1, 2), 4, 1),
        ] {
            compare(&fixture, &single, &degrees, STEPS);
            compare_gradients(&fixture, &grads, &degrees);
        }
    }
}

#[test]
fn oracle_divided_backward_passes_on_cuda_equal_one_rank() {
    let mut fixture = Fixture::load("qwen3_moe_raw").with_layers(2).with_batch(2);
    let expected = fixture.train(&degrees(1, 1, 1, 1, 1), 2, &fixture.options());
    fixture.savers.schedule = Some(ScheduleName::ZbH1);
    let pipeline = piped(degrees(2, 1, 1, 1, 1), 2, 1);
    cuda::compare_layouts(&fixture, F32, &[pipeline], &expected, 1e-4);
}
