//! A traced step is the step: the account of memory, byte for byte and class by class, the ops by their
//! keys and the collectives, on the CPU over many layouts, and on emulated GPUs in f32 and bf16. Where
//! routing decides how many rows a rank has, the trace is given those of the step itself; where it decides
//! nothing, the peak is the plan's.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use moefold_executor::data::Packing;
use moefold_executor::error::Error;
use moefold_executor::moe::balance::Balancing;
use moefold_executor::moe::dispatch::Dispatching;
use moefold_executor::options::TrainOptions;
use moefold_executor::rank::Context;
use moefold_executor::record::Detail;
use moefold_executor::record::Recorder;
use moefold_executor::step::HostTokens;
use moefold_executor::trace::{self, Assumed, Tape, Traced};
use moefold_executor::train::{self, Trainer};
use moefold_executor::transport::World;
use moefold_kernels::{Device, Memory, TensorClass};
use moefold_planner::choice::{
    Capacity, CpComm, Dispatcher, DropPolicy, HostShare, Masters, Module, Offload, Optimizer,
    Overlap, Recompute, ScheduleName, StackName,
};
use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::mesh;
use moefold_planner::model::{Ffn, Mixer, QkNorm, RouterGroups, Score};
use moefold_planner::options::{PipelineLayout, Routing, SearchOptions};
use moefold_planner::plan::{PlannedLayout, PlannedRouting, Predicted};
use moefold_planner::search;
use moefold_planner::walk::Event;
use moefold_profiles::directory::Key;
use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{Cluster, Costs, Precision, presets};
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, cut, degrees, piped};
use crate::context;
use crate::cuda::{self, Emulated};
use crate::layouts::{DEEP, DRAWN, legal, pipelines};
use crate::overlap::BOTH;
use crate::{offload, packing, recompute};

/// Those of which every layout is walked; of the others ([`DRAWN`]) some.
const FIXTURES: [&str; 5] = [
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_raw",
    "qwen3_tied",
    "deepseek_v3_halves",
];

/// What a step is measured on.
pub(crate) struct Place<'a> {
    /// A rank's device.
    pub(crate) open: &'a (dyn Fn(u32) -> Device + Sync),
    pub(crate) precision: Precision,
}

pub(crate) const CPU: Place<'static> = Place {
    open: &|_| Device::cpu(1),
    precision: Precision::Fp32,
};

/// None of the losses of routers, one of them, or all.
pub(crate) fn losses(number: usize) -> Balancing {
    let on = |only: usize| 0.01 * f64::from(u8::from([only, 4].contains(&(number % 5))));
    Balancing {
        aux_loss_coef: on(1),
        seq_aux_loss_coef: on(2),
        global_aux_loss_coef: on(3),
        z_loss_coef: on(3),
        bias_update_rate: on(2),
    }
}

/// One of the ways of tokens to their experts.
fn dispatching(number: usize) -> Dispatching {
    let within = |factor, drop_policy, pad| {
        Some(Capacity {
            factor,
            drop_policy,
            pad,
        })
    };
    let (dispatcher, capacity) = match number % 6 {
        0 => (Dispatcher::Alltoall, None),
        1 => (Dispatcher::Allgather, None),
        2 => (Dispatcher::Alltoall, within(0.7, DropPolicy::Probs, true)),
        3 => (Dispatcher::Alltoall, within(0.7, DropPolicy::Probs, false)),
        4 => (
            Dispatcher::Alltoall,
            within(1.2, DropPolicy::Position, false),
        ),
        _ => (
            Dispatcher::Allgather,
            within(0.6, DropPolicy::Position, false),
        ),
    };
    Dispatching {
        dispatcher,
        capacity,
    }
}

/// A device without memory that stands for this one.
fn without_memory(device: &Device) -> Device {
    match device.properties() {
        None => Device::meta_cpu(),
        Some(properties) => Device::meta_cuda(properties.clone(), device.dtype()),
    }
}

/// Rows that each member of the rank's group sends to each expert, of every router of a step in order.
fn routed(trainer: &Trainer, microbatches: &[HostTokens]) -> Result<Vec<Vec<Vec<usize>>>, Error> {
    let cx = &trainer.cx;
    let mut routers = Vec::new();
    for stats in trainer.stepper().routing(cx, microbatches)? {
        let all = cx.tp_ep.exchange_counts(&stats.load.read())?;
        let rows = |counts: std::rc::Rc<[u64]>| counts.iter().map(|&rows| rows as usize).collect();
        routers.push(all.into_iter().map(rows).collect());
    }
    Ok(routers)
}

/// How often each key was run.
type Keys = BTreeMap<Key, usize>;

