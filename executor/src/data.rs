//! Training data: a stream of token ids, cut into samples.
//!
//! Sample `i` is tokens `i*S .. i*S+S` of the stream of all documents in order, its targets the same
//! shifted by one; step `t` of a global batch `B` takes samples `t*B .. t*B+B-1`. When the samples
//! are used up they begin again: sample `i` is then sample `i % n` of epoch `i / n`, where
//! `n = (tokens - 1) / S`. Shuffled, each epoch has its own seeded order of whole samples. Which
//! rank takes which sample is the training step's business.

mod indexed;
mod prepare;
mod shuffle;
mod tokenizer;

use std::ops::Range;
use std::path::{Path, PathBuf};

pub use indexed::{Element, Indexed, write as write_indexed};
pub use prepare::{Preparation, Prepared};
pub use tokenizer::Tokenizer;

use moefold_planner::layout::Batch;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::error::Error;
use shuffle::Permutation;

/// All token ids of some documents, one after the other.
#[derive(Debug)]
pub enum TokenStream {
    /// A Megatron indexed dataset on disk.
    Indexed(Indexed),
    /// Tokenized text in memory.
    Text {
        /// The files it was read from, with the token each begins at.
        files: Vec<(PathBuf, u64)>,
        /// The ids.
        ids: Vec<u32>,
    },
}

impl TokenStream {
    /// Opens a Megatron dataset by its prefix.
    pub fn indexed(prefix: &Path) -> Result<Self, Error> {
        Indexed::open(prefix).map(Self::Indexed)
    }

    /// Reads and tokenizes text files; each is a document, and nothing is put between them.
    pub fn text(paths: &[PathBuf], tokenizer: &Tokenizer) -> Result<Self, Error> {
        let mut files = Vec::with_capacity(paths.len());
        let mut ids = Vec::new();
        for path in paths {
            let text = std::fs::read(path).map_err(Error::io(path, "read"))?;
            files.push((path.clone(), ids.len() as u64));
            let encoded = tokenizer.encode(&text);
            ids.extend(encoded.map_err(|reason| Error::malformed(path, reason))?);
        }
        Ok(Self::Text { files, ids })
    }

    /// Ids that are already in memory.
    pub fn of_ids(name: &str, ids: Vec<u32>) -> Self {
        Self::Text {
            files: vec![(PathBuf::from(name), 0)],
            ids,
        }
    }

    /// Tokens there are.
    pub fn num_tokens(&self) -> u64 {
        match self {
            Self::Indexed(data) => data.num_tokens(),
            Self::Text { ids, .. } => ids.len() as u64,
        }
    }

    /// Tokens `range`, each proven below `vocab_size`.
    fn tokens(&self, range: Range<u64>, vocab_size: u64) -> Result<Vec<i32>, Error> {
        let ids: Vec<i64> = match self {
            Self::Indexed(data) => data.ids(range.clone())?,
            Self::Text { ids, .. } => ids[range.start as usize..range.end as usize]
                .iter()
                .map(|&id| i64::from(id))
                .collect(),
        };
        let legal = 0..vocab_size as i64;
        match ids.iter().position(|id| !legal.contains(id)) {
            None => Ok(ids.into_iter().map(|id| id as i32).collect()),
            Some(i) => {
                let (path, first) = self.file_of(range.start + i as u64);
                Err(Error::malformed(
                    path,
                    format!(
                        "token id {} at position {}; expected ids below {vocab_size}, the model's \
                         vocabulary: was the data tokenized for another model?",
                        ids[i],
                        range.start + i as u64 - first
                    ),
                ))
            }
        }
    }

    /// The file a token is in, and the token that file begins with.
    fn file_of(&self, token: u64) -> (&Path, u64) {
        match self {
            Self::Indexed(data) => (data.path(), 0),
            Self::Text { files, .. } => {
                let after = files.partition_point(|(_, first)| *first <= token);
                let (path, first) = &files[after.max(1) - 1];
                (path, *first)
            }
        }
    }

