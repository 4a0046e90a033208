//! MiniMax-Text-01 (arXiv 2501.08313), in its own dialect and in transformers' `minimax`, and
//! MiniMax-M2.
//!
//! Text-01 has lightning (linear) attention with a full softmax layer between, and a residual
//! stream that continues from the normed input, scaled. M2 has grouped-query attention everywhere,
//! norms whole query and key projections and routes by sigmoid. M2's configuration mentions MTP
//! modules; its parameter counts, as published, leave them out, and so does this reader.

use super::common::{
    Defaults, block, expect_silu, experts, full_layers, gqa, num_layers, plain_router, rope,
    swiglu, trunk, width,
};
use super::keys::{Keys, WIDTH};
use crate::model::{
    Ffn, Gqa, LinearKind, LinearMixer, Mixer, Model, ModelError, Moe, NormKind, QkNorm, Router,
    Scalars, Score, SharedExpert,
};

const TEXT_01: Defaults = Defaults {
    eps: 1e-5,
    theta: 1e6,
};
const M2: Defaults = Defaults {
    eps: 1e-6,
    theta: 5e6,
};

pub(super) fn read_text_01(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, TEXT_01, "full_attention", 1.0)?;
    let softmax = gqa(keys, Some(&rope))?;
    let lightning = lightning(&softmax);
    let (experts, topk) = experts(keys)?;
    let moe = Moe {
        experts,
        topk,
        expert: swiglu(width(keys, &["intermediate_size"])?),
        shared: shared(keys)?,
        router: Router {
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            ..plain_router(Score::SoftmaxThenTopk, true)
        },
    };
    let layers = full_attention_layers(keys)?
        .into_iter()
        .map(|full| {
            let mixer = if full {
                Mixer::Gqa(softmax.clone())
            } else {
                Mixer::Linear(lightning.clone())
            };
            block(mixer, Ffn::Moe(moe.clone()))
        })
        .collect();
    let mut model = trunk(keys, TEXT_01, NormKind::Rms, Some(&rope), layers)?;
    model.scalars = scalars(keys)?;
    Ok(model)
}

pub(super) fn read_m2(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, M2, "full_attention", 1.0)?;
    let normed = keys.bool_or(&["use_qk_norm"], true)?;
    if let Some(kinds) = keys.opt_numbers(&["attn_type_list"])?
        && kinds.contains(&0)
    {
        return Err(keys.clash(
            "attn_type_list",
            "a list with 0 (lightning attention)",
            "model_type minimax_m2, which has softmax attention only",
            "write 1 for every layer, or model_type minimax_text_01",
        ));
    }
    let attention = Gqa {
        qk_norm: if normed { QkNorm::Full } else { QkNorm::None },
        ..gqa(keys, Some(&rope))?
    };
    let (experts, topk) = experts(keys)?;
    let moe = Moe {
        experts,
        topk,
        expert: swiglu(width(keys, &["intermediate_size"])?),
        shared: shared(keys)?,
        router: Router {
            correction_bias: keys.bool_or(&["use_routing_bias"], true)?,
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.001)?,
            ..plain_router(Score::Sigmoid, true)
        },
    };
    let layers = (0..num_layers(keys)?)
        .map(|_| block(Mixer::Gqa(attention.clone()), Ffn::Moe(moe.clone())))
        .collect();
    trunk(keys, M2, NormKind::Rms, Some(&rope), layers)
}

/// Which layers are softmax attention: `attn_type_list` 1, or `layer_types`; without either, every
/// second as transformers fills it in.
fn full_attention_layers(keys: &Keys<'_>) -> Result<Vec<bool>, ModelError> {
    let num_layers = num_layers(keys)?;
    if let Some(kinds) = keys.opt_numbers(&["attn_type_list"])? {
        keys.expect_len(&["attn_type_list"], kinds.len(), num_layers)?;
        return Ok(kinds.into_iter().map(|kind| kind != 0).collect());
    }
    let listed = full_layers(keys, num_layers, &["full_attention"], &["linear_attention"])?;
    Ok(listed.unwrap_or_else(|| (0..num_layers).map(|index| index % 2 == 0).collect()))
}

/// Lightning attention: q, k, v and an output gate of all heads, a norm over the projection.
fn lightning(softmax: &Gqa) -> LinearMixer {
    let projected = softmax.heads * softmax.head_dim;
    LinearMixer {
        kind: LinearKind::Lightning,
        heads: softmax.heads,
        key_heads: softmax.heads,
        conv_kernel: 0,
        key_dim: softmax.head_dim,
        value_dim: softmax.head_dim,
        in_proj: 4 * projected,
        out_proj: projected,
        extra_params: projected,
    }
}

fn shared(keys: &Keys<'_>) -> Result<Option<SharedExpert>, ModelError> {
    let width = keys.u64_or(&["shared_intermediate_size"], &(0..=*WIDTH.end()), 0)?;
    Ok((width > 0).then(|| SharedExpert {
        mlp: swiglu(width),
        gated_output: true,
    }))
}

/// The residual weights, which must be the same around every kind of block.
fn scalars(keys: &Keys<'_>) -> Result<Scalars, ModelError> {
    let same = |names: [&[&'static str]; 3]| {
        let [first, others @ ..] = names;
        let value = keys.f64_or(first, 1.0)?;
        for other in others {
            let found = keys.f64_or(other, value)?;
            if found != value {
                return Err(keys.clash(
                    other[0],
                    &found.to_string(),
                    &format!("{} = {value}", first[0]),
                    "residual weights that differ by kind of block are not read: write one value",
                ));
            }
        }
        Ok(value)
    };
    Ok(Scalars {
        skip: same([
            &["layernorm_full_attention_alpha", "full_attn_alpha_factor"],
            &[
                "layernorm_linear_attention_alpha",
                "linear_attn_alpha_factor",
            ],
            &["layernorm_mlp_alpha", "mlp_alpha_factor"],
        ])?,
        residual: same([
            &["layernorm_full_attention_beta", "full_attn_beta_factor"],
            &["layernorm_linear_attention_beta", "linear_attn_beta_factor"],
            &["layernorm_mlp_beta", "mlp_beta_factor"],
        ])?,
        post_norm: keys.bool_or(&["postnorm"], true)?,
        ..Scalars::default()
    })
}
