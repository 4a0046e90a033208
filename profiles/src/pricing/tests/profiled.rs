//! Prices that a profile of this machine lies over.

use super::laws::{grown, sampled_op};
use super::*;

/// A profile of a CPU on which an op takes `slower` times its shipped price.
fn measured_here(ops: &[Op], messages: &[Collective], ranks: u32, slower: f64) -> Profile {
    let costs = Costs::for_cluster(&local(ranks), &[]);
    let sample = |key, time: f64| {
        let seconds = [1.0, 1.01, 0.99].map(|noise| slower * time * noise);
        Sample::of(key, Taken::Cold, seconds.to_vec())
    };
    let ops = ops
        .iter()
        .map(|op| sample(Key::Op(*op), costs.op(op).time.0));
    let messages = messages
        .iter()
        .map(|message| sample(Key::Collective(*message), costs.collective(message).time.0));
    Profile {
        cores: 2,
        concurrent_ranks: ranks,
        date: "2026-01-02T03:04:05Z".into(),
        command: "moefold profile".into(),
        ..Profile::of("cpu", ops.chain(messages).collect())
    }
}

fn local(ranks: u32) -> Cluster {
    let machine = presets::Machine {
        cores: 2,
        flops_per_cycle: 32,
        memory: Bytes(20 << 30),
    };
    presets::local_on(machine, ranks)
}

#[test]
fn golden_what_was_measured_here_comes_first() {
    let ops: Vec<Op> = [64, 256].into_iter().flat_map(every_op).collect();
    let messages =
        [1 << 10, 1 << 16, 1 << 22].map(|bytes| collective(CollectiveKind::AllReduce, bytes, 4, 4));
    let profile = measured_here(&ops, &messages, 4, 0.25);
    let shipped = Costs::for_cluster(&local(4), &[]);
    let costs = Costs::for_cluster(&local(4), std::slice::from_ref(&profile));
    assert!(costs.notes().is_empty(), "{:?}", costs.notes());
    for op in &ops {
        let (own, other) = (costs.op(op), shipped.op(op));
        assert_eq!(own.source, Source::Measured, "{op:?}");
        check_within(&format!("{op:?}"), own.time.0, 0.25 * other.time.0, 0.1);
    }
    // Between the measured sizes, and beyond them.
    for (size, source) in [(128, Source::Interpolated), (2048, Source::Extrapolated)] {
        for op in every_op(size) {
            let (own, other) = (costs.op(&op), shipped.op(&op));
            // 2048 wide times 64 rows may still lie between: only the far source is certain.
            assert!(own.source >= source || size == 2048, "{op:?} {own:?}");
            check_within(&format!("{op:?}"), own.time.0, 0.25 * other.time.0, 30.0);
        }
    }
    for message in messages {
        assert_eq!(costs.collective(&message).source, Source::Measured);
    }
    let between = collective(CollectiveKind::AllReduce, 1 << 13, 4, 4);
    assert_eq!(costs.collective(&between).source, Source::Interpolated);
    let smaller = collective(CollectiveKind::AllReduce, 1 << 16, 2, 2);
    let ratio = costs.collective(&smaller).time.0 / shipped.collective(&smaller).time.0;
    check_within("another group borrows the ratio", ratio, 0.25, 1.0);
    assert_eq!(costs.collective(&smaller).source, Source::Extrapolated);
    // One of another kind too.
    let gather = collective(CollectiveKind::AllGather, 1 << 16, 4, 4);
    let ratio = costs.collective(&gather).time.0 / shipped.collective(&gather).time.0;
    check_within("another kind", ratio, 0.25, 1.0);
    assert_eq!(costs.collective(&gather).source, Source::Extrapolated);
}

