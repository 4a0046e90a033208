//! [`Model`]: what a language model is, as far as planning and running its training needs.
//!
//! Lowered once from a Hugging Face configuration by [`hf`]; nothing past this module knows a key
//! of such a file. Layers are listed one by one, since real models mix kinds of layer. Parameter
//! and FLOP counts are in [`count`]; the models this program knows by name are in [`presets`].

pub mod count;
mod describe;
mod error;
mod features;
pub mod hf;
pub mod presets;
mod resolve;

pub use describe::{Description, describe};
pub use error::ModelError;
pub use features::{Feature, features};

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
    /// Parameters that no term of the layers covers (model-wide mixers and the like).
    pub extra_params: u64,
}

/// A rescaling of rotary frequencies: no effect on counts, but on what is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// `yarn`, `llama3`, `longrope`, `linear`, ...
    pub kind: String,
    /// The stretch of the context, where the configuration states one.
    pub factor: Option<f64>,
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

/// What mixes information between positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixer {
    /// Softmax attention with grouped key/value heads (multi-head is the case of equal counts).
    Gqa(Gqa),
    /// Multi-head latent attention.
    Mla(Mla),
    /// Shared-key/value latent attention with grouped low-rank output (DeepSeek-V4).
    SharedKv(SharedKv),
    /// A recurrent or linear-attention mixer.
    Linear(LinearMixer),
}

/// Grouped-query attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent traits of real models, each present or not"
)]
pub struct Gqa {
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Bias on the q, k and v projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
    /// Normalization of queries and keys.
    pub qk_norm: QkNorm,
    /// A gate on the output, projected with the query (doubles the query projection).
    pub output_gate: bool,
    /// Leading part of a head that is rotated; 0 where the layer uses no rotary embedding.
    pub rotary_dim: u64,
    /// Keys a query sees at most, where limited (a sliding window).
    pub window: Option<u64>,
    /// Length of the chunks that attention does not cross, where it is chunked (Llama 4).
    pub chunk: Option<u64>,
    /// One learned sink logit a head.
    pub sinks: bool,
    /// Factor on the attention logits, where it is not `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Queries, keys and values are clipped to plus or minus this, where they are.
    pub clip: Option<f64>,
}

/// Normalization of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// A weight of one head's width, shared by the heads.
    PerHead,
    /// A weight over the whole projection.
    Full,
    /// No weight.
    Weightless,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Heads.
    pub heads: u64,
    /// Width of the compressed query; absent where queries are projected directly.
    pub q_lora_rank: Option<u64>,
    /// Width of the compressed keys and values.
    pub kv_lora_rank: u64,
    /// Unrotated width of a query or key head.
    pub qk_nope_head_dim: u64,
    /// Rotated width of a query or key head.
    pub qk_rope_head_dim: u64,
    /// Width of a value head.
    pub v_head_dim: u64,
    /// A lightning indexer that selects keys (DeepSeek-V3.2, GLM-5).
    pub indexer: Option<Indexer>,
}

/// The key selector of sparse attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// Index heads.
    pub heads: u64,
    /// Width of an index head.
    pub head_dim: u64,
    /// Keys attended to.
    pub topk: u64,
    /// The layer attends to the keys that an earlier layer selected, and has no indexer of its own.
    pub shared: bool,
}

/// DeepSeek-V4 attention: one shared key/value head, low-rank query, grouped low-rank output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedKv {
    /// Query heads.
    pub heads: u64,
    /// Width of a head (and of the shared key/value).
    pub head_dim: u64,
    /// Width of the compressed query.
    pub q_lora_rank: u64,
    /// Width of one group's compressed output.
    pub o_lora_rank: u64,
    /// Output groups.
    pub o_groups: u64,
    /// Leading part of a head that is rotated.
    pub rotary_dim: u64,
    /// Local window.
    pub window: u64,
    /// Compression of distant keys: 0 for none.
    pub compress_ratio: u64,
    /// Keys selected among the compressed ones, where an indexer selects.
    pub indexer: Option<Indexer>,
    /// Parameters of the compressor and indexer together.
    pub compressor_params: u64,
}

