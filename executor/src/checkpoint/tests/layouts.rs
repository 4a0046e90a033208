//! What any layout saves every other one reads.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::options::Savers;
use crate::rank::Context;
use crate::train::Trainer;
use crate::transport::World;
use crate::weights::{Region, Source};

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
fn each_state(trainer: &Trainer, mut each: impl FnMut(State, &Region<'_>, &mut [f32])) {
    let stepper = trainer.stepper();
    for parameter in &stepper.store.shard.parameters {
        for slice in &parameter.slices {
            for &state in State::of(&slice.tensor) {
                let optimizer = &stepper.optimizer;
                let Some(elements) = optimizer.elements(parameter, slice) else {
                    continue;
                };
                let Some(mut values) = optimizer.state(state, parameter, slice) else {
                    continue;
                };
                let mut rest = values.as_mut_slice();
                for part in slice.region().parts(elements) {
                    let (own, others) = rest.split_at_mut(part.len());
                    each(state, &part, own);
                    rest = others;
                }
                optimizer.put(state, parameter, slice, &values);
            }
        }
    }
}

/// Saves states that say what they are of under one layout; what every rank is told.
pub(super) fn save_marked(
    bench: &Bench,
    degrees: [u32; 5],
    run_dir: &Path,
    step: u64,
) -> Result<Vec<Written>, Error> {
    let layout = bench.layout(degrees);
    let stages = bench.stages(&layout);
    let options = bench.saving(1, run_dir);
    let weights = Source::Random { seed: 1, std: 0.1 };
    let fingerprint = Fingerprint::of(&options, &bench.batch, &bench.samples).expect("reads");
    let changed = AtomicBool::new(false);
    World::threads(layout.gpus()).run(|rank| {
        let cx = Context::join(rank, &layout, CPU.open(0, 1)?, rank.recorder());
        let world = cx.world.clone();
        let trainer = Trainer::new(
            cx,
            &bench.model,
            &stages,
            SEQ_LEN,
            &Savers::default(),
            &options,
            &weights,
        )?;
        each_state(&trainer, |state, region, own| {
            own.copy_from_slice(&values_of(state, region));
        });
        let saver = Saver::of(
            rank,
            &world,
            &options,
            &bench.model,
            Some(&fingerprint),
            &changed,
        )?;
        let mut saver = saver.expect("it saves");
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
    let saved: Vec<Checkpoint> = (0..)
        .zip(LAYOUTS.into_iter().zip(&runs))
        .map(|(step, (degrees, run))| {
            save_marked(&bench, degrees, run.path(), step).expect("saves");
            Checkpoint::open(&step_dir(run.path(), step), &bench.model).expect("complete")
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
        let stages = bench.stages(&layout);
        let source = Source::Checkpoint(Box::new(saved));
        World::threads(layout.gpus())
            .run(|rank| {
                let cx = Context::join(rank, &layout, CPU.open(0, 1)?, rank.recorder());
                let trainer = Trainer::new(
                    cx,
                    &bench.model,
                    &stages,
                    SEQ_LEN,
                    &Savers::default(),
                    &bench.options,
                    &source,
                )?;
                each_state(&trainer, |state, region, own| {
                    assert_eq!(own, values_of(state, region), "{region:?}");
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
