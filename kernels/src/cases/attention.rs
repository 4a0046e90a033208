//! Attention and what rotates its queries and keys.

use moefold_profiles::{Op, Pass};

use super::{Call, Source};
use crate::TensorClass;
use crate::attention::{self, Documents, Mask, Sequences};
use crate::latent_kv;
use crate::rope::{self, Pairing};

/// Attention of whole sequences: causal, of all keys, or of windows where there are fewer keys than queries.
pub(super) fn core(source: &mut dyn Source, op: &Op) -> Call {
    divided(source, op, None)
}

/// The same where every so many tokens a document begins.
pub(crate) fn divided(source: &mut dyn Source, op: &Op, every: Option<usize>) -> Call {
    let Op::Attention {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        qk_dim,
        v_dim,
        causal,
        pass,
        ..
    } = *op
    else {
        unreachable!("{op:?} is no attention")
    };
    let mask = match (causal, kv_len) {
        (true, _) if kv_len == q_len => Mask::Causal,
        (false, _) if kv_len == q_len => Mask::Full,
        (false, 1..) if kv_len < q_len => Mask::Window(kv_len as usize),
        _ => panic!("{op:?}: queries and keys are of one sequence"),
    };
    let [tokens, heads, kv_heads, qk_dim, v_dim] =
        [batch * q_len, heads, kv_heads, qk_dim, v_dim].map(|size| size as usize);
    let q = source.tensor(&[tokens, heads, qk_dim], 1.0);
    let k = source.tensor(&[tokens, kv_heads, qk_dim], 1.0);
    let v = source.tensor(&[tokens, kv_heads, v_dim], 1.0);
    let (seqs, scale) = (batch as usize, 1.0 / (qk_dim as f32).sqrt());
    let documents = every.map(|every| {
        let starts = (0..tokens).map(|token| token % q_len as usize / every * every);
        let starts: Vec<i32> = starts.map(|start| start as i32).collect();
        Documents::new(source.device(), TensorClass::Activations, &starts, seqs)
    });
    if pass == Pass::Forward {
        return Call::new(move |out| {
            let seqs = sequences(seqs, documents.as_ref());
            let (o, lse) = attention::forward(mask, &q, &k, &v, seqs, scale);
            out("o", &o);
            out("lse", &lse);
        });
    }
    let d_o = source.tensor(&[tokens, heads, v_dim], 1.0);
    let apart = sequences(seqs, documents.as_ref());
    let (o, lse) = attention::forward(mask, &q, &k, &v, apart, scale);
    Call::new(move |out| {
        let seqs = sequences(seqs, documents.as_ref());
        let (dq, dk, dv) = attention::backward(mask, &d_o, &q, &k, &v, &o, &lse, seqs, scale);
        out("dq", &dq);
        out("dk", &dk);
        out("dv", &dv);
    })
}

fn sequences(count: usize, documents: Option<&Documents>) -> Sequences<'_> {
    Sequences { count, documents }
}

/// What of a head is rotated, and how.
#[derive(Clone, Copy)]
pub(crate) struct Rotary {
    /// Columns of a head that turn.
    pub(crate) dim: usize,
    /// Columns before them.
    pub(crate) skipped: usize,
    pub(crate) theta: f64,
    /// Whether tokens name their rows of the tables, in turn those of the first half.
    pub(crate) named: bool,
    pub(crate) pairing: Pairing,
}

/// Rotates `[tokens, heads, dim]` in place, or turns a gradient back.
pub(crate) fn rotation(
    source: &mut dyn Source,
    [tokens, heads, dim]: [usize; 3],
    rotary: Rotary,
    pass: Pass,
) -> Call {
    let x = source.tensor(&[tokens, heads, dim], 1.0);
    let frequencies = rope::frequencies(rotary.dim, rotary.theta);
    let table = rope::table(source.device(), &(0..tokens as u32), &frequencies, 1.0);
    let mut table = table.pairing(rotary.pairing).skipping(rotary.skipped);
    if rotary.named {
        let rows = (0..tokens).map(|token| (token % tokens.div_ceil(2)) as i32);
        let rows: Vec<i32> = rows.collect();
        let class = TensorClass::Activations;
        table = table.at(source.device().from_i32(class, &rows, &[tokens]));
    }
    match pass {
        Pass::Forward => Call::new(move |out| {
            rope::forward(&x, &table);
            out("x", &x);
        }),
        _ => Call::new(move |out| {
            rope::backward(&x, &table);
            out("dx", &x);
        }),
    }
}

/// A rotation of `rows` heads, of as many heads a token as divide them.
pub(super) fn rotation_of_rows(
    source: &mut dyn Source,
    rows: usize,
    dim: usize,
    pass: Pass,
) -> Call {
    let heads = [8, 4, 2].into_iter().find(|&h| rows.is_multiple_of(h));
    let heads = heads.unwrap_or(1);
    let rotary = Rotary {
        dim,
        skipped: 0,
        theta: 1e4,
        named: false,
        pairing: Pairing::Halves,
    };
    rotation(source, [rows / heads, heads, dim], rotary, pass)
}

/// Keys and values of latent attention, or the gradients of what they are made of.
pub(super) fn latent(source: &mut dyn Source, op: &Op) -> Call {
    let Op::LatentKv {
        rows,
        heads,
        nope,
        rope,
        v_dim,
        pass,
        ..
    } = *op
    else {
        unreachable!("{op:?} is not of latent attention")
    };
    let [rows, heads, nope, rope, v_dim] =
        [rows, heads, nope, rope, v_dim].map(|size| size as usize);
    if pass == Pass::Forward {
        let kv = source.tensor(&[rows, heads, nope + v_dim], 1.0);
        let shared = source.tensor(&[rows, rope], 1.0);
        return Call::new(move |out| {
            let (keys, values) = latent_kv::forward(&kv, &shared, v_dim);
            out("keys", &keys);
            out("values", &values);
        });
    }
    let dkeys = source.tensor(&[rows, heads, nope + rope], 1.0);
    let dvalues = source.tensor(&[rows, heads, v_dim], 1.0);
    Call::new(move |out| {
        let (dkv, dshared) = latent_kv::backward(&dkeys, &dvalues, rope);
        out("dkv", &dkv);
        out("dshared", &dshared);
    })
}
