//! The same training on CUDA: emulated devices against the CPU, in f32 and in bf16.
//!
//! An emulated kernel takes about a thousand times as long as one of the CPU, so batches are a few
//! sequences of 16 tokens and runs a few steps; the kernels' own tests cover their shapes.

use std::collections::BTreeSet;
use std::io::Write as _;

use moefold_emulator::at_hand;
use moefold_executor::error::Error;
use moefold_executor::model::Family;
use moefold_executor::moe::dispatch::Dispatching;
use moefold_executor::rank::Context;
use moefold_executor::room::{largest, room_for};
use moefold_executor::train;
use moefold_executor::transport::World;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::{Device, Dtype};
use moefold_planner::choice::CpComm;
use moefold_planner::layout::{Degrees, Layout};
use moefold_profiles::Precision;
use moefold_profiles::units::Bytes;

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Tensors, Trained, assert_close, degrees, piped};
use crate::layouts::legal;
use crate::packing;

/// A kind of emulated device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Emulated {
    architecture: Architecture,
    dtype: Dtype,
}

pub(crate) const F32: Emulated = Emulated {
    architecture: Architecture::SM80,
    dtype: Dtype::F32,
};
pub(crate) const BF16: Emulated = Emulated {
    architecture: Architecture::SM80,
    dtype: Dtype::Bf16,
};
pub(crate) const HOPPER: Emulated = Emulated {
    architecture: Architecture::SM90,
    dtype: Dtype::Bf16,
};

/// Where schedules are thrown from: `MOEFOLD_SEED`, or one.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("MOEFOLD_SEED").ok();
    given.and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

impl Emulated {
    /// Whether kernels can be compiled here. Said once where not, and a failure where
    /// `MOEFOLD_REQUIRE` names the emulator.
    pub(crate) fn is_there(self) -> bool {
        let made = moefold_emulator::device(self.architecture, self.dtype, 1);
        at_hand(made).is_some()
    }

    /// The device of a rank that runs the kernels of routing alone; each rank has other numbers.
    pub(crate) fn open_routing(self, rank: u32) -> Device {
        let seed = seed() + u64::from(rank);
        let made = moefold_emulator::routing_alone(self.architecture, self.dtype, seed);
        made.expect("as before")
    }

    pub(crate) fn open(self) -> Device {
        let device =
            moefold_emulator::device(self.architecture, self.dtype, seed()).expect("as before");
        device.poison(true);
        device
    }
}

/// One rank, two microbatches of a sequence each.
const ONE: Degrees = degrees(1, 1, 1, 1, 1);

fn fixture(name: &'static str) -> Fixture {
    Fixture::load(name).with_batch(2)
}

/// What one rank computes of a step's samples from the initial weights.
struct Pass {
    /// By tensor.
    gradients: Tensors,
    /// Tokens of each expert `[MoE layers, experts]`.
    load: Vec<Vec<u64>>,
}