    /// A name for what the stream holds: BLAKE3 of how many tokens there are and of up to 64 stretches
    /// of 1024, spaced evenly. The same whether it is text or a dataset.
    fn fingerprint(&self, vocab_size: u64) -> Result<String, Error> {
        const STRETCHES: u64 = 64;
        const TOKENS: u64 = 1024;
        let all = self.num_tokens();
        let mut hash = blake3::Hasher::new();
        hash.update(&all.to_le_bytes());
        let last = all.saturating_sub(TOKENS);
        let mut after = 0;
        for stretch in 0..STRETCHES {
            let start = (last * stretch / (STRETCHES - 1)).max(after);
            after = (start + TOKENS).min(all);
            for token in self.tokens(start..after, vocab_size)? {
                hash.update(&token.to_le_bytes());
            }
        }
        Ok(hash.finalize().to_hex().to_string())
    }

    /// The first file, for errors about the whole.
    fn name(&self) -> &Path {
        self.file_of(0).0
    }
}

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
    /// `[seq_len]` token ids, each the one after its input.
    pub targets: Vec<i32>,
}

/// A stream cut into samples. Shared by all ranks.
#[derive(Debug)]
pub struct Samples {
    stream: TokenStream,
    seq_len: u64,
    vocab_size: u64,
    order: Order,
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
        assert!(seq_len > 0, "a sample has at least one token");
        assert!(
            i32::try_from(vocab_size).is_ok(),
            "vocabulary of {vocab_size}: ids are 32-bit"
        );
        let found = stream.num_tokens();
        let per_epoch = found.saturating_sub(1) / seq_len;
        if per_epoch == 0 {
            return Err(Error::malformed(
                stream.name(),
                format!(
                    "holds {found} tokens; one sample of sequence length {seq_len} needs {}: \
                     give more data or a shorter sequence",
                    seq_len + 1
                ),
            ));
        }
        let samples = Self {
            stream,
            seq_len,
            vocab_size,
            order,
            per_epoch,
        };
        // Text is in memory anyway: a wrong tokenizer shows now, not after an hour of training.
        if let TokenStream::Text { ids, .. } = &samples.stream
            && let Some(wrong) = ids.iter().position(|&id| u64::from(id) >= vocab_size)
        {
            let wrong = wrong as u64;
            samples.stream.tokens(wrong..wrong + 1, vocab_size)?;
        }
        Ok(samples)
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

    /// Tokens of the stream.
    pub fn num_tokens(&self) -> u64 {
        self.stream.num_tokens()
    }

    /// What the samples are cut from, as a hash over a part of it.
    pub fn fingerprint(&self) -> Result<String, Error> {
        self.stream.fingerprint(self.vocab_size)
    }

    /// The order they are taken in.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Samples before they repeat.
    pub fn per_epoch(&self) -> u64 {
        self.per_epoch
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
        let (epoch, within) = (i / self.per_epoch, i % self.per_epoch);
        let place = match self.order {
            Order::TokenStream => within,
            Order::Shuffled { seed } => Permutation::new(self.per_epoch, seed, epoch).apply(within),
        };
        let start = place * self.seq_len;
        let mut inputs = self
            .stream
            .tokens(start..start + self.seq_len + 1, self.vocab_size)?;
        let targets = inputs[1..].to_vec();
        inputs.pop();
        Ok(Sample { inputs, targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(tokens: u32) -> TokenStream {
        TokenStream::of_ids("counting", (0..tokens).collect())
    }

    #[test]
    fn golden_samples_in_stream_order_and_their_epochs() {
        let samples = Samples::new(counting(10), 3, 10, Order::TokenStream).expect("enough");
        // Tokens 0..9 make three samples; token 9 is only a target.
        assert_eq!(samples.per_epoch(), 3);
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
        assert_eq!(text.per_epoch(), 4);
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
            stream.fingerprint(10).expect("reads")
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
}
