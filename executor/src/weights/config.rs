//! The `config.json` of a trained model, for transformers and for [`moefold_planner::model::hf`].
//!
//! Written for the families that the executor trains; reading it back gives the same model.

use moefold_planner::model::{Ffn, Gqa, Mixer, Model, QkNorm};
use serde_json::{Map, Value, json};

use crate::error::Error;

/// The Hugging Face configuration of a model.
pub fn hf_config(model: &Model) -> Result<Value, Error> {
    let refuse = |what: &str| Error::Unsupported {
        what: format!("writing a config.json for {} ({what})", model.name),
        instead: format!("{} are written", crate::support::FAMILIES.join(", ")),
    };
    let architecture = match &*model.model_type {
        "mixtral" => "MixtralForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        "qwen2_moe" => "Qwen2MoeForCausalLM",
        "olmoe" => "OlmoeForCausalLM",
        "glm4_moe" => "Glm4MoeForCausalLM",
        "llama" => "LlamaForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => return Err(refuse(&format!("model_type {other}"))),
    };
    if model.rope_scaling.is_some() {
        return Err(refuse("scaled rotary embedding"));
    }
    let attention = attention(model).ok_or_else(|| refuse("no grouped-query attention"))?;
    let mut config = Map::new();
    let mut put = |key: &str, value: Value| {
        config.insert(key.to_owned(), value);
    };
    put("architectures", json!([architecture]));
    put("model_type", json!(model.model_type));
    put("dtype", json!("float32"));
    put("vocab_size", json!(model.vocab_size));
    put("hidden_size", json!(model.hidden));
    put("hidden_act", json!("silu"));
    put("num_hidden_layers", json!(model.layers.len()));
    put("num_attention_heads", json!(attention.heads));
    put("num_key_value_heads", json!(attention.kv_heads));
    put("head_dim", json!(attention.head_dim));
    // One generation of Qwen has a key of its own.
    let bias = match &*model.model_type {
        "qwen2_moe" => "qkv_bias",
        _ => "attention_bias",
    };
    put(bias, json!(attention.qkv_bias));
    put("sliding_window", json!(attention.window));
    put("rms_norm_eps", json!(model.norm.eps));
    put("initializer_range", json!(model.initializer_range));
    put("tie_word_embeddings", json!(model.tied_embeddings));
    if let Some(positions) = model.max_position {
        put("max_position_embeddings", json!(positions));
    }
    if let Some(theta) = model.rope_theta {
        // The key of transformers 4, and that of transformers 5.
        put("rope_theta", json!(theta));
        let mut rope = json!({"rope_type": "default", "rope_theta": theta});
        if attention.rotary_dim < attention.head_dim {
            let partial = json!(attention.rotary_dim as f64 / attention.head_dim as f64);
            rope["partial_rotary_factor"] = partial.clone();
            put("partial_rotary_factor", partial);
        }
        put("rope_parameters", rope);
    }
    for (key, value) in feed_forward(model) {
        put(key, value);
    }
    Ok(Value::Object(config))
}

/// The keys of feed-forward blocks, of which each family has its own.
fn feed_forward(model: &Model) -> Vec<(&'static str, Value)> {
    let dense: Vec<usize> = (0..model.layers.len())
        .filter(|&i| matches!(model.layers[i].ffn, Some(Ffn::Dense(_))))
        .collect();
    let dense_width = dense.first().map(|&i| match &model.layers[i].ffn {
        Some(Ffn::Dense(mlp)) => mlp.width,
        _ => unreachable!("dense layers were selected"),
    });
    let Some(moe) = model.moe() else {
        return vec![("intermediate_size", json!(dense_width))];
    };
    let router = &moe.router;
    let mut all = vec![
        ("num_experts_per_tok", json!(moe.topk)),
        ("router_aux_loss_coef", json!(router.aux_loss_coef)),
        ("output_router_logits", json!(false)),
    ];
    // Where no layer is dense the width is not used, but transformers wants one.
    let some_width = dense_width.unwrap_or(moe.expert.width * moe.topk);
    let width = json!(moe.expert.width);
    let of_family = match &*model.model_type {
        "mixtral" => vec![
            ("num_local_experts", json!(moe.experts)),
            ("intermediate_size", width),
        ],
        "olmoe" => vec![
            ("num_experts", json!(moe.experts)),
            ("intermediate_size", width),
            ("norm_topk_prob", json!(router.normalize)),
        ],
        "glm4_moe" => {
            let qk_norm = attention(model).is_some_and(|gqa| gqa.qk_norm == QkNorm::PerHead);
            let shared = moe.shared.as_ref().map_or(0, |shared| shared.mlp.width);
            let groups = router.groups.as_ref();
            vec![
                ("n_routed_experts", json!(moe.experts)),
                ("n_shared_experts", json!(shared / moe.expert.width)),
                ("moe_intermediate_size", width),
                ("intermediate_size", json!(some_width)),
                ("first_k_dense_replace", json!(dense.len())),
                ("norm_topk_prob", json!(router.normalize)),
                ("routed_scaling_factor", json!(router.scale)),
                ("n_group", json!(groups.map_or(1, |groups| groups.groups))),
                ("topk_group", json!(groups.map_or(1, |groups| groups.topk))),
                ("use_qk_norm", json!(qk_norm)),
                ("num_nextn_predict_layers", json!(model.mtp.len())),
            ]
        }
        _ => {
            let shared = moe.shared.as_ref().map_or(0, |shared| shared.mlp.width);
            vec![
                ("num_experts", json!(moe.experts)),
                ("moe_intermediate_size", width),
                ("shared_expert_intermediate_size", json!(shared)),
                ("norm_topk_prob", json!(router.normalize)),
                ("decoder_sparse_step", json!(1)),
                ("mlp_only_layers", json!(dense)),
                ("intermediate_size", json!(some_width)),
            ]
        }
    };
    all.extend(of_family);
    all
}

/// The attention of the first layer: in these families all layers share its shape.
fn attention(model: &Model) -> Option<&Gqa> {
    match &model.layers.first()?.mixer {
        Some(Mixer::Gqa(gqa)) => Some(gqa),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moefold_planner::model::hf;
    use std::path::Path;

    fn check(model: &Model) {
        let config = hf_config(model).expect("a family that is written");
        let back = hf::parse(&model.name, &config.to_string()).expect("reads");
        assert_eq!(&back, model);
    }

    #[test]
    fn law_a_written_config_reads_back_as_the_same_model() {
        for name in [
            "mixtral-8x7b",
            "qwen3-30b-a3b",
            "qwen3-8b",
            "mixtral-8x22b",
            "olmoe-1b-7b",
            "qwen2-57b-a14b",
            "glm-4.5",
        ] {
            check(&moefold_planner::model::presets::load(name).expect("a preset"));
        }
        for name in [
            "mixtral",
            "qwen3_moe",
            "qwen3_moe_raw",
            "qwen2_moe",
            "olmoe",
            "glm4_moe",
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
            check(&hf::read(&folder.join(name)).expect("a fixture"));
        }
    }

    #[test]
    fn other_families_are_refused_by_name() {
        let model = moefold_planner::model::presets::load("deepseek-v3").expect("a preset");
        let text = hf_config(&model).expect_err("refused").to_string();
        assert!(text.contains("model_type deepseek_v3"), "{text}");
    }
}
