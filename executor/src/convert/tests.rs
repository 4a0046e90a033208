//! Conversions against what they began with, and upcycled models against the dense ones.

use std::path::PathBuf;

use moefold_planner::layout::Batch;
use moefold_planner::model::Mixer;
use moefold_planner::plan::Plan;

use super::*;
use crate::data::{Order, Samples, TokenStream};
use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::options::{Init, MTP_LOSS_SCALING_FACTOR, Resumed, TrainOptions};
use crate::train::{self, Trained};
use crate::unpriced::planned;

const ROOM: Bytes = Bytes(1 << 40);

fn fixture(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    fixtures.join(name)
}

/// Asserts that two folders of `model` hold the same bits.
fn same(model: &Model, one: &Path, other: &Path) {
    let tensors = global_tensors(model);
    let [one, other] = [one, other].map(|dir| HuggingFace::open(dir, &tensors).expect("complete"));
    for tensor in &tensors {
        let [one, other] =
            [&one, &other].map(|folder| folder.read(&tensor.whole()).expect("reads"));
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&one), bits(&other), "{}", tensor.name);
    }
}

#[test]
fn law_weights_come_back_as_they_were_in_blocks_and_files_of_any_size() {
    for name in ["mixtral", "deepseek_v3", "qwen3_tied", "gpt_oss"] {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        let there = Conversion::open(&fixture(name), None).expect("opens");
        let whole = there.host(ROOM).expect("fits");
        // A row of the widest tensor, and not a byte more.
        let row = there
            .tensors
            .iter()
            .map(|t| t.matrix()[1])
            .max()
            .expect("tensors");
        let narrow = HostPlan {
            elements: row,
            ..whole
        };
        assert!(whole.elements > row, "{name} has but one row");
        let written = there.to_checkpoint(&at("run"), narrow).expect("writes");
        assert_eq!(written.dir, at("run/checkpoints/step-0"));
        let back = Conversion::open(&at("run"), None).expect("opens");
        assert!(back.found().is_some());
        assert_eq!(back.model(), there.model());
        back.to_hugging_face(&at("one"), whole).expect("writes");
        same(there.model(), &fixture(name), &at("one"));
        back.to_hugging_face_in(&at("many"), narrow, 4096)
            .expect("writes");
        same(there.model(), &fixture(name), &at("many"));
        assert!(at("many/model.safetensors.index.json").is_file());
        // Several files are read as one is.
        let again = Conversion::open(&at("many"), None).expect("opens");
        again.to_checkpoint(&at("again"), whole).expect("writes");
        let index = |run: &str| Index::load(&at(run).join("checkpoints/step-0")).expect("an index");
        assert_eq!(index("again").files, index("run").files);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_written_over() {
    let dir = tempfile::tempdir().expect("a folder");
    let there = Conversion::open(&fixture("mixtral"), None).expect("opens");
    let refused = there.host(Bytes(1 << 20)).expect_err("a MiB").to_string();
    assert!(refused.contains("and may have 1 MiB"), "{refused}");
    let host = there.host(ROOM).expect("fits");
    let tight = there.host(Bytes(host.peak.0 - 8)).expect("fewer rows");
    assert!(tight.elements < host.elements && tight.peak < host.peak);
    std::fs::write(dir.path().join("something"), "").expect("writes");
    for refused in [
        there
            .to_hugging_face(dir.path(), host)
            .expect_err("not empty"),
        there
            .to_checkpoint(dir.path(), host)
            .expect_err("not empty"),
    ] {
        assert!(refused.to_string().contains("is not empty"), "{refused}");
    }
    let refused = |from: &Path, expected: &str| {
        let error = Conversion::open(from, None)
            .expect_err(expected)
            .to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&dir.path().join("none"), "none: does not exist");
    refused(dir.path(), "is no checkpoint");
    std::fs::write(dir.path().join("model.safetensors"), "").expect("writes");
    refused(dir.path(), "has weights and no config.json");
}

/// Trains the model of a folder on one rank with the tokens of a fixture.
fn train(model: &Model, init: Init, tokens: &str, steps: u64) -> Trained {
    let layout = crate::testing::plan().planned.layout;
    let plan = Plan {
        planned: planned(model, layout),
        model: model.clone(),
        ..crate::testing::plan()
    };
    let batch: Batch = plan.request.batch;
    let stream = TokenStream::indexed(&fixture(tokens).join("tokens")).expect("tokens");
    let order = Order::TokenStream;
    let samples = Samples::new(stream, batch.seq_len, model.vocab_size, order).expect("enough");
    let options = TrainOptions {
        steps,
        lr: LearningRate::constant(1e-3),
        adam: AdamOptions::default(),
        balancing: Balancing::default(),
        mtp_loss_scaling_factor: MTP_LOSS_SCALING_FACTOR,
        seed: 1,
        init,
        device: DeviceSpec::Cpu {
            threads_per_rank: Some(1),
        },
        traced_steps: 0..0,
        save: None,
    };
    let trained = train::run(&plan.planned, model, &batch, &options, &samples, &|_| ());
    trained.expect("trains")
}

fn losses(trained: &Trained) -> Vec<u64> {
    trained
        .steps
        .iter()
        .map(|step| step.loss.to_bits())
        .collect()
}

#[test]
fn oracle_a_run_from_a_converted_checkpoint_is_one_from_the_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let there = Conversion::open(&fixture("mixtral"), None).expect("opens");
    let host = there.host(ROOM).expect("fits");
    let written = there.to_checkpoint(dir.path(), host).expect("writes");
    let resumed = Resumed {
        checkpoint: written.dir,
        step: 0,
    };
    let from = |init| train(there.model(), init, "mixtral", 3);
    let folder = from(Init::HuggingFace(fixture("mixtral")));
    assert_eq!(losses(&from(Init::Resume(resumed))), losses(&folder));
}

/// A dense Llama without biases, of random weights.
fn llama(dir: &Path) -> Model {
    let mut model = hf::read(&fixture("llama")).expect("a fixture");
    for layer in &mut model.layers {
        if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
            (gqa.qkv_bias, gqa.out_bias) = (false, false);
        }
    }
    let source = Source::Random { seed: 5, std: 0.2 };
    let blocks = Blocks {
        elements: 1 << 20,
        read: &|region| source.read(region),
    };
    let config = hf_config(&model).expect("a family that is written");
    write_folder(dir, &config, &global_tensors(&model), FILE_BYTES, &blocks).expect("writes");
    hf::read(dir).expect("reads")
}