fn count(keys: impl Iterator<Item = Key>) -> Keys {
    let mut counts = Keys::new();
    for key in keys {
        *counts.entry(key).or_default() += 1;
    }
    counts
}

fn key(event: &Event) -> Option<Key> {
    match event {
        Event::Op { op, .. } => Some(Key::Op(*op)),
        Event::Started { collective, .. } => Some(Key::Collective(*collective)),
        _ => None,
    }
}

/// Runs some steps on one rank and compares each with its trace.
fn compare(
    fixture: &Fixture,
    layout: &Layout,
    trainer: &mut Trainer,
    steps: u64,
    options: &TrainOptions,
) -> Result<(), Error> {
    let batch = fixture.batch();
    let (device, rank) = (trainer.cx.device.clone(), trainer.cx.rank);
    let what = format!("{} {layout:?} rank {rank}", fixture.name);
    let between = device.memory();
    for step in 0..steps {
        let what = format!("{what} step {step}");
        let tokens = train::microbatches(&fixture.samples, &trainer.cx, &batch, step)?;
        let assumed = Assumed::Recorded(Rc::new(routed(trainer, &tokens)?));
        let meta = without_memory(&device);
        let tape = Tape::default();
        let size = |kind| match kind {
            Some(kind) => mesh::group_of(layout, kind, rank).len() as u32,
            None => layout.gpus(),
        };
        let cx = trace::rank_on(meta.clone(), layout, rank, assumed, &size, &tape);
        let [before, traced] = trace::step(
            cx,
            &fixture.model,
            &fixture.stages(layout),
            &batch,
            &fixture.savers,
            options.balancing,
            fixture.samples.packing(),
            &tape,
        )?;
        assert!(!before.is_empty(), "{what}: nothing is set up");

        // What the search for its routing ran is no part of it.
        trainer.cx.recorder.take_spans();
        device.reset_peak();
        trainer.cx.recorder.begin_step(step as u32, Detail::Spans);
        trainer.step(&tokens, options.lr.at(step))?;
        let time = trainer.cx.recorder.end_step();
        let (real, predicted) = (device.memory(), meta.memory());
        for class in TensorClass::ALL {
            let of = |memory: &Memory| [memory.peak(class), memory.at_peak(class)];
            assert_eq!(of(&real), of(&predicted), "{what}: {class:?}");
        }
        assert_eq!(real.peak_total(), predicted.peak_total(), "{what}");
        let on_host = [&real, &predicted].map(Memory::peak_on_host);
        assert_eq!(on_host[0], on_host[1], "{what}: on the host");
        assert_eq!(
            real.live_total(),
            between.live_total(),
            "{what}: afterwards"
        );

        let mut reads = BTreeMap::new();
        for event in &traced {
            if let Event::HostRead { name, reads: times } = event {
                *reads.entry(*name).or_default() += *times as f64;
            }
        }
        assert_eq!(time.host_reads, reads, "{what}: waits of the host");
        let spans = trainer.cx.recorder.take_spans();
        let ran = count(spans.iter().filter_map(|span| span.key));
        assert_eq!(ran, count(traced.iter().filter_map(key)), "{what}: keys");
    }
    Ok(())
}

pub(crate) fn check(
    fixture: &Fixture,
    place: &Place<'_>,
    degrees: &Degrees,
    steps: u64,
    balancing: Balancing,
) {
    let layout = fixture.layout(degrees);
    let (mut options, weights) = (fixture.options(), fixture.weights());
    options.balancing = balancing;
    World::threads(layout.gpus())
        .run(|rank| {
            let recorder = Recorder::new(rank.rank(), Instant::now());
            let cx = Context::join(rank, &layout, (place.open)(rank.rank()), recorder);
            let mut trainer = fixture.trainer(cx, &options, &weights)?;
            compare(fixture, &layout, &mut trainer, steps, &options)
        })
        .unwrap_or_else(|error| panic!("{} {degrees:?}: {error}", fixture.name));
}

#[test]
fn law_a_traced_step_is_the_step() {
    for name in FIXTURES {
        let mut fixture = Fixture::load(name).with_batch(8);
        for gpus in [1, 2, 4, 8] {
            for (i, degrees) in legal(&fixture, gpus).iter().enumerate() {
                // Each with other losses, and tokens that go another way.
                fixture.savers.dispatching = dispatching(i);
                check(&fixture, &CPU, degrees, 2, losses(i));
            }
        }
    }
}

/// One of the schedules of some degrees.
fn schedule(degrees: &Degrees, random: &mut ChaCha8Rng) -> ScheduleName {
    let all = ScheduleName::all_of(degrees.pp, degrees.vpp);
    // Combined passes are a choice of their own.
    let all: Vec<ScheduleName> = all.filter(|name| !name.combines()).collect();
    all[random.random_range(0..all.len())]
}

