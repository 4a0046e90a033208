//! DBRX: its own key names, two nested objects, fused q, k and v, layer norms without bias.
//!
//! The nested objects may carry leftovers of other configurations (a `tie_word_embeddings`, a
//! second `rope_theta` at the top); only the keys named here are read from them.

use super::common::{Defaults, block, plain_router, swiglu};
use super::keys::{EXPERTS, HEADS, Keys, LAYERS, POSITIONS, VOCAB, WIDTH};
use crate::model::{
    Ffn, Gqa, Mixer, Model, ModelError, Moe, Norm, NormKind, QkNorm, Router, Scalars, Score,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let hidden = keys.u64(&["d_model"], &WIDTH)?;
    let attn = keys
        .nested("attn_config")?
        .ok_or_else(|| keys.missing(&["attn_config"], "an object"))?;
    let ffn = keys
        .nested("ffn_config")?
        .ok_or_else(|| keys.missing(&["ffn_config"], "an object"))?;
    let attention = attention(keys, &attn, hidden)?;
    let moe = moe(keys, &ffn)?;
    let layers = (0..keys.u64(&["n_layers"], &LAYERS)?)
        .map(|_| block(Mixer::Gqa(attention.clone()), Ffn::Moe(moe.clone())))
        .collect();
    Ok(Model {
        name: String::new(),
        model_type: String::new(),
        vocab_size: keys.u64(&["vocab_size"], &VOCAB)?,
        hidden,
        residual_streams: 1,
        layers,
        mtp: Vec::new(),
        tied_embeddings: keys.bool_or(&["tie_word_embeddings"], false)?,
        head_bias: false,
        norm: Norm {
            kind: NormKind::LayerNorm,
            eps: DEFAULTS.eps,
        },
        rope_theta: Some(attn.positive_or(&["rope_theta"], DEFAULTS.theta)?),
        rope_scaling: None,
        scalars: Scalars::default(),
        initializer_range: keys.positive_or(&["initializer_range"], 0.02)?,
        max_position: keys.opt_u64(&["max_seq_len"], &POSITIONS)?,
        attention_dropout: 0.0,
        extra_params: 0,
    })
}

fn attention(keys: &Keys<'_>, attn: &Keys<'_>, hidden: u64) -> Result<Gqa, ModelError> {
    let heads = keys.u64(&["n_heads"], &HEADS)?;
    let kv_heads = attn.u64_or(&["kv_n_heads"], &HEADS, 1)?;
    attn.expect_divides(("kv_n_heads", kv_heads), ("n_heads", heads))?;
    keys.expect_divides(("n_heads", heads), ("d_model", hidden))?;
    let head_dim = hidden / heads;
    Ok(Gqa {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        out_bias: false,
        qk_norm: QkNorm::None,
        output_gate: false,
        rotary_dim: head_dim,
        window: None,
        chunk: None,
        sinks: false,
        scale: None,
        clip: attn.opt_f64(&["clip_qkv"])?,
    })
}

fn moe(keys: &Keys<'_>, ffn: &Keys<'_>) -> Result<Moe, ModelError> {
    let experts = ffn.u64(&["moe_num_experts"], &EXPERTS)?;
    let topk = ffn.u64(&["moe_top_k"], &EXPERTS)?;
    ffn.expect_at_most(("moe_top_k", topk), ("moe_num_experts", experts))?;
    let normalize = match ffn.find(&["moe_normalize_expert_weights"]) {
        None => false,
        Some((_, value)) if value.as_f64() == Some(1.0) => true,
        Some((name, value)) => {
            return Err(ffn.wrong(name, value, "1 (divide by the sum) or null"));
        }
    };
    Ok(Moe {
        experts,
        topk,
        expert: swiglu(ffn.u64(&["ffn_hidden_size"], &WIDTH)?),
        shared: None,
        router: Router {
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            ..plain_router(Score::SoftmaxThenTopk, normalize)
        },
    })
}
