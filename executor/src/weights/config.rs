//! The `config.json` of a trained model, for transformers and for [`moefold_planner::model::hf`].
//!
//! Written for the families that the executor trains; reading it back gives the same model.

use moefold_planner::model::{Activation, Ffn, Gqa, Mixer, Mla, Model, Moe, QkNorm, Score};
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
        "deepseek_v2" => "DeepseekV2ForCausalLM",
        "deepseek_v3" | "kimi_k2" => "DeepseekV3ForCausalLM",
        "llama" => "LlamaForCausalLM",
        "gpt_oss" => "GptOssForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => return Err(refuse(&format!("model_type {other}"))),
    };
    let rotary = rotary(model).ok_or_else(|| refuse("scaled rotary embedding"))?;
    // In these families all layers share the shape of the first one's attention.
    let mixer = model.layers.first().and_then(|layer| layer.mixer.as_ref());
    let attention = match mixer {
        Some(Mixer::Gqa(gqa)) => grouped(model, gqa),
        Some(Mixer::Mla(mla)) => latent(mla),
        _ => return Err(refuse("neither grouped-query nor latent attention")),
    };
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
    for (key, value) in [attention, feed_forward(model)].concat() {
        put(key, value);
    }
    config.extend(rotary);
    Ok(Value::Object(config))
}

