//! Times every op at the shapes of the CPU benchmark model and prints a hash of its results.
//!
//!     cargo run --release -p moefold-kernels --example ops [threads] [filter] [seconds]
//!
//! The model: hidden 512, 8 heads of 64, 16 experts top-2 of width 256, vocabulary 8192, four
//! sequences of 256 tokens. Times are medians of the wall clock, with one thread means of the time on
//! the processor; GFLOP/s and GB/s follow from the op's own key.

#![expect(clippy::print_stdout, reason = "printing is what the program is for")]

use std::time::Instant;

use moefold_kernels::cases::{self, Load, Source};
use moefold_kernels::{Device, Dtype, Op, Pass, Tensor, TensorClass};
use moefold_profiles::random::SplitMix64;

const HIDDEN: u64 = 512;
const HEADS: u64 = 8;
const HEAD: u64 = 64;
const EXPERTS: u64 = 16;
const TOPK: u64 = 2;
const WIDTH: u64 = 256;
const VOCAB: u64 = 8192;
const SEQS: u64 = 4;
const TOKENS: u64 = SEQS * 256;
const ROWS: u64 = TOKENS * TOPK;
const DTYPE: Dtype = Dtype::F32;

struct Bench {
    device: Device,
    filter: String,
    seconds: f64,
    random: SplitMix64,
}

impl Bench {
    /// Values in -0.5..0.5, the same on every run.
    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.random.unit() as f32 - 0.5).collect()
    }

    /// Times the op of this key and prints one line; what it writes first is hashed.
    fn time(&mut self, label: &str, op: Op) {
        if !label.contains(&self.filter) {
            return;
        }
        let call = cases::call(self, &op, Load::Even);
        let mut hash = None;
        call.run_into(&mut |_, tensor| hash = hash.or_else(|| Some(hash_of(tensor))));
        let hash = hash.map_or_else(String::new, |hash| format!("{hash:016x}"));
        let mut times = Vec::new();
        let (begin, ran_before) = (Instant::now(), ran());
        while times.len() < 5 || begin.elapsed().as_secs_f64() < self.seconds {
            let start = Instant::now();
            call.run();
            times.push(start.elapsed().as_secs_f64());
        }
        let wall = begin.elapsed().as_secs_f64();
        let share = ran()
            .zip(ran_before)
            .map_or(1.0, |(after, before)| (after - before) / wall);
        let mean = wall / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let time = times[times.len() / 2];
        // With one thread the time on the processor is what other load leaves alone.
        let time = if self.device.threads() == 1 {
            mean * share
        } else {
            time
        };
        println!(
            "{label:28} {:>9.1} us {:>6.1} GFLOP/s {:>7.2} GB/s  min {:>9.1} us  {hash}",
            time * 1e6,
            op.flops().0 / time / 1e9,
            op.bytes().0 as f64 / time / 1e9,
            times[0] * 1e6,
        );
    }
}

impl Source for Bench {
    fn device(&self) -> &Device {
        &self.device
    }

    fn tensor(&mut self, dims: &[usize], scale: f32) -> Tensor {
        self.statistic(dims, scale)
    }

    fn statistic(&mut self, dims: &[usize], _scale: f32) -> Tensor {
        let values = self.values(dims.iter().product());
        self.device
            .from_f32(TensorClass::Activations, &values, dims)
    }

    fn ids(&mut self, dims: &[usize], below: usize) -> Tensor {
        let len = dims.iter().product();
        let ids: Vec<i32> = self
            .values(len)
            .iter()
            .map(|x| ((x + 0.5) * below as f32) as i32)
            .collect();
        self.device.from_i32(TensorClass::Activations, &ids, dims)
    }
}

/// Seconds this thread has run, where the system says so (Linux, to a few milliseconds).
fn ran() -> Option<f64> {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(line.split(' ').next()?.parse::<f64>().ok()? * 1e-9)
}

/// FNV-1a over the bits.
fn hash_of(t: &Tensor) -> u64 {
    t.to_f32().iter().fold(0xcbf2_9ce4_8422_2325, |hash, x| {
        (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3)
    })
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let filter = arguments.next().unwrap_or_default();
    let seconds = arguments.next().and_then(|s| s.parse().ok()).unwrap_or(0.4);
    let mut b = Bench {
        device: Device::cpu(threads),
        filter,
        seconds,
        random: SplitMix64::new(1),
    };
    println!("{:?}", b.device);
    for (label, op) in products().into_iter().chain(experts()).chain(rest()) {
        b.time(&label, op);
    }
}

