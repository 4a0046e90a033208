//! Ops by key, ready to be timed: each with operands of its shape in several places of memory, used
//! in turn.

use std::ops::Range;

use moefold_kernels::cross_entropy::{self, Reduced};
use moefold_kernels::gemm::{self, Trans};
use moefold_kernels::router::{self, RouterRule, Score};
use moefold_kernels::scalars::{Factor, Scalars};
use moefold_kernels::swiglu::Rule;
use moefold_kernels::{
    Device, TensorClass, adamw, attention, elementwise, embedding, grouped_gemm, permute, rms_norm,
    rope, rows, swiglu,
};
use moefold_kernels::{Dtype, Tensor};
use moefold_profiles::{Op, Pass, SweepKind};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Operands are spread over at least this much memory, beyond the caches of one core, ...
const SPREAD_BYTES: u64 = 32 << 20;
/// ... but over no more places than this.
const PLACES_MAX: u64 = 8;
/// An op's operands may take this part of a device's memory: there are several places of them, and
/// results.
const MEMORY_SHARE: u64 = 16;
/// Experts that rows are spread over where the key does not say.
const EXPERTS: usize = 8;
/// Entries of a vocabulary where the key does not say.
const VOCAB: usize = 4096;

/// Why an op cannot be measured on `device`.
pub(super) fn refusal(device: &Device, op: &Op) -> Option<&'static str> {
    let stored = device.dtype();
    // What every device keeps in f32: statistics, gradients, masters, logits.
    let wide = matches!(
        op,
        Op::Router { .. }
            | Op::GradNorm { .. }
            | Op::CrossEntropy { .. }
            | Op::Add { .. }
            | Op::Sweep { .. }
            | Op::Adamw { .. }
    );
    let sorts = matches!(
        op,
        Op::Sweep {
            kind: SweepKind::Sort,
            ..
        }
    );
    if op.dtype() != stored && !(wide && op.dtype() == Dtype::F32) && !sorts {
        return Some(match (device.properties(), stored) {
            (None, _) => "the CPU computes in f32",
            (_, Dtype::Bf16) => "the device was opened in bf16",
            _ => "the device was opened in f32",
        });
    }
    if let Some(properties) = device.properties()
        && op.bytes().0 > properties.memory.0 / MEMORY_SHARE
    {
        return Some("its operands take too much of the device's memory");
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
    let mut runs = self::places(device, op, false, 0..places);
    Box::new(move || {
        runs[0]();
        runs.rotate_left(1);
    })
}

/// The op on operands in each of these places of memory.
pub(super) fn places(device: &Device, op: &Op, skewed: bool, places: Range<u64>) -> Vec<Run> {
    places
        .map(|place| {
            let dtype = op.dtype();
            one_place(
                &Operands {
                    device,
                    dtype,
                    skewed,
                    place,
                },
                op,
            )
        })
        .collect()
}

/// Values of a device's speed: a matrix product of zeros takes less power, and so less time, than
/// one of numbers. Uniform in -1..1.
pub(super) fn random_values(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A tensor of random numbers; of many, the first block over and over.
pub(super) fn random(device: &Device, dtype: Dtype, dims: &[usize], seed: u64) -> Tensor {
    let tensor = device.empty(TensorClass::Transient, dtype, dims);
    let len = tensor.len();
    let mut filled = len.min(RANDOM_BLOCK);
    tensor
        .view(0, &[filled])
        .copy_from_f32(&random_values(filled, seed));
    while filled < len {
        let more = filled.min(len - filled);
        elementwise::copy(&tensor.view(0, &[more]), &tensor.view(filled, &[more]));
        filled += more;
    }
    tensor
}

/// Numbers drawn for a tensor.
const RANDOM_BLOCK: usize = 1 << 16;

/// Makes the operands of one place.
struct Operands<'a> {
    device: &'a Device,
    /// What the op multiplies or moves.
    dtype: Dtype,
    /// Whether groups are uneven.
    skewed: bool,
    place: u64,
}

