//! DeepSeek-V2 (arXiv 2405.04434), V3 (arXiv 2412.19437) and the models of their shape: Kimi-K2,
//! and with a lightning indexer DeepSeek-V3.2 and GLM-5.
//!
//! Multi-head latent attention (`num_key_value_heads` means nothing); leading dense layers; shared
//! experts that are one MLP of their summed width. V2 routes by softmax and scores a group by its
//! best expert; V3 by sigmoid with a correction bias and a group's best two.

use super::common::{
    Defaults, MTP, block, expect_even, expect_silu, experts, num_layers, rope, router_groups,
    sparse_after_dense, swiglu, trunk, width,
};
use super::keys::{EXPERTS, HEADS, Keys, LAYERS, POSITIONS};
use crate::model::{
    Ffn, Indexer, Mixer, Mla, Model, ModelError, Moe, NormKind, Router, Score, SharedExpert,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    let model_type = keys.opt_str(&["model_type"])?.unwrap_or("deepseek_v3");
    let second = model_type == "deepseek_v2";
    expect_silu(keys)?;
    if keys.bool_or(&["attention_bias"], false)? {
        return Err(keys.wrong(
            "attention_bias",
            &true.into(),
            "false: latent attention with biases is not read",
        ));
    }
    let rope = rope(keys, DEFAULTS, "full_attention", 1.0)?;
    let sparse_attention = matches!(model_type, "deepseek_v32" | "glm_moe_dsa");
    let attention = mla(keys, sparse_attention)?;
    let num_layers = num_layers(keys)?;
    let sparse = sparse_layers(keys, num_layers)?;
    let depths = keys.u64_or(MTP, &(0..=*LAYERS.end()), 0)?;
    let moe = if depths > 0 || sparse.contains(&true) {
        Some(moe(keys, second)?)
    } else {
        None
    };
    let selecting = selecting_layers(keys, num_layers)?;
    let layers = sparse
        .iter()
        .zip(selecting)
        .map(|(sparse, selecting)| {
            let ffn = match moe.clone().filter(|_| *sparse) {
                Some(moe) => Ffn::Moe(moe),
                None => Ffn::Dense(swiglu(width(keys, &["intermediate_size"])?)),
            };
            let mut attention = attention.clone();
            if let Some(indexer) = &mut attention.indexer {
                indexer.shared = !selecting;
            }
            Ok(block(Mixer::Mla(attention), ffn))
        })
        .collect::<Result<_, ModelError>>()?;
    let mut model = trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)?;
    let depth = moe.map(|moe| block(Mixer::Mla(attention), Ffn::Moe(moe)));
    model.mtp = depth.into_iter().cycle().take(depths as usize).collect();
    Ok(model)
}

/// Sparse layers: by `mlp_layer_types` (transformers 5) or by `first_k_dense_replace`.
fn sparse_layers(keys: &Keys<'_>, num_layers: u64) -> Result<Vec<bool>, ModelError> {
    if let Some(types) = keys.opt_strings(&["mlp_layer_types"], num_layers)? {
        return types
            .into_iter()
            .map(|word| match word {
                "sparse" | "moe" => Ok(true),
                "dense" | "mlp" => Ok(false),
                other => Err(keys.unknown_word(
                    "mlp_layer_types",
                    other,
                    ["sparse", "dense"].into_iter(),
                )),
            })
            .collect();
    }
    keys.expect_stated(&["first_k_dense_replace"])?;
    let sparse = sparse_after_dense(keys, num_layers)?;
    Ok((0..num_layers).map(sparse).collect())
}

/// Layers that select keys themselves instead of attending to an earlier layer's selection: by
/// `indexer_types`, or every `index_topk_freq`-th after the first `index_skip_topk_offset`.
fn selecting_layers(keys: &Keys<'_>, num_layers: u64) -> Result<Vec<bool>, ModelError> {
    if let Some(types) = keys.opt_strings(&["indexer_types"], num_layers)? {
        return types
            .into_iter()
            .map(|word| match word {
                "full" => Ok(true),
                "shared" => Ok(false),
                other => {
                    Err(keys.unknown_word("indexer_types", other, ["full", "shared"].into_iter()))
                }
            })
            .collect();
    }
    if let Some(pattern) = keys.opt_str(&["index_topk_pattern"])? {
        keys.expect_len(&["index_topk_pattern"], pattern.chars().count(), num_layers)?;
        return pattern
            .chars()
            .map(|letter| match letter {
                'F' => Ok(true),
                'S' => Ok(false),
                _ => Err(keys.wrong(
                    "index_topk_pattern",
                    &pattern.into(),
                    "letters F (selects) and S (shares), one a layer",
                )),
            })
            .collect();
    }
    let every = keys.u64_or(&["index_topk_freq"], &LAYERS, 1)?;
    let first = keys.u64_or(&["index_skip_topk_offset"], &(0..=*LAYERS.end()), 2)?;
    Ok((0..num_layers)
        .map(|index| (index + 1).saturating_sub(first).is_multiple_of(every))
        .collect())
}