fn pass(fixture: &Fixture, step: u64, device: impl Fn() -> Device + Sync) -> Pass {
    let layout = fixture.layout(&ONE);
    let (options, weights) = (fixture.options(), fixture.weights());
    World::threads(1)
        .run(|rank| {
            let cx = Context::join(rank, &layout, device(), rank.recorder());
            let trainer = fixture.trainer(cx, &options, &weights)?;
            let batch = fixture.batch();
            let tokens = train::microbatches(&fixture.samples, &trainer.cx, &batch, step)?;
            let load = trainer.stepper().gradients(&trainer.cx, &tokens)?;
            let store = &trainer.stepper().store;
            let mut gradients = Tensors::new();
            let trained = store.shard.parameters.iter();
            for parameter in trained.filter(|p| p.family != Family::Balance) {
                let grads = &store.flat(parameter.family).grads;
                for slice in &parameter.slices {
                    let grad = grads.view(parameter.offset + slice.at, &[slice.len()]);
                    gradients.insert(slice.tensor.clone(), grad.to_f32());
                }
            }
            Ok(Pass { gradients, load })
        })
        .unwrap_or_else(|error| panic!("MOEFOLD_SEED={}: {error}", seed()))
        .swap_remove(0)
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

/// Norms of the errors of `found`, each over the norm of what it should be, the largest last.
fn errors(found: &Tensors, expected: &Tensors) -> Vec<(f64, String)> {
    assert_eq!(found.len(), expected.len());
    let mut errors: Vec<(f64, String)> = expected
        .iter()
        .map(|(tensor, expected)| {
            let pairs = found[tensor].iter().zip(expected);
            let of_all = norm(expected.iter().copied());
            // An expert that no token chose has no gradient, nor may it get one.
            let error = norm(pairs.map(|(a, b)| a - b)) / of_all.max(f64::MIN_POSITIVE);
            (error, tensor.clone())
        })
        .collect();
    errors.sort_by(|a, b| a.0.total_cmp(&b.0));
    errors
}

/// Largest errors of gradients that are seen as those of the arithmetic: of the worst tensor, and of
/// the median one.
struct Bound {
    worst: f64,
    median: f64,
}

/// The order of sums alone differs.
const SAME: Bound = Bound {
    worst: 1e-5,
    median: 1e-6,
};

/// A bf16 has a relative error of up to 2^-9 = 0.002, and between a weight and the loss every value
/// is rounded some ten times a layer, forward and backward: 0.002 * sqrt(3 * 10 * 2) is 0.015, what
/// is seen at the median. Gradients of query and key norms are small differences of large terms, for
/// the rows of a softmax's gradient sum to zero; the worst of them is seen at 0.054.
const ROUNDED: Bound = Bound {
    worst: 0.1,
    median: 0.03,
};

/// Compares the gradients of a step whose tokens choose the same experts on both devices: one that
/// stands between two, and is rounded to the other, changes the gradients of both by all it adds.
fn check_gradients(name: &'static str, step: u64, on: Emulated, bound: &Bound) {
    check_gradients_of(&fixture(name), step, on, bound);
}

fn check_gradients_of(fixture: &Fixture, step: u64, on: Emulated, bound: &Bound) {
    if !on.is_there() {
        return;
    }
    let name = fixture.name;
    let found = pass(fixture, step, || on.open());
    let expected = pass(fixture, step, || Device::cpu(1));
    let what = format!("{name}, step {step} on {on:?}, MOEFOLD_SEED={}", seed());
    assert_eq!(found.load, expected.load, "{what}: choose another step");
    let errors = errors(&found.gradients, &expected.gradients);
    let (median, worst) = (&errors[errors.len() / 2], &errors[errors.len() - 1]);
    assert!(
        worst.0 <= bound.worst && median.0 <= bound.median,
        "{what}: worst {worst:?}, median {median:?}"
    );
}

/// Trains some steps and compares losses, and gradient norms with ten times the tolerance: they sum
/// over every parameter.
fn check_steps(fixture: &Fixture, on: Emulated, steps: u64, tolerance: f64) {
    if !on.is_there() {
        return;
    }
    let (name, options) = (fixture.name, fixture.options());
    let (found, _) = fixture.train_on(|| on.open(), &ONE, steps, &options, |_| ());
    let expected = fixture.train(&ONE, steps, &options);
    for (step, (found, expected)) in found.steps.iter().zip(&expected.steps).enumerate() {
        let what = |value| format!("{name} on {on:?}, step {step}, {value}");
        assert_close(found.loss, expected.loss, tolerance, &what("loss"));
        let norms = (found.grad_norm, expected.grad_norm);
        assert_close(norms.0, norms.1, 10.0 * tolerance, &what("grad_norm"));
    }
}

/// Documents of every length from one token on, on one rank.
#[test]
fn oracle_gradients_of_packed_samples_are_those_of_the_cpu() {
    for (name, step, on, bound) in [
        ("gpt_oss", 0, F32, &SAME),
        ("deepseek_v3", 0, F32, &SAME),
        ("qwen3_moe", 1, HOPPER, &ROUNDED),
    ] {
        check_gradients_of(&packing::apart(fixture(name)), step, on, bound);
    }
}

/// A run long enough to learn, on text: minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: an emulated kernel is slow"]
fn oracle_two_hundred_steps_of_text_in_bf16_lose_as_on_the_cpu() {
    if !BF16.is_there() {
        return;
    }
    let fixture = fixture("qwen3_moe_raw").on_text().with_batch(8);
    let (options, steps) = (fixture.options(), 200);
    let (found, _) = fixture.train_on(|| BF16.open(), &ONE, steps, &options, |_| ());
    let expected = fixture.train(&ONE, steps, &options);
    let mut worst: f64 = 0.0;
    for (step, (found, expected)) in found.steps.iter().zip(&expected.steps).enumerate() {
        assert_close(
            found.loss,
            expected.loss,
            1e-2,
            &format!("step {step}, loss"),
        );
        worst = worst.max((found.loss / expected.loss - 1.0).abs());
    }
    let ends = [0, expected.steps.len() - 1].map(|i| expected.steps[i].loss);
    assert!(ends[1] < ends[0] - 1.0, "it learns: {ends:?}");
    let _ = writeln!(std::io::stderr(), "worst {worst:.1e}, losses {ends:?}");
}

#[test]
fn oracle_gradients_in_f32_are_those_of_the_cpu() {
    for name in [
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
    ] {
        check_gradients(name, 0, F32, &SAME);
    }
}

#[test]
fn oracle_gradients_in_bf16_are_those_of_the_cpu_but_for_rounding() {
    check_gradients("mixtral", 2, BF16, &ROUNDED);
    check_gradients("qwen3_moe", 0, HOPPER, &ROUNDED);
    check_gradients("qwen2_moe", 1, HOPPER, &ROUNDED);
    check_gradients("deepseek_v3", 0, HOPPER, &ROUNDED);
    check_gradients("gpt_oss", 0, HOPPER, &ROUNDED);
}

#[test]
fn oracle_twenty_steps_in_f32_are_those_of_the_cpu() {
    check_steps(&fixture("qwen3_moe_raw"), F32, 20, 1e-4);
}

#[test]
fn oracle_twenty_steps_in_bf16_are_those_of_the_cpu_but_for_rounding() {
    check_steps(&fixture("qwen3_moe_raw"), BF16, 20, 1e-2);
}

/// What one step on one rank cost besides time.
#[derive(Debug)]
struct Cost {
    /// Reads of device memory by the host, as the device counts them.
    host_reads: u64,
    /// The same, as the recorder sums them up.
    counted: f64,
    /// Spans of the trace that say they are such reads.
    named: usize,
    /// Bytes of the device's memory that no tensor had reached into before.
    reached: u64,
}

/// Takes `steps` steps that change no weight, on the same tokens, and gives the costs of every rank by
/// step.
fn costs(
    fixture: &Fixture,
    on: Emulated,
    degrees: &Degrees,
    (steps, aux_loss_coef): (u32, f64),
) -> Vec<Vec<Cost>> {
    let layout = fixture.layout(degrees);
    let mut options = fixture.options();
    options.balancing.aux_loss_coef = aux_loss_coef;
    let weights = fixture.weights();
    World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, &layout, on.open(), rank.recorder());
            let (device, recorder) = (cx.device.clone(), cx.recorder.clone());
            let mut trainer = fixture.trainer(cx, &options, &weights)?;
            let mut costs = Vec::new();
            for step in 0..steps {
                let (samples, batch) = (&fixture.samples, fixture.batch());
                let mine = train::microbatches(samples, &trainer.cx, &batch, 0)?;
                let before = (device.host_reads(), device.extent());
                recorder.begin_step(step, moefold_executor::record::Detail::Spans);
                trainer.step(&mine, 0.0)?;
                let spans = recorder.end_step();
                let named = recorder.take_spans();
                costs.push(Cost {
                    host_reads: device.host_reads() - before.0,
                    counted: spans.host_reads.values().sum(),
                    named: named
                        .iter()
                        .filter(|s| s.name.ends_with("_to_host"))
                        .count(),
                    reached: device.extent().0 - before.1.0,
                });
            }
            Ok(costs)
        })
        .unwrap_or_else(|error| panic!("{degrees:?}, MOEFOLD_SEED={}: {error}", seed()))
}

