//! Every layout against a single rank, key/value heads shared by TP ranks among them. Of most families
//! it is layouts drawn from the seed, and every one where asked for (`--ignored`).

use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::model::Mixer;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Trained, assert_close, degrees};
use crate::cuda::seed;

/// Families of which layouts are drawn.
pub(crate) const DRAWN: [&str; 6] = [
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_mtp",
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

/// Compares the steps of a layout with those of a single rank; the worst relative error of a loss.
fn compare(fixture: &Fixture, single: &Trained, degrees: &Degrees, steps: u64) -> f64 {
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
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let fixture = Fixture::load(name);
    let single = fixture.train(&degrees(1, 1, 1, 1, 24), steps, &fixture.options());
    let kv_heads = kv_heads(&fixture);
    let (mut count, mut sharing_heads, mut worst) = (0, 0, 0.0_f64);
    for gpus in 1..=8 {
        for degrees in &legal(&fixture, gpus) {
            if random.random_range(0..of) > 0 {
                continue;
            }
            worst = worst.max(compare(&fixture, &single, degrees, steps));
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
        check_some(name, 2, 5, 8);
    }
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: every layout of every family"]
fn oracle_every_layout_of_other_families_equals_one_rank() {
    for name in DRAWN {
        check_all(name, 3, 100);
    }
}

fn kv_heads(fixture: &Fixture) -> u64 {
    match &fixture.model.layers[0].mixer {
        Some(Mixer::Gqa(gqa)) => gqa.kv_heads,
        Some(Mixer::Mla(mla)) => mla.heads,
        other => panic!("{other:?}"),
    }
}