/// Ops of kinds that were not measured take as long as those that were, of what memory bounds: memory is 16 times as fast as is
/// assumed. Of a GPU what ships is measured, and stays.
#[test]
fn golden_kinds_that_were_not_measured_are_as_far_from_their_formulas_as_others() {
    let measured: Vec<Op> = [1, 8, 64, 512]
        .into_iter()
        .flat_map(|rows| by_rows([rows, 256], Pass::Forward, Dtype::F32))
        .filter(|op| matches!(op, Op::Permute { .. } | Op::RmsNorm { .. }))
        .collect();
    let asked = [1 << 10, 1 << 14, 1 << 17, 1 << 22].map(|len| Op::Sweep {
        kind: SweepKind::Chunks,
        len,
        dtype: Dtype::F32,
    });
    let check = |cluster: &Cluster, faster: f64| {
        let mut machine = cluster.clone();
        machine.gpu.memory_gb_per_s *= 16.0;
        let truth = Costs::for_cluster(&machine, &[]);
        let sample = |op: &Op| Sample::of(Key::Op(*op), Taken::Training, vec![truth.op(op).time.0]);
        let profile = Profile {
            cores: 2,
            concurrent_ranks: 2,
            ..Profile::of(&cluster.gpu.name, measured.iter().map(sample).collect())
        };
        machine.gpu.memory_gb_per_s = cluster.gpu.memory_gb_per_s * faster;
        let expected = Costs::for_cluster(&machine, &[]);
        let costs = Costs::for_cluster(cluster, &[profile]);
        for op in &asked {
            let found = costs.op(op);
            check_within(
                &format!("{op:?}"),
                found.time.0,
                expected.op(op).time.0,
                5.0,
            );
            assert_eq!(found.source, Source::Extrapolated);
        }
    };
    check(&local(2), 16.0);
    check(&presets::cluster("dgx-h100").expect("a preset"), 1.0);
}

/// Shapes that were not measured follow those that were: memory is 16 times as fast beside the cores as is assumed.
#[test]
fn golden_measurements_say_how_fast_memory_is_beside_cores() {
    let mut machine = local(2);
    machine.gpu.memory_gb_per_s *= 16.0;
    let truth = Costs::for_cluster(&machine, &[]);
    let assumed = Costs::for_cluster(&local(2), &[]);
    let gemm = |[n, k]: [u64; 2]| Op::Gemm {
        m: 1024,
        n,
        k,
        pass: Pass::Forward,
        dtype: Dtype::F32,
    };
    let sample = |sizes| {
        let seconds = 2.0 * truth.op(&gemm(sizes)).time.0;
        Sample::of(Key::Op(gemm(sizes)), Taken::Training, vec![seconds; 3])
    };
    let measured = [[16, 128], [64, 128], [128, 128], [256, 128]];
    let profile = Profile {
        cores: 2,
        concurrent_ranks: 2,
        ..Profile::of("cpu", measured.map(sample).into())
    };
    let costs = Costs::for_cluster(&local(2), &[profile]);
    let mut off = 0.0_f64;
    for sizes in [[128, 64], [16, 64], [64, 64], [512, 512]] {
        let time = |costs: &Costs| costs.op(&gemm(sizes)).time.0;
        check_within(&format!("{sizes:?}"), time(&costs), 2.0 * time(&truth), 3.0);
        off = off.max(time(&assumed) / time(&truth));
    }
    assert!(off > 2.0, "the assumed machine is another: {off}");
}

/// A message has a fixed part: of sizes between two that are far apart it has all of it, and beyond them no more.
#[test]
fn golden_messages_have_a_fixed_part() {
    let messages = |bytes, seconds: f64| {
        let key = Key::Collective(collective(CollectiveKind::AllReduce, bytes, 2, 2));
        Sample::of(key, Taken::Training, vec![seconds; 3])
    };
    let costs = |samples: Vec<Sample>| {
        let profile = Profile {
            cores: 2,
            concurrent_ranks: 2,
            ..Profile::of("cpu", samples)
        };
        Costs::for_cluster(&local(2), &[profile])
    };
    let time = |costs: &Costs, bytes| {
        let message = collective(CollectiveKind::AllReduce, bytes, 2, 2);
        costs.collective(&message).time.0
    };
    let far = costs(vec![messages(1000, 20e-6), messages(1_001_000, 120e-6)]);
    check_within("between", time(&far, 501_000), 70e-6, 0.1);
    check_within("beyond", time(&far, 2_002_000), 240e-6, 0.1);
    // Of sizes too small to tell, a byte takes what ships.
    let small = costs(vec![messages(32, 10e-6), messages(544, 10.2e-6)]);
    let shipped = Costs::for_cluster(&local(2), &[]);
    let grows = time(&shipped, 64_000) - time(&shipped, 544);
    check_within("small", time(&small, 64_000), 10e-6 + grows, 3.0);
}

