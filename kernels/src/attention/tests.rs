//! Tests of `attention` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, Rng, differences, inner, oracle, tensor, wide};

/// Attention by definition, one score at a time: `(o [T,h,dv], lse [h,T])`.
fn twin(s: Sizes, [q, k, v]: [&[f64]; 3], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let tokens = s.seqs * s.seq_len;
    let mut o = vec![0.0; tokens * s.heads * s.dv];
    let mut lse = vec![0.0; s.heads * tokens];
    for t in 0..tokens {
        let first = t / s.seq_len * s.seq_len;
        for h in 0..s.heads {
            let kv = h * s.kv_heads / s.heads;
            let score = |j: usize| {
                let mut sum = 0.0;
                for c in 0..s.dk {
                    sum += q[(t * s.heads + h) * s.dk + c] * k[(j * s.kv_heads + kv) * s.dk + c];
                }
                sum * scale
            };
            let total: f64 = (first..=t).map(|j| score(j).exp()).sum();
            for j in first..=t {
                for c in 0..s.dv {
                    o[(t * s.heads + h) * s.dv + c] +=
                        score(j).exp() / total * v[(j * s.kv_heads + kv) * s.dv + c];
                }
            }
            lse[h * tokens + t] = total.ln();
        }
    }
    (o, lse)
}

struct Case {
    sizes: Sizes,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    scale: f32,
}

impl Case {
    fn new(rng: &mut Rng, seq_len: usize, width: usize) -> Self {
        let kv_heads = rng.size(1..=2);
        let sizes = Sizes {
            seqs: rng.size(1..=3),
            seq_len,
            heads: kv_heads * rng.size(1..=3),
            kv_heads,
            dk: rng.size(1..=width),
            dv: rng.size(1..=width),
        };
        let tokens = sizes.seqs * seq_len;
        Self {
            sizes,
            q: rng.values(tokens * sizes.heads * sizes.dk),
            k: rng.values(tokens * kv_heads * sizes.dk),
            v: rng.values(tokens * kv_heads * sizes.dv),
            scale: (sizes.dk as f32).sqrt().recip(),
        }
    }

    fn tensors(&self, device: &crate::Device) -> [Tensor; 3] {
        let s = self.sizes;
        let tokens = s.seqs * s.seq_len;
        [
            tensor(device, &self.q, &[tokens, s.heads, s.dk]),
            tensor(device, &self.k, &[tokens, s.kv_heads, s.dk]),
            tensor(device, &self.v, &[tokens, s.kv_heads, s.dv]),
        ]
    }
}

#[test]
fn oracle_forward() {
    oracle(12, |device, rng| {
        let seq_len = [1, rng.size(2..=63), 64, 65, rng.size(66..=150)][rng.size(0..=4)];
        let case = Case::new(rng, seq_len, 24);
        let inputs = [&case.q, &case.k, &case.v].map(|x| wide(x));
        let inputs = inputs.each_ref().map(Vec::as_slice);
        let (o_want, lse_want) = twin(case.sizes, inputs, f64::from(case.scale));
        let [q, k, v] = case.tensors(device);
        let (o, lse) = forward(&q, &k, &v, case.sizes.seqs, case.scale);
        vec![Check("o", o, o_want), Check("lse", lse, lse_want)]
    });
}

#[test]
fn oracle_backward() {
    oracle(8, |device, rng| {
        let seq_len = rng.size(1..=9);
        let case = Case::new(rng, seq_len, 5);
        let s = case.sizes;
        let d_o = rng.values(s.seqs * seq_len * s.heads * s.dv);
        let (q, k, v) = (wide(&case.q), wide(&case.k), wide(&case.v));
        let scale = f64::from(case.scale);
        let loss = |q: &[f64], k: &[f64], v: &[f64]| inner(&twin(s, [q, k, v], scale).0, &d_o);
        let dq_want = differences(&case.q, |q| loss(q, &k, &v));
        let dk_want = differences(&case.k, |k| loss(&q, k, &v));
        let dv_want = differences(&case.v, |v| loss(&q, &k, v));
        let [q, k, v] = case.tensors(device);
        let d_o = tensor(device, &d_o, &[s.seqs * seq_len, s.heads, s.dv]);
        let (o, lse) = forward(&q, &k, &v, s.seqs, case.scale);
        let (dq, dk, dv) = backward(&d_o, &q, &k, &v, &o, &lse, s.seqs, case.scale);
        vec![
            Check("dq", dq, dq_want),
            Check("dk", dk, dk_want),
            Check("dv", dv, dv_want),
        ]
    });
}

/// Sequences of several blocks, where differences of the whole would take too long: the gradients by
/// the chain rule written out for one score at a time.
#[test]
fn oracle_backward_over_blocks() {
    oracle(6, |device, rng| {
        let seq_len = [64, 65, rng.size(66..=150)][rng.size(0..=2)];
        let case = Case::new(rng, seq_len, 12);
        let s = case.sizes;
        let tokens = s.seqs * seq_len;
        let d_o = rng.values(tokens * s.heads * s.dv);
        let (q, k, v, g) = (wide(&case.q), wide(&case.k), wide(&case.v), wide(&d_o));
        let scale = f64::from(case.scale);
        let (_, lse) = twin(s, [&q, &k, &v], scale);
        let mut dq = vec![0.0; q.len()];
        let mut dk = vec![0.0; k.len()];
        let mut dv = vec![0.0; v.len()];
        for t in 0..tokens {
            for h in 0..s.heads {
                let kv = h * s.kv_heads / s.heads;
                let (at_q, at_o) = ((t * s.heads + h) * s.dk, (t * s.heads + h) * s.dv);
                let mut probs = Vec::new();
                let mut dprobs = Vec::new();
                for j in t / seq_len * seq_len..=t {
                    let (at_k, at_v) = ((j * s.kv_heads + kv) * s.dk, (j * s.kv_heads + kv) * s.dv);
                    let score: f64 = (0..s.dk).map(|c| q[at_q + c] * k[at_k + c]).sum();
                    probs.push((score * scale - lse[h * tokens + t]).exp());
                    dprobs.push((0..s.dv).map(|c| g[at_o + c] * v[at_v + c]).sum::<f64>());
                }
                let mean: f64 = probs.iter().zip(&dprobs).map(|(p, d)| p * d).sum();
                for (i, j) in (t / seq_len * seq_len..=t).enumerate() {
                    let (at_k, at_v) = ((j * s.kv_heads + kv) * s.dk, (j * s.kv_heads + kv) * s.dv);
                    let ds = probs[i] * (dprobs[i] - mean) * scale;
                    for c in 0..s.dk {
                        dq[at_q + c] += ds * k[at_k + c];
                        dk[at_k + c] += ds * q[at_q + c];
                    }
                    for c in 0..s.dv {
                        dv[at_v + c] += probs[i] * g[at_o + c];
                    }
                }
            }
        }
        let [q, k, v] = case.tensors(device);
        let d_o = tensor(device, &d_o, &[tokens, s.heads, s.dv]);
        let (o, lse) = forward(&q, &k, &v, s.seqs, case.scale);
        let (dq_t, dk_t, dv_t) = backward(&d_o, &q, &k, &v, &o, &lse, s.seqs, case.scale);
        vec![
            Check("dq", dq_t, dq),
            Check("dk", dk_t, dk),
            Check("dv", dv_t, dv),
        ]
    });
}
