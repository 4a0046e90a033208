//! `execute --save-every` and `--resume` from the outside: a run that stops, in whatever way, and is
//! taken up again.

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod plans;
    pub(crate) mod program;
    pub(crate) mod tiny;
}

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::json;
use common::outcome::run;
use common::plans::Bench;
use common::program::program;
use common::tiny::tokens;

impl Bench {
    /// Training by the plan for so many ranks into a run directory.
    fn execute(&self, ranks: &str, out: &str, rest: &[&str]) -> Command {
        let (plan, out) = (self.path(&format!("{ranks}.json")), self.path(out));
        let data = tokens();
        let first = [
            "execute", &plan, "--data", &data, "--device", "cpu", "--out", &out,
        ];
        program(&[&first, rest].concat())
    }

    fn losses(&self, run: &str) -> Vec<(u64, f64, f64)> {
        let steps = self.0.steps(run).into_iter();
        steps
            .map(|step| (step.step, step.loss, step.grad_norm))
            .collect()
    }

    fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(&format!("{run}/checkpoints"))).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("readable").file_name().display().to_string())
            .collect();
        names.sort();
        names
    }
}

const ONE: (&str, &str) = ("1", "tp=1,ep=1,etp=1,mbs=2");
const FOLDED: (&str, &str) = ("4", "tp=2,ep=4,etp=1,mbs=1");

const SCHEDULE: [&str; 6] = ["--lr", "3e-3", "--lr-schedule", "cosine", "--warmup", "2"];

#[test]
fn oracle_a_run_in_two_parts_equals_one_on_threads_and_on_processes() {
    let bench = Bench::new(&[ONE, FOLDED]);
    for launch in ["threads", "processes"] {
        let name = |what: &str| format!("{launch}-{what}");
        let go = |ranks: &str, out: &str, rest: &[&str]| {
            let saved = bench.path(&format!("{out}-weights"));
            let common = [
                "--launch",
                launch,
                "--steps",
                "8",
                "--save-hf",
                &saved,
                "--json",
            ];
            let arguments = [&common, &SCHEDULE[..], rest].concat();
            let (code, answer, errors) = run(&mut bench.execute(ranks, out, &arguments));
            assert_eq!((code, errors.as_str()), (0, ""), "{out}");
            json::document(&answer)
        };
        let (whole, rest, other) = (name("whole"), name("rest"), name("other"));
        let answer = go("4", &whole, &["--save-every", "4"]);
        assert_eq!(answer["checkpoint"]["step"], 8);
        assert_eq!(bench.checkpoints(&whole), ["step-4", "step-8"]);
        let from = bench.path(&format!("{whole}/checkpoints/step-4"));
        let answer = go("4", &rest, &["--resume", &from, "--save-every", "100"]);
        assert_eq!(bench.losses(&rest), bench.losses(&whole)[4..], "to the bit");
        assert_eq!(answer["summary"]["steps"], 4);
        // Every file of both, the index with its hashes among them.
        for file in [
            "checkpoint.json",
            "rank-0.safetensors",
            "rank-3.safetensors",
        ] {
            let [a, b] = [&whole, &rest].map(|run| {
                let path = format!("{run}/checkpoints/step-8/{file}");
                fs::read(bench.path(&path)).expect("it is there")
            });
            assert!(a == b, "{file} differs");
        }
        let weights = |run: &str| fs::read(bench.path(&format!("{run}-weights/model.safetensors")));
        assert!(
            weights(&rest).expect("saved") == weights(&whole).expect("saved"),
            "the same weights"
        );
        let environment = json::read(bench.path(&format!("{rest}/env.json")));
        assert_eq!(environment["resumed"]["checkpoint"], from.as_str());
        assert_eq!(environment["resumed"]["step"], 4);

        // Another number of ranks takes it up, from the newest that the run directory has.
        let folder = bench.path(&format!("{whole}/checkpoints/step-8"));
        fs::rename(&folder, bench.path("elsewhere")).expect("moves");
        go("1", &other, &["--resume", &bench.path(&whole)]);
        for (found, expected) in bench.losses(&other).iter().zip(&bench.losses(&whole)[4..]) {
            let error = (found.1 / expected.1 - 1.0).abs();
            assert!(
                found.0 == expected.0 && error < 1e-5,
                "{found:?}, {expected:?}"
            );
        }
        fs::rename(bench.path("elsewhere"), &folder).expect("moves");
    }
    assert_eq!(bench.losses("threads-rest"), bench.losses("processes-rest"));
}

