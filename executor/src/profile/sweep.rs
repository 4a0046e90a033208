//! The shapes measured where no model is given: a coarse grid around what small models on a CPU do,
//! for the planner to interpolate in.

use moefold_kernels::{Dtype, Op, Pass};
use moefold_profiles::directory::Key;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind};

const DTYPE: Dtype = Dtype::F32;

/// Keys for `ranks` rank threads.
pub fn default_sweep(ranks: u32) -> Vec<Key> {
    let mut ops = Vec::new();
    matrix_products(&mut ops);
    attention(&mut ops);
    rowwise(&mut ops);
    for len in [1 << 14, 1 << 18, 1 << 22] {
        ops.push(Op::Add { len, dtype: DTYPE });
        ops.push(Op::Adamw { len, dtype: DTYPE });
        ops.push(Op::GradNorm { len });
    }
    let mut keys: Vec<Key> = ops.into_iter().map(Key::Op).collect();
    keys.extend(collectives(ranks).map(Key::Collective));
    keys
}

fn matrix_products(ops: &mut Vec<Op>) {
    for rows in [64, 512, 2048] {
        for (n, k) in [
            (64, 256),
            (256, 256),
            (256, 1024),
            (1024, 256),
            (1024, 1024),
        ] {
            let gemm = |m, n, k, pass| Op::Gemm {
                m,
                n,
                k,
                pass,
                dtype: DTYPE,
            };
            ops.push(gemm(rows, n, k, Pass::Forward));
            ops.push(gemm(rows, k, n, Pass::Dgrad));
            ops.push(gemm(n, k, rows, Pass::Wgrad));
        }
    }
    for groups in [2, 8] {
        for rows in [128, 1024] {
            for (n, k) in [(256, 128), (512, 256), (256, 512)] {
                for pass in [Pass::Forward, Pass::Dgrad, Pass::Wgrad] {
                    ops.push(Op::GroupedGemm {
                        groups,
                        rows,
                        n,
                        k,
                        pass,
                        dtype: DTYPE,
                    });
                }
            }
        }
    }
}

fn attention(ops: &mut Vec<Op>) {
    for len in [128, 512] {
        for dim in [32, 64] {
            for pass in [Pass::Forward, Pass::Backward] {
                ops.push(Op::Attention {
                    batch: 1,
                    heads: 4,
                    kv_heads: 2,
                    q_len: len,
                    kv_len: len,
                    qk_dim: dim,
                    v_dim: dim,
                    causal: true,
                    pass,
                    dtype: DTYPE,
                });
            }
        }
    }
}

/// Ops over rows: what they cost follows their bytes.
fn rowwise(ops: &mut Vec<Op>) {
    let dtype = DTYPE;
    for pass in [Pass::Forward, Pass::Backward] {
        for rows in [128, 1024] {
            for dim in [128, 512] {
                ops.push(Op::RmsNorm {
                    rows,
                    dim,
                    pass,
                    dtype,
                });
                ops.push(Op::Swiglu {
                    rows,
                    dim,
                    pass,
                    dtype,
                });
                ops.push(Op::Permute {
                    rows,
                    dim,
                    pass,
                    dtype,
                });
                ops.push(Op::Unpermute {
                    rows,
                    dim,
                    pass,
                    dtype,
                });
                ops.push(Op::Embedding {
                    rows,
                    dim,
                    pass,
                    dtype,
                });
            }
            for experts in [8, 64] {
                ops.push(Op::Router {
                    rows,
                    experts,
                    topk: 2,
                    pass,
                });
            }
            ops.push(Op::Rope {
                rows: 8 * rows,
                dim: 64,
                pass,
                dtype,
            });
            for vocab in [256, 8192] {
                ops.push(Op::CrossEntropy {
                    rows,
                    vocab,
                    pass,
                    dtype,
                });
            }
        }
    }
}

fn collectives(ranks: u32) -> impl Iterator<Item = Collective> {
    use CollectiveKind as Kind;
    let kinds = [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Broadcast,
    ];
    let groups = (2..=ranks).filter(move |&group| ranks.is_multiple_of(group));
    groups.flat_map(move |group| {
        kinds.into_iter().flat_map(move |kind| {
            [1 << 12, 1 << 17, 1 << 22].map(|bytes| Collective {
                kind,
                bytes: Bytes(bytes),
                ranks: group,
                ranks_per_domain: group,
            })
        })
    })
}