/// One in `of` of all layouts with a pipeline.
fn check_pipelines(of: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (name, layers) in DEEP {
        let mut fixture = Fixture::load(name).with_layers(layers).with_batch(8);
        let layouts = (2..=8).flat_map(|gpus| pipelines(&fixture, gpus));
        for degrees in layouts.collect::<Vec<_>>() {
            let balancing = losses(random.random_range(0..5));
            fixture = recomputing(fixture, &mut random);
            if random.random_range(0..of) > 0 {
                continue;
            }
            fixture.savers.schedule = Some(schedule(&degrees, &mut random));
            let one = || check(&fixture, &CPU, &degrees, 2, balancing);
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
            let what = (cuda::seed(), degrees, &fixture.savers);
            assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
        }
    }
}

#[test]
fn law_a_traced_step_is_the_step_in_other_families() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in DRAWN {
        let mut fixture = Fixture::load(name).with_batch(8);
        for gpus in [1, 2, 4, 8] {
            let all = legal(&fixture, gpus);
            for i in 0..2 {
                fixture = recomputing(fixture, &mut random);
                let degrees = all[random.random_range(0..all.len())];
                check(
                    &fixture,
                    &CPU,
                    &degrees,
                    2,
                    losses(random.random_range(0..=i * 4)),
                );
            }
        }
    }
}

#[test]
fn law_a_traced_step_is_the_step_of_every_pipeline_rank() {
    check_pipelines(24);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are thousands of layouts"]
fn law_a_traced_step_is_the_step_in_every_pipeline() {
    check_pipelines(1);
}

/// The shared expert beside dispatch, under sets that do not recompute it alone.
#[test]
fn law_a_traced_step_is_the_step_of_shared_experts_beside_dispatch() {
    for (name, set) in [
        ("qwen2_moe", Recompute::None),
        ("glm4_moe", Recompute::of(vec![Module::Moe])),
        ("deepseek_v3", Recompute::Full),
    ] {
        let fixture = Fixture::load(name).with_layers(4).with_batch(8);
        let mut fixture = fixture.recomputing(set);
        fixture.savers.overlap.shared_expert = true;
        for degrees in [
            degrees(4, 2, 2, 2, 2),
            piped(degrees(4, 1, 2, 1, 2), 2, 1),
            cut(degrees(4, 2, 4, 1, 2), 2),
        ] {
            check(&fixture, &CPU, &degrees, 2, losses(4));
        }
    }
}

/// Documents apart, some of what is theirs or all.
#[test]
fn law_a_traced_step_is_the_step_of_packed_samples() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in ["qwen3_moe", "deepseek_v3_mtp"] {
        for _ in 0..3 {
            let fixture = Fixture::load(name).with_layers(4).with_batch(8);
            let fixture = packing::drawn(recomputing(fixture, &mut random), &mut random);
            let gpus = [1, 2, 4][random.random_range(0..3)];
            let mut all = legal(&fixture, gpus);
            all.extend(
                (gpus > 1)
                    .then(|| pipelines(&fixture, gpus))
                    .into_iter()
                    .flatten(),
            );
            let degrees = all[random.random_range(0..all.len())];
            let one = || check(&fixture, &CPU, &degrees, 2, losses(4));
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
            let what = (cuda::seed(), name, degrees, fixture.samples.packing());
            assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
        }
    }
}

#[test]
fn law_a_traced_step_is_that_of_packed_samples_on_cuda() {
    let fixture = packing::apart(Fixture::load("qwen3_moe_raw").with_batch(2));
    check_emulated(&fixture, cuda::BF16, &degrees(1, 1, 1, 1, 1), losses(0));
}

/// Windows, sinks and documents of sequences that are cut, and positions that begin again where keys travel.
#[test]
fn law_a_traced_step_is_that_of_cut_windows_and_documents() {
    let mut fixture = packing::apart(Fixture::load("gpt_oss").with_layers(2).with_batch(6));
    let mut positions = packing::apart(Fixture::load("qwen3_moe").with_batch(6));
    let packing = Packing {
        reset_attention_mask: false,
        ..packing::ALL
    };
    positions = packing::packed(positions, packing);
    fixture.savers.cp_comm = CpComm::A2a;
    for fixture in [fixture, positions] {
        check(
            &fixture,
            &CPU,
            &cut(degrees(4, 2, 2, 1, 1), 2),
            2,
            losses(4),
        );
    }
    let mut all = Fixture::load("gpt_oss").with_batch(8);
    for layer in &mut all.model.layers {
        if let Some(Ffn::Moe(moe)) = &mut layer.ffn {
            moe.topk = moe.experts;
        }
    }
    all.savers.cp_comm = CpComm::A2a;
    check_plan(
        &all,
        &presets::local(4),
        &CPU,
        &cut(degrees(4, 1, 2, 1, 2), 2),
    );
}

