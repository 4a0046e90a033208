//! [`Local`]: one microbatch as one rank sees it.

use serde::{Deserialize, Serialize};

use crate::layout::{Batch, Layout};
use crate::model::{Model, Moe};

/// One microbatch as one rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Local {
    /// Tokens of one tensor-parallel group: `seq_len * mbs / cp`.
    pub tokens: u64,
    /// Tokens the rank itself holds between blocks: `tokens / tp` (sequence parallelism).
    pub tokens_local: u64,
    /// Tokens of a whole sequence.
    pub seq_len: u64,
    /// Sequences of the microbatch.
    pub mbs: u64,
    /// Tensor-parallel degree.
    pub tp: u64,
    /// Context-parallel degree.
    pub cp: u64,
    /// Expert-parallel degree.
    pub ep: u64,
    /// Expert-tensor-parallel degree.
    pub etp: u64,
    /// Rows that enter the experts of this rank: `load * tokens_local * topk * etp`. 0 without
    /// experts.
    pub expert_rows: u64,
    /// Routed experts this rank holds; 0 without experts.
    pub experts_local: u64,
}

impl Local {
    /// One microbatch of a layout. `load` is the rows of the busiest expert rank over the mean: 1
    /// under balanced routing.
    pub fn new(layout: &Layout, model: &Model, batch: &Batch, load: f64) -> Self {
        let (tp, cp) = (u64::from(layout.tp()), u64::from(layout.cp()));
        let (ep, etp) = (u64::from(layout.ep()), u64::from(layout.etp()));
        let mbs = u64::from(layout.mbs());
        let tokens = (batch.seq_len * mbs).div_ceil(cp);
        let tokens_local = tokens.div_ceil(tp);
        let rows = |moe: &Moe| ((tokens_local * moe.topk * etp) as f64 * load).round() as u64;
        let expert_rows = model.moe().map_or(0, rows);
        let experts_local = model.moe().map_or(0, |moe| moe.experts.div_ceil(ep));
        Self {
            tokens,
            tokens_local,
            seq_len: batch.seq_len,
            mbs,
            tp,
            cp,
            ep,
            etp,
            expert_rows,
            experts_local,
        }
    }

    /// Key/value heads on a rank: replicated where there are fewer than ranks.
    pub fn kv_heads(&self, kv_heads: u64) -> u64 {
        kv_heads.div_ceil(self.tp)
    }
}
