//! `moefold gpu-check` where there is no GPU: rehearsed on the CPU, and refused with a reason; and what one gave.

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod program;
}

use common::json;
use common::outcome::run;
use common::program::program;
use serde_json::Value;

#[test]
fn a_rehearsal_runs_every_op_and_writes_both_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().to_str().expect("the path is text");
    let rehearsal = ["gpu-check", "--rehearse", "--small", "--out", out];
    let (code, text, complaint) = run(&mut program(&rehearsal));
    assert_eq!(code, 0, "{text}\n{complaint}");
    assert!(text.contains("all right"), "{text}");
    let document = json::read(folder.path().join("gpu-check.json"));
    let cases = document["cases"].as_array().expect("cases are a list");
    for op in [
        "attention::backward",
        "grouped_gemm::wgrad fc1 skewed",
        "permute::map",
    ] {
        let ran = cases
            .iter()
            .filter(|line| line["case"] == op)
            .any(|line| line["outcome"]["ran"]["outputs"][0]["passes"] == true);
        assert!(ran, "{op} is not among the cases that ran");
    }
    let markdown = std::fs::read_to_string(folder.path().join("gpu-check.md")).expect("written");
    assert!(markdown.contains("| attention::backward"), "{markdown}");

    // Trials: training is right, and what it leaves can be looked at.
    let trials = document["trials"].as_array().expect("trials are a list");
    let verdicts: Vec<(&str, &str)> = trials
        .iter()
        .filter_map(|trial| trial["name"].as_str().zip(trial["verdict"].as_str()))
        .collect();
    let expected = [
        ("curve", "right"),
        ("layouts", "right"),
        ("profile", "right"),
        ("models", "right"),
        ("resume", "right"),
    ];
    assert_eq!(verdicts, expected, "{text}");
    assert_eq!(
        trials[0]["data"]["losses"]["gpu-fp32"]
            .as_array()
            .map(Vec::len),
        Some(6)
    );
    for file in [
        "curve/cpu-fp32/summary.json",
        "profile/quickstart/profile.json",
        "models/quickstart-plan.json",
        "models/quickstart-run/trace.json",
        "models/quickstart-report/report.html",
        "resume/four-ranks-fp32-by-one-rank/steps.jsonl",
    ] {
        assert!(folder.path().join(file).is_file(), "no {file}\n{text}");
    }
    assert!(markdown.contains("## curve: ok"), "{markdown}");
    assert!(markdown.contains("| quickstart"), "{markdown}");
}

#[test]
#[ignore = "takes a minute: trains under every layout that a GPU is checked with"]
fn every_layout_trains_in_a_rehearsal() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().to_str().expect("the path is text");
    let rehearsal = ["gpu-check", "--rehearse", "--only", "layouts", "--out", out];
    let (code, text, complaint) = run(&mut program(&rehearsal));
    assert_eq!(code, 0, "{text}\n{complaint}");
    let document = json::read(folder.path().join("gpu-check.json"));
    let layouts = document["trials"][0]["data"]
        .as_array()
        .expect("layouts are a list");
    assert!(layouts.len() > 20, "{layouts:?}");
}

#[test]
fn a_case_that_hangs_is_killed_and_said_to_have_failed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().to_str().expect("the path is text");
    // No answer can come in no time at all.
    let (code, text, _) = run(&mut program(&[
        "gpu-check",
        "--rehearse",
        "--small",
        "--only",
        "swiglu",
        "--deadline-s",
        "0",
        "--out",
        out,
    ]));
    assert_eq!(code, 1);
    assert!(text.contains("FAILED"), "{text}");
    assert!(text.contains("killed"), "{text}");
}

