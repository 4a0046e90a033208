//! Ops by key, ready to be timed: each with operands of its shape in several places of memory, used
//! in turn.

use moefold_kernels::cross_entropy::{self, Reduced};
use moefold_kernels::gemm::{self, Trans};
use moefold_kernels::router::{self, RouterRule, Score};
use moefold_kernels::{
    Device, TensorClass, adamw, attention, elementwise, embedding, grad_norm, grouped_gemm,
    permute, rms_norm, rope, swiglu,
};
use moefold_kernels::{Dtype, Tensor};
use moefold_profiles::{Op, Pass};

/// Operands are spread over at least this much memory, beyond the caches of one core, ...
const SPREAD_BYTES: u64 = 32 << 20;
/// ... but over no more places than this.
const PLACES_MAX: u64 = 8;
/// Experts that rows are spread over where the key does not say.
const EXPERTS: usize = 8;
/// Entries of a vocabulary where the key does not say.
const VOCAB: usize = 4096;

/// Why an op cannot be measured on this device.
pub(super) fn refusal(op: &Op) -> Option<&'static str> {
    if op.dtype() != Dtype::F32 {
        return Some("the CPU computes in f32");
    }
    match *op {
        Op::LinearAttention { .. } => Some("linear attention is not executed"),
        Op::Attention {
            causal,
            q_len,
            kv_len,
            ..
        } if !causal || q_len != kv_len => {
            Some("attention is executed causal, over whole sequences")
        }
        Op::Rope { dim, .. } if dim % 2 == 1 => Some("an odd width cannot be rotated"),
        _ => None,
    }
}

/// A closure that runs the op once. Panics on what [`refusal`] refuses.
pub(super) fn prepare(device: &Device, op: &Op) -> Box<dyn FnMut()> {
    let places = SPREAD_BYTES
        .div_ceil(op.bytes().0.max(1))
        .clamp(1, PLACES_MAX);
    let mut runs: Vec<Box<dyn Fn()>> = (0..places)
        .map(|place| one_place(&Operands { device, place }, op))
        .collect();
    Box::new(move || {
        runs[0]();
        runs.rotate_left(1);
    })
}

/// Makes the operands of one place.
struct Operands<'a> {
    device: &'a Device,
    place: u64,
}

impl Operands<'_> {
    /// Finite, different numbers of ordinary size.
    fn tensor(&self, dims: &[u64]) -> Tensor {
        let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
        let len: usize = dims.iter().product();
        let first = self.place as usize * 7;
        let values: Vec<f32> = (first..first + len)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0)
            .collect();
        self.device.from_f32(TensorClass::Transient, &values, &dims)
    }

    /// Ids below `bound`, spread evenly.
    fn ids(&self, dims: &[usize], bound: usize) -> Tensor {
        let len: usize = dims.iter().product();
        let values: Vec<i32> = (0..len).map(|i| (i * 7919 % bound) as i32).collect();
        self.device.from_i32(TensorClass::Transient, &values, dims)
    }
}

