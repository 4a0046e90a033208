//! Dense decoders: Llama 3 (arXiv 2407.21783) and Qwen3 (arXiv 2505.09388).
//!
//! Qwen3 differs by a norm on each query and key head. Its `sliding_window` counts only where
//! `use_sliding_window` says so, and then for the layers from `max_window_layers` on.

use super::common::{
    Defaults, block, expect_silu, gqa, num_layers, rope, swiglu, trunk, width, window,
};
use super::keys::{Keys, POSITIONS};
use crate::model::{Ffn, Gqa, Mixer, Mlp, Model, ModelError, NormKind, QkNorm};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let qwen = keys.opt_str(&["model_type"])? == Some("qwen3");
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
    let windows = qwen_windows(keys)?;
    let layers = (0..num_layers(keys)?)
        .map(|index| {
            let attention = Gqa {
                window: windows(index),
                ..attention.clone()
            };
            block(Mixer::Gqa(attention), Ffn::Dense(mlp.clone()))
        })
        .collect();
    trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)
}

/// The Qwen family's sliding windows: off unless switched on, then for the later layers only.
pub(super) fn qwen_windows(
    keys: &Keys<'_>,
) -> Result<impl Fn(u64) -> Option<u64> + use<>, ModelError> {
    let window = if keys.bool_or(&["use_sliding_window"], false)? {
        window(keys)?
    } else {
        None
    };
    let full = keys.u64_or(&["max_window_layers"], &(0..=*POSITIONS.end()), 0)?;
    Ok(move |index: u64| window.filter(|_| index >= full))
}
