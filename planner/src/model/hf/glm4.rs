//! GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): grouped-query attention with biases on q, k and v
//! only, half of each head rotated, DeepSeek-V3's routing with one group, one MTP layer.

use super::common::{
    Defaults, dense_then_sparse, expect_silu, experts, gqa, rope, router_groups, swiglu, width,
};
use super::deepseek::shared;
use super::keys::Keys;
use crate::model::{Gqa, Mixer, Model, ModelError, Moe, QkNorm, Router, Score};

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
    dense_then_sparse(keys, DEFAULTS, &rope, &attention, &moe)
}
