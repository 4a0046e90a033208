//! Times every op at the shapes of the CPU benchmark model and prints a hash of its results.
//!
//!     cargo run --release -p moefold-kernels --example ops [threads] [filter] [seconds]
//!
//! The model: hidden 512, 8 heads of 64, 16 experts top-2 of width 256, vocabulary 8192, four
//! sequences of 256 tokens. Times are medians of the wall clock, with one thread means of the time on
//! the processor; GFLOP/s and GB/s follow from the op's own key.

#![expect(clippy::print_stdout, reason = "printing is what the program is for")]

use std::time::Instant;

use moefold_kernels::gemm::{Trans, gemm};
use moefold_kernels::router::{RouterRule, Score};
use moefold_kernels::swiglu::Rule;
use moefold_kernels::{
    Device, Dtype, Op, Pass, Tensor, TensorClass, adamw, attention, cross_entropy, elementwise,
    embedding, gemm, grad_norm, grouped_gemm, permute, rms_norm, rope, router, swiglu,
};

const HIDDEN: usize = 512;
const HEADS: usize = 8;
const HEAD: usize = 64;
const EXPERTS: usize = 16;
const TOPK: usize = 2;
const WIDTH: usize = 256;
const VOCAB: usize = 8192;
const SEQS: usize = 4;
const TOKENS: usize = SEQS * 256;

struct Bench {
    device: Device,
    filter: String,
    seconds: f64,
    state: u64,
}

impl Bench {
    /// Values in -0.5..0.5 from a linear congruential generator: the same on every run.
    fn values(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
        };
        (0..len).map(|_| next()).collect()
    }

    fn tensor(&mut self, dims: &[usize]) -> Tensor {
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

    /// Times `body` and prints one line; what it returns is hashed.
    fn time(&self, label: &str, op: Op, mut body: impl FnMut() -> Tensor) {
        if !label.contains(&self.filter) {
            return;
        }
        let hash = hash(&body());
        let mut times = Vec::new();
        let (begin, ran_before) = (Instant::now(), ran());
        while times.len() < 5 || begin.elapsed().as_secs_f64() < self.seconds {
            let start = Instant::now();
            let result = body();
            times.push(start.elapsed().as_secs_f64());
            drop(result);
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
            "{label:28} {:>9.1} us {:>6.1} GFLOP/s {:>7.2} GB/s  min {:>9.1} us  {hash:016x}",
            time * 1e6,
            op.flops().0 / time / 1e9,
            op.bytes().0 as f64 / time / 1e9,
            times[0] * 1e6,
        );
    }
}

/// Seconds this thread has run, where the system says so (Linux, to a few milliseconds).
fn ran() -> Option<f64> {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(line.split(' ').next()?.parse::<f64>().ok()? * 1e-9)
}

/// FNV-1a over the bits.
fn hash(t: &Tensor) -> u64 {
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
        state: 1,
    };
    println!("{:?}", b.device);
    products(&mut b);
    experts(&mut b);
    attention_block(&mut b);
    head(&mut b);
    optimizer(&mut b);
}

fn products(b: &mut Bench) {
    for (name, n, k) in [
        ("qkv", 3 * HIDDEN, HIDDEN),
        ("proj", HIDDEN, HIDDEN),
        ("head", VOCAB, HIDDEN),
        ("router", EXPERTS, HIDDEN),
    ] {
        let (x, w) = (b.tensor(&[TOKENS, k]), b.tensor(&[n, k]));
        let (dy, dw) = (b.tensor(&[TOKENS, n]), b.tensor(&[n, k]));
        let y = b
            .device
            .zeros(TensorClass::Activations, Dtype::F32, &[TOKENS, n]);
        let key = gemm::key(TOKENS, n, k, Pass::Forward);
        b.time(&format!("gemm {name} forward"), key, || {
            gemm(&x, Trans::No, &w, Trans::Yes, &y, 0.0);
            y.clone()
        });
        b.time(&format!("gemm {name} dgrad"), key, || gemm::dgrad(&dy, &w));
        b.time(&format!("gemm {name} wgrad"), key, || {
            gemm(&dy, Trans::Yes, &x, Trans::No, &dw, 0.0);
            dw.clone()
        });
    }
}

