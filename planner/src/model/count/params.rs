//! Parameter counts, by layer and by how each part is sharded.
//!
//! Tensor parallelism divides what [`LayerParams::sharded`] sums, expert parallelism times expert
//! tensor parallelism divides the experts, nothing but data parallelism's optimizer shards divides
//! the rest. The division follows Megatron-Core's layers.

use serde::Serialize;

use crate::model::{
    Ffn, Gqa, Layer, LinearMixer, Mixer, Mla, Mlp, Model, Moe, NormKind, QkNorm, SharedKv,
};

/// All parameters of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Params {
    /// The input embedding.
    pub embedding: u64,
    /// The head (and its bias); 0 where it is the embedding.
    pub head: u64,
    /// The last norm and parameters beside the layers; replicated.
    pub last_norm: u64,
    /// Each layer.
    pub layers: Vec<LayerParams>,
    /// Each multi-token-prediction depth; not part of any total.
    pub mtp: Vec<MtpParams>,
    /// Parameters of the head that a token's logits use even where it is the embedding.
    tied_head: u64,
}

/// The parameters of one layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LayerParams {
    /// Of the mixer, divided by tensor parallelism.
    pub mixer: u64,
    /// Of the mixer, whole on every rank: low-rank down-projections, indexers, norms of heads.
    pub mixer_replicated: u64,
    /// Of a dense MLP, divided by tensor parallelism.
    pub dense: u64,
    /// Of the shared expert, divided by tensor parallelism.
    pub shared: u64,
    /// Of all routed experts together, divided by expert and expert tensor parallelism.
    pub experts: u64,
    /// Of the routed experts that one token uses.
    pub experts_active: u64,
    /// Of the router and the shared expert's gate; replicated.
    pub router: u64,
    /// Of the norms before the blocks and whatever else the layer holds; replicated.
    pub norms: u64,
}

/// The parameters of one multi-token-prediction depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MtpParams {
    /// Its layer.
    pub layer: LayerParams,
    /// The projection of embedding and hidden state together, `2h -> h`; divided by tensor
    /// parallelism.
    pub projection: u64,
    /// The norms of embedding, hidden state and output; replicated.
    pub norms: u64,
}

impl LayerParams {
    /// Divided by tensor parallelism.
    pub fn sharded(&self) -> u64 {
        self.mixer + self.dense + self.shared
    }

    /// Whole on every tensor-parallel rank.
    pub fn replicated(&self) -> u64 {
        self.mixer_replicated + self.router + self.norms
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.sharded() + self.replicated() + self.experts
    }

    /// What one token uses.
    pub fn active(&self) -> u64 {
        self.sharded() + self.replicated() + self.experts_active
    }
}

impl MtpParams {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.layer.total() + self.projection + self.norms
    }
}

impl Params {
    /// All parameters but multi-token prediction's.
    pub fn total(&self) -> u64 {
        let layers: u64 = self.layers.iter().map(LayerParams::total).sum();
        layers + self.embedding + self.head + self.last_norm
    }

    /// Parameters of the layers that one token uses, without embedding and head: the `body`
    /// convention.
    pub fn active_body(&self) -> u64 {
        let layers: u64 = self.layers.iter().map(LayerParams::active).sum();
        layers + self.last_norm
    }

    /// The body and the head, without the input embedding. A tied matrix counts as the head.
    pub fn active_without_embedding(&self) -> u64 {
        self.active_body() + self.head + self.tied_head
    }

    /// Every parameter that one token's step touches, both embeddings included.
    pub fn active(&self) -> u64 {
        self.active_body() + self.head + self.embedding
    }

    /// Parameters of multi-token prediction. Embedding and head are shared with the model.
    pub fn mtp(&self) -> u64 {
        self.mtp.iter().map(MtpParams::total).sum()
    }

    /// Parameters of all routed experts.
    pub fn experts(&self) -> u64 {
        self.layers.iter().map(|layer| layer.experts).sum()
    }
}

/// Counts a model's parameters.
pub fn params(model: &Model) -> Params {
    let matrix = model.vocab_size * model.hidden;
    let bias = if model.head_bias { model.vocab_size } else { 0 };
    Params {
        embedding: matrix,
        head: if model.tied_embeddings { 0 } else { matrix } + bias,
        tied_head: if model.tied_embeddings { matrix } else { 0 },
        last_norm: last_norm(model),
        layers: model.layers.iter().map(|l| layer(model, l)).collect(),
        mtp: mtp(model).collect(),
    }
}

/// Counts the last norm and parameters beside the layers.
pub fn last_norm(model: &Model) -> u64 {
    norm_params(model) + model.extra_params
}

/// Counts each multi-token-prediction depth.
pub fn mtp(model: &Model) -> impl Iterator<Item = MtpParams> {
    model.mtp.iter().map(|depth| MtpParams {
        layer: layer(model, depth),
        projection: 2 * model.hidden * model.hidden,
        norms: 3 * norm_params(model),
    })
}

