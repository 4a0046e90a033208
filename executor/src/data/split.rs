//! [`Split`]: the documents of a dataset that are trained on, and those that are held back.

use std::ops::Range;
use std::str::FromStr;

use super::stream::TokenStream;
use crate::error::Error;

/// Shares of the documents of every dataset: training, validation, test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Split([f64; 3]);

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// What weights are trained on.
    Training,
    /// What they are judged by meanwhile.
    Validation,
}

impl FromStr for Split {
    type Err = String;

    /// Reads up to three numbers, e.g. `969,30,1`; those left out are 0.
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "found {text:?}, expected shares of training, validation and test, e.g. 969,30,1: numbers of at \
                 least 0, the first two above it"
            )
        };
        let mut shares = [0.0; 3];
        let words: Vec<&str> = text.split(',').collect();
        if words.len() > shares.len() {
            return Err(refuse());
        }
        for (share, word) in shares.iter_mut().zip(words) {
            *share = word.trim().parse().map_err(|_| refuse())?;
        }
        let legal = |share: &f64| share.is_finite() && *share >= 0.0;
        if !shares.iter().all(legal) || shares[0] == 0.0 || shares[1] == 0.0 {
            return Err(refuse());
        }
        Ok(Self(shares))
    }
}

impl Split {
    /// The documents of a share, of so many: each bound is the sum of the shares before it, rounded to the
    /// nearest, to the even one of two (Megatron-Core, `core/datasets/blended_megatron_dataset_builder.py`).
    fn documents(&self, share: Share, documents: u64) -> Range<u64> {
        let sum: f64 = self.0.iter().sum();
        let mut bounds = [0.0; 3];
        for i in 1..bounds.len() {
            bounds[i] = bounds[i - 1] + self.0[i - 1] / sum;
        }
        let bound = |i: usize| (bounds[i] * documents as f64).round_ties_even() as u64;
        match share {
            Share::Training => bound(0)..bound(1),
            Share::Validation => bound(1)..bound(2),
        }
    }

    /// The tokens of a share.
    pub(super) fn tokens(&self, share: Share, stream: &TokenStream) -> Result<Range<u64>, Error> {
        let documents = self.documents(share, stream.num_documents());
        Ok(stream.start_of(documents.start)?..stream.start_of(documents.end)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bounds_are_megatrons() {
        // Python: normalize, add up, int(round(bound * documents)).
        for (text, documents, expected) in [
            ("969,30,1", 1000, [0..969, 969..999]),
            ("969,30,1", 10, [0..10, 10..10]),
            ("99,1", 50, [0..50, 50..50]),
            ("99,1", 51, [0..50, 50..51]),
            ("0.5, 0.5, 0", 5, [0..2, 2..5]),
            ("90,10", 31_102, [0..27_992, 27_992..31_102]),
        ] {
            let split: Split = text.parse().expect(text);
            let shares = [Share::Training, Share::Validation];
            let found = shares.map(|share| split.documents(share, documents));
            assert_eq!(found, expected, "{text} of {documents}");
        }
    }

    #[test]
    fn what_is_no_split_is_refused() {
        for text in ["", "1", "a,b", "1,-1", "0,1", "1,2,3,4", "1,nan"] {
            let refused = text.parse::<Split>().expect_err(text);
            assert!(refused.contains("e.g. 969,30,1"), "{refused}");
        }
    }
}