#[test]
fn law_a_profiled_machine_is_monotone_too() {
    let seed = 0x5eed_0004;
    println!("seed {seed:#x}");
    let mut sampler = Sampler(seed);
    // Noisy measurements at odd sizes.
    let mut profile = measured_here(&[], &[], 4, 1.0);
    let shipped = Costs::for_cluster(&local(4), &[]);
    for _ in 0..150 {
        let op = sampled_op(&mut sampler);
        let noise = 0.2 + sampler.size(100.0) as f64 / 50.0;
        let seconds = vec![shipped.op(&op).time.0 * noise];
        let sample = Sample::of(Key::Op(op), Taken::Cold, seconds);
        profile.samples.push(sample);
    }
    let costs = Costs::for_cluster(&local(4), &[profile]);
    for _ in 0..4000 {
        let op = sampled_op(&mut sampler);
        let by = sampler.size(10_000.0);
        for axis in 0..4 {
            // Rows are spread over groups, and two lengths of attention fold into one size.
            let Some(more) = grown(&op, axis, by) else {
                continue;
            };
            let (less_s, more_s) = (costs.op(&op).time.0, costs.op(&more).time.0);
            assert!(
                more_s >= less_s * (1.0 - 1e-9),
                "{op:?} {less_s:.4e} {more:?} {more_s:.4e}"
            );
        }
    }
}

#[test]
fn profiles_of_another_device_or_concurrency() {
    let op = gemm([512; 3], Pass::Forward, Dtype::F32);
    let profile = measured_here(&[op], &[], 4, 0.5);
    let measured = match profile.samples[0].key {
        Key::Op(_) => profile.samples[0].median().0,
        Key::Collective(_) | Key::Host(_) => unreachable!("one op was sampled"),
    };
    let h100 = presets::cluster("dgx-h100").expect("a preset");
    let costs = Costs::for_cluster(&h100, std::slice::from_ref(&profile));
    assert!(costs.notes()[0].contains("`cpu`"), "{:?}", costs.notes());
    assert_eq!(costs.op(&op), Costs::for_cluster(&h100, &[]).op(&op));
    // Four ranks had half a core each; two have a core each and take half the time.
    let costs = Costs::for_cluster(&local(2), std::slice::from_ref(&profile));
    assert!(costs.notes()[0].contains("4 ranks") && costs.notes()[0].contains("0.50"));
    check_within("scaled", costs.op(&op).time.0, measured / 2.0, 1e-6);
    assert_eq!(costs.op(&op).source, Source::Interpolated);
    // A profile of the right concurrency makes the others unnecessary.
    let right = measured_here(&[op], &[], 2, 0.3);
    let costs = Costs::for_cluster(&local(2), &[profile, right.clone()]);
    assert!(costs.notes().is_empty());
    check_within(
        "own",
        costs.op(&op).time.0,
        right.samples[0].median().0,
        1e-6,
    );
}

/// A profile of one H200, its ops `slower` than shipped.
fn measured_on_a_gpu(ops: &[Op], slower: f64) -> Profile {
    let costs = Costs::for_cluster(&h200(), &[]);
    let sample = |key, seconds: f64| Sample::of(key, Taken::Cold, vec![seconds]);
    let times = ops.iter().map(|op| (op, slower * costs.op(op).time.0));
    Profile {
        device: presets::gpu_name("NVIDIA H200"),
        device_name: Some("NVIDIA H200".to_owned()),
        overhead: Some(crate::directory::OverheadBytes {
            context: Bytes(500 << 20),
            workspaces: Bytes(32 << 20),
            other: Bytes(10 << 20),
            others: None,
        }),
        samples: times.map(|(op, time)| sample(Key::Op(*op), time)).collect(),
        ..measured_here(&[], &[], 1, 1.0)
    }
}

