//! [`describe`]: a model at a glance, as `moefold models NAME` shows it.

use serde::Serialize;

use super::count::{flops_per_token, params};
use super::features::{Feature, features};
use super::{Ffn, Layer, LinearKind, Mixer, Mlp, Model};

/// What a model is and counts to. Serializes to the answer of `moefold models NAME --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// Preset name, or the name of the file or folder it was read from.
    pub name: String,
    /// The configuration's `model_type`.
    pub model_type: String,
    /// Parameters without multi-token prediction.
    pub total_params: u64,
    /// Parameters that one token touches, both embeddings included.
    pub active_params: u64,
    /// The same without the input embedding.
    pub active_params_without_embedding: u64,
    /// The same without embedding and head.
    pub active_params_body: u64,
    /// Parameters of multi-token prediction; in none of the above.
    pub mtp_params: u64,
    /// Decoder layers.
    pub layers: usize,
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Layers with a dense MLP.
    pub dense_layers: usize,
    /// Multi-token-prediction depths.
    pub mtp_layers: usize,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Vocabulary size, unpadded.
    pub vocab_size: u64,
    /// Routed experts of a sparse layer; 0 in dense models.
    pub experts: u64,
    /// Experts a token is sent to; 0 in dense models.
    pub topk: u64,
    /// Inner width of a routed expert; 0 in dense models.
    pub expert_width: u64,
    /// Inner width of the shared expert; 0 where there is none.
    pub shared_width: u64,
    /// Longest sequence the configuration was made for.
    pub max_position: Option<u64>,
    /// Sequence length that the FLOPs are for.
    pub seq_len: u64,
    /// FLOPs of one token in one training step, in Megatron's convention.
    pub flops_per_token: f64,
    /// The kinds of layer and how many there are of each, in words.
    pub structure: Vec<String>,
    /// Architectural traits, by name.
    pub features: Vec<&'static str>,
    /// Everything, as resolved from the configuration.
    pub resolved: Model,
}

/// Describes a model for training at a sequence length.
pub fn describe(model: &Model, seq_len: u64) -> Description {
    let counts = params(model);
    let moe = model.moe();
    Description {
        name: model.name.clone(),
        model_type: model.model_type.clone(),
        total_params: counts.total(),
        active_params: counts.active(),
        active_params_without_embedding: counts.active_without_embedding(),
        active_params_body: counts.active_body(),
        mtp_params: counts.mtp(),
        layers: model.layers.len(),
        moe_layers: model.num_moe_layers(),
        dense_layers: model
            .layers
            .iter()
            .filter(|layer| matches!(layer.ffn, Some(Ffn::Dense(_))))
            .count(),
        mtp_layers: model.mtp.len(),
        hidden: model.hidden,
        vocab_size: model.vocab_size,
        experts: moe.map_or(0, |moe| moe.experts),
        topk: moe.map_or(0, |moe| moe.topk),
        expert_width: moe.map_or(0, |moe| moe.expert.width),
        shared_width: moe
            .and_then(|moe| moe.shared.as_ref())
            .map_or(0, |shared| shared.mlp.width),
        max_position: model.max_position,
        seq_len,
        flops_per_token: flops_per_token(model, seq_len).0,
        structure: structure(model),
        features: features(model).into_iter().map(Feature::name).collect(),
        resolved: model.clone(),
    }
}

/// One line for each kind of layer, in order of first appearance, multi-token prediction last.
fn structure(model: &Model) -> Vec<String> {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    let main = model.layers.iter().map(in_words);
    let mtp = model
        .mtp
        .iter()
        .map(|layer| format!("MTP: {}", in_words(layer)));
    for words in main.chain(mtp) {
        match kinds.iter_mut().find(|(kind, _)| *kind == words) {
            Some((_, count)) => *count += 1,
            None => kinds.push((words, 1)),
        }
    }
    kinds
        .into_iter()
        .map(|(words, count)| format!("{count} x {words}"))
        .collect()
}

