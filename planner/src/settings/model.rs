//! A model as flags, and flags as a model.
//!
//! What Megatron-LM's flags cannot say is refused by the name of the trait. Two routers that compute the same, such as
//! softmax over all experts with the chosen scores divided by their sum and softmax over the chosen, are one.

use crate::model::{
    Activation, Feature, Ffn, Gqa, Layer, LinearKind, LinearMixer, Llama3, Mixer, Mla, Mlp, Model,
    Moe, Norm, NormKind, QkNorm, RopeScaling, Router, RouterGroups, Scalars, Score, SharedExpert,
    Yarn, bounds, features, presets,
};

use super::pattern;
use super::said::Said;
use super::writer::Writer;

/// Largest sizes that are read.
const WIDTH: u64 = *bounds::WIDTH.end();
const HEADS: u64 = *bounds::HEADS.end();
const EXPERTS: u64 = *bounds::EXPERTS.end();
const LAYERS: u64 = *bounds::LAYERS.end();
const POSITIONS: u64 = *bounds::POSITIONS.end();
const VOCABULARY: u64 = *bounds::VOCAB.end();

/// What Megatron-LM's rotary scaling of Llama 3 has no flags for (`rotary_pos_embedding.py`).
const LLAMA3: Llama3 = Llama3 {
    original_max_position: 8192,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
};

/// Traits that flags can say; of every other the model is refused.
const SAID: &[Feature] = &[
    Feature::GroupedQueryAttention,
    Feature::LatentAttention,
    Feature::PartialRotary,
    Feature::Llama3Scaling,
    Feature::Yarn,
    Feature::QkvBias,
    Feature::QkNormPerHead,
    Feature::AttentionOutputGate,
    Feature::GatedDeltaNet,
    Feature::AttentionDropout,
    Feature::DenseLayers,
    Feature::Experts,
    Feature::SharedExpert,
    Feature::GatedSharedExpert,
    Feature::SoftmaxRouter,
    Feature::TopkSoftmaxRouter,
    Feature::SigmoidRouter,
    Feature::CorrectionBias,
    Feature::GroupLimitedRouting,
    Feature::RouterScaling,
    Feature::UngatedMlp,
    Feature::Relu2,
    Feature::LayerNorm,
    Feature::ZeroCentredNorm,
    Feature::TiedEmbeddings,
    Feature::MultiTokenPrediction,
];

pub(super) fn write(model: &Model, seq_len: u64, out: &mut Writer) {
    let unsaid: Vec<&str> = features(model)
        .into_iter()
        .filter(|feature| !SAID.contains(feature))
        .map(Feature::name)
        .collect();
    let nearest = "a model without it, or the `moefold` stack where it runs";
    if !unsaid.is_empty() {
        let names = unsaid.join(", ");
        let what = format!(
            "no flags of Megatron-LM are written here for what {} has: {names}",
            model.name
        );
        return out.refuse(what, nearest);
    }
    let extra = model.layers.iter().map(|layer| layer.extra_params);
    if extra.sum::<u64>() + model.extra_params > 0 {
        let what = format!(
            "{} has parameters outside of attention and MLPs",
            model.name
        );
        return out.refuse(what, nearest);
    }
    let Some((mixer, linear)) = uniform(model, out) else {
        return;
    };
    out.set("num_layers", &model.layers.len());
    out.set("hidden_size", &model.hidden);
    let dense = model.layers.iter().find_map(|layer| match &layer.ffn {
        Some(Ffn::Dense(mlp)) => Some(mlp),
        _ => None,
    });
    let moe = model.moe();
    let mlp = dense.or(moe.map(|moe| &moe.expert));
    if let Some(mlp) = mlp {
        out.set("ffn_hidden_size", &mlp.width);
    }
    match mixer {
        Mixer::Gqa(gqa) => write_gqa(gqa, out),
        Mixer::Mla(mla) => write_mla(mla, out),
        Mixer::SharedKv(_) | Mixer::Linear(_) => {}
    }
    if let Some(linear) = linear {
        write_linear(model, linear, out);
    }
    let longest = model.max_position.unwrap_or(seq_len).max(seq_len);
    out.set("max_position_embeddings", &longest);
    write_trunk(model, mixer, mlp, out);
    if let Some(moe) = moe {
        write_moe(model, moe, out);
    }
    if !model.mtp.is_empty() {
        out.set("mtp_num_layers", &model.mtp.len());
    }
}