/// Two steps on the same tokens wait for `host_reads` and nothing else, and the second lies where the
/// first lay.
fn check_costs(
    fixture: &Fixture,
    on: Emulated,
    degrees: &Degrees,
    (aux_loss_coef, host_reads): (f64, u64),
) {
    if !on.is_there() {
        return;
    }
    for steps in costs(fixture, on, degrees, (2, aux_loss_coef)) {
        let what = format!("{degrees:?} on {on:?}: {steps:?}");
        assert!(steps[0].reached > 0, "{what}");
        assert_eq!(steps[1].reached, 0, "{what}");
        for step in &steps {
            let named = (step.host_reads, step.counted, step.named as u64);
            assert_eq!(named, (host_reads, host_reads as f64, host_reads), "{what}");
        }
    }
}

#[test]
fn law_the_host_waits_only_where_the_trace_says_so() {
    // At the end the sums and the row counts; with a loss of scores what it counts of two MoE layers in each of
    // two microbatches.
    for on in [F32, HOPPER] {
        check_costs(&fixture("qwen3_moe"), on, &ONE, (0.0, 2));
    }
    check_costs(&fixture("qwen3_moe"), F32, &ONE, (0.01, 6));
}

#[test]
fn law_collectives_on_one_gpu_let_no_host_wait_for_it() {
    // Row counts of one layer in one microbatch, and the sums at the end.
    let fixture = shared("qwen3_moe_raw");
    for degrees in [degrees(2, 2, 1, 2, 4), degrees(2, 1, 2, 1, 2)] {
        check_costs(&fixture, F32, &degrees, (0.01, 2));
    }
}

