//! Ling 2.0 (`BailingMoeV2ForCausalLM`) and the first Ling models (`BailingMoeForCausalLM`), which
//! share one `model_type`: the architecture's name tells them apart.
//!
//! The second generation routes like DeepSeek-V3 and norms query and key heads; the first routes
//! by softmax and normalizes the weights of its head.

use super::common::{
    Defaults, dense_then_sparse, expect_silu, experts, gqa, plain_router, rope, router_groups,
    swiglu, width,
};
use super::keys::{EXPERTS, Keys, WIDTH};
use crate::model::{Gqa, Mixer, Model, ModelError, Moe, QkNorm, Router, Score, SharedExpert};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 600_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let first = is_first_generation(keys)?;
    expect_silu(keys)?;
    let rope = rope(keys, DEFAULTS, "full_attention", 1.0)?;
    let normed = keys.bool_or(&["use_qk_norm"], !first)?;
    let attention = Mixer::Gqa(Gqa {
        qkv_bias: keys.bool_or(&["use_qkv_bias"], false)?,
        out_bias: keys.bool_or(&["use_bias"], false)?,
        qk_norm: if normed {
            QkNorm::PerHead
        } else {
            QkNorm::None
        },
        ..gqa(keys, Some(&rope))?
    });
    let moe = moe(keys, first)?;
    dense_then_sparse(keys, DEFAULTS, &rope, &attention, &moe)
}

fn is_first_generation(keys: &Keys<'_>) -> Result<bool, ModelError> {
    let Some([name, ..]) = keys.opt_list(&["architectures"])? else {
        return Ok(false);
    };
    match name.as_str() {
        Some("BailingMoeForCausalLM") => Ok(true),
        Some("BailingMoeV2ForCausalLM") => Ok(false),
        _ => Err(keys.wrong(
            "architectures",
            name,
            "\"BailingMoeV2ForCausalLM\" or \"BailingMoeForCausalLM\"",
        )),
    }
}

fn moe(keys: &Keys<'_>, first: bool) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let expert_width = width(keys, &["moe_intermediate_size"])?;
    let normalize = keys.bool_or(&["norm_topk_prob"], true)?;
    let router = if first {
        plain_router(Score::SoftmaxThenTopk, normalize)
    } else {
        let score = keys.word_or(
            &["score_function"],
            &[
                ("sigmoid", Score::Sigmoid),
                ("softmax", Score::SoftmaxThenTopk),
            ],
            Score::Sigmoid,
        )?;
        Router {
            scale: keys.f64_or(&["routed_scaling_factor"], 1.0)?,
            correction_bias: keys.bool_or(&["moe_router_enable_expert_bias"], true)?,
            groups: router_groups(keys, experts, topk, 2)?,
            ..plain_router(score, normalize)
        }
    };
    Ok(Moe {
        experts,
        topk,
        expert: swiglu(expert_width),
        shared: shared(keys, expert_width)?,
        router,
    })
}

/// `num_shared_experts` as one MLP, each as wide as stated or as a routed one.
fn shared(keys: &Keys<'_>, expert_width: u64) -> Result<Option<SharedExpert>, ModelError> {
    let count = keys.u64_or(&["num_shared_experts"], &(0..=*EXPERTS.end()), 0)?;
    let each = keys.u64_or(
        &["moe_shared_expert_intermediate_size"],
        &WIDTH,
        expert_width,
    )?;
    let total = count * each;
    keys.expect_at_most(
        ("num_shared_experts x their width", total),
        ("the widest MLP read", *WIDTH.end()),
    )?;
    Ok((total > 0).then(|| SharedExpert {
        mlp: swiglu(total),
        gated_output: false,
    }))
}
