//! Going on equals never having stopped; whatever is wrong with a checkpoint is said; and what a run
//! was writing when it was stopped is in nobody's way.

use std::fs;
use std::path::{Path, PathBuf};

use moefold_kernels::Dtype;
use moefold_kernels::cuda::Architecture;
use moefold_planner::layout::{Batch, Degrees, Layout};
use moefold_planner::model::{Model, hf};
use moefold_planner::plan::LayoutRecord;
use moefold_profiles::Precision;
use moefold_profiles::run::StepRecord;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::data::Stream;
use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::model::global_tensors;
use crate::optimizer::{AdamOptions, State};
use crate::rank::Context;
use crate::testing;
use crate::train::{self, Init, Trained, Trainer};
use crate::transport::World;
use crate::unpriced::planned;
use crate::weights::{Region, Source};

const SEQ_LEN: u64 = 16;

const CPU: DeviceSpec = DeviceSpec::Cpu {
    threads_per_rank: Some(1),
};

/// A fixture to train, and how.
struct Bench {
    model: Model,
    samples: Samples,
    batch: Batch,
    options: TrainOptions,
}

impl Bench {
    fn new(name: &str, global_batch: u64) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let model = hf::read(&folder.join(name)).expect("a fixture");
        let stream = Stream::indexed(&folder.join(name).join("tokens")).expect("tokens");
        let order = Order::Shuffled { seed: 3 };
        let samples = Samples::new(stream, SEQ_LEN, model.vocab_size, order).expect("enough");
        let steps = 8;
        Self {
            model,
            samples,
            batch: Batch {
                seq_len: SEQ_LEN,
                global_batch,
            },
            options: TrainOptions {
                steps,
                lr: LearningRate {
                    peak: 3e-3,
                    warmup: 2,
                    decay: Decay::Cosine,
                    steps,
                },
                adam: AdamOptions::default(),
                aux_loss_coef: 0.0,
                seed: 1,
                init: Init::Random,
                device: CPU,
                traced_steps: 0..0,
                save: None,
            },
        }
    }

    /// The same, saving into `run_dir`.
    fn saving(&self, every: u64, run_dir: &Path) -> TrainOptions {
        TrainOptions {
            save: Some(Saving {
                every,
                run_dir: run_dir.to_owned(),
            }),
            ..self.options.clone()
        }
    }

    fn layout(&self, degrees: [u32; 5]) -> Layout {
        let [gpus, tp, ep, etp, mbs] = degrees;
        let degrees = Degrees {
            gpus,
            tp,
            cp: 1,
            pp: 1,
            vpp: 1,
            ep,
            etp,
            mbs,
        };
        Layout::new(&degrees, &self.model, &self.batch).expect("a legal layout")
    }

    fn train(&self, degrees: [u32; 5], options: &TrainOptions) -> Result<Trained, Error> {
        let layout = self.layout(degrees);
        let mut plan = planned(&self.model, LayoutRecord::from(&layout));
        plan.precision = match options.device.dtype() {
            Dtype::Bf16 => Precision::Bf16,
            _ => Precision::Fp32,
        };
        let (model, batch) = (&self.model, &self.batch);
        train::run(&plan, model, batch, options, &self.samples, &|_| ())
    }

    /// Goes on from `dir`.
    fn resume(&self, degrees: [u32; 5], dir: &Path, options: &TrainOptions) -> Trained {
        let options = TrainOptions {
            init: from(dir),
            ..options.clone()
        };
        let resumed = self.train(degrees, &options);
        resumed.unwrap_or_else(|error| panic!("{degrees:?}: {error}"))
    }

    fn weights(&self, trained: &Trained) -> Vec<f32> {
        let tensors = global_tensors(&self.model).into_iter();
        tensors.flat_map(|t| trained.weights.get(&t)).collect()
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// To go on from the checkpoint in `dir`; how many steps it has is read from it.
fn from(dir: &Path) -> Init {
    Init::Resume(Resumed {
        checkpoint: dir.to_owned(),
        step: 0,
    })
}

fn step_dir(run: &Path, step: u64) -> PathBuf {
    folder_of(&run.join(FOLDER), step)
}

/// All of a step but what a clock or an account of memory says.
fn figures(step: &StepRecord) -> (u64, [u64; 4], Vec<Vec<u64>>) {
    let numbers = [step.loss, step.aux_loss, step.grad_norm, step.lr].map(f64::to_bits);
    (step.step, numbers, step.expert_load.clone())
}

/// Trains without and with a stop in the middle; the two must agree to the bit, in what they report
/// and in what they save.
fn check_stop(bench: &Bench, degrees: [u32; 5]) {
    let (whole, rest) = (folder(), folder());
    let (steps, half) = (bench.options.steps, bench.options.steps / 2);
    let options = bench.saving(half, whole.path());
    let expected = bench.train(degrees, &options).expect("trains");
    let dir = step_dir(whole.path(), half);
    let found = bench.resume(degrees, &dir, &bench.saving(steps, rest.path()));
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
    bench.options.aux_loss_coef = 0.01;
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
        if testing::is_at_hand(&bench.options.device) {
            check_stop(&bench, degrees);
        }
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

/// A number that says what it is of.
fn value_of(state: State, tensor: &str, row: usize, col: usize) -> f32 {
    let mut hash = blake3::Hasher::new();
    hash.update(tensor.as_bytes());
    hash.update(&[state as u8]);
    hash.update(&(row as u64).to_le_bytes());
    hash.update(&(col as u64).to_le_bytes());
    f32::from(u16::from_le_bytes([
        hash.finalize().as_bytes()[0],
        hash.finalize().as_bytes()[1],
    ]))
}

fn values_of(state: State, region: &Region<'_>) -> Vec<f32> {
    let rows = region.rows.clone();
    let cols = || region.cols.clone();
    rows.flat_map(|row| cols().map(move |col| (row, col)))
        .map(|(row, col)| value_of(state, region.tensor, row, col))
        .collect()
}

/// The states of a rank that a slice has, with where they belong.
fn each_state(
    trainer: &Trainer,
    mut each: impl FnMut(State, &Region<'_>, &moefold_kernels::Tensor),
) {
    let stepper = trainer.stepper();
    for parameter in &stepper.store.shard.parameters {
        for slice in &parameter.slices {
            for state in State::ALL {
                let found = stepper.optimizer.state(state, parameter, slice);
                let Some((elements, tensor)) = found else {
                    continue;
                };
                let mut at = 0;
                for part in slice.region().parts(elements) {
                    each(state, &part, &tensor.view(at, &[part.len()]));
                    at += part.len();
                }
            }
        }
    }
}

/// Saves states that say what they are of under one layout; what every rank is told.
fn save_marked(
    bench: &Bench,
    degrees: [u32; 5],
    run_dir: &Path,
    step: u64,
) -> Result<Vec<Written>, Error> {
    let layout = bench.layout(degrees);
    let options = bench.saving(1, run_dir);
    let weights = Source::Random { seed: 1, std: 0.1 };
    let course = Course::of(&options, &bench.batch, &bench.samples).expect("reads");
    World::threads(layout.gpus()).run(|rank| {
        let cx = Context::join(rank, &layout, CPU.open(0, 1)?, rank.recorder());
        let world = cx.world.clone();
        let trainer = Trainer::new(cx, &bench.model, SEQ_LEN, &options, &weights)?;
        each_state(&trainer, |state, region, tensor| {
            tensor.copy_from_f32(&values_of(state, region));
        });
        let saver = Saver::of(rank, &world, &options, &bench.model, Some(&course))?;
        let saver = saver.expect("it saves");
        let written = saver.save(&trainer, step)?;
        assert!(
            written.dir.join(INDEX).is_file(),
            "rank {} went on before the checkpoint was complete",
            rank.rank()
        );
        Ok(written)
    })
}

/// Proptest over cases thrown from `MOEFOLD_SEED`.
fn runner(cases: u32) -> TestRunner {
    let given = std::env::var("MOEFOLD_SEED").ok();
    let seed: u64 = given.and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

#[test]
fn law_what_one_layout_saves_every_region_and_every_layout_reads() {
    const LAYOUTS: [[u32; 5]; 8] = [
        [1, 1, 1, 1, 1],
        [2, 2, 2, 1, 1],
        [4, 1, 4, 1, 1],
        [4, 2, 1, 1, 1],
        [4, 4, 2, 2, 1],
        [8, 2, 4, 2, 1],
        [8, 8, 8, 1, 1],
        [8, 1, 1, 1, 1],
    ];
    let bench = Bench::new("qwen3_moe", 8);
    let tensors = global_tensors(&bench.model);
    // A folder each: two are kept in one at a time.
    let runs = LAYOUTS.map(|_| folder());
    let saved: Vec<Saved> = (0..)
        .zip(LAYOUTS.into_iter().zip(&runs))
        .map(|(step, (degrees, run))| {
            save_marked(&bench, degrees, run.path(), step).expect("saves");
            Saved::open(&step_dir(run.path(), step), &bench.model).expect("complete")
        })
        .collect();
    let ends = (0..=1000_usize, 0..=1000_usize);
    let of = (
        0..saved.len(),
        0..tensors.len(),
        0..3_usize,
        ends.clone(),
        ends,
    );
    runner(2000)
        .run(&of, |(which, tensor, state, rows, cols)| {
            let [num_rows, num_cols] = tensors[tensor].matrix();
            let range = |(a, b): (usize, usize), len: usize| {
                let (a, b) = (a.min(b), a.max(b));
                a * len / 1000..b * len / 1000
            };
            let region = Region {
                rows: range(rows, num_rows),
                cols: range(cols, num_cols),
                ..tensors[tensor].whole()
            };
            let state = State::ALL[state];
            let found = saved[which].read(state, &region).expect("reads");
            prop_assert_eq!(found, values_of(state, &region));
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));

    for (index, saved) in saved.into_iter().enumerate() {
        let layout = bench.layout(LAYOUTS[LAYOUTS.len() - 1 - index]);
        let source = Source::Saved(Box::new(saved));
        World::threads(layout.gpus())
            .run(|rank| {
                let cx = Context::join(rank, &layout, CPU.open(0, 1)?, rank.recorder());
                let trainer = Trainer::new(cx, &bench.model, SEQ_LEN, &bench.options, &source)?;
                each_state(&trainer, |state, region, tensor| {
                    assert_eq!(tensor.to_f32(), values_of(state, region), "{region:?}");
                });
                assert_eq!(trainer.steps(), index as u64);
                Ok(())
            })
            .expect("every state is in its place");
    }
}

/// Cuts `0..rows x 0..cols` in two, again and again.
fn cut(rows: [usize; 2], cols: [usize; 2], cuts: &[(bool, usize)]) -> Vec<[[usize; 2]; 2]> {
    let Some(((by_rows, at), rest)) = cuts.split_first() else {
        return vec![[rows, cols]];
    };
    let place = |[start, end]: [usize; 2]| start + at % (end - start);
    let (first, second) = rest.split_at(rest.len() / 2);
    let halves = if *by_rows {
        let at = place(rows);
        [([rows[0], at], cols), ([at, rows[1]], cols)]
    } else {
        let at = place(cols);
        [(rows, [cols[0], at]), (rows, [at, cols[1]])]
    };
    let halves = halves.into_iter().zip([first, second]);
    halves
        .filter(|((rows, cols), _)| rows[0] < rows[1] && cols[0] < cols[1])
        .flat_map(|((rows, cols), cuts)| cut(rows, cols, cuts))
        .collect()
}

#[test]
fn law_a_cover_is_complete_and_nowhere_twice() {
    let tensor = GlobalTensor {
        name: "w".to_owned(),
        dims: vec![12, 10],
    };
    let cuts = proptest::collection::vec((any::<bool>(), 0..1000_usize), 1..20);
    runner(500)
        .run(&(cuts, 0..1000_usize), |(cuts, which)| {
            let tiles = cut([0, 12], [0, 10], &cuts);
            let rectangle = |&[rows, cols]: &[[usize; 2]; 2]| Rectangle {
                tensor: "w".to_owned(),
                dims: vec![12, 10],
                rows,
                cols,
            };
            let check = |tiles: &[[[usize; 2]; 2]]| {
                let mut all: Vec<Rectangle> = tiles.iter().map(rectangle).collect();
                all.sort_by_key(|r| (r.rows, r.cols));
                check_tiles(&all.iter().collect::<Vec<_>>(), &tensor)
            };
            prop_assert_eq!(check(&tiles), Ok(()));
            let which = which % tiles.len();
            let mut fewer = tiles.clone();
            let removed = fewer.swap_remove(which);
            prop_assert_eq!(check(&fewer), Err("is not there in full"));
            let twice = [&tiles[..], &[removed]].concat();
            prop_assert_eq!(check(&twice), Err("has a part that is there twice"));
            // As many elements, one row off.
            let mut moved = tiles.clone();
            moved[which][0] = removed[0].map(|row| row + 1);
            prop_assert!(check(&moved).is_err());
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_part_that_lies_outside_its_tensor_is_refused() {
    let tensor = GlobalTensor {
        name: "w".to_owned(),
        dims: vec![12, 10],
    };
    for (rows, cols) in [([0, 13], [0, 10]), ([0, 12], [0, 11]), ([5, 5], [0, 10])] {
        let part = Rectangle {
            tensor: "w".to_owned(),
            dims: vec![12, 10],
            rows,
            cols,
        };
        let refused = check_tiles(&[&part], &tensor);
        assert_eq!(refused, Err("has a part that lies outside it"), "{part:?}");
    }
}

/// A run of four steps with a checkpoint after each, of which the last two are left.
fn saved_run(bench: &mut Bench) -> tempfile::TempDir {
    bench.options.steps = 4;
    bench.options.lr = LearningRate::constant(1e-3);
    let run = folder();
    let trained = bench.train([4, 2, 4, 1, 2], &bench.saving(1, run.path()));
    let written: Vec<u64> = trained
        .expect("trains")
        .checkpoints
        .iter()
        .map(|written| written.step)
        .collect();
    assert_eq!(written, [1, 2, 3, 4]);
    run
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable").file_name().display().to_string())
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_keeps_its_last_checkpoints_and_nothing_half_written() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let all = run.path().join(FOLDER);
    assert_eq!(names(&all), ["step-3", "step-4"]);
    let files = names(&all.join("step-4"));
    assert_eq!(files[0], INDEX);
    assert_eq!(files.len(), 5, "{files:?}");
    let found = find(run.path()).expect("there are two");
    let expected = Resumed {
        checkpoint: all.join("step-4"),
        step: 4,
    };
    assert_eq!(found.resumed, expected);
    let named = find(&all.join("step-3")).expect("it is there");
    assert_eq!(named.resumed.step, 3);
}

#[test]
fn a_run_stopped_between_two_files_leaves_the_checkpoint_before() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let all = run.path().join(FOLDER);
    let (last, stopped) = (all.join("step-4"), partial(&all, 4));
    // Stopped before its name was changed, with ever fewer files.
    fs::rename(&last, &stopped).expect("renames");
    for name in names(&stopped) {
        assert_eq!(find(run.path()).expect("step 3").resumed.step, 3);
        fs::remove_file(stopped.join(name)).expect("removes");
    }
    fs::remove_dir(&stopped).expect("is empty");
    // Without it there is the other, which a copy may have left incomplete.
    fs::remove_file(all.join("step-3/rank-2.safetensors")).expect("removes");
    let text = find(run.path()).expect_err("none is left").to_string();
    for part in [
        "holds no complete checkpoint",
        "rank-2.safetensors: is missing",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_incomplete_checkpoint_is_passed_over_with_a_word() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let cut = step_dir(run.path(), 4).join("rank-1.safetensors");
    let bytes = fs::read(&cut).expect("there");
    fs::write(&cut, &bytes[..bytes.len() - 1]).expect("writes");
    let found = find(run.path()).expect("step 3");
    assert_eq!((found.resumed.step, found.passed_over.len()), (3, 1));
    let text = &found.passed_over[0];
    let expected = format!(
        "holds {} bytes; {} were written",
        bytes.len() - 1,
        bytes.len()
    );
    assert!(text.contains(&expected), "{text}");
}

/// Expects a refusal of the checkpoint in `dir` that says all of `expected`.
fn refused(bench: &Bench, dir: &Path, options: &TrainOptions, expected: &[&str]) {
    let options = TrainOptions {
        init: from(dir),
        ..options.clone()
    };
    let error = bench.train([2, 1, 2, 1, 2], &options).expect_err("refused");
    let text = error.to_string();
    assert!(error.is_bad_request(), "{text}");
    for part in expected {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_its_file() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    bench.options.steps = 8;
    let dir = step_dir(run.path(), 4);
    let check = |expected: &[&str]| refused(&bench, &dir, &bench.options, expected);
    let damaged = |name: &str, damage: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let path = dir.join(name);
        let whole = fs::read(&path).expect("there");
        let mut bytes = whole.clone();
        damage(&mut bytes);
        fs::write(&path, bytes).expect("writes");
        check(&[name, expected]);
        fs::write(&path, whole).expect("writes");
    };
    for rank in 0..4 {
        let name = format!("rank-{rank}.safetensors");
        // One bit of one moment of one element.
        let flip = |bytes: &mut Vec<u8>| *bytes.last_mut().expect("not empty") ^= 1;
        damaged(&name, &flip, "does not hold what was written");
        damaged(&name, &|bytes| bytes.truncate(100), "holds 100 bytes;");
    }
    let text = |from: &'static str, to: &'static str| {
        move |bytes: &mut Vec<u8>| {
            let text = String::from_utf8(bytes.clone()).expect("JSON");
            assert!(text.contains(from), "{from}");
            *bytes = text.replacen(from, to, 1).into_bytes();
        }
    };
    damaged(
        INDEX,
        &|bytes| bytes.truncate(1000),
        "is no index of a checkpoint",
    );
    damaged(
        INDEX,
        &text("\"version\":1", "\"version\":7"),
        "version 7, this program reads 1",
    );
    damaged(
        INDEX,
        &text("\"rank-0.", "\"../rank-0."),
        "expected files beside it",
    );
    damaged(
        INDEX,
        &text("\"rows\":[0,", "\"rows\":[1,"),
        "is not there in full",
    );
    damaged(
        INDEX,
        &text("\"tensor\":\"lm", "\"tensor\":\"km"),
        "is not of this model",
    );
    check_resumes(&bench, &dir);
    fs::remove_file(dir.join("rank-3.safetensors")).expect("removes");
    check(&["rank-3.safetensors: is missing from its checkpoint"]);
}

/// What is mended is read again, so that the damage above was the reason.
fn check_resumes(bench: &Bench, dir: &Path) {
    let resumed = bench.resume([2, 1, 2, 1, 2], dir, &bench.options);
    assert_eq!(resumed.steps[0].step, 4);
}

#[test]
fn what_would_not_go_on_as_it_began_is_refused_with_what_differs() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4);
    let now = &bench.options;
    refused(
        &bench,
        &dir,
        now,
        &["4 steps are done, and --steps asks for 4 in all: give more"],
    );

    let mut other = TrainOptions {
        steps: 8,
        ..now.clone()
    };
    other.lr.peak = 2e-3;
    other.adam.clip = None;
    other.aux_loss_coef = 0.5;
    let all = [
        "was trained otherwise",
        "lr was 0.001 and is 0.002",
        "clip was 1.0 and is none",
        "aux_loss_coef was 0.0 and is 0.5",
    ];
    refused(&bench, &dir, &other, &all);

    // A decaying rate depends on how long the run is, a constant one does not.
    let options = TrainOptions {
        steps: 8,
        ..now.clone()
    };
    let mut decaying = options.clone();
    decaying.lr = LearningRate {
        decay: Decay::Wsd,
        steps: 8,
        ..options.lr
    };
    let both = [
        "lr_schedule was \"constant\" and is \"wsd\"",
        "steps was none and is 8",
    ];
    refused(&bench, &dir, &decaying, &both);

    let mut longer = Bench::new("mixtral", 16);
    longer.options = options.clone();
    refused(&longer, &dir, &options, &["global_batch was 8 and is 16"]);
    let ids = vec![1; 500];
    let order = Order::Stream;
    bench.samples = Samples::new(Stream::of_ids("ones", ids), SEQ_LEN, 128, order).expect("enough");
    let data = [
        "data_blake3 was",
        "data_tokens was",
        "shuffle_seed was 3 and is none",
    ];
    refused(&bench, &dir, &options, &data);

    let mut other = Bench::new("qwen3_moe", 8);
    other.options = options.clone();
    let model = [
        "is a checkpoint of another model than",
        "model_type was \"mixtral\" and is \"qwen3_moe\"",
        "layers differs",
        "vocab_size was 128 and is 96",
    ];
    refused(&other, &dir, &options, &model);
}

#[test]
fn what_is_no_checkpoint_says_what_would_be_one() {
    let folder = folder();
    let text = find(folder.path()).expect_err("empty").to_string();
    assert!(text.contains("is no checkpoint and no run"), "{text}");
    assert!(text.contains("--save-every"), "{text}");
    fs::create_dir_all(folder.path().join("checkpoints/step-3.partial")).expect("creates");
    let text = find(folder.path())
        .expect_err("none is complete")
        .to_string();
    assert!(
        text.ends_with("checkpoints: holds no complete checkpoint"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_nothing() {
    let mut bench = Bench::new("mixtral", 8);
    bench.options.steps = 2;
    let failed = |plant: &dyn Fn(&Path)| {
        let run = folder();
        let all = run.path().join(FOLDER);
        fs::create_dir_all(&all).expect("creates");
        plant(&all.join("step-2.partial"));
        let failed = bench.train([4, 2, 4, 1, 2], &bench.saving(2, run.path()));
        let error = failed.expect_err("it cannot be written");
        assert!(!error.is_bad_request(), "{error}");
        assert_eq!(names(&all), [""; 0]);
        error.to_string()
    };
    // A file is where the folder should be, and a folder where the file of a rank should be.
    let text = failed(&|partial| fs::write(partial, "").expect("writes"));
    assert!(text.contains("step-2.partial: could not create"), "{text}");
    let text = failed(&|partial| {
        fs::create_dir_all(partial.join("rank-1.safetensors")).expect("creates");
    });
    for part in [
        "step-2.partial/rank-1.safetensors: could not write the checkpoint",
        "MiB: Is a directory",
        "goes on from the last complete one, if any",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn every_rank_removes_what_it_wrote_of_a_checkpoint_that_failed() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let failing = partial(&run.path().join(FOLDER), 5);
    let blocked = failing.join("rank-2.safetensors");
    fs::create_dir_all(&blocked).expect("creates");
    save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect_err("a folder is in the way");
    assert_eq!(names(&failing), ["rank-2.safetensors"]);
    fs::remove_dir(&blocked).expect("only what was planted is left");
    let written = save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect("saves");
    let sizes: Vec<u64> = written.iter().map(|written| written.bytes).collect();
    assert_eq!(
        sizes[0],
        sizes[1..].iter().sum::<u64>() + first_file(&written[0].dir)
    );
}

/// Bytes of rank 0's file.
fn first_file(dir: &Path) -> u64 {
    let file = fs::metadata(dir.join("rank-0.safetensors"));
    file.expect("it is there").len()
}

#[test]
fn an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let all = run.path().join(FOLDER);
    let save = |step| {
        let written = save_marked(&bench, [2, 1, 2, 1, 2], run.path(), step).expect("saves");
        written[0].not_removed.clone()
    };
    assert_eq!([save(1), save(2)], [[""; 0]; 2]);
    // A folder cannot take a file's name.
    fs::write(all.join("step-1.partial"), "").expect("writes");
    let said = save(3);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("step-1: could not remove"), "{said:?}");
    assert_eq!(names(&all), ["step-1", "step-2", "step-3"]);
    assert_eq!(save(4), [""; 0]);
    assert_eq!(names(&all), ["step-3", "step-4"]);
}

#[test]
fn a_file_that_rank_0_does_not_see_is_told_by_where_it_was_written() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    save_marked(&bench, [2, 1, 2, 1, 2], run.path(), 1).expect("saves");
    let all = run.path().join(FOLDER);
    let (whole, dir) = (folder_of(&all, 1), partial(&all, 1));
    let index = Index::load(&whole).expect("an index");
    fs::rename(&whole, &dir).expect("renames");
    fs::remove_file(dir.join("rank-1.safetensors")).expect("removes");
    let refused = |apart| write::commit(&all, &index, apart).expect_err("a file is missing");
    let (of_processes, of_threads) = (refused(true), refused(false));
    assert!(of_processes.is_bad_request(), "{of_processes}");
    let text = of_processes.to_string();
    for part in [
        "rank-1.safetensors: is missing from its checkpoint",
        "a run directory that all of them share",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // Ranks of one process have one file system.
    assert!(!of_threads.is_bad_request(), "{of_threads}");
    assert!(!of_threads.to_string().contains("share"), "{of_threads}");
    // Not to be read is not to be missing.
    std::os::unix::fs::symlink("rank-1.safetensors", dir.join("rank-1.safetensors"))
        .expect("links");
    let unreadable = refused(true);
    assert!(!unreadable.is_bad_request(), "{unreadable}");
    assert!(
        unreadable.to_string().contains("could not measure"),
        "{unreadable}"
    );
}

#[test]
fn only_what_is_not_complete_is_passed_over() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let newest = step_dir(run.path(), 4);
    let index = newest.join(INDEX);
    let text = fs::read_to_string(&index).expect("there");
    let passed_over = |text: &str| {
        fs::write(&index, text).expect("writes");
        find(run.path()).map(|found| (found.resumed.step, found.passed_over.len()))
    };
    assert_eq!(passed_over(&text).expect("whole"), (4, 0));
    for cut in [0, 1, text.len() / 2, text.len() - 1] {
        assert_eq!(
            passed_over(&text[..cut]).expect("the one before"),
            (3, 1),
            "{cut}"
        );
    }
    for (from, to, expected) in [
        (
            "\"version\":1",
            "\"version\":2",
            "version 2, this program reads 1",
        ),
        (
            "\"step\":4",
            "\"step\":\"4\"",
            "is no index of a checkpoint",
        ),
        (
            "\"step\":4",
            "\"step\":5",
            "is of step 5, in a folder named after step 4",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let error = passed_over(&text.replacen(from, to, 1)).expect_err("step 4 is not lost");
        assert!(error.to_string().contains(expected), "{error}");
    }
    fs::write(&index, &text).expect("writes");
    // A file that is there and cannot be read, whoever asks.
    let file = newest.join("rank-0.safetensors");
    fs::remove_file(&file).expect("removes");
    std::os::unix::fs::symlink("rank-0.safetensors", &file).expect("links");
    let error = find(run.path())
        .expect_err("step 4 is not lost")
        .to_string();
    assert!(
        error.contains("rank-0.safetensors: could not measure"),
        "{error}"
    );
}

#[test]
fn ranks_that_read_different_checkpoints_are_told() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let verified = |steps: [u64; 2]| {
        World::threads(2).run(|rank| {
            let step = steps[rank.rank() as usize];
            let saved = Saved::open(&step_dir(run.path(), step), &bench.model)?;
            saved.verify(&rank.communicator("world", &[0, 1]))
        })
    };
    verified([4, 4]).expect("one checkpoint");
    let error = verified([4, 3]).expect_err("two checkpoints");
    assert!(error.is_bad_request(), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("ranks 0 and 1 read different checkpoints"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_is_of_a_model_by_what_decides_training() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4);
    let mut model = bench.model.clone();
    model.name = "another/name".to_owned();
    model.max_position = Some(1 << 20);
    model.initializer_range = 0.5;
    Saved::open(&dir, &model).expect("it trains alike");
    model.norm.eps *= 2.0;
    let error = Saved::open(&dir, &model)
        .expect_err("another model")
        .to_string();
    assert!(error.ends_with("another/name: norm differs"), "{error}");
}

#[test]
fn a_checkpoint_that_is_not_read_is_not_open() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4).canonicalize().expect("there");
    let saved = Saved::open(&dir, &bench.model).expect("complete");
    let tensors = global_tensors(&bench.model);
    let values = saved.read(State::Master, &tensors[0].whole());
    assert_eq!(values.expect("reads").len(), tensors[0].len());
    let open = fs::read_dir("/proc/self/fd").expect("this system lists open files");
    let files = open
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let open: Vec<_> = files.filter(|file| file.starts_with(&dir)).collect();
    assert!(open.is_empty(), "{open:?}");
}