fn one_place(operands: &Operands<'_>, op: &Op) -> Box<dyn Fn()> {
    let tensor = |dims: &[u64]| operands.tensor(dims);
    match *op {
        Op::Gemm { m, n, k, pass, .. } => {
            let c = tensor(&[m, n]);
            match pass {
                Pass::Wgrad => {
                    let (dy, x) = (tensor(&[k, m]), tensor(&[k, n]));
                    Box::new(move || gemm::gemm(&dy, Trans::Yes, &x, Trans::No, &c, 1.0))
                }
                Pass::Dgrad | Pass::Backward => {
                    let (dy, w) = (tensor(&[m, k]), tensor(&[k, n]));
                    Box::new(move || gemm::gemm(&dy, Trans::No, &w, Trans::No, &c, 0.0))
                }
                Pass::Forward => {
                    let (x, w) = (tensor(&[m, k]), tensor(&[n, k]));
                    Box::new(move || gemm::gemm(&x, Trans::No, &w, Trans::Yes, &c, 0.0))
                }
            }
        }
        Op::GroupedGemm {
            groups,
            rows,
            n,
            k,
            pass,
            ..
        } => {
            let counts: Vec<usize> = (0..groups)
                .map(|e| ((e + 1) * rows / groups - e * rows / groups) as usize)
                .collect();
            let w = tensor(&[groups, n, k]);
            match pass {
                Pass::Wgrad => {
                    let (dy, x) = (tensor(&[rows, n]), tensor(&[rows, k]));
                    Box::new(move || grouped_gemm::wgrad(&dy, &x, &counts, &w))
                }
                Pass::Dgrad | Pass::Backward => {
                    let dy = tensor(&[rows, n]);
                    Box::new(move || drop(grouped_gemm::dgrad(&dy, &w, &counts)))
                }
                Pass::Forward => {
                    let x = tensor(&[rows, k]);
                    Box::new(move || drop(grouped_gemm::forward(&x, &w, &counts)))
                }
            }
        }
        Op::Attention {
            batch,
            heads,
            kv_heads,
            q_len,
            qk_dim,
            v_dim,
            pass,
            ..
        } => {
            let tokens = batch * q_len;
            let (q, k) = (
                tensor(&[tokens, heads, qk_dim]),
                tensor(&[tokens, kv_heads, qk_dim]),
            );
            let v = tensor(&[tokens, kv_heads, v_dim]);
            let (seqs, scale) = (batch as usize, 1.0 / (qk_dim as f32).sqrt());
            if pass == Pass::Forward {
                return Box::new(move || drop(attention::forward(&q, &k, &v, seqs, scale)));
            }
            let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
            let d_o = tensor(&[tokens, heads, v_dim]);
            Box::new(move || {
                drop(attention::backward(&d_o, &q, &k, &v, &o, &lse, seqs, scale));
            })
        }
        Op::RmsNorm {
            rows, dim, pass, ..
        } => {
            let (x, w) = (tensor(&[rows, dim]), tensor(&[dim]));
            if pass == Pass::Forward {
                return Box::new(move || drop(rms_norm::forward(&x, &w, 1e-6)));
            }
            let (dy, rstd) = rms_norm::forward(&x, &w, 1e-6);
            let dw = tensor(&[dim]);
            Box::new(move || drop(rms_norm::backward(&dy, &x, &w, &rstd, &dw)))
        }
        Op::Rope {
            rows, dim, pass, ..
        } => {
            let heads = [8, 4, 2].into_iter().find(|h| rows % h == 0).unwrap_or(1);
            let x = tensor(&[rows / heads, heads, dim]);
            let positions: Vec<u32> = (0..(rows / heads) as u32).collect();
            let table = rope::table(operands.device, &positions, dim as usize, 1e4);
            match pass {
                Pass::Forward => Box::new(move || rope::forward(&x, &table)),
                _ => Box::new(move || rope::backward(&x, &table)),
            }
        }
        Op::Swiglu {
            rows, dim, pass, ..
        } => {
            let (x, probs) = (tensor(&[rows, 2 * dim]), tensor(&[rows]));
            if pass == Pass::Forward {
                return Box::new(move || drop(swiglu::forward(&x, Some(&probs))));
            }
            let dy = tensor(&[rows, dim]);
            Box::new(move || drop(swiglu::backward(&dy, &x, Some(&probs))))
        }
        Op::Router {
            rows,
            experts,
            topk,
            pass,
        } => {
            let logits = tensor(&[rows, experts]);
            let rule = RouterRule {
                score: Score::SoftmaxThenTopk,
                normalize: true,
                scale: 1.0,
            };
            let topk = topk as usize;
            if pass == Pass::Forward {
                return Box::new(move || drop(router::forward(&logits, topk, &rule)));
            }
            let routing = router::forward(&logits, topk, &rule);
            let dprobs = tensor(&[rows, topk as u64]);
            Box::new(move || drop(router::backward(&dprobs, &routing, &rule, None)))
        }
        Op::Permute {
            rows, dim, pass, ..
        }
        | Op::Unpermute {
            rows, dim, pass, ..
        } => {
            let topk = if rows % 2 == 0 { 2 } else { 1 };
            let tokens = rows / topk;
            let ids = operands.ids(&[tokens as usize, topk as usize], EXPERTS);
            let map = permute::map(&ids, EXPERTS);
            // A permutation copies rows in forward and sums them in backward; its inverse the
            // other way round.
            let copies = matches!(op, Op::Permute { .. }) == (pass == Pass::Forward);
            if copies {
                let x = tensor(&[tokens, dim]);
                return Box::new(move || drop(permute::forward(&x, &map)));
            }
            let y = tensor(&[rows, dim]);
            Box::new(move || drop(permute::unpermute(&y, &map, None)))
        }
        Op::Embedding {
            rows, dim, pass, ..
        } => {
            let table = tensor(&[VOCAB as u64, dim]);
            let ids = operands.ids(&[rows as usize], VOCAB);
            if pass == Pass::Forward {
                return Box::new(move || drop(embedding::forward(&ids, &table, 0)));
            }
            let dy = tensor(&[rows, dim]);
            Box::new(move || embedding::backward(&dy, &ids, &table, 0))
        }
        Op::CrossEntropy {
            rows, vocab, pass, ..
        } => {
            let logits = tensor(&[rows, vocab]);
            let targets = operands.ids(&[rows as usize], vocab as usize);
            let forward = move |logits: &Tensor, targets: &Tensor| {
                let top = cross_entropy::row_max(logits);
                let (sum_exp, target) = cross_entropy::sum_exp_and_target(logits, &top, targets, 0);
                (top, sum_exp, target)
            };
            if pass == Pass::Forward {
                return Box::new(move || drop(forward(&logits, &targets)));
            }
            let (top, sum_exp, target) = forward(&logits, &targets);
            Box::new(move || {
                let reduced = Reduced {
                    top: &top,
                    sum_exp: &sum_exp,
                    target: &target,
                };
                drop(cross_entropy::finish(&logits, reduced, &targets, 0, 1.0));
                // The gradient replaced the logits: small numbers again, as logits are.
            })
        }
        Op::Add { len, .. } => {
            let (a, b) = (tensor(&[len]), tensor(&[len]));
            Box::new(move || elementwise::axpy(1e-6, &a, &b))
        }
        Op::Adamw { len, .. } => {
            let [w, g, m] = [0; 3].map(|_| tensor(&[len]));
            let v = operands
                .device
                .zeros(TensorClass::Transient, Dtype::F32, &[len as usize]);
            let rule = adamw::Adamw {
                lr: 1e-6,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step: 10,
            };
            Box::new(move || adamw::step(&w, &g, &m, &v, &rule, 1.0))
        }
        Op::GradNorm { len } => {
            let x = tensor(&[len]);
            Box::new(move || {
                std::hint::black_box(grad_norm::sum_squares(&x));
            })
        }
        Op::LinearAttention { .. } => unreachable!("refused before"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_the_sweep_runs() {
        let device = Device::cpu(1);
        for key in crate::profile::default_sweep(1) {
            if let moefold_profiles::directory::Key::Op(op) = key
                && op.flops().0 < 1e8
            {
                let mut run = prepare(&device, &op);
                run();
                run();
            }
        }
    }
}
