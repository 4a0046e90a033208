//! The shards of all ranks are the model, and what happens to them depends on the seed alone.

use std::collections::BTreeMap;

use moefold_executor::device::DeviceSpec;
use moefold_executor::model::{Family, Piece, Shard, pieces_of};
use moefold_executor::options::TrainOptions;
use moefold_executor::rank::Context;
use moefold_executor::train;
use moefold_executor::transport::World;
use moefold_executor::weights::Source;
use moefold_kernels::Device;
use moefold_planner::bucket::Division;
use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::mesh;
use moefold_planner::model::count;
use moefold_planner::schedule::Stage;

use crate::common::{Fixture, Tensors, assert_close, degrees, held, piped, place};
use crate::layouts::pipelines;

/// Every legal layout of up to `gpus` ranks at one sequence a microbatch.
fn legal(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = Vec::new();
    for gpus in 1..=gpus {
        for tp in 1..=gpus {
            for ep in 1..=gpus {
                for etp in 1..=gpus {
                    let degrees = degrees(gpus, tp, ep, etp, 1);
                    if Layout::new(&degrees, &fixture.model, &fixture.batch()).is_ok() {
                        all.push(degrees);
                    }
                }
            }
        }
    }
    all
}

/// Counts how often ranks that answer for an element hold it: once, for every element.
fn assert_partition(fixture: &Fixture, layout: &Layout) {
    let mut times: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let mut answered = 0;
    for rank in 0..layout.gpus() {
        let at = mesh::coordinates(layout, rank);
        let stages = layout.places().of_rank(at.pp).map(Stage);
        let pieces: Vec<Piece> = stages
            .flat_map(|stage| pieces_of(&fixture.model, &fixture.stages(layout), stage))
            .collect();
        let shard = Shard::new(&fixture.model, layout, &at, &pieces, Division::Whole);
        for parameter in &shard.parameters {
            let replica = match parameter.family {
                Family::Dense | Family::Balance => at.dp,
                Family::Expert => at.edp,
            };
            if replica > 0 || !parameter.counted {
                continue;
            }
            // The load moves these, so they count as no parameters.
            if parameter.family != Family::Balance {
                answered += parameter.len() as u64;
            }
            for slice in &parameter.slices {
                let len = slice.dims.iter().product();
                let width = slice.dims[1..].last().copied().unwrap_or(1);
                let times = times
                    .entry(slice.tensor.clone())
                    .or_insert_with(|| vec![0; len]);
                for row in slice.rows.clone() {
                    for col in slice.cols.clone() {
                        times[row * width + col] += 1;
                    }
                }
            }
        }
    }
    for (tensor, times) in times {
        assert!(
            times.iter().all(|&t| t == 1),
            "{tensor} under {layout:?}: {times:?}"
        );
    }
    let params = count::params(&fixture.model);
    assert_eq!(answered, params.total() + params.mtp(), "{layout:?}");
}

#[test]
fn law_shards_of_pipelines_partition_the_model() {
    for name in ["mixtral", "qwen3_moe", "qwen3_tied"] {
        let fixture = Fixture::load(name).with_layers(5).with_batch(8);
        let one_sequence = |degrees: &Degrees| degrees.mbs == 1;
        let all = (2..=8).flat_map(|gpus| pipelines(&fixture, gpus));
        let all: Vec<Degrees> = all.filter(one_sequence).collect();
        assert!(all.len() > 15, "{name}: only {} layouts", all.len());
        for degrees in all {
            assert_partition(&fixture, &fixture.layout(&degrees));
        }
    }
}

#[test]
fn law_shards_partition_the_model() {
    for name in [
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "deepseek_v3_mtp",
        "gpt_oss",
    ] {
        let fixture = Fixture::load(name);
        let all = legal(&fixture, 8);
        assert!(all.len() > 40, "{name}: only {} layouts", all.len());
        for degrees in all {
            assert_partition(&fixture, &fixture.layout(&degrees));
        }
    }
}

/// Random initial weights under a layout, whole.
fn initial(fixture: &Fixture, degrees: &Degrees, options: &TrainOptions) -> Tensors {
    let layout = fixture.layout(degrees);
    let source = Source::Random { seed: 5, std: 0.02 };
    let ranks = World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, &layout, Device::cpu(1), rank.recorder());
            Ok(held(&fixture.trainer(cx, options, &source)?))
        })
        .expect("ranks start");
    let mut tensors = Tensors::new();
    for (slice, values) in ranks.into_iter().flatten() {
        place(&mut tensors, &slice, &values);
    }
    tensors
}

