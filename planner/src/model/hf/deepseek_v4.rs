//! DeepSeek-V4: one shared key/value head, low-rank queries, grouped low-rank output, a compressor
//! of distant keys on most layers (with an indexer on some), hyper-connections that keep several
//! residual streams, and first layers whose experts are looked up by token id.
//!
//! Parameter shapes follow transformers' `deepseek_v4` modules. The looked-up table is a buffer of
//! integers and not counted; those layers keep a router, whose scores weight the experts.

use super::common::{
    Defaults, MTP, block, experts, hidden, num_layers, plain_router, rope, swiglu, trunk, width,
};
use super::deepseek::{indexer, shared};
use super::keys::{HEADS, Keys, LAYERS, POSITIONS, WIDTH};
use crate::model::{
    Activation, Ffn, Layer, Mixer, Mlp, Model, ModelError, Moe, NormKind, Router, Score,
    SharedExpert, SharedKv,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
};

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    // Distant, compressed keys are rotated on a base of their own, and only they are rescaled.
    let distant = rope(keys, DEFAULTS, "compress", 64.0 / 512.0)?;
    let mut rope = rope(keys, DEFAULTS, "main", 64.0 / 512.0)?;
    rope.scaling = distant.scaling;
    // transformers writes it out.
    let yarn = rope
        .scaling
        .as_mut()
        .and_then(|scaling| scaling.yarn.as_mut());
    if let Some(yarn) = yarn {
        yarn.attention_factor.get_or_insert(1.0);
    }
    let hidden = hidden(keys)?;
    let num_layers = num_layers(keys)?;
    let depths = keys.u64_or(MTP, &(0..=*LAYERS.end()), 0)?;
    let ratios = ratios(keys, num_layers, depths)?;
    let hashed = hashed_layers(keys, num_layers)?;
    let streams = keys.u64_or(&["hc_mult"], &(1..=64), 4)?;
    let moe = moe(keys)?;
    let layer = |ratio: u64, hashed: bool| -> Result<Layer, ModelError> {
        let mut moe = moe.clone();
        if hashed {
            moe.router.score = Score::Hash;
            moe.router.correction_bias = false;
        }
        let mixer = Mixer::SharedKv(shared_kv(keys, hidden, ratio)?);
        Ok(Layer {
            extra_params: 2 * stream_mixer(streams, hidden),
            ..block(mixer, Ffn::Moe(moe))
        })
    };
    let main = ratios.iter().zip(hashed).take(num_layers as usize);
    let layers = main
        .map(|(ratio, hashed)| layer(*ratio, hashed))
        .collect::<Result<_, _>>()?;
    let mut model = trunk(keys, DEFAULTS, NormKind::Rms, Some(&rope), layers)?;
    model.residual_streams = streams;
    model.extra_params = stream_head(streams, hidden);
    for depth in 0..depths {
        let ratio = ratios.get((num_layers + depth) as usize).copied();
        let mut layer = layer(ratio.unwrap_or(0), false)?;
        layer.extra_params += stream_head(streams, hidden);
        model.mtp.push(layer);
    }
    Ok(model)
}

/// The compression of each layer: `compress_ratios` (an entry a layer, and one more for each MTP
/// layer) or `layer_types` with `compress_rates`.
fn ratios(keys: &Keys<'_>, num_layers: u64, depths: u64) -> Result<Vec<u64>, ModelError> {
    if let Some(ratios) = keys.opt_numbers(&["compress_ratios"])? {
        let found = ratios.len() as u64;
        if found != num_layers + depths {
            keys.expect_len(&["compress_ratios"], ratios.len(), num_layers)?;
        }
        return Ok(ratios);
    }
    let rates = keys.nested("compress_rates")?;
    let rate = |name: &str, default: u64| match &rates {
        Some(rates) => rates.u64_or(&[name], &WIDTH, default),
        None => Ok(default),
    };
    let sparse = rate("compressed_sparse_attention", 4)?;
    let heavy = rate("heavily_compressed_attention", 128)?;
    let words = keys
        .opt_strings(&["layer_types"], num_layers)?
        .ok_or_else(|| keys.missing(&["compress_ratios", "layer_types"], "one entry a layer"))?;
    words
        .into_iter()
        .map(|word| match word {
            "sliding_attention" => Ok(0),
            "compressed_sparse_attention" => Ok(sparse),
            "heavily_compressed_attention" => Ok(heavy),
            other => Err(keys.unknown_word(
                "layer_types",
                other,
                [
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                ]
                .into_iter(),
            )),
        })
        .collect()
}

