//! Attention and what rotates its queries and keys.

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, called, keyed};
use crate::cases::{self as operands, Rotary};
use crate::check::Case;
use crate::rope::Pairing;

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = core(sizes, dtype);
    all.extend(rotation(sizes, dtype));
    all.extend(latent(sizes, dtype));
    all
}

fn core(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let Sizes {
        tokens: t,
        seqs,
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        ..
    } = *sizes;
    let masked = |causal, pass| Op::Attention {
        batch: seqs as u64,
        heads: heads as u64,
        kv_heads: kv_heads as u64,
        q_len: (t / seqs) as u64,
        kv_len: (t / seqs) as u64,
        qk_dim: qk_dim as u64,
        v_dim: v_dim as u64,
        causal,
        pass,
        dtype,
    };
    vec![
        keyed("attention::forward", masked(true, Pass::Forward)),
        keyed("attention::backward", masked(true, Pass::Backward)),
        keyed(
            "attention::forward_of all keys",
            masked(false, Pass::Forward),
        ),
        keyed(
            "attention::backward_of all keys",
            masked(false, Pass::Backward),
        ),
    ]
}

/// All of a head and half of it, in pairs of either kind, there and back.
fn rotation(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, heads, dim) = (sizes.tokens, sizes.heads, sizes.qk_dim);
    let op = |pass| Op::Rope {
        rows: (t * heads) as u64,
        dim: dim as u64,
        pass,
        dtype,
    };
    let half = dim / 4 * 2;
    let mut all = Vec::new();
    for (name, rotary, skipped, pairing) in [
        ("", dim, 0, Pairing::Halves),
        (" neighbours", dim, 0, Pairing::Neighbours),
        (" half of a head", half, 0, Pairing::Halves),
        (" end of a head", half, dim - half, Pairing::Neighbours),
    ] {
        let rotary = Rotary {
            dim: rotary,
            skipped,
            theta: 1e6,
            pairing,
        };
        for (function, pass) in [("forward", Pass::Forward), ("backward", Pass::Backward)] {
            let name = format!("rope::{function}{name}");
            all.push(called(name, op(pass), move |inputs| {
                operands::rotation(inputs, [t, heads, dim], rotary, pass)
            }));
        }
    }
    all
}

/// Keys of which a third is what all heads share.
fn latent(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let rope = sizes.qk_dim / 3;
    let op = |pass| Op::LatentKv {
        rows: sizes.tokens as u64,
        heads: sizes.heads as u64,
        nope: (sizes.qk_dim - rope) as u64,
        rope: rope as u64,
        v_dim: sizes.v_dim as u64,
        pass,
        dtype,
    };
    vec![
        keyed("latent_kv::forward", op(Pass::Forward)),
        keyed("latent_kv::backward", op(Pass::Backward)),
    ]
}