fn mla(keys: &Keys<'_>, sparse: bool) -> Result<Mla, ModelError> {
    let heads = keys.u64(&["num_attention_heads"], &HEADS)?;
    let q_lora_rank = keys.opt_u64(&["q_lora_rank"], &HEADS)?;
    let indexer = if sparse {
        if q_lora_rank.is_none() {
            return Err(keys.missing(
                &["q_lora_rank"],
                "a rank: the indexer reads the compressed query",
            ));
        }
        Some(indexer(keys)?)
    } else {
        None
    };
    let qk_rope_head_dim = keys.u64(&["qk_rope_head_dim"], &HEADS)?;
    expect_even(keys, "qk_rope_head_dim", qk_rope_head_dim)?;
    Ok(Mla {
        heads,
        q_lora_rank,
        kv_lora_rank: keys.u64(&["kv_lora_rank"], &HEADS)?,
        qk_nope_head_dim: keys.u64(&["qk_nope_head_dim"], &HEADS)?,
        qk_rope_head_dim,
        v_head_dim: keys.u64(&["v_head_dim"], &HEADS)?,
        rope_interleave: keys.bool_or(&["rope_interleave"], true)?,
        indexer,
    })
}

/// The key selector (`index_*`).
pub(super) fn indexer(keys: &Keys<'_>) -> Result<Indexer, ModelError> {
    Ok(Indexer {
        heads: keys.u64(&["index_n_heads"], &HEADS)?,
        head_dim: keys.u64(&["index_head_dim"], &HEADS)?,
        topk: keys.u64(&["index_topk"], &POSITIONS)?,
        shared: false,
    })
}

fn moe(keys: &Keys<'_>, second: bool) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let expert_width = width(keys, &["moe_intermediate_size"])?;
    let default_score = if second {
        Score::SoftmaxThenTopk
    } else {
        Score::Sigmoid
    };
    let score = keys.word_or(
        &["scoring_func"],
        &[
            ("softmax", Score::SoftmaxThenTopk),
            ("sigmoid", Score::Sigmoid),
        ],
        default_score,
    )?;
    let limited = keys.word_or(
        &["topk_method"],
        &[
            ("greedy", false),
            ("group_limited_greedy", true),
            ("noaux_tc", true),
        ],
        true,
    )?;
    let groups = router_groups(keys, experts, topk, if second { 1 } else { 2 })?;
    Ok(Moe {
        experts,
        topk,
        expert: swiglu(expert_width),
        shared: shared(keys, expert_width)?,
        router: Router {
            score,
            normalize: keys.bool_or(&["norm_topk_prob"], !second)?,
            scale: keys.f64_or(&["routed_scaling_factor"], 1.0)?,
            bias: false,
            correction_bias: !second,
            groups: groups.filter(|_| limited),
            aux_loss_coef: keys.f64_or(&["aux_loss_alpha", "router_aux_loss_coef"], 0.0)?,
            scales_input: false,
        },
    })
}

/// `n_shared_experts` of the routed width, as one MLP.
pub(super) fn shared(
    keys: &Keys<'_>,
    expert_width: u64,
) -> Result<Option<SharedExpert>, ModelError> {
    let count = keys.u64_or(
        &["n_shared_experts", "num_shared_experts"],
        &(0..=*EXPERTS.end()),
        0,
    )?;
    let total = count * expert_width;
    keys.expect_at_most(
        ("n_shared_experts x moe_intermediate_size", total),
        ("the widest MLP read", *super::keys::WIDTH.end()),
    )?;
    Ok((total > 0).then(|| SharedExpert {
        mlp: swiglu(total),
        gated_output: false,
    }))
}
