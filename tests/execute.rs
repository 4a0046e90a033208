//! `execute` from the outside: a run from files to files, and every bad input refused with exit code 2
//! and a message that says what was found and what would work.

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod program;
    pub(crate) mod tiny;
}

use std::fs;
use std::path::{Path, PathBuf};

use common::json;
use common::outcome::run;
use common::program::program;
use common::tiny::{Folder, fixture, tokens};
use moefold_profiles::run::RunSummary;
use serde_json::Value;

/// A folder with a plan for the tiny Mixtral on four ranks, folded.
struct Bench(Folder);

impl Bench {
    fn new() -> Self {
        Self::of("tp=2,ep=4,etp=1,mbs=1")
    }

    fn of(layout: &str) -> Self {
        Self::with(layout, &[])
    }

    fn with(layout: &str, more: &[&str]) -> Self {
        let folder = Folder::new();
        folder.plan("plan.json", "4", "24", Some(layout), more);
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path(name)
    }

    fn execute(&self, rest: &[&str]) -> (i32, String, String) {
        let plan = self.path("plan.json");
        run(&mut program(&[&["execute", &plan], rest].concat()))
    }

    /// Expects a refusal that says all of `expected`, and nothing in the run directory.
    fn refused(&self, rest: &[&str], expected: &[&str]) {
        let out = self.path("refused");
        let (code, _, errors) = self.execute(&[rest, &["--out", &out]].concat());
        assert_eq!(code, 2, "{rest:?}: {errors}");
        for part in expected {
            assert!(errors.contains(part), "{rest:?} lacks {part:?}: {errors}");
        }
        assert!(!errors.contains("panicked"), "{errors}");
        let left = fs::read_dir(&out).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{rest:?} left files in the way of the next try");
    }
}

#[test]
fn oracle_a_folded_run_from_files_gives_the_losses_of_transformers() {
    let bench = Bench::new();
    let (out, saved) = (bench.path("run"), bench.path("saved"));
    let data = tokens();
    let golden = json::read(fixture("mixtral/golden.json"));
    let lr = golden["lr"].to_string();
    let (code, answer, errors) = bench.execute(&[
        "--data",
        &data,
        "--init",
        &fixture("mixtral"),
        "--no-shuffle",
        "--steps",
        "3",
        "--lr",
        &lr,
        "--out",
        &out,
        "--save-hf",
        &saved,
        "--json",
    ]);
    assert_eq!(code, 0, "{errors}");
    let answer = json::document(&answer);
    let summary: RunSummary = serde_json::from_value(answer["summary"].clone()).expect("typed");
    assert_eq!((summary.steps, summary.peak_by_rank.len()), (3, 4));

    let steps = bench.0.steps("run");
    assert_eq!(steps.len(), 3);
    for (step, expected) in steps.iter().zip(golden["steps"].as_array().expect("steps")) {
        for (found, expected) in [
            (step.loss, &expected["loss"]),
            (step.grad_norm, &expected["grad_norm"]),
        ] {
            let expected = expected.as_f64().expect("a number");
            assert!(
                (found - expected).abs() <= 1e-4 * expected.abs(),
                "step {}: {found} is not {expected}",
                step.step
            );
        }
    }
    for name in ["plan.json", "env.json", "trace.json", "summary.json"] {
        json::read(Path::new(&out).join(name));
    }

    // What was saved starts the next run, as a model and as weights.
    let next = bench.path("next");
    let rest = [
        "--data", &data, "--init", &saved, "--steps", "1", "--out", &next,
    ];
    let (code, _, errors) = bench.execute(&rest);
    assert_eq!(code, 0, "{errors}");
    let (code, shown, errors) = run(&mut program(&["models", &saved, "--json"]));
    assert_eq!(code, 0, "{errors}");
    assert!(shown.contains("\"total_params\""), "{shown}");

    // A finished run is not overwritten.
    let (code, _, errors) = bench.execute(&["--data", &data, "--out", &out, "--steps", "1"]);
    assert_eq!(code, 2);
    assert!(errors.contains("is not empty"), "{errors}");
}

