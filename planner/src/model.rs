//! [`Model`]: what a language model is, as far as planning and running its training needs.
//!
//! Lowered once from a Hugging Face configuration by [`hf`]; nothing past this module knows a key
//! of such a file. Layers are listed one by one, since real models mix kinds of layer. Parameter
//! and FLOP counts are in [`count`]; the models this program knows by name are in [`presets`].

pub(crate) mod bounds;
pub mod count;
mod describe;
mod error;
mod features;
mod ffn;
pub mod hf;
mod mixer;
pub mod presets;
mod resolve;

pub use describe::{Description, describe};
pub use error::ModelError;
pub use features::{Feature, features};
pub use ffn::{Activation, Ffn, Mlp, Moe, Router, RouterGroups, Score, SharedExpert};
pub use mixer::{Gqa, Indexer, LinearKind, LinearMixer, Mixer, Mla, QkNorm, SharedKv};

use serde::{Deserialize, Serialize};

/// A decoder-only language model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Preset name, or the name of the file or folder it was read from.
    pub name: String,
    /// The `model_type` of the configuration.
    pub model_type: String,
    /// Vocabulary size, unpadded.
    pub vocab_size: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Parallel residual streams (mHC); 1 in every ordinary model.
    pub residual_streams: u64,
    /// Decoder layers in order.
    pub layers: Vec<Layer>,
    /// Multi-token-prediction depths, each a projection `2h -> h` with two norms and one layer.
    pub mtp: Vec<Layer>,
    /// Whether embedding and head are one matrix.
    pub tied_embeddings: bool,
    /// A bias on the head.
    pub head_bias: bool,
    /// The norm before every block and before the head.
    pub norm: Norm,
    /// Rotary base; absent where positions are not rotated.
    pub rope_theta: Option<f64>,
    /// Rescaling of rotary frequencies for long contexts, where the configuration asks for one.
    pub rope_scaling: Option<RopeScaling>,
    /// Constant factors on the residual stream; all 1 in ordinary models.
    pub scalars: Scalars,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Longest sequence the configuration was made for.
    pub max_position: Option<u64>,
    /// Share of attention's weights that training drops at random.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attention_dropout: f64,
    /// Parameters that no term of the layers covers (model-wide mixers and the like).
    pub extra_params: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands over a reference"
)]
fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

/// A rescaling of rotary frequencies: no effect on counts, but on what is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// `yarn`, `llama3`, `longrope`, `linear`, ...
    pub kind: String,
    /// The stretch of the context, where the configuration states one.
    pub factor: Option<f64>,
    /// The rest of what `yarn` says; absent of every other kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yarn: Option<Yarn>,
    /// The rest of what `llama3` says; absent of every other kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llama3: Option<Llama3>,
}

/// Llama 3.1's scaling (transformers, `rope_type` `llama3`): pairs that turn often over the original positions keep
/// their frequency, those that turn seldom are slowed by [`RopeScaling::factor`], and between them is a ramp over
/// turns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3 {
    /// Positions of the training that is stretched.
    pub original_max_position: u64,
    /// Turns over those positions up to which a frequency is divided by the whole factor.
    pub low_freq_factor: f64,
    /// Turns from which on a frequency is kept.
    pub high_freq_factor: f64,
}

/// YaRN (arXiv 2309.00071, section 3.2): pairs that turn often keep their frequency, those that turn seldom
/// are slowed by [`RopeScaling::factor`], and between them is a ramp.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// Positions of the training that is stretched.
    pub original_max_position: u64,
    /// Turns over those positions from which on a frequency is kept.
    pub beta_fast: f64,
    /// Turns up to which a frequency is divided by the whole factor.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
    /// Factor on cosines and sines, where it is not that of `mscale` and `mscale_all_dim`.
    pub attention_factor: Option<f64>,
    /// Weight of `ln factor` in the factor on cosines and sines.
    pub mscale: Option<f64>,
    /// The same in what divides it. DeepSeek's attention has its square on the softmax scale instead.
    pub mscale_all_dim: Option<f64>,
}

/// Constant factors (Granite's multipliers, MiniMax-Text-01's post-norm residual weights). They have
/// no parameters and no matrix products, but a runtime that ignores them computes another model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scalars {
    /// On the embedding output.
    pub embedding: f64,
    /// On each block's output before it joins the residual stream.
    pub residual: f64,
    /// Logits are divided by it.
    pub logits: f64,
    /// On the residual stream where a block's output joins it.
    pub skip: f64,
    /// The residual stream continues from the normed input instead of from the raw one.
    pub post_norm: bool,
}

impl Default for Scalars {
    fn default() -> Self {
        Self {
            embedding: 1.0,
            residual: 1.0,
            logits: 1.0,
            skip: 1.0,
            post_norm: false,
        }
    }
}

/// One decoder layer: a token mixer, a feed-forward block, or both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// What mixes tokens; absent in blocks of hybrids that are feed-forward only.
    pub mixer: Option<Mixer>,
    /// The feed-forward block; absent in blocks of hybrids that are mixers only.
    pub ffn: Option<Ffn>,
    /// Parameters of the layer that no other term covers (extra norms, stream mixers).
    pub extra_params: u64,
}

/// A normalization of the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    /// Which one.
    pub kind: NormKind,
    /// Added under the root.
    pub eps: f64,
}

/// Kinds of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Root mean square, a weight.
    Rms,
    /// Root mean square with weight `1 + w`.
    RmsZeroCentred,
    /// Mean and variance, a weight.
    LayerNorm,
    /// Mean and variance, a weight and a bias.
    LayerNormBias,
}

impl Layer {
    /// The experts of the layer, where it has any.
    pub fn moe(&self) -> Option<&Moe> {
        match &self.ffn {
            Some(Ffn::Moe(moe)) => Some(moe),
            _ => None,
        }
    }
}

impl Model {
    /// A decoder layer by its number in checkpoints, where those of multi-token prediction follow the others.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn layer(&self, index: u32) -> &Layer {
        let mut all = self.layers.iter().chain(&self.mtp);
        all.nth(index as usize).expect("a layer of the model")
    }

    /// Layers with routed experts (MTP depths not counted).
    pub fn num_moe_layers(&self) -> usize {
        self.moe_layers().count()
    }

    /// Which layers have routed experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = u32> {
        let layers = (0..).zip(&self.layers);
        layers.filter_map(|(index, layer)| layer.moe().map(|_| index))
    }

    /// The experts of the first MoE layer: every model read so far has one shape of them.
    pub fn moe(&self) -> Option<&Moe> {
        self.layers.iter().find_map(Layer::moe)
    }
}
