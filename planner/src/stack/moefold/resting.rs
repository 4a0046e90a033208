//! How parameters rest: one after the other in a buffer for each family, with room between them.

use crate::local::Local;
use crate::model::{Ffn, Layer, Mixer, Model, QkNorm};
use crate::shard::{self, Shard};

/// Parameters start at multiples of this many elements of their buffer, and a buffer ends at a multiple
/// for each rank that it is divided over.
pub const GRAIN: u64 = 16;

/// Elements after parameters of these lengths.
fn padding(lengths: &[u64]) -> u64 {
    let after = |length: &u64| length.next_multiple_of(GRAIN) - length;
    lengths.iter().map(after).sum()
}

/// After the parameters of a layer.
pub fn layer_padding(model: &Model, layer: &Layer, local: &Local) -> Shard {
    let h = model.hidden;
    let mut room = Shard::default();
    if let Some(Mixer::Gqa(gqa)) = &layer.mixer {
        let heads = |heads: u64| heads * gqa.head_dim * h;
        let query = heads(gqa.heads / local.tp);
        let key = heads(local.kv_heads(gqa.kv_heads));
        room.split += padding(&[query, key, key, query]);
        room.replicated += padding(&[h]);
        if gqa.qk_norm == QkNorm::PerHead {
            room.replicated += padding(&[gqa.head_dim; 2]);
        }
    }
    match &layer.ffn {
        Some(Ffn::Dense(mlp)) => {
            let width = mlp.width / local.tp;
            room.split += padding(&[2 * width * h, width * h]);
            room.replicated += padding(&[h]);
        }
        Some(Ffn::Moe(moe)) => {
            let width = moe.expert.width / local.etp;
            let experts = local.experts_local * width * h;
            room.experts += padding(&[2 * experts, experts]);
            room.replicated += padding(&[h, moe.experts * h]);
        }
        None => {}
    }
    room
}

/// After the embedding.
pub fn embedding_padding(model: &Model, local: &Local) -> Shard {
    Shard {
        split: padding(&[shard::vocab(model, local) * model.hidden]),
        ..Shard::default()
    }
}

/// After the final norm and a head of its own.
pub fn head_padding(model: &Model, local: &Local) -> Shard {
    Shard {
        replicated: padding(&[model.hidden]),
        ..embedding_padding(model, local)
    }
}