/// The mixer that all layers have, or all but those of one linear attention; else the model is refused. So are MLPs of several
/// kinds.
fn uniform<'a>(model: &'a Model, out: &mut Writer) -> Option<(&'a Mixer, Option<&'a LinearMixer>)> {
    let layers = || model.layers.iter().chain(&model.mtp);
    let mixers = || layers().map(|layer| layer.mixer.as_ref());
    let delta_net = |mixer: Option<&'a Mixer>| match mixer {
        Some(Mixer::Linear(linear)) if linear.kind == LinearKind::GatedDeltaNet => Some(linear),
        _ => None,
    };
    let linear = mixers().find_map(delta_net);
    let mut others = mixers().filter(|mixer| delta_net(*mixer).is_none());
    let Some(first) = others.next() else {
        let what = format!("no layer of {} has softmax attention", model.name);
        out.refuse(what, "a model of which one has");
        return None;
    };
    let is_one = |mixer| mixer == first || (linear.is_some() && delta_net(mixer) == linear);
    if first.is_none() || !mixers().all(is_one) {
        let what = format!(
            "the attention of {} differs from layer to layer",
            model.name
        );
        out.refuse(
            what,
            "a model whose layers have one attention, or that and one gated DeltaNet",
        );
        return None;
    }
    let dense = layers().filter_map(|layer| match &layer.ffn {
        Some(Ffn::Dense(mlp)) => Some(mlp),
        _ => None,
    });
    let moe = layers().filter_map(Layer::moe);
    let alike = |mut all: Vec<&Mlp>| {
        all.dedup();
        all.len() < 2
    };
    let experts: Vec<&Moe> = moe.collect();
    let one_moe = experts.windows(2).all(|pair| pair[0] == pair[1]);
    if !alike(dense.collect()) || !one_moe {
        let what = format!("the MLPs of {} differ in more than experts", model.name);
        out.refuse(what, "a model with one dense MLP and one kind of experts");
        return None;
    }
    let last = model.layers.last();
    if model.mtp.iter().any(|depth| Some(depth) != last) {
        let what = format!("an MTP depth of {} is not as its last layer", model.name);
        out.refuse(
            what,
            "depths as the last layer, which Megatron-Core makes them",
        );
        return None;
    }
    if !model.mtp.is_empty() && last.is_some_and(|last| delta_net(last.mixer.as_ref()).is_some()) {
        let what = format!("an MTP depth of {} has linear attention", model.name);
        out.refuse(
            what,
            "a last layer of softmax attention, whose releases agree",
        );
        return None;
    }
    Some((first?, linear))
}

fn write_linear(model: &Model, linear: &LinearMixer, out: &mut Writer) {
    let heads = [linear.heads, linear.key_heads];
    let widths = [linear.key_dim, linear.value_dim];
    if *linear != LinearMixer::gated_delta_net(heads, widths, linear.conv_kernel) {
        let what = format!(
            "the gated DeltaNet of {} is not Megatron-Core's",
            model.name
        );
        return out.refuse(what, "one that projects and keeps what Qwen3-Next's does");
    }
    let each = model.layers.iter().map(|layer| layer.mixer.as_ref());
    let each: Vec<bool> = each
        .map(|mixer| matches!(mixer, Some(Mixer::Linear(_))))
        .collect();
    out.set("experimental_attention_variant", "gated_delta_net");
    let is_one_of = |every: &usize| {
        let mut layers = each.iter().enumerate();
        layers.all(|(at, own)| *own != is_last_of(at, *every))
    };
    match (2..=each.len()).find(is_one_of) {
        Some(every) => {
            out.set("linear_attention_freq", &every);
            out.because(format!("one layer of {every} has softmax attention"));
        }
        None => out.set("linear_attention_freq", &pattern::written(&each)),
    }
    out.set("linear_num_key_heads", &linear.key_heads);
    out.set("linear_num_value_heads", &linear.heads);
    out.set("linear_key_head_dim", &linear.key_dim);
    out.set("linear_value_head_dim", &linear.value_dim);
    out.set("linear_conv_kernel_dim", &linear.conv_kernel);
}

/// Whether a layer is the last of so many.
fn is_last_of(at: usize, every: usize) -> bool {
    (at + 1).is_multiple_of(every)
}

