//! Whole training over NCCL: the same losses and weights as one rank has, and as rank threads have.

use std::path::Path;
use std::sync::Mutex;

use moefold_planner::choice::{Overlap, ScheduleName};
use moefold_planner::model::{Ffn, hf};
use moefold_planner::plan::Plan;
use moefold_profiles::Precision;

use super::*;
use crate::control::{Control, Watch};
use crate::data::{Order, Samples, TokenStream};
use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::model::global_tensors;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::options::{Init, TrainOptions};
use crate::testing;
use crate::train::{self, Data, Trained};
use crate::unpriced::planned;

const STEPS: u64 = 2;

/// Degrees of a layout: TP, PP, EP, ETP, and ranks in all.
struct Ranks {
    tp: u32,
    pp: u32,
    ep: u32,
    etp: u32,
    all: u32,
}

/// The plan of the fixtures with short sequences, four a step and one a microbatch.
fn plan(ranks: &Ranks, precision: Precision) -> Plan {
    let mut plan = testing::plan();
    plan.planned.precision = precision;
    (plan.request.batch.seq_len, plan.request.batch.global_batch) = (12, 4);
    let mut layout = plan.planned.layout;
    (layout.tp, layout.ep, layout.etp) = (ranks.tp, ranks.ep, ranks.etp);
    layout.pp = ranks.pp;
    layout.dp = ranks.all / ranks.tp / ranks.pp;
    layout.microbatches = 4 / layout.dp;
    plan.planned.pipeline = planned(&plan.model, layout).pipeline;
    plan.planned.layout = layout;
    // Reductions and gathers in several buckets, beside compute.
    plan.planned.overlap = Some(Overlap {
        grad_reduce: true,
        param_gather: true,
        p2p: true,
        ..Overlap::default()
    });
    plan.planned.bucket_elements = Some(20_000);
    plan
}

fn options(device: DeviceSpec) -> TrainOptions {
    TrainOptions {
        steps: STEPS,
        lr: LearningRate::constant(2e-3),
        adam: AdamOptions::default(),
        balancing: Balancing {
            aux_loss_coef: 0.01,
            ..Balancing::default()
        },
        mtp_loss_scaling_factor: crate::options::MTP_LOSS_SCALING_FACTOR,
        seed: 1,
        init: Init::Random,
        device,
        traced_steps: 1..2,
        save: None,
    }
}

fn run(world: &World, plan: &Plan, device: DeviceSpec) -> Result<Option<Trained>, Error> {
    let tokens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral/tokens");
    let stream = TokenStream::indexed(&tokens).expect("tokens");
    let (batch, vocabulary) = (&plan.request.batch, plan.model.vocab_size);
    let samples =
        Samples::new(stream, batch.seq_len, vocabulary, Order::TokenStream).expect("enough");
    let data = Data {
        training: &samples,
        validation: None,
    };
    train::run_in(
        world,
        &plan.planned,
        &plan.model,
        batch,
        &options(device),
        data,
        true,
        Watch {
            on_step: &|_| Ok(()),
            on_note: &|_| (),
            control: &Control::default(),
        },
    )
}

/// Trains with a process a rank, here threads with a GPU of their own; what rank 0 brings back.
fn over_nccl(mock: Mock, plan: &Plan, ranks: u32, device: DeviceSpec) -> Trained {
    let trained = Mutex::new(None);
    thread::scope(|scope| {
        for launched in world_of(ranks) {
            let trained = &trained;
            scope.spawn(move || {
                let nccl = mock.nccl(&[]).expect("the mock has them all");
                let world = World::process(launched).deadline(PATIENCE).nccl(nccl);
                if let Some(result) = run(&world, plan, device).expect("trains") {
                    *trained.lock().expect("one rank") = Some(result);
                }
            });
        }
    });
    let trained = trained.into_inner().expect("one rank");
    trained.expect("rank 0 brings it back")
}

