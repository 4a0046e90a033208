//! Going on equals never having stopped, under the same layout to the bit.

use moefold_kernels::Dtype;
use moefold_kernels::cuda::Architecture;
use moefold_profiles::run::StepRecord;

use super::*;
use crate::testing;

/// All of a step but what a clock or an account of memory says.
fn figures(step: &StepRecord) -> (u64, [u64; 4], Vec<Vec<u64>>) {
    let numbers = [step.loss, step.aux_loss, step.grad_norm, step.lr].map(f64::to_bits);
    (step.step, numbers, step.expert_load.clone())
}

/// Trains without and with a stop in the middle; the two must agree to the bit, in what they report
/// and in what they save.
fn check_stop(bench: &Bench, degrees: [u32; 5]) {
    check_taken_up(bench, bench, degrees);
}

/// The same where `by` goes on.
fn check_taken_up(bench: &Bench, by: &Bench, degrees: [u32; 5]) {
    let (whole, rest) = (folder(), folder());
    let (steps, half) = (bench.options.steps, bench.options.steps / 2);
    let options = bench.saving(half, whole.path());
    let expected = bench.train(degrees, &options).expect("trains");
    let dir = step_dir(whole.path(), half);
    let found = by.resume(degrees, &dir, &by.saving(steps, rest.path()));
    assert_eq!(found.summary.steps, steps - half);
    let figures = |trained: &Trained| -> Vec<_> { trained.steps.iter().map(figures).collect() };
    assert_eq!(
        figures(&found),
        figures(&expected)[half as usize..],
        "{degrees:?}"
    );
    let bits = |trained| bench.weights(trained).into_iter().map(f32::to_bits);
    assert!(bits(&found).eq(bits(&expected)), "{degrees:?}: weights");
    let [saved, expected] =
        [&rest, &whole].map(|run| Index::load(&step_dir(run.path(), steps)).expect("an index"));
    assert_eq!(saved, expected, "{degrees:?}: files with the same hashes");
}

#[test]
fn oracle_a_resumed_run_equals_the_uninterrupted_one_to_the_bit() {
    let mut bench = Bench::new("mixtral", 8);
    bench.options.balancing.aux_loss_coef = 0.01;
    // Attention and experts alone, together, folded; with several microbatches and without.
    for degrees in [
        [1, 1, 1, 1, 2],
        [2, 1, 2, 1, 4],
        [4, 2, 4, 1, 2],
        [4, 1, 2, 2, 1],
        [8, 4, 2, 2, 4],
    ] {
        check_stop(&bench, degrees);
    }
    // Key/value heads that TP ranks share, dense layers among those of experts; tied embeddings of a
    // vocabulary that does not divide.
    check_stop(&Bench::new("qwen3_moe", 4), [4, 4, 2, 1, 2]);
    check_stop(&Bench::new("qwen3_tied", 4), [4, 4, 1, 1, 2]);
    // Pipelines, with several stages a rank, and with the embedding at both ends.
    check_stop(&Bench::new("qwen3_moe", 4).piped([3, 1]), [6, 2, 2, 1, 1]);
    let deep = Bench::new("mixtral", 4).with_layers(4);
    check_stop(&deep.piped([2, 2]), [4, 1, 2, 1, 1]);
    let deep = Bench::new("qwen3_tied", 4).with_layers(4).piped([2, 2]);
    check_stop(&deep.under(ScheduleName::VMin), [2, 1, 1, 1, 1]);
    let tied = Bench::new("qwen3_tied", 4).piped([2, 1]);
    check_stop(&tied, [4, 2, 1, 1, 2]);
    // Sequences cut over ranks.
    check_stop(&Bench::new("deepseek_v3", 4).cut(2), [4, 2, 4, 1, 2]);
}