fn write_gqa(gqa: &Gqa, out: &mut Writer) {
    out.set("num_attention_heads", &gqa.heads);
    out.set("kv_channels", &gqa.head_dim);
    if gqa.kv_heads != gqa.heads {
        out.on("group_query_attention");
        out.set("num_query_groups", &gqa.kv_heads);
    }
    if gqa.qkv_bias {
        out.on("add_qkv_bias");
    }
    if gqa.qk_norm == QkNorm::PerHead {
        out.on("qk_layernorm");
    }
    if gqa.output_gate {
        out.on("attention_output_gate");
    }
    if gqa.rotary_dim != gqa.head_dim {
        let share = gqa.rotary_dim as f64 / gqa.head_dim as f64;
        out.set("rotary_percent", &share);
    }
}

fn write_mla(mla: &Mla, out: &mut Writer) {
    out.set("num_attention_heads", &mla.heads);
    out.on("multi_latent_attention");
    if let Some(rank) = mla.q_lora_rank {
        out.set("q_lora_rank", &rank);
    }
    out.set("kv_lora_rank", &mla.kv_lora_rank);
    out.set("qk_head_dim", &mla.qk_nope_head_dim);
    out.set("qk_pos_emb_head_dim", &mla.qk_rope_head_dim);
    out.set("v_head_dim", &mla.v_head_dim);
    // Compressed queries, keys and values are normed.
    out.on("qk_layernorm");
}

fn write_trunk(model: &Model, mixer: &Mixer, mlp: Option<&Mlp>, out: &mut Writer) {
    match model.norm.kind {
        NormKind::Rms => out.set("normalization", "RMSNorm"),
        NormKind::RmsZeroCentred => {
            out.set("normalization", "RMSNorm");
            out.on("apply_layernorm_1p");
        }
        NormKind::LayerNormBias => out.set("normalization", "LayerNorm"),
        NormKind::LayerNorm => {
            let what = format!("the layer norm of {} has no bias", model.name);
            out.refuse(what, "a layer norm with one, or RMSNorm");
        }
    }
    out.set("norm_epsilon", &real(model.norm.eps));
    match mlp.map(|mlp| (mlp.activation, mlp.gated)) {
        Some((Activation::Silu, true)) => out.on("swiglu"),
        Some((Activation::Relu2, false)) => out.on("squared_relu"),
        _ => out.refuse(
            format!("no flag says the activation of {}", model.name),
            "SwiGLU, or squared ReLU without a gate",
        ),
    }
    out.on("disable_bias_linear");
    if !model.tied_embeddings {
        out.on("untie_embeddings_and_output_weights");
    }
    out.set("position_embedding_type", "rope");
    match model.rope_theta {
        Some(theta) if theta.fract() == 0.0 => out.set("rotary_base", &theta),
        Some(theta) => out.refuse(
            format!(
                "--rotary-base is a whole number, and {} has {theta}",
                model.name
            ),
            format!("{}", theta.round()),
        ),
        None => {}
    }
    write_scaling(model, mixer, out);
    out.set("attention_dropout", &real(model.attention_dropout));
    out.set("hidden_dropout", "0.0");
    if model.initializer_range != 0.02 {
        out.set("init_method_std", &real(model.initializer_range));
    }
}

fn write_scaling(model: &Model, mixer: &Mixer, out: &mut Writer) {
    let latent = matches!(mixer, Mixer::Mla(_));
    match &model.rope_scaling {
        // Latent attention has YaRN unless told otherwise.
        None if latent => out.set("rope_type", "rope"),
        None => {}
        Some(RopeScaling {
            factor: Some(factor),
            yarn: Some(yarn),
            ..
        }) if latent => {
            let whole = [yarn.beta_fast, yarn.beta_slow];
            if whole != [32.0, 1.0] || yarn.original_max_position != 4096 || !yarn.truncate {
                let [fast, slow] = whole;
                return out.refuse(
                    format!(
                        "Megatron-LM's YaRN turns between 32 and 1 times in 4096 positions, and that of {} \
                         between {fast} and {slow} in {}",
                        model.name, yarn.original_max_position
                    ),
                    "those, or no rotary scaling for sequences as short as they were trained",
                );
            }
            out.set("rotary_scaling_factor", &real(*factor));
            out.set("mscale", &real(yarn.mscale.unwrap_or(1.0)));
            out.set("mscale_all_dim", &real(yarn.mscale_all_dim.unwrap_or(0.0)));
        }
        Some(RopeScaling {
            factor: Some(factor),
            llama3: Some(llama3),
            ..
        }) if *llama3 == LLAMA3 && !latent => {
            out.on("use_rope_scaling");
            out.set("rope_scaling_factor", &real(*factor));
        }
        Some(scaling) => out.refuse(
            format!(
                "no flag says the rotary scaling {} of {}",
                scaling.kind, model.name
            ),
            "no rotary scaling, for sequences as short as the model was trained on first",
        ),
    }
}

