//! Training data: streams of token ids, cut into samples.
//!
//! Of one dataset sample `i` is tokens `i*S .. i*S+S` of the stream of all documents in order, its targets the same
//! shifted by one; step `t` of a global batch `B` takes samples `t*B .. t*B+B-1`. When the samples
//! are used up they begin again: sample `i` is then sample `i % n` of epoch `i / n`, where
//! `n = (tokens - 1) / S`. Shuffled, each epoch has its own seeded order of whole samples. Of a
//! [`Blend`] each sample is the next one of one of its datasets. A sample may hold several documents; what is then
//! each one's own is [`Packing`]. Which rank takes which sample is the training
//! step's business.

mod blend;
mod indexed;
mod packing;
mod prepare;
mod shuffle;
mod split;
mod stream;
mod tokenizer;

use std::ops::Range;
use std::sync::Arc;

pub use blend::Blend;
pub use indexed::{Element, Indexed, write as write_indexed};
pub(crate) use packing::NONE;
pub use packing::Packing;
pub use prepare::{Preparation, Prepared};
pub use split::{Share, Split};
pub use stream::TokenStream;
pub use tokenizer::{Tokenizer, in_library};

use moefold_planner::layout::Batch;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::error::Error;
use blend::Draws;
use shuffle::Permutation;

/// The order in which samples are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they lie in the stream.
    TokenStream,
    /// A new seeded order each epoch.
    Shuffled {
        /// The seed.
        seed: u64,
    },
}

/// One training sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// `[seq_len]` token ids.
    pub inputs: Vec<i32>,
    /// `[seq_len]` token ids, each the one after its input; negative where a token has no loss.
    pub targets: Vec<i32>,
    /// `[seq_len]` where the document of each input begins in the sample, where documents are apart.
    pub starts: Option<Vec<i32>>,
}

/// Datasets cut into samples. Shared by all ranks.
#[derive(Debug)]
pub struct Samples {
    cuts: Vec<Cut>,
    draws: Draws,
    seq_len: u64,
    vocab_size: u64,
    order: Order,
    packing: Packing,
}

/// Samples to judge a model by while it trains.
#[derive(Debug)]
pub struct Validation {
    /// Where they come from. Every evaluation begins with the first.
    pub samples: Samples,
    /// Steps between evaluations; there is one after the last step too.
    pub every: u64,
    /// Global batches of an evaluation, as long as there are samples for them.
    pub iters: u64,
}

impl Validation {
    /// Whether one is due when so many of `all` steps have been taken.
    pub fn is_due(&self, steps: u64, all: u64) -> bool {
        steps.is_multiple_of(self.every) || steps == all
    }

    /// Batches of an evaluation, at least one.
    pub fn iters(&self, global_batch: u64) -> u64 {
        self.iters.min(self.samples.len() / global_batch).max(1)
    }
}

/// What of one dataset is cut into samples.
#[derive(Debug)]
struct Cut {
    stream: Arc<TokenStream>,
    tokens: Range<u64>,
    per_epoch: u64,
}

impl Samples {
    /// Cuts `stream` into samples of `seq_len` tokens for a model of `vocab_size`.
    pub fn new(
        stream: TokenStream,
        seq_len: u64,
        vocab_size: u64,
        order: Order,
    ) -> Result<Self, Error> {
        Self::of_blend(&Blend::of(stream), None, seq_len, vocab_size, order)
    }

    /// The same of several datasets, of all their documents or of a share of them.
    pub fn of_blend(
        blend: &Blend,
        share: Option<(Split, Share)>,
        seq_len: u64,
        vocab_size: u64,
        order: Order,
    ) -> Result<Self, Error> {
        assert!(seq_len > 0, "a sample has at least one token");
        assert!(
            i32::try_from(vocab_size).is_ok(),
            "vocabulary of {vocab_size}: ids are 32-bit"
        );
        let cut = |stream: &Arc<TokenStream>| {
            let tokens = match &share {
                None => 0..stream.num_tokens(),
                Some((split, share)) => split.tokens(*share, stream)?,
            };
            Cut::new(stream, tokens, seq_len, vocab_size)
        };
        let cuts: Vec<Cut> = blend.streams.iter().map(cut).collect::<Result<_, _>>()?;
        let sizes = || cuts.iter().map(|cut| cut.per_epoch as f64).collect();
        let weights = blend.weights.clone().unwrap_or_else(sizes);
        Ok(Self {
            draws: Draws::new(&weights),
            cuts,
            seq_len,
            vocab_size,
            order,
            packing: Packing::default(),
        })
    }

