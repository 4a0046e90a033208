//! What sizes a model may have: far beyond every real one, and small enough that no count of parameters, bytes or
//! FLOPs leaves its type.
//!
//! Readers of configurations check single keys by the same ranges. A model in a plan was read from a file that
//! anyone may have edited, so it is checked whole.

use std::ops::RangeInclusive;

use super::{
    Activation, Ffn, Gqa, Indexer, Layer, LinearMixer, Mixer, Mla, Mlp, Model, Moe, RopeScaling,
    Router, SharedKv,
};

/// Widths of tensors and heads.
pub(crate) const WIDTH: RangeInclusive<u64> = 1..=262_144;
/// Counts of heads.
pub(crate) const HEADS: RangeInclusive<u64> = 1..=16_384;
/// Counts of experts.
pub(crate) const EXPERTS: RangeInclusive<u64> = 1..=16_384;
/// Counts of layers.
pub(crate) const LAYERS: RangeInclusive<u64> = 1..=1_024;
/// Vocabularies.
pub(crate) const VOCAB: RangeInclusive<u64> = 1..=16_777_216;
/// Positions and windows.
pub(crate) const POSITIONS: RangeInclusive<u64> = 1..=1_099_511_627_776;
/// Widths that are sums of others: of projections of all heads, of shared experts.
const SUM: RangeInclusive<u64> = 1..=67_108_864;
/// Parameters that no other term has, and those of a model.
const PARAMETERS: RangeInclusive<u64> = 0..=(1 << 50);

/// A size that no model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutOfBounds {
    /// Where, from the model on.
    pub(crate) key: String,
    /// What was found.
    pub(crate) found: String,
    /// What would be one.
    pub(crate) expected: String,
}

type Checked = Result<(), OutOfBounds>;

impl Model {
    /// Refuses sizes that no model has, and parts that contradict each other.
    pub(crate) fn check(&self) -> Checked {
        within("vocab_size", self.vocab_size, &VOCAB)?;
        within("hidden", self.hidden, &WIDTH)?;
        within("residual_streams", self.residual_streams, &(1..=64))?;
        within("layers", self.layers.len() as u64, &LAYERS)?;
        within("mtp", self.mtp.len() as u64, &(0..=*LAYERS.end()))?;
        within("extra_params", self.extra_params, &PARAMETERS)?;
        optional("max_position", self.max_position, &POSITIONS)?;
        finite("norm.eps", self.norm.eps, 0.0..=1.0)?;
        finite("initializer_range", self.initializer_range, 0.0..=1e6)?;
        finite("attention_dropout", self.attention_dropout, 0.0..=1.0)?;
        if let Some(theta) = self.rope_theta {
            finite("rope_theta", theta, f64::MIN_POSITIVE..=1e30)?;
        }
        if let Some(scaling) = &self.rope_scaling {
            check_scaling(scaling).map_err(under("rope_scaling"))?;
        }
        let scalars = &self.scalars;
        for (key, scalar) in [
            ("scalars.embedding", scalars.embedding),
            ("scalars.residual", scalars.residual),
            ("scalars.logits", scalars.logits),
            ("scalars.skip", scalars.skip),
        ] {
            finite(key, scalar, -1e30..=1e30)?;
        }
        if scalars.logits == 0.0 {
            return refuse(
                "scalars.logits",
                &0.0,
                "another number: logits are divided by it",
            );
        }
        for (list, layers) in [("layers", &self.layers), ("mtp", &self.mtp)] {
            for (index, layer) in layers.iter().enumerate() {
                check_layer(layer).map_err(under(&format!("{list}[{index}]")))?;
            }
        }
        self.check_alike()?;
        // Each layer's fit their type by the limits above; their sum may not.
        let layers = self.layers.iter().chain(&self.mtp);
        let all: u128 = layers.map(|layer| most_params(layer, self.hidden)).sum();
        let all = all + 2 * u128::from(self.vocab_size * self.hidden);
        if all > u128::from(*PARAMETERS.end()) {
            let expected = format!("at most {}", PARAMETERS.end());
            return refuse("its parameters", &all, &expected);
        }
        Ok(())
    }
}

