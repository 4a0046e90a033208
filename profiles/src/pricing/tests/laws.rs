//! Laws over sampled sizes, on every preset cluster.

use super::*;

#[test]
fn law_every_op_has_a_positive_price_at_any_size() {
    for name in presets::cluster_names() {
        let costs = costs(name);
        for size in [0, 1, 7, 100, 4096, 65536] {
            for op in every_op(size) {
                let time = costs.op(&op).time.0;
                assert!(
                    time.is_finite() && time > 0.0 && time < 1e9,
                    "{name} {op:?} {time}"
                );
            }
        }
        let one = collective(CollectiveKind::AllReduce, 1 << 30, 1, 1);
        assert_eq!(costs.collective(&one).time, Seconds::ZERO);
    }
}

/// The op with its `axis`-th size grown, where it has one.
pub(super) fn grown(op: &Op, axis: usize, by: u64) -> Option<Op> {
    let mut op = *op;
    let size = match (&mut op, axis) {
        (Op::Gemm { m, .. }, 0) => m,
        (Op::Gemm { n, .. } | Op::GroupedGemm { n, .. }, 1) => n,
        (Op::Gemm { k, .. } | Op::GroupedGemm { k, .. }, 2) => k,
        (Op::Attention { heads, .. }, 0) | (Op::LatentKv { heads, .. }, 1) => heads,
        (Op::Attention { q_len, .. }, 1) => q_len,
        (Op::Attention { kv_len, .. }, 2) => kv_len,
        (Op::Attention { qk_dim, .. }, 3) => qk_dim,
        (
            Op::GroupedGemm { rows, .. }
            | Op::RmsNorm { rows, .. }
            | Op::Rope { rows, .. }
            | Op::LatentKv { rows, .. }
            | Op::Swiglu { rows, .. }
            | Op::Router { rows, .. }
            | Op::Permute { rows, .. }
            | Op::Unpermute { rows, .. }
            | Op::Embedding { rows, .. }
            | Op::CrossEntropy { rows, .. }
            | Op::LinearAttention { rows, .. },
            0,
        ) => rows,
        (
            Op::RmsNorm { dim, .. }
            | Op::Rope { dim, .. }
            | Op::Swiglu { dim, .. }
            | Op::Permute { dim, .. }
            | Op::Unpermute { dim, .. }
            | Op::Embedding { dim, .. },
            1,
        ) => dim,
        (Op::LatentKv { rope, .. }, 2) => rope,
        (Op::CrossEntropy { vocab, .. }, 1) => vocab,
        (
            Op::Add { len, .. }
            | Op::Sweep { len, .. }
            | Op::Adamw { len, .. }
            | Op::GradNorm { len },
            0,
        ) => len,
        _ => return None,
    };
    *size = size.checked_add(by)?;
    Some(op)
}

pub(super) fn sampled_op(sampler: &mut Sampler) -> Op {
    let dtype = sampler.pick(&[Dtype::F32, Dtype::Bf16, Dtype::Fp8, Dtype::Fp4]);
    let linear = sampler.pick(&[Pass::Forward, Pass::Dgrad, Pass::Wgrad]);
    let pass = sampler.pick(&[Pass::Forward, Pass::Backward]);
    match sampler.next() % 8 {
        0..=2 => {
            let shape = [0; 3].map(|_| sampler.size(500_000.0));
            gemm(shape, linear, dtype)
        }
        3 | 4 => Op::GroupedGemm {
            groups: sampler.size(256.0),
            rows: sampler.size(1e6),
            n: sampler.size(32768.0),
            k: sampler.size(32768.0),
            pass: linear,
            dtype,
        },
        5 => Op::Attention {
            batch: 1,
            heads: sampler.size(128.0),
            kv_heads: 1,
            q_len: sampler.size(262_144.0),
            kv_len: sampler.size(262_144.0),
            qk_dim: sampler.size(512.0),
            v_dim: sampler.size(512.0),
            causal: sampler.next().is_multiple_of(2),
            pass,
            dtype,
        },
        _ => {
            let ops = every_op(sampler.size(16384.0));
            ops[(sampler.next() % ops.len() as u64) as usize]
        }
    }
}

/// Which of cuDNN's kernels in FP8 the heads of attention have, by their width; nothing for other ops.
fn kernel_of_heads(op: &Op) -> Option<usize> {
    match op {
        Op::Attention { qk_dim, v_dim, .. } => {
            let width = (qk_dim + v_dim) as f64 / 2.0;
            Some(
                [64.0, 128.0]
                    .into_iter()
                    .filter(|&most| width > most)
                    .count(),
            )
        }
        _ => None,
    }
}