/// Buckets are shards of their own, and of other shards a checkpoint knows nothing.
#[test]
fn oracle_another_division_into_buckets_takes_a_run_up() {
    const LEAST: [([u32; 5], Option<u64>); 3] = [
        ([4, 1, 2, 1, 1], Some(3000)),
        ([2, 2, 1, 1, 1], None),
        ([4, 4, 2, 1, 2], Some(1)),
    ];
    let degrees = [4, 2, 2, 1, 1];
    let bench = |least| {
        let mut bench = Bench::new("qwen3_moe", 4).bucketed(least);
        // Norms are summed bucket by bucket.
        bench.options.adam.clip = None;
        bench
    };
    let (whole, half) = (folder(), 4);
    let expected = bench(None).train(degrees, &bench(None).saving(half, whole.path()));
    let expected = expected.expect("trains");
    let dir = step_dir(whole.path(), half);
    for least in [None, Some(1), Some(5000)] {
        let bench = bench(least);
        let found = bench.resume(degrees, &dir, &bench.options);
        let losses =
            |trained: &Trained| -> Vec<f64> { trained.steps.iter().map(|s| s.loss).collect() };
        assert_eq!(
            losses(&found),
            losses(&expected)[half as usize..],
            "{least:?}"
        );
        let bits = |trained| bench.weights(trained).into_iter().map(f32::to_bits);
        assert!(bits(&found).eq(bits(&expected)), "{least:?}: weights");
        check_stop(&bench, degrees);
    }
    // In every layout, whoever saved.
    check_each(Bench::new("qwen3_moe", 4), LEAST, Bench::bucketed);
}

/// Neither are weights that rest divided: a run goes on from one where they rest whole, to the bit, and the other way
/// round.
#[test]
fn oracle_ranks_that_divide_weights_take_a_run_up() {
    const LAYOUTS: [([u32; 5], Zero); 4] = [
        ([4, 2, 2, 1, 2], Zero::Fsdp),
        ([4, 1, 2, 1, 1], Zero::States),
        ([2, 1, 1, 1, 1], Zero::Fsdp),
        ([4, 4, 2, 1, 4], Zero::Fsdp),
    ];
    let degrees = [4, 2, 2, 1, 2];
    let bench = |zero| {
        let mut bench = Bench::new("qwen3_moe", 4).dividing(zero);
        // Norms are summed bucket by bucket.
        bench.options.adam.clip = None;
        bench
    };
    let half = 4;
    for (saving, resuming) in [(Zero::States, Zero::Fsdp), (Zero::Fsdp, Zero::States)] {
        let run = folder();
        let expected = bench(saving).train(degrees, &bench(saving).saving(half, run.path()));
        let expected = expected.expect("trains");
        let resuming = bench(resuming);
        let dir = step_dir(run.path(), half);
        let found = resuming.resume(degrees, &dir, &resuming.options);
        let bits = |trained| resuming.weights(trained).into_iter().map(f32::to_bits);
        assert!(bits(&found).eq(bits(&expected)), "{saving:?}: weights");
    }
    check_stop(&bench(Zero::Fsdp), degrees);
    // In every layout, whoever saved.
    check_each(Bench::new("qwen3_moe", 4), LAYOUTS, Bench::dividing);
}

/// Who has which tokens is nothing that a checkpoint says.
#[test]
fn oracle_ranks_that_cut_sequences_otherwise_take_a_run_up() {
    const CUTS: [([u32; 5], u32); 3] = [
        ([2, 1, 2, 1, 2], 2),
        ([4, 1, 2, 2, 1], 4),
        ([1, 1, 1, 1, 4], 1),
    ];
    for name in ["mixtral", "deepseek_v2"] {
        check_each(Bench::new(name, 4), CUTS, Bench::cut);
    }
}

/// Every setting trains and saves, and the next takes its run up. `set` gives a bench what degrees do not say.
fn check_each<S: Copy, const N: usize>(
    mut bench: Bench,
    settings: [([u32; 5], S); N],
    set: impl Fn(Bench, S) -> Bench,
) {
    let runs = settings.map(|_| folder());
    let mut expected = Vec::new();
    for ((degrees, own), run) in settings.into_iter().zip(&runs) {
        bench = set(bench, own);
        let trained = bench.train(degrees, &bench.saving(4, run.path()));
        expected.push(trained.expect("trains").steps);
    }
    for (saved, run) in runs.iter().enumerate() {
        let (degrees, own) = settings[(saved + 1) % N];
        bench = set(bench, own);
        let dir = step_dir(run.path(), 4);
        let found = bench.resume(degrees, &dir, &bench.options).steps;
        assert_eq!(found.len(), 4);
        for (found, expected) in found.iter().zip(&expected[saved][4..]) {
            let error = (found.loss / expected.loss - 1.0).abs();
            let name = &bench.model.name;
            assert!(error < 1e-5, "{name} after {saved}: {found:?} {expected:?}");
        }
    }
}