fn experts(b: &mut Bench) {
    let rule = RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: true,
        scale: 1.0,
        groups: None,
    };
    let logits = b.tensor(&[TOKENS, EXPERTS]);
    let routing = router::forward(&logits, TOPK, &rule, None);
    let dprobs = b.tensor(&[TOKENS, TOPK]);
    b.time(
        "router forward",
        router::key(&logits, TOPK, Pass::Forward),
        || router::forward(&logits, TOPK, &rule, None).probs,
    );
    b.time(
        "router backward",
        router::key(&logits, TOPK, Pass::Backward),
        || router::backward(&dprobs, &routing, &rule, None),
    );
    let map = permute::map(&routing.ids, EXPERTS);
    let x = b.tensor(&[TOKENS, HIDDEN]);
    let rows = permute::forward(&x, &map);
    b.time("permute map", permute::key(&rows, Pass::Forward), || {
        permute::map(&routing.ids, EXPERTS);
        x.rows(0..0)
    });
    b.time(
        "permute forward",
        permute::key(&rows, Pass::Forward),
        || permute::forward(&x, &map),
    );
    b.time(
        "unpermute forward",
        permute::unpermute_key(&rows, Pass::Forward),
        || permute::unpermute(&rows, &map, None),
    );
    let n = map.num_rows();
    let probs = permute::permute_slots(&routing.probs, &map);
    for (name, out, k) in [("fc1", 2 * WIDTH, HIDDEN), ("fc2", HIDDEN, WIDTH)] {
        let (x, w) = (b.tensor(&[n, k]), b.tensor(&[EXPERTS, out, k]));
        let (dy, dw) = (b.tensor(&[n, out]), b.tensor(&[EXPERTS, out, k]));
        let key = |pass| grouped_gemm::key(&w, n, pass);
        b.time(
            &format!("grouped_gemm {name} forward"),
            key(Pass::Forward),
            || grouped_gemm::forward(&x, &w, &map.counts),
        );
        b.time(
            &format!("grouped_gemm {name} dgrad"),
            key(Pass::Dgrad),
            || grouped_gemm::dgrad(&dy, &w, &map.counts),
        );
        b.time(
            &format!("grouped_gemm {name} wgrad"),
            key(Pass::Wgrad),
            || {
                elementwise::fill(&dw, 0.0);
                grouped_gemm::wgrad(&dy, &x, &map.counts, &dw);
                dw.clone()
            },
        );
    }
    let (x, dy) = (b.tensor(&[n, 2 * WIDTH]), b.tensor(&[n, WIDTH]));
    b.time("swiglu forward", swiglu::key(&x, Pass::Forward), || {
        swiglu::forward(&x, Some(&probs), &Rule::SWIGLU)
    });
    b.time("swiglu backward", swiglu::key(&x, Pass::Backward), || {
        swiglu::backward(&dy, &x, Some(&probs), &Rule::SWIGLU).0
    });
}

