//! Whole runs: what they report, and in which precision.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use moefold_kernels::Dtype;
use moefold_planner::plan::Plan;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Precision, TensorClass};

use super::*;
use crate::data::{Order, TokenStream};
use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::testing;

const STEPS: u64 = 4;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral")
}

fn samples(plan: &Plan) -> Samples {
    let stream = TokenStream::indexed(&fixture().join("tokens")).expect("tokens");
    let seq_len = plan.request.batch.seq_len;
    Samples::new(stream, seq_len, plan.model.vocab_size, Order::TokenStream).expect("enough")
}

fn options() -> TrainOptions {
    TrainOptions {
        steps: STEPS,
        lr: LearningRate::constant(2e-3),
        adam: AdamOptions::default(),
        balancing: Balancing::default(),
        mtp_loss_scaling_factor: crate::options::MTP_LOSS_SCALING_FACTOR,
        seed: 1,
        init: Init::HuggingFace(fixture()),
        device: DeviceSpec::Cpu {
            threads_per_rank: Some(1),
        },
        traced_steps: 1..2,
        save: None,
    }
}

/// The plan of the fixtures on four ranks: TP 2 and DP 2 for attention, EP 4 for experts.
fn folded() -> Plan {
    let mut plan = testing::plan();
    let layout = &mut plan.planned.layout;
    (layout.tp, layout.dp, layout.ep, layout.mbs) = (2, 2, 4, 2);
    layout.microbatches = 1;
    plan
}

fn train(plan: &Plan) -> (Trained, Vec<StepRecord>) {
    let seen = Mutex::new(Vec::new());
    let on_step = |record: &StepRecord| seen.lock().expect("one rank").push(record.clone());
    let (model, batch) = (&plan.model, &plan.request.batch);
    let trained = run(
        &plan.planned,
        model,
        batch,
        &options(),
        &samples(plan),
        &on_step,
    );
    (
        trained.expect("trains"),
        seen.into_inner().expect("one rank"),
    )
}

#[test]
fn a_run_reports_its_steps_its_time_and_its_weights() {
    let plan = folded();
    let (trained, seen) = train(&plan);
    assert_eq!(seen, trained.steps);
    assert_eq!(trained.steps.len() as u64, STEPS);
    assert_eq!(trained.summary.final_loss, trained.steps[3].loss);
    assert_eq!(trained.summary.peak_by_rank.len(), 4);

    let ranks: BTreeSet<u32> = trained.trace.spans.iter().map(|span| span.rank).collect();
    assert_eq!(ranks, BTreeSet::from([0, 1, 2, 3]));
    assert!(trained.trace.spans.iter().all(|span| span.step == Some(1)));
    let stems: BTreeSet<&str> = trained
        .trace
        .spans
        .iter()
        .map(|s| s.name.as_str())
        .collect();
    for stem in [
        "gemm",
        "grouped_gemm",
        "attention",
        "all_to_all",
        "reduce_scatter",
        "adamw",
    ] {
        assert!(stems.contains(stem), "{stems:?} lacks {stem}");
    }
    assert_eq!(trained.weights.tensors(), global_tensors(&plan.model));

    let (single, _) = train(&testing::plan());
    for (found, expected) in trained.steps.iter().zip(&single.steps) {
        let error = (found.loss / expected.loss - 1.0).abs();
        assert!(error < 1e-5, "{} and {}", found.loss, expected.loss);
    }
    for tensor in global_tensors(&plan.model) {
        // Every rank put the part that it updates.
        let (found, expected) = (trained.weights.get(&tensor), single.weights.get(&tensor));
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        let error = squares(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
        let whole = squares(&mut expected.iter().copied());
        assert!(error < 1e-4 * whole, "{}: {error} of {whole}", tensor.name);
    }
}

#[test]
fn a_bf16_run_says_where_the_host_waits_and_keeps_what_weights_are_rounded_from() {
    let mut plan = testing::plan();
    plan.request.batch.global_batch = 2;
    plan.planned.layout.microbatches = 2;
    let trained = |precision, device: DeviceSpec| {
        let mut planned = plan.planned.clone();
        planned.precision = precision;
        let options = TrainOptions {
            steps: 1,
            traced_steps: 0..1,
            device,
            ..options()
        };
        let batch = &plan.request.batch;
        run(
            &planned,
            &plan.model,
            batch,
            &options,
            &samples(&plan),
            &|_| (),
        )
        .expect("trains")
    };
    let emulated = DeviceSpec::Emulated {
        architecture: moefold_kernels::cuda::Architecture::SM80,
        dtype: Dtype::Bf16,
        seed: 1,
        reserve: Some(Bytes(6 << 20)),
    };
    if !testing::is_at_hand(&emulated) {
        return;
    }
    let found = trained(Precision::Bf16, emulated);
    let expected = trained(Precision::Fp32, options().device);
    let (loss, cpu_loss) = (found.steps[0].loss, expected.steps[0].loss);
    assert!(
        (loss / cpu_loss - 1.0).abs() < 1e-2,
        "{loss} and {cpu_loss}"
    );

    let summary = &found.summary;
    let peak = &summary.peak_by_rank[0];
    assert_eq!((peak.reserved, peak.growths), (Bytes(6 << 20), 0));
    let alive = peak.bytes.total() - peak.bytes[TensorClass::Overhead];
    assert!(
        alive <= peak.reached && peak.reached <= peak.reserved,
        "{peak:?}"
    );
    assert!((summary.time_s.total().0 / summary.step_s - 1.0).abs() < 1e-6);
    // Both at the end.
    let reads = [("counts_to_host", 1.0), ("sums_to_host", 1.0)];
    for (name, times) in reads {
        assert_eq!(summary.host_reads[name], times);
        let spans = found.trace.spans.iter().filter(|span| span.name == name);
        assert_eq!(spans.count() as f64, times);
    }
    assert_eq!(summary.host_reads.len(), reads.len());
    assert!(expected.summary.host_reads.is_empty());

    let weights = |trained: &Trained| -> Vec<f32> {
        let tensors = trained.weights.tensors().into_iter();
        tensors
            .flat_map(|tensor| trained.weights.get(&tensor))
            .collect()
    };
    let (weights, cpu_weights) = (weights(&found), weights(&expected));
    // The first step of Adam moves every weight by about the learning rate, less than half the
    // distance of bf16 numbers around 1; so weights kept in bf16 would show.
    let rounded = |w: &&f32| w.to_bits().trailing_zeros() >= 16;
    let num_rounded = weights.iter().filter(rounded).count();
    assert!(
        num_rounded < weights.len() / 100,
        "{num_rounded} of {}",
        weights.len()
    );
    let same = |(a, b): &(&f32, &f32)| (**a - **b).abs() < 1e-5;
    let num_same = weights.iter().zip(&cpu_weights).filter(same).count();
    assert!(
        num_same > weights.len() * 8 / 10,
        "{num_same} of {}",
        weights.len()
    );
}

#[test]
fn an_edited_layout_is_proven_again() {
    let mut plan = folded();
    plan.planned.layout.ep = 3;
    let (model, batch) = (&plan.model, &plan.request.batch);
    let refused = run(
        &plan.planned,
        model,
        batch,
        &options(),
        &samples(&plan),
        &|_| (),
    );
    let error = refused.expect_err("8 experts over 3 ranks");
    assert!(error.is_bad_request(), "{error}");
    assert!(error.to_string().contains("not legal"), "{error}");
}
