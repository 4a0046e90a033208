//! Prices against what was published, and the laws they obey.
#![expect(clippy::print_stdout, reason = "a sampled law prints its seed")]

mod golden;
mod laws;
mod profiled;

use super::*;
use crate::directory::{Key, Taken, Wait};
use crate::presets;
use crate::table;
use crate::{CollectiveKind, Dtype, Pass, SweepKind};

/// One op of every kind, pass and a few dtypes with sizes around `s`.
pub(super) fn every_op(s: u64) -> Vec<Op> {
    let mut ops = vec![
        Op::Add {
            len: s * s,
            dtype: Dtype::Bf16,
        },
        Op::Adamw {
            len: s * s,
            dtype: Dtype::Bf16,
            moments: Dtype::F32,
            remainders: false,
        },
        Op::GradNorm { len: s * s },
    ];
    ops.extend([SweepKind::Copy, SweepKind::Clip].map(|kind| Op::Sweep {
        kind,
        len: s * s,
        dtype: Dtype::F32,
    }));
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::Fp8, Dtype::Fp4] {
        for pass in [Pass::Forward, Pass::Dgrad, Pass::Wgrad] {
            ops.push(gemm([s, 2 * s, s / 2 + 1], pass, dtype));
            ops.push(Op::GroupedGemm {
                groups: 8,
                rows: 8 * s,
                n: s,
                k: 2 * s,
                pass,
                dtype,
            });
        }
        for pass in [Pass::Forward, Pass::Backward] {
            for causal in [false, true] {
                ops.push(attention(1, 8, s, 128, pass, causal, dtype));
            }
        }
    }
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for pass in [Pass::Forward, Pass::Backward] {
            ops.extend(by_rows([s, 2 * s], pass, dtype));
        }
    }
    ops
}

/// One of each op over rows.
fn by_rows([rows, dim]: [u64; 2], pass: Pass, dtype: Dtype) -> Vec<Op> {
    vec![
        Op::RmsNorm {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::Rope {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::LatentKv {
            rows,
            heads: 4,
            nope: 128,
            rope: 64,
            v_dim: 96,
            pass,
            dtype,
        },
        Op::Swiglu {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::Router {
            rows,
            experts: 64,
            topk: 8,
            pass,
        },
        Op::Permute {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::Unpermute {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::Embedding {
            rows,
            dim,
            pass,
            dtype,
        },
        Op::CrossEntropy {
            rows,
            vocab: dim,
            pass,
            dtype,
        },
        Op::LinearAttention {
            rows,
            heads: 1,
            state: 128,
            width: dim,
            pass,
            dtype,
        },
    ]
}

fn gemm([m, n, k]: [u64; 3], pass: Pass, dtype: Dtype) -> Op {
    Op::Gemm {
        m,
        n,
        k,
        pass,
        dtype,
    }
}

fn attention(
    batch: u64,
    heads: u64,
    seq: u64,
    dim: u64,
    pass: Pass,
    causal: bool,
    dtype: Dtype,
) -> Op {
    Op::Attention {
        batch,
        heads,
        kv_heads: heads,
        q_len: seq,
        kv_len: seq,
        qk_dim: dim,
        v_dim: dim,
        causal,
        pass,
        dtype,
    }
}

fn costs(cluster: &str) -> Costs {
    Costs::for_cluster(&presets::cluster(cluster).expect("a preset"), &[])
}

/// The preset cluster of a GPU.
fn of_gpu(gpu: &str) -> Costs {
    let names = presets::cluster_names();
    let mut clusters = names
        .iter()
        .map(|name| presets::cluster(name).expect("a preset"));
    let found = clusters.find(|cluster| cluster.gpu.name == gpu);
    Costs::for_cluster(&found.expect("every GPU is in a cluster"), &[])
}

fn collective(kind: CollectiveKind, bytes: u64, ranks: u32, ranks_per_domain: u32) -> Collective {
    Collective {
        kind,
        bytes: Bytes(bytes),
        ranks,
        ranks_per_domain,
    }
}

/// TFLOP/s of an op's price.
fn rate(costs: &Costs, op: &Op) -> f64 {
    op.flops().0 / costs.op(op).time.0 / 1e12
}

/// Bus bandwidth of a collective's price, GB/s.
fn busbw(costs: &Costs, collective: &Collective) -> f64 {
    collective.wire_bytes() / costs.collective(collective).time.0 / 1e9
}

/// The ratio must be within `percent` of 1 either way.
fn check_within(what: &str, found: f64, expected: f64, percent: f64) {
    let error = 100.0 * (found / expected - 1.0);
    assert!(
        error.abs() <= percent,
        "{what}: {found:.4e} for {expected:.4e}, {error:.1}%"
    );
}

/// Samples without a dependency; the same seed gives the same sizes everywhere.
struct Sampler(u64);

impl Sampler {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A whole number, log-uniform from 1 to `most`.
    fn size(&mut self, most: f64) -> u64 {
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        (unit * most.ln()).exp().round() as u64
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[(self.next() % items.len() as u64) as usize]
    }
}

/// Costs by GPU, built once a thread.
fn cached(gpu: &str) -> std::rc::Rc<Costs> {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;
    thread_local! {
        static BUILT: RefCell<BTreeMap<String, Rc<Costs>>> = const { RefCell::new(BTreeMap::new()) };
    }
    BUILT.with_borrow_mut(|built| {
        let new = || Rc::new(of_gpu(gpu));
        built.entry(gpu.to_owned()).or_insert_with(new).clone()
    })
}
