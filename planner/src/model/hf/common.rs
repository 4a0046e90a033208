//! What the families' readers share: the trunk of a model, rotary embedding, attention heads.

use serde_json::Value;

use super::keys::{EXPERTS, HEADS, Keys, LAYERS, POSITIONS, VOCAB, WIDTH};
use crate::model::{
    Activation, Ffn, Gqa, Layer, Llama3, Mixer, Mlp, Model, ModelError, Moe, Norm, NormKind,
    QkNorm, RopeScaling, Router, RouterGroups, Scalars, Score, Yarn,
};

/// Spellings of the number of routed experts.
pub(super) const NUM_EXPERTS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts"];
/// Spellings of the experts a token is sent to.
pub(super) const TOPK: &[&str] = &["num_experts_per_tok", "experts_per_token"];
/// Spellings of the number of multi-token-prediction layers.
pub(super) const MTP: &[&str] = &["num_nextn_predict_layers", "num_mtp_layers"];

/// Whether embedding and head are one matrix.
pub(super) const TIED: &[&str] = &["tie_word_embeddings"];

/// Defaults of a family, for keys its configurations may leave out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    /// Added under the root of a norm.
    pub(super) eps: f64,
    /// Rotary base.
    pub(super) theta: f64,
}

/// Rotary embedding as configured.
#[derive(Debug, Clone)]
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) scaling: Option<RopeScaling>,
    partial: f64,
    rotary_dim: Option<u64>,
}

impl Rope {
    /// Rotated width of a head.
    pub(super) fn dim(&self, keys: &Keys<'_>, head_dim: u64) -> Result<u64, ModelError> {
        let dim = self
            .rotary_dim
            .unwrap_or((head_dim as f64 * self.partial).floor() as u64);
        keys.expect_at_most(("rotary_dim", dim), ("head_dim", head_dim))?;
        expect_even(keys, "rotary width of a head", dim)?;
        Ok(dim)
    }
}

/// Rotation turns pairs.
pub(super) fn expect_even(keys: &Keys<'_>, key: &str, width: u64) -> Result<(), ModelError> {
    if width.is_multiple_of(2) {
        return Ok(());
    }
    Err(keys.clash(
        key,
        &width.to_string(),
        "rotary embedding, which turns pairs",
        &format!("nearest even widths: {}, {}", width - 1, width + 1),
    ))
}

/// Reads the rotary keys of either dialect: flat (`rope_theta`, `rope_scaling`,
/// `partial_rotary_factor`, `rotary_dim`) or gathered in `rope_parameters`, which some models
/// divide further by kind of layer. `section` is the division that counts.
pub(super) fn rope(
    keys: &Keys<'_>,
    defaults: Defaults,
    section: &str,
    default_partial: f64,
) -> Result<Rope, ModelError> {
    let gathered = keys.nested("rope_parameters")?;
    let divided = match gathered {
        Some(ref outer) => outer.nested(section)?,
        None => None,
    };
    let gathered = divided.or(gathered);
    let flat = gathered.as_ref().unwrap_or(keys);
    let scaling = match keys.nested("rope_scaling")? {
        Some(scaling) => Some(scaling),
        None => gathered.clone(),
    };
    let in_rope = flat.opt_f64(&["partial_rotary_factor"])?;
    let partial = match in_rope {
        Some(partial) => partial,
        None => keys.f64_or(&["partial_rotary_factor"], default_partial)?,
    };
    if !(0.0..=1.0).contains(&partial) {
        return Err(keys.wrong(
            "partial_rotary_factor",
            &Value::from(partial),
            "a number from 0 to 1",
        ));
    }
    let theta = match flat.opt_f64(&["rope_theta"])? {
        Some(_) => flat.positive_or(&["rope_theta"], defaults.theta)?,
        None => keys.positive_or(&["rope_theta"], defaults.theta)?,
    };
    Ok(Rope {
        theta,
        scaling: match &scaling {
            Some(scaling) => rope_scaling(keys, scaling)?,
            None => None,
        },
        partial,
        rotary_dim: keys.opt_u64(&["rotary_dim"], &HEADS)?,
    })
}