impl Model {
    /// Refuses layers that differ in what one model has one of: the shape of an expert, and the rotated width of
    /// latent attention, which one table serves.
    fn check_alike(&self) -> Checked {
        let layers = || self.layers.iter().chain(&self.mtp);
        let expert = |layer: &Layer| layer.moe().map(|moe| moe.expert.clone());
        let rotated = |layer: &Layer| match &layer.mixer {
            Some(Mixer::Mla(mla)) => Some(mla.qk_rope_head_dim),
            _ => None,
        };
        let first = (layers().find_map(expert), layers().find_map(rotated));
        for (index, layer) in layers().enumerate() {
            let key = |rest: &str| format!("layer {index}: {rest}");
            if expert(layer).is_some_and(|expert| Some(&expert) != first.0.as_ref()) {
                let expected = "what those of the other layers are";
                return refuse(&key("its experts"), &"another shape", expected);
            }
            if let (Some(found), Some(first)) = (rotated(layer), first.1)
                && found != first
            {
                let expected = format!("{first}, as in the other layers");
                return refuse(&key("qk_rope_head_dim"), &found, &expected);
            }
        }
        Ok(())
    }
}

/// No fewer parameters than a layer has, of the terms that grow with its widths.
fn most_params(layer: &Layer, hidden: u64) -> u128 {
    let hidden = u128::from(hidden);
    let wide = |width: u64| u128::from(width) * hidden;
    let mixer = match &layer.mixer {
        None => 0,
        Some(Mixer::Gqa(gqa)) => wide((3 * gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim),
        Some(Mixer::Mla(mla)) => {
            let rank = mla.kv_lora_rank + mla.q_lora_rank.unwrap_or(0);
            let head = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim;
            let heads = u128::from(mla.heads * head);
            wide(rank) + 2 * heads * (u128::from(rank) + hidden)
        }
        Some(Mixer::SharedKv(kv)) => {
            let heads = u128::from(kv.heads * kv.head_dim);
            let rank = u128::from(kv.q_lora_rank + kv.o_lora_rank * kv.o_groups);
            u128::from(kv.compressor_params) + (heads + hidden) * (rank + u128::from(kv.head_dim))
        }
        Some(Mixer::Linear(linear)) => {
            u128::from(linear.extra_params) + wide(linear.in_proj + linear.out_proj)
        }
    };
    let ffn = match &layer.ffn {
        None => 0,
        Some(Ffn::Dense(mlp)) => wide(3 * mlp.width),
        Some(Ffn::Moe(moe)) => {
            let shared = moe.shared.as_ref().map_or(0, |shared| 3 * shared.mlp.width);
            wide(3 * moe.expert.width) * u128::from(moe.experts) + wide(shared + moe.experts)
        }
    };
    u128::from(layer.extra_params) + mixer + ffn
}

fn check_layer(layer: &Layer) -> Checked {
    within("extra_params", layer.extra_params, &PARAMETERS)?;
    match &layer.mixer {
        None => Ok(()),
        Some(Mixer::Gqa(gqa)) => check_gqa(gqa).map_err(under("mixer.gqa")),
        Some(Mixer::Mla(mla)) => check_mla(mla).map_err(under("mixer.mla")),
        Some(Mixer::SharedKv(kv)) => check_shared_kv(kv).map_err(under("mixer.shared_kv")),
        Some(Mixer::Linear(linear)) => check_linear(linear).map_err(under("mixer.linear")),
    }?;
    match &layer.ffn {
        None => Ok(()),
        Some(Ffn::Dense(mlp)) => check_mlp(mlp).map_err(under("ffn.dense")),
        Some(Ffn::Moe(moe)) => check_moe(moe).map_err(under("ffn.moe")),
    }
}

fn check_gqa(gqa: &Gqa) -> Checked {
    within("heads", gqa.heads, &HEADS)?;
    divides("kv_heads", gqa.kv_heads, ("heads", gqa.heads))?;
    within("head_dim", gqa.head_dim, &WIDTH)?;
    rotated("rotary_dim", gqa.rotary_dim, gqa.head_dim)?;
    within("heads x head_dim", gqa.heads * gqa.head_dim, &SUM)?;
    optional("window", gqa.window, &POSITIONS)?;
    optional("chunk", gqa.chunk, &POSITIONS)?;
    for (key, factor) in [("scale", gqa.scale), ("clip", gqa.clip)] {
        finite(key, factor.unwrap_or(1.0), f64::MIN_POSITIVE..=1e30)?;
    }
    Ok(())
}

fn check_mla(mla: &Mla) -> Checked {
    within("heads", mla.heads, &HEADS)?;
    optional("q_lora_rank", mla.q_lora_rank, &WIDTH)?;
    within("kv_lora_rank", mla.kv_lora_rank, &WIDTH)?;
    within("qk_nope_head_dim", mla.qk_nope_head_dim, &WIDTH)?;
    let rope = mla.qk_rope_head_dim;
    within("qk_rope_head_dim", rope, &(0..=*WIDTH.end()))?;
    rotated("qk_rope_head_dim", rope, rope)?;
    within("v_head_dim", mla.v_head_dim, &WIDTH)?;
    let head = mla.qk_nope_head_dim + rope + mla.v_head_dim;
    within("heads x their widths", mla.heads * head, &SUM)?;
    mla.indexer.as_ref().map_or(Ok(()), check_indexer)
}

fn check_shared_kv(kv: &SharedKv) -> Checked {
    within("heads", kv.heads, &HEADS)?;
    within("head_dim", kv.head_dim, &WIDTH)?;
    within("heads x head_dim", kv.heads * kv.head_dim, &SUM)?;
    within("q_lora_rank", kv.q_lora_rank, &WIDTH)?;
    within("o_lora_rank", kv.o_lora_rank, &WIDTH)?;
    divides("o_groups", kv.o_groups, ("heads", kv.heads))?;
    rotated("rotary_dim", kv.rotary_dim, kv.head_dim)?;
    within("window", kv.window, &POSITIONS)?;
    within("compress_ratio", kv.compress_ratio, &(0..=*POSITIONS.end()))?;
    within("compressor_params", kv.compressor_params, &PARAMETERS)?;
    kv.indexer.as_ref().map_or(Ok(()), check_indexer)
}

fn check_indexer(indexer: &Indexer) -> Checked {
    within("indexer.heads", indexer.heads, &HEADS)?;
    within("indexer.head_dim", indexer.head_dim, &WIDTH)?;
    let width = indexer.heads * indexer.head_dim;
    within("indexer.heads x head_dim", width, &SUM)?;
    within("indexer.topk", indexer.topk, &POSITIONS)
}

fn check_linear(linear: &LinearMixer) -> Checked {
    within("heads", linear.heads, &HEADS)?;
    within("key_heads", linear.key_heads, &HEADS)?;
    within("conv_kernel", linear.conv_kernel, &(0..=1024))?;
    within("key_dim", linear.key_dim, &WIDTH)?;
    within("value_dim", linear.value_dim, &WIDTH)?;
    let states = linear.heads * linear.value_dim;
    within("heads x value_dim", states, &SUM)?;
    within(
        "key_heads x key_dim",
        linear.key_heads * linear.key_dim,
        &SUM,
    )?;
    within("in_proj", linear.in_proj, &SUM)?;
    within("out_proj", linear.out_proj, &SUM)?;
    within("extra_params", linear.extra_params, &PARAMETERS)
}

fn check_mlp(mlp: &Mlp) -> Checked {
    within("width", mlp.width, &SUM)?;
    match mlp.activation {
        Activation::Silu | Activation::Relu2 => Ok(()),
        Activation::ClippedSilu(limit) | Activation::ClippedGelu(limit) => {
            finite("activation", limit, f64::MIN_POSITIVE..=1e30)
        }
    }
}

fn check_moe(moe: &Moe) -> Checked {
    within("experts", moe.experts, &EXPERTS)?;
    within("topk", moe.topk, &(1..=moe.experts))?;
    check_mlp(&moe.expert).map_err(under("expert"))?;
    if let Some(shared) = &moe.shared {
        check_mlp(&shared.mlp).map_err(under("shared.mlp"))?;
    }
    check_router(&moe.router, moe).map_err(under("router"))
}

fn check_router(router: &Router, moe: &Moe) -> Checked {
    finite("scale", router.scale, -1e30..=1e30)?;
    finite("aux_loss_coef", router.aux_loss_coef, 0.0..=1e30)?;
    let Some(groups) = &router.groups else {
        return Ok(());
    };
    divides("groups.groups", groups.groups, ("experts", moe.experts))?;
    within("groups.topk", groups.topk, &(1..=groups.groups))?;
    let experts = moe.experts / groups.groups;
    within("groups.scored_by", groups.scored_by, &(1..=experts))?;
    // Of fewer experts a token could not choose as many as it has to.
    within(
        "topk of the kept groups",
        moe.topk,
        &(1..=groups.topk * experts),
    )
}

fn check_scaling(scaling: &RopeScaling) -> Checked {
    let positive = f64::MIN_POSITIVE..=1e30;
    finite("factor", scaling.factor.unwrap_or(1.0), positive.clone())?;
    if let Some(yarn) = &scaling.yarn {
        let positions = yarn.original_max_position;
        within("yarn.original_max_position", positions, &POSITIONS)?;
        finite("yarn.beta_fast", yarn.beta_fast, positive.clone())?;
        finite("yarn.beta_slow", yarn.beta_slow, positive.clone())?;
        for (key, factor) in [
            ("yarn.attention_factor", yarn.attention_factor),
            ("yarn.mscale", yarn.mscale),
            ("yarn.mscale_all_dim", yarn.mscale_all_dim),
        ] {
            finite(key, factor.unwrap_or(0.0), 0.0..=1e30)?;
        }
    }
    if let Some(llama3) = &scaling.llama3 {
        let positions = llama3.original_max_position;
        within("llama3.original_max_position", positions, &POSITIONS)?;
        finite(
            "llama3.low_freq_factor",
            llama3.low_freq_factor,
            positive.clone(),
        )?;
        finite("llama3.high_freq_factor", llama3.high_freq_factor, positive)?;
    }
    Ok(())
}

fn within(key: &str, found: u64, range: &RangeInclusive<u64>) -> Checked {
    if range.contains(&found) {
        return Ok(());
    }
    refuse(
        key,
        &found,
        &format!("{} to {}", range.start(), range.end()),
    )
}

fn optional(key: &str, found: Option<u64>, range: &RangeInclusive<u64>) -> Checked {
    found.map_or(Ok(()), |found| within(key, found, range))
}

fn divides(key: &str, found: u64, (of_key, of): (&str, u64)) -> Checked {
    if found != 0 && of.is_multiple_of(found) {
        return Ok(());
    }
    refuse(
        key,
        &found,
        &format!("a divisor of {of_key}, which is {of}"),
    )
}

/// Pairs of a head are rotated.
fn rotated(key: &str, found: u64, head: u64) -> Checked {
    if found.is_multiple_of(2) && found <= head {
        return Ok(());
    }
    refuse(key, &found, &format!("an even number up to {head}"))
}

/// Not a number is in no range.
fn finite(key: &str, found: f64, range: RangeInclusive<f64>) -> Checked {
    if range.contains(&found) {
        return Ok(());
    }
    let (start, end) = range.into_inner();
    let from = if start == f64::MIN_POSITIVE {
        "above 0,".to_owned()
    } else {
        format!("from {start}")
    };
    refuse(key, &found, &format!("a number {from} up to {end:?}"))
}

fn refuse(key: &str, found: &dyn std::fmt::Display, expected: &str) -> Checked {
    Err(OutOfBounds {
        key: key.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    })
}

fn under(prefix: &str) -> impl Fn(OutOfBounds) -> OutOfBounds {
    move |broken| OutOfBounds {
        key: format!("{prefix}.{}", broken.key),
        ..broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn every_preset_is_within_bounds() {
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            assert_eq!(model.check(), Ok(()), "{name}");
        }
    }

    #[test]
    fn the_most_parameters_are_no_fewer_than_there_are() {
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            for layer in &model.layers {
                let of = |layers: Vec<Layer>| {
                    let model = Model {
                        layers,
                        ..model.clone()
                    };
                    crate::model::count::params(&model).total()
                };
                let own = of(vec![layer.clone()]) - of(Vec::new());
                // Norms and biases are left out, which are vectors.
                let vectors = u128::from(64 * model.hidden);
                let most = most_params(layer, model.hidden) + vectors;
                assert!(most >= u128::from(own), "{name}: {most} {own}");
            }
        }
    }
}