/// A mixer whose cost is linear in the sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearMixer {
    /// Which one.
    pub kind: LinearKind,
    /// Value heads: one state each.
    pub heads: u64,
    /// Key heads, or groups that share keys and queries (Mamba-2's B and C).
    pub key_heads: u64,
    /// Taps of the short convolution before the recurrence; 0 for none.
    pub conv_kernel: u64,
    /// Width of a key (or of the state).
    pub key_dim: u64,
    /// Width of a value.
    pub value_dim: u64,
    /// Width of the input projection: all that is projected from the residual stream.
    pub in_proj: u64,
    /// Width entering the output projection.
    pub out_proj: u64,
    /// Parameters besides the two projections (convolutions, gates, norms).
    pub extra_params: u64,
}

/// Kinds of linear mixer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearKind {
    /// Gated DeltaNet (Qwen3-Next).
    GatedDeltaNet,
    /// Lightning attention (MiniMax-Text-01).
    Lightning,
    /// Mamba-2 (Nemotron-H).
    Mamba2,
}

/// The feed-forward block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ffn {
    /// One MLP for every token.
    Dense(Mlp),
    /// Routed experts.
    Moe(Moe),
}

/// An MLP: gated (three matrices) or not (two).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Inner width.
    pub width: u64,
    /// Whether a gate multiplies the inner activation.
    pub gated: bool,
    /// Biases on its matrices.
    pub bias: bool,
    /// What bends the inner activation.
    pub activation: Activation,
}

/// The function of an MLP's inner activation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`; with a gate, SwiGLU.
    Silu,
    /// `max(x, 0)^2` (Nemotron-H).
    Relu2,
    /// SwiGLU whose gate and inner activation are clipped to this limit (DeepSeek-V4).
    ClippedSilu(f64),
    /// `min(x, limit) * sigmoid(1.702 x)` times the clipped inner activation plus one (GPT-OSS).
    ClippedGelu(f64),
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Routed experts.
    pub experts: u64,
    /// Experts a token is sent to.
    pub topk: u64,
    /// Each expert.
    pub expert: Mlp,
    /// An MLP that every token passes besides.
    pub shared: Option<SharedExpert>,
    /// How tokens are scored.
    pub router: Router,
}

/// The shared expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpert {
    /// Its MLP; several shared experts are one of their summed width.
    pub mlp: Mlp,
    /// Output multiplied by `sigmoid(x . w)`.
    pub gated_output: bool,
}

/// How a router scores and selects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent traits of real models, each present or not"
)]
pub struct Router {
    /// From logits to scores.
    pub score: Score,
    /// Selected scores are divided by their sum.
    pub normalize: bool,
    /// Factor on the selected scores.
    pub scale: f64,
    /// A bias on the logits (a parameter).
    pub bias: bool,
    /// A bias used for selection only (a buffer, not a parameter).
    pub correction_bias: bool,
    /// Group-limited selection.
    pub groups: Option<RouterGroups>,
    /// Coefficient of the load-balancing loss in the configuration; 0 where absent.
    pub aux_loss_coef: f64,
    /// The score multiplies the expert's input instead of its output (Llama 4).
    pub scales_input: bool,
}

/// From router logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Softmax over all experts, then top-k.
    SoftmaxThenTopk,
    /// Top-k, then softmax over the chosen.
    TopkThenSoftmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Square root of softplus of each logit.
    SqrtSoftplus,
    /// Two sequential masked argmax (Phi-3.5-MoE).
    SparseMixer,
    /// A fixed table from token ids.
    Hash,
}

/// Group-limited routing: only experts of the best groups are eligible.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterGroups {
    /// Groups the experts are divided into.
    pub groups: u64,
    /// Groups kept a token.
    pub topk: u64,
    /// Experts of a group whose scores add up to the group's score: 1 in DeepSeek-V2, 2 in V3.
    pub scored_by: u64,
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
    /// Layers with routed experts (MTP depths not counted).
    pub fn num_moe_layers(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| layer.moe().is_some())
            .count()
    }

    /// The experts of the first MoE layer: every model read so far has one shape of them.
    pub fn moe(&self) -> Option<&Moe> {
        self.layers.iter().find_map(Layer::moe)
    }
}