/// Starts a run that saves after every step and kills it some time after its first checkpoint.
fn kill(bench: &Bench, out: &str, rest: &[&str], after: Duration) {
    let arguments = [&["--steps", "100000", "--save-every", "1"], rest].concat();
    let mut command = bench.execute("4", out, &arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("the program starts");
    let saved = bench.path(&format!("{out}/checkpoints"));
    let begun = Instant::now();
    let is_complete = || {
        let mut entries = fs::read_dir(&saved).into_iter().flatten().flatten();
        entries.any(|entry| entry.path().extension().is_none())
    };
    while !is_complete() {
        let ended = child.try_wait().expect("it is ours");
        assert!(ended.is_none(), "{out} ended with {ended:?}");
        assert!(begun.elapsed() < Duration::from_mins(1), "no checkpoint");
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(after);
    child.kill().expect("it is ours");
    child.wait().expect("it ended");
}

#[test]
fn oracle_a_run_that_is_killed_again_and_again_equals_one_that_is_not() {
    let bench = Bench::new(&[FOLDED]);
    let mut parts: Vec<String> = Vec::new();
    for attempt in 0..4 {
        let out = format!("part-{attempt}");
        let from = parts.last().map(|last| bench.path(last));
        let resume: Vec<&str> = from.iter().flat_map(|from| ["--resume", from]).collect();
        // Somewhere in a step, a file, a change of name or a removal.
        kill(
            &bench,
            &out,
            &resume,
            Duration::from_millis(3 + 11 * attempt),
        );
        parts.push(out);
    }
    let last = parts.last().expect("there are four");
    let newest = bench
        .checkpoints(last)
        .iter()
        .filter_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok())
        .max();
    let steps = (newest.expect("one is complete") + 2).to_string();
    let from = bench.path(last);
    let end = ["--steps", &steps, "--resume", &from];
    for (out, arguments) in [("end", &end[..]), ("whole", &end[..2])] {
        let (code, _, errors) = run(&mut bench.execute("4", out, arguments));
        assert_eq!(code, 0, "{errors}");
    }
    let whole = bench.losses("whole");
    parts.push("end".to_owned());
    for part in &parts {
        let steps = bench.losses(part);
        assert!(!steps.is_empty(), "{part}");
        for step in steps {
            // A run may have been killed in a step that the one after it never reached.
            if let Some(expected) = whole.get(step.0 as usize) {
                assert_eq!(step, *expected, "{part}");
            }
        }
    }
    assert_eq!(bench.losses("end").last(), whole.last());
}

/// Every file and folder in a folder, by path.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            all.append(&mut contents(&path));
        }
        let bytes = fs::read(&path).ok();
        all.insert(path, bytes);
    }
    all
}

fn refused(bench: &Bench, out: &str, rest: &[&str], expected: &str) {
    let (code, _, errors) = run(&mut bench.execute("1", out, rest));
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains(expected),
        "{expected:?} is not in: {errors}"
    );
}

