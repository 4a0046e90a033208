//! Dense decoders: Llama 3 (arXiv 2407.21783), Mistral (arXiv 2310.06825) and Qwen3 (arXiv 2505.09388).
//!
//! Mistral may have a sliding window in every layer.
//! Qwen3 differs by a norm on each query and key head. Its `sliding_window` counts only where
//! `use_sliding_window` says so, and then for the layers of `layer_types` that slide, or without those for the
//! layers from `max_window_layers` on (transformers, `configuration_qwen3.py`).

use super::common::{
    Defaults, block, expect_silu, full_layers, gqa, num_layers, rope, swiglu, trunk, width, window,
};
use super::keys::{Keys, POSITIONS};
use crate::model::{Ffn, Gqa, Mixer, Mlp, Model, ModelError, NormKind, QkNorm};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let family = keys.opt_str(&["model_type"])?;
    let qwen = family == Some("qwen3");
    expect_silu(keys)?;
    let rope = rope(keys, DEFAULTS, "full_attention", 1.0)?;
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let attention = Gqa {
        qkv_bias: bias,
        out_bias: bias,
        qk_norm: if qwen { QkNorm::PerHead } else { QkNorm::None },
        ..gqa(keys, Some(&rope))?
    };
    let mlp = Mlp {
        bias: keys.bool_or(&["mlp_bias"], false)?,
        ..swiglu(width(keys, &["intermediate_size"])?)
    };
    let num_layers = num_layers(keys)?;
    let windows = if qwen {
        qwen_windows(keys, num_layers, |layer, first| layer >= first)?
    } else {
        let everywhere = match family {
            Some("mistral") => window(keys)?,
            _ => None,
        };
        vec![everywhere; num_layers as usize]
    };
    let layers = windows
        .into_iter()
        .map(|window| {
            let attention = Gqa {
                window,
                ..attention.clone()
            };
            block(Mixer::Gqa(attention), Ffn::Dense(mlp.clone()))
        })
        .collect();
    trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)
}

/// The windows of each layer of a Qwen: off unless switched on. Then of the layers that `layer_types` says, or of
/// those that `slides` says of a layer and `max_window_layers`.
pub(super) fn qwen_windows(
    keys: &Keys<'_>,
    layers: u64,
    slides: fn(u64, u64) -> bool,
) -> Result<Vec<Option<u64>>, ModelError> {
    let window = if keys.bool_or(&["use_sliding_window"], false)? {
        window(keys)?
    } else {
        None
    };
    let stated = full_layers(keys, layers, &["full_attention"], &["sliding_attention"])?;
    // As transformers has it where a file does not say.
    let bound = keys.u64_or(&["max_window_layers"], &(0..=*POSITIONS.end()), 28)?;
    let full = stated.unwrap_or_else(|| (0..layers).map(|layer| !slides(layer, bound)).collect());
    Ok(full
        .into_iter()
        .map(|full| window.filter(|_| !full))
        .collect())
}