/// What one pipeline saves the next one reads, whatever is on which rank.
#[test]
fn oracle_another_pipeline_takes_a_run_up() {
    use ScheduleName::{Interleaved, OneFOneB, VHalf, ZbV};

    type Pipeline = ([u32; 2], ScheduleName);
    const PIPELINES: [([u32; 5], Pipeline); 7] = [
        ([1, 1, 1, 1, 2], ([1, 1], ScheduleName::None)),
        ([2, 1, 1, 1, 1], ([2, 1], OneFOneB)),
        ([4, 2, 1, 1, 1], ([2, 2], VHalf)),
        ([4, 1, 1, 1, 1], ([4, 1], OneFOneB)),
        ([4, 2, 1, 1, 1], ([2, 2], Interleaved)),
        ([4, 1, 1, 1, 1], ([2, 2], ZbV)),
        ([3, 1, 1, 1, 2], ([3, 1], OneFOneB)),
    ];
    for name in ["mixtral", "qwen3_tied"] {
        let set = |bench: Bench, (pipeline, schedule)| bench.piped(pipeline).under(schedule);
        check_each(Bench::new(name, 4).with_layers(4), PIPELINES, set);
    }
}

/// A run whose stages take turns goes on to the bit, with combined passes and without.
#[test]
fn oracle_stages_that_take_turns_go_on_to_the_bit() {
    let mut of = [ScheduleName::DualpipeVCombined, ScheduleName::DualpipeV].map(|schedule| {
        let bench = Bench::new("mixtral", 8).with_layers(4).piped([2, 2]);
        bench.under(schedule)
    });
    for bench in &mut of {
        bench.options.steps = 4;
    }
    let [combined, apart] = &of;
    check_stop(combined, [4, 1, 2, 1, 1]);
    check_taken_up(combined, apart, [4, 1, 2, 1, 1]);
}

/// Files hold f32; what was rounded to bf16 before it was written is as it was when it is read.
#[test]
fn oracle_a_resumed_run_with_narrow_moments_equals_the_uninterrupted_one_to_the_bit() {
    let mut bench = Bench::new("qwen3_moe", 4);
    bench.options.steps = 4;
    bench.optimizer = Optimizer::AdamBf16Moments;
    check_stop(&bench, [1, 1, 1, 1, 2]);
    check_stop(&bench, [4, 2, 2, 2, 2]);
    let wide = Bench::new("qwen3_moe", 4);
    let train = |bench: &Bench| bench.train([1, 1, 1, 1, 2], &bench.options);
    let [narrow, wide] = [&bench, &wide].map(|bench| train(bench).expect("trains"));
    let last = |trained: &Trained| trained.steps[3].loss;
    assert_ne!(
        last(&narrow).to_bits(),
        last(&wide).to_bits(),
        "moments round"
    );
}

#[test]
fn oracle_a_resumed_run_on_a_gpu_equals_the_uninterrupted_one_to_the_bit() {
    for (dtype, degrees) in [
        (Dtype::Bf16, [1, 1, 1, 1, 2]),
        (Dtype::Bf16, [2, 1, 2, 1, 1]),
        (Dtype::F32, [2, 2, 1, 2, 2]),
    ] {
        let mut bench = Bench::new("qwen3_moe_raw", 2);
        bench.options.device = DeviceSpec::Emulated {
            architecture: Architecture::SM80,
            dtype,
            seed: 1,
            reserve: None,
        };
        bench.options.steps = 2;
        if dtype == Dtype::Bf16 {
            bench.optimizer = Optimizer::AdamBf16Moments;
        }
        if testing::is_at_hand(&bench.options.device) {
            check_stop(&bench, degrees);
        }
    }
}