fn on_threads(plan: &Plan, ranks: u32, device: DeviceSpec) -> Trained {
    let trained = run(&World::threads(ranks), plan, device).expect("trains");
    trained.expect("rank 0 is here")
}

fn weights(trained: &Trained, plan: &Plan) -> Vec<Vec<f32>> {
    let tensors = global_tensors(&plan.model).into_iter();
    tensors.map(|tensor| trained.weights.get(&tensor)).collect()
}

/// What one rank computes on the CPU, but for the order of sums.
fn check_close(found: &Trained, expected: &Trained, plan: &Plan) {
    let relative = |found: f64, expected: f64| (found / expected - 1.0).abs();
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let loss = relative(found.loss, expected.loss);
        let norm = relative(found.grad_norm, expected.grad_norm);
        assert!(loss < 1e-4 && norm < 1e-3, "{found:?} and {expected:?}");
    }
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    };
    let all = [found, expected].map(|trained| weights(trained, plan));
    for (found, expected) in all[0].iter().zip(&all[1]) {
        let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let whole = norm(&mut expected.iter().copied());
        assert!(error < 1e-4 * whole, "{error} of {whole}");
    }
}

/// What rank threads compute, to the bit: the mock sums in rank order too, and a sum of two is rounded
/// once wherever it is made.
fn check_same(found: &Trained, threads: &Trained, plan: &Plan) {
    let losses = |run: &Trained| -> Vec<f64> { run.steps.iter().map(|s| s.loss).collect() };
    assert_eq!(losses(found), losses(threads));
    assert!(weights(found, plan) == weights(threads, plan), "the same");
    let [found, threads] = [found, threads].map(|run| &run.summary);
    assert_eq!(found.host_reads, threads.host_reads, "no host waits more");
    assert_eq!(found.peak_by_rank.len(), threads.peak_by_rank.len());
}

/// All kinds of groups at once, experts with replicas, and a pipeline.
const LAYOUTS: [Ranks; 3] = [
    Ranks {
        tp: 2,
        pp: 1,
        ep: 2,
        etp: 2,
        all: 4,
    },
    Ranks {
        tp: 1,
        pp: 1,
        ep: 2,
        etp: 1,
        all: 4,
    },
    Ranks {
        tp: 1,
        pp: 2,
        ep: 2,
        etp: 1,
        all: 4,
    },
];

const ONE: Ranks = Ranks {
    tp: 1,
    pp: 1,
    ep: 1,
    etp: 1,
    all: 1,
};

const CPU: DeviceSpec = DeviceSpec::Cpu {
    threads_per_rank: Some(1),
};

fn emulated(dtype: Dtype) -> DeviceSpec {
    DeviceSpec::Emulated {
        architecture: Architecture::SM80,
        dtype,
        seed: 1,
        reserve: None,
    }
}

#[test]
fn differential_training_over_nccl_is_that_of_one_rank_and_of_rank_threads() {
    let device = emulated(Dtype::F32);
    if !testing::is_at_hand(&device) {
        return;
    }
    let Some(mock) = mock() else { return };
    let alone = on_threads(&plan(&ONE, Precision::Fp32), 1, CPU);
    for ranks in LAYOUTS {
        let plan = plan(&ranks, Precision::Fp32);
        let found = over_nccl(mock, &plan, ranks.all, device);
        check_close(&found, &alone, &plan);
        if ranks.pp > 1 {
            let mut divided = plan.clone();
            divided.planned.pipeline.schedule = ScheduleName::ZbH1;
            let found = over_nccl(mock, &divided, ranks.all, device);
            check_close(&found, &alone, &divided);
        }
        check_same(&found, &on_threads(&plan, ranks.all, device), &plan);
    }
    mock.assert_clean();
}

#[test]
fn differential_training_in_bf16_over_nccl_is_that_of_rank_threads() {
    let device = emulated(Dtype::Bf16);
    if !testing::is_at_hand(&device) {
        return;
    }
    let Some(mock) = mock() else { return };
    let ranks = &LAYOUTS[0];
    let plan = plan(ranks, Precision::Bf16);
    let found = over_nccl(mock, &plan, ranks.all, device);
    check_same(&found, &on_threads(&plan, ranks.all, device), &plan);
    mock.assert_clean();
}