#[test]
fn law_more_work_is_never_cheaper() {
    let seed = 0x5eed_0001;
    println!("seed {seed:#x}");
    let mut sampler = Sampler(seed);
    let mut widened = 0;
    for name in presets::cluster_names() {
        let costs = costs(name);
        for _ in 0..4000 {
            let op = sampled_op(&mut sampler);
            let by = sampler.size(10_000.0);
            for axis in 0..4 {
                let Some(more) = grown(&op, axis, by) else {
                    continue;
                };
                // cuDNN's kernels for wider heads are faster in FP8 than those of narrower ones.
                if op.dtype().bits() < 16 && kernel_of_heads(&op) != kernel_of_heads(&more) {
                    continue;
                }
                let wider = op.dtype().bits() < 16 && axis == 3;
                widened += u32::from(wider && matches!(op, Op::Attention { .. }));
                let (less_s, more_s) = (costs.op(&op).time.0, costs.op(&more).time.0);
                assert!(
                    more_s >= less_s * (1.0 - 1e-9),
                    "{name}: {op:?} {less_s:.4e} but {more:?} {more_s:.4e}"
                );
            }
        }
    }
    assert!(widened > 100, "{widened} heads in FP8 grew wider");
}

const KINDS: [CollectiveKind; 6] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::SendRecv,
    CollectiveKind::Broadcast,
];

/// A collective whose placement is possible on a cluster.
fn sampled_collective(sampler: &mut Sampler, cluster: &Cluster) -> Collective {
    let kind = sampler.pick(&KINDS);
    let bytes = sampler.size(1e11);
    let most = cluster.num_gpus.unwrap_or(4096);
    let ranks = match kind {
        CollectiveKind::SendRecv => 2,
        _ => (sampler.size(f64::from(most)) as u32).max(2),
    };
    let fit = ranks.min(cluster.gpus_per_domain);
    let mut ranks_per_domain = (sampler.size(f64::from(fit)) as u32).clamp(1, fit);
    if cluster.nic_gb_per_s == 0.0 {
        ranks_per_domain = ranks;
    }
    collective(kind, bytes, ranks, ranks_per_domain)
}

#[test]
fn law_more_bytes_are_never_cheaper() {
    let seed = 0x5eed_0002;
    println!("seed {seed:#x}");
    let mut sampler = Sampler(seed);
    for name in presets::cluster_names() {
        let cluster = presets::cluster(name).expect("a preset");
        let costs = Costs::for_cluster(&cluster, &[]);
        for _ in 0..4000 {
            let less = sampled_collective(&mut sampler, &cluster);
            let more = Collective {
                bytes: less.bytes + Bytes(sampler.size(1e9)),
                ..less
            };
            let (less_s, more_s) = (
                costs.collective(&less).time.0,
                costs.collective(&more).time.0,
            );
            assert!(less_s > 0.0 && more_s.is_finite(), "{name} {less:?}");
            assert!(
                more_s >= less_s * (1.0 - 1e-9),
                "{name} {less:?} {less_s} {more:?} {more_s}"
            );
            let (n, m) = (less.ranks, less.ranks_per_domain);
            let exchange = |local, remote| {
                let exchange = Exchange {
                    kernel: ExchangeKernel::Hybridep,
                    local: Bytes(local),
                    remote: Bytes(remote),
                    copied: Bytes(local),
                    ranks: n,
                    ranks_per_domain: m,
                };
                costs.exchange(&exchange).time.0
            };
            let (local, remote) = (less.bytes.0, if n > m { more.bytes.0 } else { 0 });
            assert!(exchange(local, remote) <= exchange(local + 1000, remote));
            assert!(exchange(local, remote) <= exchange(local, remote + 1000));
        }
    }
}

#[test]
fn law_more_bandwidth_is_never_slower() {
    let seed = 0x5eed_0003;
    println!("seed {seed:#x}");
    let mut sampler = Sampler(seed);
    for name in presets::cluster_names() {
        let mut slow = presets::cluster(name).expect("a preset");
        slow.oversubscription = vec![crate::cluster::NetworkLevel {
            nodes: 16,
            ratio: 2.0,
        }];
        let mut faster = vec![slow.clone(); 7];
        faster[0].nic_gb_per_s *= 1.3;
        faster[1].gpu.nvlink_gb_per_s *= 1.2;
        faster[2].oversubscription.clear();
        faster[3].gpu.memory_gb_per_s *= 1.5;
        faster[4].gpu.peak_tflops.bf16 = slow.gpu.peak_tflops.bf16.map(|peak| 1.1 * peak);
        faster[5].gpu.host_link_gb_per_s *= 2.0;
        faster[6].gpu.mesh_link_gb_per_s = slow.gpu.mesh_link_gb_per_s.map(|link| 1.1 * link);
        let slow_costs = Costs::for_cluster(&slow, &[]);
        for fast in &faster {
            let fast_costs = Costs::for_cluster(fast, &[]);
            for _ in 0..800 {
                let op = sampled_op(&mut sampler);
                let (a, b) = (slow_costs.op(&op).time.0, fast_costs.op(&op).time.0);
                assert!(b <= a * (1.0 + 1e-9), "{name}: {op:?} {a:.4e} then {b:.4e}");
                let op = sampled_collective(&mut sampler, &slow);
                let (a, b) = (
                    slow_costs.collective(&op).time.0,
                    fast_costs.collective(&op).time.0,
                );
                assert!(b <= a * (1.0 + 1e-9), "{name}: {op:?} {a:.4e} then {b:.4e}");
            }
        }
    }
}
