//! `validate` and `calibrate` as a user meets them: answers, refusals, files.

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod program;
}

use std::fs;
use std::path::Path;
use std::process::Command;

use common::json;
use common::outcome::run;
use common::program::program;
use serde_json::Value;

/// Runs a command in a folder that must succeed, and returns its text.
fn said(folder: &Path, arguments: &[&str]) -> String {
    let (code, answer, errors) = run(program(arguments).current_dir(folder));
    assert_eq!(code, 0, "{arguments:?}: {errors}");
    answer
}

/// The same with its one JSON document.
fn answer(folder: &Path, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--json"]].concat();
    json::document(&said(folder, &arguments))
}

/// Runs a command that must be refused, and says all of `parts`.
fn refused(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let (code, answer, stderr) = run(program(arguments).current_dir(folder));
    assert_eq!(code, 2, "{arguments:?}: {stderr}");
    assert!(answer.is_empty(), "a refusal leaves stdout alone");
    for part in parts {
        assert!(
            stderr.contains(part),
            "{arguments:?} does not say {part:?}: {stderr}"
        );
    }
}

/// Without a profile they are priced by the shipped tables; one of another GPU says nothing of them.
#[test]
fn validate_prices_rows_with_what_was_imported() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let planner = Path::new(env!("CARGO_MANIFEST_DIR")).join("planner");
    let system = planner.join("tests/fixtures/simumax-b200.json");
    let rows = planner.join("data/published/simumax_b200.csv");
    let [system, rows] = [&system, &rows].map(|path| path.to_str().expect("unicode"));
    said(folder, &["import", system, "--out", "b200"]);
    let errors = |more: &[&str]| {
        let found = answer(folder, &[&["validate", rows], more].concat());
        assert_eq!(found["all"]["step"]["rows"], 24);
        ["mean", "worst"].map(|key| found["all"]["step"][key].as_f64().expect("a share"))
    };
    let [[mean, worst], [shipped_mean, _]] = [errors(&["--profile", "b200"]), errors(&[])];
    assert!(mean <= 0.05 && worst <= 0.13, "{mean} {worst}");
    assert!(mean < shipped_mean, "{mean} {shipped_mean}");
    let own = "id,model,cluster,gpus,precision,seq_len,global_batch,step_ms\n\
               one,mixtral-8x7b,dgx-h100,64,bf16,4096,256,4000\n";
    fs::write(folder.join("h100.csv"), own).expect("written");
    refused(
        folder,
        &["validate", "h100.csv", "--profile", "b200"],
        &["a profile of b200", "h100"],
    );
    refused(
        folder,
        &["validate", "--profile", "b200", "--page", "page.md"],
        &["--page"],
    );
}

/// Writes a plan of Mixtral on 64 H100, and returns its predicted step and interval.
fn plan(folder: &Path, file: &str, layout: &str, more: &[&str]) -> [f64; 3] {
    let common =
        "plan --model mixtral-8x7b --cluster dgx-h100 --gpus 64 --seq-len 4096 --global-batch 256";
    let mut arguments: Vec<&str> = common.split(' ').collect();
    arguments.extend([
        "--layout",
        layout,
        "--recompute",
        "none",
        "--top",
        "1",
        "--out",
        file,
    ]);
    arguments.extend(more);
    let predicted = &answer(folder, &arguments)["plans"][0]["predicted"];
    ["step_s", "step_s_low", "step_s_high"].map(|key| predicted[key].as_f64().expect("seconds"))
}

const LAYOUTS: [&str; 3] = [
    "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,mbs=1",
    "tp=4,cp=1,pp=2,vpp=1,ep=4,etp=1,mbs=1",
    "tp=8,cp=1,pp=4,vpp=2,ep=2,etp=4,mbs=1",
];

