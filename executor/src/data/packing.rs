//! [`Packing`]: what of a sequence that holds several documents is each document's own.
//!
//! A sample is cut from the stream wherever it comes to lie, so that it holds the end of one document, whole ones,
//! and the beginning of another. As Megatron-Core's `GPTDataset` does it (`core/datasets/gpt_dataset.py`,
//! `_get_ltor_masks_and_position_ids`): where a token begins a document, positions may begin again, attention may
//! see nothing before it, and the token before it may have no loss. What a sample holds of a document that began
//! earlier is a document of its own, from position 0.

use serde::{Deserialize, Serialize};

/// Target of a token that predicts nothing: cross entropy passes over it.
pub(crate) const NONE: i32 = -1;

/// What begins again with each document of a sequence, and where documents end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packing {
    /// Positions (Megatron's `--reset-position-ids`).
    pub reset_position_ids: bool,
    /// What attention sees (Megatron's `--reset-attention-mask`).
    pub reset_attention_mask: bool,
    /// The last token of a document has no loss: what it would predict is the next one's first (Megatron's
    /// `--eod-mask-loss`).
    pub eod_mask_loss: bool,
    /// The token that ends a document; none where they end as the data have them.
    pub eod_token: Option<i32>,
}

impl Packing {
    /// Whether anything is a document's own.
    pub fn is_any(&self) -> bool {
        self.resets() || self.eod_mask_loss
    }

    /// Whether positions or attention begin again.
    pub fn resets(&self) -> bool {
        self.reset_position_ids || self.reset_attention_mask
    }
}

/// Of each of some tokens, the first one of its document, where documents begin at `begins`, in order.
pub(super) fn starts(tokens: usize, begins: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut begins = begins.peekable();
    let mut start = 0;
    let of_token = |token: usize| {
        while begins.next_if(|&begin| begin <= token).is_some() {
            start = token as i32;
        }
        start
    };
    (0..tokens).map(of_token).collect()
}

/// Gives the last token of every document nothing to predict. `starts` are of these tokens and the one after.
pub(super) fn mask_ends(targets: &mut [i32], starts: &[i32]) {
    for (token, target) in targets.iter_mut().enumerate() {
        if starts[token + 1] == token as i32 + 1 {
            *target = NONE;
        }
    }
}