#[test]
fn oracle_a_run_goes_on_in_its_own_directory_with_every_step_once() {
    let bench = Bench::new(&[ONE]);
    let go = |out: &str, rest: &[&str]| {
        let (code, answer, errors) =
            run(&mut bench.execute("1", out, &[&SCHEDULE[..4], rest].concat()));
        assert_eq!(code, 0, "{errors}");
        (answer, errors)
    };
    let until = |steps| {
        [
            "--lr-decay-steps",
            "6",
            "--continue",
            "--save-every",
            "2",
            "--steps",
            steps,
        ]
    };
    go("whole", &until("6"));
    let whole = bench.losses("whole");
    go("run", &until("5"));
    assert_eq!(bench.losses("run"), whole[..5]);
    // As one that ended while it wrote a line and a checkpoint, and lost a file of the one before.
    let path = |name: &str| bench.path(&format!("run/{name}"));
    for name in ["checkpoints/step-5/rank-0.safetensors", "summary.json"] {
        fs::remove_file(path(name)).expect("it is there");
    }
    fs::create_dir(path("checkpoints/step-6.partial")).expect("writable");
    for file in ["steps.jsonl", "events.tfevents"] {
        let mut bytes = fs::read(path(file)).expect("it is there");
        bytes.truncate(bytes.len() - 7);
        fs::write(path(file), bytes).expect("writable");
    }
    let refused = |out: &str, rest: &[&str], expected: &str| refused(&bench, out, rest, expected);
    // What is refused changes nothing: not of flags, nor of what is found once ranks have begun.
    let before = contents(Path::new(&path("")));
    refused("run", &until("8")[2..], "lr_schedule was");
    let shard = path("checkpoints/step-4/rank-0.safetensors");
    let whole_shard = fs::read(&shard).expect("it is there");
    let mut bytes = whole_shard.clone();
    let half = bytes.len() / 2;
    bytes[half] ^= 1;
    fs::write(&shard, bytes).expect("writable");
    refused(
        "run",
        &[&SCHEDULE[..4], &until("6")].concat(),
        "does not hold what was written",
    );
    fs::write(&shard, whole_shard).expect("writable");
    assert!(contents(Path::new(&path(""))) == before);
    let (answer, errors) = go("run", &until("6"));
    assert!(
        answer.contains("going on from ") && answer.contains("after 4 steps"),
        "{answer}"
    );
    assert!(errors.contains("step-5 is not complete"), "{errors}");
    assert_eq!(bench.losses("run"), whole);
    assert_eq!(
        bench.checkpoints("run"),
        ["step-4", "step-5.incomplete-1", "step-6"]
    );
    let events = |run: &str| {
        fs::metadata(bench.path(&format!("{run}/events.tfevents")))
            .expect("there")
            .len()
    };
    assert_eq!(events("run"), events("whole"));
    let summary = json::read(path("summary.json"));
    assert_eq!(summary["steps"], 2);
    let compared = [
        "compare",
        &path(""),
        &bench.path("whole"),
        "--out",
        &bench.path("report"),
    ];
    let (code, _, errors) = run(&mut program(&compared));
    assert_eq!(code, 0, "{errors}");
    // Where nothing was saved it begins again.
    go("early", &["--lr-decay-steps", "6", "--steps", "3"]);
    go("early", &until("6"));
    assert_eq!(bench.losses("early"), whole);

    refused("run", &until("8")[2..], "lr_schedule was");
    assert_eq!(
        bench.losses("run"),
        whole,
        "what is refused changes nothing"
    );
    fs::create_dir(bench.path("other")).expect("writable");
    fs::write(bench.path("other/file"), "").expect("writable");
    refused("other", &["--continue"], "other: is no directory of a run");
    let alone = [
        "execute",
        &bench.path("1.json"),
        "--continue",
        "--data",
        &tokens(),
    ];
    let (code, _, errors) = run(&mut program(&alone));
    assert!(code == 2 && errors.contains("--out"), "{errors}");
}

#[test]
fn a_run_that_is_done_goes_no_further_and_one_of_another_model_is_not_begun_anew() {
    let bench = Bench::new(&[ONE]);
    let rest = ["--continue", "--save-every", "2", "--steps", "2"];
    let go = || run(&mut bench.execute("1", "run", &rest));
    let (code, _, errors) = go();
    assert_eq!(code, 0, "{errors}");
    // As a launcher does that starts all of its jobs again.
    let before = contents(Path::new(&bench.path("run")));
    let (code, answer, errors) = go();
    assert_eq!(code, 0, "{errors}");
    let expected = "2 steps are done: nothing is left to do";
    assert!(answer.contains(expected), "{answer}");
    assert!(contents(Path::new(&bench.path("run"))) == before);
    let saved = bench.path("saved");
    let asks = [&rest[..], &["--save-hf", &saved]].concat();
    refused(&bench, "run", &asks, "2 steps are done, of 2");

    // Of another model even where nothing is left to do.
    let own = bench.path("run/plan.json");
    let text = fs::read_to_string(&own).expect("it is there");
    let other = text.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 500.0");
    assert_ne!(other, text);
    fs::write(&own, other).expect("writable");
    refused(&bench, "run", &rest, "found a run of another model");
}