/// Every way to reach the keys of other ranks, in layouts drawn from the seed with their recompute sets.
#[test]
fn law_a_traced_step_is_the_step_of_ranks_that_cut_sequences() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for name in context::KINDS {
        let mut fixture = Fixture::load(name).with_layers(2).with_batch(6);
        for cp_comm in crate::common::WAYS {
            for degrees in context::drawn(&fixture, cp_comm, Some(2), &mut random) {
                fixture = recomputing(fixture, &mut random);
                fixture.savers.cp_comm = cp_comm;
                fixture.savers.schedule = Some(schedule(&degrees, &mut random));
                let balancing = losses(random.random_range(0..5));
                let one = || check(&fixture, &CPU, &degrees, 2, balancing);
                let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
                let what = (cuda::seed(), name, degrees, &fixture.savers);
                assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
            }
        }
    }
}

/// A model of up to four layers of either kind, in any order, with widths that put the peak of a step
/// in one place or another.
fn drawn(random: &mut ChaCha8Rng) -> Fixture {
    let fixture = Fixture::load("qwen3_moe").with_batch(4);
    let mut model = fixture.model.clone();
    let layers = model.layers.clone();
    let mut one_of = |all: &[u64]| all[random.random_range(0..all.len())];
    model.hidden = one_of(&[16, 32, 80]);
    model.tied_embeddings = one_of(&[0, 1]) == 1;
    let (head_dim, kv_heads) = (one_of(&[4, 8, 12]), one_of(&[1, 2, 4]));
    let qk_norm = one_of(&[0, 1]) == 1;
    let (experts, width) = (one_of(&[4, 8]), one_of(&[8, 16, 64]));
    let (topk, dense) = (one_of(&[1, 2, 4]), one_of(&[16, 48, 160]));
    let sigmoid = one_of(&[0, 1]) == 1;
    model.layers.clear();
    for _ in 0..one_of(&[1, 2, 4]) {
        let mut layer = layers[one_of(&[0, 1]) as usize].clone();
        if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
            (gqa.heads, gqa.kv_heads) = (8, kv_heads);
            (gqa.head_dim, gqa.rotary_dim) = (head_dim, head_dim);
            if !qk_norm {
                gqa.qk_norm = QkNorm::None;
            }
        }
        match &mut layer.ffn {
            Some(Ffn::Dense(mlp)) => mlp.width = dense,
            Some(Ffn::Moe(moe)) => {
                (moe.experts, moe.topk, moe.expert.width) = (experts, topk, width);
                if sigmoid {
                    moe.router.score = Score::Sigmoid;
                    moe.router.correction_bias = true;
                    moe.router.groups = Some(RouterGroups {
                        groups: 2,
                        topk: 2,
                        scored_by: 2,
                    });
                }
            }
            None => unreachable!("every layer has a feed-forward block"),
        }
        model.layers.push(layer);
    }
    fixture.with_model(model)
}

/// A fixture with recompute sets of its layers, moments of either type, tokens that go any way, some tensors that
/// rest on the host, and gradients in one bucket or several.
pub(crate) fn recomputing(fixture: Fixture, random: &mut ChaCha8Rng) -> Fixture {
    let plan = recompute::drawn(&fixture, random);
    let optimizers = [Optimizer::Adam, Optimizer::AdamBf16Moments];
    let mut fixture = fixture.recomputing(plan);
    fixture.savers.optimizer = optimizers[random.random_range(0..2)];
    fixture.savers.optimizer_offload = HostShare([0.0, 0.0, 0.3, 1.0][random.random_range(0..4)]);
    fixture.savers.dispatching = dispatching(random.random_range(0..12));
    fixture.savers.offload = offload::drawn(&fixture, random);
    let in_buckets = random.random_range(0..2) == 0;
    fixture.savers.overlap = if in_buckets { BOTH } else { Overlap::default() };
    let least = [1, 1000, 10_000, 1_000_000][random.random_range(0..4)];
    fixture.savers.bucket_elements = in_buckets.then_some(least);
    fixture
}

