//! GPT-OSS (arXiv 2508.10925): biases everywhere, a learned sink a head, windows on every other
//! layer, a clipped gate, softmax over the chosen experts only.

use serde_json::Value;

use super::common::{
    Defaults, block, expect_silu, experts, full_layers, gqa, num_layers, plain_router, rope, trunk,
    width, window,
};
use super::keys::Keys;
use crate::model::{
    Activation, Ffn, Gqa, Mixer, Mlp, Model, ModelError, Moe, NormKind, Router, Score,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    theta: 150_000.0,
};

/// Factor in the sigmoid of the gate.
const ALPHA: f64 = 1.702;

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let alpha = keys.f64_or(&["swiglu_alpha"], ALPHA)?;
    if alpha != ALPHA {
        return Err(keys.wrong(
            "swiglu_alpha",
            &Value::from(alpha),
            "1.702, as every GPT-OSS has",
        ));
    }
    let rope = rope(keys, DEFAULTS, "full_attention", 1.0)?;
    let bias = keys.bool_or(&["attention_bias"], true)?;
    let attention = Gqa {
        qkv_bias: bias,
        out_bias: bias,
        sinks: true,
        ..gqa(keys, Some(&rope))?
    };
    let window = window(keys)?;
    let (experts, topk) = experts(keys)?;
    let moe = Moe {
        experts,
        topk,
        expert: Mlp {
            width: width(keys, &["intermediate_size"])?,
            gated: true,
            bias: true,
            activation: Activation::ClippedGelu(keys.positive_or(&["swiglu_limit"], 7.0)?),
        },
        shared: None,
        router: Router {
            bias: true,
            aux_loss_coef: keys.f64_or(&["router_aux_loss_coef"], 0.0)?,
            ..plain_router(Score::TopkThenSoftmax, false)
        },
    };
    let num_layers = num_layers(keys)?;
    let full = full_layers(
        keys,
        num_layers,
        &["full_attention"],
        &["sliding_attention"],
    )?
    .unwrap_or_else(|| (0..num_layers).map(|index| index % 2 == 1).collect());
    let layers = full
        .into_iter()
        .map(|full| {
            let attention = Gqa {
                window: window.filter(|_| !full),
                ..attention.clone()
            };
            block(Mixer::Gqa(attention), Ffn::Moe(moe.clone()))
        })
        .collect();
    trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)
}