fn h200() -> Cluster {
    presets::cluster("dgx-h200").expect("a preset")
}

#[test]
fn golden_a_profile_of_a_gpu_prices_its_ops_and_its_host() {
    let ops: Vec<Op> = every_op(1024);
    let shipped = Costs::for_cluster(&h200(), &[]);
    assert_eq!(shipped.host(), &HostTimes::default());
    let mut profile = measured_on_a_gpu(&ops, 1.7);
    for (cost, seconds) in [(HostCost::Launch, 4e-6), (HostCost::Read, 11e-6)] {
        let seconds = vec![seconds, 2.0 * seconds, 0.5 * seconds];
        let sample = Sample::of(Key::Host(cost), Taken::Repeated, seconds);
        profile.samples.push(sample);
    }
    let costs = Costs::for_cluster(&h200(), &[profile]);
    for op in &ops {
        assert_eq!(costs.op(op).source, Source::Measured, "{op:?}");
        let (own, other) = (costs.op(op).time.0, shipped.op(op).time.0);
        check_within(&format!("{op:?}"), own, 1.7 * other, 0.1);
    }
    let host = costs.host();
    assert_eq!(host.launch, Some(Seconds(4e-6)));
    assert_eq!(host.read, Some(Seconds(11e-6)));
    assert_eq!(host.overhead, Some(Bytes(542 << 20)));
}

#[test]
fn collectives_of_ranks_on_one_device_price_nothing() {
    let message = collective(CollectiveKind::AllReduce, 1 << 20, 8, 8);
    let mut profile = measured_on_a_gpu(&[], 1.0);
    profile.shared_device = true;
    let sample = Sample::of(Key::Collective(message), Taken::Repeated, vec![1e-9]);
    profile.samples.push(sample);
    let shipped = Costs::for_cluster(&h200(), &[]);
    let costs = Costs::for_cluster(&h200(), &[profile]);
    assert_eq!(costs.collective(&message), shipped.collective(&message));
    assert!(
        costs.notes()[0].contains("one device"),
        "{:?}",
        costs.notes()
    );
}

#[test]
fn golden_training_speaks_first_and_by_its_mean() {
    let op = every_op(1024)[0];
    let profile = |samples| Profile {
        cores: 2,
        concurrent_ranks: 4,
        ..Profile::of("cpu", samples)
    };
    let timed = |taken, seconds: &[f64]| Sample::of(Key::Op(op), taken, seconds.to_vec());
    let time = |profiles: &[Profile]| Costs::for_cluster(&local(4), profiles).op(&op).time.0;
    let cold = profile(vec![timed(Taken::Cold, &[1.0, 2.0, 9.0])]);
    let trained = profile(vec![timed(Taken::Training, &[3.0, 3.0, 6.0])]);
    check_within("the median", time(std::slice::from_ref(&cold)), 2.0, 1e-9);
    check_within("the mean", time(&[cold, trained]), 4.0, 1e-9);
}

/// A rare slow timing of a size that data decides says nothing of larger ones, of which there are more: both have their
/// mean.
#[test]
fn golden_of_sizes_that_take_less_than_smaller_ones_the_mean_counts() {
    let bytes = |bytes| collective(CollectiveKind::AllToAll, bytes, 4, 4);
    let rows = |rows| Op::Permute {
        rows,
        dim: 64,
        pass: Pass::Forward,
        dtype: Dtype::F32,
    };
    let timed = |key, seconds: f64, times| Sample::of(key, Taken::Training, vec![seconds; times]);
    let sizes = [(100, 12.0, 1), (1000, 6.0, 5), (4000, 8.0, 1)];
    let samples = sizes.iter().flat_map(|&(size, seconds, times)| {
        [Key::Collective(bytes(size)), Key::Op(rows(size))]
            .map(|key| timed(key, 1e-3 * seconds, times))
    });
    let profile = Profile {
        cores: 2,
        concurrent_ranks: 4,
        ..Profile::of("cpu", samples.collect())
    };
    let costs = Costs::for_cluster(&local(4), &[profile]);
    for (size, expected) in [(100, 7e-3), (1000, 7e-3), (4000, 8e-3)] {
        let exchanged = costs.collective(&bytes(size));
        check_within("an exchange", exchanged.time.0, expected, 1e-6);
        assert_eq!(exchanged.source, Source::Measured);
        check_within("an op", costs.op(&rows(size)).time.0, expected, 1e-6);
    }
}

