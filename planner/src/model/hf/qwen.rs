//! Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388).
//!
//! Layer `i` is sparse unless it is in `mlp_only_layers` or `(i + 1)` is no multiple of
//! `decoder_sparse_step`. The second generation has biases on q, k, v and a shared expert behind a
//! sigmoid gate; the third has neither, and norms query and key heads.

use super::common::{
    Defaults, block, expect_silu, experts, gqa, num_layers, plain_router, rope, swiglu, trunk,
    width,
};
use super::keys::{Keys, LAYERS, WIDTH};
use super::llama::qwen_windows;
use crate::model::{
    Ffn, Gqa, Mixer, Model, ModelError, Moe, NormKind, QkNorm, Router, Score, SharedExpert,
};

const QWEN2: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let third = keys.opt_str(&["model_type"])? != Some("qwen2_moe");
    expect_silu(keys)?;
    let rope = rope(keys, QWEN2, "full_attention", 1.0)?;
    let attention = gqa(keys, Some(&rope))?;
    let attention = if third {
        let bias = keys.bool_or(&["attention_bias"], false)?;
        Gqa {
            qkv_bias: bias,
            out_bias: bias,
            qk_norm: QkNorm::PerHead,
            ..attention
        }
    } else {
        Gqa {
            qkv_bias: keys.bool_or(&["qkv_bias"], true)?,
            ..attention
        }
    };
    let shared = if third { None } else { shared(keys)? };
    let moe = moe(keys, shared)?;
    let sparse = sparse_layers(keys)?;
    // As transformers: every layer of the third generation, of the second every other one of the first few.
    let windows = if third {
        qwen_windows(keys, sparse.len() as u64, |_, _| true)?
    } else {
        let slides = |layer: u64, bound| layer.is_multiple_of(2) && layer < bound;
        qwen_windows(keys, sparse.len() as u64, slides)?
    };
    let layers = sparse
        .into_iter()
        .zip(windows)
        .map(|(sparse, window)| {
            let attention = Gqa {
                window,
                ..attention.clone()
            };
            Ok(block(Mixer::Gqa(attention), ffn(keys, sparse, &moe)?))
        })
        .collect::<Result<_, ModelError>>()?;
    trunk(keys, QWEN2, NormKind::Rms, Some(&rope), layers)
}

/// Softmax routing over all experts, as all Qwen generations have it.
pub(super) fn moe(keys: &Keys<'_>, shared: Option<SharedExpert>) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let normalize = keys.bool_or(&["norm_topk_prob"], false)?;
    Ok(Moe {
        experts,
        topk,
        expert: swiglu(width(keys, &["moe_intermediate_size"])?),
        shared,
        router: Router {
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            ..plain_router(Score::SoftmaxThenTopk, normalize)
        },
    })
}

/// The gated shared expert, absent where its width is 0.
pub(super) fn shared(keys: &Keys<'_>) -> Result<Option<SharedExpert>, ModelError> {
    let width = keys.u64(&["shared_expert_intermediate_size"], &(0..=*WIDTH.end()))?;
    Ok((width > 0).then(|| SharedExpert {
        mlp: swiglu(width),
        gated_output: true,
    }))
}

/// Which layers are sparse.
pub(super) fn sparse_layers(keys: &Keys<'_>) -> Result<Vec<bool>, ModelError> {
    let step = keys.u64_or(&["decoder_sparse_step"], &LAYERS, 1)?;
    let dense = keys.opt_numbers(&["mlp_only_layers"])?.unwrap_or_default();
    Ok((0..num_layers(keys)?)
        .map(|index| !dense.contains(&index) && (index + 1) % step == 0)
        .collect())
}

/// A layer's feed-forward block; the dense width is needed only where a layer is dense.
pub(super) fn ffn(keys: &Keys<'_>, sparse: bool, moe: &Moe) -> Result<Ffn, ModelError> {
    if sparse {
        return Ok(Ffn::Moe(moe.clone()));
    }
    Ok(Ffn::Dense(swiglu(width(keys, &["intermediate_size"])?)))
}
