//! [`Shard`]: how many parameters one rank holds, split by how they are divided and reduced.
//!
//! Three buckets, since three groups reduce them: tensor-parallel and replicated parameters over
//! DP x CP, experts over EDP (Megatron-Core, `parallel_state.py` and `distrib_optimizer.py`). What a
//! layer holds is counted in [`crate::model::count`]; here it is only divided.

use std::ops::{Add, AddAssign, Mul};

use crate::local::Local;
use crate::model::count::{self, LayerParams};
use crate::model::{Layer, Mixer, Model, QkNorm};

/// Parameters of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shard {
    /// Divided over tensor-parallel ranks.
    pub split: u64,
    /// The same on every tensor-parallel rank: norms, router, down-projections of latents.
    pub replicated: u64,
    /// Routed experts.
    pub experts: u64,
    /// Of the dense ones, those that no recipe quantizes: matrices of a vocabulary, norms, routers. Norms inside a
    /// mixer are counted with its matrices.
    pub wide: u64,
}

impl Shard {
    /// What is reduced over DP x CP.
    pub fn dense(&self) -> u64 {
        self.split + self.replicated
    }

    /// The same without some of it.
    #[must_use]
    pub fn without(&self, some: Self) -> Self {
        Self {
            split: self.split.saturating_sub(some.split),
            replicated: self.replicated.saturating_sub(some.replicated),
            experts: self.experts.saturating_sub(some.experts),
            wide: self.wide.saturating_sub(some.wide),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.dense() + self.experts
    }
}

impl Add for Shard {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            split: self.split + other.split,
            replicated: self.replicated + other.replicated,
            experts: self.experts + other.experts,
            wide: self.wide + other.wide,
        }
    }
}

impl AddAssign for Shard {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<u64> for Shard {
    type Output = Self;
    fn mul(self, times: u64) -> Self {
        Self {
            split: self.split * times,
            replicated: self.replicated * times,
            experts: self.experts * times,
            wide: self.wide * times,
        }
    }
}

fn divide(params: &LayerParams, local: &Local) -> Shard {
    Shard {
        split: params.sharded().div_ceil(local.tp),
        replicated: params.replicated(),
        experts: params.experts.div_ceil(local.ep * local.etp),
        wide: params.router + params.norms,
    }
}

/// Parameters of a decoder layer on one rank. Key/value heads that are fewer than the ranks are
/// copied, not cut, and so is the bias of an expert's output.
pub fn layer(model: &Model, layer: &Layer, local: &Local) -> Shard {
    let mut params = count::layer(model, layer);
    if let Some(moe) = layer.moe().filter(|moe| moe.expert.bias) {
        params.experts += (local.etp - 1) * moe.experts * model.hidden;
    }
    let mut shard = divide(&params, local);
    if let Some(Mixer::Gqa(gqa)) = &layer.mixer {
        let copies = local.kv_heads(gqa.kv_heads) * local.tp - gqa.kv_heads;
        let each = 2 * gqa.head_dim * (model.hidden + u64::from(gqa.qkv_bias))
            + gqa.head_dim * u64::from(gqa.qk_norm == QkNorm::Full);
        shard.split += (copies * each).div_ceil(local.tp);
    }
    shard
}

/// The embedding on one rank.
pub fn embedding(model: &Model, local: &Local) -> Shard {
    let matrix = vocab(model, local.tp) * model.hidden;
    Shard {
        split: matrix,
        wide: matrix,
        ..Shard::default()
    }
}

/// The final norm and the head on one rank, the head as a matrix of its own. Where it is tied and
/// one rank holds both ends, the caller takes one matrix off.
pub fn head(model: &Model, local: &Local) -> Shard {
    let matrix = vocab(model, local.tp) * (model.hidden + u64::from(model.head_bias));
    let last_norm = count::last_norm(model);
    Shard {
        split: matrix,
        replicated: last_norm,
        wide: matrix + last_norm,
        ..Shard::default()
    }
}

/// Each multi-token-prediction depth on one rank: its layer, projection and norms.
pub fn mtp(model: &Model, local: &Local) -> Vec<Shard> {
    count::mtp(model)
        .map(|depth| {
            let mut shard = divide(&depth.layer, local);
            shard.split += depth.projection.div_ceil(local.tp);
            shard.replicated += depth.norms;
            shard.wide += depth.norms;
            shard
        })
        .collect()
}

/// Vocabulary entries on one of `tp` ranks. Megatron pads the vocabulary to a multiple of `128 * tp` by
/// default; here it is padded to the least multiple of `tp`.
pub fn vocab(model: &Model, tp: u64) -> u64 {
    model.vocab_size.div_ceil(tp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn law_one_rank_holds_the_whole_of_every_model() {
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            let local = Local {
                tokens: 8,
                tokens_local: 8,
                seq_len: 8,
                mbs: 1,
                tp: 1,
                cp: 1,
                ep: 1,
                etp: 1,
                sent_rows: 8,
                expert_rows: 8,
                experts_local: 1,
            };
            let layers: u64 = model
                .layers
                .iter()
                .map(|l| layer(&model, l, &local).total())
                .sum();
            let ends = head(&model, &local).total() + embedding(&model, &local).total();
            let twice = u64::from(model.tied_embeddings) * model.vocab_size * model.hidden;
            assert_eq!(
                layers + ends - twice,
                count::params(&model).total(),
                "{name}"
            );
        }
    }
}