/// The shared expert runs while NCCL sends tokens: what it gives is what it gives alone.
#[test]
fn differential_the_shared_expert_beside_dispatch_over_nccl_is_that_of_rank_threads() {
    let device = emulated(Dtype::F32);
    if !testing::is_at_hand(&device) {
        return;
    }
    let Some(mock) = mock() else { return };
    let ranks = &LAYOUTS[1];
    let mut apart = plan(ranks, Precision::Fp32);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen2_moe");
    apart.model = hf::read(&folder).expect("a fixture");
    apart.model.vocab_size = 128;
    apart.planned.pipeline = planned(&apart.model, apart.planned.layout).pipeline;
    let mut beside = apart.clone();
    let apart_of = apart.planned.overlap.expect("buckets");
    beside.planned.overlap = Some(Overlap {
        shared_expert: true,
        ..apart_of
    });
    let found = over_nccl(mock, &beside, ranks.all, device);
    check_same(&found, &on_threads(&apart, ranks.all, device), &apart);
    mock.assert_clean();
}

/// Two passes take turns while NCCL sends tokens of both: what they give is what they give one after the other.
#[test]
fn differential_combined_passes_over_nccl_are_those_of_rank_threads() {
    let device = emulated(Dtype::F32);
    if !testing::is_at_hand(&device) {
        return;
    }
    let Some(mock) = mock() else { return };
    let combined = |plan: &Plan, schedule: ScheduleName| {
        let mut plan = plan.clone();
        plan.planned.pipeline.schedule = schedule;
        plan.planned.overlap = Some(Overlap {
            expert_alltoall: true,
            delay_wgrad: true,
            ..plan.planned.overlap.expect("buckets")
        });
        plan
    };
    let ranks = &LAYOUTS[0];
    let apart = plan(ranks, Precision::Fp32);
    let beside = combined(&apart, ScheduleName::Combined);
    let found = over_nccl(mock, &beside, ranks.all, device);
    check_same(&found, &on_threads(&apart, ranks.all, device), &apart);
    // As many microbatches as a pipeline that comes back runs some beside others of.
    let of_six = |ranks: &Ranks| {
        let mut plan = plan(ranks, Precision::Fp32);
        plan.request.batch.global_batch = 6;
        plan.planned.layout.microbatches = 6 / plan.planned.layout.dp;
        plan
    };
    let ranks = &LAYOUTS[2];
    let mut turns = of_six(ranks);
    turns.planned.layout.vpp = 2;
    turns.planned.pipeline = planned(&turns.model, turns.planned.layout).pipeline;
    let turns = combined(&turns, ScheduleName::DualpipeVCombined);
    let found = over_nccl(mock, &turns, ranks.all, device);
    check_close(&found, &on_threads(&of_six(&ONE), 1, CPU), &turns);
    mock.assert_clean();
}

/// Where every token goes to every expert, all ranks send each other as much, and know it.
#[test]
fn even_routes_go_by_nccls_own_all_to_all() {
    let device = emulated(Dtype::F32);
    if !testing::is_at_hand(&device) {
        return;
    }
    let Some(mock) = mock() else { return };
    let ranks = &LAYOUTS[0];
    let mut plan = plan(ranks, Precision::Fp32);
    plan.request.batch.seq_len = 2;
    for layer in &mut plan.model.layers {
        let Some(Ffn::Moe(moe)) = &mut layer.ffn else {
            panic!("every layer has experts");
        };
        moe.topk = moe.experts;
    }
    let found = over_nccl(mock, &plan, ranks.all, device);
    check_same(&found, &on_threads(&plan, ranks.all, device), &plan);
    let said = mock.said();
    let is_called = |call: &str| said.lines().any(|line| line == call);
    assert!(is_called("ncclAlltoAll") && !is_called("ncclSend"));
    mock.assert_clean();
}