/// Ways to rescale positions (transformers 4.57: `ROPE_INIT_FUNCTIONS` of `modeling_rope_utils.py`; `su`, as Phi-3 called `longrope` before;
/// `mrope`, of language models beside a vision tower, as Qwen2-VL's).
const ROPE_TYPES: [&str; 7] = [
    "linear", "dynamic", "yarn", "longrope", "llama3", "su", "mrope",
];

/// The rescaling that `scaling` asks for in the configuration `keys`.
fn rope_scaling(keys: &Keys<'_>, scaling: &Keys<'_>) -> Result<Option<RopeScaling>, ModelError> {
    let kind = scaling.opt_str(&["rope_type", "type"])?;
    let Some(kind) = kind.filter(|kind| *kind != "default") else {
        return Ok(None);
    };
    if !ROPE_TYPES.contains(&kind) {
        let key = scaling.find(&["rope_type", "type"]);
        let known = ROPE_TYPES.into_iter().chain(["default"]);
        return Err(scaling.unknown_word(key.map_or("rope_type", |(name, _)| name), kind, known));
    }
    let mut factor = scaling.opt_f64(&["factor"])?;
    let (mut yarn, mut llama3) = (None, None);
    let longest = keys.opt_u64(&["max_position_embeddings"], &POSITIONS)?;
    let original = scaling.opt_u64(&["original_max_position_embeddings"], &POSITIONS)?;
    if kind == "yarn" && factor.is_none() && (original.is_none() || longest.is_none()) {
        return Err(scaling.missing(&["factor"], "how often positions are stretched"));
    }
    if let Some(original) = original.or(longest) {
        match kind {
            "yarn" => {
                // As transformers, where no factor is stated.
                let stretch = longest.map(|longest| longest as f64 / original as f64);
                factor = factor.or(stretch);
                yarn = factor.map(|_| of_yarn(scaling, original)).transpose()?;
            }
            "llama3" => {
                factor = Some(scaling.positive(&["factor"])?);
                llama3 = Some(of_llama3(scaling, original)?);
            }
            _ => {}
        }
    }
    let kind = kind.to_owned();
    Ok(Some(RopeScaling {
        kind,
        factor,
        yarn,
        llama3,
    }))
}

/// What Llama 3.1's scaling says beside its factor; transformers has no defaults for it.
fn of_llama3(scaling: &Keys<'_>, original_max_position: u64) -> Result<Llama3, ModelError> {
    let llama3 = Llama3 {
        original_max_position,
        low_freq_factor: scaling.positive(&["low_freq_factor"])?,
        high_freq_factor: scaling.positive(&["high_freq_factor"])?,
    };
    let (low, high) = (llama3.low_freq_factor, llama3.high_freq_factor);
    if low <= high {
        return Ok(llama3);
    }
    Err(scaling.clash(
        "high_freq_factor",
        &high.to_string(),
        &format!("low_freq_factor = {low}, which it must reach"),
        "Llama 3.1 has 1 and 4",
    ))
}

/// What YaRN says beside its factor, with the defaults of its authors (32 turns and 1).
fn of_yarn(scaling: &Keys<'_>, original_max_position: u64) -> Result<Yarn, ModelError> {
    Ok(Yarn {
        original_max_position,
        beta_fast: scaling.positive_or(&["beta_fast"], 32.0)?,
        beta_slow: scaling.positive_or(&["beta_slow"], 1.0)?,
        truncate: scaling.bool_or(&["truncate"], true)?,
        attention_factor: scaling.opt_f64(&["attention_factor"])?,
        mscale: scaling.opt_f64(&["mscale"])?,
        mscale_all_dim: scaling.opt_f64(&["mscale_all_dim"])?,
    })
}

/// Layers of the model.
pub(super) fn num_layers(keys: &Keys<'_>) -> Result<u64, ModelError> {
    keys.u64(&["num_hidden_layers"], &LAYERS)
}