#[test]
fn a_blend_is_trained_on_and_what_is_held_back_is_validated_on() {
    let bench = Bench::new();
    let (text, set) = (bench.path("text.jsonl"), bench.path("set"));
    let document = |i: usize| format!("{{\"text\": \"{}\"}}\n", "abc def ".repeat(i % 7 + 3));
    fs::write(&text, (0..40).map(document).collect::<String>()).expect("writes");
    let (code, _, errors) = run(&mut program(&["data", "prepare", &text, "--out", &set]));
    assert_eq!(code, 0, "{errors}");
    let out = bench.path("run");
    let blend = ["--data", "3", &set, "1", &set];
    let held = [
        "--split",
        "80,20",
        "--eval-interval",
        "2",
        "--eval-iters",
        "2",
    ];
    let rest = ["--steps", "3", "--out", &out];
    let (code, answer, errors) = bench.execute(&[&blend[..], &held, &rest].concat());
    assert_eq!(code, 0, "{errors}");
    let steps = bench.0.steps("run");
    let found: Vec<bool> = steps.iter().map(|step| step.validation.is_some()).collect();
    assert_eq!(found, [false, true, true]);
    let last = steps[2].validation.expect("after the last step");
    assert!((last.perplexity.ln() - last.loss).abs() < 1e-9 && last.loss < 6.0);
    assert!(last.samples > 0);
    let summary = json::read(Path::new(&out).join("summary.json"));
    assert_eq!(summary["validation"]["loss"], last.loss);
    let shown = format!(", validation loss {:.4} over", last.loss);
    assert!(answer.contains(&shown), "{answer}");

    let too_few = ["--split", "99999,1"];
    bench.refused(
        &[&blend[..], &too_few].concat(),
        &["40 documents", "--split"],
    );
    let nothing = ["--eval-iters", "2"];
    bench.refused(
        &[&blend[..], &nothing].concat(),
        &["--eval-iters", "--valid-data"],
    );
    bench.refused(
        &["--data", "3", &set, "x", &set],
        &["a weight before every prefix"],
    );
}