/// A fixture for several ranks: four sequences a step.
fn shared(name: &'static str) -> Fixture {
    Fixture::load(name).with_batch(4)
}

/// Layouts of 2, 4 and 8 ranks, drawn from the seed among all legal ones of the fixture.
fn drawn(fixture: &Fixture, draw: u64) -> Vec<Degrees> {
    let mut random = ChaCha8Rng::seed_from_u64(seed() + draw);
    let gpus = [2, 4, 8].into_iter();
    gpus.map(|gpus| {
        let all = legal(fixture, gpus);
        all[random.random_range(0..all.len())]
    })
    .collect()
}

/// Trains under layouts of rank threads on one emulated GPU, and compares with one rank on the CPU.
pub(crate) fn check_layouts(fixture: &Fixture, on: Emulated, layouts: &[Degrees], tolerance: f64) {
    if !on.is_there() {
        return;
    }
    let expected = fixture.train(&ONE, 2, &fixture.options());
    compare_layouts(fixture, on, layouts, &expected, tolerance);
}

/// The same with what one rank did in two steps.
pub(crate) fn compare_layouts(
    fixture: &Fixture,
    on: Emulated,
    layouts: &[Degrees],
    expected: &Trained,
    tolerance: f64,
) {
    if !on.is_there() {
        return;
    }
    let (options, steps) = (fixture.options(), 2);
    for degrees in layouts {
        let (found, _) = fixture.train_on(|| on.open(), degrees, steps, &options, |_| ());
        let what = format!("{degrees:?} on {on:?}, MOEFOLD_SEED={}", seed());
        for (found, expected) in found.steps.iter().zip(&expected.steps) {
            assert_close(found.loss, expected.loss, tolerance, &what);
            let norms = (found.grad_norm, expected.grad_norm);
            assert_close(norms.0, norms.1, 10.0 * tolerance, &what);
        }
    }
}

/// All kinds of layers, attention and experts divided differently.
#[test]
fn oracle_a_folded_layout_in_f32_equals_one_rank() {
    let pipeline = piped(degrees(2, 1, 1, 1, 2), 2, 1);
    let layouts = [degrees(4, 2, 4, 1, 2), pipeline];
    check_layouts(&shared("qwen3_moe"), F32, &layouts, 1e-4);
}

