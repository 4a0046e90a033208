//! Gradients that are reduced, and weights that are gathered, in buckets beside compute: the same bits as without.

use moefold_executor::options::TrainOptions;
use moefold_executor::rank::Context;
use moefold_executor::transport::World;
use moefold_kernels::Device;
use moefold_planner::choice::Overlap;
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Trained, cut, degrees, piped};
use crate::cuda::{self, Emulated};
use crate::layouts::{gradients, legal, pipelines};

/// Both reductions and gathers beside compute.
pub(crate) const BOTH: Overlap = Overlap {
    grad_reduce: true,
    param_gather: true,
    p2p: false,
    shared_expert: false,
    expert_alltoall: false,
    delay_wgrad: false,
    tp: false,
};

const REDUCE: Overlap = Overlap {
    param_gather: false,
    ..BOTH
};

impl Fixture {
    fn overlapping(mut self, overlap: Overlap, least: Option<u64>) -> Self {
        self.savers.overlap = overlap;
        self.savers.bucket_elements = least;
        self
    }
}

fn trained(
    fixture: &Fixture,
    on: Option<Emulated>,
    degrees: &Degrees,
    options: &TrainOptions,
) -> Trained {
    match on {
        None => fixture.train(degrees, 3, options),
        Some(on) => {
            fixture
                .train_on(|| on.open(), degrees, 2, options, |_| ())
                .0
        }
    }
}

/// Losses, gradients' norms and weights of two runs, bit for bit.
fn compare(what: &str, found: &Trained, expected: &Trained, norms: bool) {
    for (step, (found, expected)) in found.steps.iter().zip(&expected.steps).enumerate() {
        let bits = |loss: f64| loss.to_bits();
        assert_eq!(bits(found.loss), bits(expected.loss), "{what}: step {step}");
        if norms {
            assert_eq!(found, expected, "{what}: step {step}");
        }
        // The squares of a norm are summed bucket by bucket.
        let off = (found.grad_norm / expected.grad_norm - 1.0).abs();
        assert!(off < 1e-6, "{what}: step {step}: norms are off by {off:e}");
    }
    assert_eq!(found.weights.len(), expected.weights.len());
    for (name, expected) in &expected.weights {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found.weights[name]), bits(expected), "{what}: {name}");
    }
}

/// A layout under buckets of at least so many elements, against the same buckets one after the other, and, without
/// clipping, against whole families.
fn check(name: &'static str, layers: usize, on: Option<Emulated>, degrees: &Degrees, least: u64) {
    let fixture = |overlap, least| {
        let fixture = Fixture::load(name).with_layers(layers).with_batch(8);
        fixture.overlapping(overlap, least)
    };
    let what = format!("{name} {degrees:?} {least}");
    let mut options = fixture(BOTH, None).options();
    let apart = trained(
        &fixture(Overlap::default(), Some(least)),
        on,
        degrees,
        &options,
    );
    // An emulated kernel is slow.
    let ways = if on.is_some() {
        &[BOTH][..]
    } else {
        &[BOTH, REDUCE]
    };
    for &overlap in ways {
        let beside = trained(&fixture(overlap, Some(least)), on, degrees, &options);
        compare(&what, &beside, &apart, true);
    }
    if on.is_some() {
        return;
    }
    options.adam.clip = None;
    let whole = trained(&fixture(Overlap::default(), None), on, degrees, &options);
    let beside = trained(&fixture(BOTH, Some(least)), on, degrees, &options);
    compare(&what, &beside, &whole, false);
}

/// Families with shared heads of keys, tied embeddings, depths that embed tokens on the last stage.
const NAMES: [(&str, usize); 4] = [
    ("mixtral", 4),
    ("qwen3_moe", 4),
    ("qwen3_tied", 3),
    ("deepseek_v3_mtp", 4),
];

/// Layouts of up to four ranks, one in `of`.
fn check_some(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (name, layers) in NAMES {
        let fixture = Fixture::load(name).with_layers(layers).with_batch(8);
        let all = (2..=4).flat_map(|gpus| {
            let (mut all, piped) = (legal(&fixture, gpus), pipelines(&fixture, gpus));
            all.extend(piped);
            all
        });
        for degrees in all.collect::<Vec<_>>() {
            let least = [1, 3000, 12_000][random.random_range(0..3)];
            if random.random_range(0..of) > 0 {
                continue;
            }
            let one = || check(name, layers, None, &degrees, least);
            let checked = std::panic::catch_unwind(one);
            assert!(
                checked.is_ok(),
                "MOEFOLD_SEED={}: {degrees:?}",
                cuda::seed()
            );
        }
    }
}

#[test]
fn law_buckets_beside_compute_give_the_same_bits() {
    check_some(24);
    // Sequences that are cut, experts with fewer replicas, key heads that ranks share.
    check("qwen3_moe", 3, None, &cut(degrees(4, 1, 2, 1, 1), 2), 3000);
    check("qwen3_moe", 3, None, &degrees(8, 4, 2, 2, 1), 1);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: hundreds of layouts"]
fn law_buckets_beside_compute_give_the_same_bits_in_every_layout() {
    check_some(1);
}

#[test]
fn law_buckets_beside_compute_give_the_same_bits_on_cuda() {
    if cuda::BF16.is_there() {
        let two = degrees(4, 2, 2, 1, 1);
        check("qwen3_moe_raw", 2, Some(cuda::BF16), &two, 1);
        check(
            "qwen3_tied",
            2,
            Some(cuda::F32),
            &piped(degrees(4, 1, 1, 1, 1), 2, 1),
            1,
        );
    }
}

/// Gradients of the first step are those without buckets, bit for bit.
#[test]
fn law_gradients_of_buckets_are_whole() {
    for (name, layers) in NAMES {
        let fixture = || Fixture::load(name).with_layers(layers).with_batch(8);
        for degrees in [degrees(4, 2, 2, 1, 1), piped(degrees(4, 1, 1, 1, 1), 2, 1)] {
            let degrees = if fixture().model.num_moe_layers() == 0 {
                Degrees {
                    ep: 1,
                    etp: 1,
                    ..degrees
                }
            } else {
                degrees
            };
            let whole = gradients(&fixture(), &degrees);
            let beside = gradients(&fixture().overlapping(BOTH, Some(3000)), &degrees);
            assert_eq!(whole, beside, "{name} {degrees:?}");
        }
    }
}

/// A rank has several buckets, in each of which are whole layers, and one where nothing is divided.
#[test]
fn buckets_are_runs_of_whole_layers() {
    let fixture = Fixture::load("qwen3_moe").with_layers(4).with_batch(8);
    let layout = fixture.layout(&degrees(4, 1, 2, 1, 1));
    let counts = |least| {
        let fixture = Fixture::load("qwen3_moe").with_layers(4).with_batch(8);
        let fixture = fixture.overlapping(BOTH, least);
        let (options, weights) = (fixture.options(), fixture.weights());
        let ranks = World::threads(4).run(|rank| {
            let cx = Context::join(rank, &layout, Device::cpu(1), rank.recorder());
            let trainer = fixture.trainer(cx, &options, &weights)?;
            let shard = &trainer.stepper().store.shard;
            for bucket in &shard.buckets {
                assert!(bucket.range.len().is_multiple_of(16 * 2), "{bucket:?}");
            }
            Ok(shard.buckets.len())
        });
        ranks.expect("they stand")
    };
    assert_eq!(counts(None), [2; 4]);
    // Embedding, four layers and the head; experts are in some of the layers.
    assert!(
        counts(Some(1)).iter().all(|&count| count > 6),
        "{:?}",
        counts(Some(1))
    );
}
