//! The configuration reader against both dialects, against mistakes, and against noise.

use moefold_planner::model::{Feature, Model, ModelError, Score, count, features, hf, presets};
use serde_json::{Map, Value, json};

fn preset(name: &str) -> Value {
    let config = presets::find(name).expect(name).config();
    serde_json::from_str(config).expect(name)
}

fn parse(config: &Value) -> Result<Model, ModelError> {
    hf::parse("test.json", &config.to_string())
}

/// A preset with some keys replaced (or removed, by null).
fn changed(name: &str, changes: &Value) -> Value {
    let mut config = preset(name);
    let map = config.as_object_mut().expect("an object");
    for (key, value) in changes.as_object().expect("an object") {
        map.insert(key.clone(), value.clone());
    }
    config
}

#[test]
fn differential_both_dialects_describe_one_model() {
    let saved: Map<String, Value> =
        serde_json::from_str(include_str!("fixtures/transformers_v5.json")).expect("valid JSON");
    assert!(
        saved.len() >= 20,
        "one of each type that transformers knows"
    );
    for (name, config) in &saved {
        let preset = presets::load(name).expect(name);
        let again = hf::parse(name, &config.to_string()).expect(name);
        let again = Model {
            model_type: preset.model_type.clone(),
            ..again
        };
        if preset != again {
            let [a, b] = [preset, again].map(|m| serde_json::to_value(m).expect("serializable"));
            panic!("{name}: {}", difference(&a, &b, "").expect("they differ"));
        }
    }
}

/// Where two values first differ.
fn difference(a: &Value, b: &Value, path: &str) -> Option<String> {
    match (a, b) {
        (Value::Object(left), Value::Object(right)) => left
            .iter()
            .find_map(|(key, value)| difference(value, right.get(key)?, &format!("{path}.{key}"))),
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => left
            .iter()
            .zip(right)
            .enumerate()
            .find_map(|(i, (a, b))| difference(a, b, &format!("{path}[{i}]"))),
        _ => (a != b).then(|| format!("{path}: {a} and {b}")),
    }
}

#[test]
fn law_models_round_trip_through_json() {
    for name in presets::names() {
        let model = presets::load(name).expect(name);
        let text = serde_json::to_string(&model).expect(name);
        let again: Model = serde_json::from_str(&text).expect(name);
        assert_eq!(model, again);
    }
}

#[test]
fn law_null_is_absent_and_whole_floats_are_integers() {
    let plain = parse(&preset("Qwen3-30B-A3B")).expect("readable");
    let spelt = changed(
        "Qwen3-30B-A3B",
        &json!({"hidden_size": 2048.0, "num_experts": 128.0, "rope_theta": 1_000_000,
                "sliding_window": null, "mlp_only_layers": null, "rope_scaling": null,
                "quantization_config": {"quant_method": "fp8"}}),
    );
    assert_eq!(parse(&spelt).expect("readable"), plain);
}

#[test]
fn nested_language_models_are_found() {
    let text = preset("DeepSeek-V3");
    let mut text = text.as_object().expect("an object").clone();
    text.insert("model_type".to_owned(), json!("kimi_k2"));
    for nest in ["text_config", "llm_config"] {
        let model = parse(&json!({"model_type": "kimi_k25", nest: text})).expect(nest);
        assert_eq!(model.model_type, "kimi_k25");
        assert_eq!(model.layers.len(), 61);
    }
    text.remove("model_type");
    text.remove("tie_word_embeddings");
    let outer = json!({"model_type": "kimi_k25", "tie_word_embeddings": true, "text_config": text});
    assert!(parse(&outer).expect("readable").tied_embeddings);
}

