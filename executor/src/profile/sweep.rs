//! The shapes measured where no model is given: a coarse grid around what small models on a CPU, or
//! models of some billions of parameters on a GPU, do, for the planner to interpolate in.

use moefold_kernels::{Dtype, Op, Pass};
use moefold_profiles::directory::Key;
use moefold_profiles::host::{Direction, HostCost};
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind};

/// Sizes that are combined. Widths of matrices are pairs of output and input.
struct Grid {
    dtype: Dtype,
    rows: &'static [u64],
    widths: &'static [(u64, u64)],
    groups: &'static [u64],
    group_rows: &'static [u64],
    expert_widths: &'static [(u64, u64)],
    lengths: &'static [u64],
    /// Query heads and key/value heads.
    heads: &'static [(u64, u64)],
    head_widths: &'static [u64],
    token_rows: &'static [u64],
    token_widths: &'static [u64],
    experts: &'static [u64],
    vocabularies: &'static [u64],
    parameters: &'static [u64],
    messages: &'static [u64],
}

const CPU: Grid = Grid {
    dtype: Dtype::F32,
    rows: &[64, 512, 2048],
    widths: &[
        (64, 256),
        (256, 256),
        (256, 1024),
        (1024, 256),
        (1024, 1024),
    ],
    groups: &[2, 8],
    group_rows: &[128, 1024],
    expert_widths: &[(256, 128), (512, 256), (256, 512)],
    lengths: &[128, 512],
    heads: &[(4, 2)],
    head_widths: &[32, 64],
    token_rows: &[128, 1024],
    token_widths: &[128, 512],
    experts: &[8, 64],
    vocabularies: &[256, 8192],
    parameters: &[1 << 14, 1 << 18, 1 << 22],
    messages: &[1 << 12, 1 << 17, 1 << 22],
};

const GPU: Grid = Grid {
    dtype: Dtype::Bf16,
    rows: &[512, 4096, 16384],
    widths: &[
        (1024, 1024),
        (1024, 4096),
        (4096, 1024),
        (4096, 4096),
        (14336, 4096),
        (4096, 14336),
    ],
    groups: &[4, 16, 64],
    group_rows: &[4096, 32768],
    expert_widths: &[(1536, 2048), (2048, 768), (8192, 4096), (4096, 4096)],
    lengths: &[1024, 4096, 16384],
    heads: &[(8, 1), (32, 4), (32, 32)],
    head_widths: &[64, 128],
    token_rows: &[2048, 16384],
    token_widths: &[2048, 6144],
    experts: &[8, 128],
    vocabularies: &[32768, 151_936],
    parameters: &[1 << 20, 1 << 24, 1 << 28],
    messages: &[1 << 14, 1 << 20, 1 << 26],
};

/// Keys for `ranks` ranks on CPUs, `each` on a machine.
pub fn default_sweep(ranks: u32, each: u32) -> Vec<Key> {
    CPU.keys(ranks, each)
}

/// Keys for GPUs that store `dtype`, and for `ranks` ranks that share one or have one each, `each` of
/// them on a machine.
pub fn gpu_sweep(dtype: Dtype, ranks: u32, each: u32) -> Vec<Key> {
    let mut keys = Grid { dtype, ..GPU }.keys(ranks, each);
    keys.extend(host_keys());
    keys
}

/// What a GPU and its host cost each other.
pub fn host_keys() -> Vec<Key> {
    let sizes = [1 << 16, 1 << 20, 1 << 24, 1 << 28];
    let ways = [Direction::ToDevice, Direction::ToHost, Direction::Both];
    let copies = sizes.into_iter().flat_map(|bytes| {
        ways.map(|direction| HostCost::Copy {
            bytes: Bytes(bytes),
            direction,
        })
    });
    let costs = copies.chain([HostCost::Launch, HostCost::Read]);
    costs.map(Key::Host).collect()
}

impl Grid {
    fn keys(&self, ranks: u32, each: u32) -> Vec<Key> {
        let mut ops = Vec::new();
        self.matrix_products(&mut ops);
        self.attention(&mut ops);
        self.rowwise(&mut ops);
        for &len in self.parameters {
            let dtype = self.dtype;
            ops.push(Op::Add { len, dtype });
            let moments = Dtype::F32;
            ops.push(Op::Adamw {
                len,
                dtype,
                moments,
                remainders: false,
            });
            ops.push(Op::GradNorm { len });
        }
        let mut keys: Vec<Key> = ops.into_iter().map(Key::Op).collect();
        keys.extend(self.collectives(ranks, each).map(Key::Collective));
        keys
    }

    fn matrix_products(&self, ops: &mut Vec<Op>) {
        for &rows in self.rows {
            for &(n, k) in self.widths {
                let gemm = |m, n, k, pass| Op::Gemm {
                    m,
                    n,
                    k,
                    pass,
                    dtype: self.dtype,
                };
                ops.push(gemm(rows, n, k, Pass::Forward));
                ops.push(gemm(rows, k, n, Pass::Dgrad));
                ops.push(gemm(n, k, rows, Pass::Wgrad));
            }
        }
        for &groups in self.groups {
            for &rows in self.group_rows {
                for &(n, k) in self.expert_widths {
                    for pass in [Pass::Forward, Pass::Dgrad, Pass::Wgrad] {
                        ops.push(Op::GroupedGemm {
                            groups,
                            rows,
                            n,
                            k,
                            pass,
                            dtype: self.dtype,
                        });
                    }
                }
            }
        }
    }

    fn attention(&self, ops: &mut Vec<Op>) {
        for &len in self.lengths {
            for &(heads, kv_heads) in self.heads {
                for &dim in self.head_widths {
                    for pass in [Pass::Forward, Pass::Backward] {
                        ops.push(Op::Attention {
                            batch: 1,
                            heads,
                            kv_heads,
                            q_len: len,
                            kv_len: len,
                            qk_dim: dim,
                            v_dim: dim,
                            causal: true,
                            pass,
                            dtype: self.dtype,
                        });
                    }
                }
            }
        }
    }

    /// Ops over rows: what they cost follows their bytes.
    fn rowwise(&self, ops: &mut Vec<Op>) {
        let dtype = self.dtype;
        for pass in [Pass::Forward, Pass::Backward] {
            for &rows in self.token_rows {
                for &dim in self.token_widths {
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
                for &experts in self.experts {
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
                for &vocab in self.vocabularies {
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

    fn collectives(&self, ranks: u32, each: u32) -> impl Iterator<Item = Collective> {
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
                self.messages.iter().map(move |&bytes| Collective {
                    kind,
                    bytes: Bytes(bytes),
                    ranks: group,
                    ranks_per_domain: group.min(each),
                })
            })
        })
    }
}
