//! FLOPs per token of one training step, in the convention of Megatron's throughput metric.
//!
//! The convention (`num_floating_point_operations` in Megatron-LM's `training.py`, and its mirror
//! `flop_utils.py` in Megatron-Bridge): matrix products of the forward pass times three for the
//! backward pass, two operations a multiply-add, causal attention at half the square. MTP depths
//! count as further layers, each with its projection and its own logits. Not counted: the router's
//! product, norms, softmax, rotary embedding, the embedding look-up, the optimizer, recomputation.
//! Windowed layers count at their window, as in Bridge since 26.06; Megatron-LM gives no discount, nor did
//! Bridge before ([`FlopRules::windows`]).
//!
//! Layers that the transformer formula does not cover count as Megatron's and Bridge's functions for
//! them have it: Mamba-2 with an inner width of `2h` whatever the model's is and a scan of 7
//! operations a state element; gated DeltaNet with four products of a head's state; DeepSeek-V4 with
//! its window, its compressed keys and its indexer. Lightning attention, which Megatron lacks, counts
//! its projections and one update and one read of the state. An indexer over latent attention
//! (DeepSeek-V3.2, GLM-5) counts as the model has it: its projections, its scores over all keys, and attention over
//! the chosen ones. Bridge's term for it follows how its own kernels absorb projections. So no step needs fewer
//! FLOPs than are counted, and none is done above the peak.
//!
//! It is a metric to quote throughput in; what an op really costs is the planner's business.

use moefold_profiles::units::Flops;

use crate::model::{Ffn, Gqa, LinearKind, LinearMixer, Mixer, Mla, Mlp, Model, SharedKv};

/// Variations of the convention that publishers have used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlopRules {
    /// Vocabulary after padding to a multiple of the tensor-parallel degree, where it is padded.
    pub padded_vocab: Option<u64>,
    /// Attention counted at half the square (Megatron since March 2025) instead of in full.
    pub causal: bool,
    /// Windowed layers counted at their window (Megatron-Bridge since May 2026).
    pub windows: bool,
}

impl Default for FlopRules {
    fn default() -> Self {
        Self {
            padded_vocab: None,
            causal: true,
            windows: true,
        }
    }
}

/// FLOPs of one token in one training step (forward and backward) at a sequence length.
pub fn flops_per_token(model: &Model, seq_len: u64) -> Flops {
    flops_per_token_with(model, seq_len, FlopRules::default())
}

/// FLOPs of one token under other rules than the current ones.
pub fn flops_per_token_with(model: &Model, seq_len: u64, rules: FlopRules) -> Flops {
    let hidden = model.hidden as f64;
    let layers = model.layers.iter().chain(&model.mtp);
    let blocks: f64 = layers
        .map(|layer| {
            let mixer = layer
                .mixer
                .as_ref()
                .map_or(0.0, |mixer| mixer_madds(mixer, hidden, seq_len, rules));
            let ffn = layer.ffn.as_ref().map_or(0.0, |ffn| ffn_madds(ffn, hidden));
            mixer + ffn
        })
        .sum();
    let depths = model.mtp.len() as f64;
    let projections = depths * (3.0 * hidden + 2.0 * hidden * hidden);
    let vocab = rules.padded_vocab.unwrap_or(model.vocab_size) as f64;
    let logits = hidden * vocab * (1.0 + depths);
    Flops(6.0 * (blocks + projections + logits))
}

fn ffn_madds(ffn: &Ffn, hidden: f64) -> f64 {
    match ffn {
        Ffn::Dense(mlp) => mlp_madds(mlp, hidden),
        Ffn::Moe(moe) => {
            let shared = moe
                .shared
                .as_ref()
                .map_or(0.0, |shared| mlp_madds(&shared.mlp, hidden));
            moe.topk as f64 * mlp_madds(&moe.expert, hidden) + shared
        }
    }
}

fn mlp_madds(mlp: &Mlp, hidden: f64) -> f64 {
    let matrices = if mlp.gated { 3.0 } else { 2.0 };
    matrices * hidden * mlp.width as f64
}

/// Multiply-adds of one token in the forward pass.
fn mixer_madds(mixer: &Mixer, hidden: f64, seq_len: u64, rules: FlopRules) -> f64 {
    match mixer {
        Mixer::Gqa(gqa) => gqa_madds(gqa, hidden, seq_len, rules),
        Mixer::Mla(mla) => mla_madds(mla, hidden, seq_len, rules),
        Mixer::SharedKv(shared) => shared_kv_madds(shared, hidden, seq_len),
        Mixer::Linear(linear) => linear_madds(linear, hidden),
    }
}

/// Keys a query meets on average.
fn mean_keys(limit: Option<u64>, seq_len: u64, rules: FlopRules) -> f64 {
    let seq = seq_len as f64;
    match limit.filter(|limit| rules.windows && *limit < seq_len) {
        // A triangle of `window` keys, then a band: W - W (W - 1) / (2 S).
        Some(window) => {
            let window = window as f64;
            window - window * (window - 1.0) / (2.0 * seq)
        }
        None if rules.causal => seq / 2.0,
        None => seq,
    }
}