fn attention_block(b: &mut Bench) {
    let (x, w) = (b.tensor(&[TOKENS, HIDDEN]), b.tensor(&[HIDDEN]));
    let (dy, dw) = (b.tensor(&[TOKENS, HIDDEN]), b.tensor(&[HIDDEN]));
    let (_, rstd) = rms_norm::forward(&x, &w, 1e-6);
    b.time("rms_norm forward", rms_norm::key(&x, Pass::Forward), || {
        rms_norm::forward(&x, &w, 1e-6).0
    });
    b.time(
        "rms_norm backward",
        rms_norm::key(&x, Pass::Backward),
        || rms_norm::backward(&dy, &x, &w, &rstd, &dw),
    );
    b.time("add", elementwise::key(&x), || elementwise::add(&x, &dy));
    let [q, k, v, d_o] = [0; 4].map(|_| b.tensor(&[TOKENS, HEADS, HEAD]));
    let positions: Vec<u32> = (0..TOKENS as u32).map(|t| t % 256).collect();
    let table = rope::table(&b.device, &positions, HEAD, 1e6);
    let turned = elementwise::duplicate(&q, TensorClass::Activations);
    b.time("rope forward", rope::key(&q, Pass::Forward), || {
        rope::forward(&turned, &table);
        x.rows(0..0)
    });
    let w = b.tensor(&[HEAD]);
    b.time("qk_norm forward", rms_norm::key(&q, Pass::Forward), || {
        rms_norm::forward(&q, &w, 1e-6).0
    });
    let (_, rstd) = rms_norm::forward(&q, &w, 1e-6);
    let dw = b.tensor(&[HEAD]);
    b.time(
        "qk_norm backward",
        rms_norm::key(&q, Pass::Backward),
        || rms_norm::backward(&d_o, &q, &w, &rstd, &dw),
    );
    let scale = 0.125;
    let key = |pass| attention::key(&q, &k, &v, SEQS, pass);
    b.time("attention forward", key(Pass::Forward), || {
        attention::forward(&q, &k, &v, SEQS, scale).0
    });
    let (o, lse) = attention::forward(&q, &k, &v, SEQS, scale);
    b.time("attention backward", key(Pass::Backward), || {
        attention::backward(&d_o, &q, &k, &v, &o, &lse, SEQS, scale).0
    });
}

fn head(b: &mut Bench) {
    let logits = b.tensor(&[TOKENS, VOCAB]);
    let ids = b.ids(&[TOKENS], VOCAB);
    let (table, dtable) = (b.tensor(&[VOCAB, HIDDEN]), b.tensor(&[VOCAB, HIDDEN]));
    let dy = b.tensor(&[TOKENS, HIDDEN]);
    b.time(
        "embedding forward",
        embedding::key(&table, TOKENS, Pass::Forward),
        || embedding::forward(&ids, &table, 0),
    );
    b.time(
        "embedding backward",
        embedding::key(&table, TOKENS, Pass::Backward),
        || {
            embedding::backward(&dy, &ids, &dtable, 0);
            dy.rows(0..0)
        },
    );
    let key = |pass| cross_entropy::key(&logits, pass);
    b.time("cross_entropy forward", key(Pass::Forward), || {
        let top = cross_entropy::row_max(&logits);
        cross_entropy::sum_exp_and_target(&logits, &top, &ids, 0).0
    });
    let top = cross_entropy::row_max(&logits);
    let (sum_exp, target) = cross_entropy::sum_exp_and_target(&logits, &top, &ids, 0);
    let reduced = cross_entropy::Reduced {
        top: &top,
        sum_exp: &sum_exp,
        target: &target,
    };
    b.time("cross_entropy finish", key(Pass::Backward), || {
        cross_entropy::finish(&logits, reduced, &ids, 0, 1e-3)
    });
}

fn optimizer(b: &mut Bench) {
    let dims = [EXPERTS, 2 * WIDTH, HIDDEN];
    let [w, g, m] = [0; 3].map(|_| b.tensor(&dims));
    let v = b.device.zeros(TensorClass::Optimizer, Dtype::F32, &dims);
    let rule = adamw::Adamw {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 3,
    };
    b.time("adamw", adamw::key(&w), || {
        adamw::step(&w, &g, &m, &v, &rule, 1.0);
        w.rows(0..0)
    });
    b.time("grad_norm", grad_norm::key(&g), || {
        grad_norm::sum_squares(&g);
        g.rows(0..0)
    });
    b.time("fill", elementwise::key(&g), || {
        elementwise::fill(&g, 0.0);
        g.rows(0..0)
    });
}