fn write_moe(model: &Model, moe: &Moe, out: &mut Writer) {
    out.set("num_experts", &moe.experts);
    let sparse: Vec<bool> = model.layers.iter().map(|l| l.moe().is_some()).collect();
    if sparse.contains(&false) {
        out.set("moe_layer_freq", &pattern::written(&sparse));
    }
    out.set("moe_ffn_hidden_size", &moe.expert.width);
    if let Some(shared) = &moe.shared {
        out.set("moe_shared_expert_intermediate_size", &shared.mlp.width);
        if shared.gated_output {
            out.on("moe_shared_expert_gate");
        }
    }
    out.set("moe_router_topk", &moe.topk);
    let router = &moe.router;
    match (router.score, router.normalize) {
        (Score::SoftmaxThenTopk, true) | (Score::TopkThenSoftmax, _) if moe.topk > 1 => {}
        (Score::SoftmaxThenTopk, false) => out.on("moe_router_pre_softmax"),
        (Score::Sigmoid, true) => out.set("moe_router_score_function", "sigmoid"),
        (score, _) => {
            let what = format!(
                "Megatron-Core divides {} scores by their sum where it takes several, and not where it takes one; \
                 {} does otherwise",
                match score {
                    Score::Sigmoid => "sigmoid",
                    _ => "softmax",
                },
                model.name
            );
            out.refuse(what, "a router that does");
        }
    }
    if let Some(groups) = &router.groups {
        out.set("moe_router_num_groups", &groups.groups);
        out.set("moe_router_group_topk", &groups.topk);
        let scored_by = moe.topk / groups.topk;
        if scored_by != groups.scored_by {
            out.because(format!(
                "Megatron-Core scores a group by its best {scored_by} experts, the model by its best {}",
                groups.scored_by
            ));
        }
    }
    if router.scale != 1.0 {
        out.set("moe_router_topk_scaling_factor", &real(router.scale));
    }
    if router.correction_bias {
        out.on("moe_router_enable_expert_bias");
        if router.score != Score::Sigmoid {
            out.refuse(
                format!("{} has an expert bias beside softmax scores", model.name),
                "sigmoid scores, which Megatron-Core's expert bias needs",
            );
        }
    }
    if router.aux_loss_coef > 0.0 {
        out.set("moe_router_load_balancing_type", "aux_loss");
        out.set("moe_aux_loss_coeff", &real(router.aux_loss_coef));
    } else {
        out.set("moe_router_load_balancing_type", "none");
        out.because("the configuration states no loss that balances experts");
    }
}

/// A number as Python reads one, with a point where it is whole.
fn real(number: f64) -> String {
    format!("{number:?}")
}