#[test]
fn measured_steps_make_a_profile_that_the_next_plan_reads() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let files = ["a.json", "b.json", "c.json"];
    let mut arguments = vec!["calibrate", "--out", "machine"];
    let mut times = Vec::new();
    let mut predicted = Vec::new();
    for (file, layout) in files.into_iter().zip(LAYOUTS) {
        predicted.push(plan(folder, file, layout, &[]));
        times.push(format!("{}", 1.2 * predicted[predicted.len() - 1][0]));
    }
    for (file, time) in files.into_iter().zip(&times) {
        arguments.extend(["--plan", file, "--measured", time]);
    }
    let found = answer(folder, &arguments);
    let calibration = &found["calibration"];
    let factor = |name: &str| calibration[name]["factor"].as_f64().expect("a factor");
    assert!((factor("compute") - 1.2).abs() < 0.08, "{found}");
    let open = found["undetermined"].as_array().expect("a list");
    assert!(open.is_empty(), "reads of counts show the host: {open:?}");
    for step in calibration["steps"].as_array().expect("steps") {
        let of = |key: &str| step[key].as_f64().expect("seconds");
        assert!(
            (of("after_s") / of("measured_s") - 1.0).abs() < 0.03,
            "{step}"
        );
        assert!(
            (of("measured_s") / of("before_s") - 1.2).abs() < 1e-6,
            "{step}"
        );
        assert!(
            (of("left_out_s") / of("measured_s") - 1.0).abs() < 0.15,
            "{step}"
        );
    }
    let text = said(folder, &arguments);
    assert!(!text.contains("undetermined"), "{text}");

    let again = plan(folder, "again.json", LAYOUTS[0], &["--profile", "machine"]);
    assert!(
        (again[0] / predicted[0][0] - 1.2).abs() < 0.04,
        "{again:?} {predicted:?}"
    );
    assert!(
        again[2] / again[1] < predicted[0][2] / predicted[0][1],
        "it is surer now"
    );
    // A plan is said to be of other prices when it was.
    let (_, text, notes) = run(program(&[
        "calibrate",
        "--plan",
        "again.json",
        "--measured",
        &times[0],
        "--out",
        "other",
    ])
    .current_dir(folder));
    assert!(notes.contains("priced at"), "{notes}");
    assert!(
        text.contains("undetermined by these measurements"),
        "{text}"
    );
}

/// The flags of a calibration by one step.
fn calibrate<'a>(plan: &'a str, measured: &'a str) -> [&'a str; 7] {
    [
        "calibrate",
        "--plan",
        plan,
        "--measured",
        measured,
        "--out",
        "no",
    ]
}

