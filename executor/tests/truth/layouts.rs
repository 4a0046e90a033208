//! Every layout against a single rank, key/value heads shared by TP ranks among them. Of most families
//! and of pipelines it is layouts drawn from the seed, and every one where asked for (`--ignored`).

use moefold_executor::model::Family;
use moefold_executor::rank::Context;
use moefold_executor::train;
use moefold_executor::transport::World;
use moefold_kernels::Device;
use moefold_planner::choice::Dispatcher;
use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::model::Mixer;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Tensors, Trained, assert_close, degrees, piped, place};
use crate::cuda::seed;

/// Families of which layouts are drawn.
pub(crate) const DRAWN: [&str; 8] = [
    "gpt_oss",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_mtp",
    "llama",
];

/// Relative, of the losses of all steps; errors seen are about 2e-8.
const TOLERANCE: f64 = 1e-6;

/// Every legal layout of `gpus` ranks without context or pipeline parallelism, one rank to eight.
pub(crate) fn legal(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = Vec::new();
    for tp in 1..=gpus {
        for ep in 1..=gpus {
            for etp in 1..=gpus {
                for mbs in [1, 2, 3, 4, 6, 8, 12, 24] {
                    let degrees = degrees(gpus, tp, ep, etp, mbs);
                    if Layout::new(&degrees, &fixture.model, &fixture.batch()).is_ok() {
                        all.push(degrees);
                    }
                }
            }
        }
    }
    all
}

/// Every legal layout of `gpus` ranks with a pipeline.
pub(crate) fn pipelines(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = Vec::new();
    for (pp, vpp) in (2..=gpus).flat_map(|pp| (1..=4).map(move |vpp| (pp, vpp))) {
        for tp in 1..=gpus / pp {
            for ep in 1..=gpus / pp {
                for etp in 1..=gpus / pp {
                    for mbs in [1, 2, 3, 4, 6, 8, 12, 24] {
                        let degrees = piped(degrees(gpus, tp, ep, etp, mbs), pp, vpp);
                        if Layout::new(&degrees, &fixture.model, &fixture.batch()).is_ok() {
                            all.push(degrees);
                        }
                    }
                }
            }
        }
    }
    all
}

/// The gradients of the first step's loss, by tensor.
pub(crate) fn gradients(fixture: &Fixture, degrees: &Degrees) -> Tensors {
    let layout = fixture.layout(degrees);
    let (weights, options) = (fixture.weights(), fixture.options());
    let scale = 1.0 / (layout.dp() * layout.cp()) as f32;
    let ranks = World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, &layout, Device::cpu(1), rank.recorder());
            let trainer = fixture.trainer(cx, &options, &weights)?;
            let (cx, stepper) = (&trainer.cx, trainer.stepper());
            let mine = train::microbatches(&fixture.samples, cx, &fixture.batch(), 0)?;
            stepper.gradients(cx, &mine)?;
            let mut held = Vec::new();
            // Correction biases have no gradients.
            let trained = stepper.store.shard.parameters.iter();
            for parameter in trained.filter(|p| p.family != Family::Balance) {
                for slice in &parameter.slices {
                    // What this rank updates is complete here.
                    let Some((own, grads)) = stepper.optimizer.gradients(parameter, slice) else {
                        continue;
                    };
                    let grads = grads.to_f32();
                    let mut values = vec![f32::NAN; slice.len()];
                    let scaled = grads.iter().map(|grad| grad * scale);
                    values[own]
                        .iter_mut()
                        .zip(scaled)
                        .for_each(|(to, grad)| *to = grad);
                    held.push((slice.clone(), values));
                }
            }
            Ok(held)
        })
        .unwrap_or_else(|error| panic!("{} {degrees:?}: {error}", fixture.name));
    let mut all = Tensors::new();
    for (slice, values) in ranks.into_iter().flatten() {
        place(&mut all, &slice, &values);
    }
    all
}

