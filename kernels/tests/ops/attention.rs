//! Tests of `attention` against its f64 reference in plain loops.

use moefold_kernels::attention::*;
use moefold_kernels::{Device, Dtype, Tensor, TensorClass};

use crate::support::{
    Check, Rng, assert_bits, differences, emulated, inner, oracle_everywhere, tensor, wide,
};

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    mask: Mask,
    seqs: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
}

/// The tokens whose keys token `t` sees, in a document from `start` of its sequence on.
fn seen(s: Sizes, start: i32, t: usize) -> std::ops::RangeInclusive<usize> {
    let first = t / s.seq_len * s.seq_len + start as usize;
    match s.mask {
        Mask::Causal => first..=t,
        Mask::Full => first..=first + s.seq_len - 1,
        Mask::Window(keys) => (t + 1).saturating_sub(keys).max(first)..=t,
    }
}

/// Attention by definition, one score at a time: `(o [T,h,dv], lse [h,T])`.
fn reference(s: Sizes, starts: &[i32], [q, k, v]: [&[f64]; 3], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let tokens = s.seqs * s.seq_len;
    let mut o = vec![0.0; tokens * s.heads * s.dv];
    let mut lse = vec![0.0; s.heads * tokens];
    for t in 0..tokens {
        let seen = seen(s, starts[t], t);
        for h in 0..s.heads {
            let kv = h * s.kv_heads / s.heads;
            let score = |j: usize| {
                let mut sum = 0.0;
                for c in 0..s.dk {
                    sum += q[(t * s.heads + h) * s.dk + c] * k[(j * s.kv_heads + kv) * s.dk + c];
                }
                sum * scale
            };
            let total: f64 = seen.clone().map(|j| score(j).exp()).sum();
            for j in seen.clone() {
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
    /// Where the document of each token begins in its sequence.
    starts: Vec<i32>,
    /// Whether documents are apart: else every sequence is one.
    documents: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    scale: f32,
}

/// Lengths at the edges of the tiles of every kernel, and some between.
fn seq_len(rng: &mut Rng) -> usize {
    let lengths = [
        1,
        rng.size(2..=62),
        63,
        64,
        65,
        rng.size(66..=150),
        130,
        193,
    ];
    lengths[rng.size(0..=lengths.len() - 1)]
}

/// Small widths of a head: any on the CPU. Kernels are compiled for each, so for them two: one whose
/// rows are aligned and shorter than the tiles, one of odd numbers.
fn small_heads(device: &Device, rng: &mut Rng) -> [usize; 2] {
    let odd = rng.coin();
    match device.name() {
        "cpu" => [rng.size(1..=24), rng.size(1..=24)],
        _ if odd => [13, 5],
        _ => [24, 16],
    }
}

impl Case {
    fn new(rng: &mut Rng, seq_len: usize, [dk, dv]: [usize; 2]) -> Self {
        let kv_heads = rng.size(1..=2);
        let sizes = Sizes {
            mask: Mask::Causal,
            seqs: rng.size(1..=3),
            seq_len,
            heads: kv_heads * rng.size(1..=3),
            kv_heads,
            dk,
            dv,
        };
        Self::of(rng, sizes)
    }

    fn of(rng: &mut Rng, sizes: Sizes) -> Self {
        let tokens = sizes.seqs * sizes.seq_len;
        Self {
            sizes,
            starts: vec![0; tokens],
            documents: false,
            q: rng.values(tokens * sizes.heads * sizes.dk),
            k: rng.values(tokens * sizes.kv_heads * sizes.dk),
            v: rng.values(tokens * sizes.kv_heads * sizes.dv),
            scale: (sizes.dk as f32).sqrt().recip(),
        }
    }

    /// Cuts the sequences into documents that begin anywhere, `every` tokens apart on average.
    fn cut(&mut self, rng: &mut Rng, every: usize) {
        self.documents = true;
        for sequence in self.starts.chunks_mut(self.sizes.seq_len) {
            let mut start = 0;
            for (token, at) in sequence.iter_mut().enumerate() {
                if rng.size(1..=every) == 1 {
                    start = token as i32;
                }
                *at = start;
            }
        }
    }

    fn apart(&self, device: &Device) -> Option<Documents> {
        let new = || {
            let class = TensorClass::Activations;
            Documents::new(device, class, &self.starts, self.sizes.seqs)
        };
        self.documents.then(new)
    }

    fn tensors(&self, device: &Device) -> [Tensor; 3] {
        let s = self.sizes;
        let tokens = s.seqs * s.seq_len;
        [
            tensor(device, &self.q, &[tokens, s.heads, s.dk]),
            tensor(device, &self.k, &[tokens, s.kv_heads, s.dk]),
            tensor(device, &self.v, &[tokens, s.kv_heads, s.dv]),
        ]
    }

    /// Forward against the reference.
    fn forward(&self, device: &Device) -> Vec<Check> {
        let inputs = [&self.q, &self.k, &self.v].map(|x| wide(x));
        let inputs = inputs.each_ref().map(Vec::as_slice);
        let (o_want, lse_want) = reference(self.sizes, &self.starts, inputs, f64::from(self.scale));
        let [q, k, v] = self.tensors(device);
        let documents = self.apart(device);
        let sequences = Sequences {
            count: self.sizes.seqs,
            documents: documents.as_ref(),
        };
        let (o, lse) = forward(self.sizes.mask, &q, &k, &v, sequences, self.scale);
        vec![Check("o", o, o_want), Check("lse", lse, lse_want)]
    }

    /// What backward gives for `d_o` after forward.
    fn gradients(&self, device: &Device, d_o: &[f32]) -> [Tensor; 3] {
        let s = self.sizes;
        let [q, k, v] = self.tensors(device);
        let d_o = tensor(device, d_o, &[s.seqs * s.seq_len, s.heads, s.dv]);
        let documents = self.apart(device);
        let sequences = Sequences {
            count: s.seqs,
            documents: documents.as_ref(),
        };
        let (o, lse) = forward(s.mask, &q, &k, &v, sequences, self.scale);
        backward(s.mask, &d_o, &q, &k, &v, &o, &lse, sequences, self.scale).into()
    }

    fn d_o(&self, rng: &mut Rng) -> Vec<f32> {
        let s = self.sizes;
        rng.values(s.seqs * s.seq_len * s.heads * s.dv)
    }

    /// The gradients by the chain rule written out for one score at a time, and the norms of the terms of
    /// those of queries and keys. A score's gradient is a difference, of its probability's gradient and
    /// their mean: where these are close, as of two keys that share all the weight, rounding of the mean
    /// is large beside the difference. So both parts are terms.
    fn by_chain_rule(&self, d_o: &[f32]) -> ([Vec<f64>; 3], [Vec<f64>; 2]) {
        let s = self.sizes;
        let tokens = s.seqs * s.seq_len;
        let (q, k, v, g) = (wide(&self.q), wide(&self.k), wide(&self.v), wide(d_o));
        let scale = f64::from(self.scale);
        let (_, lse) = reference(s, &self.starts, [&q, &k, &v], scale);
        let mut dq = vec![0.0; q.len()];
        let mut dk = vec![0.0; k.len()];
        let mut dv = vec![0.0; v.len()];
        let (mut dq_squares, mut dk_squares) = (dq.clone(), dk.clone());
        for t in 0..tokens {
            for h in 0..s.heads {
                let kv = h * s.kv_heads / s.heads;
                let (at_q, at_o) = ((t * s.heads + h) * s.dk, (t * s.heads + h) * s.dv);
                let mut probs = Vec::new();
                let mut dprobs = Vec::new();
                for j in seen(s, self.starts[t], t) {
                    let (at_k, at_v) = ((j * s.kv_heads + kv) * s.dk, (j * s.kv_heads + kv) * s.dv);
                    let score: f64 = (0..s.dk).map(|c| q[at_q + c] * k[at_k + c]).sum();
                    probs.push((score * scale - lse[h * tokens + t]).exp());
                    dprobs.push((0..s.dv).map(|c| g[at_o + c] * v[at_v + c]).sum::<f64>());
                }
                let mean: f64 = probs.iter().zip(&dprobs).map(|(p, d)| p * d).sum();
                for (i, j) in seen(s, self.starts[t], t).enumerate() {
                    let (at_k, at_v) = ((j * s.kv_heads + kv) * s.dk, (j * s.kv_heads + kv) * s.dv);
                    let ds = probs[i] * (dprobs[i] - mean) * scale;
                    let parts = (probs[i] * scale).powi(2) * (dprobs[i].powi(2) + mean.powi(2));
                    for c in 0..s.dk {
                        dq[at_q + c] += ds * k[at_k + c];
                        dk[at_k + c] += ds * q[at_q + c];
                        dq_squares[at_q + c] += parts * k[at_k + c].powi(2);
                        dk_squares[at_k + c] += parts * q[at_q + c].powi(2);
                    }
                    for c in 0..s.dv {
                        dv[at_v + c] += probs[i] * g[at_o + c];
                    }
                }
            }
        }
        // Of a sequence of one token dq and dk are zero, but for the rounding of the above.
        for gradient in [&mut dq, &mut dk] {
            gradient
                .iter_mut()
                .filter(|x| x.abs() < 1e-12)
                .for_each(|x| *x = 0.0);
        }
        let squares = [dq_squares, dk_squares];
        let norms = squares.map(|squares| squares.into_iter().map(f64::sqrt).collect());
        ([dq, dk, dv], norms)
    }

    /// What backward gives for `d_o` against `[dq, dk, dv]`.
    fn compare(&self, device: &Device, d_o: &[f32], want: [Vec<f64>; 3]) -> Vec<Check> {
        let (_, [dq_norms, dk_norms]) = self.by_chain_rule(d_o);
        let [dq_want, dk_want, dv_want] = want;
        let [dq, dk, dv] = self.gradients(device, d_o);
        vec![
            Check::of_sums("dq", &dq, dq_want, dq_norms.into_iter()),
            Check::of_sums("dk", &dk, dk_want, dk_norms.into_iter()),
            Check("dv", dv, dv_want),
        ]
    }

    /// Backward against the chain rule.
    fn backward(&self, device: &Device, rng: &mut Rng) -> Vec<Check> {
        let d_o = self.d_o(rng);
        let (want, _) = self.by_chain_rule(&d_o);
        self.compare(device, &d_o, want)
    }
}

#[test]
fn oracle_forward() {
    oracle_everywhere(8, |device, rng| {
        let heads = small_heads(device, rng);
        let seq_len = seq_len(rng);
        Case::new(rng, seq_len, heads).forward(device)
    });
}

/// The gradients of the reference itself, by differences.
#[test]
fn oracle_backward() {
    oracle_everywhere(4, |device, rng| {
        let seq_len = rng.size(1..=9);
        let widths = match device.name() {
            "cpu" => [rng.size(1..=5), rng.size(1..=5)],
            _ => [13, 5],
        };
        let case = Case::new(rng, seq_len, widths);
        let s = case.sizes;
        let d_o = case.d_o(rng);
        let (q, k, v) = (wide(&case.q), wide(&case.k), wide(&case.v));
        let scale = f64::from(case.scale);
        let loss = |q: &[f64], k: &[f64], v: &[f64]| {
            inner(&reference(s, &case.starts, [q, k, v], scale).0, &d_o)
        };
        let dq_want = differences(&case.q, |q| loss(q, &k, &v));
        let dk_want = differences(&case.k, |k| loss(&q, k, &v));
        let dv_want = differences(&case.v, |v| loss(&q, &k, v));
        case.compare(device, &d_o, [dq_want, dk_want, dv_want])
    });
}

/// Sequences of several blocks, where differences of the whole would take too long.
#[test]
fn oracle_backward_over_blocks() {
    oracle_everywhere(5, |device, rng| {
        let heads = small_heads(device, rng);
        let seq_len = seq_len(rng);
        Case::new(rng, seq_len, heads).backward(device, rng)
    });
}

#[test]
fn oracle_of_full_blocks() {
    oracle_everywhere(2, |device, rng| {
        let seq_len = seq_len(rng);
        let mut case = Case::new(rng, seq_len, [24, 16]);
        case.sizes.mask = Mask::Full;
        let mut checks = case.forward(device);
        checks.extend(case.backward(device, rng));
        checks
    });
}

/// Windows shorter than a tile, as long as some, and over most of a sequence.
#[test]
fn oracle_of_windows() {
    oracle_everywhere(6, |device, rng| {
        let heads = small_heads(device, rng);
        let seq_len = seq_len(rng);
        let mut case = Case::new(rng, seq_len, heads);
        let windows = [1, rng.size(2..=31), 32, 64, rng.size(33..=130), seq_len + 1];
        case.sizes.mask = Mask::Window(windows[rng.size(0..=windows.len() - 1)]);
        let mut checks = case.forward(device);
        checks.extend(case.backward(device, rng));
        checks
    });
}

/// Documents of a token, shorter than a tile, over several tiles and of whole sequences, in windows and not.
#[test]
fn oracle_of_documents() {
    oracle_everywhere(6, |device, rng| {
        let heads = small_heads(device, rng);
        let seq_len = seq_len(rng);
        let mut case = Case::new(rng, seq_len, heads);
        let every = [1, 3, 20, 70, 1000][rng.size(0..=4)];
        case.cut(rng, every);
        if rng.coin() {
            case.sizes.mask = Mask::Window(rng.size(1..=100));
        }
        let mut checks = case.forward(device);
        checks.extend(case.backward(device, rng));
        checks
    });
}

/// What a document alone in its sequence gives is what it gives among others.
#[test]
fn law_documents_are_sequences_of_their_own() {
    let device = Device::cpu(2);
    let mut rng = Rng::new(3);
    let mut case = Case::new(&mut rng, 192, [16, 8]);
    case.sizes.seqs = 1;
    let mut case = Case::of(&mut rng, case.sizes);
    case.documents = true;
    for (token, start) in case.starts.iter_mut().enumerate() {
        *start = (token / 48 * 48) as i32;
    }
    let d_o = case.d_o(&mut rng);
    let packed = case.gradients(&device, &d_o);
    (case.documents, case.sizes.seqs, case.sizes.seq_len) = (false, 4, 48);
    case.starts.fill(0);
    for (name, (packed, alone)) in ["dq", "dk", "dv"]
        .iter()
        .zip(packed.iter().zip(&case.gradients(&device, &d_o)))
    {
        let error = crate::support::error(&packed.to_f32(), &wide(&alone.to_f32()));
        assert!(error < 1e-6, "{name} is off by {error:e}");
    }
}

#[test]
#[should_panic(expected = "token 2 of a sequence is in a document from 1")]
fn documents_follow_each_other() {
    let device = Device::cpu(1);
    Documents::new(&device, TensorClass::Activations, &[0, 0, 1, 3], 1);
}

/// The widths of real models, whose tiles and registers are others than those of small ones: all of
/// them where Hopper's kernels run, and elsewhere what differs most from the small.
fn real_heads(device: &Device) -> &'static [[usize; 2]] {
    const ALL: [[usize; 2]; 3] = [[192, 128], [128, 128], [64, 64]];
    match device.properties() {
        Some(gpu) if gpu.architecture.has_wgmma() => &ALL,
        Some(_) if device.dtype() == Dtype::Bf16 => &ALL[..1],
        _ => &ALL[2..],
    }
}

#[test]
fn oracle_of_real_heads() {
    oracle_everywhere(1, |device, rng| {
        let mut checks = Vec::new();
        for &[dk, dv] in real_heads(device) {
            let sizes = Sizes {
                mask: Mask::Causal,
                seqs: 1,
                seq_len: 140,
                heads: 1,
                kv_heads: 1,
                dk,
                dv,
            };
            // Windows have the portable kernels everywhere, whose tiles differ most here.
            let windows = (dk == 64).then_some(Mask::Window(70));
            for mask in [Mask::Causal].into_iter().chain(windows) {
                let case = Case::of(rng, Sizes { mask, ..sizes });
                checks.extend(case.forward(device));
                checks.extend(case.backward(device, rng));
            }
            // As documents have.
            let mut case = Case::of(rng, sizes);
            case.cut(rng, 50);
            checks.extend(case.forward(device));
            checks.extend(case.backward(device, rng));
        }
        checks
    });
}

/// Whether backward cuts groups of heads in parts, where there are few blocks: the kernels of Hopper. One of the devices
/// here is such a one.
fn cuts_groups(device: &Device) -> bool {
    let gpu = device.properties();
    gpu.is_some_and(|gpu| gpu.architecture.has_wgmma()) && device.dtype() == Dtype::Bf16
}

/// Parts of one head, and of two where there are 16; with real widths two of one.
#[test]
fn oracle_of_groups_in_parts() {
    oracle_everywhere(1, |device, rng| {
        let mut checks = Vec::new();
        if !cuts_groups(device) {
            return checks;
        }
        let small = [(2, 4), (1, 8), (1, 16)].map(|groups| (groups, [24, 16]));
        let real = real_heads(device).iter().map(|&widths| ((1, 2), widths));
        for ((kv_heads, group), [dk, dv]) in small.into_iter().chain(real) {
            let sizes = Sizes {
                mask: Mask::Causal,
                seqs: 1,
                seq_len: 140,
                heads: kv_heads * group,
                kv_heads,
                dk,
                dv,
            };
            checks.extend(Case::of(rng, sizes).backward(device, rng));
        }
        checks
    });
}

/// So many blocks that groups stay whole, or are cut in fewer parts than they have heads.
#[test]
fn oracle_of_groups_in_many_blocks() {
    oracle_everywhere(1, |device, rng| {
        let mut checks = Vec::new();
        if !cuts_groups(device) {
            return checks;
        }
        for (kv_heads, group) in [(4, 2), (2, 4)] {
            let sizes = Sizes {
                mask: Mask::Causal,
                seqs: 64,
                seq_len: 5,
                heads: kv_heads * group,
                kv_heads,
                dk: 24,
                dv: 16,
            };
            checks.extend(Case::of(rng, sizes).backward(device, rng));
        }
        checks
    });
}

/// Scores whose exponential overflows, in either direction.
#[test]
fn oracle_forward_large_scores() {
    oracle_everywhere(3, |device, rng| {
        let heads = small_heads(device, rng);
        let mut case = Case::new(rng, 140, heads);
        case.q.iter_mut().for_each(|x| *x *= 64.0);
        case.forward(device)
    });
}

/// Blocks run in another order on each of these devices.
#[test]
fn bits_do_not_depend_on_the_order_of_blocks() {
    let kinds = [
        (Mask::Causal, false, 2),
        (Mask::Window(90), false, 2),
        (Mask::Causal, true, 2),
    ];
    // Groups in parts of one head and of two.
    let in_parts = [(Mask::Causal, false, 8), (Mask::Causal, false, 16)];
    for (one, other) in emulated(1).iter().zip(&emulated(2)) {
        let more = if cuts_groups(one) { &in_parts[..] } else { &[] };
        for &(mask, documents, heads) in kinds.iter().chain(more) {
            let run = |device: &Device| {
                let mut rng = Rng::new(7);
                let sizes = Sizes {
                    mask,
                    seqs: 1,
                    seq_len: if heads > 2 { 130 } else { 200 },
                    heads,
                    kv_heads: 1,
                    dk: 24,
                    dv: 16,
                };
                let mut case = Case::of(&mut rng, sizes);
                if documents {
                    case.cut(&mut rng, 60);
                }
                let d_o = case.d_o(&mut rng);
                case.gradients(device, &d_o)
            };
            let (one, again, other) = (run(one), run(one), run(other));
            for (name, ((one, again), other)) in ["dq", "dk", "dv"]
                .iter()
                .zip(one.iter().zip(&again).zip(&other))
            {
                assert_bits(name, &one.to_f32(), &again.to_f32(), 7);
                assert_bits(name, &one.to_f32(), &other.to_f32(), 7);
            }
        }
    }
}
