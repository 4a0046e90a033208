//! Packed documents are the documents one by one, whatever the layout.

use std::path::PathBuf;

use moefold_executor::data::{Order, Packing, Samples, TokenStream};
use moefold_planner::layout::Degrees;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, Tensors, assert_close, degrees, piped};
use crate::cuda::seed;
use crate::layouts::{compare, compare_gradients, gradients, legal};

/// Everything is a document's own.
pub(crate) const ALL: Packing = Packing {
    reset_position_ids: true,
    reset_attention_mask: true,
    eod_mask_loss: true,
    eod_token: None,
};

/// A stream of documents of these ids.
fn stream(documents: &[Vec<u32>]) -> TokenStream {
    let mut ids = Vec::new();
    let mut files = Vec::new();
    for document in documents {
        files.push((PathBuf::from("documents"), ids.len() as u64));
        ids.extend(document);
    }
    TokenStream::Text { files, ids }
}

/// The fixture on documents of one token to three sequences, packed.
pub(crate) fn packed(mut fixture: Fixture, packing: Packing) -> Fixture {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let vocabulary = fixture.model.vocab_size as u32;
    let (seq_len, mut left) = (fixture.golden.seq_len, 4000_usize);
    let mut documents = Vec::new();
    while left > 0 {
        let longest = [3, 7, 3 * seq_len as usize][random.random_range(0..3)];
        let len = random.random_range(1..=longest).min(left);
        let ids = (0..len).map(|_| random.random_range(0..vocabulary));
        documents.push(ids.collect());
        left -= len;
    }
    let samples = Samples::new(
        stream(&documents),
        seq_len,
        u64::from(vocabulary),
        Order::TokenStream,
    );
    fixture.samples = samples.expect("enough").packed(packing);
    fixture
}

/// The fixture on documents of which everything is their own.
pub(crate) fn apart(fixture: Fixture) -> Fixture {
    packed(fixture, ALL)
}

/// The same of some of it.
pub(crate) fn drawn(fixture: Fixture, random: &mut ChaCha8Rng) -> Fixture {
    let one = random.random_range(1..8_u32);
    let packing = Packing {
        reset_position_ids: one & 1 > 0,
        reset_attention_mask: one & 2 > 0,
        eod_mask_loss: one & 4 > 0,
        eod_token: None,
    };
    packed(fixture, packing)
}

/// One rank, one sequence a microbatch.
const ONE: Degrees = degrees(1, 1, 1, 1, 1);