impl Operands<'_> {
    /// Weights or activations.
    fn tensor(&self, dims: &[u64]) -> Tensor {
        self.of(self.dtype, dims)
    }

    /// What is f32 on every device: statistics, probabilities, gradients of weights.
    fn wide(&self, dims: &[u64]) -> Tensor {
        self.of(Dtype::F32, dims)
    }

    fn of(&self, dtype: Dtype, dims: &[u64]) -> Tensor {
        let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
        random(self.device, dtype, &dims, self.place)
    }

    /// Ids below `bound`, spread evenly.
    fn ids(&self, dims: &[usize], bound: usize) -> Tensor {
        let len: usize = dims.iter().product();
        let values: Vec<i32> = (0..len).map(|i| (i * 7919 % bound) as i32).collect();
        self.device.from_i32(TensorClass::Transient, &values, dims)
    }
}

/// One run of an op on one place's operands.
pub(super) type Run = Box<dyn FnMut()>;

fn one_place(at: &Operands<'_>, op: &Op) -> Run {
    match *op {
        Op::Gemm { m, n, k, pass, .. } => matrix_product(at, [m, n, k], pass),
        Op::GroupedGemm { .. } => grouped_product(at, op),
        Op::Attention { .. } => attention_core(at, op),
        Op::RmsNorm {
            rows, dim, pass, ..
        } => norm(at, rows, dim, pass),
        Op::Rope {
            rows, dim, pass, ..
        } => rotation(at, rows, dim, pass),
        Op::Swiglu {
            rows, dim, pass, ..
        } => activation(at, rows, dim, pass),
        Op::Router {
            rows,
            experts,
            topk,
            pass,
        } => routing(at, [rows, experts, topk], pass),
        // A permutation copies rows in forward and sums them in backward, its inverse the other way
        // round.
        Op::Permute {
            rows, dim, pass, ..
        } => permutation(at, rows, dim, pass == Pass::Forward),
        Op::Unpermute {
            rows, dim, pass, ..
        } => permutation(at, rows, dim, pass != Pass::Forward),
        Op::Embedding {
            rows, dim, pass, ..
        } => lookup(at, rows, dim, pass),
        Op::CrossEntropy {
            rows, vocab, pass, ..
        } => loss(at, rows, vocab, pass),
        Op::Add { len, .. } => {
            let (a, b) = (at.tensor(&[len]), at.tensor(&[len]));
            Box::new(move || elementwise::axpy(1e-6, &a, &b))
        }
        Op::Sweep { kind, len, .. } => sweep(at, kind, len),
        Op::Adamw { len, .. } => update(at, len),
        Op::GradNorm { len } => {
            let x = at.wide(&[len]);
            let sum = Scalars::zeros(at.device, TensorClass::Transient, 1);
            Box::new(move || sum.add_squares(0, 1e-6, &x))
        }
        Op::LinearAttention { .. } => unreachable!("refused before"),
    }
}

fn sweep(at: &Operands<'_>, kind: SweepKind, len: u64) -> Run {
    let x = match kind {
        SweepKind::Sort => at.ids(&[len as usize, 1], EXPERTS),
        _ => at.tensor(&[len]),
    };
    // Rows of logits are as wide as a vocabulary, where there are so many.
    let width = (len as usize).clamp(1, VOCAB);
    let logits = x.view(0, &[x.len() / width, width]);
    match kind {
        SweepKind::Fill => Box::new(move || elementwise::fill(&x, 1e-6)),
        SweepKind::Copy => {
            let y = at.tensor(&[len]);
            Box::new(move || elementwise::copy(&x, &y))
        }
        SweepKind::Scale => Box::new(move || elementwise::scale(&x, 1.0)),
        SweepKind::Sum => {
            let sum = Scalars::zeros(at.device, TensorClass::Transient, 1);
            Box::new(move || sum.add_sum(0, 1e-6, &x))
        }
        SweepKind::RowMax => Box::new(move || drop(cross_entropy::row_max(&logits))),
        SweepKind::SumExp => {
            let top = at.wide(&[logits.num_rows() as u64]);
            let targets = at.ids(&[logits.num_rows()], width);
            Box::new(move || {
                drop(cross_entropy::sum_exp_and_target(
                    &logits, &top, &targets, 0,
                ));
            })
        }
        SweepKind::Gather => {
            let index = at.ids(&[len as usize], len as usize);
            let x = x.reshape(&[len as usize, 1]);
            Box::new(move || drop(rows::gather(&x, &index)))
        }
        SweepKind::Chunks => {
            let x = x.reshape(&[len as usize, 1]);
            let middle = len as usize / 2;
            let halves = [middle..len as usize, 0..middle];
            Box::new(move || drop(rows::gather_chunks(&x, &halves)))
        }
        SweepKind::Sort => Box::new(move || drop(permute::sort(&x, EXPERTS))),
        SweepKind::Clip => {
            let sums = Scalars::zeros(at.device, TensorClass::Transient, 1);
            Box::new(move || drop(Factor::clipped(&sums, 0, 1.0, Some(1.0))))
        }
    }
}

