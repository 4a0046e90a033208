//! [`features`]: the architectural traits of a model, by name.
//!
//! A runtime matches on them to say what it does not run; a person reads them to see what a model
//! is made of. A trait says nothing of sizes.

use std::fmt;

use super::{
    Activation, Ffn, Layer, LinearKind, Mixer, Mlp, Model, Moe, NormKind, QkNorm, RopeScaling,
    Score,
};

macro_rules! features {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// An architectural trait.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Feature {
            $($(#[$doc])* $variant,)*
        }

        impl Feature {
            /// Every trait there is.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// What people call it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

features! {
    /// Softmax attention with grouped (or equal) key/value heads.
    GroupedQueryAttention = "grouped-query attention",
    /// Multi-head latent attention.
    LatentAttention = "multi-head latent attention",
    /// DeepSeek-V4's attention.
    SharedKvAttention = "shared-KV compressed attention",
    /// An indexer that selects keys.
    SparseIndexer = "sparse attention with an indexer",
    /// Gated DeltaNet layers.
    GatedDeltaNet = "gated DeltaNet",
    /// Lightning attention layers.
    LightningAttention = "lightning attention",
    /// Mamba-2 layers.
    Mamba2 = "Mamba-2",
    /// Blocks that are a mixer or a feed-forward block only.
    SingleBlockLayers = "layers of a single block",
    /// Sliding windows.
    SlidingWindow = "sliding-window attention",
    /// Chunked attention.
    ChunkedAttention = "chunked attention",
    /// Attention layers without rotary embedding.
    NoRotary = "attention without rotary embedding",
    /// A part of each head is rotated.
    PartialRotary = "partial rotary embedding",
    /// Layers that differ in how much of a head they rotate.
    RotaryWidths = "rotary embeddings of several widths",
    /// Rescaled rotary frequencies, of any kind but the next.
    RotaryScaling = "rotary scaling",
    /// Rotary frequencies rescaled as Llama 3.1 has them.
    Llama3Scaling = "Llama-3 rotary scaling",
    /// Rotary frequencies rescaled by YaRN.
    Yarn = "YaRN rotary scaling",
    /// Biases on query, key and value projections.
    QkvBias = "attention biases on q, k, v",
    /// A bias on the output projection.
    OutBias = "attention output bias",
    /// A norm on each query and key head.
    QkNormPerHead = "per-head QK norm",
    /// A norm over whole query and key projections.
    QkNormFull = "full-width QK norm",
    /// A norm without weight on queries and keys.
    QkNormWeightless = "weightless QK norm",
    /// A gate on attention's output.
    AttentionOutputGate = "attention output gate",
    /// Learned sink logits.
    AttentionSinks = "attention sinks",
    /// Clipped queries, keys and values.
    QkvClip = "clipped q, k, v",
    /// Weights of attention that training drops at random.
    AttentionDropout = "attention dropout",
    /// A softmax scale of its own.
    AttentionScale = "attention multiplier",
    /// A dense MLP on some layer.
    DenseLayers = "dense layers",
    /// Routed experts.
    Experts = "routed experts",
    /// A shared expert.
    SharedExpert = "shared expert",
    /// A shared expert behind a sigmoid gate.
    GatedSharedExpert = "gated shared expert",
    /// Softmax over all experts.
    SoftmaxRouter = "softmax-then-top-k router",
    /// Softmax over the chosen experts.
    TopkSoftmaxRouter = "top-k-then-softmax router",
    /// Sigmoid scores.
    SigmoidRouter = "sigmoid router",
    /// Square-root-of-softplus scores.
    SqrtSoftplusRouter = "sqrt-softplus router",
    /// Phi's routing.
    SparseMixerRouter = "sparsemixer router",
    /// A table from token ids.
    HashRouter = "hash-routed layers",
    /// A bias on router logits.
    RouterBias = "router bias",
    /// A bias for selection only.
    CorrectionBias = "router correction bias",
    /// Group-limited routing.
    GroupLimitedRouting = "group-limited routing",
    /// A factor on router scores.
    RouterScaling = "routed scaling factor",
    /// Scores that multiply the expert's input.
    InputScaling = "router scores on expert inputs",
    /// MLPs without a gate.
    UngatedMlp = "ungated MLP",
    /// Biases in MLPs, dense or of a shared expert.
    MlpBias = "MLP biases",
    /// Biases in routed experts.
    ExpertBias = "expert biases",
    /// Squared ReLU.
    Relu2 = "squared ReLU",
    /// Clipped SwiGLU.
    ClippedSwiglu = "clipped SwiGLU",
    /// GPT-OSS's activation.
    ClippedGelu = "clipped quick-GELU gate",
    /// Layer norms.
    LayerNorm = "layer norm",
    /// Norms with weight `1 + w`.
    ZeroCentredNorm = "zero-centred RMS norm",
    /// Several residual streams.
    HyperConnections = "hyper-connections",
    /// Constant factors on embedding, residual or logits.
    ScalarMultipliers = "constant multipliers",
    /// A residual stream that continues from the normed input.
    PostNorm = "post-norm residual",
    /// Embedding and head are one matrix.
    TiedEmbeddings = "tied embeddings",
    /// A bias on the head.
    HeadBias = "head bias",
    /// Multi-token prediction.
    MultiTokenPrediction = "multi-token prediction",
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The traits of a model, each once, in the order of [`Feature`].
pub fn features(model: &Model) -> Vec<Feature> {
    let mut found = Vec::new();
    for layer in model.layers.iter().chain(&model.mtp) {
        of_layer(layer, &mut found);
    }
    of_trunk(model, &mut found);
    found.sort_unstable();
    found.dedup();
    found
}

fn of_trunk(model: &Model, found: &mut Vec<Feature>) {
    let scalars = model.scalars;
    let scaling = model.rope_scaling.as_ref();
    let scaled = scaling.map(|scaling| match scaling {
        RopeScaling { yarn: Some(_), .. } => Feature::Yarn,
        RopeScaling {
            llama3: Some(_), ..
        } => Feature::Llama3Scaling,
        _ => Feature::RotaryScaling,
    });
    found.extend(scaled);
    let mixers = model.layers.iter().chain(&model.mtp);
    let mut widths = mixers.filter_map(|layer| layer.mixer.as_ref()?.rotary_dim());
    let first = widths.next();
    let traits = [
        (
            widths.any(|width| Some(width) != first),
            Feature::RotaryWidths,
        ),
        (
            matches!(
                model.norm.kind,
                NormKind::LayerNorm | NormKind::LayerNormBias
            ),
            Feature::LayerNorm,
        ),
        (
            model.norm.kind == NormKind::RmsZeroCentred,
            Feature::ZeroCentredNorm,
        ),
        (model.residual_streams > 1, Feature::HyperConnections),
        (
            [
                scalars.embedding,
                scalars.residual,
                scalars.logits,
                scalars.skip,
            ] != [1.0; 4],
            Feature::ScalarMultipliers,
        ),
        (model.attention_dropout > 0.0, Feature::AttentionDropout),
        (scalars.post_norm, Feature::PostNorm),
        (model.tied_embeddings, Feature::TiedEmbeddings),
        (model.head_bias, Feature::HeadBias),
        (!model.mtp.is_empty(), Feature::MultiTokenPrediction),
    ];
    keep(&traits, found);
}

fn of_layer(layer: &Layer, found: &mut Vec<Feature>) {
    if layer.mixer.is_none() || layer.ffn.is_none() {
        found.push(Feature::SingleBlockLayers);
    }
    if let Some(mixer) = &layer.mixer {
        of_mixer(mixer, found);
    }
    match &layer.ffn {
        None => {}
        Some(Ffn::Dense(mlp)) => {
            found.push(Feature::DenseLayers);
            of_mlp(mlp, Feature::MlpBias, found);
        }
        Some(Ffn::Moe(moe)) => of_moe(moe, found),
    }
}

fn of_mixer(mixer: &Mixer, found: &mut Vec<Feature>) {
    match mixer {
        Mixer::Gqa(gqa) => {
            found.push(Feature::GroupedQueryAttention);
            match gqa.qk_norm {
                QkNorm::None => {}
                QkNorm::PerHead => found.push(Feature::QkNormPerHead),
                QkNorm::Full => found.push(Feature::QkNormFull),
                QkNorm::Weightless => found.push(Feature::QkNormWeightless),
            }
            let traits = [
                (gqa.window.is_some(), Feature::SlidingWindow),
                (gqa.chunk.is_some(), Feature::ChunkedAttention),
                (gqa.rotary_dim == 0, Feature::NoRotary),
                (
                    gqa.rotary_dim > 0 && gqa.rotary_dim < gqa.head_dim,
                    Feature::PartialRotary,
                ),
                (gqa.qkv_bias, Feature::QkvBias),
                (gqa.out_bias, Feature::OutBias),
                (gqa.output_gate, Feature::AttentionOutputGate),
                (gqa.sinks, Feature::AttentionSinks),
                (gqa.clip.is_some(), Feature::QkvClip),
                (gqa.scale.is_some(), Feature::AttentionScale),
            ];
            keep(&traits, found);
        }
        Mixer::Mla(mla) => {
            found.push(Feature::LatentAttention);
            keep(&[(mla.indexer.is_some(), Feature::SparseIndexer)], found);
        }
        Mixer::SharedKv(shared) => {
            found.push(Feature::SharedKvAttention);
            keep(&[(shared.indexer.is_some(), Feature::SparseIndexer)], found);
        }
        Mixer::Linear(linear) => found.push(match linear.kind {
            LinearKind::GatedDeltaNet => Feature::GatedDeltaNet,
            LinearKind::Lightning => Feature::LightningAttention,
            LinearKind::Mamba2 => Feature::Mamba2,
        }),
    }
}

fn of_moe(moe: &Moe, found: &mut Vec<Feature>) {
    found.push(Feature::Experts);
    of_mlp(&moe.expert, Feature::ExpertBias, found);
    if let Some(shared) = &moe.shared {
        found.push(if shared.gated_output {
            Feature::GatedSharedExpert
        } else {
            Feature::SharedExpert
        });
        of_mlp(&shared.mlp, Feature::MlpBias, found);
    }
    found.push(match moe.router.score {
        Score::SoftmaxThenTopk => Feature::SoftmaxRouter,
        Score::TopkThenSoftmax => Feature::TopkSoftmaxRouter,
        Score::Sigmoid => Feature::SigmoidRouter,
        Score::SqrtSoftplus => Feature::SqrtSoftplusRouter,
        Score::SparseMixer => Feature::SparseMixerRouter,
        Score::Hash => Feature::HashRouter,
    });
    let router = &moe.router;
    let traits = [
        (router.bias, Feature::RouterBias),
        (router.correction_bias, Feature::CorrectionBias),
        (router.groups.is_some(), Feature::GroupLimitedRouting),
        (router.scale != 1.0, Feature::RouterScaling),
        (router.scales_input, Feature::InputScaling),
    ];
    keep(&traits, found);
}

fn of_mlp(mlp: &Mlp, biased: Feature, found: &mut Vec<Feature>) {
    match mlp.activation {
        Activation::Silu => {}
        Activation::Relu2 => found.push(Feature::Relu2),
        Activation::ClippedSilu(_) => found.push(Feature::ClippedSwiglu),
        Activation::ClippedGelu(_) => found.push(Feature::ClippedGelu),
    }
    let traits = [(!mlp.gated, Feature::UngatedMlp), (mlp.bias, biased)];
    keep(&traits, found);
}

fn keep(traits: &[(bool, Feature)], found: &mut Vec<Feature>) {
    found.extend(traits.iter().filter(|(has, _)| *has).map(|(_, name)| *name));
}
