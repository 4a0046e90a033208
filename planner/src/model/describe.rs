//! [`describe`]: a model at a glance, as `moefold models NAME` shows it.

use serde::Serialize;

use super::count::{flops_per_token, params};
use super::features::features;
use super::{Ffn, Model};

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
        features: features(model).into_iter().map(|f| f.name()).collect(),
        resolved: model.clone(),
    }
}
