//! [`Blend`]: datasets to train on together; [`Draws`]: which of them each sample is taken from.
//!
//! Sample `i` is of the dataset that is furthest behind its weight: of the greatest `w * max(i, 1) - c`, where
//! `c` samples before it were of that dataset, and the first of equals (Megatron-Core,
//! `core/datasets/helpers.cpp`, `build_blending_indices`). It is the next one of that dataset. So the samples of
//! a blend depend on its weights alone, not on how many will be asked for.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::stream::TokenStream;
use crate::error::Error;

/// Datasets to take samples from.
#[derive(Debug, Clone)]
pub struct Blend {
    pub(super) streams: Vec<Arc<TokenStream>>,
    /// One each, above zero; none where each weighs what samples it has.
    pub(super) weights: Option<Vec<f64>>,
}

impl Blend {
    /// One dataset.
    pub fn of(stream: TokenStream) -> Self {
        Self {
            streams: vec![Arc::new(stream)],
            weights: None,
        }
    }

    /// Indexed datasets as Megatron's `--data-path` lists them, given by `flag`: prefixes, or a weight before
    /// every prefix.
    pub fn open(flag: &str, list: &[OsString]) -> Result<Self, Error> {
        let (weights, prefixes) = weighted(list);
        if let Some(weights) = &weights
            && let Some(wrong) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0))
        {
            return Err(Error::Request(format!(
                "{flag}: found a weight of {wrong}, expected a number above 0; leave out a dataset that is not to \
                 be drawn from"
            )));
        }
        let streams = prefixes.iter().map(|prefix| {
            let stream = TokenStream::indexed(Path::new(prefix));
            let not_all = weights.is_none() && list.iter().any(|word| weight(word).is_some());
            stream.map(Arc::new).map_err(|error| {
                if !not_all {
                    return error;
                }
                Error::Request(format!(
                    "{flag} {}: {error}; expected prefixes, or a weight before every prefix",
                    list.join(OsStr::new(" ")).display()
                ))
            })
        });
        let streams = streams.collect::<Result<_, _>>()?;
        Ok(Self { streams, weights })
    }

    /// Refuses tokens that are not those that were written, where that can be told. All are read.
    pub fn verify(&self) -> Result<(), Error> {
        self.streams.iter().try_for_each(|stream| stream.verify())
    }
}

/// Weights and prefixes of a list that has both in turn; else all of it are prefixes.
fn weighted(list: &[OsString]) -> (Option<Vec<f64>>, Vec<&OsString>) {
    let pairs = list.chunks_exact(2);
    if pairs.remainder().is_empty()
        && let Some(weights) = pairs.map(|pair| weight(&pair[0])).collect()
    {
        return (Some(weights), list.iter().skip(1).step_by(2).collect());
    }
    (None, list.iter().collect())
}

fn weight(word: &OsStr) -> Option<f64> {
    word.to_str()?.parse().ok()
}

/// Samples before which counts are kept: between them they are counted again.
const BLOCK: u64 = 1024;

/// The dataset of every sample.
#[derive(Debug)]
pub(super) struct Draws {
    /// They sum to one.
    weights: Vec<f64>,
    /// What every dataset has given before sample `i * BLOCK`, as far as anybody asked.
    before: Mutex<Vec<Vec<u64>>>,
}

impl Draws {
    /// Draws by weights above zero.
    pub(super) fn new(weights: &[f64]) -> Self {
        let sum: f64 = weights.iter().sum();
        Self {
            weights: weights.iter().map(|weight| weight / sum).collect(),
            before: Mutex::new(vec![vec![0; weights.len()]]),
        }
    }

    /// The weights.
    pub(super) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The dataset that sample `i` is of, and which sample of that one it is.
    pub(super) fn get(&self, i: u64) -> (usize, u64) {
        if self.weights.len() == 1 {
            return (0, i);
        }
        let mut given = self.before_block(i / BLOCK);
        for earlier in i / BLOCK * BLOCK..i {
            let dataset = self.draw(earlier, &given);
            given[dataset] += 1;
        }
        let dataset = self.draw(i, &given);
        (dataset, given[dataset])
    }

    fn before_block(&self, block: u64) -> Vec<u64> {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let mut given = before.last().expect("that of the first block").clone();
        for next in before.len() as u64..=block {
            for i in (next - 1) * BLOCK..next * BLOCK {
                let dataset = self.draw(i, &given);
                given[dataset] += 1;
            }
            before.push(given.clone());
        }
        before[block as usize].clone()
    }

    /// The dataset that is furthest behind before sample `i`.
    fn draw(&self, i: u64, given: &[u64]) -> usize {
        let behind =
            |dataset: usize| self.weights[dataset] * i.max(1) as f64 - given[dataset] as f64;
        let all = 1..self.weights.len();
        all.fold(0, |most, next| {
            if behind(next) > behind(most) {
                next
            } else {
                most
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Given by Megatron-Core's own helper; see `tests/oracles/make_blend.py`.
    const GOLDEN: &str = include_str!("blend/golden.json");

    #[derive(serde::Deserialize)]
    struct Golden {
        weights: Vec<f64>,
        datasets: Vec<usize>,
        samples: Vec<u64>,
    }

    #[test]
    fn golden_draws_are_megatrons() {
        let all: Vec<Golden> = serde_json::from_str(GOLDEN).expect("a list");
        for golden in all {
            let draws = Draws::new(&golden.weights);
            let expected = golden.datasets.into_iter().zip(golden.samples);
            for (i, expected) in (0..).zip(expected) {
                assert_eq!(draws.get(i), expected, "{:?} at {i}", golden.weights);
            }
        }
    }

    #[test]
    fn law_draws_do_not_depend_on_who_asked_before() {
        let weights = [0.61, 0.3, 0.09];
        let in_order = Draws::new(&weights);
        let drawn: Vec<_> = (0..3 * BLOCK).map(|i| in_order.get(i)).collect();
        for i in [3 * BLOCK - 1, BLOCK, BLOCK - 1, 2 * BLOCK + 7, 0] {
            assert_eq!(Draws::new(&weights).get(i), drawn[i as usize], "{i}");
        }
        for (dataset, weight) in weights.iter().enumerate() {
            let own = drawn.iter().filter(|(of, _)| *of == dataset);
            // Each is taken from in its own order, and no more than its share.
            let samples: Vec<u64> = own.map(|&(_, sample)| sample).collect();
            assert!(samples.iter().copied().eq(0..samples.len() as u64));
            let share = weight * drawn.len() as f64;
            assert!((samples.len() as f64 - share).abs() <= 2.0, "{dataset}");
        }
    }

    #[test]
    fn a_list_has_weights_where_every_other_word_is_one() {
        let words = |text: &str| -> Vec<OsString> { text.split(' ').map(Into::into).collect() };
        let list = words("3 a 7.5 b");
        let (weights, prefixes) = weighted(&list);
        assert_eq!(weights, Some(vec![3.0, 7.5]));
        assert_eq!(prefixes, ["a", "b"]);
        for text in ["a", "a b", "a b c", "3 a b", "3 a b c"] {
            let list = words(text);
            let (weights, prefixes) = weighted(&list);
            assert_eq!((weights, prefixes.len()), (None, list.len()), "{text}");
        }
        let refused = Blend::open("--data", &words("0 a 1 b")).expect_err("no weight");
        assert!(
            refused.to_string().contains("--data: found a weight of 0"),
            "{refused}"
        );
        let refused = Blend::open("--data", &words("3 a b c")).expect_err("a half");
        assert!(
            refused.to_string().contains("a weight before every prefix"),
            "{refused}"
        );
    }
}