/// Where states rest is nothing that a checkpoint says.
#[test]
fn oracle_states_on_the_host_are_saved_and_taken_up() {
    let bench = |share| {
        let mut bench = Bench::new("qwen3_moe", 4).bucketed(Some(3000));
        bench.options.steps = 4;
        bench.on_host = HostShare(share);
        bench
    };
    let [stays, half, all] = [0.0, 0.5, 1.0].map(bench);
    check_taken_up(&stays, &half, [1, 1, 1, 1, 2]);
    check_taken_up(&half, &all, [4, 2, 2, 1, 1]);
    check_taken_up(&all, &stays, [2, 1, 2, 1, 1]);
}

/// Files hold f32 masters, and weights are made of them in one way.
#[test]
fn oracle_remainders_take_up_what_masters_saved_and_the_other_way_round() {
    let bench = |masters| {
        let mut bench = Bench::new("qwen3_moe_raw", 2);
        bench.options.device = DeviceSpec::Emulated {
            architecture: Architecture::SM80,
            dtype: Dtype::Bf16,
            seed: 1,
            reserve: None,
        };
        bench.options.steps = 2;
        bench.masters = masters;
        bench
    };
    let [whole, rest] = [Masters::Fp32, Masters::Remainder].map(bench);
    if testing::is_at_hand(&whole.options.device) {
        check_taken_up(&whole, &rest, [1, 1, 1, 1, 2]);
        check_taken_up(&rest, &whole, [1, 1, 1, 1, 2]);
    }
}

#[test]
fn oracle_another_layout_and_another_device_take_a_run_up() {
    let bench = Bench::new("mixtral", 8);
    let layouts = [
        [1, 1, 1, 1, 2],
        [2, 2, 1, 1, 4],
        [4, 2, 4, 1, 2],
        [8, 4, 2, 2, 4],
        [8, 1, 8, 1, 1],
    ];
    let check = |found: &[StepRecord], expected: &[StepRecord], tolerance: f64, what: &str| {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.step, expected.step, "{what}");
            let (loss, of) = (found.loss, expected.loss);
            let error = (loss / of - 1.0).abs();
            assert!(error < tolerance, "{what}: {loss} and {of}, {error:.1e}");
        }
    };
    let runs: Vec<_> = layouts.iter().map(|_| folder()).collect();
    let mut expected = Vec::new();
    for (degrees, run) in layouts.into_iter().zip(&runs) {
        let trained = bench.train(degrees, &bench.saving(4, run.path()));
        expected.push(trained.expect("trains").steps);
    }
    for (saved, run) in runs.iter().enumerate() {
        let dir = step_dir(run.path(), 4);
        // Every layout is read by the next one and by one rank.
        for by in [(saved + 1) % layouts.len(), 0] {
            let found = bench.resume(layouts[by], &dir, &bench.options);
            let what = format!("{:?} read by {:?}", layouts[saved], layouts[by]);
            check(&found.steps, &expected[saved][4..], 1e-5, &what);
        }
    }
    let on = DeviceSpec::Emulated {
        architecture: Architecture::SM80,
        dtype: Dtype::Bf16,
        seed: 1,
        reserve: None,
    };
    if testing::is_at_hand(&on) {
        let mut bench = Bench::new("mixtral", 2);
        bench.options.lr = LearningRate::constant(3e-3);
        bench.options.steps = 5;
        let (run, back) = (folder(), folder());
        let trained = bench.train([1, 1, 1, 1, 2], &bench.saving(4, run.path()));
        let options = TrainOptions {
            device: on,
            ..bench.saving(5, back.path())
        };
        let found = bench.resume([1, 1, 1, 1, 2], &step_dir(run.path(), 4), &options);
        let expected = trained.expect("trains").steps;
        check(&found.steps, &expected[4..], 1e-2, "f32 read by bf16");
        // And back to f32: masters have lost nothing on the way.
        let options = TrainOptions {
            steps: 6,
            ..bench.options.clone()
        };
        let expected = bench.train([1, 1, 1, 1, 2], &options).expect("trains");
        let found = bench.resume([1, 1, 1, 1, 2], &step_dir(back.path(), 5), &options);
        check(&found.steps, &expected.steps[5..], 1e-3, "bf16 read by f32");
    }
}