/// A model of flags. What they do not say of it is as in a preset of the same shape, which gives it its name.
pub(super) fn read(said: &mut Said<'_>, vocabulary: Option<u64>) -> Option<Model> {
    refuse_unsaid(said);
    let layers = need_number(said, "num_layers", LAYERS, "the number of decoder layers");
    let hidden = need_number(
        said,
        "hidden_size",
        WIDTH,
        "the width of the residual stream",
    );
    let heads = need_number(
        said,
        "num_attention_heads",
        HEADS,
        "the number of query heads",
    );
    let (layers, hidden, heads) = (layers?, hidden?, heads?);
    let mixer = if said.on("multi_latent_attention") {
        Mixer::Mla(read_mla(said, heads))
    } else {
        Mixer::Gqa(read_gqa(said, hidden, heads)?)
    };
    let (activation, gated) = if said.on("swiglu") {
        (Activation::Silu, true)
    } else if said.on("squared_relu") {
        (Activation::Relu2, false)
    } else {
        said.unable("GELU, which holds where no activation is said,", "--swiglu");
        return None;
    };
    if !said.on("disable_bias_linear") {
        said.unable("a bias in every linear layer", "--disable-bias-linear");
    }
    let default_width = if gated {
        hidden * 8 / 3 / 64 * 64
    } else {
        4 * hidden
    };
    let width = said.number("ffn_hidden_size", WIDTH);
    let mlp = Mlp {
        width: width.unwrap_or(default_width.max(1)),
        gated,
        bias: false,
        activation,
    };
    let all = read_layers(said, layers, (&mixer, &mlp))?;
    let depths = said.number("mtp_num_layers", LAYERS).unwrap_or(0);
    let last = all.last().and_then(|last| last.mixer.as_ref());
    if depths > 0 && matches!(last, Some(Mixer::Linear(_))) {
        said.unable(
            "--mtp-num-layers behind a layer of linear attention, which releases build otherwise,",
            "a --linear-attention-freq that ends with softmax attention",
        );
    }
    let mtp = vec![all.last()?.clone(); depths as usize];
    let latent = matches!(mixer, Mixer::Mla(_));
    let mut model = Model {
        name: "settings".to_owned(),
        model_type: "megatron".to_owned(),
        vocab_size: 0,
        hidden,
        residual_streams: 1,
        layers: all,
        mtp,
        tied_embeddings: !said.on("untie_embeddings_and_output_weights"),
        head_bias: false,
        norm: read_norm(said)?,
        rope_theta: read_positions(said),
        rope_scaling: read_scaling(said, latent),
        scalars: Scalars::default(),
        initializer_range: said.real("init_method_std", [1e-9, 10.0]).unwrap_or(0.02),
        max_position: said.number("max_position_embeddings", POSITIONS),
        attention_dropout: said.real("attention_dropout", [0.0, 1.0]).unwrap_or(0.1),
        extra_params: 0,
    };
    if said.real("hidden_dropout", [0.0, 1.0]).unwrap_or(0.1) > 0.0 {
        said.unable(
            "dropout of hidden states (--hidden-dropout, 0.1 where it is absent)",
            "--hidden-dropout 0.0",
        );
    }
    model.vocab_size = read_vocabulary(said, &model, vocabulary)?;
    if let Err(broken) = model.check() {
        let what = format!("a model whose {} is {}", broken.key, broken.found);
        said.unable(what, broken.expected);
        return None;
    }
    if let Some(preset) = equal_preset(&model) {
        model.name = preset.name;
        model.model_type = preset.model_type;
    }
    Some(model)
}

/// Flags that make of the model what no flag above says.
fn refuse_unsaid(said: &mut Said<'_>) {
    const OTHERS: [&str; 13] = [
        "window_size",
        "softmax_type",
        "quick_geglu",
        "no_rope_freq",
        "qk_l2_norm",
        "hybrid_override_pattern",
        "is_hybrid_model",
        "heterogeneous_layers_config_path",
        "spec",
        "apply_residual_connection_post_layernorm",
        "moe_latent_size",
        "rotary_seq_len_interpolation_factor",
        "moe_use_upcycling",
    ];
    for name in OTHERS {
        let vanilla = name == "softmax_type" && said.word(name) == Some("vanilla");
        if said.is_there(name) && !vanilla {
            let what = format!("the model that {} makes", super::text::flag(name));
            said.unable(
                what,
                "--model with its config.json, and settings without the flag",
            );
        }
    }
}

fn need(said: &mut Said<'_>, name: &'static str, what: &str) -> Option<()> {
    if !said.is_there(name) {
        said.missing(name, what);
        return None;
    }
    Some(())
}

fn need_number(said: &mut Said<'_>, name: &'static str, most: u64, what: &str) -> Option<u64> {
    need(said, name, what)?;
    said.number(name, most)
}