    /// The same samples, of whose documents this is each one's own.
    #[must_use]
    pub fn packed(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// What is each document's own.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Uniform tokens, for measuring: enough for so many steps of `batch` before they repeat.
    pub fn random(vocab_size: u64, batch: &Batch, steps: u64) -> Result<Self, Error> {
        let count = steps * batch.seq_len * batch.global_batch + 1;
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let ids = (0..count)
            .map(|_| random.random_range(0..vocab_size as u32))
            .collect();
        let stream = TokenStream::of_ids("random tokens", ids);
        Self::new(stream, batch.seq_len, vocab_size, Order::TokenStream)
    }

    /// Samples of all datasets before any repeats.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> u64 {
        self.cuts.iter().map(|cut| cut.per_epoch).sum()
    }

    /// Tokens that they are cut from.
    pub fn num_tokens(&self) -> u64 {
        let tokens = self
            .cuts
            .iter()
            .map(|cut| cut.tokens.end - cut.tokens.start);
        tokens.sum()
    }

    /// What they are cut from, as a hash over a part of it; of several datasets, with their weights.
    pub fn fingerprint(&self) -> Result<String, Error> {
        // Documents that a token ends are seen by that.
        let begins = self.packing.is_any() && self.packing.eod_token.is_none();
        let of_cut = |cut: &Cut| {
            let tokens = &cut.tokens;
            cut.stream.fingerprint(tokens, self.vocab_size, begins)
        };
        if let [cut] = &self.cuts[..] {
            return Ok(of_cut(cut)?.to_hex().to_string());
        }
        let mut hash = blake3::Hasher::new();
        for (cut, weight) in self.cuts.iter().zip(self.draws.weights()) {
            hash.update(of_cut(cut)?.as_bytes());
            hash.update(&weight.to_le_bytes());
        }
        Ok(hash.finalize().to_hex().to_string())
    }

    /// The order they are taken in.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Tokens a sample.
    pub fn seq_len(&self) -> u64 {
        self.seq_len
    }

    /// The samples of a step, as numbers for [`Samples::get`].
    pub fn of_step(step: u64, global_batch: u64) -> Range<u64> {
        step * global_batch..(step + 1) * global_batch
    }

    /// Sample number `i`, counted over all epochs.
    pub fn get(&self, i: u64) -> Result<Sample, Error> {
        let (dataset, i) = self.draws.get(i);
        let cut = &self.cuts[dataset];
        let (epoch, within) = (i / cut.per_epoch, i % cut.per_epoch);
        let place = match self.order {
            Order::TokenStream => within,
            Order::Shuffled { seed } => Permutation::new(cut.per_epoch, seed, epoch).apply(within),
        };
        let start = cut.tokens.start + place * self.seq_len;
        let range = start..start + self.seq_len + 1;
        let mut inputs = cut.stream.tokens(range.clone(), self.vocab_size)?;
        let mut targets = inputs[1..].to_vec();
        let mut starts = None;
        if self.packing.is_any() {
            let all = self.starts(&cut.stream, range, &inputs)?;
            if self.packing.eod_mask_loss {
                packing::mask_ends(&mut targets, &all);
            }
            let own = || all[..targets.len()].to_vec();
            starts = self.packing.resets().then(own);
        }
        inputs.pop();
        Ok(Sample {
            inputs,
            targets,
            starts,
        })
    }

    /// Of each token of a range, whose ids these are, where its document begins in the range.
    fn starts(
        &self,
        stream: &TokenStream,
        range: Range<u64>,
        ids: &[i32],
    ) -> Result<Vec<i32>, Error> {
        if let Some(eod) = self.packing.eod_token {
            let ends = ids.iter().enumerate().filter(|(_, id)| **id == eod);
            return Ok(packing::starts(ids.len(), ends.map(|(token, _)| token + 1)));
        }
        let first = range.start;
        let begins = stream.begins_in(range)?;
        let begins = begins.into_iter().map(|token| (token - first) as usize);
        Ok(packing::starts(ids.len(), begins))
    }
}