fn matrix_product(at: &Operands<'_>, [m, n, k]: [u64; 3], pass: Pass) -> Run {
    match pass {
        Pass::Wgrad => {
            let c = at.wide(&[m, n]);
            let (dy, x) = (at.tensor(&[k, m]), at.tensor(&[k, n]));
            Box::new(move || gemm::gemm(&dy, Trans::Yes, &x, Trans::No, &c, 1.0))
        }
        Pass::Dgrad | Pass::Backward => {
            let c = at.tensor(&[m, n]);
            let (dy, w) = (at.tensor(&[m, k]), at.tensor(&[k, n]));
            Box::new(move || gemm::gemm(&dy, Trans::No, &w, Trans::No, &c, 0.0))
        }
        Pass::Forward => {
            let c = at.tensor(&[m, n]);
            let (x, w) = (at.tensor(&[m, k]), at.tensor(&[n, k]));
            Box::new(move || gemm::gemm(&x, Trans::No, &w, Trans::Yes, &c, 0.0))
        }
    }
}

fn grouped_product(at: &Operands<'_>, op: &Op) -> Run {
    let Op::GroupedGemm {
        groups,
        rows,
        n,
        k,
        pass,
        ..
    } = *op
    else {
        unreachable!("{op:?} is no grouped product")
    };
    let counts = group_rows(rows, groups, at.skewed);
    match pass {
        Pass::Wgrad => {
            let dw = at.wide(&[groups, n, k]);
            let (dy, x) = (at.tensor(&[rows, n]), at.tensor(&[rows, k]));
            Box::new(move || grouped_gemm::wgrad(&dy, &x, &counts, &dw))
        }
        Pass::Dgrad | Pass::Backward => {
            let w = at.tensor(&[groups, n, k]);
            let dy = at.tensor(&[rows, n]);
            Box::new(move || drop(grouped_gemm::dgrad(&dy, &w, &counts)))
        }
        Pass::Forward => {
            let w = at.tensor(&[groups, n, k]);
            let x = at.tensor(&[rows, k]);
            Box::new(move || drop(grouped_gemm::forward(&x, &w, &counts)))
        }
    }
}

/// Rows of each group: as equal as may be; or falling as 1, 1/2, 1/3 with the last group empty.
pub(super) fn group_rows(rows: u64, groups: u64, skewed: bool) -> Vec<usize> {
    if !skewed || groups < 2 {
        return (0..groups)
            .map(|e| ((e + 1) * rows / groups - e * rows / groups) as usize)
            .collect();
    }
    let shares: Vec<f64> = (1..groups).map(|nth| 1.0 / nth as f64).collect();
    let all: f64 = shares.iter().sum();
    let share = |share: &f64| (rows as f64 * share / all) as usize;
    let mut counts: Vec<usize> = shares.iter().map(share).chain([0]).collect();
    counts[0] += rows as usize - counts.iter().sum::<usize>();
    counts
}

fn attention_core(at: &Operands<'_>, op: &Op) -> Run {
    let Op::Attention {
        batch,
        heads,
        kv_heads,
        q_len,
        qk_dim,
        v_dim,
        pass,
        ..
    } = *op
    else {
        unreachable!("{op:?} is no attention")
    };
    let tokens = batch * q_len;
    let q = at.tensor(&[tokens, heads, qk_dim]);
    let k = at.tensor(&[tokens, kv_heads, qk_dim]);
    let v = at.tensor(&[tokens, kv_heads, v_dim]);
    let (seqs, scale) = (batch as usize, 1.0 / (qk_dim as f32).sqrt());
    if pass == Pass::Forward {
        return Box::new(move || drop(attention::forward(&q, &k, &v, seqs, scale)));
    }
    let (o, lse) = attention::forward(&q, &k, &v, seqs, scale);
    let d_o = at.tensor(&[tokens, heads, v_dim]);
    Box::new(move || {
        drop(attention::backward(&d_o, &q, &k, &v, &o, &lse, seqs, scale));
    })
}