fn read_gqa(said: &mut Said<'_>, hidden: u64, heads: u64) -> Option<Gqa> {
    let head_dim = said.number("kv_channels", HEADS);
    let head_dim = head_dim.unwrap_or((hidden / heads).max(1));
    let kv_heads = if said.on("group_query_attention") {
        said.number("num_query_groups", HEADS).unwrap_or(1)
    } else {
        heads
    };
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of the {heads} heads");
        said.wrong("num_query_groups", &kv_heads.to_string(), &expected);
        return None;
    }
    let share = said.real("rotary_percent", [0.0, 1.0]).unwrap_or(1.0);
    let rotary_dim = (head_dim as f64 * share).round() as u64;
    Some(Gqa {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: said.on("add_qkv_bias"),
        out_bias: false,
        qk_norm: if said.on("qk_layernorm") {
            QkNorm::PerHead
        } else {
            QkNorm::None
        },
        output_gate: said.on("attention_output_gate"),
        rotary_dim,
        window: None,
        chunk: None,
        sinks: false,
        scale: None,
        clip: None,
    })
}

fn read_mla(said: &mut Said<'_>, heads: u64) -> Mla {
    let mut size = |name, default| said.number(name, WIDTH).unwrap_or(default);
    Mla {
        heads,
        kv_lora_rank: size("kv_lora_rank", 32),
        qk_nope_head_dim: size("qk_head_dim", 128),
        qk_rope_head_dim: size("qk_pos_emb_head_dim", 64),
        v_head_dim: size("v_head_dim", 128),
        q_lora_rank: said.number("q_lora_rank", WIDTH),
        rope_interleave: true,
        indexer: None,
    }
}

fn read_norm(said: &mut Said<'_>) -> Option<Norm> {
    let root = said.one_of("normalization", &[("RMSNorm", true), ("LayerNorm", false)]);
    let kind = match (root.unwrap_or(false), said.on("apply_layernorm_1p")) {
        (true, false) => NormKind::Rms,
        (true, true) => NormKind::RmsZeroCentred,
        (false, false) => NormKind::LayerNormBias,
        (false, true) => {
            said.unable("a layer norm whose weights are centred around 0", "RMSNorm");
            return None;
        }
    };
    let eps = said.real("norm_epsilon", [1e-30, 1.0]).unwrap_or(1e-5);
    Some(Norm { kind, eps })
}

fn read_positions(said: &mut Said<'_>) -> Option<f64> {
    let rotates = said.on("use_rotary_position_embeddings")
        || said.one_of(
            "position_embedding_type",
            &[
                ("rope", true),
                ("none", false),
                ("learned_absolute", false),
                ("mrope", false),
                ("relative", false),
            ],
        ) == Some(true);
    if !rotates {
        said.unable(
            "positions that are not rotated (learned_absolute, where --position-embedding-type is absent)",
            "--position-embedding-type rope",
        );
        return None;
    }
    Some(said.real("rotary_base", [1.0, 1e15]).unwrap_or(10_000.0))
}

fn read_scaling(said: &mut Said<'_>, latent: bool) -> Option<RopeScaling> {
    let factor = said.real("rotary_scaling_factor", [1e-3, 1e6]);
    let mscale = said.real("mscale", [0.0, 1e3]).unwrap_or(1.0);
    let all = said.real("mscale_all_dim", [0.0, 1e3]).unwrap_or(0.0);
    let yarn = said.one_of("rope_type", &[("rope", false), ("yarn", true)]);
    if latent {
        let factor = factor.unwrap_or(1.0);
        if yarn == Some(false) || factor == 1.0 {
            return None;
        }
        return Some(RopeScaling {
            kind: "yarn".to_owned(),
            factor: Some(factor),
            yarn: Some(Yarn {
                original_max_position: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                attention_factor: None,
                mscale: Some(mscale),
                mscale_all_dim: Some(all),
            }),
            llama3: None,
        });
    }
    said.on("use_rope_scaling").then(|| RopeScaling {
        kind: "llama3".to_owned(),
        factor: said.real("rope_scaling_factor", [1e-3, 1e6]).or(Some(8.0)),
        yarn: None,
        llama3: Some(LLAMA3),
    })
}