#[test]
fn a_run_is_a_measurement_of_its_plan_and_what_is_none_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    fs::write(
        folder.join("text.txt"),
        "a text of some words to train on. ".repeat(200),
    )
    .expect("written");
    let tiny =
        "plan --model tiny-mixtral --cluster local --gpus 2 --seq-len 32 --global-batch 4 --top 1";
    let plan_of = |file: &str, layout: &str| {
        let mut arguments: Vec<&str> = tiny.split(' ').collect();
        arguments.extend(["--layout", layout, "--out", file]);
        said(folder, &arguments);
    };
    plan_of("plan.json", "tp=1,ep=2,mbs=1");
    plan_of("other.json", "tp=2,ep=2,mbs=1");
    let execute = "execute plan.json --text text.txt --device cpu --steps 6 --out run";
    said(folder, &execute.split(' ').collect::<Vec<_>>());
    refused(
        folder,
        &["compare", "plan.json", "--out", "run"],
        &["run: found a run's", "a directory of its own"],
    );
    let found = answer(
        folder,
        &[
            "calibrate",
            "--plan",
            "plan.json",
            "--measured",
            "run",
            "--out",
            "machine",
        ],
    );
    let summary = json::read(folder.join("run/summary.json"));
    assert_eq!(
        found["calibration"]["steps"][0]["measured_s"],
        summary["step_s"]
    );
    assert_eq!(found["calibration"]["stack"], "moefold");
    refused(
        folder,
        &calibrate("other.json", "run"),
        &["--measured run", "expected a run of the plan"],
    );
    refused(
        folder,
        &calibrate("plan.json", "0"),
        &["--measured 0", "seconds above 0"],
    );
    refused(
        folder,
        &calibrate("plan.json", "nowhere"),
        &["--measured nowhere", "no such file"],
    );
    refused(
        folder,
        &calibrate("plan.json", "machine"),
        &["--measured machine", "no steps"],
    );
    refused(folder, &calibrate("nowhere.json", "1.5"), &["nowhere.json"]);
    refused(folder, &calibrate("plan.json", "text.txt"), &["text.txt"]);
    let mut uneven = calibrate("plan.json", "1.5").to_vec();
    uneven.extend(["--plan", "other.json"]);
    refused(folder, &uneven, &["2 times", "1 times"]);
    plan(folder, "gpu.json", LAYOUTS[0], &[]);
    refused(
        folder,
        &calibrate("gpu.json", "0.9"),
        &["--measured 0.9", "gpu.json", "compute at their peak"],
    );
    // In milliseconds, and what no factor explains.
    for step_s in ["2505", "1e300", "1e-6"] {
        for plan in ["plan.json", "gpu.json"] {
            let expected = [step_s, plan, "within 100 times the"];
            refused(folder, &calibrate(plan, step_s), &expected);
        }
    }
    // A CPU's peak is a guess, which a factor may correct.
    let predicted = &json::read(folder.join("plan.json"))["predicted"]["step_s"];
    let step_s = (predicted.as_f64().expect("seconds") / 50.0).to_string();
    let mut fast = calibrate("plan.json", &step_s);
    fast[6] = "fast";
    answer(folder, &fast);
    let mut unlike = calibrate("plan.json", "1.5").to_vec();
    unlike.extend(["--plan", "gpu.json", "--measured", "2.5"]);
    refused(folder, &unlike, &["gpu.json", "h100", "megatron"]);
    assert!(!folder.join("no").exists(), "a refusal writes nothing");
}

#[test]
fn a_log_of_megatron_is_a_measurement_of_its_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    plan(folder, "gpu.json", LAYOUTS[0], &[]);
    let log = |batch: u32| {
        let line = |step: u32, ms: u32| {
            format!(
                " [2026-01-01 00:00:0{step}] iteration        {step}/       9 | consumed samples: {} | \
                 elapsed time per iteration (ms): {ms}.0 | learning rate: 1.0E-04 | global batch size: \
                 {batch} | lm loss: 1.0E+01 |\n",
                step * batch
            )
        };
        (1..9)
            .map(|step| line(step, 2500 + step))
            .collect::<String>()
    };
    fs::write(folder.join("train.log"), log(256)).expect("written");
    fs::write(folder.join("batch.log"), log(64)).expect("written");
    let found = answer(folder, &{
        let mut of = calibrate("gpu.json", "train.log").to_vec();
        of[6] = "logged";
        of
    });
    let step = &found["calibration"]["steps"][0]["measured_s"];
    assert!(
        (step.as_f64().expect("seconds") - 2.505).abs() < 0.004,
        "{step}"
    );
    refused(
        folder,
        &calibrate("gpu.json", "batch.log"),
        &["64", "256", "global batch"],
    );
    // Compressed, by itself too short to be sure of, and of another device.
    let mut gzip = Command::new("gzip");
    let packed = gzip
        .args(["--keep", "train.log"])
        .current_dir(folder)
        .status();
    assert!(packed.expect("gzip runs").success());
    let whole = said(
        folder,
        &["compare", "gpu.json", "train.log.gz", "--out", "page"],
    );
    assert!(
        whole.contains("measured at 2.50 s (median of 7 steps"),
        "{whole}"
    );
    let first: String = log(256).lines().take(1).collect();
    fs::write(folder.join("one.log"), first + "\n").expect("written");
    let one = said(folder, &["compare", "gpu.json", "one.log", "--out", "page"]);
    assert!(
        one.contains("one.log: the measurement has one step"),
        "{one}"
    );
    let words = "import train.log --device cpu --out of-cpu";
    said(folder, &words.split(' ').collect::<Vec<_>>());
    refused(
        folder,
        &calibrate("gpu.json", "of-cpu"),
        &["--measured of-cpu", "cpu", "h100"],
    );
}