impl Cut {
    fn new(
        stream: &Arc<TokenStream>,
        tokens: Range<u64>,
        seq_len: u64,
        vocab_size: u64,
    ) -> Result<Self, Error> {
        let (all, found) = (stream.num_tokens(), tokens.end - tokens.start);
        let per_epoch = found.saturating_sub(1) / seq_len;
        if per_epoch == 0 {
            let (holds, larger) = if found == all {
                (format!("holds {found} tokens"), "")
            } else {
                let documents = stream.num_documents();
                let of_share = "of them in a share of --split";
                let holds =
                    format!("holds {all} tokens in {documents} documents, {found} {of_share}");
                (holds, "a larger share, ")
            };
            return Err(Error::malformed(
                stream.name(),
                format!(
                    "{holds}; one sample of sequence length {seq_len} needs {}: give {larger}more data or a shorter sequence",
                    seq_len + 1
                ),
            ));
        }
        // Text is in memory anyway: a wrong tokenizer shows now, not after an hour of training.
        if let TokenStream::Text { ids, .. } = &**stream
            && let Some(wrong) = ids.iter().position(|&id| u64::from(id) >= vocab_size)
        {
            let wrong = wrong as u64;
            stream.tokens(wrong..wrong + 1, vocab_size)?;
        }
        Ok(Self {
            stream: Arc::clone(stream),
            tokens,
            per_epoch,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of 8 of documents of 3, 0, 5, 6 and 4 tokens, the last of each 9.
    fn of_documents(packing: Packing) -> [Samples; 2] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let documents: [&[i32]; 5] = [
            &[1, 2, 9],
            &[],
            &[3, 4, 5, 6, 9],
            &[1, 2, 3, 4, 5, 9],
            &[6, 7, 8, 9],
        ];
        let streams = [
            written(&folder, "set", &documents),
            TokenStream::of_ids(
                "text",
                documents.concat().iter().map(|&id| id as u32).collect(),
            ),
        ];
        streams.map(|stream| {
            let samples = Samples::new(stream, 8, 10, Order::TokenStream).expect("enough");
            samples.packed(packing)
        })
    }

    #[test]
    fn a_fingerprint_sees_documents_where_the_data_has_them() {
        for (eod_token, alike) in [(None, false), (Some(9), true)] {
            let packing = Packing {
                reset_position_ids: true,
                eod_token,
                ..Packing::default()
            };
            let [set, text] =
                of_documents(packing).map(|samples| samples.fingerprint().expect("reads"));
            assert_eq!(set == text, alike);
        }
    }

    /// As Megatron-Core 0.16's `_get_ltor_masks_and_position_ids` has them of these tokens, with 9 as the token that
    /// ends a document: its positions, and where its loss mask is zero.
    #[test]
    fn golden_documents_are_megatrons() {
        let all = Packing {
            reset_position_ids: true,
            reset_attention_mask: true,
            eod_mask_loss: true,
            eod_token: Some(9),
        };
        let as_data = Packing {
            eod_token: None,
            ..all
        };
        let [by_data, _] = of_documents(as_data);
        let [_, by_token] = of_documents(all);
        let expected = [
            ([0, 1, 2, 0, 1, 2, 3, 4], [2, 9, NONE, 4, 5, 6, 9, NONE]),
            ([0, 1, 2, 3, 4, 5, 0, 1], [2, 3, 4, 5, 9, NONE, 7, 8]),
        ];
        for (i, (positions, targets)) in (0..).zip(expected) {
            for samples in [&by_data, &by_token] {
                let sample = samples.get(i).expect("reads");
                let starts = sample.starts.expect("documents are apart");
                let found: Vec<i32> = (0..).zip(&starts).map(|(t, start)| t - start).collect();
                assert_eq!(found, positions, "sample {i}");
                assert_eq!(sample.targets, targets, "sample {i}");
            }
        }
    }

    #[test]
    fn what_is_not_asked_for_is_as_before() {
        let plain = Packing::default();
        let only = [
            plain,
            Packing {
                reset_position_ids: true,
                ..plain
            },
            Packing {
                eod_mask_loss: true,
                ..plain
            },
        ];
        let [whole, reset, masked] = only.map(|packing| {
            let [samples, _] = of_documents(packing);
            samples.get(0).expect("reads")
        });
        assert_eq!(whole.starts, None);
        assert_eq!(masked.starts, None);
        assert_eq!(reset.targets, whole.targets);
        assert_eq!(reset.inputs, whole.inputs);
        let masked_at = |i: usize| [2, 7].contains(&i);
        for (i, target) in masked.targets.iter().enumerate() {
            let expected = if masked_at(i) { NONE } else { whole.targets[i] };
            assert_eq!(*target, expected);
        }
    }

    /// Every range of a stream against a look at every document.
    #[test]
    fn law_documents_are_found_wherever_a_sample_begins() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let lens = [2_usize, 0, 0, 1, 7, 0, 3, 1, 1, 0];
        let documents: Vec<Vec<i32>> = lens.iter().map(|&len| vec![1; len]).collect();
        let documents: Vec<&[i32]> = documents.iter().map(Vec::as_slice).collect();
        let stream = written(&folder, "set", &documents);
        let mut begins = vec![0_u64];
        for len in lens {
            begins.push(begins[begins.len() - 1] + len as u64);
        }
        for start in 0..15 {
            for end in start..=15 {
                let mut expected: Vec<u64> = begins.clone();
                expected.retain(|begin| (start..end).contains(begin));
                let found = stream.begins_in(start..end).expect("reads");
                assert_eq!(found, expected, "{start}..{end}");
            }
        }
    }

    fn counting(tokens: u32) -> TokenStream {
        TokenStream::of_ids("counting", (0..tokens).collect())
    }

    #[test]
    fn golden_samples_in_stream_order_and_their_epochs() {
        let samples = Samples::new(counting(10), 3, 10, Order::TokenStream).expect("enough");
        // Tokens 0..9 make three samples; token 9 is only a target.
        assert_eq!(samples.cuts[0].per_epoch, 3);
        let last = samples.get(2).expect("reads");
        assert_eq!(last.inputs, [6, 7, 8]);
        assert_eq!(last.targets, [7, 8, 9]);
        assert_eq!(
            samples.get(3).expect("reads"),
            samples.get(0).expect("reads")
        );
        assert_eq!(Samples::of_step(2, 4), 8..12);
    }

    #[test]
    fn law_a_shuffled_epoch_has_every_sample_once() {
        let shuffled = |seed| {
            let order = Order::Shuffled { seed };
            let samples = Samples::new(counting(101), 2, 101, order).expect("enough");
            (0..100).map(move |i| samples.get(i).expect("reads").inputs[0])
        };
        let order: Vec<i32> = shuffled(5).collect();
        let (mut first, mut second) = (order[..50].to_vec(), order[50..].to_vec());
        assert_ne!(first, second, "epochs have their own order");
        first.sort_unstable();
        second.sort_unstable();
        assert!(first.iter().copied().eq((0..100).step_by(2)));
        assert_eq!(first, second);
        assert!(shuffled(5).eq(order.iter().copied()), "one seed, one order");
        assert!(!shuffled(6).eq(order));
    }

    #[test]
    fn law_a_dataset_and_its_text_give_the_same_samples() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        std::fs::write(&a, "to be or not").expect("writes");
        std::fs::write(&b, " to be").expect("writes");
        let text = TokenStream::text(&[a, b], &Tokenizer::Byte).expect("reads");
        let prefix = folder.path().join("set");
        let ids: Vec<i32> = "to be or not to be".bytes().map(i32::from).collect();
        write_indexed(&prefix, Element::U16, &[&ids[..5], &ids[5..]]).expect("writes");
        let indexed = TokenStream::indexed(&prefix).expect("opens");
        let text = Samples::new(text, 4, 256, Order::TokenStream).expect("enough");
        let indexed = Samples::new(indexed, 4, 256, Order::TokenStream).expect("enough");
        assert_eq!(text.cuts[0].per_epoch, 4);
        let fingerprints = [&text, &indexed].map(|samples| samples.fingerprint().expect("reads"));
        assert_eq!(fingerprints[0], fingerprints[1]);
        for i in 0..9 {
            assert_eq!(text.get(i).expect("reads"), indexed.get(i).expect("reads"));
        }
    }