/// Compares gradients tensor by tensor.
pub(crate) fn compare_gradients(fixture: &Fixture, single: &Tensors, degrees: &Degrees) {
    let found = gradients(fixture, degrees);
    assert_eq!(found.len(), single.len());
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    };
    for (name, expected) in single {
        let found = &found[name];
        let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let whole = norm(&mut expected.iter().copied());
        assert!(
            error <= 1e-4 * whole,
            "{} {degrees:?}: {name} is off by {error:e} of {whole:e}",
            fixture.name
        );
    }
}

/// One in `of` of all layouts with a pipeline against one rank.
fn check_pipelines(name: &'static str, layers: usize, of: usize) {
    const STEPS: u64 = 2;
    let fixture = Fixture::load(name).with_layers(layers).with_batch(12);
    let one = degrees(1, 1, 1, 1, 12);
    let single = fixture.train(&one, STEPS, &fixture.options());
    let grads = gradients(&fixture, &one);
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let all = (2..=8).flat_map(|gpus| pipelines(&fixture, gpus));
    let (mut count, mut interleaved) = (0, 0);
    for degrees in all {
        if random.random_range(0..of) > 0 {
            continue;
        }
        let both = std::panic::AssertUnwindSafe(|| {
            compare(&fixture, &single, &degrees, STEPS);
            compare_gradients(&fixture, &grads, &degrees);
        });
        let checked = std::panic::catch_unwind(both);
        assert!(checked.is_ok(), "MOEFOLD_SEED={}: {degrees:?}", seed());
        count += 1;
        interleaved += u32::from(degrees.vpp > 1);
    }
    assert!(count > 4 && interleaved > 0, "{name}: {count} layouts");
}

/// Of models with experts, with biases and windows, with dense layers among those, with tied embeddings, with shared experts, and with
/// multi-token prediction, which embeds tokens on the last stage too.
pub(crate) const DEEP: [(&str, usize); 6] = [
    ("gpt_oss", 4),
    ("mixtral", 4),
    ("qwen3_moe", 6),
    ("qwen3_tied", 5),
    ("glm4_moe", 4),
    ("deepseek_v3_mtp", 4),
];

