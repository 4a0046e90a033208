//! Gradients of weights that wait for the bubbles of a pipeline change no bit: losses, norms of gradients, loads and
//! weights are those of whole backward passes, and equal one rank's.

use moefold_planner::choice::ScheduleName;
use moefold_planner::layout::Degrees;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees, piped};
use crate::context;
use crate::cuda::{self, F32};
use crate::layouts::{DEEP, compare, compare_gradients, gradients, pipelines};
use crate::peak::{losses, recomputing};
use crate::recompute;

/// Schedules of stages in the same places, which run the same on each: one that divides backward passes, and others.
const ALIKE: [&[ScheduleName]; 2] = [
    &[ScheduleName::ZbH1, ScheduleName::OneFOneB],
    &[
        ScheduleName::ZbV,
        ScheduleName::VHalf,
        ScheduleName::VMin,
        ScheduleName::DualpipeV,
    ],
];

/// Schedules that go there and back.
const VEES: &[ScheduleName] = ALIKE[1];

/// Layouts that some of them go with.
fn divided(fixture: &Fixture, alike: &[ScheduleName]) -> Vec<Degrees> {
    let all = (2..=8).flat_map(|gpus| pipelines(fixture, gpus));
    all.filter(|degrees| alike[0].goes_with(degrees.pp, degrees.vpp))
        .collect()
}

/// Trains under schedules that run alike, under losses of routers drawn at random.
fn check_bits(
    fixture: &mut Fixture,
    degrees: &Degrees,
    alike: &[ScheduleName],
    random: &mut ChaCha8Rng,
) {
    let mut options = fixture.options();
    options.balancing = losses(random.random_range(0..5));
    let mut train = |schedule: &ScheduleName| {
        fixture.savers.schedule = Some(*schedule);
        let mut trained = fixture.train(degrees, 2, &options);
        for step in trained.steps.iter_mut().filter(|_| alike == VEES) {
            // Ranks add these up in the order of their passes.
            for sum in [&mut step.aux_loss, &mut step.z_loss] {
                *sum = f64::from(*sum as f32);
            }
        }
        trained
    };
    let divided = train(&alike[0]);
    // Which of the others does not matter.
    let whole = train(alike[1..].choose(random).expect("another"));
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
        // Where one rank has both ends of the model it adds up what they give a shared matrix in the order of its passes.
        let shares = fixture.model.tied_embeddings || !fixture.model.mtp.is_empty();
        let exact = ALIKE.into_iter().filter(|&alike| alike != VEES || !shares);
        for alike in exact {
            let all = divided(&fixture, alike);
            let first = random.random_range(0..of.min(all.len()));
            for degrees in all.iter().skip(first).step_by(of) {
                fixture = recomputing(fixture, &mut random);
                check_bits(&mut fixture, degrees, alike, &mut random);
            }
        }
    }
    for name in context::KINDS {
        let mut fixture = Fixture::load(name).with_layers(2).with_batch(6);
        for cp_comm in crate::common::WAYS {
            let mut all = context::drawn(&fixture, cp_comm, None, &mut random);
            all.retain(|degrees| ScheduleName::ZbH1.goes_with(degrees.pp, degrees.vpp));
            let first = random.random_range(0..of.min(all.len()));
            for degrees in all.iter().skip(first).step_by(of) {
                fixture = recomputing(fixture, &mut random);
                fixture.savers.cp_comm = cp_comm;
                check_bits(&mut fixture, degrees, ALIKE[0], &mut random);
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
        // Stages of no layer, of one and of two; on TP and on experts of several ranks.
        for (&schedule, degrees) in VEES.iter().zip([
            piped(degrees(3, 1, 1, 1, 2), 3, 2),
            piped(degrees(4, 2, 1, 1, 3), 2, 2),
            // Three microbatches, which two ranks do not divide.
            piped(degrees(4, 1, 2, 1, 2), 2, 2),
            piped(degrees(4, 1, 2, 1, 1), 2, 2),
        ]) {
            // No experts, no ranks of theirs.
            let mut degrees = degrees;
            degrees.ep = fixture.model.moe().map_or(1, |_| degrees.ep);
            fixture.savers.schedule = Some(schedule);
            compare(&fixture, &single, &degrees, STEPS);
            compare_gradients(&fixture, &grads, &degrees);
        }
    }
}

/// Of all layouts one in `of`, which divides into tensors, experts, samples and stages, under any of the schedules
/// that go there and back.
fn check_vees(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (name, layers) in DEEP {
        let mut fixture = Fixture::load(name).with_layers(layers).with_batch(12);
        let one = degrees(1, 1, 1, 1, 12);
        let single = fixture.train(&one, 2, &fixture.options());
        let all = divided(&fixture, VEES);
        let first = random.random_range(0..of.min(all.len()));
        for degrees in all.iter().skip(first).step_by(of) {
            let plan = recompute::drawn(&fixture, &mut random);
            fixture = fixture.recomputing(plan);
            fixture.savers.schedule = VEES.choose(&mut random).copied();
            compare(&fixture, &single, degrees, 2);
        }
    }
}

#[test]
fn oracle_pipelines_that_come_back_equal_one_rank_in_layouts_drawn() {
    check_vees(150);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are hundreds of layouts"]
fn oracle_pipelines_that_come_back_equal_one_rank() {
    check_vees(1);
}

#[test]
fn oracle_divided_backward_passes_on_cuda_equal_one_rank() {
    let mut fixture = Fixture::load("qwen3_moe_raw").with_layers(2).with_batch(2);
    let expected = fixture.train(&degrees(1, 1, 1, 1, 1), 2, &fixture.options());
    fixture.savers.schedule = Some(ScheduleName::ZbH1);
    let pipeline = piped(degrees(2, 1, 1, 1, 1), 2, 1);
    cuda::compare_layouts(&fixture, F32, &[pipeline], &expected, 1e-4);
    fixture.savers.schedule = Some(ScheduleName::VHalf);
    let pipeline = piped(degrees(2, 1, 1, 1, 1), 2, 2);
    cuda::compare_layouts(&fixture, F32, &[pipeline], &expected, 1e-4);
}