#[test]
fn without_room_on_the_disk_the_run_ends_with_what_was_to_be_written() {
    let bench = Bench::new(&[FOLDED]);
    for launch in ["threads", "processes"] {
        let arguments = ["--steps", "4", "--save-every", "2", "--launch", launch];
        let execute = bench.execute("4", launch, &arguments);
        // No file may be longer than 64 KiB, and a write beyond that is an error, not a signal.
        let mut limited = Command::new("sh");
        limited
            .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\""])
            .arg(execute.get_program())
            .args(execute.get_args());
        let (code, _, errors) = run(&mut limited);
        assert_eq!(code, 1, "{launch}: {errors}");
        assert!(
            errors.contains("step-2.partial/rank-")
                && errors.contains("could not write the checkpoint"),
            "{launch}: {errors}"
        );
        assert_eq!(
            bench.checkpoints(launch),
            [""; 0],
            "nothing is half written"
        );
        // Training goes on beside a save, and hears of its failure after a step.
        assert!((2..=4).contains(&bench.0.steps(launch).len()));
    }
}

#[test]
fn processes_save_into_the_directory_that_the_first_of_them_chose() {
    let bench = Bench::new(&[FOLDED]);
    let plan = bench.path("4.json");
    let data = tokens();
    let arguments = [
        "execute",
        &plan,
        "--data",
        &data,
        "--device",
        "cpu",
        "--launch",
        "processes",
        "--steps",
        "1",
        "--save-every",
        "1",
    ];
    let (code, _, errors) = run(program(&arguments).current_dir(bench.0.0.path()));
    assert_eq!(code, 0, "{errors}");
    assert_eq!(bench.checkpoints("runs/run-1"), ["step-1"]);
    assert!(!Path::new(&bench.path("runs/run-2")).exists());
}

#[test]
fn what_cannot_be_taken_up_is_refused_before_anything_is_written() {
    let bench = Bench::new(&[ONE]);
    let saving = ["--steps", "2", "--save-every", "2"];
    let (code, _, errors) = run(&mut bench.execute("1", "run", &saving));
    assert_eq!(code, 0, "{errors}");
    let refused = |rest: &[&str], expected: &[&str]| {
        let (code, _, errors) = run(&mut bench.execute("1", "refused", rest));
        assert_eq!(code, 2, "{rest:?}: {errors}");
        for part in expected {
            assert!(errors.contains(part), "{rest:?} lacks {part:?}: {errors}");
        }
        let left = fs::read_dir(bench.path("refused")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{rest:?} left files in the way of the next try");
    };
    let from = bench.path("run");
    refused(&["--resume", &from, "--init", "x"], &["--resume", "--init"]);
    refused(&["--save-every", "0"], &["--save-every", "0"]);
    refused(
        &["--resume", &bench.path("nowhere")],
        &["nowhere: does not exist; expected a checkpoint"],
    );
    fs::create_dir(bench.path("empty")).expect("writable");
    refused(
        &["--resume", &bench.path("empty")],
        &[
            "empty: is no checkpoint and no run that has any",
            "asked to save",
        ],
    );
    refused(
        &["--resume", &from, "--steps", "2"],
        &["step-2: 2 steps are done, of 2 that are asked for in all"],
    );
    refused(
        &["--resume", &from, "--seed", "9", "--weight-decay", "0"],
        &[
            "shuffle_seed was 0 and is 9",
            "weight_decay was 0.1 and is 0.0",
        ],
    );
    let file = bench.path("run/checkpoints/step-2/rank-0.safetensors");
    let mut bytes = fs::read(&file).expect("there");
    let half = bytes.len() / 2;
    bytes[half] ^= 0x10;
    fs::write(&file, &bytes).expect("writes");
    refused(
        &["--resume", &from],
        &["rank-0.safetensors: does not hold what was written"],
    );
    fs::write(&file, &bytes[..half]).expect("writes");
    refused(
        &["--resume", &from],
        &["holds no complete checkpoint", "rank-0.safetensors: holds"],
    );
}