#[test]
fn documents_of_a_sequence_are_kept_apart_and_a_run_goes_on_only_with_the_same() {
    let bench = Bench::new();
    let (text, set) = (bench.path("text.jsonl"), bench.path("set"));
    let document = |i: usize| format!("{{\"text\": \"{}\"}}\n", "abc def ".repeat(i % 3 + 1));
    fs::write(&text, (0..80).map(document).collect::<String>()).expect("writes");
    let prepare = ["data", "prepare", &text, "--eod", "0", "--out", &set];
    let (code, _, errors) = run(&mut program(&prepare));
    assert_eq!(code, 0, "{errors}");
    let loss = |name: &str, rest: &[&str]| {
        let out = bench.path(name);
        let all = [&["--data", &set, "--steps", "2", "--save-every", "2"], rest];
        let (code, _, errors) = bench.execute(&[&all.concat()[..], &["--out", &out]].concat());
        assert_eq!(code, 0, "{errors}");
        bench.0.steps(name)[1].loss
    };
    let apart = [
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
    ];
    let by_data = loss("by-data", &apart);
    let by_token = loss("by-token", &[&apart[..], &["--eod-token", "0"]].concat());
    assert_eq!(by_data.to_bits(), by_token.to_bits());
    let alone = apart.map(|flag| loss(flag, &[flag]));
    let whole = loss("whole", &[]);
    for one in alone {
        assert!(one != whole && one != by_data, "{one} {whole} {by_data}");
    }

    let data = ["--data", &set];
    let all = |rest: &[&'static str]| [&data[..], rest].concat();
    bench.refused(
        &all(&["--eod-token", "0"]),
        &["--eod-token 0", "--reset-position-ids"],
    );
    bench.refused(
        &all(&["--eod-mask-loss", "--eod-token", "300"]),
        &["--eod-token 300", "an id below"],
    );
    let run_dir = bench.path("by-data");
    bench.refused(
        &[&data[..], &["--resume", &run_dir, "--steps", "3"]].concat(),
        &["was trained otherwise", "packing differs"],
    );
}

#[test]
fn documents_are_refused_where_keys_of_cut_sequences_travel() {
    let bench = Bench::of("tp=1,cp=2,ep=2,etp=1,mbs=1");
    let data = tokens();
    let data = ["--data", &data];
    let flag = "--reset-attention-mask";
    let said = [flag, "cp=2", "use \"a2a\" or cp=1"];
    bench.refused(&[&data[..], &[flag]].concat(), &said);
    bench.refused(&["--dry-run", flag], &said);
    let out = bench.path("masked");
    let masked = [
        "--eod-mask-loss",
        "--reset-position-ids",
        "--steps",
        "1",
        "--out",
        &out,
    ];
    let (code, _, errors) = bench.execute(&[&data[..], &masked].concat());
    assert_eq!(code, 0, "{errors}");
}

#[test]
fn weights_are_converted_in_the_memory_that_was_said_and_trained_on() {
    let bench = Bench::new();
    let (data, from) = (tokens(), fixture("mixtral"));
    let (made, back) = (bench.path("made"), bench.path("back"));
    let convert =
        |from: &str, rest: &[&str]| run(&mut program(&[&["convert", from], rest].concat()));
    for (from, to) in [(&from, &made), (&made, &back)] {
        let (code, answer, errors) = convert(from, &["--out", to, "--json"]);
        assert_eq!(code, 0, "{errors}");
        let answer = json::document(&answer);
        let bytes = |key: &str| answer[key].as_u64().expect("bytes");
        assert!(
            bytes("resident_bytes") <= bytes("planned_bytes"),
            "{answer}"
        );
    }
    let loss = |name: &str, flag: &str, weights: &str| {
        let out = bench.path(name);
        let begin = [
            "--data", &data, flag, weights, "--steps", "1", "--out", &out,
        ];
        let (code, _, errors) = bench.execute(&begin);
        assert_eq!(code, 0, "{errors}");
        bench.0.steps(name)[0].loss
    };
    let expected = loss("first", "--init", &from);
    assert_eq!(loss("second", "--resume", &made), expected);
    assert_eq!(loss("third", "--init", &back), expected);

    let new = bench.path("new");
    for (from, rest, expected) in [
        (&made, &["--out", &back][..], "back: is not empty"),
        (
            &made,
            &["--out", &new, "--to", "checkpoint"],
            "is a checkpoint already",
        ),
        (
            &made,
            &["--out", &new, "--upcycle", "4"],
            "has no config.json",
        ),
        (
            &from,
            &["--out", &new, "--upcycle", "4"],
            "model_type mixtral",
        ),
        (
            &from,
            &["--out", &new, "--memory-mib", "1"],
            "and may have 1 MiB",
        ),
        (&from, &["--out", &new, "--topk", "2"], "--upcycle"),
    ] {
        let (code, _, errors) = convert(from, rest);
        assert_eq!(code, 2, "{rest:?}: {errors}");
        assert!(errors.contains(expected), "{rest:?}: {errors}");
        assert!(!Path::new(&new).exists(), "{rest:?} left files");
    }
}

/// A copy of the tokens of a fixture.
fn copied_tokens(bench: &Bench) -> PathBuf {
    for ending in ["bin", "idx"] {
        let from = format!("{}.{ending}", tokens());
        fs::copy(from, bench.path(&format!("tokens.{ending}"))).expect("copies");
    }
    PathBuf::from(bench.path("tokens"))
}

#[test]
fn bad_data_is_refused() {
    let bench = Bench::new();
    let prefix = copied_tokens(&bench).display().to_string();
    bench.refused(&["--data", "no-such"], &["no-such: is no indexed dataset"]);
    bench.refused(&["--text", "no-such.txt"], &["no-such.txt: could not read"]);
    let text = bench.path("text.txt");
    fs::write(&text, "abc".repeat(40) + "\u{fe}").expect("writes");
    bench.refused(
        &["--text", &text],
        &["text.txt: token id 195 at position 120", "below 128"],
    );
    fs::write(&text, "too short").expect("writes");
    bench.refused(&["--text", &text], &["holds 9 tokens", "needs 17"]);
    bench.refused(
        &["--text", &text, "--tokenizer", "gpt2"],
        &["expected byte, o200k, cl100k"],
    );
    let bin = fs::read(format!("{prefix}.bin")).expect("there");
    fs::write(format!("{prefix}.bin"), &bin[1..]).expect("writes");
    bench.refused(&["--data", &prefix], &["tokens.bin: holds", "expected"]);
    let idx = fs::read(format!("{prefix}.idx")).expect("there");
    fs::write(format!("{prefix}.idx"), &idx[..40]).expect("writes");
    bench.refused(
        &["--data", &prefix],
        &["tokens.idx: holds 40 bytes; expected"],
    );
}

#[test]
fn a_run_that_diverges_stops_before_the_step_that_would_spoil_its_weights() {
    let bench = Bench::new();
    let data = tokens();
    let run = bench.path("run");
    let arguments = [
        "--data", &data, "--lr", "1e30", "--steps", "8", "--out", &run,
    ];
    let (code, answer, errors) = bench.execute(&arguments);
    assert_eq!(code, 1, "{errors}");
    assert!(
        answer.is_empty() || !answer.contains("final loss"),
        "{answer}"
    );
    assert!(
        errors.contains("diverged") && errors.contains("learning rate"),
        "{errors}"
    );
    let steps = bench.0.steps("run");
    assert!((1..8).contains(&steps.len()), "{} steps", steps.len());
    assert!(steps.iter().all(|step| step.loss.is_finite()));
}

#[test]
fn bad_weights_are_refused() {
    let bench = Bench::new();
    let data = tokens();
    let init = |folder: &str, expected: &[&str]| {
        bench.refused(&["--data", &data, "--init", folder], expected);
    };
    init(&bench.path("nowhere"), &["nowhere: does not exist"]);
    init(&fixture("."), &["is not a checkpoint: it has neither"]);
    init(
        &fixture("qwen3_moe"),
        &[
            "missing: model.layers.0.block_sparse_moe",
            "misshaped: lm_head.weight is",
            "unexpected",
        ],
    );
    let folder = bench.path("cut");
    fs::create_dir(&folder).expect("creates");
    let whole = fs::read(fixture("mixtral/model.safetensors")).expect("there");
    fs::write(
        format!("{folder}/model.safetensors"),
        &whole[..whole.len() / 2],
    )
    .expect("writes");
    init(&folder, &["model.safetensors: holds", "by its header"]);
}

/// A pipeline from files to files: the losses of the reference, and a dry run of each of its ranks that says
/// what a run takes.
#[test]
fn oracle_a_pipeline_gives_the_losses_of_transformers() {
    let losses = ["1f1b", "zb-h1"].map(check_pipeline);
    assert_eq!(losses[0], losses[1], "the same bits");
}

/// Plans a pipeline under a schedule, runs it and walks two of its ranks; the losses.
fn check_pipeline(schedule: &str) -> Vec<f64> {
    let bench = Bench::with("tp=1,pp=2,ep=2,etp=1,mbs=2", &["--schedule", schedule]);
    let (out, data) = (bench.path("run"), tokens());
    let golden = json::read(fixture("mixtral/golden.json"));
    let lr = golden["lr"].to_string();
    let (code, _, errors) = bench.execute(&[
        "--data",
        &data,
        "--init",
        &fixture("mixtral"),
        "--no-shuffle",
        "--steps",
        "3",
        "--lr",
        &lr,
        "--out",
        &out,
    ]);
    assert_eq!(code, 0, "{errors}");
    let steps = bench.0.steps("run");
    for (step, expected) in steps.iter().zip(golden["steps"].as_array().expect("steps")) {
        let expected = expected["loss"].as_f64().expect("a number");
        assert!((step.loss / expected - 1.0).abs() <= 1e-4, "{}", step.loss);
        assert_eq!(step.expert_load.len(), 2);
    }
    let summary = json::read(Path::new(&out).join("summary.json"));
    assert!(
        summary["time_s"]["pp_comm"].as_f64() > Some(0.0),
        "{summary}"
    );

    let plan = json::read(bench.path("plan.json"));
    assert_eq!(plan["pipeline"]["schedule"], schedule);
    assert_eq!(plan["pipeline"]["stages"], serde_json::json!([[0], [1]]));
    let path = bench.path("plan.json");
    for (rank, stage) in [("0", 0), ("3", 1)] {
        let dry = bench.path(&format!("dry-{rank}"));
        let walk = ["--dry-run", "--rank", rank, "--out", &dry, "--json"];
        let (code, printed, errors) = run(&mut program(&[&["execute", &path], &walk[..]].concat()));
        assert_eq!(code, 0, "{errors}");
        let walk: Value = serde_json::from_str(&printed).expect("JSON");
        let predicted = &plan["predicted"]["memory_gib_by_pp_rank"][stage];
        let found = walk["peak_bytes"].as_f64().expect("bytes") / f64::from(1 << 30);
        let predicted = predicted.as_f64().expect("GiB");
        assert!(
            (found / predicted - 1.0).abs() < 1e-9,
            "{found} {predicted}"
        );
        let calls = walk["collectives"].as_array().expect("a list").iter();
        let sent: u64 = calls
            .filter(|calls| calls["kind"] == "send_recv")
            .filter_map(|calls| calls["calls"].as_u64())
            .sum();
        // Both directions of every microbatch.
        assert_eq!(
            sent,
            2 * plan["layout"]["microbatches"].as_u64().expect("a count")
        );
        // The step is about as long as the plan says, waits for the other stage among it.
        let ratio =
            walk["step_s"].as_f64().expect("s") / plan["predicted"]["step_s"].as_f64().expect("s");
        assert!((0.5..1.5).contains(&ratio), "{ratio}");
    }
    steps.iter().map(|step| step.loss).collect()
}

#[test]
fn plans_that_cannot_run_are_refused() {
    let bench = Bench::new();
    let data = tokens();
    let good = fs::read_to_string(bench.path("plan.json")).expect("there");
    let edited = |edit: fn(&mut Value), expected: &[&str]| {
        let mut plan = json::document(&good);
        edit(&mut plan);
        fs::write(bench.path("plan.json"), plan.to_string()).expect("writes");
        bench.refused(&["--data", &data], expected);
    };
    edited(
        |plan| plan["version"] = 99.into(),
        &["plan.json", "version 99"],
    );
    edited(|plan| plan["layot"] = 1.into(), &["unknown key `layot`"]);
    edited(
        |plan| plan["layout"]["tp"] = 3.into(),
        &["plan.json", "tp = 3"],
    );
    edited(|plan| plan["recompute"] = "fool".into(), &["plan.json"]);
    edited(
        |plan| plan["precision"] = "bf16".into(),
        &["precision", "fp32"],
    );
    edited(
        |plan| plan["dispatcher"] = "deepep".into(),
        &["alltoall", "allgather"],
    );
    fs::write(bench.path("plan.json"), &good[..good.len() / 2]).expect("writes");
    bench.refused(&["--data", &data], &["plan.json"]);
}

/// The whole step on one rank, of a plan that this machine could not run.
#[test]
fn a_dry_run_needs_no_devices_data_or_weights() {
    let folder = Folder::new();
    let plan = folder.path("plan.json");
    let made = ["--seq-len", "4096", "--global-batch", "256", "--out", &plan];
    for (stack, classes) in [("megatron", "bf16"), ("moefold", "bf16")] {
        let job = [
            "plan",
            "--model",
            "mixtral-8x22b",
            "--cluster",
            "dgx-h100",
            "--gpus",
            "128",
        ];
        // Masks of documents are for whole sequences.
        let layout = ["--layout", "cp=1"];
        let choice = ["--stack", stack, "--precision", classes];
        let (code, _, errors) = run(&mut program(&[&job[..], &choice, &layout, &made].concat()));
        assert_eq!(code, 0, "{errors}");
        if stack == "megatron" {
            let packed = ["execute", &plan, "--dry-run", "--eod-mask-loss"];
            let (code, _, errors) = run(&mut program(&packed));
            assert!(code == 2 && errors.contains("--eod-mask-loss"), "{errors}");
        }
        let out = folder.path("dry");
        let planned = json::read(&plan);
        let stages = planned["predicted"]["memory_gib_by_pp_rank"].as_array();
        let stages = stages.expect("a number each").iter();
        let stages: Vec<f64> = stages.filter_map(Value::as_f64).collect();
        let most = (0..stages.len()).max_by(|&a, &b| stages[a].total_cmp(&stages[b]));
        // One of the fullest pipeline rank.
        let rank = most.expect("some") * (128 / stages.len()) + 3;
        let rank = rank.to_string();
        let walk = [
            "execute",
            &plan,
            "--dry-run",
            "--rank",
            &rank,
            "--out",
            &out,
            "--json",
        ];
        let (code, printed, errors) = run(&mut program(&walk));
        assert_eq!(code, 0, "{errors}");
        let walk: Value = serde_json::from_str(&printed).expect("JSON");
        let memory = &planned["predicted"]["memory_gib"];
        let gib = |bytes: &Value| bytes.as_f64().expect("bytes") / f64::from(1 << 30);
        let tensors: f64 = memory
            .as_object()
            .expect("classes")
            .iter()
            .filter(|(class, _)| *class != "overhead")
            .map(|(_, gib)| gib.as_f64().expect("GiB"))
            .sum();
        assert!(
            (gib(&walk["peak_bytes"]) - tensors).abs() < 1e-6,
            "{stack}: {walk}"
        );
        assert!(walk["host_waits"].as_u64() > Some(0) && walk["step_s"].as_f64() > Some(1.0));
        let kinds: Vec<&Value> = walk["collectives"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|calls| &calls["kind"])
            .collect();
        assert!(kinds.contains(&&Value::from("all_to_all")), "{kinds:?}");
        let trace = json::read(format!("{out}/trace.json"));
        let events = trace["traceEvents"].as_array().expect("events");
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        assert!(of("X") > 1000 && of("C") > 100, "{} {}", of("X"), of("C"));
        assert!(
            events
                .iter()
                .any(|event| event["args"]["key"]["op"].is_object())
        );
    }
    let refused = |rest: &[&str], said: &str| {
        let walk = [&["execute", &plan, "--dry-run"], rest].concat();
        let (code, _, errors) = run(&mut program(&walk));
        assert!(
            code == 2 && errors.contains(said),
            "{rest:?}: {code} {errors}"
        );
    };
    refused(&["--rank", "128"], "0 to 127");
    // The last plan is of the stack moefold: whole sequences, and a few integers a token beside.
    let out = folder.path("packed");
    let packed = ["--reset-attention-mask", "--out", &out, "--json"];
    let walk = [&["execute", &plan, "--dry-run"], &packed[..]].concat();
    let (code, walk, errors) = run(&mut program(&walk));
    assert_eq!(code, 0, "{errors}");
    let peak = |walk: &str| json::document(walk)["peak_bytes"].as_u64();
    let plain = [&["execute", &plan, "--dry-run"], &packed[1..]].concat();
    let (code, plain, errors) = run(&mut program(&plain));
    assert_eq!(code, 0, "{errors}");
    assert!(peak(&walk) > peak(&plain), "{walk} {plain}");
    refused(&["--text", "book.txt"], "--text");
}

/// As a profile a run of one expert rank says nothing of exchanges of tokens, but how experts are loaded; one with exchanges has
/// what ranks wait at them.
#[test]
fn a_run_that_exchanges_no_tokens_lends_its_loads_as_a_profile() {
    let assumed = |layout: &str, more: &[&str]| {
        let bench = Bench::of(layout);
        let (data, out) = (tokens(), bench.path("run"));
        let (code, _, errors) = bench.execute(&["--data", &data, "--steps", "2", "--out", &out]);
        assert_eq!(code, 0, "{errors}");
        let more = [&["--profile", &out], more].concat();
        let other = Some("tp=2,ep=4,etp=1,mbs=1");
        bench.0.plan("other.json", "4", "24", other, &more);
        json::read(bench.path("other.json"))["predicted"]["routing"]["assumed"].clone()
    };
    let alone = "tp=2,ep=1,etp=1,mbs=1";
    assert_eq!(assumed(alone, &[]), "recorded");
    assert_eq!(assumed(alone, &["--routing", "balanced"]), "balanced");
    assert_eq!(assumed("tp=1,ep=4,etp=1,mbs=1", &[]), "balanced");
}

#[test]
fn a_plan_with_the_routing_of_a_run_says_its_peak_and_runs() {
    let bench = Bench::new();
    let (data, out) = (tokens(), bench.path("run"));
    let (code, shown, errors) = bench.execute(&["--data", &data, "--steps", "4", "--out", &out]);
    assert_eq!(code, 0, "{errors}");
    for part in [
        "memory of the fullest rank",
        "kept for reuse",
        "activations",
    ] {
        assert!(shown.contains(part), "{part:?} is not in {shown}");
    }
    let layout = "tp=2,ep=4,etp=1,mbs=1";
    bench
        .0
        .plan("routed.json", "4", "24", Some(layout), &["--routing", &out]);
    let predicted = |name: &str| json::read(bench.path(name))["predicted"].clone();
    let (even, routed) = (predicted("plan.json"), predicted("routed.json"));
    assert_eq!(even["routing"]["assumed"], "balanced");
    let (was, routing) = (&even["peak_gib"], &routed["routing"]);
    assert_eq!(
        (&routing["assumed"], &routing["source"]),
        (&"recorded".into(), &out.clone().into())
    );
    assert_eq!(&routing["balanced"]["peak_gib"], was);

    let summary: RunSummary =
        serde_json::from_value(json::read(Path::new(&out).join("summary.json"))).expect("typed");
    let peaks = summary
        .peak_by_rank
        .iter()
        .map(|peak| peak.bytes.total().gib());
    let measured = peaks.fold(0.0, f64::max);
    let gib = routed["peak_gib"].as_f64().expect("a number");
    assert!((gib / measured - 1.0).abs() < 0.03, "{gib} of {measured}");
    assert!(
        summary
            .peak_by_rank
            .iter()
            .all(|peak| peak.resident >= peak.bytes.total())
    );
    assert!(
        summary.host.is_none_or(|host| host.threads >= 4),
        "{:?}",
        summary.host
    );

    // It is walked and run as any other.
    let plan = bench.path("routed.json");
    let walk = [
        "execute",
        &plan,
        "--dry-run",
        "--json",
        "--out",
        &bench.path("walk"),
    ];
    let (code, walked, errors) = run(&mut program(&walk));
    assert_eq!(code, 0, "{errors}");
    let walked = json::document(&walked)["peak_bytes"]
        .as_u64()
        .expect("bytes");
    let bytes = gib * f64::from(1 << 30);
    assert!(
        (walked as f64 / bytes - 1.0).abs() < 0.01,
        "{walked} of {bytes}"
    );
    let again = [
        "execute",
        &plan,
        "--data",
        &data,
        "--steps",
        "1",
        "--out",
        &bench.path("again"),
    ];
    let (code, _, errors) = run(&mut program(&again));
    assert_eq!(code, 0, "{errors}");
}

/// What training measured is in the run, and written beside it where that is asked for; both price the next plan.
#[test]
fn a_run_is_a_profile_and_prices_the_next_plan() {
    let bench = Bench::new();
    let (data, out, beside) = (tokens(), bench.path("run"), bench.path("profile"));
    let rest = [
        "--data",
        &data,
        "--steps",
        "4",
        "--out",
        &out,
        "--profile-out",
        &beside,
    ];
    let (code, _, errors) = bench.execute(&rest);
    assert_eq!(code, 0, "{errors}");
    let [own, written] = [&out, &beside].map(|directory| {
        let path = Path::new(directory).join("profile.json");
        fs::read(path).expect("a profile")
    });
    assert!(own == written, "the two differ");
    let layout = Some("tp=2,ep=4,etp=1,mbs=1");
    let measured = |file: &str, more: &[&str]| {
        bench.0.plan(file, "4", "24", layout, more);
        let plan = json::read(bench.path(file));
        let confidence = &plan["predicted"]["confidence"];
        confidence["measured"].as_f64().expect("a share")
    };
    assert_eq!(measured("bare.json", &[]), 0.0);
    let of_run = measured("again.json", &["--profile", &out]);
    assert!(of_run > 0.5, "{of_run}");
    assert_eq!(measured("beside.json", &["--profile", &beside]), of_run);
}

/// Planned, run and walked: the same bytes on the device and on the host, and the losses of a run without.
#[test]
fn a_plan_that_offloads_runs_as_it_says() {
    let bench = Bench::new();
    let layout = "tp=1,pp=2,ep=2,etp=1,mbs=1";
    let modules = [
        "--offload",
        "core_attn,moe_act,mlp_norm",
        "--recompute",
        "layernorm",
        "--schedule",
        "1f1b",
    ];
    bench.0.plan("away.json", "4", "24", Some(layout), &modules);
    bench
        .0
        .plan("plan.json", "4", "24", Some(layout), &modules[2..]);
    let plan = json::read(bench.path("away.json"));
    let expected = ["core_attn", "mlp_norm", "moe_act"].map(Value::from);
    assert_eq!(plan["offload"], Value::from(expected.to_vec()));
    let gib = |value: &Value| value.as_f64().expect("GiB");
    let [away, stays] = ["away.json", "plan.json"].map(|name| {
        let plan = json::read(bench.path(name));
        gib(&plan["predicted"]["peak_gib"])
    });
    assert!(away < stays, "{away} of {stays}");

    let data = tokens();
    let run_of = |name: &str| {
        let out = bench.path(&format!("run of {name}"));
        let (plan, rest) = (
            bench.path(name),
            ["--data", &data, "--steps", "2", "--out", &out],
        );
        let (code, _, errors) = run(&mut program(&[&["execute", &plan], &rest[..]].concat()));
        assert_eq!(code, 0, "{errors}");
        let losses: Vec<f64> = (bench.0.steps(&format!("run of {name}")).iter())
            .map(|step| step.loss)
            .collect();
        (losses, json::read(Path::new(&out).join("summary.json")))
    };
    let ((losses, summary), (plain, _)) = (run_of("away.json"), run_of("plan.json"));
    assert_eq!(losses, plain);
    let summary: RunSummary = serde_json::from_value(summary).expect("typed");
    let on_host = summary
        .peak_by_rank
        .iter()
        .filter_map(|peak| peak.host_bytes);
    let on_host = on_host.max().expect("ranks").gib();
    // Routing is the run's own, and gate and up are of as many rows.
    let planned = gib(&plan["predicted"]["host_gib"]);
    assert!(
        (on_host / planned - 1.0).abs() < 0.5,
        "{on_host} of {planned}"
    );

    let walk = |more: &[&str]| {
        let (plan, out) = (bench.path("away.json"), bench.path("walk"));
        let words = ["execute", &plan, "--dry-run", "--out", &out];
        run(&mut program(&[&words[..], more].concat()))
    };
    let on_host = |rank: &str| {
        let (code, walked, errors) = walk(&["--json", "--rank", rank]);
        assert_eq!(code, 0, "{errors}");
        let bytes = &json::document(&walked)["host_bytes"];
        bytes.as_f64().expect("bytes") / f64::from(1 << 30)
    };
    // Of the pipeline rank that has more there.
    let walked = on_host("0").max(on_host("2"));
    assert!((walked - planned).abs() < 1e-9, "{walked} of {planned}");
    let (_, shown, _) = walk(&[]);
    assert!(shown.contains("on the host"), "{shown}");
}

#[test]
fn routing_of_another_model_and_a_folder_without_a_run_are_refused() {
    let folder = Folder::new();
    let histogram = folder.path("histogram.json");
    fs::write(
        &histogram,
        "[[1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 1, 1, 1, 1, 1]]",
    )
    .expect("writes");
    let refused = |routing: &str, expected: [&str; 2]| {
        let words = [
            "plan",
            "--model",
            "mixtral-8x22b",
            "--cluster",
            "dgx-h100",
            "--gpus",
            "128",
            "--seq-len",
            "4096",
            "--global-batch",
            "256",
            "--routing",
            routing,
        ];
        let (code, _, errors) = run(&mut program(&words));
        assert_eq!(code, 2, "{errors}");
        for part in expected {
            assert!(errors.contains(part), "{part:?} is not in {errors}");
        }
    };
    refused(&histogram, ["2 lists", "or 56, one for each MoE layer"]);
    let empty = folder.path("nothing");
    fs::create_dir(&empty).expect("a folder");
    refused(&empty, ["nothing", "steps.jsonl"]);
}