/// Width of the residual stream.
pub(super) fn hidden(keys: &Keys<'_>) -> Result<u64, ModelError> {
    keys.u64(&["hidden_size"], &WIDTH)
}

/// The model around its layers.
pub(super) fn trunk(
    keys: &Keys<'_>,
    defaults: Defaults,
    norm: NormKind,
    rope: Option<&Rope>,
    layers: Vec<Layer>,
) -> Result<Model, ModelError> {
    let eps = keys.positive_or(
        &["rms_norm_eps", "layer_norm_epsilon", "norm_eps"],
        defaults.eps,
    )?;
    Ok(Model {
        name: String::new(),
        model_type: String::new(),
        vocab_size: keys.u64(&["vocab_size"], &VOCAB)?,
        hidden: hidden(keys)?,
        residual_streams: 1,
        layers,
        mtp: Vec::new(),
        tied_embeddings: keys.bool_or(TIED, false)?,
        head_bias: false,
        norm: Norm { kind: norm, eps },
        rope_theta: rope.map(|rope| rope.theta),
        rope_scaling: rope.and_then(|rope| rope.scaling.clone()),
        scalars: Scalars::default(),
        initializer_range: keys.positive_or(&["initializer_range"], 0.02)?,
        max_position: keys.opt_u64(&["max_position_embeddings"], &POSITIONS)?,
        attention_dropout: keys.f64_or(&["attention_dropout"], 0.0)?,
        extra_params: 0,
    })
}

/// Heads of grouped-query attention, checked against each other; everything else plain.
pub(super) fn gqa(keys: &Keys<'_>, rope: Option<&Rope>) -> Result<Gqa, ModelError> {
    let heads = keys.u64(&["num_attention_heads"], &HEADS)?;
    let kv_heads = keys.u64_or(&["num_key_value_heads"], &HEADS, heads)?;
    keys.expect_divides(
        ("num_key_value_heads", kv_heads),
        ("num_attention_heads", heads),
    )?;
    let head_dim = if let Some(head_dim) = keys.opt_u64(&["head_dim"], &HEADS)? {
        head_dim
    } else {
        let hidden = hidden(keys)?;
        keys.expect_divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
        hidden / heads
    };
    Ok(Gqa {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        out_bias: false,
        qk_norm: QkNorm::None,
        output_gate: false,
        rotary_dim: match rope {
            Some(rope) => rope.dim(keys, head_dim)?,
            None => 0,
        },
        window: None,
        chunk: None,
        sinks: false,
        scale: None,
        clip: None,
    })
}

/// A gated MLP without biases, the common case.
pub(super) fn swiglu(width: u64) -> Mlp {
    Mlp {
        width,
        gated: true,
        bias: false,
        activation: Activation::Silu,
    }
}