fn in_words(layer: &Layer) -> String {
    let parts = [
        layer.mixer.as_ref().map(mixer_in_words),
        layer.ffn.as_ref().map(ffn_in_words),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" + ")
}

fn mixer_in_words(mixer: &Mixer) -> String {
    match mixer {
        Mixer::Gqa(gqa) => {
            let reach = match (gqa.window, gqa.chunk) {
                (Some(window), _) => format!(", window {window}"),
                (None, Some(chunk)) => format!(", chunks of {chunk}"),
                (None, None) => String::new(),
            };
            format!(
                "GQA {}/{} heads of {}{reach}",
                gqa.heads, gqa.kv_heads, gqa.head_dim
            )
        }
        Mixer::Mla(mla) => {
            let sparse = match &mla.indexer {
                Some(indexer) => format!(", top {} keys", indexer.topk),
                None => String::new(),
            };
            format!(
                "MLA {} heads of {}+{}/{}{sparse}",
                mla.heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
            )
        }
        Mixer::SharedKv(shared) => {
            let distant = match shared.compress_ratio {
                0 => String::new(),
                ratio => format!(", distant keys compressed {ratio} to 1"),
            };
            format!(
                "shared-KV {} heads of {}, window {}{distant}",
                shared.heads, shared.head_dim, shared.window
            )
        }
        Mixer::Linear(linear) => {
            let kind = match linear.kind {
                LinearKind::GatedDeltaNet => "gated DeltaNet",
                LinearKind::Lightning => "lightning attention",
                LinearKind::Mamba2 => "Mamba-2",
            };
            format!(
                "{kind} {} heads of {}/{}",
                linear.heads, linear.key_dim, linear.value_dim
            )
        }
    }
}

fn ffn_in_words(ffn: &Ffn) -> String {
    let mlp = |mlp: &Mlp| {
        let ungated = if mlp.gated { "" } else { " ungated" };
        format!("{}{ungated}", mlp.width)
    };
    match ffn {
        Ffn::Dense(dense) => format!("MLP {}", mlp(dense)),
        Ffn::Moe(moe) => {
            let shared = match &moe.shared {
                Some(shared) => format!(", shared {}", mlp(&shared.mlp)),
                None => String::new(),
            };
            format!(
                "top {} of {} experts of {}{shared}",
                moe.topk,
                moe.experts,
                mlp(&moe.expert)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    fn check(name: &str, expected: &[&str]) {
        let model = presets::load(name).expect(name);
        assert_eq!(structure(&model), expected, "{name}");
    }

    #[test]
    fn golden_structures() {
        check(
            "Mixtral-8x22B-v0.1",
            &["56 x GQA 48/8 heads of 128 + top 2 of 8 experts of 16384"],
        );
        check(
            "DeepSeek-V3",
            &[
                "3 x MLA 128 heads of 128+64/128 + MLP 18432",
                "58 x MLA 128 heads of 128+64/128 + top 8 of 256 experts of 2048, shared 2048",
                "1 x MTP: MLA 128 heads of 128+64/128 + top 8 of 256 experts of 2048, shared 2048",
            ],
        );
        check(
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            &[
                "23 x Mamba-2 64 heads of 128/64",
                "23 x top 6 of 128 experts of 1856 ungated, shared 3712 ungated",
                "6 x GQA 32/2 heads of 128",
            ],
        );
    }

    #[test]
    fn the_answer_has_the_promised_keys() {
        let model = presets::load("DeepSeek-V3").expect("a preset");
        let answer = serde_json::to_value(describe(&model, 4096)).expect("serializable");
        assert_eq!(answer["total_params"], 671_026_404_352_u64);
        assert_eq!(answer["active_params"], 37_552_282_624_u64);
        assert_eq!(answer["mtp_params"], 11_610_067_968_u64);
        assert_eq!(answer["layers"], 61);
        assert_eq!(answer["resolved"]["hidden"], 7168);
        let giga = answer["flops_per_token"].as_f64().expect("a number") / 1e9;
        assert_eq!(format!("{giga:.2}"), "259.99");
    }
}
