//! The text model of Llama 4: chunked rotary layers with a full, unrotated one between, experts on
//! every `interleave_moe_layer_step`-th layer, one shared expert, scores that multiply the input.
//!
//! The vision tower is not read: totals are the language model's.

use super::common::{
    Defaults, block, expect_silu, experts, full_layers, gqa, num_layers, plain_router, rope,
    swiglu, trunk, width,
};
use super::keys::{Keys, LAYERS, POSITIONS};
use crate::model::{
    Ffn, Gqa, Mixer, Model, ModelError, Moe, NormKind, QkNorm, Router, Score, SharedExpert,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    theta: 500_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, DEFAULTS, "chunked_attention", 1.0)?;
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let attention = Gqa {
        qkv_bias: bias,
        out_bias: bias,
        ..gqa(keys, Some(&rope))?
    };
    let normed = keys.bool_or(&["use_qk_norm"], true)?;
    let chunk = keys.opt_u64(&["attention_chunk_size"], &POSITIONS)?;
    let rotated = rotated_layers(keys)?;
    let sparse = sparse_layers(keys)?;
    let moe = moe(keys)?;
    let layers = rotated
        .into_iter()
        .zip(sparse)
        .map(|(rotated, sparse)| {
            let attention = if rotated {
                Gqa {
                    chunk,
                    qk_norm: if normed {
                        QkNorm::Weightless
                    } else {
                        QkNorm::None
                    },
                    ..attention.clone()
                }
            } else {
                Gqa {
                    rotary_dim: 0,
                    ..attention.clone()
                }
            };
            let ffn = if sparse {
                Ffn::Moe(moe.clone())
            } else {
                Ffn::Dense(swiglu(width(keys, &["intermediate_size_mlp"])?))
            };
            Ok(block(Mixer::Gqa(attention), ffn))
        })
        .collect::<Result<_, ModelError>>()?;
    trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)
}

/// Layers with rotary, chunked attention: by `layer_types`, by `no_rope_layers` (1 means rotated),
/// or all but every `no_rope_layer_interval`-th.
fn rotated_layers(keys: &Keys<'_>) -> Result<Vec<bool>, ModelError> {
    let num_layers = num_layers(keys)?;
    if let Some(full) = full_layers(
        keys,
        num_layers,
        &["full_attention"],
        &["chunked_attention"],
    )? {
        return Ok(full.into_iter().map(|full| !full).collect());
    }
    match keys.opt_numbers(&["no_rope_layers"])? {
        Some(listed) if !listed.is_empty() => {
            keys.expect_len(&["no_rope_layers"], listed.len(), num_layers)?;
            Ok(listed.into_iter().map(|rotated| rotated != 0).collect())
        }
        _ => {
            let interval = keys.u64_or(&["no_rope_layer_interval"], &LAYERS, 4)?;
            Ok((0..num_layers)
                .map(|index| (index + 1) % interval != 0)
                .collect())
        }
    }
}

fn sparse_layers(keys: &Keys<'_>) -> Result<Vec<bool>, ModelError> {
    let num_layers = num_layers(keys)?;
    let listed = keys.opt_numbers(&["moe_layers"])?;
    let step = keys.u64_or(&["interleave_moe_layer_step"], &LAYERS, 1)?;
    Ok((0..num_layers)
        .map(|index| match &listed {
            Some(listed) => listed.contains(&index),
            None => (index + 1) % step == 0,
        })
        .collect())
}

fn moe(keys: &Keys<'_>) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let expert = swiglu(width(keys, &["intermediate_size"])?);
    Ok(Moe {
        experts,
        topk,
        shared: Some(SharedExpert {
            mlp: expert.clone(),
            gated_output: false,
        }),
        expert,
        router: Router {
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            scales_input: true,
            ..plain_router(Score::Sigmoid, false)
        },
    })
}