const LINEAR: [(&str, Pass); 3] = [
    ("forward", Pass::Forward),
    ("dgrad", Pass::Dgrad),
    ("wgrad", Pass::Wgrad),
];
const BOTH: [(&str, Pass); 2] = [("forward", Pass::Forward), ("backward", Pass::Backward)];

fn products() -> Vec<(String, Op)> {
    let layers = [
        ("qkv", 3 * HIDDEN, HIDDEN),
        ("proj", HIDDEN, HIDDEN),
        ("head", VOCAB, HIDDEN),
        ("router", EXPERTS, HIDDEN),
    ];
    let of_layer = |(name, out, inner)| {
        LINEAR.map(|(what, pass)| {
            // The key is of the product done.
            let (m, n, k) = match pass {
                Pass::Wgrad => (out, inner, TOKENS),
                Pass::Dgrad => (TOKENS, inner, out),
                _ => (TOKENS, out, inner),
            };
            let dtype = DTYPE;
            let op = Op::Gemm {
                m,
                n,
                k,
                pass,
                dtype,
            };
            (format!("gemm {name} {what}"), op)
        })
    };
    layers.into_iter().flat_map(of_layer).collect()
}

fn experts() -> Vec<(String, Op)> {
    let layers = [("fc1", 2 * WIDTH, HIDDEN), ("fc2", HIDDEN, WIDTH)];
    let of_layer = |(name, n, k)| {
        LINEAR.map(|(what, pass)| {
            let op = Op::GroupedGemm {
                groups: EXPERTS,
                rows: ROWS,
                n,
                k,
                pass,
                dtype: DTYPE,
            };
            (format!("grouped_gemm {name} {what}"), op)
        })
    };
    layers.into_iter().flat_map(of_layer).collect()
}

/// What is no product: each op forward and backward, then those of one pass.
#[rustfmt::skip]
fn rest() -> Vec<(String, Op)> {
    let dtype = DTYPE;
    let mut all = Vec::new();
    for (what, pass) in BOTH {
        let ops = [
            ("router", Op::Router { rows: TOKENS, experts: EXPERTS, topk: TOPK, pass }),
            ("permute", Op::Permute { rows: ROWS, dim: HIDDEN, pass, dtype }),
            ("unpermute", Op::Unpermute { rows: ROWS, dim: HIDDEN, pass, dtype }),
            ("swiglu", Op::Swiglu { rows: ROWS, dim: WIDTH, pass, dtype }),
            ("rms_norm", Op::RmsNorm { rows: TOKENS, dim: HIDDEN, pass, dtype }),
            ("qk_norm", Op::RmsNorm { rows: TOKENS * HEADS, dim: HEAD, pass, dtype }),
            ("rope", Op::Rope { rows: TOKENS * HEADS, dim: HEAD, pass, dtype }),
            ("latent_kv", Op::LatentKv {
                rows: TOKENS, heads: HEADS, nope: HEAD, rope: HEAD / 2, v_dim: HEAD, pass, dtype,
            }),
            ("attention", Op::Attention {
                batch: SEQS, heads: HEADS, kv_heads: HEADS, q_len: TOKENS / SEQS,
                kv_len: TOKENS / SEQS, qk_dim: HEAD, v_dim: HEAD, causal: true, pass, dtype,
            }),
            ("embedding", Op::Embedding { rows: TOKENS, dim: HIDDEN, pass, dtype }),
            ("cross_entropy", Op::CrossEntropy { rows: TOKENS, vocab: VOCAB, pass, dtype }),
        ];
        all.extend(ops.map(|(name, op)| (format!("{name} {what}"), op)));
    }
    let len = EXPERTS * 2 * WIDTH * HIDDEN;
    all.extend([
        ("add".to_owned(), Op::Add { len: TOKENS * HIDDEN, dtype }),
        ("adamw".to_owned(), Op::Adamw { len, dtype, moments: Dtype::F32, remainders: false }),
        ("grad_norm".to_owned(), Op::GradNorm { len }),
    ]);
    all
}