/// Norms whose rows are divided over ranks.
#[test]
fn oracle_divided_norms_in_f32_equal_one_rank() {
    let fixture = Fixture::load("olmoe").with_batch(2);
    check_layouts(&fixture, F32, &[degrees(2, 2, 1, 1, 2)], 1e-4);
}

#[test]
fn oracle_layouts_in_f32_equal_one_rank() {
    let fixture = shared("qwen3_moe_raw");
    check_layouts(&fixture, F32, &drawn(&fixture, 0), 1e-4);
}

#[test]
fn oracle_layouts_in_bf16_equal_one_rank_but_for_rounding() {
    let fixture = shared("qwen3_moe_raw");
    check_layouts(&fixture, BF16, &drawn(&fixture, 1), 1e-2);
    check_layouts(&fixture, HOPPER, &[degrees(4, 2, 2, 2, 2)], 1e-2);
}

/// How a rank's memory went in each of several steps on tokens of their own.
struct Went {
    /// Most bytes alive.
    peak: Bytes,
    /// How far tensors have reached so far into what was taken of the device.
    reached: Bytes,
}

/// Trains `steps` steps on every rank, which takes `reserve` before it holds anything.
fn memory_of_steps(
    fixture: &Fixture,
    on: Emulated,
    layout: &Layout,
    steps: u64,
    reserve: Option<Bytes>,
) -> Vec<Vec<Went>> {
    let weights = fixture.weights();
    World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, layout, on.open(), rank.recorder());
            let device = cx.device.clone();
            let reserved = reserve.map_or(Ok(()), |bytes| device.reserve(bytes));
            reserved.map_err(Error::Device)?;
            let options = fixture.options();
            let mut trainer = fixture.trainer(cx, &options, &weights)?;
            let mut went = Vec::new();
            for step in 0..steps {
                let (samples, batch) = (&fixture.samples, fixture.batch());
                let mine = train::microbatches(samples, &trainer.cx, &batch, step)?;
                device.reset_peak();
                trainer.step(&mine, 1e-3)?;
                went.push(Went {
                    peak: device.memory().peak_total(),
                    reached: device.extent(),
                });
            }
            Ok(went)
        })
        .unwrap_or_else(|error| panic!("{layout:?}, MOEFOLD_SEED={}: {error}", seed()))
}

#[test]
fn law_steps_whose_routing_varies_stay_in_what_was_reserved() {
    let fixture = shared("qwen3_moe_raw");
    let layout = fixture.layout(&degrees(2, 1, 2, 1, 2));
    if !F32.is_there() {
        return;
    }
    let free = memory_of_steps(&fixture, F32, &layout, 3, None);
    let peaks: BTreeSet<Bytes> = free.iter().flatten().map(|went| went.peak).collect();
    assert!(peaks.len() > 2, "routing varies: {peaks:?}");
    let most = *peaks.last().expect("steps");
    let (batch, precision) = (fixture.batch(), Precision::Fp32);
    let holes = largest(
        &layout,
        &fixture.model,
        &batch,
        precision,
        CpComm::P2p,
        Dispatching::default(),
        1.0,
    );
    let reserve = room_for(most, holes);
    // Taken in pieces of 2 MiB, so tensors as small as these never need a second one. They are held to
    // what a large model's are: to the largest tensor beside those alive. Each is rounded up to 256
    // bytes, and some hundreds are alive.
    let bound = most + holes + Bytes(256) * TENSORS_ALIVE;
    for steps in memory_of_steps(&fixture, F32, &layout, 3, Some(reserve)) {
        let reached: Vec<Bytes> = steps.iter().map(|went| went.reached).collect();
        assert!(steps.iter().all(|went| went.reached >= went.peak));
        assert!(reached[2] <= bound, "{reached:?} of {most} and {holes}");
    }
}

/// More than the tests' models have at once.
const TENSORS_ALIVE: u64 = 300;