#[test]
fn law_a_traced_step_is_the_step_wherever_the_peak_is() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for draw in 0..24 {
        let fixture = drawn(&mut random);
        let fixture = recomputing(fixture, &mut random);
        for gpus in [1, 2, 4, 8] {
            let all = legal(&fixture, gpus);
            let degrees = all[random.random_range(0..all.len())];
            let what = || (cuda::seed(), draw, &fixture.savers, &fixture.model.layers);
            let checked =
                std::panic::catch_unwind(|| check(&fixture, &CPU, &degrees, 2, losses(draw)));
            assert!(
                checked.is_ok(),
                "MOEFOLD_SEED and what was drawn: {:?}",
                what()
            );
        }
    }
}

/// Attention of either kind, every way; the kernels of routing are run, and no others.
#[test]
fn law_a_traced_step_is_that_of_ranks_that_cut_sequences_on_cuda() {
    for (name, on) in [("qwen3_moe_raw", cuda::BF16), ("deepseek_v3", cuda::HOPPER)] {
        if !on.is_there() {
            return;
        }
        let mut fixture = Fixture::load(name).with_batch(2);
        for cp_comm in crate::common::WAYS {
            fixture.savers.cp_comm = cp_comm;
            let place = Place {
                open: &|rank| on.open_routing(rank),
                precision: precision(on),
            };
            check(
                &fixture,
                &place,
                &cut(degrees(4, 2, 2, 1, 2), 2),
                1,
                losses(4),
            );
        }
    }
}

pub(crate) fn check_emulated(
    fixture: &Fixture,
    on: Emulated,
    degrees: &Degrees,
    balancing: Balancing,
) {
    if !on.is_there() {
        return;
    }
    let place = Place {
        open: &|_| on.open(),
        precision: precision(on),
    };
    check(fixture, &place, degrees, 2, balancing);
}

fn precision(on: Emulated) -> Precision {
    if on == cuda::F32 {
        Precision::Fp32
    } else {
        Precision::Bf16
    }
}

#[test]
fn law_a_traced_step_is_the_step_on_cuda() {
    let (mixtral, qwen) = (Fixture::load("mixtral"), Fixture::load("qwen3_moe"));
    let one = degrees(1, 1, 1, 1, 1);
    let (mixtral, qwen) = (mixtral.with_batch(2), qwen.with_batch(2));
    check_emulated(&qwen, cuda::F32, &one, losses(1));
    let mut dropping = Fixture::load("qwen3_moe_raw").with_batch(2);
    for number in [2, 4] {
        dropping.savers.dispatching = dispatching(number);
        check_emulated(&dropping, cuda::F32, &one, losses(0));
    }
    check_emulated(&mixtral, cuda::BF16, &one, losses(0));
    check_emulated(&qwen, cuda::HOPPER, &one, losses(0));
}

#[test]
fn law_a_traced_step_is_that_of_rank_threads_on_cuda() {
    let fixture = Fixture::load("qwen3_moe_raw").with_batch(2);
    check_emulated(&fixture, cuda::F32, &degrees(2, 2, 1, 2, 1), losses(0));
    let mut other = Fixture::load("qwen3_moe_raw").with_batch(2);
    for number in [1, 2, 5] {
        other.savers.dispatching = dispatching(number);
        check_emulated(&other, cuda::BF16, &degrees(2, 2, 2, 1, 1), losses(0));
    }
    check_emulated(&fixture, cuda::BF16, &degrees(2, 1, 2, 1, 1), losses(1));
    check_emulated(&fixture, cuda::HOPPER, &degrees(2, 2, 2, 1, 2), losses(0));
}

#[test]
fn law_a_traced_step_is_that_of_pipeline_ranks_on_cuda() {
    let fixture = Fixture::load("qwen3_moe_raw").with_layers(4).with_batch(2);
    let two = degrees(2, 1, 1, 1, 1);
    check_emulated(&fixture, cuda::F32, &piped(two, 2, 1), losses(0));
    check_emulated(&fixture, cuda::BF16, &piped(two, 2, 2), losses(4));
    let mut tied = Fixture::load("qwen3_tied").with_batch(2);
    check_emulated(&tied, cuda::HOPPER, &piped(two, 2, 1), losses(0));
    tied.savers.schedule = Some(ScheduleName::ZbH1);
    check_emulated(&tied, cuda::HOPPER, &piped(two, 2, 1), losses(0));
    tied.savers.schedule = Some(ScheduleName::VHalf);
    check_emulated(&tied, cuda::HOPPER, &piped(two, 2, 2), losses(0));
}

/// A fixture's model with one layer of each kind.
fn least(name: &'static str) -> Fixture {
    let fixture = Fixture::load(name);
    let mut model = fixture.model.clone();
    model.layers.clear();
    for layer in &fixture.model.layers {
        if !model.layers.contains(layer) {
            model.layers.push(layer.clone());
        }
    }
    fixture.with_model(model)
}