/// Each mistake is refused with a message that holds every one of the given parts.
fn refused(config: &Value, parts: &[&str]) {
    let message = match parse(config) {
        Ok(_) => panic!("accepted: {config}"),
        Err(error) => error.to_string(),
    };
    for part in parts.iter().chain(&["test.json"]) {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn mistakes_are_named_with_key_value_and_what_would_work() {
    let qwen = |changes: Value| changed("Qwen3-30B-A3B", &changes);
    refused(&json!({}), &["model_type", "missing"]);
    refused(&json!([1]), &["a JSON object"]);
    refused(
        &qwen(json!({"model_type": "qwen4_moe"})),
        &["`qwen4_moe`", "nearest: qwen", "qwen3_moe"],
    );
    refused(
        &qwen(json!({"hidden_size": null, "hidden_sise": 2048})),
        &["`hidden_size`", "missing", "there is `hidden_sise`"],
    );
    refused(
        &qwen(json!({"num_experts": null})),
        &["`num_experts` or `num_local_experts`", "missing"],
    );
    refused(
        &qwen(json!({"hidden_size": "2048"})),
        &["`hidden_size`", "\"2048\"", "a whole number"],
    );
    refused(&qwen(json!({"hidden_size": 0})), &["`hidden_size` is 0"]);
    refused(&qwen(json!({"hidden_size": 20.5})), &["20.5"]);
    refused(
        &qwen(json!({"num_hidden_layers": 1e9})),
        &["`num_hidden_layers`", "1 to 1024"],
    );
    refused(
        &qwen(json!({"num_experts_per_tok": 129})),
        &[
            "`num_experts_per_tok` = 129",
            "num_experts = 128",
            "at most 128",
        ],
    );
    refused(
        &qwen(json!({"num_key_value_heads": 5})),
        &["`num_key_value_heads` = 5", "num_attention_heads = 32", "4"],
    );
    refused(
        &qwen(json!({"head_dim": null, "num_attention_heads": 30, "num_key_value_heads": 2})),
        &["`num_attention_heads` = 30", "hidden_size = 2048", "32"],
    );
    refused(
        &qwen(json!({"norm_topk_prob": "yes"})),
        &["norm_topk_prob", "true or false"],
    );
    refused(
        &qwen(json!({"hidden_act": "gelu"})),
        &["hidden_act", "\"gelu\"", "silu"],
    );
    refused(&qwen(json!({"rope_theta": -1})), &["rope_theta", "above 0"]);
    refused(&qwen(json!({"head_dim": 7})), &["7", "pairs", "6, 8"]);
    refused(
        &qwen(json!({"mlp_only_layers": 3})),
        &["mlp_only_layers", "a list"],
    );
    refused(
        &qwen(json!({"mlp_only_layers": [1], "intermediate_size": null})),
        &["intermediate_size", "missing"],
    );
}

/// What transformers would fill in with the value of one model of the family is asked for; null is as good as a value.
#[test]
fn keys_by_which_models_of_a_family_differ_are_not_guessed() {
    for (name, key) in [
        ("DeepSeek-V3", "q_lora_rank"),
        ("DeepSeek-V3", "n_shared_experts"),
        ("DeepSeek-V3", "first_k_dense_replace"),
        ("GLM-4.5", "n_shared_experts"),
        ("gpt-oss-120b", "sliding_window"),
        ("Mixtral-8x7B-v0.1", "num_key_value_heads"),
        ("Qwen3-32B", "head_dim"),
    ] {
        let mut config = preset(name);
        let keys = config.as_object_mut().expect("an object");
        keys.remove(key).expect("it is there");
        refused(&config, &[&format!("`{key}`"), "missing", "null"]);
    }
    assert!(parse(&changed("DeepSeek-V3", &json!({"q_lora_rank": null}))).is_ok());
}

#[test]
fn mistakes_of_single_families_are_named_too() {
    let deepseek = |changes: Value| changed("DeepSeek-V3", &changes);
    refused(
        &deepseek(json!({"n_group": 7})),
        &["`n_group` = 7", "256", "8"],
    );
    refused(
        &deepseek(json!({"topk_group": 9})),
        &["`topk_group` = 9", "n_group = 8"],
    );
    refused(
        &deepseek(json!({"topk_group": 1, "num_experts_per_tok": 40})),
        &["`num_experts_per_tok` = 40", "32"],
    );
    refused(
        &deepseek(json!({"first_k_dense_replace": 62})),
        &["`first_k_dense_replace` = 62", "num_hidden_layers = 61"],
    );
    refused(
        &deepseek(json!({"rope_scaling": {"type": "yran", "factor": 40}})),
        &["`rope_scaling.type`", "\"yran\"", "\"yarn\", \"longrope\""],
    );
    refused(
        &deepseek(json!({"rope_scaling": {"type": "yarn"}})),
        &["rope_scaling.factor", "missing"],
    );
    refused(
        &changed(
            "qwen3-30b-a3b",
            &json!({"num_experts": 128, "num_local_experts": 64}),
        ),
        &["num_local_experts", "64", "num_experts = 128"],
    );
    refused(
        &deepseek(json!({"rope_scaling": {"type": "yarn", "factor": 0}})),
        &["`rope_scaling.factor` is 0", "above 0, up to 1e30"],
    );
    refused(
        &deepseek(json!({"topk_method": "foo"})),
        &["topk_method", "\"noaux_tc\""],
    );
    refused(
        &deepseek(json!({"scoring_func": "tanh"})),
        &["scoring_func", "\"sigmoid\""],
    );
    refused(
        &changed("gpt-oss-20b", &json!({"layer_types": ["full_attention"]})),
        &["`layer_types` = a list of 1", "num_hidden_layers = 24"],
    );
    refused(
        &changed("MiniMax-Text-01", &json!({"layernorm_mlp_alpha": 2.0})),
        &["`layernorm_mlp_alpha` = 2", "3.55"],
    );
    refused(
        &changed("dbrx-base", &json!({"attn_config": {"kv_n_heads": 5}})),
        &["`attn_config.kv_n_heads` = 5", "n_heads = 48"],
    );
    let nemotron = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16";
    refused(
        &changed(nemotron, &json!({"hybrid_override_pattern": "MXE"})),
        &["hybrid_override_pattern", "\"X\""],
    );
    refused(
        &changed(nemotron, &json!({"moe_latent_size": 1024})),
        &["`moe_latent_size` is 1024", "null"],
    );
    refused(
        &changed("Ling-1T", &json!({"architectures": ["Other"]})),
        &["architectures", "\"Other\"", "BailingMoeV2ForCausalLM"],
    );
}

#[test]
fn text_that_is_not_json_is_refused() {
    let message = hf::parse("broken.json", "{\"model_type\":")
        .expect_err("cut short")
        .to_string();
    assert!(message.contains("broken.json is not JSON"), "{message}");
}

#[test]
fn layers_follow_the_rules_of_their_family() {
    let sparse = |config: &Value| -> Vec<bool> {
        let model = parse(config).expect("readable");
        model.layers.iter().map(|l| l.moe().is_some()).collect()
    };
    let qwen = changed(
        "Qwen3-30B-A3B",
        &json!({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    );
    assert_eq!(sparse(&qwen), [false, true, false, false, false, true]);
    let deepseek = changed(
        "DeepSeek-V3",
        &json!({"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}),
    );
    assert_eq!(sparse(&deepseek), [false, false, true, false, true, false]);
    let maverick = presets::load("Llama-4-Maverick-17B-128E").expect("a preset");
    assert_eq!(maverick.num_moe_layers(), 24);
    assert!(maverick.layers[0].moe().is_none());
    let flash = presets::load("DeepSeek-V4-Flash").expect("a preset");
    let hashed = flash.layers.iter().filter_map(|layer| layer.moe());
    let hashed = hashed.filter(|moe| moe.router.score == Score::Hash).count();
    assert_eq!(hashed, 3);
}

#[test]
fn layers_that_share_a_selection_have_no_indexer_of_their_own() {
    let total = |changes: Value| {
        let model = parse(&changed("GLM-5", &changes)).expect("readable");
        count::params(&model).total()
    };
    let all = total(json!({}));
    // Query up-projection, one key head with a layer norm, a weight a head.
    let indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32;
    let every_other: Vec<&str> = (0..78).map(|i| ["full", "shared"][i % 2]).collect();
    assert_eq!(
        total(json!({"indexer_types": every_other})),
        all - 39 * indexer
    );
    assert_eq!(
        total(json!({"index_topk_pattern": "FS".repeat(39)})),
        all - 39 * indexer
    );
    // Layers 0 and 1, then every fourth: 5, 9, ..., 77.
    assert_eq!(
        total(json!({"index_topk_freq": 4})),
        all - (78 - 2 - 19) * indexer
    );
}

#[test]
fn golden_features_of_a_few_models() {
    let check = |name: &str, expected: &[&str]| {
        let found = features(&presets::load(name).expect(name));
        let found: Vec<&str> = found.into_iter().map(Feature::name).collect();
        assert_eq!(found, expected, "{name}");
    };
    check(
        "Mixtral-8x7B-v0.1",
        &[
            "grouped-query attention",
            "routed experts",
            "softmax-then-top-k router",
        ],
    );
    check(
        "Qwen3-30B-A3B",
        &[
            "grouped-query attention",
            "per-head QK norm",
            "routed experts",
            "softmax-then-top-k router",
        ],
    );
    check(
        "gpt-oss-20b",
        &[
            "grouped-query attention",
            "sliding-window attention",
            "YaRN rotary scaling",
            "attention biases on q, k, v",
            "attention output bias",
            "attention sinks",
            "routed experts",
            "top-k-then-softmax router",
            "router bias",
            "expert biases",
            "clipped quick-GELU gate",
        ],
    );
    check(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        &[
            "grouped-query attention",
            "Mamba-2",
            "layers of a single block",
            "attention without rotary embedding",
            "routed experts",
            "shared expert",
            "sigmoid router",
            "router correction bias",
            "routed scaling factor",
            "ungated MLP",
            "squared ReLU",
        ],
    );
}

mod noise {
    use super::*;
    use moefold_planner::model::describe;
    use proptest::prelude::*;

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (0_u64..300_000).prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(|number| json!(number)),
            Just(json!(262_144)),
            Just(json!(16_384)),
            "[a-zA-Z0-9_*-]{0,12}".prop_map(Value::from),
            Just(json!("full_attention")),
        ];
        leaf.prop_recursive(2, 16, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec(("[a-z_]{1,12}", inner), 0..6)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Whatever a few keys of a real configuration are replaced by, the reader answers, and
        /// what it accepts can be counted and described.
        #[test]
        fn law_no_mutated_configuration_panics(
            which in 0..presets::all().len(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..4),
            nested in any::<bool>(),
        ) {
            let text = presets::all()[which].config();
            let mut config: Value = serde_json::from_str(text).expect("a preset is JSON");
            let target = match config.get("text_config") {
                Some(_) if nested => &mut config["text_config"],
                _ => &mut config,
            };
            let map = target.as_object_mut().expect("an object");
            let keys: Vec<String> = map.keys().cloned().collect();
            for (index, value) in changes {
                map.insert(index.get(&keys).clone(), value);
            }
            if let Ok(model) = parse(&config) {
                let total = count::params(&model).total();
                let description = describe(&model, 4096);
                prop_assert_eq!(description.total_params, total);
                prop_assert!(description.flops_per_token.is_finite());
                let text = serde_json::to_string(&model).expect("serializable");
                let again: Model = serde_json::from_str(&text).expect("its own JSON");
                prop_assert_eq!(again, model);
            }
        }

        /// The largest values that are accepted overflow nothing.
        #[test]
        fn law_extreme_sizes_count_without_overflow(which in 0..presets::all().len()) {
            let text = presets::all()[which].config();
            let mut config: Value = serde_json::from_str(text).expect("a preset is JSON");
            enlarge(&mut config);
            if let Ok(model) = parse(&config) {
                prop_assert!(count::params(&model).total() > 0);
            }
        }
    }

    /// Every whole number above 1 becomes the largest power of two its key may have.
    fn enlarge(value: &mut Value) {
        if let Value::Object(map) = value {
            for (key, value) in map {
                if !value.is_u64() || value.as_u64() <= Some(1) {
                    enlarge(value);
                    continue;
                }
                *value = match key.as_str() {
                    "vocab_size" => json!(16_777_216),
                    name if name.contains("layer") || name.contains("interval") => json!(1024),
                    name if name.contains("size") || name == "d_model" => json!(262_144),
                    "hc_mult" => json!(64),
                    _ => json!(16_384),
                };
            }
        }
    }
}