/// Layers routed by token id: the first `num_hash_layers`, or `mlp_layer_types`.
fn hashed_layers(keys: &Keys<'_>, num_layers: u64) -> Result<Vec<bool>, ModelError> {
    if let Some(words) = keys.opt_strings(&["mlp_layer_types"], num_layers)? {
        return words
            .into_iter()
            .map(|word| match word {
                "hash_moe" => Ok(true),
                "moe" => Ok(false),
                other => Err(keys.unknown_word(
                    "mlp_layer_types",
                    other,
                    ["hash_moe", "moe"].into_iter(),
                )),
            })
            .collect();
    }
    let hashed = keys.u64_or(&["num_hash_layers"], &(0..=*LAYERS.end()), 3)?;
    Ok((0..num_layers).map(|index| index < hashed).collect())
}

fn shared_kv(keys: &Keys<'_>, hidden: u64, ratio: u64) -> Result<SharedKv, ModelError> {
    let heads = keys.u64(&["num_attention_heads"], &HEADS)?;
    let head_dim = keys.u64(&["head_dim"], &HEADS)?;
    let o_groups = keys.u64(&["o_groups"], &HEADS)?;
    keys.expect_divides(("o_groups", o_groups), ("num_attention_heads", heads))?;
    let q_lora_rank = keys.u64(&["q_lora_rank"], &HEADS)?;
    let rotary_dim = keys.u64_or(&["qk_rope_head_dim"], &HEADS, head_dim / 8)?;
    keys.expect_at_most(("qk_rope_head_dim", rotary_dim), ("head_dim", head_dim))?;
    // Compression by little selects among the compressed keys; by much, it keeps them all.
    let indexer = if ratio > 0 && ratio < 16 {
        Some(indexer(keys)?)
    } else {
        None
    };
    // A selecting compressor overlaps its windows: two projections of each kind.
    let overlap = if indexer.is_some() { 2 } else { 1 };
    let compressor = |width: u64| 2 * hidden * overlap * width + ratio * overlap * width + width;
    let mut compressor_params = if ratio > 0 { compressor(head_dim) } else { 0 };
    if let Some(indexer) = &indexer {
        compressor_params += compressor(indexer.head_dim)
            + q_lora_rank * indexer.heads * indexer.head_dim
            + hidden * indexer.heads;
    }
    Ok(SharedKv {
        heads,
        head_dim,
        q_lora_rank,
        o_lora_rank: keys.u64(&["o_lora_rank"], &HEADS)?,
        o_groups,
        rotary_dim,
        window: keys.u64_or(&["sliding_window"], &POSITIONS, 128)?,
        compress_ratio: ratio,
        indexer,
        compressor_params,
    })
}

fn moe(keys: &Keys<'_>) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let expert_width = width(keys, &["moe_intermediate_size"])?;
    let score = keys.word_or(
        &["scoring_func"],
        &[
            ("sqrtsoftplus", Score::SqrtSoftplus),
            ("sigmoid", Score::Sigmoid),
            ("softmax", Score::SoftmaxThenTopk),
        ],
        Score::SqrtSoftplus,
    )?;
    let activation = Activation::ClippedSilu(keys.positive_or(&["swiglu_limit"], 10.0)?);
    let clipped = |mlp: Mlp| Mlp { activation, ..mlp };
    Ok(Moe {
        experts,
        topk,
        expert: clipped(swiglu(expert_width)),
        shared: shared(keys, expert_width)?.map(|shared| SharedExpert {
            mlp: clipped(shared.mlp),
            ..shared
        }),
        router: Router {
            scale: keys.f64_or(&["routed_scaling_factor"], 1.0)?,
            correction_bias: true,
            ..plain_router(score, keys.bool_or(&["norm_topk_prob"], true)?)
        },
    })
}

/// Mixing of the residual streams around one block: a projection of all streams to a matrix and
/// two vectors over them, its offsets, three scales.
fn stream_mixer(streams: u64, hidden: u64) -> u64 {
    let outputs = streams * (streams + 2);
    outputs * streams * hidden + outputs + 3
}

/// Merging of the residual streams before the head.
fn stream_head(streams: u64, hidden: u64) -> u64 {
    streams * streams * hidden + streams + 1
}
