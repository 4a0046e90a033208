//! Keys are measured or refused with a reason, on the CPU, on emulated GPUs shared and not, over NCCL.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use moefold_kernels::cuda::Architecture;
use moefold_kernels::cuda::nccl::Nccl;
use moefold_kernels::cuda::nccl::mock::Mock;
use moefold_profiles::host::{Direction, HostCost};
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind, Costs, Dtype, Pass, Source};

use super::*;
use crate::testing::is_at_hand;
use crate::transport::world_of;

fn collective(kind: CollectiveKind, ranks: u32) -> Key {
    Key::Collective(Collective {
        kind,
        bytes: Bytes(4096),
        ranks,
        ranks_per_domain: ranks,
    })
}

#[test]
fn every_runnable_key_gets_samples_and_the_others_a_reason() {
    let gemm = |dtype| {
        Key::Op(Op::Gemm {
            m: 8,
            n: 16,
            k: 8,
            pass: Pass::Forward,
            dtype,
        })
    };
    let options = ProfileOptions {
        keys: vec![
            gemm(Dtype::F32),
            gemm(Dtype::F32),
            gemm(Dtype::Bf16),
            collective(CollectiveKind::AllReduce, 2),
            collective(CollectiveKind::AllToAll, 4),
            collective(CollectiveKind::AllReduce, 3),
            collective(CollectiveKind::SendRecv, 2),
        ],
        ranks: 4,
        device: DeviceSpec::Cpu {
            threads_per_rank: Some(1),
        },
        warmup: 0,
        repeats: 3,
        budget: Duration::ZERO,
    };
    let calls = AtomicUsize::new(0);
    let measured = run(&options, &|progress| {
        calls.fetch_add(1, Ordering::Relaxed);
        assert_eq!(progress.total, 4);
        assert!(progress.median_s > 0.0);
    })
    .expect("measures");
    assert_eq!(calls.into_inner(), 4);
    assert_eq!(measured.skipped.len(), 2, "{:?}", measured.skipped);
    let profile = measured.profile;
    assert_eq!((profile.samples.len(), profile.concurrent_ranks), (4, 4));
    for sample in &profile.samples {
        // Of an op every rank's.
        let (taken, ranks) = match sample.key {
            Key::Op(_) => (Taken::Cold, 4),
            _ => (Taken::Repeated, 1),
        };
        assert_eq!((sample.taken, sample.seconds.len()), (taken, 3 * ranks));
        assert!(sample.seconds.iter().all(|s| *s > 0.0), "{sample:?}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    profile.save(folder.path()).expect("a valid profile");
    assert_eq!(Profile::load(folder.path()).expect("loads"), profile);
}

/// What an op ran on is in a cache: so before it runs again, each time, it is put out.
#[test]
fn every_cold_run_begins_with_operands_put_out() {
    let clock = Clock::new(Instant::now(), 1.0);
    let done = std::cell::RefCell::new(Vec::new());
    let push = |what| done.borrow_mut().push(what);
    cold_ns(&clock, &mut || push("evict"), &mut || push("run"));
    assert_eq!(done.into_inner(), ["evict", "run"].repeat(RUNS as usize));
}

#[test]
fn the_default_sweep_is_all_runnable() {
    let device = Device::cpu(1);
    for (ranks, each) in [(1, 1), (2, 2), (4, 4), (6, 6), (8, 8), (8, 4), (4, 1)] {
        let places: Vec<Vec<u64>> = (0..ranks).map(|rank| vec![rank % each, each]).collect();
        let machines = Machines::of(&places);
        for key in default_sweep(ranks as u32, each as u32) {
            let refused = match key {
                Key::Op(op) => ops::refusal(&device, &op),
                Key::Collective(collective) => machines.refusal(&collective),
                Key::Host(_) => Some("a host cost"),
            };
            assert_eq!(refused, None, "{ranks} ranks, {each} a machine: {key:?}");
        }
    }
}

/// An op of every kind, tiny.
fn tiny_ops() -> Vec<Op> {
    let dtype = Dtype::Bf16;
    let pass = Pass::Backward;
    let (rows, dim) = (16, 64);
    let grouped = |pass| Op::GroupedGemm {
        groups: 3,
        rows: 32,
        n: 64,
        k: 32,
        pass,
        dtype,
    };
    let gemm = |pass| Op::Gemm {
        m: 32,
        n: 64,
        k: 32,
        pass,
        dtype,
    };
    vec![
        gemm(Pass::Forward),
        gemm(Pass::Wgrad),
        grouped(Pass::Forward),
        grouped(Pass::Wgrad),
        Op::Attention {
            batch: 1,
            heads: 2,
            kv_heads: 1,
            q_len: 16,
            kv_len: 16,
            qk_dim: 64,
            v_dim: 64,
            causal: true,
            pass,
            dtype,
        },
        Op::RmsNorm {
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
            experts: 8,
            topk: 2,
            pass,
        },
        Op::Permute {
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
            vocab: 64,
            pass,
            dtype,
        },
        Op::Adamw {
            len: 256,
            dtype,
            moments: Dtype::F32,
            remainders: false,
        },
        Op::GradNorm { len: 256 },
    ]
}

/// On a device with a stream: every kind of op, uneven groups, and what the host costs.
#[test]
fn an_emulated_gpu_is_profiled_and_its_profile_prices_plans() {
    let device = DeviceSpec::Emulated {
        architecture: Architecture::SM90,
        dtype: Dtype::Bf16,
        seed: 1,
        reserve: None,
    };
    if !is_at_hand(&device) {
        return;
    }
    let copy = |direction| HostCost::Copy {
        bytes: Bytes(1 << 16),
        direction,
    };
    let ops = tiny_ops();
    let costs = [
        HostCost::Launch,
        HostCost::Read,
        copy(Direction::ToDevice),
        copy(Direction::Both),
    ];
    let f32_gemm = Key::Op(Op::Gemm {
        m: 8,
        n: 8,
        k: 8,
        pass: Pass::Forward,
        dtype: Dtype::F32,
    });
    let options = ProfileOptions {
        keys: ops
            .iter()
            .map(|op| Key::Op(*op))
            .chain(costs.map(Key::Host))
            .chain([f32_gemm])
            .collect(),
        ranks: 1,
        device,
        warmup: 0,
        repeats: 1,
        budget: Duration::ZERO,
    };
    let measured = run(&options, &|_| ()).expect("measures");
    let reason = "the device was opened in bf16";
    assert_eq!(measured.skipped, [(f32_gemm, reason)]);
    let profile = measured.profile;
    assert!(profile.device_name.is_some() && !profile.shared_device);
    let skewed: Vec<f64> = profile.samples.iter().filter_map(|s| s.skew).collect();
    // Of 32 rows over 3 groups, 22, 10 and none.
    assert_eq!(skewed, [22.0 * 3.0 / 32.0; 2]);
    let even = profile.samples.len() - skewed.len();
    assert_eq!(even, ops.len() + costs.len());
    let folder = tempfile::tempdir().expect("a temporary folder");
    profile.save(folder.path()).expect("a valid profile");
    let profile = Profile::load(folder.path()).expect("loads");

    let mut cluster = presets::cluster("dgx-h200").expect("a preset");
    cluster.gpu.name.clone_from(&profile.device);
    let costs = Costs::for_cluster(&cluster, &[profile]);
    for op in &ops {
        assert_eq!(costs.op(op).source, Source::Measured, "{op:?}");
    }
    assert!(costs.host().launch.is_some() && costs.host().read.is_some());
}

#[test]
fn ranks_that_share_a_gpu_measure_their_collectives() {
    let device = DeviceSpec::Emulated {
        architecture: Architecture::SM80,
        dtype: Dtype::F32,
        seed: 2,
        reserve: None,
    };
    if !is_at_hand(&device) {
        return;
    }
    let gemm = Key::Op(Op::Gemm {
        m: 8,
        n: 8,
        k: 8,
        pass: Pass::Forward,
        dtype: Dtype::F32,
    });
    let options = ProfileOptions {
        keys: vec![
            gemm,
            collective(CollectiveKind::AllReduce, 2),
            collective(CollectiveKind::AllToAll, 2),
        ],
        ranks: 2,
        device,
        warmup: 0,
        repeats: 1,
        budget: Duration::ZERO,
    };
    let measured = run(&options, &|_| ()).expect("measures");
    assert!(measured.skipped.is_empty(), "{:?}", measured.skipped);
    assert!(measured.profile.shared_device);
    assert_eq!(measured.profile.samples.len(), 3);
}

/// Measures on ranks as processes would be, here threads with a connection each; what rank 0 writes.
fn measure_apart(options: &ProfileOptions, nccl: Option<Nccl>) -> Measured {
    let found = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for launched in world_of(options.ranks) {
            let found = &found;
            scope.spawn(move || {
                let world = World::process(launched).deadline(Duration::from_mins(2));
                let world = nccl.map_or_else(|| world.clone(), |nccl| world.clone().nccl(nccl));
                let measured = run_in(&world, options, &|_| ()).expect("measures");
                assert_eq!(measured.is_some(), world.has_first());
                found.lock().expect("no rank panics").extend(measured);
            });
        }
    });
    let mut found = found.into_inner().expect("no rank panics");
    found.pop().expect("rank 0 has it")
}

