//! Prices against what was published, and the laws they obey.

use super::*;
use crate::presets;
use crate::{CollectiveKind, Dtype, Pass};

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
        },
        Op::GradNorm { len: s * s },
    ];
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
            let (rows, dim) = (s, 2 * s);
            ops.extend([
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
            ]);
        }
    }
    ops
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

#[test]
fn smoke() {
    for name in presets::cluster_names() {
        let costs = costs(name);
        for op in every_op(100) {
            let cost = costs.op(&op);
            assert!(
                cost.time.0.is_finite() && cost.time.0 > 0.0,
                "{name} {op:?} {cost:?}"
            );
        }
        let c = Collective {
            kind: CollectiveKind::AllReduce,
            bytes: Bytes(1 << 28),
            ranks: 8,
            ranks_per_domain: 8,
        };
        println!("{name} {:?}", costs.collective(&c));
    }
}
