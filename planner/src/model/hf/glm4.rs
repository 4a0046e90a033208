//! GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): grouped-query attention with biases on q, k and v
//! only, half of each head rotated, DeepSeek-V3's routing with one group, one MTP layer.

use super::common::{
    Defaults, MTP, block, expect_silu, experts, gqa, num_layers, rope, router_groups,
    sparse_after_dense, swiglu, trunk, width,
};
use super::deepseek::shared;
use super::keys::{Keys, LAYERS};
use crate::model::{Ffn, Gqa, Mixer, Model, ModelError, Moe, NormKind, QkNorm, Router, Score};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    expect_silu(keys)?;
    let rope = rope(keys, DEFAULTS, "full_attention", 0.5)?;
    let attention = Mixer::Gqa(Gqa {
        qkv_bias: keys.bool_or(&["attention_bias"], false)?,
        qk_norm: if keys.bool_or(&["use_qk_norm"], false)? {
            QkNorm::PerHead
        } else {
            QkNorm::None
        },
        ..gqa(keys, Some(&rope))?
    });
    let (experts, topk) = experts(keys)?;
    let expert_width = width(keys, &["moe_intermediate_size"])?;
    let moe = Moe {
        experts,
        topk,
        expert: swiglu(expert_width),
        shared: shared(keys, expert_width)?,
        router: Router {
            score: Score::Sigmoid,
            normalize: keys.bool_or(&["norm_topk_prob"], true)?,
            scale: keys.f64_or(&["routed_scaling_factor"], 1.0)?,
            bias: false,
            correction_bias: true,
            groups: router_groups(keys, experts, topk, 2)?,
            aux_loss_coef: 0.0,
            scales_input: false,
        },
    };
    let num_layers = num_layers(keys)?;
    let sparse = sparse_after_dense(keys, num_layers)?;
    let layers = (0..num_layers)
        .map(|index| {
            let ffn = if sparse(index) {
                Ffn::Moe(moe.clone())
            } else {
                Ffn::Dense(swiglu(width(keys, &["intermediate_size"])?))
            };
            Ok(block(attention.clone(), ffn))
        })
        .collect::<Result<_, ModelError>>()?;
    let mut model = trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)?;
    model.mtp = (0..keys.u64_or(MTP, &(0..=*LAYERS.end()), 0)?)
        .map(|_| block(attention.clone(), Ffn::Moe(moe.clone())))
        .collect();
    Ok(model)
}