#[test]
fn validate_shows_published_rows_and_a_users_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let found = answer(folder, &["validate"]);
    let rows = found["rows"].as_array().expect("rows");
    assert_eq!(found["all"]["rows"].as_u64(), Some(rows.len() as u64));
    let sum = |groups: &Value| -> u64 {
        let groups = groups.as_array().expect("groups").iter();
        groups
            .map(|group| group["rows"].as_u64().expect("a count"))
            .sum()
    };
    assert_eq!(sum(&found["groups"]), rows.len() as u64);
    let inside = found["all"]["inside"].as_f64().expect("a share");
    assert!((0.7..=0.9).contains(&inside), "{inside}");
    let text = said(folder, &["validate", "--page", "page.md"]);
    for part in ["simumax", "megatron-bridge", "cannot be planned"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let [found, kept] = [
        folder.join("page.md"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/published.md"),
    ]
    .map(|page| fs::read_to_string(page).expect("a page"));
    assert!(
        found == kept,
        "prices have changed: write the page again with `moefold validate --page docs/published.md`"
    );

    let step = plan(folder, "plan.json", LAYOUTS[0], &[])[0];
    let own = format!(
        "id,model,cluster,gpus,precision,seq_len,global_batch,tp,cp,pp,vpp,ep,etp,mbs,recompute,step_ms\n\
         one,mixtral-8x7b,dgx-h100,64,bf16,4096,256,1,1,4,1,8,1,1,none,{}\n",
        1e3 * step / 0.9
    );
    fs::write(folder.join("own.csv"), own).expect("written");
    let found = answer(folder, &["validate", "own.csv"]);
    let bias = found["all"]["step"]["bias"].as_f64().expect("a bias");
    assert!(
        (bias + 0.1).abs() < 1e-6,
        "predicted is 10 percent short: {bias}"
    );
    let text = said(folder, &["validate", "own.csv", "-v"]);
    assert!(text.contains("-10.0%"), "{text}");

    // A layout that somebody tuned, and another that is worse: what is found in their place is at least as fast.
    let own = "id,model,cluster,gpus,precision,seq_len,global_batch,tp,cp,pp,vpp,ep,etp,mbs,recompute,step_ms\n\
               one,mixtral-8x7b,dgx-h100,64,bf16,4096,256,1,1,4,8,8,1,1,none,4000\n\
               two,mixtral-8x7b,dgx-h100,64,bf16,4096,256,8,1,4,1,8,1,1,full,9000\n";
    fs::write(folder.join("tuned.csv"), own).expect("written");
    let found = answer(folder, &["validate", "tuned.csv", "--tuned"]);
    let rows = found["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for row in rows {
        let [tuned, best] =
            ["tuned", "found"].map(|of| row[of]["step_s"].as_f64().expect("seconds"));
        assert!(best <= tuned, "{row}");
        let more: f64 = row["more_s"]
            .as_object()
            .expect("categories")
            .values()
            .filter_map(Value::as_f64)
            .sum();
        assert!((tuned - best - more).abs() < 1e-6 * tuned, "{row}");
    }
    assert_eq!(rows[0]["found"], rows[1]["found"], "one question");
    let text = said(folder, &["validate", "tuned.csv", "--tuned"]);
    for part in ["TP8 PP4 DP2", "recompute +", "within 5% of what is found"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    fs::write(folder.join("bad.csv"), "id,model\none,mixtral\n").expect("written");
    refused(folder, &["validate", "bad.csv"], &["bad.csv", "`cluster`"]);
    refused(folder, &["validate", "none.csv"], &["none.csv"]);
}
