//! [`HostTokens`] and [`DeviceTokens`]: the tokens of a microbatch, where they should lead and where documents begin.

use std::borrow::Cow;

use moefold_kernels::attention::Documents;
use moefold_kernels::cuda::Stream;
use moefold_kernels::rope::Rope;
use moefold_kernels::{Dtype, Tensor, TensorClass};
use moefold_planner::model::Model;

use crate::data::{NONE, Packing};
use crate::rank::Context;
use crate::rotary::Rotation;
use crate::shares;

/// The host's copy of one microbatch of a rank: `sequences * seq_len` tokens each, of which context-parallel
/// ranks take each its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTokens {
    /// Inputs.
    pub ids: Vec<i32>,
    /// What each should predict; negative where it has no loss.
    pub targets: Vec<i32>,
    /// Where the document of each begins in its sequence, where documents are apart.
    pub starts: Option<Vec<i32>>,
    /// What is each document's own.
    pub packing: Packing,
}

/// Ids and targets of one microbatch on the device, and those of each depth of multi-token prediction.
#[derive(Debug)]
pub(crate) struct DeviceTokens {
    pub(super) own: [Tensor; 2],
    pub(super) ahead: Vec<[Tensor; 2]>,
    /// Rotations, where positions begin again with every document.
    pub(super) rope: Option<Rope>,
    /// Where attention does.
    pub(super) documents: Option<Documents>,
}

impl HostTokens {
    /// So many tokens for a device that computes nothing, which [`upload`] asks for no ids and no targets. Where they
    /// are packed all are of one document.
    pub(crate) fn blank(tokens: usize, packing: Packing) -> Self {
        Self {
            ids: Vec::new(),
            targets: Vec::new(),
            starts: packing.resets().then(|| vec![0; tokens]),
            packing,
        }
    }

    /// What a depth of multi-token prediction embeds and should predict: at each token of a sequence of `seq_len`
    /// the ids `depth` and `depth + 1` after it, which of depth 0 are its own. Beyond the end any token is embedded,
    /// and none predicted; nor is one where a token from this one on has no loss, so that no document is asked for
    /// the next.
    fn of_depth(&self, seq_len: usize, depth: usize) -> [Cow<'_, [i32]>; 2] {
        if depth == 0 {
            return [&self.ids, &self.targets].map(|values| Cow::Borrowed(&values[..]));
        }
        let (mut ids, mut targets) = (Vec::new(), Vec::new());
        let sequences = self.ids.chunks(seq_len).zip(self.targets.chunks(seq_len));
        for (own, next) in sequences {
            for token in 0..next.len() {
                let embedded = token + depth;
                // What a token without a loss would predict is the next input.
                let id = next.get(embedded - 1).copied().filter(|&id| id != NONE);
                ids.push(id.or(own.get(embedded).copied()).unwrap_or(0));
                let passed = next.get(token..=embedded).unwrap_or(&[NONE]);
                let has_loss = !passed.contains(&NONE);
                targets.push(if has_loss { next[embedded] } else { NONE });
            }
        }
        [Cow::Owned(ids), Cow::Owned(targets)]
    }

    /// Positions of its tokens, of sequences of `seq_len`, where they begin again with every document.
    fn positions(&self, seq_len: usize) -> Option<Vec<i32>> {
        let starts = self.starts.as_ref()?;
        let of_one = |starts: &[i32]| -> Vec<i32> {
            (0..)
                .zip(starts)
                .map(|(token, start)| token - start)
                .collect()
        };
        let reset = self.packing.reset_position_ids;
        reset.then(|| starts.chunks(seq_len).flat_map(of_one).collect())
    }

    /// Where documents begin, where attention begins again with every one.
    fn documents(&self) -> Option<&[i32]> {
        let starts = self.starts.as_deref();
        starts.filter(|_| self.packing.reset_attention_mask)
    }
}

/// Sends ids and targets of microbatches of `[sequences, seq_len]` tokens to the device, beside what it is
/// doing, and with them those of each of `depths`, and what documents have of their own. `rope` has a row for every
/// token; of a cut sequence not for every position, so that where these begin again there is a table of them.
pub(crate) fn upload(
    cx: &Context,
    [sequences, seq_len]: [usize; 2],
    depths: usize,
    rope: &Rope,
    rotation: &Rotation,
    microbatches: &[HostTokens],
) -> Vec<DeviceTokens> {
    let own = shares::tokens(cx, [sequences, seq_len]);
    let class = TensorClass::Activations;
    let tensor = |values: &[i32]| {
        let values: Vec<i32> = own.clone().map(|token| values[token]).collect();
        cx.device.from_i32(class, &values, &[values.len()])
    };
    let tensors = |host: &HostTokens, depth: usize| {
        if cx.device.is_meta() {
            return [(); 2].map(|()| cx.device.empty(class, Dtype::I32, &[own.len()]));
        }
        host.of_depth(seq_len, depth).map(|values| tensor(&values))
    };
    let tokens = cx.device.beside(Stream::Copies, || {
        let whole = microbatches.iter().find_map(|host| host.positions(seq_len));
        let whole = whole.map(|_| {
            if cx.cp.is_solo() {
                rope.clone()
            } else {
                rotation.table(&cx.device, &(0..seq_len as u32))
            }
        });
        let upload = |host: &HostTokens| DeviceTokens {
            own: tensors(host, 0),
            ahead: (1..=depths).map(|depth| tensors(host, depth)).collect(),
            rope: (host.positions(seq_len).zip(whole.clone()))
                .map(|(at, whole)| whole.at(tensor(&at))),
            documents: (host.documents())
                .map(|starts| Documents::new(&cx.device, class, starts, sequences)),
        };
        microbatches.iter().map(upload).collect()
    });
    cx.device.join(Stream::Copies);
    tokens
}

/// Rotations of the rank's tokens of `sequences` sequences, each from position 0.
pub(crate) fn rotations(cx: &Context, model: &Model, seq_len: usize, sequences: usize) -> Rope {
    let own = shares::tokens(cx, [sequences, seq_len]);
    let positions = own.map(|token| (token % seq_len) as u32);
    Rotation::or_unread(model).table(&cx.device, &positions)
}