#[test]
fn law_random_weights_do_not_depend_on_the_layout() {
    let fixture = Fixture::load("qwen3_moe");
    let options = fixture.options();
    let single = initial(&fixture, &degrees(1, 1, 1, 1, 1), &options);
    for layout in [
        degrees(4, 2, 2, 2, 1),
        degrees(8, 4, 8, 1, 1),
        degrees(8, 2, 1, 4, 1),
        piped(degrees(4, 2, 2, 1, 1), 2, 1),
        piped(degrees(3, 1, 1, 1, 1), 3, 1),
    ] {
        assert_eq!(initial(&fixture, &layout, &options), single, "{layout:?}");
    }
}

#[test]
fn law_the_same_run_gives_the_same_bits_on_any_number_of_threads() {
    let fixture = Fixture::load("qwen3_moe").with_layers(4);
    for layout in [
        degrees(1, 1, 1, 1, 12),
        degrees(4, 2, 4, 1, 2),
        piped(degrees(4, 1, 2, 1, 2), 2, 1),
        piped(degrees(4, 2, 2, 1, 6), 2, 2),
    ] {
        let run = |threads| {
            let mut options = fixture.options();
            options.device = DeviceSpec::Cpu {
                threads_per_rank: Some(threads),
            };
            let trained = fixture.train(&layout, 3, &options);
            (trained.steps, trained.weights)
        };
        let first = run(1);
        assert_eq!(run(1), first, "{layout:?}, run again");
        assert_eq!(run(2), first, "{layout:?}, on two threads");
    }
}

#[test]
fn differential_the_balancing_loss_does_not_depend_on_the_layout() {
    let fixture = Fixture::load("mixtral");
    let mut options = fixture.options();
    options.balancing.aux_loss_coef = 0.5;
    let single = fixture.train(&degrees(1, 1, 1, 1, 4), 3, &options);
    let plain = fixture.train(&degrees(1, 1, 1, 1, 4), 3, &fixture.options());
    // Balanced routing gives the coefficient for each of the two layers, and nothing gives less.
    assert!(single.steps[0].aux_loss > 1.0 && single.steps[0].aux_loss < 2.0);
    assert!(single.steps[2].grad_norm != plain.steps[2].grad_norm);
    for layout in [
        degrees(2, 1, 2, 1, 4),
        degrees(4, 2, 4, 1, 4),
        degrees(4, 4, 1, 2, 4),
        piped(degrees(2, 1, 1, 1, 4), 2, 1),
        piped(degrees(4, 2, 2, 1, 4), 2, 1),
    ] {
        let trained = fixture.train(&layout, 3, &options);
        for (found, expected) in trained.steps.iter().zip(&single.steps) {
            assert_close(found.loss, expected.loss, 1e-5, "loss");
            assert_close(found.aux_loss, expected.aux_loss, 1e-5, "aux_loss");
            assert_close(found.grad_norm, expected.grad_norm, 1e-4, "grad_norm");
        }
    }
}

#[test]
fn law_every_assignment_is_counted() {
    let fixture = Fixture::load("qwen3_moe");
    let tokens = fixture.golden.seq_len * fixture.golden.global_batch;
    let single = fixture.train(&degrees(1, 1, 1, 1, 6), 1, &fixture.options());
    let folded = fixture.train(&degrees(8, 2, 4, 2, 1), 1, &fixture.options());
    let stages = piped(degrees(6, 2, 2, 1, 1), 3, 1);
    let stages = fixture.train(&stages, 1, &fixture.options());
    for trained in [&single, &folded, &stages] {
        let load = &trained.steps[0].expert_load;
        assert_eq!(load.len(), 2);
        for layer in load {
            assert_eq!(layer.len(), 8);
            assert_eq!(layer.iter().sum::<u64>(), 3 * tokens);
        }
    }
    assert_eq!(single.steps[0].expert_load, folded.steps[0].expert_load);
    assert_eq!(single.steps[0].expert_load, stages.steps[0].expert_load);
}

#[test]
fn golden_a_rank_takes_its_samples_in_order() {
    let fixture = Fixture::load("mixtral");
    let layout = fixture.layout(&degrees(2, 1, 1, 1, 3));
    let taken = World::threads(2)
        .run(|rank| {
            let cx = Context::join(rank, &layout, Device::cpu(1), rank.recorder());
            train::microbatches(&fixture.samples, &cx, &fixture.batch(), 1)
        })
        .expect("ranks run");
    let first_of = |rank: usize, microbatch: usize| taken[rank][microbatch].ids[..16].to_vec();
    let sample = |i| fixture.samples.get(i).expect("enough").inputs;
    assert_eq!(taken[0].len(), 4);
    assert_eq!(first_of(0, 0), sample(24));
    assert_eq!(first_of(1, 0), sample(27));
    assert_eq!(first_of(0, 1), sample(30));
    assert_eq!(first_of(1, 3), sample(45));
}
