//! Mixers: what moves information between positions (attention of several kinds, recurrences).
//!
//! Shapes and traits only; what they cost is in [`super::count`] and in the planner's lowering.

use serde::{Deserialize, Serialize};

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

impl Mixer {
    /// How much of a head it rotates, where it rotates any.
    pub fn rotary_dim(&self) -> Option<u64> {
        let width = match self {
            Self::Gqa(gqa) => gqa.rotary_dim,
            Self::Mla(mla) => mla.qk_rope_head_dim,
            Self::SharedKv(kv) => kv.rotary_dim,
            Self::Linear(_) => 0,
        };
        (width > 0).then_some(width)
    }
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
    /// Whether neighbours of the rotated part are a pair; else element `i` and `i` plus half of its width.
    #[serde(default = "interleaved")]
    pub rope_interleave: bool,
    /// A lightning indexer that selects keys (DeepSeek-V3.2, GLM-5).
    pub indexer: Option<Indexer>,
}

/// What models are that do not say.
fn interleaved() -> bool {
    true
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

impl LinearMixer {
    /// Gated DeltaNet of so many value heads, key heads, and their widths: one projection to queries, keys, values and the gate,
    /// another to two scalars a value head; a depthwise convolution over queries, keys and values.
    pub(crate) fn gated_delta_net(
        [heads, key_heads]: [u64; 2],
        [key_dim, value_dim]: [u64; 2],
        conv_kernel: u64,
    ) -> Self {
        let (keys, values) = (key_heads * key_dim, heads * value_dim);
        Self {
            kind: LinearKind::GatedDeltaNet,
            heads,
            key_heads,
            conv_kernel,
            key_dim,
            value_dim,
            in_proj: 2 * keys + 2 * values + 2 * heads,
            out_proj: values,
            // Convolution; A and the time-step bias of each head; the norm of a value head.
            extra_params: conv_kernel * (2 * keys + values) + 2 * heads + value_dim,
        }
    }
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
