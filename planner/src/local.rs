//! [`Local`]: one microbatch as one rank sees it.

use serde::{Deserialize, Serialize};

use crate::choice::Capacity;
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
    /// Rows that leave this rank for experts: `tokens_local * topk`. 0 without experts.
    pub sent_rows: u64,
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
        let sent = |moe: &Moe| tokens_local * moe.topk;
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
            sent_rows: model.moe().map_or(0, sent),
            expert_rows,
            experts_local,
        }
    }

    /// The same where experts have a capacity: at most so many rows of each rank, padded just as many.
    #[must_use]
    pub fn within(self, model: &Model, capacity: Option<Capacity>) -> Self {
        let Some((moe, capacity)) = model.moe().zip(capacity) else {
            return self;
        };
        let each = capacity.rows(self.tokens_local, moe.topk, moe.experts);
        let within = |rows: u64, most: u64| if capacity.pad { most } else { rows.min(most) };
        Self {
            sent_rows: within(self.sent_rows, each * moe.experts),
            expert_rows: within(
                self.expert_rows,
                each * self.experts_local * self.ep * self.etp,
            ),
            ..self
        }
    }

    /// Key/value heads on a rank: replicated where there are fewer than ranks.
    pub fn kv_heads(&self, kv_heads: u64) -> u64 {
        kv_heads.div_ceil(self.tp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::DropPolicy;
    use crate::layout::Degrees;
    use crate::model::presets;

    #[test]
    fn golden_rows_within_a_capacity() {
        // 4096 tokens a rank, each to 2 of 8 experts, of which a rank has 2: 1024 rows an expert and rank are even.
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 8,
        };
        let degrees = Degrees {
            gpus: 8,
            tp: 1,
            cp: 1,
            pp: 1,
            vpp: 1,
            ep: 4,
            etp: 2,
            mbs: 1,
        };
        let layout = Layout::new(&degrees, &model, &batch).expect("legal");
        for (load, factor, pad, sent, rows) in [
            (1.0, 1.0, false, 8 * 1024, 2 * 1024 * 8),
            (2.0, 1.0, false, 8 * 1024, 2 * 1024 * 8),
            (2.0, 1.5, false, 8 * 1024, 2 * 1536 * 8),
            (1.0, 1.5, true, 8 * 1536, 2 * 1536 * 8),
            (1.0, 0.5, false, 8 * 512, 2 * 512 * 8),
        ] {
            let capacity = Capacity {
                factor,
                drop_policy: DropPolicy::Probs,
                pad,
            };
            let local = Local::new(&layout, &model, &batch, load);
            let within = local.within(&model, Some(capacity));
            assert_eq!((within.sent_rows, within.expert_rows), (sent, rows));
            assert_eq!(local.within(&model, None), local);
        }
    }
}
