//! Attention and what rotates its queries and keys.

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, case};
use crate::attention::{self, Mask};
use crate::check::{Case, Inputs, Written};
use crate::rope::{self, Pairing, Rope};
use crate::tensor::Tensor;

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = core(sizes, dtype);
    all.extend(rotation(sizes, dtype));
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
    let scale = 1.0 / (qk_dim as f32).sqrt();
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
    let (op, full) = (|pass| masked(true, pass), |pass| masked(false, pass));
    let qkv = move |inputs: &mut Inputs<'_>| -> [Tensor; 3] {
        [
            inputs.tensor(&[t, heads, qk_dim], 1.0),
            inputs.tensor(&[t, kv_heads, qk_dim], 1.0),
            inputs.tensor(&[t, kv_heads, v_dim], 1.0),
        ]
    };
    vec![
        case("attention::forward", op(Pass::Forward), move |inputs| {
            let [q, k, v] = qkv(inputs);
            Box::new(move || {
                let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
                vec![Written::new("o", &o), Written::new("lse", &lse)]
            })
        }),
        case("attention::backward", op(Pass::Backward), move |inputs| {
            let [q, k, v] = qkv(inputs);
            let d_o = inputs.tensor(&[t, heads, v_dim], 1.0);
            let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
            Box::new(move || {
                let (dq, dk, dv) = attention::backward(&d_o, &q, &k, &v, &o, &lse, seqs, scale);
                vec![
                    Written::new("dq", &dq),
                    Written::new("dk", &dk),
                    Written::new("dv", &dv),
                ]
            })
        }),
        case(
            "attention::forward_of all keys",
            full(Pass::Forward),
            move |inputs| {
                let [q, k, v] = qkv(inputs);
                Box::new(move || {
                    let (o, lse) = attention::forward_of(Mask::Full, &q, &k, &v, seqs, scale);
                    vec![Written::new("o", &o), Written::new("lse", &lse)]
                })
            },
        ),
        case(
            "attention::backward_of all keys",
            full(Pass::Backward),
            move |inputs| {
                let [q, k, v] = qkv(inputs);
                let d_o = inputs.tensor(&[t, heads, v_dim], 1.0);
                let (o, lse) = attention::forward_of(Mask::Full, &q, &k, &v, seqs, scale);
                Box::new(move || {
                    let mask = Mask::Full;
                    let (dq, dk, dv) =
                        attention::backward_of(mask, &d_o, &q, &k, &v, &o, &lse, seqs, scale);
                    vec![
                        Written::new("dq", &dq),
                        Written::new("dk", &dk),
                        Written::new("dv", &dv),
                    ]
                })
            },
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
    for (name, rotary, pairing) in [
        ("", dim, Pairing::Halves),
        (" neighbours", dim, Pairing::Neighbours),
        (" half of a head", half, Pairing::Halves),
    ] {
        let inputs_of = move |inputs: &mut Inputs<'_>| -> (Tensor, Rope) {
            let x = inputs.tensor(&[t, heads, dim], 1.0);
            let positions: Vec<u32> = (0..t as u32).collect();
            let table = rope::table(inputs.device, &positions, rotary, 1e6).pairing(pairing);
            (x, table)
        };
        all.push(case(
            format!("rope::forward{name}"),
            op(Pass::Forward),
            move |inputs| {
                let (x, table) = inputs_of(inputs);
                Box::new(move || {
                    rope::forward(&x, &table);
                    vec![Written::new("x", &x)]
                })
            },
        ));
        all.push(case(
            format!("rope::backward{name}"),
            op(Pass::Backward),
            move |inputs| {
                let (dx, table) = inputs_of(inputs);
                Box::new(move || {
                    rope::backward(&dx, &table);
                    vec![Written::new("dx", &dx)]
                })
            },
        ));
    }
    all
}
