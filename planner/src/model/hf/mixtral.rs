//! Mixtral (arXiv 2401.04088) and the models of its shape: every layer sparse, experts as wide as
//! `intermediate_size`, no shared expert.
//!
//! Phi-3.5-MoE (arXiv 2404.14219) adds biases, layer norms and its own routing; OLMoE (arXiv
//! 2409.02060) norms the whole query and key projections; Granite MoE ties its embeddings and
//! multiplies constants in.

use super::common::{
    Defaults, block, expect_silu, experts, gqa, num_layers, plain_router, rope, swiglu, trunk,
    width, window,
};
use super::keys::Keys;
use crate::model::{
    Ffn, Gqa, Mixer, Model, ModelError, Moe, NormKind, QkNorm, Router, Scalars, Score,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let noise = keys.f64_or(&["router_jitter_noise"], 0.0)?;
    if noise > 0.0 {
        let expected = "0: inputs of a router with noise are not read";
        return Err(keys.wrong("router_jitter_noise", &noise.into(), expected));
    }
    let defaults = Defaults {
        eps: 1e-5,
        theta: 1e6,
    };
    build(keys, defaults, |attention| {
        Ok(Variant {
            attention: Gqa {
                window: window(keys)?,
                ..attention
            },
            router: plain_router(Score::SoftmaxThenTopk, true),
            norm: NormKind::Rms,
        })
    })
}

pub(super) fn read_phi(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let defaults = Defaults {
        eps: 1e-5,
        theta: 1e6,
    };
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let window = window(keys)?;
    let mut model = build(keys, defaults, |attention| {
        Ok(Variant {
            attention: Gqa {
                qkv_bias: bias,
                out_bias: bias,
                window,
                ..attention
            },
            router: plain_router(Score::SparseMixer, false),
            norm: NormKind::LayerNormBias,
        })
    })?;
    model.head_bias = keys.bool_or(&["lm_head_bias"], false)?;
    Ok(model)
}

pub(super) fn read_olmoe(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let defaults = Defaults {
        eps: 1e-5,
        theta: 10_000.0,
    };
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let normalize = keys.bool_or(&["norm_topk_prob"], false)?;
    let clip = keys.opt_f64(&["clip_qkv"])?;
    build(keys, defaults, |attention| {
        Ok(Variant {
            attention: Gqa {
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::Full,
                clip,
                ..attention
            },
            router: plain_router(Score::SoftmaxThenTopk, normalize),
            norm: NormKind::Rms,
        })
    })
}

pub(super) fn read_granite(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let defaults = Defaults {
        eps: 1e-6,
        theta: 10_000.0,
    };
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let scale = keys.opt_f64(&["attention_multiplier"])?;
    let mut model = build(keys, defaults, |attention| {
        Ok(Variant {
            attention: Gqa {
                qkv_bias: bias,
                out_bias: bias,
                scale,
                ..attention
            },
            router: plain_router(Score::TopkThenSoftmax, false),
            norm: NormKind::Rms,
        })
    })?;
    model.scalars = Scalars {
        embedding: keys.f64_or(&["embedding_multiplier"], 1.0)?,
        residual: keys.f64_or(&["residual_multiplier"], 1.0)?,
        logits: keys.positive_or(&["logits_scaling"], 1.0)?,
        ..Scalars::default()
    };
    Ok(model)
}

/// What a family makes of the shape.
struct Variant {
    attention: Gqa,
    router: Router,
    norm: NormKind,
}

fn build(
    keys: &Keys<'_>,
    defaults: Defaults,
    variant: impl FnOnce(Gqa) -> Result<Variant, ModelError>,
) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, defaults, "full_attention", 1.0)?;
    let variant = variant(gqa(keys, Some(&rope))?)?;
    let (experts, topk) = experts(keys)?;
    let moe = Moe {
        experts,
        topk,
        expert: swiglu(width(keys, &["intermediate_size"])?),
        shared: None,
        router: Router {
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            ..variant.router
        },
    };
    let layers = (0..num_layers(keys)?)
        .map(|_| block(Mixer::Gqa(variant.attention.clone()), Ffn::Moe(moe.clone())))
        .collect();
    trunk(keys, defaults, variant.norm, Some(&rope), layers)
}