#[test]
fn the_time_for_samples_begins_when_the_ranks_have_met() {
    let options = ProfileOptions {
        keys: vec![collective(CollectiveKind::AllReduce, 2)],
        ranks: 2,
        device: DeviceSpec::Cpu {
            threads_per_rank: Some(1),
        },
        warmup: 0,
        repeats: SAMPLES_MIN + 1,
        budget: Duration::from_secs(1),
    };
    let measured = thread::scope(|scope| {
        let ranks = world_of(2).into_iter().map(|launched| {
            let options = &options;
            scope.spawn(move || {
                thread::sleep(options.budget * launched.rank);
                run_in(&World::process(launched), options, &|_| ()).expect("measures")
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let measured = ranks.into_iter().map(|rank| rank.join().expect("measures"));
        measured.collect::<Vec<_>>().swap_remove(0)
    });
    let samples = measured.expect("rank 0 has it").profile.samples;
    assert_eq!(samples[0].seconds.len(), options.repeats);
}

#[test]
fn ranks_with_a_gpu_each_measure_all_at_once_and_their_collectives_are_priced() {
    let device = DeviceSpec::Emulated {
        architecture: Architecture::SM90,
        dtype: Dtype::Bf16,
        seed: 1,
        reserve: None,
    };
    if !is_at_hand(&device) {
        return;
    }
    let Some(mock) = Mock::load() else { return };
    mock.moves();
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllToAll,
        CollectiveKind::Broadcast,
    ];
    let collectives = kinds.map(|kind| collective(kind, 2));
    let gemm = Op::Gemm {
        m: 32,
        n: 64,
        k: 32,
        pass: Pass::Forward,
        dtype: Dtype::Bf16,
    };
    let copy = HostCost::Copy {
        bytes: Bytes(1 << 16),
        direction: Direction::Both,
    };
    let options = ProfileOptions {
        keys: [Key::Op(gemm), Key::Host(copy)]
            .into_iter()
            .chain(collectives)
            .collect(),
        ranks: 2,
        device,
        warmup: 0,
        repeats: 2,
        budget: Duration::ZERO,
    };
    let measured = measure_apart(&options, Some(mock.nccl(&[]).expect("complete")));
    assert!(measured.skipped.is_empty(), "{:?}", measured.skipped);
    let profile = measured.profile;
    assert!(!profile.shared_device);
    assert_eq!(profile.samples.len(), options.keys.len());
    assert!(
        profile
            .samples
            .iter()
            .all(|sample| sample.seconds.len() == 2)
    );
    let said = mock.said();
    let count = |call: &str| said.lines().filter(|line| *line == call).count();
    assert!(count("ncclAlltoAll") > 0 && count("ncclSend") == 0);
    // The group of all, and one for the three keys of its size, however many there are.
    assert_eq!(count("ncclCommSplit"), 2 * 2);
    mock.assert_clean();

    let mut cluster = presets::cluster("dgx-h200").expect("a preset");
    cluster.gpu.name.clone_from(&profile.device);
    let costs = Costs::for_cluster(&cluster, &[profile]);
    for key in collectives {
        let Key::Collective(key) = key else {
            unreachable!("they all are");
        };
        assert_eq!(costs.collective(&key).source, Source::Measured, "{key:?}");
    }
}

#[test]
fn processes_on_the_cpu_measure_what_threads_do() {
    let options = ProfileOptions {
        keys: vec![
            Key::Op(Op::GradNorm { len: 256 }),
            collective(CollectiveKind::AllGather, 2),
        ],
        ranks: 2,
        device: DeviceSpec::Cpu {
            threads_per_rank: Some(1),
        },
        warmup: 0,
        repeats: 3,
        budget: Duration::ZERO,
    };
    let measured = measure_apart(&options, None);
    assert!(measured.skipped.is_empty(), "{:?}", measured.skipped);
    let profile = measured.profile;
    assert_eq!((profile.samples.len(), profile.concurrent_ranks), (2, 2));
    assert!(!profile.shared_device);
}