#[test]
fn oracle_an_upcycled_model_begins_with_the_loss_of_the_dense_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let plain = dir.path().join("llama");
    llama(&plain);
    let folders = [
        (plain, "llama"),
        (fixture("mistral"), "mistral"),
        (fixture("qwen3_tied"), "qwen3_tied"),
    ];
    for (folder, tokens) in &folders {
        let dense = hf::read(folder).expect("reads");
        let from = |model: &Model, dir: &Path| {
            let trained = train(model, Init::HuggingFace(dir.to_owned()), tokens, 2);
            trained
                .steps
                .iter()
                .map(|step| step.loss)
                .collect::<Vec<_>>()
        };
        let expected = from(&dense, folder);
        for (experts, topk, granularity) in [(4, 2, 1), (4, 1, 1), (6, 4, 2), (12, 6, 3)] {
            let upcycle = Upcycle {
                experts,
                topk,
                granularity,
                seed: 3,
            };
            let made = Conversion::open(folder, Some(&upcycle)).expect("opens");
            let to = dir
                .path()
                .join(format!("{tokens}-{experts}-{granularity}-{topk}"));
            let host = made.host(ROOM).expect("fits");
            made.to_hugging_face(&to, host).expect("writes");
            let sparse = hf::read(&to).expect("reads");
            assert_eq!(sparse.moe().expect("experts").experts, experts);
            let found = from(&sparse, &to);
            let error = (found[0] / expected[0] - 1.0).abs();
            assert!(
                error < 1e-5,
                "{upcycle:?}: {} and {}",
                found[0],
                expected[0]
            );
            // It is another model from then on.
            assert_ne!(found[1], expected[1], "{upcycle:?}");
        }
    }
}

#[test]
fn what_cannot_be_upcycled_is_refused_by_flag_and_by_name() {
    let upcycle = Upcycle {
        experts: 4,
        topk: 2,
        granularity: 2,
        seed: 0,
    };
    let refused = |name: &str, upcycle: Upcycle| {
        let refused = Conversion::open(&fixture(name), Some(&upcycle)).expect_err(name);
        assert!(refused.is_bad_request());
        refused.to_string()
    };
    let of = |upcycle| refused("qwen3_tied", upcycle);
    for (upcycle, expected) in [
        (Upcycle { topk: 5, ..upcycle }, "--topk 5: expected 1 to 4"),
        (
            Upcycle { topk: 1, ..upcycle },
            "--topk 1: does not divide by --granularity 2",
        ),
        (
            Upcycle {
                experts: 5,
                ..upcycle
            },
            "--upcycle 5: does not divide",
        ),
        (
            Upcycle {
                experts: 10,
                topk: 5,
                granularity: 5,
                ..upcycle
            },
            "--granularity 5: does not divide 48",
        ),
    ] {
        let text = of(upcycle);
        assert!(text.contains(expected), "{text}");
    }
    let text = refused("mixtral", upcycle);
    assert!(text.contains("model_type mixtral"), "{text}");
    // This one has biases.
    let text = refused("llama", upcycle);
    assert!(
        text.contains("configuration of a mixtral cannot say"),
        "{text}"
    );
}