/// The routed experts' number and fan-out, checked against each other.
pub(super) fn experts(keys: &Keys<'_>) -> Result<(u64, u64), ModelError> {
    let experts = keys.u64(NUM_EXPERTS, &EXPERTS)?;
    let topk = keys.u64(TOPK, &EXPERTS)?;
    let name = |names: &[&'static str]| keys.find(names).map_or(names[0], |(name, _)| name);
    keys.expect_at_most((name(TOPK), topk), (name(NUM_EXPERTS), experts))?;
    Ok((experts, topk))
}

/// A router that scores as given and does nothing else.
pub(super) fn plain_router(score: Score, normalize: bool) -> Router {
    Router {
        score,
        normalize,
        scale: 1.0,
        bias: false,
        correction_bias: false,
        groups: None,
        aux_loss_coef: 0.0,
        scales_input: false,
    }
}

/// Group-limited routing (`n_group`, `topk_group`), where more than one group is configured.
pub(super) fn router_groups(
    keys: &Keys<'_>,
    experts: u64,
    topk: u64,
    scored_by: u64,
) -> Result<Option<RouterGroups>, ModelError> {
    let groups = keys.u64_or(&["n_group"], &EXPERTS, 1)?;
    let kept = keys.u64_or(&["topk_group"], &EXPERTS, groups)?;
    keys.expect_divides(("n_group", groups), ("the number of experts", experts))?;
    keys.expect_at_most(("topk_group", kept), ("n_group", groups))?;
    let reachable = kept * (experts / groups);
    keys.expect_at_most(
        ("num_experts_per_tok", topk),
        ("experts of the topk_group groups kept", reachable),
    )?;
    Ok((groups > 1).then_some(RouterGroups {
        groups,
        topk: kept,
        scored_by,
    }))
}

/// Whether layer `index` is sparse under `first_k_dense_replace` and `moe_layer_freq`.
pub(super) fn sparse_after_dense(
    keys: &Keys<'_>,
    layers: u64,
) -> Result<impl Fn(u64) -> bool + use<>, ModelError> {
    let first = keys.u64_or(&["first_k_dense_replace"], &(0..=*LAYERS.end()), 0)?;
    keys.expect_at_most(
        ("first_k_dense_replace", first),
        ("num_hidden_layers", layers),
    )?;
    let every = keys.u64_or(&["moe_layer_freq"], &LAYERS, 1)?;
    Ok(move |index: u64| index >= first && index.is_multiple_of(every))
}

/// A layer with a mixer and a feed-forward block.
pub(super) fn block(mixer: Mixer, ffn: Ffn) -> Layer {
    Layer {
        mixer: Some(mixer),
        ffn: Some(ffn),
        extra_params: 0,
    }
}

/// Refuses an activation other than the ones given.
pub(super) fn expect_silu(keys: &Keys<'_>) -> Result<(), ModelError> {
    keys.word_or(&["hidden_act"], &[("silu", ()), ("swish", ())], ())
}

/// A width, under any of the names.
pub(super) fn width(keys: &Keys<'_>, names: &[&str]) -> Result<u64, ModelError> {
    keys.u64(names, &WIDTH)
}

/// A model whose leading layers are dense and whose others, multi-token prediction included, have
/// experts: `first_k_dense_replace`, `intermediate_size`, `num_nextn_predict_layers`.
pub(super) fn dense_then_sparse(
    keys: &Keys<'_>,
    defaults: Defaults,
    rope: &Rope,
    attention: &Mixer,
    moe: &Moe,
) -> Result<Model, ModelError> {
    let num_layers = num_layers(keys)?;
    let sparse = sparse_after_dense(keys, num_layers)?;
    let layers = (0..num_layers)
        .map(|index| {
            let ffn = if sparse(index) {
                Ffn::Moe(moe.clone())
            } else {
                Ffn::Dense(swiglu(width(keys, &["intermediate_size"])?))
            };
            Ok(block(attention.clone(), ffn))
        })
        .collect::<Result<_, ModelError>>()?;
    let mut model = trunk(keys, defaults, NormKind::Rms, Some(rope), layers)?;
    model.mtp = (0..keys.u64_or(MTP, &(0..=*LAYERS.end()), 0)?)
        .map(|_| block(attention.clone(), Ffn::Moe(moe.clone())))
        .collect();
    Ok(model)
}

/// The sliding window; 0 is none, as some re-saved files have it.
pub(super) fn window(keys: &Keys<'_>) -> Result<Option<u64>, ModelError> {
    let window = keys.opt_u64(&["sliding_window"], &(0..=*POSITIONS.end()))?;
    Ok(window.filter(|window| *window > 0))
}

/// Which layers attend in full, by `layer_types`: `full` names the word that does, `other` the one
/// that does not.
pub(super) fn full_layers(
    keys: &Keys<'_>,
    layers: u64,
    full: &[&str],
    other: &[&str],
) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(words) = keys.opt_strings(&["layer_types"], layers)? else {
        return Ok(None);
    };
    words
        .into_iter()
        .map(|word| {
            if full.contains(&word) {
                Ok(true)
            } else if other.contains(&word) {
                Ok(false)
            } else {
                let known = full.iter().chain(other).copied();
                Err(keys.unknown_word("layer_types", word, known))
            }
        })
        .collect::<Result<_, _>>()
        .map(Some)
}