/// One in `of` of all layouts of up to eight ranks of some fixtures on every kind of GPU, drawn from the
/// seed with the number of microbatches, one or two: more repeat them. Data decides how many rows experts
/// have, so the kernels of routing are run, and no others.
fn check_layouts_on_cuda(names: &[&'static str], of: usize) {
    let kinds = [cuda::F32, cuda::BF16, cuda::HOPPER];
    if !kinds.iter().all(|on| on.is_there()) {
        return;
    }
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for &name in names {
        let layouts = (1..=8).flat_map(|gpus| legal(&least(name).with_batch(8), gpus));
        let all = layouts.flat_map(|degrees| kinds.map(|on| (degrees, on)));
        for (degrees, on) in all {
            let samples = u64::from(degrees.gpus / degrees.tp * degrees.mbs);
            let microbatches = random.random_range(1..=(8 / samples).min(2));
            let balancing = losses(random.random_range(0..5));
            let fixture = least(name).with_batch(samples * microbatches);
            let mut fixture = recomputing(fixture, &mut random);
            if random.random_range(0..of) > 0 {
                continue;
            }
            if on != cuda::F32 {
                fixture.savers.masters = *Masters::ALL.choose(&mut random).expect("some");
            }
            let place = Place {
                open: &|rank| on.open_routing(rank),
                precision: precision(on),
            };
            let one = || check(&fixture, &place, &degrees, 1, balancing);
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
            let what = || (cuda::seed(), name, on, degrees, microbatches, balancing);
            let set = &fixture.savers;
            assert!(
                checked.is_ok(),
                "MOEFOLD_SEED and where: {:?} {set:?}",
                what()
            );
        }
    }
}

#[test]
fn law_a_traced_step_is_the_step_in_layouts_drawn_on_cuda() {
    check_layouts_on_cuda(&FIXTURES, 16);
    check_layouts_on_cuda(&DRAWN, 48);
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: an emulated kernel is slow"]
fn law_a_traced_step_is_the_step_in_every_layout_on_cuda() {
    check_layouts_on_cuda(&FIXTURES, 1);
    check_layouts_on_cuda(&DRAWN, 1);
}

/// Trains under a layout for two steps and compares the fullest rank's peak with the plan's, class by
/// class.
pub(crate) fn check_plan(
    fixture: &Fixture,
    cluster: &Cluster,
    place: &Place<'_>,
    degrees: &Degrees,
) {
    let planned = predicted(fixture, cluster, place.precision, degrees);
    let (_, peaks) = fixture.train_on(
        || (place.open)(0),
        degrees,
        2,
        &fixture.options(),
        |trainer| (trainer.cx.at.pp as usize, trainer.cx.device.memory()),
    );
    let gib = &planned.memory_gib;
    let what = format!("{} {degrees:?} {:?}", fixture.name, fixture.savers);
    for (pp, gib) in planned.memory_gib_by_pp_rank.iter().enumerate() {
        let own = peaks.iter().filter(|(of, _)| *of == pp);
        let most = own.map(|(_, memory)| memory.peak_total()).max();
        let tensors = gib - planned.memory_gib[TensorClass::Overhead];
        assert_eq!(most, Some(bytes(tensors)), "{what}: pipeline rank {pp}");
    }
    let on_host = peaks.iter().map(|(_, memory)| memory.peak_on_host()).max();
    let host_gib = planned.host_gib.unwrap_or(0.0);
    assert_eq!(on_host, Some(bytes(host_gib)), "{what}: on the host");
    let measured = peaks.into_iter().map(|(_, memory)| memory);
    // The first of those that have as much.
    let measured = measured.rev().max_by_key(Memory::peak_total);
    let measured = measured.expect("a rank");
    let overhead = gib[TensorClass::Overhead];
    for (class, &gib) in gib
        .iter()
        .filter(|(class, _)| *class != TensorClass::Overhead)
    {
        assert_eq!(measured.at_peak(class), bytes(gib), "{what}: {class:?}");
    }
    let tensors = planned.peak_gib - overhead;
    assert_eq!(measured.peak_total(), bytes(tensors), "{what}");
}

/// Trains under a layout, and plans it again with the routing of that run.
fn check_routed(fixture: &Fixture, degrees: &Degrees) {
    const STEPS: u64 = 3;
    let layout = fixture.layout(degrees);
    let mut options = fixture.options();
    options.steps = STEPS;
    let cluster = presets::local(degrees.gpus);
    let before = planned(fixture, &cluster, Precision::Fp32, degrees, None);
    let batch = fixture.batch();
    let plan = &before;
    let trained = train::run(
        plan,
        &fixture.model,
        &batch,
        &options,
        &fixture.samples,
        &|_| (),
    );
    let trained = trained.unwrap_or_else(|error| panic!("{layout:?}: {error}"));

    let dir = tempfile::tempdir().expect("a temporary folder");
    let line = |step| serde_json::to_string(step).expect("serializes");
    let lines: Vec<String> = trained.steps.iter().map(line).collect();
    std::fs::write(dir.path().join("steps.jsonl"), lines.join("\n")).expect("writes");
    let source = dir.path().display().to_string();
    let routing = Routing::read(&source).expect("a run");
    let after = planned(fixture, &cluster, Precision::Fp32, degrees, Some(routing)).predicted;

    let peaks = trained.summary.peak_by_rank.iter();
    let measured = peaks.map(|peak| peak.bytes.total()).max().expect("ranks");
    let (found, expected) = (bytes(after.peak_gib).0 as f64, measured.0 as f64);
    let off = found / expected - 1.0;
    let what = format!("{} {degrees:?}", fixture.name);
    assert!(off.abs() < 0.03, "{what}: {found} of {expected}, {off:+.4}");
    let Some(PlannedRouting::Recorded { balanced, .. }) = after.routing else {
        panic!("{what}: it was routed");
    };
    assert_eq!(balanced.peak_gib, before.predicted.peak_gib, "{what}");
}

#[test]
fn law_a_plan_with_the_routing_of_a_run_says_its_peak() {
    for name in ["mixtral", "qwen3_moe", "qwen3_moe_raw"] {
        let fixture = Fixture::load(name).with_batch(8);
        for gpus in [1, 2, 4] {
            for degrees in legal(&fixture, gpus) {
                check_routed(&fixture, &degrees);
            }
        }
        let deep = fixture.with_layers(4);
        let four = degrees(4, 1, 2, 1, 2);
        check_routed(&deep, &piped(four, 2, 1));
        check_routed(&deep, &piped(degrees(4, 2, 2, 1, 1), 2, 2));
    }
}

/// Bytes of a plan, which are whole.
fn bytes(gib: f64) -> Bytes {
    Bytes((gib * GIB as f64) as u64)
}

/// The plan of exactly this layout.
fn predicted(
    fixture: &Fixture,
    cluster: &Cluster,
    precision: Precision,
    degrees: &Degrees,
) -> Predicted {
    planned(fixture, cluster, precision, degrees, None).predicted
}

/// The same whole, where tokens are routed as said.
fn planned(
    fixture: &Fixture,
    cluster: &Cluster,
    precision: Precision,
    degrees: &Degrees,
    routing: Option<Routing>,
) -> PlannedLayout {
    let Degrees {
        tp,
        cp,
        pp,
        vpp,
        ep,
        etp,
        mbs,
        ..
    } = degrees;
    let mut options = SearchOptions {
        precision,
        routing,
        recompute: Some(fixture.savers.recompute.clone()),
        offload: Some(fixture.savers.offload),
        overlap: Some(fixture.savers.overlap),
        bucket_elements: fixture.savers.bucket_elements,
        zero: fixture.savers.zero,
        order: Some(fixture.rank_order),
        cp_comm: Some(fixture.savers.cp_comm),
        optimizer: fixture.savers.optimizer,
        masters: fixture.savers.masters,
        optimizer_offload: fixture.savers.optimizer_offload,
        schedule: Some((fixture.savers.schedule).unwrap_or(ScheduleName::of(*pp, *vpp))),
        dispatcher: Some(fixture.savers.dispatching.dispatcher),
        // Of a model without experts a capacity is refused.
        capacity: (fixture.model.moe()).and(fixture.savers.dispatching.capacity),
        ..SearchOptions::new(fixture.batch(), StackName::Moefold)
    };
    let pins = format!("tp={tp},cp={cp},pp={pp},vpp={vpp},ep={ep},etp={etp},mbs={mbs}");
    options.pins = pins.parse().expect("degrees");
    if *pp > 1 {
        let stages = fixture.stages(&fixture.layout(degrees));
        options.stages = Some(PipelineLayout::of(&fixture.model, stages));
    }
    let costs = Costs::for_cluster(cluster, &[]);
    let (model, gpus) = (&fixture.model, degrees.gpus);
    let runtime = Traced::new(model, cluster);
    let found = search::plan(model, cluster, gpus, &options, &costs, &runtime);
    found.expect("it fits").plans.swap_remove(0)
}

/// Fixtures in which routing decides nothing: without experts, or with all of them chosen.
pub(crate) fn unvarying() -> [Fixture; 6] {
    let all = |name| {
        let mut fixture = Fixture::load(name);
        let model = &mut fixture.model;
        for layer in model.layers.iter_mut().chain(&mut model.mtp) {
            if let Some(Ffn::Moe(moe)) = &mut layer.ffn {
                moe.topk = moe.experts;
                moe.router.groups = None;
            }
        }
        fixture
    };
    let fixtures = [
        Fixture::load("qwen3_tied"),
        all("mixtral"),
        all("qwen3_moe"),
        all("deepseek_v3"),
        all("deepseek_v3_mtp"),
        Fixture::load("deepseek_v3_halves"),
    ];
    fixtures.map(|fixture| fixture.with_batch(8))
}

#[test]
fn law_a_plan_says_the_peak_of_a_run() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for mut fixture in unvarying() {
        for gpus in [1, 2, 4] {
            let cluster = presets::local(gpus);
            for degrees in legal(&fixture, gpus) {
                check_plan(&fixture, &cluster, &CPU, &degrees);
                fixture = recomputing(fixture, &mut random);
            }
        }
        fixture = fixture.recomputing(Recompute::None);
        fixture.savers.offload = Offload::NONE;
        for set in recompute::sets(&fixture) {
            fixture = fixture.recomputing(set);
            check_plan(&fixture, &presets::local(1), &CPU, &degrees(1, 1, 1, 1, 2));
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_ranks_that_cut_sequences() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for fixture in unvarying() {
        let mut fixture = fixture.with_layers(2);
        for cp_comm in crate::common::WAYS {
            for degrees in context::drawn(&fixture, cp_comm, Some(2), &mut random) {
                fixture = recomputing(fixture, &mut random);
                fixture.savers.cp_comm = cp_comm;
                fixture.savers.schedule = Some(schedule(&degrees, &mut random));
                check_plan(&fixture, &presets::local(degrees.gpus), &CPU, &degrees);
            }
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_every_pipeline_rank() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (fixture, layers) in unvarying().into_iter().zip([5, 4, 6, 4, 4, 4]) {
        let mut fixture = fixture.with_layers(layers);
        for gpus in 2..=4 {
            let cluster = presets::local(gpus);
            for degrees in pipelines(&fixture, gpus) {
                fixture = recomputing(fixture, &mut random);
                fixture.savers.schedule = Some(schedule(&degrees, &mut random));
                if random.random_range(0..4) == 0 {
                    check_plan(&fixture, &cluster, &CPU, &degrees);
                }
            }
        }
    }
}

/// Both ends are on one rank: there a tied embedding is one matrix, and the others have none.
#[test]
fn law_a_plan_says_the_peak_of_tied_pipelines_that_come_back() {
    // Which no number of ranks divides.
    let mut fixture = Fixture::load("qwen3_tied").with_layers(6).with_batch(7);
    for name in [
        ScheduleName::ZbV,
        ScheduleName::VHalf,
        ScheduleName::VMin,
        ScheduleName::DualpipeV,
    ] {
        fixture.savers.schedule = Some(name);
        for pp in [2, 3] {
            let degrees = piped(degrees(pp, 1, 1, 1, 1), pp, 2);
            check_plan(&fixture, &presets::local(pp), &CPU, &degrees);
        }
    }
}

/// Stages are neighbours in rank numbers, and replicas apart.
#[test]
fn law_a_plan_says_the_peak_of_pipelines_numbered_before_replicas() {
    for fixture in unvarying().into_iter().take(2) {
        let mut fixture = fixture.with_layers(4).with_batch(8);
        fixture.rank_order = moefold_planner::layout::Order::DP_LAST;
        for degrees in [
            piped(degrees(4, 1, 1, 1, 2), 2, 1),
            piped(degrees(8, 1, 1, 1, 1), 4, 1),
        ] {
            check_plan(&fixture, &presets::local(degrees.gpus), &CPU, &degrees);
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_a_run_on_cuda() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for (on, cluster) in [(cuda::BF16, "dgx-a100"), (cuda::HOPPER, "dgx-h100")] {
        if !on.is_there() {
            return;
        }
        let place = Place {
            open: &|_| on.open(),
            precision: precision(on),
        };
        let cluster = presets::cluster(cluster).expect("a preset");
        let [dense, experts, ..] = unvarying().map(|fixture| fixture.with_batch(1));
        for fixture in [dense, experts] {
            let mut fixture = recomputing(fixture, &mut random);
            fixture.savers.masters = *Masters::ALL.choose(&mut random).expect("some");
            check_plan(&fixture, &cluster, &place, &degrees(1, 1, 1, 1, 1));
        }
    }
}