/// The experts, where there are any; an error was said.
fn read_moe(said: &mut Said<'_>, mlp: &Mlp) -> Result<Option<Moe>, ()> {
    let Some(experts) = said.number("num_experts", EXPERTS) else {
        return Ok(None);
    };
    let topk = said.number("moe_router_topk", EXPERTS).unwrap_or(2);
    if topk > experts {
        let expected = format!("at most the {experts} experts");
        said.wrong("moe_router_topk", &topk.to_string(), &expected);
        return Err(());
    }
    let expert = said
        .number("moe_ffn_hidden_size", WIDTH)
        .unwrap_or(mlp.width);
    let mlp = |width| Mlp {
        width,
        ..mlp.clone()
    };
    let shared = said.number("moe_shared_expert_intermediate_size", WIDTH);
    let gated_output = said.on("moe_shared_expert_gate");
    let sigmoid = said.one_of(
        "moe_router_score_function",
        &[("softmax", false), ("sigmoid", true)],
    );
    let (score, normalize) = match (sigmoid.unwrap_or(false), said.on("moe_router_pre_softmax")) {
        (true, _) => (Score::Sigmoid, true),
        (false, true) => (Score::SoftmaxThenTopk, false),
        (false, false) => (Score::SoftmaxThenTopk, true),
    };
    let groups = said.number("moe_router_num_groups", EXPERTS);
    let kept = said.number("moe_router_group_topk", EXPERTS);
    let groups = match (groups, kept) {
        (Some(groups), Some(kept)) => {
            if !experts.is_multiple_of(groups) || kept > groups {
                let expected = format!(
                    "a divisor of the {experts} experts, of which --moe-router-group-topk are kept"
                );
                said.wrong("moe_router_num_groups", &groups.to_string(), &expected);
                return Err(());
            }
            Some(RouterGroups {
                groups,
                topk: kept,
                scored_by: (topk / kept).max(1),
            })
        }
        _ => None,
    };
    let coefficient = match said.words("moe_aux_loss_coeff") {
        Some([word]) => {
            let found = word
                .parse()
                .ok()
                .filter(|c: &f64| c.is_finite() && *c >= 0.0);
            if found.is_none() {
                said.wrong("moe_aux_loss_coeff", word, "a number of at least 0");
            }
            found.unwrap_or(0.0)
        }
        // Several losses: what they are is kept, and no price hangs on it.
        _ => 0.0,
    };
    let none = said.words("moe_router_load_balancing_type");
    let none = none.is_some_and(|words| words == ["none"]);
    Ok(Some(Moe {
        experts,
        topk,
        expert: mlp(expert),
        shared: shared.map(|width| SharedExpert {
            mlp: mlp(width),
            gated_output,
        }),
        router: Router {
            score,
            normalize,
            scale: said
                .real("moe_router_topk_scaling_factor", [1e-6, 1e6])
                .unwrap_or(1.0),
            bias: false,
            correction_bias: said.on("moe_router_enable_expert_bias"),
            groups,
            aux_loss_coef: if none { 0.0 } else { coefficient },
            scales_input: false,
        },
    }))
}

/// The layers: which have experts, and which gated DeltaNet in place of a mixer.
fn read_layers(
    said: &mut Said<'_>,
    layers: u64,
    (mixer, mlp): (&Mixer, &Mlp),
) -> Option<Vec<Layer>> {
    const VARIANT: &str = "experimental_attention_variant";
    let moe = read_moe(said, mlp).ok()?;
    let mut sparse = vec![moe.is_some(); layers as usize];
    if moe.is_some() && said.is_there("moe_layer_freq") {
        let of = ("one layer of N has experts", "([0]*3+[1]*58)");
        sparse = read_pattern(said, "moe_layer_freq", (layers, of), |at, every| {
            at.is_multiple_of(every)
        })?;
    }
    let mut linear = None;
    if said.is_there(VARIANT) {
        said.one_of(VARIANT, &[("gated_delta_net", ())])?;
        need(
            said,
            "linear_attention_freq",
            "which layers have linear attention",
        )?;
        let of = ("one layer of N has softmax attention", "([1]*3+[0])*12");
        let each = read_pattern(said, "linear_attention_freq", (layers, of), |at, every| {
            !is_last_of(at, every)
        })?;
        if !each.contains(&false) {
            said.unable(
                "a model without softmax attention",
                "a --linear-attention-freq that leaves it some layers",
            );
            return None;
        }
        linear = Some((Mixer::Linear(read_linear(said)?), each));
    }
    let layer = |(at, sparse): (usize, bool)| Layer {
        mixer: Some(match &linear {
            Some((linear, each)) if each[at] => linear.clone(),
            _ => mixer.clone(),
        }),
        ffn: Some(match &moe {
            Some(moe) if sparse => Ffn::Moe(moe.clone()),
            _ => Ffn::Dense(mlp.clone()),
        }),
        extra_params: 0,
    };
    Some(sparse.into_iter().enumerate().map(layer).collect())
}