/// A process that a signal ends takes nothing else with it: the part of the hardware's model, which is
/// the first, and the parts of one op.
#[test]
fn a_part_that_dies_is_reported_and_the_others_run() {
    for dies in ["hardware", "rope"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().to_str().expect("the path is text");
        let arguments = ["gpu-check", "--rehearse", "--small", "--only", "rope,rows"];
        let arguments = [&arguments[..], &["--dies", dies, "--out", out]].concat();
        let (code, _, _) = run(&mut program(&arguments));
        assert_eq!(code, 1);
        let document = json::read(folder.path().join("gpu-check.json"));
        let cases = document["cases"].as_array().expect("cases are a list");
        let (dead, others): (Vec<_>, Vec<_>) = cases.iter().partition(|line| line["case"] == dies);
        assert!(!dead.is_empty(), "{dies} is not among {cases:?}");
        for line in dead {
            let why = line["outcome"]["failed"].as_str().expect("it failed");
            assert!(why.contains("signal"), "{why}");
        }
        let ran = |line: &&Value| line["outcome"]["ran"].is_object();
        assert!(!others.is_empty() && others.iter().all(ran), "{others:?}");
    }
}

#[test]
fn an_op_that_there_is_not_is_a_bad_request() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().to_str().expect("the path is text");
    let arguments = ["gpu-check", "--rehearse", "--only", "grupped", "--out", out];
    let (code, _, complaint) = run(&mut program(&arguments));
    assert_eq!(code, 2);
    assert!(complaint.contains("--only grupped"), "{complaint}");
}

#[test]
fn without_a_gpu_the_command_says_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("results");
    let mut command = program(&["gpu-check", "--device", "63", "--out"]);
    let (code, _, complaint) = run(command.arg(&out));
    assert_eq!(code, 1);
    assert!(
        complaint.starts_with("error: ") && complaint.contains("moefold doctor"),
        "{complaint}"
    );
    assert!(
        !out.exists(),
        "nothing is written where nothing could be checked"
    );
}

/// The step of Qwen3-30B-A3B's first four layers that an H100 took (docs/h100.md), foreseen from nothing and from a
/// profile of the H100, and put together again from the run's own measurements. Memory is tensors and context.
#[test]
fn oracle_a_step_that_an_h100_took() {
    const MEASURED_S: f64 = 0.107_147_85;
    const MEASURED_GIB: f64 = 58.65;
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = json::read(root.join("planner/models/Qwen3-30B-A3B.json"));
    config["num_hidden_layers"] = 4.into();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = folder.path().join("four-layers.json");
    std::fs::write(&model, config.to_string()).expect("the folder is writable");
    for (profile, within) in [(None, 0.15), (Some("profile"), 0.1), (Some("run"), 0.05)] {
        let mut command = program(&["plan", "--json", "--cluster", "dgx-h100", "--gpus", "1"]);
        command.args(["--stack", "moefold", "--precision", "bf16"]);
        command.args([
            "--seq-len",
            "4096",
            "--global-batch",
            "2",
            "--layout",
            "mbs=2",
        ]);
        command.arg("--model").arg(&model);
        if let Some(profile) = profile {
            command.arg("--profile");
            command.arg(root.join("profiles/h100").join(profile));
        }
        let (code, text, complaint) = run(&mut command);
        assert_eq!(code, 0, "{complaint}");
        let predicted = &json::document(&text)["plans"][0]["predicted"];
        let number = |key: &str| predicted[key].as_f64().expect("a number");
        let off = number("step_s") / MEASURED_S - 1.0;
        assert!(off.abs() < within, "{profile:?}: {:+.1} %", off * 100.0);
        let interval = number("step_s_low")..number("step_s_high");
        assert!(interval.contains(&MEASURED_S), "{profile:?}: {interval:?}");
        let off = number("peak_gib") / MEASURED_GIB - 1.0;
        assert!(
            off.abs() < 0.01,
            "{profile:?}: {:+.1} % of memory",
            off * 100.0
        );
        let busy = predicted["busy_s"].as_object().expect("seconds by op");
        let seconds = |stem: &str| busy[stem].as_f64().expect("seconds");
        let all: f64 = busy.keys().map(|stem| seconds(stem)).sum();
        let measured = predicted["confidence"]["measured"].as_f64();
        let expected = match profile {
            None => 0.0..=0.5,
            // It has nothing of AdamW.
            Some("profile") => 0.4..=1.0 - seconds("adamw") / all,
            // Norms, which do not decay, are updated by themselves.
            Some(_) => 0.9..=1.0,
        };
        assert!(
            expected.contains(&measured.expect("a share")),
            "{profile:?}: {measured:?} of {expected:?}"
        );
    }
}