#[test]
fn golden_products_keep_their_own_and_training_comes_before_what_ran_alone() {
    let product = |m| {
        Key::Op(Op::Gemm {
            m,
            n: 64,
            k: 64,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        })
    };
    let bytes = |bytes| collective(CollectiveKind::AllToAll, bytes, 4, 4);
    let samples = vec![
        Sample::of(product(1000), Taken::Training, vec![2e-3]),
        Sample::of(product(1100), Taken::Training, vec![1e-3; 9]),
        Sample::of(Key::Collective(bytes(1000)), Taken::Training, vec![3e-3]),
        Sample::of(Key::Collective(bytes(1100)), Taken::Cold, vec![1e-3; 50]),
    ];
    let profile = Profile {
        cores: 2,
        concurrent_ranks: 4,
        ..Profile::of("cpu", samples)
    };
    let costs = Costs::for_cluster(&local(4), &[profile]);
    let Key::Op(larger) = product(1000) else {
        unreachable!("a product is an op");
    };
    check_within("a product", costs.op(&larger).time.0, 2e-3, 1e-6);
    let exchanged = costs.collective(&bytes(1000)).time.0;
    check_within("an exchange", exchanged, 3e-3, 0.02);
}

fn shipped_turns() -> f64 {
    Costs::for_cluster(&local(4), &[]).turns()
}

#[test]
fn golden_waiting_is_a_share_of_the_time_apart_by_kind_and_group() {
    let of = |kind, ranks| collective(kind, 1 << 20, ranks, ranks);
    let (gather, exchange) = (CollectiveKind::AllGather, CollectiveKind::AllToAll);
    let waited = |message, waits: &[[f64; 2]]| Sample {
        waits: waits.iter().copied().map(Wait::once).collect(),
        ..Sample::of(Key::Collective(message), Taken::Training, vec![1e-3])
    };
    let samples = vec![
        waited(of(gather, 2), &[[1.0, 10.0], [0.0, 10.0]]),
        waited(of(exchange, 4), &[[3.0, 10.0]]),
    ];
    let profile = Profile {
        cores: 2,
        concurrent_ranks: 4,
        ..Profile::of("cpu", samples)
    };
    let costs = Costs::for_cluster(&local(4), &[profile]);
    let share = |kind, ranks| {
        let waiting = costs.waiting(&of(kind, ranks));
        assert_eq!(waiting.each_s, 0.0, "one kind of meeting has no line");
        waiting.share
    };
    assert!((share(gather, 2) - 0.05).abs() < 1e-12);
    assert!((share(exchange, 4) - 0.3).abs() < 1e-12);
    // Others have the nearest group's; exchanges of tokens are apart from them, but where loads are known.
    assert_eq!(share(CollectiveKind::ReduceScatter, 4), share(gather, 2));
    assert_eq!(share(exchange, 2), share(exchange, 4));
    let known = costs.clone().with_known_loads();
    assert_eq!(known.waiting(&of(exchange, 4)).share, share(gather, 2));
    assert_eq!((costs.turns(), shipped_turns()), (2.0, 1.0));
    assert_eq!(share(exchange, 1), 0.0);
    let shipped = Costs::for_cluster(&local(4), &[]);
    assert_eq!(shipped.waiting(&of(gather, 2)), Waiting::default());
}