/// Losses and gradients of packed documents against those of each alone in a sequence of its own, weighted by their
/// tokens.
fn check_alone(name: &'static str) {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let mut fixture = Fixture::load(name).with_batch(2);
    let vocabulary = fixture.model.vocab_size as u32;
    // Two sequences of as many documents as fit.
    let lens = [[5, 2, 9], [3, 12, 1]];
    let documents: Vec<Vec<u32>> = lens
        .as_flattened()
        .iter()
        .map(|&len| {
            (0..len)
                .map(|_| random.random_range(0..vocabulary))
                .collect()
        })
        .collect();
    let samples = |documents: &[Vec<u32>], seq_len: u64| {
        // The token after the last sequence is only asked whether it begins a document.
        let all = [documents, &[vec![0]]].concat();
        let order = Order::TokenStream;
        Samples::new(stream(&all), seq_len, u64::from(vocabulary), order).expect("enough")
    };
    fixture.samples = samples(&documents, fixture.golden.seq_len).packed(ALL);
    let options = fixture.options();
    let packed = &fixture.train(&ONE, 1, &options).steps[0];
    let packed_gradients = gradients(&fixture, &ONE);

    let counted: usize = documents.iter().map(|document| document.len() - 1).sum();
    let (mut loss, mut depths) = (0.0, vec![0.0; packed.mtp_losses.len()]);
    let mut sums = Tensors::new();
    for document in documents.iter().filter(|document| document.len() > 1) {
        fixture = fixture.with_batch(1);
        fixture.golden.seq_len = document.len() as u64 - 1;
        let of_one = std::slice::from_ref(document);
        fixture.samples = samples(of_one, fixture.golden.seq_len);
        let share = (document.len() - 1) as f64 / counted as f64;
        let alone = &fixture.train(&ONE, 1, &options).steps[0];
        loss += share * alone.loss;
        for (sum, depth) in depths.iter_mut().zip(&alone.mtp_losses) {
            *sum += share * depth;
        }
        for (tensor, values) in gradients(&fixture, &ONE) {
            let sum = sums
                .entry(tensor)
                .or_insert_with(|| vec![0.0; values.len()]);
            for (sum, value) in sum.iter_mut().zip(values) {
                *sum += share as f32 * value;
            }
        }
    }
    assert_close(packed.loss, loss, 1e-6, &format!("{name}, loss"));
    for (found, expected) in packed.mtp_losses.iter().zip(depths) {
        assert_close(*found, expected, 1e-6, &format!("{name}, loss of a depth"));
    }
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    };
    assert_eq!(packed_gradients.len(), sums.len());
    for (tensor, expected) in sums {
        let found = packed_gradients[&tensor].iter();
        let error = norm(&mut found.zip(&expected).map(|(a, b)| a - b));
        let whole = norm(&mut expected.iter().copied());
        assert!(
            error <= 1e-5 * whole.max(1e-3),
            "{name}: {tensor} is off by {error:e} of {whole:e}"
        );
    }
}

/// Attention of either kind, windows and sinks, and depths of multi-token prediction.
#[test]
fn oracle_packed_documents_are_documents_alone() {
    for name in [
        "qwen3_moe",
        "gpt_oss",
        "mixtral_windows",
        "deepseek_v3",
        "deepseek_v3_mtp",
    ] {
        check_alone(name);
    }
}

/// Layouts of packed samples, `count` of every family.
fn check_layouts(count: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    for name in ["qwen3_moe", "gpt_oss", "deepseek_v3_mtp"] {
        let fixture = Fixture::load(name).with_layers(4).with_batch(12);
        let fixture = packed(fixture, ALL);
        let one = degrees(1, 1, 1, 1, 12);
        let single = fixture.train(&one, 2, &fixture.options());
        let all = gradients(&fixture, &one);
        let mut layouts = vec![piped(degrees(4, 1, 2, 1, 3), 2, 1)];
        let legal: Vec<Degrees> = [2, 4, 8]
            .iter()
            .flat_map(|&gpus| legal(&fixture, gpus))
            .collect();
        layouts.extend((0..count).map(|_| legal[random.random_range(0..legal.len())]));
        for degrees in layouts {
            let both = std::panic::AssertUnwindSafe(|| {
                compare(&fixture, &single, &degrees, 2);
                compare_gradients(&fixture, &all, &degrees);
            });
            let checked = std::panic::catch_unwind(both);
            assert!(
                checked.is_ok(),
                "MOEFOLD_SEED={}: {name} {degrees:?}",
                seed()
            );
        }
    }
}

#[test]
fn oracle_layouts_of_packed_samples_equal_one_rank() {
    check_layouts(3);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: a hundred layouts of every family"]
fn oracle_many_layouts_of_packed_samples_equal_one_rank() {
    check_layouts(100);
}

#[test]
fn law_equal_seeds_give_equal_bits() {
    let fixture = packed(Fixture::load("qwen3_moe").with_batch(8), ALL);
    let layout = degrees(4, 2, 4, 1, 1);
    let once = fixture.train(&layout, 2, &fixture.options());
    let again = fixture.train(&layout, 2, &fixture.options());
    assert_eq!(once.steps, again.steps);
    let bits = |tensors: &Tensors| -> Vec<u32> {
        let values = tensors.values().flatten();
        values.map(|value| value.to_bits()).collect()
    };
    assert_eq!(bits(&once.weights), bits(&again.weights));
}
