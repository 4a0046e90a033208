//! Qwen3-Next: gated DeltaNet (arXiv 2412.06464) with a gated full-attention layer between, experts
//! and a gated shared expert in every layer, norms with weight `1 + w`. The checkpoint holds one MTP
//! layer, for which its configuration has no key.

use super::common::{Defaults, MTP, block, expect_silu, full_layers, gqa, num_layers, rope, trunk};
use super::keys::{HEADS, Keys, LAYERS, WIDTH};
use super::qwen::{ffn, moe, shared, sparse_layers};
use crate::model::{Gqa, LinearMixer, Mixer, Model, ModelError, NormKind, QkNorm};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, DEFAULTS, "full_attention", 0.25)?;
    let bias = keys.bool_or(&["attention_bias"], false)?;
    let attention = Mixer::Gqa(Gqa {
        qkv_bias: bias,
        out_bias: bias,
        qk_norm: QkNorm::PerHead,
        output_gate: true,
        ..gqa(keys, Some(&rope))?
    });
    let delta_net = Mixer::Linear(delta_net(keys)?);
    let moe = moe(keys, shared(keys)?)?;
    let num_layers = num_layers(keys)?;
    let interval = keys.u64_or(&["full_attention_interval"], &LAYERS, 4)?;
    let full = full_layers(keys, num_layers, &["full_attention"], &["linear_attention"])?
        .unwrap_or_else(|| {
            (0..num_layers)
                .map(|index| (index + 1) % interval == 0)
                .collect()
        });
    let layers = full
        .into_iter()
        .zip(sparse_layers(keys)?)
        .map(|(full, sparse)| {
            let mixer = if full { &attention } else { &delta_net };
            Ok(block(mixer.clone(), ffn(keys, sparse, &moe)?))
        })
        .collect::<Result<_, ModelError>>()?;
    let mut model = trunk(
        keys,
        DEFAULTS,
        NormKind::RmsZeroCentred,
        Some(&rope),
        layers,
    )?;
    let depths = keys.u64_or(MTP, &(0..=*LAYERS.end()), 1)?;
    model.mtp = (0..depths)
        .map(|_| Ok(block(attention.clone(), ffn(keys, true, &moe)?)))
        .collect::<Result<_, ModelError>>()?;
    Ok(model)
}

fn delta_net(keys: &Keys<'_>) -> Result<LinearMixer, ModelError> {
    let key_heads = keys.u64(&["linear_num_key_heads"], &HEADS)?;
    let heads = keys.u64(&["linear_num_value_heads"], &HEADS)?;
    keys.expect_divides(
        ("linear_num_key_heads", key_heads),
        ("linear_num_value_heads", heads),
    )?;
    let key_dim = keys.u64(&["linear_key_head_dim"], &HEADS)?;
    let value_dim = keys.u64(&["linear_value_head_dim"], &HEADS)?;
    let kernel = keys.u64_or(&["linear_conv_kernel_dim"], &HEADS, 4)?;
    let (all_keys, all_values) = (key_heads * key_dim, heads * value_dim);
    for (name, value) in [
        ("linear_num_key_heads x linear_key_head_dim", all_keys),
        ("linear_num_value_heads x linear_value_head_dim", all_values),
    ] {
        keys.expect_at_most((name, value), ("the widest projection read", *WIDTH.end()))?;
    }
    Ok(LinearMixer::gated_delta_net(
        [heads, key_heads],
        [key_dim, value_dim],
        kernel,
    ))
}