/// A gated DeltaNet.
fn read_linear(said: &mut Said<'_>) -> Option<LinearMixer> {
    let mut size = |name, default| said.number(name, HEADS).unwrap_or(default);
    let keys = size("linear_num_key_heads", 16);
    let values = size("linear_num_value_heads", 32);
    let widths = [
        size("linear_key_head_dim", 128),
        size("linear_value_head_dim", 128),
    ];
    let kernel = size("linear_conv_kernel_dim", 4);
    if !values.is_multiple_of(keys) {
        let expected = format!("a multiple of the {keys} key heads");
        said.wrong("linear_num_value_heads", &values.to_string(), &expected);
        return None;
    }
    Some(LinearMixer::gated_delta_net([values, keys], widths, kernel))
}

/// Which layers a flag names: by a list, on a command line or of YAML, or by a number. What that says, and a list as an example,
/// are for errors.
fn read_pattern(
    said: &mut Said<'_>,
    name: &'static str,
    (layers, (of, example)): (u64, (&str, &str)),
    is_one: impl Fn(usize, usize) -> bool,
) -> Option<Vec<bool>> {
    let words = said.words(name)?;
    let word = &match words {
        [word] => word.clone(),
        several => format!("[{}]", several.join(",")),
    };
    let found = match word.parse::<usize>() {
        Ok(every @ 1..) => Some((0..layers as usize).map(|at| is_one(at, every)).collect()),
        Ok(0) => None,
        Err(_) => pattern::read(word),
    };
    let found = found.filter(|found: &Vec<bool>| found.len() as u64 == layers);
    if found.is_none() {
        let expected = format!(
            "a number N: {of}, or a list of {layers} layers, as {example} is one of {}",
            pattern::read(example).map_or(0, |list| list.len())
        );
        said.wrong(name, word, &expected);
    }
    found
}

/// Tokens of the vocabulary: as said, as a tokenizer of its own has them, or as the model has that the tokenizer is of.
fn read_vocabulary(said: &mut Said<'_>, model: &Model, hint: Option<u64>) -> Option<u64> {
    let null = said.word("tokenizer_type") == Some("NullTokenizer");
    let own = said.number("vocab_size", VOCABULARY);
    let padded = said.number("padded_vocab_size", VOCABULARY);
    let of_tokenizer = said.word("tokenizer_model").and_then(|path| {
        let name = path.trim_end_matches('/').rsplit('/').next()?;
        let preset = presets::find(name).ok()?.load().ok()?;
        (preset.hidden == model.hidden).then_some(preset.vocab_size)
    });
    // The null tokenizer adds the end of a document to what it is told.
    let own = own.map(|own| own + u64::from(null));
    let found = hint.or(padded).or(own).or(of_tokenizer);
    if found.is_none() {
        said.missing(
            "vocab_size",
            "the tokens of the vocabulary, --padded-vocab-size, a --tokenizer-model named as a preset, or --model",
        );
    }
    found
}

/// The preset that a model is, but for what says nothing of its shape.
fn equal_preset(model: &Model) -> Option<Model> {
    let wanted = shape(model);
    let all = presets::all()
        .iter()
        .filter_map(|preset| preset.load().ok());
    let mut equal = all.filter(|preset| shape(preset) == wanted);
    equal.next()
}

/// Whether two models are one but for names, positions, dropout, the initial weights and the weight of a loss, on
/// which nothing that is planned hangs.
pub fn same_model(one: &Model, other: &Model) -> bool {
    shape(one) == shape(other)
}

fn shape(model: &Model) -> Model {
    let mut model = model.clone();
    model.name.clear();
    model.model_type.clear();
    model.max_position = None;
    model.initializer_range = 0.0;
    model.attention_dropout = 0.0;
    for layer in model.layers.iter_mut().chain(&mut model.mtp) {
        if let Some(Mixer::Mla(mla)) = &mut layer.mixer {
            mla.rope_interleave = true;
        }
        if let Some(Ffn::Moe(moe)) = &mut layer.ffn {
            let router = &mut moe.router;
            router.aux_loss_coef = 0.0;
            if router.score == Score::TopkThenSoftmax {
                (router.score, router.normalize) = (Score::SoftmaxThenTopk, true);
            }
            if let Some(groups) = &mut router.groups {
                groups.scored_by = 0;
            }
        }
    }
    model
}
