//! The `config.json` of a trained model, for transformers and for [`moefold_planner::model::hf`].
//!
//! Written for the families that the executor trains; reading it back gives the same model.

use moefold_planner::model::{Ffn, Gqa, Mixer, Model};
use serde_json::{Map, Value, json};

use crate::error::Error;

/// The Hugging Face configuration of a model.
pub fn hf_config(model: &Model) -> Result<Value, Error> {
    let refuse = |what: &str| Error::Unsupported {
        what: format!("writing a config.json for {} ({what})", model.name),
        instead: "mixtral, qwen3_moe, llama and qwen3 are written".to_owned(),
    };
    let architecture = match &*model.model_type {
        "mixtral" => "MixtralForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
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
    put("attention_bias", json!(attention.qkv_bias));
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
        put(
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": theta}),
        );
    }
    let dense: Vec<usize> = (0..model.layers.len())
        .filter(|&i| matches!(model.layers[i].ffn, Some(Ffn::Dense(_))))
        .collect();
    let dense_width = dense.first().map(|&i| match &model.layers[i].ffn {
        Some(Ffn::Dense(mlp)) => mlp.width,
        _ => unreachable!("dense layers were selected"),
    });
    match model.moe() {
        None => put("intermediate_size", json!(dense_width)),
        Some(moe) => {
            put("num_experts_per_tok", json!(moe.topk));
            put("router_aux_loss_coef", json!(moe.router.aux_loss_coef));
            put("output_router_logits", json!(false));
            if model.model_type == "mixtral" {
                put("num_local_experts", json!(moe.experts));
                put("intermediate_size", json!(moe.expert.width));
            } else {
                put("num_experts", json!(moe.experts));
                put("moe_intermediate_size", json!(moe.expert.width));
                put("norm_topk_prob", json!(moe.router.normalize));
                put("decoder_sparse_step", json!(1));
                put("mlp_only_layers", json!(dense));
                // Without dense layers the width is not used, but transformers wants one.
                let width = dense_width.unwrap_or(moe.expert.width * moe.topk);
                put("intermediate_size", json!(width));
            }
        }
    }
    Ok(Value::Object(config))
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
        for name in ["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-8b", "mixtral-8x22b"] {
            check(&moefold_planner::model::presets::load(name).expect("a preset"));
        }
        for name in ["mixtral", "qwen3_moe", "qwen3_moe_raw"] {
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