#[test]
fn oracle_pipelines_equal_one_rank() {
    for (name, layers) in DEEP {
        check_pipelines(name, layers, 24);
    }
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are thousands of layouts"]
fn oracle_every_pipeline_equals_one_rank() {
    for (name, layers) in DEEP {
        check_pipelines(name, layers, 1);
    }
}

/// Compares the steps of a layout with those of a single rank; the worst relative error of a loss.
pub(crate) fn compare(fixture: &Fixture, single: &Trained, degrees: &Degrees, steps: u64) -> f64 {
    let trained = fixture.train(degrees, steps, &fixture.options());
    let mut worst: f64 = 0.0;
    assert_eq!(trained.steps.len(), single.steps.len());
    for (step, (found, expected)) in trained.steps.iter().zip(&single.steps).enumerate() {
        let what = |value: &str| format!("{} {degrees:?} step {step} {value}", fixture.name);
        assert_close(found.loss, expected.loss, TOLERANCE, &what("loss"));
        for (found, expected) in found.mtp_losses.iter().zip(&expected.mtp_losses) {
            assert_close(*found, *expected, TOLERANCE, &what("mtp_losses"));
        }
        // The norm is a sum of squares over every parameter: its errors add.
        let (found_norm, norm) = (found.grad_norm, expected.grad_norm);
        assert_close(found_norm, norm, 10.0 * TOLERANCE, &what("grad_norm"));
        worst = worst.max((found.loss / expected.loss - 1.0).abs());
    }
    worst
}

fn check_all(name: &'static str, steps: u64, at_least: usize) {
    check_some(name, steps, at_least, 1);
}

/// One in `of` of all layouts, drawn from the seed.
fn check_some(name: &'static str, steps: u64, at_least: usize, of: usize) {
    check_fixture(&Fixture::load(name), steps, at_least, of);
}

/// The same of a fixture as it is.
fn check_fixture(fixture: &Fixture, steps: u64, at_least: usize, of: usize) {
    let name = fixture.name;
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let single = fixture.train(&degrees(1, 1, 1, 1, 24), steps, &fixture.options());
    let kv_heads = kv_heads(fixture);
    let (mut count, mut sharing_heads, mut worst) = (0, 0, 0.0_f64);
    for gpus in 1..=8 {
        for degrees in &legal(fixture, gpus) {
            if random.random_range(0..of) > 0 {
                continue;
            }
            worst = worst.max(compare(fixture, &single, degrees, steps));
            count += 1;
            sharing_heads += u32::from(u64::from(degrees.tp) > kv_heads);
        }
    }
    assert!(
        count >= at_least && (sharing_heads > 0 || kv_heads >= 8),
        "{name}: {count} layouts, {sharing_heads} with shared heads, worst {worst:e}, MOEFOLD_SEED={}",
        seed()
    );
}

#[test]
fn oracle_every_layout_of_mixtral_equals_one_rank() {
    check_all("mixtral", 3, 100);
}

#[test]
fn oracle_every_layout_of_qwen3_moe_equals_one_rank() {
    check_all("qwen3_moe", 3, 100);
}

#[test]
fn oracle_every_layout_of_a_dense_model_equals_one_rank() {
    check_all("qwen3_tied", 3, 10);
}

#[test]
fn oracle_every_layout_of_latent_attention_equals_one_rank() {
    check_all("deepseek_v3_halves", 3, 10);
}

#[test]
fn oracle_layouts_of_other_families_equal_one_rank() {
    for name in DRAWN {
        // A dense model has fewer.
        let of = if name == "llama" { 2 } else { 8 };
        check_some(name, 2, 3, of);
    }
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: every layout of every family"]
fn oracle_every_layout_of_other_families_equals_one_rank() {
    for name in DRAWN {
        check_all(name, 3, 10);
    }
}

/// One in `of` of all layouts whose ranks gather all tokens.
fn check_gathering(of: usize) {
    for name in ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"] {
        let mut fixture = Fixture::load(name);
        fixture.savers.dispatching.dispatcher = Dispatcher::Allgather;
        check_fixture(&fixture, 2, 3, of);
    }
}

#[test]
fn oracle_layouts_that_gather_tokens_equal_one_rank() {
    check_gathering(8);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: every layout of four families"]
fn oracle_every_layout_that_gathers_tokens_equals_one_rank() {
    check_gathering(1);
}

fn kv_heads(fixture: &Fixture) -> u64 {
    match &fixture.model.layers[0].mixer {
        Some(Mixer::Gqa(gqa)) => gqa.kv_heads,
        Some(Mixer::Mla(mla)) => mla.heads,
        other => panic!("{other:?}"),
    }
}

/// Pipelines whose stages are neighbours in rank numbers, and replicas apart.
#[test]
fn oracle_stages_numbered_before_replicas_equal_one_rank() {
    const STEPS: u64 = 2;
    for name in ["mixtral", "qwen3_tied"] {
        let mut fixture = Fixture::load(name).with_layers(4).with_batch(12);
        let one = degrees(1, 1, 1, 1, 12);
        let single = fixture.train(&one, STEPS, &fixture.options());
        let grads = gradients(&fixture, &one);
        fixture.rank_order = moefold_planner::layout::Order::DP_LAST;
        let ep = fixture.model.moe().map_or(1, |_| 2);
        for degrees in [
            piped(degrees(4, 1, 1, 1, 3), 2, 1),
            piped(degrees(8, 2, ep, 3 - ep, 3), 2, 2),
        ] {
            compare(&fixture, &single, &degrees, STEPS);
            compare_gradients(&fixture, &grads, &degrees);
        }
    }
}