/// Who meets again at once waits longer than a share of next to nothing: one line through all groups has a part for each
/// meeting. What a group waited in all stays what it was.
#[test]
fn golden_a_meeting_by_itself_takes_time_too() {
    let of = |kind, ranks| collective(kind, 1 << 20, ranks, ranks);
    let (gather, reduce) = (CollectiveKind::AllGather, CollectiveKind::AllReduce);
    let waited = |message, apart_s: f64, times: u64| {
        let each_s = 50e-6 + 0.04 * apart_s;
        let wait = Wait {
            waited_s: times as f64 * each_s,
            apart_s: times as f64 * apart_s,
            times,
        };
        Sample {
            waits: vec![wait],
            ..Sample::of(Key::Collective(message), Taken::Training, vec![1e-3])
        }
    };
    let costs = |samples| {
        let profile = Profile {
            cores: 2,
            concurrent_ranks: 4,
            ..Profile::of("cpu", samples)
        };
        Costs::for_cluster(&local(4), &[profile])
    };
    let found = costs(vec![
        waited(of(gather, 2), 6e-3, 100),
        waited(of(reduce, 2), 1e-3, 50),
        waited(of(reduce, 4), 10e-6, 80),
    ]);
    for ranks in [2, 4] {
        let waiting = found.waiting(&of(gather, ranks));
        check_within("each", waiting.each_s, 50e-6, 0.1);
        check_within("share", waiting.share, 0.04, 0.1);
        check_within("after", waiting.after(1e-3), 90e-6, 0.1);
    }
    // The group of four waited twice as long as its line has it.
    let mut samples = vec![
        waited(of(gather, 2), 6e-3, 100),
        waited(of(reduce, 4), 10e-6, 80),
    ];
    samples[1].waits[0].waited_s *= 2.0;
    let all = samples[1].waits[0];
    let found = costs(samples.clone()).waiting(&of(reduce, 4));
    let again = found.each_s * all.times as f64 + found.share * all.apart_s;
    check_within("in all", again, all.waited_s, 0.1);
    // Of waits that nobody counted only the share is known.
    samples[1].waits[0].times = 0;
    let found = costs(samples).waiting(&of(reduce, 4));
    assert_eq!(
        (found.each_s, found.share),
        (0.0, all.waited_s / all.apart_s)
    );
}

#[test]
fn law_a_calibration_multiplies_prices_and_says_nothing_of_single_ops() {
    use crate::calibration::{Calibration, Factors, Fitted};

    let shipped = Costs::for_cluster(&h200(), &[]);
    let of = |factor| Fitted {
        factor,
        sigma: 0.1,
        prior_sigma: 0.2,
    };
    let calibration = Calibration {
        stack: "megatron".to_owned(),
        compute: of(1.25),
        network: of(1.5),
        host: of(2.0),
        covariance: [[0.01, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]],
        residual_sigma: 0.04,
        steps: Vec::new(),
    };
    let profile = Profile {
        calibration: Some(calibration.clone()),
        ..Profile::of("h200", Vec::new())
    };
    let costs = Costs::for_cluster(&h200(), std::slice::from_ref(&profile));
    for op in every_op(1024) {
        let (own, alone) = (costs.op(&op), shipped.op(&op));
        assert_eq!(own.time.0, 1.25 * alone.time.0, "{op:?}");
        assert_eq!(own.source, alone.source);
    }
    let message = collective(CollectiveKind::AllReduce, 1 << 20, 8, 8);
    let (own, alone) = (costs.collective(&message), shipped.collective(&message));
    assert_eq!(own.time.0, 1.5 * alone.time.0);
    assert_eq!(costs.host().factor, Some(2.0));
    assert_eq!((costs.samples_spread(), costs.notes().len()), (None, 0));
    // Other factors replace these.
    let plain = costs.times(Factors::default());
    assert_eq!(plain.collective(&message), alone);
    assert_eq!(plain.calibration(), None);
    // The last of two is used, which is said; one of another device is not.
    let mut last = profile.clone();
    last.calibration = Some(Calibration {
        network: of(3.0),
        ..calibration
    });
    let other = Profile {
        device: "h100".to_owned(),
        ..profile.clone()
    };
    let costs = Costs::for_cluster(&h200(), &[profile, last, other]);
    assert_eq!(costs.collective(&message).time.0, 3.0 * alone.time.0);
    assert!(
        costs.notes().iter().any(|note| note.contains("last one")),
        "{:?}",
        costs.notes()
    );
}