    #[test]
    fn a_fingerprint_sees_a_changed_token_and_a_changed_length() {
        let fingerprint = |ids: Vec<u32>| {
            let stream = TokenStream::of_ids("some", ids);
            let all = 0..stream.num_tokens();
            stream.fingerprint(&all, 10, false).expect("reads")
        };
        for len in [5, 1024, 1500, 200_000] {
            let ids: Vec<u32> = (0..len).map(|i| i % 7).collect();
            let whole = fingerprint(ids.clone());
            assert_eq!(fingerprint(ids.clone()), whole);
            for changed in [0, len as usize - 1] {
                let mut other = ids.clone();
                other[changed] = 9;
                assert_ne!(fingerprint(other), whole, "{changed} of {len}");
            }
            let shorter = ids[..len as usize - 1].to_vec();
            assert_ne!(fingerprint(shorter), whole, "{len}");
        }
    }

    #[test]
    fn ids_beyond_the_vocabulary_are_named_with_file_and_position() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        std::fs::write(&a, "abc").expect("writes");
        std::fs::write(&b, "ab~").expect("writes");
        let text = TokenStream::text(&[a, b], &Tokenizer::Byte).expect("reads");
        let refused = Samples::new(text, 2, 126, Order::TokenStream).expect_err("~ is 126");
        let message = refused.to_string();
        assert!(
            message.contains("b.txt: token id 126 at position 2; expected ids below 126"),
            "{message}"
        );