/// Keys of a configuration.
type Keys = Vec<(&'static str, Value)>;

/// Rotary embedding, by the keys of transformers 4 and by those of transformers 5; none where it is scaled in
/// a way that is not written.
fn rotary(model: &Model) -> Option<Map<String, Value>> {
    let mut flat = Map::new();
    let Some(theta) = model.rope_theta else {
        return Some(flat);
    };
    flat.insert("rope_theta".to_owned(), json!(theta));
    let mut gathered = Map::new();
    let mut put = |key: &str, value: Value| {
        gathered.insert(key.to_owned(), value);
    };
    match &model.rope_scaling {
        None => put("rope_type", json!("default")),
        Some(scaling) => {
            put("rope_type", json!(scaling.kind));
            put("factor", json!(scaling.factor));
            let mut original = |positions: u64| {
                put("original_max_position_embeddings", json!(positions));
            };
            if let Some(llama3) = &scaling.llama3 {
                original(llama3.original_max_position);
                put("low_freq_factor", json!(llama3.low_freq_factor));
                put("high_freq_factor", json!(llama3.high_freq_factor));
            } else {
                let yarn = scaling.yarn.as_ref()?;
                original(yarn.original_max_position);
                put("beta_fast", json!(yarn.beta_fast));
                put("beta_slow", json!(yarn.beta_slow));
                put("truncate", json!(yarn.truncate));
                for (key, value) in [
                    ("attention_factor", yarn.attention_factor),
                    ("mscale", yarn.mscale),
                    ("mscale_all_dim", yarn.mscale_all_dim),
                ] {
                    if let Some(value) = value {
                        put(key, json!(value));
                    }
                }
            }
        }
    }
    if model.rope_scaling.is_some() {
        flat.insert("rope_scaling".to_owned(), json!(gathered));
    }
    gathered.insert("rope_theta".to_owned(), json!(theta));
    if let Some(gqa) = attention(model).filter(|gqa| gqa.rotary_dim < gqa.head_dim) {
        let partial = json!(gqa.rotary_dim as f64 / gqa.head_dim as f64);
        for keys in [&mut flat, &mut gathered] {
            keys.insert("partial_rotary_factor".to_owned(), partial.clone());
        }
    }
    flat.insert("rope_parameters".to_owned(), json!(gathered));
    Some(flat)
}

fn grouped(model: &Model, gqa: &Gqa) -> Keys {
    // One generation of Qwen has a key of its own.
    let bias = match &*model.model_type {
        "qwen2_moe" => "qkv_bias",
        _ => "attention_bias",
    };
    let mut keys = vec![
        ("num_attention_heads", json!(gqa.heads)),
        ("num_key_value_heads", json!(gqa.kv_heads)),
        ("head_dim", json!(gqa.head_dim)),
        (bias, json!(gqa.qkv_bias)),
    ];
    keys.extend(windows(model));
    keys
}

/// Which layers have windows, as wide as the first of them has.
fn windows(model: &Model) -> Keys {
    let all: Vec<Option<u64>> = model
        .layers
        .iter()
        .map(|layer| match &layer.mixer {
            Some(Mixer::Gqa(gqa)) => gqa.window,
            _ => None,
        })
        .collect();
    let window = all.iter().flatten().next();
    let mut keys = vec![("sliding_window", json!(window))];
    let by_layer = ["gpt_oss", "qwen2_moe", "qwen3"].contains(&&*model.model_type);
    if by_layer && window.is_some() {
        let word = |window: &Option<u64>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let words: Vec<&str> = all.iter().map(word).collect();
        keys.push(("layer_types", json!(words)));
    }
    if model.model_type.starts_with("qwen") {
        keys.push(("use_sliding_window", json!(window.is_some())));
    }
    keys
}

fn latent(mla: &Mla) -> Keys {
    vec![
        ("num_attention_heads", json!(mla.heads)),
        ("num_key_value_heads", json!(mla.heads)),
        ("attention_bias", json!(false)),
        ("q_lora_rank", json!(mla.q_lora_rank)),
        ("kv_lora_rank", json!(mla.kv_lora_rank)),
        ("qk_nope_head_dim", json!(mla.qk_nope_head_dim)),
        ("qk_rope_head_dim", json!(mla.qk_rope_head_dim)),
        ("v_head_dim", json!(mla.v_head_dim)),
        ("rope_interleave", json!(mla.rope_interleave)),
    ]
}

/// The keys of feed-forward blocks, of which each family has its own.
fn feed_forward(model: &Model) -> Keys {
    let dense: Vec<usize> = (0..model.layers.len())
        .filter(|&i| matches!(model.layers[i].ffn, Some(Ffn::Dense(_))))
        .collect();
    let dense_width = dense.first().map(|&i| match &model.layers[i].ffn {
        Some(Ffn::Dense(mlp)) => mlp.width,
        _ => unreachable!("dense layers were selected"),
    });
    let Some(moe) = model.moe() else {
        return vec![
            ("intermediate_size", json!(dense_width)),
            ("first_k_dense_replace", json!(dense.len())),
            ("n_shared_experts", json!(0)),
        ];
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
        "gpt_oss" => {
            let mut keys = vec![
                ("num_local_experts", json!(moe.experts)),
                ("intermediate_size", width),
            ];
            if let Activation::ClippedGelu(limit) = moe.expert.activation {
                keys.push(("swiglu_limit", json!(limit)));
            }
            keys
        }
        "olmoe" => vec![
            ("num_experts", json!(moe.experts)),
            ("intermediate_size", width),
            ("norm_topk_prob", json!(router.normalize)),
        ],
        "glm4_moe" => {
            let qk_norm = attention(model).is_some_and(|gqa| gqa.qk_norm == QkNorm::PerHead);
            let mut keys = after_dense(model, moe, dense.len());
            keys.push(("intermediate_size", json!(some_width)));
            keys.push(("use_qk_norm", json!(qk_norm)));
            keys
        }
        "deepseek_v2" | "deepseek_v3" | "kimi_k2" => {
            let method = match (&*model.model_type, &router.groups) {
                ("deepseek_v2", None) => "greedy",
                ("deepseek_v2", Some(_)) => "group_limited_greedy",
                _ => "noaux_tc",
            };
            let score = match router.score {
                Score::Sigmoid => "sigmoid",
                _ => "softmax",
            };
            let mut keys = after_dense(model, moe, dense.len());
            keys.push(("intermediate_size", json!(some_width)));
            keys.push(("topk_method", json!(method)));
            keys.push(("scoring_func", json!(score)));
            keys.push(("aux_loss_alpha", json!(router.aux_loss_coef)));
            keys
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

/// Experts after leading dense layers, routed in groups.
fn after_dense(model: &Model, moe: &Moe, dense: usize) -> Keys {
    let shared = moe.shared.as_ref().map_or(0, |shared| shared.mlp.width);
    let (router, groups) = (&moe.router, moe.router.groups.as_ref());
    vec![
        ("n_routed_experts", json!(moe.experts)),
        ("n_shared_experts", json!(shared / moe.expert.width)),
        ("moe_intermediate_size", json!(moe.expert.width)),
        ("first_k_dense_replace", json!(dense)),
        ("norm_topk_prob", json!(router.normalize)),
        ("routed_scaling_factor", json!(router.scale)),
        ("n_group", json!(groups.map_or(1, |groups| groups.groups))),
        ("topk_group", json!(groups.map_or(1, |groups| groups.topk))),
        ("num_nextn_predict_layers", json!(model.mtp.len())),
    ]
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
            "llama-3.1-8b",
            "mixtral-8x22b",
            "olmoe-1b-7b",
            "qwen2-57b-a14b",
            "glm-4.5",
            "deepseek-v2-lite",
            "deepseek-v2",
            "deepseek-v3",
            "kimi-k2",
            "gpt-oss-20b",
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
            "llama",
            "llama3",
            "mistral",
            "deepseek_v3",
            "deepseek_v2",
            "deepseek_v3_halves",
            "gpt_oss",
            "mixtral_windows",
            "qwen2_moe_windows",
            "qwen3_windows",
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
