//! The `config.json` of a trained model, for transformers and for [`moefold_planner::model::hf`].
//!
//! Written for the families that the executor trains; reading it back gives the same model.

use moefold_planner::model::{Ffn, Gqa, Mixer, Mla, Model, Moe, Score};
use serde_json::{Map, Value, json};

use crate::error::Error;

/// Keys of a configuration.
type Keys = Map<String, Value>;

/// The Hugging Face configuration of a model.
pub fn hf_config(model: &Model) -> Result<Value, Error> {
    let refuse = |what: &str| Error::Unsupported {
        what: format!("writing a config.json for {} ({what})", model.name),
        instead:
            "mixtral, qwen3_moe, llama, qwen3, deepseek_v2, deepseek_v3 and kimi_k2 are written"
                .to_owned(),
    };
    let architecture = match &*model.model_type {
        "mixtral" => "MixtralForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        "llama" => "LlamaForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "deepseek_v2" => "DeepseekV2ForCausalLM",
        "deepseek_v3" | "kimi_k2" => "DeepseekV3ForCausalLM",
        other => return Err(refuse(&format!("model_type {other}"))),
    };
    let rotary = rotary(model).ok_or_else(|| refuse("scaled rotary embedding"))?;
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
    put("rms_norm_eps", json!(model.norm.eps));
    put("initializer_range", json!(model.initializer_range));
    put("tie_word_embeddings", json!(model.tied_embeddings));
    if let Some(positions) = model.max_position {
        put("max_position_embeddings", json!(positions));
    }
    config.extend(rotary);
    // In these families all layers share the shape of the first one's attention.
    let mixer = model.layers.first().and_then(|layer| layer.mixer.as_ref());
    config.extend(match mixer {
        Some(Mixer::Gqa(gqa)) => grouped(gqa),
        Some(Mixer::Mla(mla)) => latent(mla),
        _ => return Err(refuse("neither grouped-query nor latent attention")),
    });
    let dense: Vec<usize> = (0..model.layers.len())
        .filter(|&i| matches!(model.layers[i].ffn, Some(Ffn::Dense(_))))
        .collect();
    let dense_width = dense.first().map(|&i| match &model.layers[i].ffn {
        Some(Ffn::Dense(mlp)) => mlp.width,
        _ => unreachable!("dense layers were selected"),
    });
    let mut put = |key: &str, value: Value| {
        config.insert(key.to_owned(), value);
    };
    if matches!(mixer, Some(Mixer::Mla(_))) {
        if dense.last().is_some_and(|&last| last >= dense.len()) {
            return Err(refuse("a dense layer after one with experts"));
        }
        put("first_k_dense_replace", json!(dense.len()));
        put("num_nextn_predict_layers", json!(model.mtp.len()));
    }
    match model.moe() {
        None => put("intermediate_size", json!(dense_width)),
        Some(moe) => {
            // Without dense layers the width is not used, but transformers wants one.
            let width = dense_width.unwrap_or(moe.expert.width * moe.topk);
            put("intermediate_size", json!(width));
            put("num_experts_per_tok", json!(moe.topk));
            match &*model.model_type {
                "mixtral" => {
                    put("router_aux_loss_coef", json!(moe.router.aux_loss_coef));
                    put("output_router_logits", json!(false));
                    put("num_local_experts", json!(moe.experts));
                    put("intermediate_size", json!(moe.expert.width));
                }
                "deepseek_v2" | "deepseek_v3" | "kimi_k2" => config.extend(experts(model, moe)),
                _ => {
                    put("router_aux_loss_coef", json!(moe.router.aux_loss_coef));
                    put("output_router_logits", json!(false));
                    put("num_experts", json!(moe.experts));
                    put("moe_intermediate_size", json!(moe.expert.width));
                    put("norm_topk_prob", json!(moe.router.normalize));
                    put("decoder_sparse_step", json!(1));
                    put("mlp_only_layers", json!(dense));
                }
            }
        }
    }
    Ok(Value::Object(config))
}

/// Keys of an object.
fn keys(object: Value) -> Keys {
    match object {
        Value::Object(keys) => keys,
        _ => unreachable!("it is written as an object"),
    }
}

/// Rotary embedding, by the keys of transformers 4 and by those of transformers 5; none where it is scaled in
/// a way that is not written.
fn rotary(model: &Model) -> Option<Keys> {
    let Some(theta) = model.rope_theta else {
        return Some(Keys::new());
    };
    let Some(scaling) = &model.rope_scaling else {
        let gathered = json!({"rope_type": "default", "rope_theta": theta});
        return Some(keys(
            json!({"rope_theta": theta, "rope_parameters": gathered}),
        ));
    };
    let yarn = scaling.yarn.as_ref()?;
    let mut flat = keys(json!({
        "type": scaling.kind,
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }));
    for (key, value) in [
        ("attention_factor", yarn.attention_factor),
        ("mscale", yarn.mscale),
        ("mscale_all_dim", yarn.mscale_all_dim),
    ] {
        flat.extend(value.map(|value| (key.to_owned(), json!(value))));
    }
    let mut gathered = flat.clone();
    gathered.remove("type");
    gathered.insert("rope_theta".to_owned(), json!(theta));
    Some(keys(json!({
        "rope_theta": theta,
        "rope_scaling": flat,
        "rope_parameters": gathered,
    })))
}

fn grouped(gqa: &Gqa) -> Keys {
    keys(json!({
        "num_attention_heads": gqa.heads,
        "num_key_value_heads": gqa.kv_heads,
        "head_dim": gqa.head_dim,
        "attention_bias": gqa.qkv_bias,
        "sliding_window": gqa.window,
    }))
}

fn latent(mla: &Mla) -> Keys {
    keys(json!({
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "attention_bias": false,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": mla.rope_interleave,
    }))
}

/// Experts as DeepSeek's configurations have them.
fn experts(model: &Model, moe: &Moe) -> Keys {
    let shared = moe.shared.as_ref().map_or(0, |shared| shared.mlp.width);
    let groups = moe.router.groups.as_ref();
    let method = match (&*model.model_type, groups) {
        ("deepseek_v2", None) => "greedy",
        ("deepseek_v2", Some(_)) => "group_limited_greedy",
        _ => "noaux_tc",
    };
    keys(json!({
        "n_routed_experts": moe.experts,
        "n_shared_experts": shared / moe.expert.width,
        "moe_intermediate_size": moe.expert.width,
        "moe_layer_freq": 1,
        "n_group": groups.map_or(1, |groups| groups.groups),
        "topk_group": groups.map_or(1, |groups| groups.topk),
        "topk_method": method,
        "scoring_func": if moe.router.score == Score::Sigmoid { "sigmoid" } else { "softmax" },
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
        "aux_loss_alpha": moe.router.aux_loss_coef,
    }))
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
            "deepseek-v2-lite",
            "deepseek-v2",
            "deepseek-v3",
            "kimi-k2",
        ] {
            check(&moefold_planner::model::presets::load(name).expect("a preset"));
        }
        for name in [
            "mixtral",
            "qwen3_moe",
            "qwen3_moe_raw",
            "deepseek_v3_dense",
            "deepseek_v3_halves",
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
            check(&hf::read(&folder.join(name)).expect("a fixture"));
        }
    }

    #[test]
    fn other_families_are_refused_by_name() {
        let model = moefold_planner::model::presets::load("glm-5").expect("a preset");
        let text = hf_config(&model).expect_err("refused").to_string();
        assert!(text.contains("model_type glm_moe_dsa"), "{text}");
    }
}