fn gqa_madds(gqa: &Gqa, hidden: f64, seq_len: u64, rules: FlopRules) -> f64 {
    let queries = (gqa.heads * gqa.head_dim) as f64;
    let keys = (gqa.kv_heads * gqa.head_dim) as f64;
    let gate = if gqa.output_gate { queries } else { 0.0 };
    let linear = hidden * (queries + gate + 2.0 * keys) + queries * hidden;
    let mean = match gqa.chunk.filter(|chunk| rules.windows && *chunk < seq_len) {
        Some(chunk) => chunk as f64 / 2.0,
        None => mean_keys(gqa.window, seq_len, rules),
    };
    linear + 2.0 * queries * mean
}

/// Megatron's terms for latent attention, with its `+ 1` for each low rank's norm.
fn mla_madds(mla: &Mla, hidden: f64, seq_len: u64, rules: FlopRules) -> f64 {
    let heads = mla.heads as f64;
    let (nope, rope) = (mla.qk_nope_head_dim as f64, mla.qk_rope_head_dim as f64);
    let (value, kv_rank) = (mla.v_head_dim as f64, mla.kv_lora_rank as f64);
    let query = match mla.q_lora_rank {
        None => hidden * heads * (nope + rope),
        Some(rank) => rank as f64 * (hidden + heads * (nope + rope) + 1.0),
    };
    let linear = query
        + kv_rank * (hidden + heads * (nope + value) + 1.0)
        + hidden * rope
        + heads * value * hidden;
    let indexer = mla.indexer.as_ref().filter(|_| rules.windows);
    let index = indexer
        .filter(|indexer| !indexer.shared)
        .map_or(0.0, |indexer| {
            let (index_heads, index_width) = (indexer.heads as f64, indexer.head_dim as f64);
            let query = mla.q_lora_rank.unwrap_or(0) as f64 * index_heads * index_width;
            let score = index_heads * index_width * mean_keys(None, seq_len, rules);
            query + hidden * (index_width + index_heads) + score
        });
    let mean = mean_keys(indexer.map(|indexer| indexer.topk), seq_len, rules);
    linear + heads * (nope + rope + value) * mean + index
}

fn shared_kv_madds(shared: &SharedKv, hidden: f64, seq_len: u64) -> f64 {
    let heads = shared.heads as f64;
    let width = shared.head_dim as f64;
    let rank = shared.q_lora_rank as f64;
    let (o_rank, o_groups) = (shared.o_lora_rank as f64, shared.o_groups as f64);
    let seq = seq_len as f64;
    let linear = rank * (hidden + heads * width + 1.0)
        + hidden * width
        + width
        + heads * width * o_rank
        + o_groups * o_rank * hidden;
    let window = shared.window as f64;
    let ratio = shared.compress_ratio as f64;
    let (keys, selection) = match &shared.indexer {
        _ if shared.compress_ratio == 0 => (window, 0.0),
        None => (window + seq / ratio / 2.0, 2.0 * hidden * width),
        Some(indexer) => {
            let chosen = (indexer.topk as f64).min((seq / ratio).floor());
            let mean = chosen * (1.0 - chosen * ratio / (2.0 * seq));
            let (index_heads, index_width) = (indexer.heads as f64, indexer.head_dim as f64);
            let compress = 4.0 * hidden * width + 4.0 * hidden * index_width;
            let project = rank * index_heads * index_width + hidden * index_heads;
            let score = index_heads * index_width * seq / ratio;
            (window + mean, compress + project + score)
        }
    };
    linear + 2.0 * heads * width * keys + selection
}

fn linear_madds(linear: &LinearMixer, hidden: f64) -> f64 {
    let heads = linear.heads as f64;
    let (key, value) = (linear.key_dim as f64, linear.value_dim as f64);
    match linear.kind {
        // Bridge's `gdn_layer_flops`: projections, convolution, four products with the state.
        LinearKind::GatedDeltaNet => {
            let all_keys = linear.key_heads as f64 * key;
            let all_values = heads * value;
            hidden * linear.in_proj as f64
                + linear.conv_kernel as f64 * (2.0 * all_keys + all_values)
                + 4.0 * heads * value * value
                + hidden * all_values
        }
        // Megatron's `mamba_layer_flops`, which takes an inner width of 2h whatever the model's is.
        LinearKind::Mamba2 => {
            let inner = 2.0 * hidden;
            hidden * (2.0 * inner + 2.0 * linear.key_heads as f64 * key + heads)
                + 3.5 * inner * key
                + inner * hidden
        }
        // Megatron has no such layer: projections, an update and a read of each head's state.
        LinearKind::Lightning => {
            hidden * (linear.in_proj + linear.out_proj) as f64 + 2.0 * heads * key * value
        }
    }
}
