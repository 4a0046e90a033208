//! Attention and what rotates its queries and keys.

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

use super::{Sizes, called, case, keyed};
use crate::cases::{self as operands, Rotary, Source as _};
use crate::check::{Case, Written};
use crate::merge;
use crate::rope::Pairing;
use crate::sinks;

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = core(sizes, dtype);
    all.extend(rotation(sizes, dtype));
    all.extend(latent(sizes, dtype));
    all.push(parts(sizes, dtype));
    all.push(sinks(sizes, dtype));
    all
}

/// Half of the queries of an attention merged into all of them.
fn parts(sizes: &Sizes, dtype: Dtype) -> Case {
    let (t, heads, width) = (sizes.tokens / 2, sizes.heads, sizes.v_dim);
    let op = Op::Sweep {
        kind: SweepKind::Merge,
        len: (t * heads * width) as u64,
        dtype,
    };
    case("merge::merge", op, move |inputs| {
        let o = inputs.tensor(&[2 * t, heads, width], 1.0);
        let part = inputs.tensor(&[t, heads, width], 1.0);
        let lse = inputs.statistic(&[heads, 2 * t], 2.0);
        let part_lse = inputs.statistic(&[heads, t], 2.0);
        Box::new(move || {
            merge::merge(&part, &part_lse, t, &o, &lse);
            vec![Written::new("o", &o), Written::new("lse", &lse)]
        })
    })
}

/// What attention gives beside sinks, and the gradient of those.
fn sinks(sizes: &Sizes, dtype: Dtype) -> Case {
    let (t, heads, width) = (sizes.tokens, sizes.heads, sizes.v_dim);
    let op = Op::Sweep {
        kind: SweepKind::Scale,
        len: (t * heads * width) as u64,
        dtype,
    };
    case("sinks::forward, sinks::backward", op, move |inputs| {
        let [o, d_o, other] = [(); 3].map(|()| inputs.tensor(&[t, heads, width], 1.0));
        let lse = inputs.statistic(&[heads, t], 2.0);
        let sinks = inputs.tensor(&[heads], 2.0);
        let dsinks = inputs.statistic(&[heads], 1.0);
        Box::new(move || {
            sinks::backward(&d_o, &other, &lse, &sinks, &dsinks);
            let with_sinks = sinks::forward(&o, &lse, &sinks);
            vec![
                Written::new("o", &o),
                Written::new("lse", &with_sinks),
                Written::new("dsinks", &dsinks),
            ]
        })
    })
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
    let len = t / seqs;
    let masked = |causal, keys: usize, pass| Op::Attention {
        batch: seqs as u64,
        heads: heads as u64,
        kv_heads: kv_heads as u64,
        q_len: len as u64,
        kv_len: keys as u64,
        qk_dim: qk_dim as u64,
        v_dim: v_dim as u64,
        causal,
        pass,
        dtype,
    };
    let mut all = Vec::new();
    for (name, causal, keys) in [
        ("", true, len),
        ("_of all keys", false, len),
        ("_of a window", false, (len / 3).max(1)),
    ] {
        for (function, pass) in [("forward", Pass::Forward), ("backward", Pass::Backward)] {
            let name = format!("attention::{function}{name}");
            all.push(keyed(name, masked(causal, keys, pass)));
        }
    }
    for (function, pass) in [("forward", Pass::Forward), ("backward", Pass::Backward)] {
        let name = format!("attention::{function}_of documents");
        let (op, every) = (masked(true, len, pass), (len * 2 / 5).max(1));
        all.push(called(name, op, move |inputs| {
            operands::divided(inputs, &op, Some(every))
        }));
    }
    all
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
    for (name, rotary, skipped, pairing, named) in [
        ("", dim, 0, Pairing::Halves, false),
        (" neighbours", dim, 0, Pairing::Neighbours, false),
        (" half of a head", half, 0, Pairing::Halves, false),
        (
            " end of a head",
            half,
            dim - half,
            Pairing::Neighbours,
            false,
        ),
        (" at positions", dim, 0, Pairing::Halves, true),
        (
            " neighbours at positions",
            dim,
            0,
            Pairing::Neighbours,
            true,
        ),
    ] {
        let rotary = Rotary {
            dim: rotary,
            skipped,
            theta: 1e6,
            named,
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