fn norm(at: &Operands<'_>, rows: u64, dim: u64, pass: Pass) -> Run {
    let (x, w) = (at.tensor(&[rows, dim]), at.tensor(&[dim]));
    if pass == Pass::Forward {
        return Box::new(move || drop(rms_norm::forward(&x, &w, 1e-6)));
    }
    let (dy, rstd) = rms_norm::forward(&x, &w, 1e-6);
    let dw = at.wide(&[dim]);
    Box::new(move || drop(rms_norm::backward(&dy, &x, &w, &rstd, &dw)))
}

fn rotation(at: &Operands<'_>, rows: u64, dim: u64, pass: Pass) -> Run {
    let heads = [8, 4, 2]
        .into_iter()
        .find(|&h| rows.is_multiple_of(h))
        .unwrap_or(1);
    let x = at.tensor(&[rows / heads, heads, dim]);
    let positions: Vec<u32> = (0..(rows / heads) as u32).collect();
    let table = rope::table(at.device, &positions, dim as usize, 1e4);
    match pass {
        Pass::Forward => Box::new(move || rope::forward(&x, &table)),
        _ => Box::new(move || rope::backward(&x, &table)),
    }
}

fn activation(at: &Operands<'_>, rows: u64, dim: u64, pass: Pass) -> Run {
    let (x, probs) = (at.tensor(&[rows, 2 * dim]), at.wide(&[rows]));
    if pass == Pass::Forward {
        return Box::new(move || drop(swiglu::forward(&x, Some(&probs), &Rule::SWIGLU)));
    }
    let dy = at.tensor(&[rows, dim]);
    Box::new(move || drop(swiglu::backward(&dy, &x, Some(&probs), &Rule::SWIGLU)))
}

fn routing(at: &Operands<'_>, [rows, experts, topk]: [u64; 3], pass: Pass) -> Run {
    let logits = at.wide(&[rows, experts]);
    let rule = RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: true,
        scale: 1.0,
        groups: None,
    };
    if pass == Pass::Forward {
        return Box::new(move || drop(router::forward(&logits, topk as usize, &rule, None)));
    }
    let routing = router::forward(&logits, topk as usize, &rule, None);
    let dprobs = at.wide(&[rows, topk]);
    Box::new(move || drop(router::backward(&dprobs, &routing, &rule, None)))
}

/// Copies of token rows into expert order, or sums of expert rows into token order.
fn permutation(at: &Operands<'_>, rows: u64, dim: u64, copies: bool) -> Run {
    let topk = if rows.is_multiple_of(2) { 2 } else { 1 };
    let tokens = rows / topk;
    let ids = at.ids(&[tokens as usize, topk as usize], EXPERTS);
    let map = permute::map(&ids, EXPERTS);
    if copies {
        let x = at.tensor(&[tokens, dim]);
        return Box::new(move || drop(permute::forward(&x, &map)));
    }
    let y = at.tensor(&[rows, dim]);
    Box::new(move || drop(permute::unpermute(&y, &map, None)))
}

fn lookup(at: &Operands<'_>, rows: u64, dim: u64, pass: Pass) -> Run {
    let ids = at.ids(&[rows as usize], VOCAB);
    if pass == Pass::Forward {
        let table = at.tensor(&[VOCAB as u64, dim]);
        return Box::new(move || drop(embedding::forward(&ids, &table, 0)));
    }
    let (dy, dtable) = (at.tensor(&[rows, dim]), at.wide(&[VOCAB as u64, dim]));
    Box::new(move || embedding::backward(&dy, &ids, &dtable, 0))
}

fn loss(at: &Operands<'_>, rows: u64, vocab: u64, pass: Pass) -> Run {
    let logits = at.tensor(&[rows, vocab]);
    let targets = at.ids(&[rows as usize], vocab as usize);
    let forward = |logits: &Tensor, targets: &Tensor| {
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
        // The gradient replaces the logits: small numbers again, as logits are.
        drop(cross_entropy::finish(&logits, reduced, &targets, 0, 1.0));
    })
}

fn update(at: &Operands<'_>, len: u64) -> Run {
    let [w, g, m] = [0; 3].map(|_| at.wide(&[len]));
    // Narrow weights have masters, which the step rounds.
    let model = (at.dtype != Dtype::F32).then(|| at.tensor(&[len]));
    let v = at
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
    Box::new(move || adamw::step_into(&w, &g, &m, &v, model.as_ref(), &rule, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_the_sweep_runs() {
        let device = Device::cpu(1);
        for key in crate::profile::default_sweep(1, 1) {
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