/// Counts one layer's parameters.
pub fn layer(model: &Model, layer: &Layer) -> LayerParams {
    let hidden = model.hidden;
    let mut count = LayerParams {
        norms: layer.extra_params,
        ..LayerParams::default()
    };
    if let Some(mixer) = &layer.mixer {
        let (sharded, replicated) = match mixer {
            Mixer::Gqa(gqa) => self::gqa(gqa, hidden),
            Mixer::Mla(mla) => self::mla(mla, hidden),
            Mixer::SharedKv(shared_kv) => self::shared_kv(shared_kv, hidden),
            Mixer::Linear(linear) => (self::linear(linear, hidden), 0),
        };
        count.mixer = sharded;
        count.mixer_replicated = replicated;
        count.norms += norm_params(model);
    }
    match &layer.ffn {
        None => {}
        Some(Ffn::Dense(mlp)) => {
            count.dense = self::mlp(mlp, hidden);
            count.norms += norm_params(model);
        }
        Some(Ffn::Moe(moe)) => {
            let each = self::mlp(&moe.expert, hidden);
            count.experts = each * moe.experts;
            count.experts_active = each * moe.topk;
            count.shared = moe
                .shared
                .as_ref()
                .map_or(0, |shared| self::mlp(&shared.mlp, hidden));
            count.router = router(moe, hidden);
            count.norms += norm_params(model);
        }
    }
    count
}

fn norm_params(model: &Model) -> u64 {
    match model.norm.kind {
        NormKind::LayerNormBias => 2 * model.hidden,
        NormKind::Rms | NormKind::RmsZeroCentred | NormKind::LayerNorm => model.hidden,
    }
}

/// Two matrices, three with a gate; a bias is one vector an output.
fn mlp(mlp: &Mlp, hidden: u64) -> u64 {
    let inner = if mlp.gated { 2 } else { 1 };
    let biases = if mlp.bias {
        inner * mlp.width + hidden
    } else {
        0
    };
    (inner + 1) * hidden * mlp.width + biases
}

fn router(moe: &Moe, hidden: u64) -> u64 {
    let bias = if moe.router.bias { moe.experts } else { 0 };
    let gate = match &moe.shared {
        Some(shared) if shared.gated_output => hidden,
        _ => 0,
    };
    moe.experts * hidden + bias + gate
}

fn gqa(gqa: &Gqa, hidden: u64) -> (u64, u64) {
    let queries = gqa.heads * gqa.head_dim;
    let projected_queries = if gqa.output_gate {
        2 * queries
    } else {
        queries
    };
    let keys = gqa.kv_heads * gqa.head_dim;
    let projected = projected_queries + 2 * keys;
    let mut sharded = hidden * projected + queries * hidden;
    let mut replicated = 0;
    if gqa.qkv_bias {
        sharded += projected;
    }
    if gqa.out_bias {
        // Added once, after the partial sums are reduced.
        replicated += hidden;
    }
    if gqa.sinks {
        sharded += gqa.heads;
    }
    match gqa.qk_norm {
        QkNorm::None | QkNorm::Weightless => {}
        QkNorm::PerHead => replicated += 2 * gqa.head_dim,
        QkNorm::Full => sharded += queries + keys,
    }
    (sharded, replicated)
}

/// DeepSeek-V2 (arXiv 2405.04434), equations 9 to 18; the down-projections and their norms are
/// whole on every rank.
fn mla(mla: &Mla, hidden: u64) -> (u64, u64) {
    let qk = mla.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    let values = mla.heads * mla.v_head_dim;
    let kv_up = mla.kv_lora_rank * mla.heads * (mla.qk_nope_head_dim + mla.v_head_dim);
    let mut sharded = kv_up + values * hidden;
    let mut replicated = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank;
    match mla.q_lora_rank {
        None => sharded += hidden * qk,
        Some(rank) => {
            sharded += rank * qk;
            replicated += hidden * rank + rank;
        }
    }
    if let Some(indexer) = mla.indexer.as_ref().filter(|indexer| !indexer.shared) {
        // Query up-projection, one key head with a layer norm, a weight a head.
        let queries = mla.q_lora_rank.unwrap_or(hidden) * indexer.heads * indexer.head_dim;
        let keys = hidden * indexer.head_dim + 2 * indexer.head_dim;
        replicated += queries + keys + hidden * indexer.heads;
    }
    (sharded, replicated)
}

fn shared_kv(shared: &SharedKv, hidden: u64) -> (u64, u64) {
    let queries = shared.heads * shared.head_dim;
    let sharded = shared.q_lora_rank * queries
        + shared.o_lora_rank * queries
        + shared.o_groups * shared.o_lora_rank * hidden
        + shared.heads;
    let replicated = hidden * shared.q_lora_rank
        + shared.q_lora_rank
        + hidden * shared.head_dim
        + shared.head_dim
        + shared.compressor_params;
    (sharded, replicated)
}

/// All of it follows the heads, but for norms too small to tell apart.
fn linear(linear: &LinearMixer, hidden: u64) -> u64 {
    hidden * (linear.in_proj + linear.out_proj) + linear.extra_params
}
