//! What this project's executor keeps for the backward pass; nothing is recomputed. Activations are of
//! the precision's dtype, statistics of rows, scores and probabilities f32.
//!
//! Its modules hold exactly these tensors between forward and backward; a test of the executor
//! compares the bytes. Sequence parallelism keeps the local slice of a block's input and gathers it
//! again in the backward pass.

use moefold_profiles::units::Bytes;
use moefold_profiles::{Dtype, Precision};

use crate::kept::{Kept, Local};
use crate::model::{Ffn, Gqa, Layer, Mixer, Mlp, Model, Moe, QkNorm};
use crate::plan::Recompute;

/// See the module's documentation.
pub fn kept(
    model: &Model,
    layer: &Layer,
    local: &Local,
    precision: Precision,
    _recompute: &Recompute,
) -> Vec<Kept> {
    let mut list = List {
        kept: Vec::with_capacity(24),
        dtype: precision.activation(),
    };
    let block_input = local.tokens_local * model.hidden;
    if let Some(mixer) = &layer.mixer {
        list.float("attention", "input", block_input);
        list.single("attention", "rstd", local.tokens_local);
        list.float("attention", "norm_output", block_input);
        if let Mixer::Gqa(gqa) = mixer {
            list.gqa(gqa, local);
        }
    }
    match &layer.ffn {
        Some(Ffn::Dense(mlp)) => {
            list.float("mlp", "input", block_input);
            list.single("mlp", "rstd", local.tokens_local);
            list.float("mlp", "norm_output", block_input);
            list.mlp("mlp", mlp, local);
        }
        Some(Ffn::Moe(moe)) => {
            list.float("moe", "input", block_input);
            list.single("moe", "rstd", local.tokens_local);
            list.float("moe", "norm_output", block_input);
            list.moe(model, moe, local);
        }
        None => {}
    }
    list.kept
}

/// What final norm, head and loss keep: the gradient by the logits lies where they were.
pub fn kept_by_head(model: &Model, local: &Local, precision: Precision) -> Vec<Kept> {
    let mut list = List {
        kept: Vec::with_capacity(4),
        dtype: precision.activation(),
    };
    let stream = local.tokens_local * model.hidden;
    list.float("head", "input", stream);
    list.single("head", "rstd", local.tokens_local);
    list.float("head", "norm_output", stream);
    let vocab = model.vocab_size.div_ceil(local.tp);
    list.float("head", "logits_gradient", local.tokens * vocab);
    list.kept
}

struct List {
    kept: Vec<Kept>,
    /// Of activations.
    dtype: Dtype,
}

impl List {
    /// A tensor of the precision's dtype.
    fn float(&mut self, module: &'static str, name: &'static str, elements: u64) {
        self.push(module, name, elements, self.dtype);
    }

    /// A tensor that is f32 under every precision.
    fn single(&mut self, module: &'static str, name: &'static str, elements: u64) {
        self.push(module, name, elements, Dtype::F32);
    }

    fn push(&mut self, module: &'static str, name: &'static str, elements: u64, dtype: Dtype) {
        if elements > 0 {
            self.kept.push(Kept {
                module,
                name,
                elements,
                dtype,
            });
        }
    }

    fn gqa(&mut self, gqa: &Gqa, local: &Local) {
        let heads = gqa.heads / local.tp;
        let kv_heads = local.kv_heads(gqa.kv_heads);
        let q = local.tokens * heads * gqa.head_dim;
        let kv = local.tokens * kv_heads * gqa.head_dim;
        if gqa.qk_norm != QkNorm::None {
            list_qk_norm(self, q, kv, local.tokens * heads, local.tokens * kv_heads);
        }
        self.float("attention", "query", q);
        self.float("attention", "key", kv);
        self.float("attention", "value", kv);
        self.float("attention", "output", q);
        self.single("attention", "log_sum_exp", local.tokens * heads);
    }

    fn mlp(&mut self, module: &'static str, mlp: &Mlp, local: &Local) {
        let width = mlp.width / local.tp;
        self.float(module, "fc1_output", local.tokens * 2 * width);
        self.float(module, "activation", local.tokens * width);
    }

    fn moe(&mut self, model: &Model, moe: &Moe, local: &Local) {
        let chosen = local.tokens_local * moe.topk;
        self.single("moe", "scores", local.tokens_local * moe.experts);
        self.push("moe", "expert_ids", chosen, Dtype::I32);
        self.single("moe", "probabilities", chosen);
        for map in ["row_of", "slot_of", "token_of"] {
            self.push("moe", map, chosen, Dtype::I32);
        }
        self.push("moe", "expert_offsets", moe.experts + 1, Dtype::I32);
        if local.ep * local.etp > 1 {
            self.push("moe", "held_offsets", local.experts_local + 1, Dtype::I32);
        }
        let rows = local.expert_rows;
        let width = moe.expert.width / local.etp;
        self.float("moe", "dispatched", rows * model.hidden);
        self.single("moe", "row_probabilities", rows);
        self.float("moe", "fc1_output", rows * 2 * width);
        self.float("moe", "activation", rows * width);
        if let Some(shared) = &moe.shared {
            self.mlp("shared_expert", &shared.mlp, local);
        }
    }
}

fn list_qk_norm(list: &mut List, q: u64, kv: u64, q_rows: u64, kv_rows: u64) {
    list.float("attention", "query_before_norm", q);
    list.single("attention", "query_rstd", q_rows);
    list.float("attention", "key_before_norm", kv);
    list.single("attention", "key_rstd", kv_rows);
}

/// Peak working set of one layer besides what it keeps: forward, backward.
pub fn transient(
    model: &Model,
    layer: &Layer,
    local: &Local,
    precision: Precision,
) -> (Bytes, Bytes) {
    let bytes = |elements: u64| precision.activation().bytes(elements);
    let hidden = model.hidden;
    let (mixer, sums) = match &layer.mixer {
        Some(Mixer::Gqa(gqa)) => {
            let query = gqa.heads / local.tp;
            let heads = 2 * query + 2 * local.kv_heads(gqa.kv_heads);
            (
                local.tokens * (hidden + heads * gqa.head_dim),
                local.tokens * query * gqa.head_dim,
            )
        }
        _ => (0, 0),
    };
    // A GPU adds the gradient of the queries up in f32; that precision may be the CPU's.
    let sums = match precision {
        Precision::Fp32 => Bytes::ZERO,
        _ => Dtype::F32.bytes(sums),
    };
    let ffn = match &layer.ffn {
        Some(Ffn::Dense(mlp)) => local.tokens * (hidden + 3 * mlp.width / local.tp),
        Some(Ffn::Moe(moe)) => {
            let sent = local.tokens_local * moe.topk * hidden;
            sent + local.expert_rows * (hidden + 3 * moe.expert.width / local.etp)
        }
        None => 0,
    };
    let forward = local.tokens * hidden + local.expert_rows * hidden;
    (bytes(forward), (bytes(mixer) + sums).max(bytes(ffn)))
}