        let prefix = folder.path().join("set");
        write_indexed(&prefix, Element::I32, &[&[1, 2, -3, 4, 5]]).expect("writes");
        let indexed = TokenStream::indexed(&prefix).expect("opens");
        let samples = Samples::new(indexed, 2, 9, Order::TokenStream).expect("enough");
        let message = samples.get(1).expect_err("negative").to_string();
        assert!(
            message.contains("set.bin: token id -3 at position 2"),
            "{message}"
        );
    }

    #[test]
    fn too_little_data_is_refused_with_both_numbers() {
        let refused = Samples::new(counting(8), 8, 10, Order::TokenStream).expect_err("one short");
        let message = refused.to_string();
        assert!(
            message.contains("holds 8 tokens; one sample of sequence length 8 needs 9"),
            "{message}"
        );
    }

    /// Indexed datasets of the documents of a list each, in a folder.
    fn written(folder: &tempfile::TempDir, name: &str, documents: &[&[i32]]) -> TokenStream {
        let prefix = folder.path().join(name);
        write_indexed(&prefix, Element::I32, documents).expect("writes");
        TokenStream::indexed(&prefix).expect("opens")
    }

    #[test]
    fn a_blend_takes_turns_by_weight_and_each_dataset_begins_again() {
        let blend = Blend {
            streams: vec![Arc::new(counting(5)), Arc::new(counting(13))],
            weights: None,
        };
        let first = |blend: &Blend| {
            let samples = Samples::of_blend(blend, None, 2, 13, Order::TokenStream);
            let samples = samples.expect("enough");
            let input = |i| samples.get(i).expect("reads").inputs[0];
            (0..8).map(input).collect::<Vec<_>>()
        };
        // Two samples against six: one of the first to three of the second.
        assert_eq!(first(&blend), [0, 0, 2, 4, 2, 6, 8, 10]);
        let even = Blend {
            weights: Some(vec![4.0, 4.0]),
            ..blend
        };
        assert_eq!(first(&even), [0, 0, 2, 2, 0, 4, 2, 6]);
        let print = |blend: &Blend| {
            let samples = Samples::of_blend(blend, None, 2, 13, Order::TokenStream);
            samples.expect("enough").fingerprint().expect("reads")
        };
        let alike = Blend {
            weights: Some(vec![1.0, 1.0]),
            ..even.clone()
        };
        assert_eq!(print(&alike), print(&even));
        let other = Blend {
            weights: Some(vec![1.0, 2.0]),
            ..even.clone()
        };
        assert_ne!(print(&other), print(&even));
    }

    #[test]
    fn a_split_divides_documents_and_no_sample_crosses() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let documents: [&[i32]; 4] = [&[0, 1, 2], &[3, 4], &[5, 6, 7, 8, 9], &[10, 11, 12]];
        let blend = Blend::of(written(&folder, "set", &documents));
        let split: Split = "50,25,25".parse().expect("a split");
        let of = |share| Samples::of_blend(&blend, Some((split, share)), 2, 20, Order::TokenStream);
        let [training, held] =
            [Share::Training, Share::Validation].map(|share| of(share).expect("enough"));
        let inputs = |samples: &Samples| -> Vec<i32> {
            let samples = (0..4).map(|i| samples.get(i).expect("reads"));
            samples.flat_map(|sample| sample.inputs).collect()
        };
        assert_eq!(inputs(&training), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(inputs(&held), [5, 6, 7, 8, 5, 6, 7, 8]);
        assert_eq!((training.num_tokens(), held.num_tokens()), (5, 5));
        let prints = [&training, &held].map(|samples| samples.fingerprint().expect("reads"));
        assert_ne!(prints[0], prints[1]);
        let none: Split = "99,1".parse().expect("a split");
        let refused = Samples::of_blend(
            &blend,
            Some((none, Share::Validation)),
            2,
            20,
            Order::TokenStream,
        );
        let refused = refused.expect_err("no document is left").to_string();
        assert!(
            refused.contains("13 tokens in 4 documents, 0 of them in a share of --split"),
            "{refused}"
        );
    }
}
