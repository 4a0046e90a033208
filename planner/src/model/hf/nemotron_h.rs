//! Nemotron-H and Nemotron 3 Nano (arXiv 2512.20848): blocks of one kind each (Mamba-2, attention
//! without rotary embedding, MLP or experts), one norm a block, squared ReLU without a gate.

use super::common::{Defaults, MTP, experts, gqa, plain_router, router_groups, trunk, width};
use super::keys::{EXPERTS, HEADS, Keys, LAYERS, WIDTH};
use crate::model::{
    Activation, Ffn, Gqa, Layer, LinearKind, LinearMixer, Mixer, Mlp, Model, ModelError, Moe,
    NormKind, Router, Score, SharedExpert,
};

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    theta: 10_000.0,
};

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

pub(super) fn read(keys: &Keys<'_>) -> Result<Model, ModelError> {
    keys.word_or(&["mlp_hidden_act"], &[("relu2", ())], ())?;
    if keys.has(&["moe_latent_size"]) {
        return Err(keys.wrong(
            "moe_latent_size",
            keys.find(&["moe_latent_size"]).expect("just found").1,
            "null: experts of a latent width are not read",
        ));
    }
    let blocks = blocks(keys)?;
    let layers = blocks
        .iter()
        .map(|block| layer(keys, *block))
        .collect::<Result<_, _>>()?;
    let mut model = trunk(keys, DEFAULTS, NormKind::Rms, None, layers)?;
    for _ in 0..keys.u64_or(MTP, &(0..=*LAYERS.end()), 0)? {
        model.mtp.push(Layer {
            mixer: layer(keys, Block::Attention)?.mixer,
            ffn: layer(keys, Block::Experts)?.ffn,
            extra_params: 0,
        });
    }
    Ok(model)
}

/// The blocks in order: `hybrid_override_pattern` (one letter a block) or `layers_block_type`.
fn blocks(keys: &Keys<'_>) -> Result<Vec<Block>, ModelError> {
    let stated = keys.opt_u64(&["num_hidden_layers"], &LAYERS)?;
    let blocks: Vec<Block> = if let Some(pattern) = keys.opt_str(&["hybrid_override_pattern"])? {
        pattern
            .chars()
            .map(|letter| match letter {
                'M' => Ok(Block::Mamba),
                '*' => Ok(Block::Attention),
                '-' => Ok(Block::Mlp),
                'E' => Ok(Block::Experts),
                _ => Err(keys.wrong(
                    "hybrid_override_pattern",
                    &letter.to_string().into(),
                    "letters M (Mamba-2), * (attention), - (MLP) and E (experts)",
                )),
            })
            .collect::<Result<_, _>>()?
    } else {
        let items = keys.opt_list(&["layers_block_type"])?.ok_or_else(|| {
            keys.missing(
                &["hybrid_override_pattern", "layers_block_type"],
                "the kind of every block",
            )
        })?;
        items
            .iter()
            .map(|item| match item.as_str() {
                Some("mamba" | "linear_attention") => Ok(Block::Mamba),
                Some("attention" | "full_attention") => Ok(Block::Attention),
                Some("mlp") => Ok(Block::Mlp),
                Some("moe") => Ok(Block::Experts),
                _ => Err(keys.wrong(
                    "layers_block_type",
                    item,
                    "linear_attention, full_attention, mlp or moe",
                )),
            })
            .collect::<Result<_, _>>()?
    };
    if let Some(stated) = stated {
        keys.expect_len(&["hybrid_override_pattern"], blocks.len(), stated)?;
    }
    if blocks.is_empty() || blocks.len() as u64 > *LAYERS.end() {
        return Err(keys.clash(
            "hybrid_override_pattern",
            &format!("{} blocks", blocks.len()),
            "the layers a model can have",
            &format!("1 to {} work", LAYERS.end()),
        ));
    }
    Ok(blocks)
}

fn layer(keys: &Keys<'_>, block: Block) -> Result<Layer, ModelError> {
    let (mixer, ffn) = match block {
        Block::Mamba => (Some(Mixer::Linear(mamba(keys)?)), None),
        Block::Attention => {
            let bias = keys.bool_or(&["attention_bias"], false)?;
            let attention = Gqa {
                qkv_bias: bias,
                out_bias: bias,
                ..gqa(keys, None)?
            };
            (Some(Mixer::Gqa(attention)), None)
        }
        Block::Mlp => (None, Some(Ffn::Dense(relu2(keys, "intermediate_size")?))),
        Block::Experts => (None, Some(Ffn::Moe(moe(keys)?))),
    };
    Ok(Layer {
        mixer,
        ffn,
        extra_params: 0,
    })
}

fn relu2(keys: &Keys<'_>, width_key: &str) -> Result<Mlp, ModelError> {
    Ok(Mlp {
        width: width(keys, &[width_key])?,
        gated: false,
        bias: keys.bool_or(&["mlp_bias"], false)?,
        activation: Activation::Relu2,
    })
}

/// Mamba-2 (arXiv 2405.21060): the input projection makes the gate and the input (`d_inner` each),
/// B and C (a state width a group each) and one time step a head.
fn mamba(keys: &Keys<'_>) -> Result<LinearMixer, ModelError> {
    let heads = keys.u64(&["mamba_num_heads"], &HEADS)?;
    let head_dim = keys.u64(&["mamba_head_dim"], &HEADS)?;
    let groups = keys.u64(&["n_groups"], &HEADS)?;
    keys.expect_divides(("n_groups", groups), ("mamba_num_heads", heads))?;
    let state = keys.u64(&["ssm_state_size"], &HEADS)?;
    let kernel = keys.u64_or(&["conv_kernel"], &HEADS, 4)?;
    let inner = heads * head_dim;
    let convolved = inner + 2 * groups * state;
    let in_proj = inner + convolved + heads;
    for (name, value) in [
        ("mamba_num_heads x mamba_head_dim", inner),
        ("n_groups x ssm_state_size", convolved),
    ] {
        keys.expect_at_most((name, value), ("the widest projection read", *WIDTH.end()))?;
    }
    let conv_bias = u64::from(keys.bool_or(&["use_conv_bias"], true)?);
    let proj_bias = u64::from(keys.bool_or(&["mamba_proj_bias", "use_bias"], false)?);
    let hidden = super::common::hidden(keys)?;
    Ok(LinearMixer {
        kind: LinearKind::Mamba2,
        heads,
        key_heads: groups,
        conv_kernel: kernel,
        key_dim: state,
        value_dim: head_dim,
        in_proj,
        out_proj: inner,
        // Convolution; A, D and the time-step bias of each head; the gated norm; biases.
        extra_params: convolved * (kernel + conv_bias)
            + 3 * heads
            + inner
            + proj_bias * (in_proj + hidden),
    })
}

fn moe(keys: &Keys<'_>) -> Result<Moe, ModelError> {
    let (experts, topk) = experts(keys)?;
    let shared = keys.u64_or(&["n_shared_experts"], &(0..=*EXPERTS.end()), 0)?;
    let shared = if shared > 0 {
        Some(SharedExpert {
            mlp: relu2(keys, "moe_shared_expert_intermediate_size")?,
            gated_output: false,
        })
    } else {
        None
    };
    Ok(Moe {
        experts,
        topk,
        expert: relu2(keys, "moe_intermediate_size")?,
        shared,
        router: Router {
            scale: keys.f64_or(&["routed_scaling_factor"], 1.0)?,
            correction_bias: true,
            groups: router_groups(keys, experts, topk, 2)?,
            ..plain_router(Score::Sigmoid, keys.bool_or(&["norm_topk_prob"], true)?)
        },
    })
}
