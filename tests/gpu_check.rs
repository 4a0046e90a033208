//! `moefold gpu-check` where there is no GPU: rehearsed on the CPU, and refused with a reason.

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
