//! Runs that meet full disks, each other, signals and sudden ends, from the outside.

mod common {
    pub(crate) mod child;
    pub(crate) mod draws;
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod plans;
    pub(crate) mod program;
    pub(crate) mod runs;
    pub(crate) mod tiny;
}

use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::child::{Guarded, await_steps, children, signal, state};
use common::draws::{When, await_moment, seed};
use common::json;
use common::outcome::run;
use common::plans::Bench;
use common::program::program;
use common::runs::{ENDLESS, FOUR, TWO, until};
use common::tiny::fixture;
use moefold_profiles::random::SplitMix64;

const ONE: (&str, &str) = ("1", "tp=1,ep=1,etp=1,mbs=2");

/// The same with a write beyond the largest file allowed an error, not a signal.
fn unsignalled(command: &Command, limit: &str) -> Command {
    let mut shell = Command::new("sh");
    let script = format!("trap '' XFSZ; {limit}exec \"$0\" \"$@\"");
    shell
        .args(["-c", &script])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(command.get_current_dir().expect("it has one"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    shell
}

#[test]
fn what_a_run_cannot_write_is_said_before_its_first_step() {
    let bench = Bench::new(&[ONE]);
    let refused = |command: &mut Command, expected: &str| {
        let (code, answer, errors) = run(command);
        assert!(code == 1 || code == 2, "{code}: {errors}");
        assert!(
            errors.contains(expected),
            "{expected:?} is not in: {errors}"
        );
        assert!(!answer.contains("step "), "{answer}");
        for left in ["run", "weights"] {
            assert!(
                !Path::new(&bench.path(left)).exists(),
                "{left} is in the way"
            );
        }
    };
    let (out, weights) = (bench.path("run"), bench.path("weights"));
    let execute = bench.execute("1", &["--steps", "1", "--out", &out]);
    refused(
        &mut unsignalled(&execute, "ulimit -f 16; "),
        "run: could not write what a run leaves",
    );
    for flag in ["--out", "--save-hf", "--profile-out"] {
        let mut execute = bench.execute("1", &["--steps", "1", flag, "/proc/nowhere"]);
        refused(&mut execute, "/proc/nowhere: could not create");
        let _ = fs::remove_dir(bench.path("runs"));
    }
    let same = ["--steps", "1", "--out", &out, "--save-hf", &out];
    refused(&mut bench.execute("1", &same), "or it is named twice");
    fs::create_dir(&weights).expect("writable");
    fs::write(format!("{weights}/config.json"), "{}").expect("writable");
    let both = ["--steps", "1", "--init", &weights, "--save-hf", &weights];
    let (code, _, errors) = run(&mut bench.execute("1", &both));
    assert_eq!(code, 2, "{errors}");
}

/// Sets the largest file that a process may write.
fn limit_files(process: u32, bytes: &str) {
    let limit = format!("--fsize={bytes}:unlimited");
    let status = Command::new("prlimit")
        .args(["--pid", &process.to_string(), &limit])
        .status();
    assert!(status.expect("util-linux is there").success());
}

#[test]
fn a_log_that_fails_does_not_cost_the_run() {
    let bench = Bench::new(&[ONE]);
    // For a while: nothing is lost.
    let arguments = [&ENDLESS[..], &["--out", "run"]].concat();
    let mut child = Guarded::start(&mut unsignalled(&bench.execute("1", &arguments), ""));
    await_steps(&bench.path("run"));
    limit_files(child.0.id(), "1");
    let length = || {
        fs::metadata(bench.path("run/steps.jsonl"))
            .expect("there")
            .len()
    };
    let mut last = length();
    until("a log that fails", || {
        thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut last, length()) == length()
    });
    assert!(
        child.0.try_wait().expect("it is ours").is_none(),
        "it goes on"
    );
    limit_files(child.0.id(), "unlimited");
    until("a log that grows", || length() > last);
    signal("TERM", child.0.id());
    let (code, _, errors) = child.ended();
    assert_eq!(code, 143, "{errors}");
    for part in [
        "steps.jsonl: could not write: File too large",
        "training goes on",
        "no checkpoint after",
        "all steps are written again",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    let steps = bench.steps("run");
    assert!(steps.iter().map(|step| step.0).eq(0..steps.len() as u64));
    assert_eq!(bench.checkpoints("run"), (vec![steps.len() as u64], false));

    // At the end: what can be saved is, and the run says what is not there.
    let arguments = ["--steps", "40", "--out", "end", "--save-hf", "weights"];
    let child = Guarded::start(&mut bench.execute("1", &arguments));
    await_steps(&bench.path("end"));
    fs::create_dir_all(bench.path("end/trace.json/within")).expect("writable");
    let (code, _, errors) = child.ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("not all of it is there: ") && errors.contains("trace.json"),
        "{errors}"
    );
    assert!(Path::new(&bench.path("weights/model.safetensors")).is_file());
    assert!(Path::new(&bench.path("end/profile.json")).is_file());
    assert!(!Path::new(&bench.path("end/summary.json")).exists());
}

/// Of a run whose checkpoints have no place any more, also at its end.
#[test]
fn checkpoints_that_fail_do_not_cost_the_run() {
    let bench = Bench::new(&[ONE]);
    let arguments = "--steps 200 --save-every 2 --out run --save-hf weights";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let child = Guarded::start(&mut bench.execute("1", &arguments));
    await_steps(&bench.path("run"));
    let [folder, aside] = ["run/checkpoints", "aside"].map(|name| bench.path(name));
    fs::rename(&folder, &aside).expect("it is there");
    fs::write(&folder, "").expect("writable");
    let (code, _, errors) = child.ended();
    assert_eq!(code, 1, "{errors}");
    for part in [
        "; training goes on, and the next is tried when it is due",
        "not all of it is there: ",
        "of which the last: no checkpoint after 200 steps: rank 0: ",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert_eq!(bench.steps("run").len(), 200);
    assert!(Path::new(&bench.path("weights/model.safetensors")).is_file());
    assert!(Path::new(&bench.path("run/summary.json")).is_file());
}

#[test]
fn runs_that_begin_together_have_a_directory_each_or_are_refused() {
    let bench = Bench::new(&[ONE]);
    for round in 0..3_u64 {
        let start = || Guarded::start(&mut bench.execute("1", &["--steps", "2"]));
        let all = [start(), start(), start()];
        for child in all {
            let (code, _, errors) = child.ended();
            assert_eq!(code, 0, "{errors}");
        }
        for number in 3 * round + 1..=3 * round + 3 {
            let name = format!("runs/run-{number}");
            assert_eq!(bench.steps(&name).len(), 2, "{name}");
            assert!(Path::new(&bench.path(&format!("{name}/summary.json"))).is_file());
        }
    }
    for round in 0..3 {
        let out = format!("same-{round}");
        let start = || Guarded::start(&mut bench.execute("1", &["--steps", "2", "--out", &out]));
        let mut codes = [start(), start()].map(|child| {
            let (code, _, errors) = child.ended();
            assert!(code == 0 || errors.contains(&out), "{errors}");
            code
        });
        codes.sort_unstable();
        assert_eq!(codes, [0, 2], "one of them has it");
        assert_eq!(
            bench
                .steps(&out)
                .iter()
                .map(|step| step.0)
                .collect::<Vec<_>>(),
            [0, 1]
        );
    }
    let profile = ["--profile-out", "profile"];
    let arguments = [&ENDLESS[..], &["--out", "first"], &profile].concat();
    let mut first = Guarded::start(&mut bench.execute("1", &arguments));
    await_steps(&bench.path("first"));
    let arguments = [&["--steps", "1", "--out", "second"][..], &profile].concat();
    let (code, _, errors) = run(&mut bench.execute("1", &arguments));
    first.kill();
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("profile: another run writes to it"),
        "{errors}"
    );
    assert!(!Path::new(&bench.path("second")).exists());
}

#[test]
fn a_run_whose_directory_goes_ends_with_an_error() {
    let bench = Bench::new(&[ONE]);
    for (renamed, rest) in [
        (true, &[][..]),
        (false, &[]),
        (true, &["--save-every", "1"]),
    ] {
        let _ = fs::remove_dir_all(bench.path("other"));
        let out = bench.path("run");
        let arguments = [&ENDLESS[..], &["--out", &out], rest].concat();
        let child = Guarded::start(&mut bench.execute("1", &arguments));
        await_steps(&out);
        if renamed {
            fs::rename(&out, bench.path("other")).expect("renames");
        } else {
            fs::remove_dir_all(&out).expect("removes");
        }
        let (code, _, errors) = child.ended();
        assert_eq!(code, 1, "{errors}");
        assert!(errors.contains("run: was removed or renamed"), "{errors}");
        assert!(!Path::new(&out).exists(), "nothing is written in its place");
    }
}

#[test]
fn weights_that_are_no_numbers_are_never_saved_under_exit_0() {
    let bench = Bench::new(&[ONE]);
    let arguments = [
        "--lr",
        "1e39",
        "--steps",
        "1",
        "--out",
        "run",
        "--save-hf",
        "weights",
    ];
    let (code, _, errors) = run(&mut bench.execute("1", &arguments));
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("values of its weights are no finite numbers"),
        "{errors}"
    );
    assert!(!Path::new(&bench.path("weights")).exists());
    assert!(
        Path::new(&bench.path("run/summary.json")).is_file(),
        "what can be written is"
    );
}

/// A copy of the tiny Mixtral's weights and configuration.
fn copied_weights(bench: &Bench) -> String {
    let folder = bench.path("weights");
    fs::create_dir(&folder).expect("writable");
    for name in ["config.json", "model.safetensors"] {
        let from = fixture(&format!("mixtral/{name}"));
        fs::copy(from, format!("{folder}/{name}")).expect("copies");
    }
    folder
}

#[test]
fn weights_to_begin_with_are_of_the_plans_model_whole_and_finite() {
    let bench = Bench::new(&[ONE]);
    let folder = copied_weights(&bench);
    let begin = |init: &str, rest: &[&str]| {
        let arguments = [&["--steps", "1", "--out", "run", "--init", init], rest].concat();
        let (code, _, errors) = run(&mut bench.execute("1", &arguments));
        (code, errors)
    };
    let refused = |init: &str, expected: &[&str]| {
        let (code, errors) = begin(init, &[]);
        assert_eq!(code, 2, "{errors}");
        for part in expected {
            assert!(errors.contains(part), "{part:?} is not in: {errors}");
        }
        assert!(!Path::new(&bench.path("run")).exists());
    };
    let (config, weights) = (
        format!("{folder}/config.json"),
        format!("{folder}/model.safetensors"),
    );
    let whole = fs::read_to_string(&config).expect("there");
    let mut other = json::document(&whole);
    other["rms_norm_eps"] = 0.25.into();
    fs::write(&config, other.to_string()).expect("writable");
    refused(
        &folder,
        &["config.json: is of another model", "norm differs"],
    );
    fs::write(&config, whole).expect("writable");

    // All bits of the last value: no number, in any type.
    let whole = fs::read(&weights).expect("there");
    let mut bytes = whole.clone();
    let end = bytes.len() - 4;
    bytes[end..].fill(0xff);
    fs::write(&weights, bytes).expect("writable");
    refused(
        &folder,
        &["weights: ", " holds NaN; expected finite numbers"],
    );
    fs::write(&weights, &whole).expect("writable");

    // What a run has saved lies beside its hash.
    let (code, errors) = begin(&folder, &["--save-hf", "saved"]);
    assert_eq!(code, 0, "{errors}");
    fs::remove_dir_all(bench.path("run")).expect("removes");
    let (code, errors) = begin(&folder, &["--save-hf", &folder]);
    assert!(
        code == 2 && errors.contains("is not empty"),
        "what it begins with stays: {errors}"
    );
    let saved = bench.path("saved/model.safetensors");
    let mut bytes = fs::read(&saved).expect("there");
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    fs::write(&saved, bytes).expect("writable");
    refused(
        "saved",
        &[
            "model.safetensors: does not hold what was written",
            "weights.blake3",
        ],
    );
}

#[test]
fn tokens_are_held_to_their_checksums() {
    let bench = Bench::new(&[ONE]);
    fs::write(
        bench.path("text.txt"),
        "One morning there was a sea. ".repeat(40),
    )
    .expect("writable");
    let prepared = ["data", "prepare", "text.txt", "--out", "tokens"];
    let (code, _, errors) = run(program(&prepared).current_dir(bench.0.0.path()));
    assert_eq!(code, 0, "{errors}");
    let train = |rest: &[&str]| {
        let plan = bench.path("1.json");
        let first = [
            "execute", &plan, "--data", "tokens", "--device", "cpu", "--steps", "1",
        ];
        let (code, _, errors) =
            run(program(&[&first, rest].concat()).current_dir(bench.0.0.path()));
        (code, errors)
    };
    assert_eq!(train(&["--verify-data"]), (0, String::new()));
    let flip = |name: &str| {
        let path = bench.path(name);
        let mut bytes = fs::read(&path).expect("there");
        let half = bytes.len() / 2;
        bytes[half] ^= 1;
        fs::write(&path, bytes).expect("writable");
    };
    flip("tokens.bin");
    assert_eq!(
        train(&[]),
        (0, String::new()),
        "a run does not read all of it"
    );
    let (code, errors) = train(&["--verify-data"]);
    assert!(
        code == 2 && errors.contains("tokens.bin: does not hold what was written"),
        "{errors}"
    );
    flip("tokens.bin");
    flip("tokens.idx");
    let (code, errors) = train(&[]);
    assert!(code == 2 && errors.contains("tokens.idx: "), "{errors}");
    flip("tokens.idx");
    fs::remove_file(bench.path("tokens.blake3")).expect("it is there");
    let (code, errors) = train(&["--verify-data"]);
    let expected = "tokens.bin: cannot be verified: tokens.blake3 holds no hash of it";
    assert!(code == 2 && errors.contains(expected), "{errors}");
}

#[test]
fn paths_need_not_be_utf_8() {
    let bench = Bench::new(&[ONE]);
    let name = |name: &[u8]| OsStr::from_bytes(&[b"\xff", name].concat()).to_owned();
    let folder = bench.0.0.path().join(name(b"all"));
    fs::create_dir(&folder).expect("writable");
    let tokens = folder.join("tokens");
    for ending in ["bin", "idx"] {
        let from = format!("{}.{ending}", common::tiny::tokens());
        fs::copy(from, tokens.with_extension(ending)).expect("copies");
    }
    fs::copy(bench.path("1.json"), folder.join(name(b"plan"))).expect("copies");
    let execute = |out: &[u8], rest: &[&OsStr]| {
        let mut command = program(&["execute", "--device", "cpu", "--json", "--save-every", "1"]);
        command
            .arg(folder.join(name(b"plan")))
            .arg("--data")
            .arg(&tokens);
        command.arg("--out").arg(folder.join(name(out))).args(rest);
        let (code, answer, errors) = run(&mut command);
        assert_eq!((code, errors.as_str()), (0, ""));
        json::document(&answer)
    };
    let (first, weights) = (folder.join(name(b"first")), folder.join(name(b"weights")));
    let answer = execute(
        b"first",
        &[
            "--steps".as_ref(),
            "1".as_ref(),
            "--save-hf".as_ref(),
            weights.as_ref(),
        ],
    );
    let shown = answer["checkpoint"]["dir"].as_str().expect("a path");
    assert!(shown.contains("first/checkpoints/step-1"), "{shown}");
    execute(
        b"second",
        &[
            "--steps".as_ref(),
            "2".as_ref(),
            "--resume".as_ref(),
            first.as_ref(),
        ],
    );
    execute(
        b"third",
        &[
            "--steps".as_ref(),
            "1".as_ref(),
            "--init".as_ref(),
            weights.as_ref(),
        ],
    );
    assert!(
        folder
            .join(name(b"second"))
            .join("checkpoints/step-2")
            .is_dir()
    );
    let cluster = folder.join(name(b"cluster.toml"));
    fs::write(&cluster, "version = 1\nbase = \"dgx-h100\"\n").expect("writable");
    let mut plan = program(&[
        "plan",
        "--gpus",
        "8",
        "--seq-len",
        "32",
        "--global-batch",
        "8",
    ]);
    plan.arg("--model").arg(&weights);
    plan.arg("--cluster").arg(&cluster);
    plan.arg("--routing").arg(&first);
    let (code, _, errors) = run(&mut plan);
    assert_eq!((code, errors.as_str()), (0, ""));
}

#[test]
fn a_plan_that_this_machine_has_no_memory_for_is_refused() {
    let bench = Bench::new(&[TWO]);
    let mut plan = json::read(bench.path("2.json"));
    // What the file says of its memory is as it was.
    plan["model"]["vocab_size"] = (1 << 24).into();
    plan["model"]["hidden"] = (1 << 18).into();
    fs::write(bench.path("2.json"), plan.to_string()).expect("writable");
    for launch in ["threads", "processes"] {
        let (code, _, errors) = run(&mut bench.execute("2", &["--steps", "1", "--launch", launch]));
        assert_eq!(code, 2, "{errors}");
        assert!(
            errors.contains("of this machine's memory in tensors of 2 of its 2 ranks"),
            "{errors}"
        );
    }
    let saving = ["--steps", "1", "--save-every", "1"];
    let (code, _, errors) = run(&mut bench.execute("2", &saving));
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("of it for copies that checkpoints are written from"),
        "{errors}"
    );
}

/// Waits until a process catches a signal.
fn await_catch(process: u32, number: u32) {
    until("a handler", || {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> (number - 1) & 1 == 1)
    });
}

#[test]
fn a_second_signal_ends_a_run_at_once_and_the_first_in_the_time_that_was_said() {
    let bench = Bench::new(&[TWO]);
    // Rank 0 waits for rank 1, which never comes, so no step ends.
    let wait = |rest: &[&str]| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        drop(listener);
        let mut command = bench.execute("2", &[&["--launch", "env"], rest].concat());
        for (name, value) in [("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")] {
            command.env(name, value);
        }
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("MOEFOLD_SECRET", "a secret of the tests");
        let child = Guarded::start(&mut command);
        await_catch(child.0.id(), 2);
        await_catch(child.0.id(), 15);
        child
    };
    for (second, code) in [("INT", 130), ("TERM", 143)] {
        let mut child = wait(&[]);
        signal("INT", child.0.id());
        thread::sleep(Duration::from_millis(200));
        assert!(
            child.0.try_wait().expect("ours").is_none(),
            "the first one waits for a step"
        );
        signal(second, child.0.id());
        let begun = Instant::now();
        assert_eq!(child.ended().0, code);
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
    let child = wait(&["--stop-within", "1"]);
    let begun = Instant::now();
    signal("TERM", child.0.id());
    let (code, _, errors) = child.ended();
    assert_eq!(code, 143, "{errors}");
    assert!(
        errors.contains("no checkpoint could be saved within 1 s"),
        "{errors}"
    );
    assert!((1..10).contains(&begun.elapsed().as_secs()));
}

/// How a run is ended, and when.
#[derive(Debug, Clone, Copy)]
struct Blow {
    /// With which signal.
    how: &'static str,
    /// Ranks as processes.
    apart: bool,
    /// Steps between checkpoints.
    every: u64,
    when: When,
}

impl Blow {
    fn drawn(draws: &mut SplitMix64, apart: bool) -> Self {
        Self {
            how: ["KILL", "KILL", "TERM", "INT"][draws.below(4) as usize],
            apart,
            every: 1 + draws.below(3),
            when: When::drawn(draws),
        }
    }
}

/// Runs until the blow falls, going on from an earlier part.
fn strike(bench: &Bench, ranks: &str, out: &str, from: Option<&str>, blow: Blow) {
    let every = blow.every.to_string();
    let launch = ["threads", "processes"][usize::from(blow.apart)];
    let resume: Vec<&str> = from.iter().flat_map(|from| ["--resume", from]).collect();
    let arguments = ["--out", out, "--save-every", &every, "--launch", launch];
    let all = [&ENDLESS[..], &arguments, &resume].concat();
    let mut child = Guarded::start(&mut bench.execute(ranks, &all));
    let saved = || bench.checkpoints(out).0;
    until("a checkpoint", || {
        let ended = child.0.try_wait().expect("it is ours");
        assert!(ended.is_none(), "{out} ended with {ended:?}");
        !saved().is_empty()
    });
    await_moment(bench, out, blow.when);
    if blow.how == "KILL" {
        let ranks = children(child.0.id());
        child.kill();
        until("the ranks' end", || {
            !ranks
                .iter()
                .any(|&rank| state(rank).is_some_and(|(state, _)| state != 'Z'))
        });
        return;
    }
    signal(blow.how, child.0.id());
    let (code, _, errors) = child.ended();
    assert_eq!(
        code,
        if blow.how == "TERM" { 143 } else { 130 },
        "{blow:?}: {errors}"
    );
    assert!(errors.contains("stopped after"), "{blow:?}: {errors}");
}

/// One run through so many blows, and what must be left of it.
fn chain(bench: &Bench, name: &str, seed: u64, blows: usize) {
    let mut draws = SplitMix64::new(seed);
    let apart = draws.below(2) == 1;
    let ranks = if apart { "2" } else { "4" };
    let mut parts: Vec<String> = Vec::new();
    let mut begins = 0;
    for number in 0..blows {
        let blow = Blow::drawn(&mut draws, apart);
        let context = format!("MOEFOLD_SEED={seed}, part {number}, {blow:?}");
        let out = format!("{name}-{number}");
        strike(bench, ranks, &out, parts.last().map(String::as_str), blow);
        let steps = bench.steps(&out);
        let done = steps.last().map_or(begins, |step| step.0 + 1);
        assert_eq!(steps.first().map(|step| step.0), Some(begins), "{context}");
        let (complete, more) = bench.checkpoints(&out);
        let newest = complete.last().copied().expect("one is complete");
        if blow.how == "KILL" {
            // The one that is due may have been under way; the one before it was complete before that began.
            let due = done / blow.every * blow.every;
            assert!(newest + blow.every >= due, "{context}: {newest} of {done}");
        } else {
            assert_eq!((newest, more), (done, false), "{context}");
        }
        parts.push(out);
        begins = newest;
    }
    let end = format!("{name}-end");
    let steps = (begins + 2).to_string();
    let from = parts.last().expect("there are some").clone();
    let (code, _, errors) = run(&mut bench.execute(
        ranks,
        &["--out", &end, "--steps", &steps, "--resume", &from],
    ));
    assert_eq!(code, 0, "MOEFOLD_SEED={seed}: {errors}");
    parts.push(end);
    let last = parts
        .iter()
        .flat_map(|part| bench.steps(part))
        .map(|step| step.0)
        .max();
    let whole = format!("{name}-whole");
    let steps = (last.expect("steps were taken") + 1).to_string();
    let (code, _, errors) = run(&mut bench.execute(ranks, &["--out", &whole, "--steps", &steps]));
    assert_eq!(code, 0, "MOEFOLD_SEED={seed}: {errors}");
    let whole = bench.steps(&whole);
    for part in &parts {
        for step in bench.steps(part) {
            assert_eq!(step, whole[step.0 as usize], "MOEFOLD_SEED={seed}: {part}");
        }
    }
}

#[test]
fn oracle_a_run_that_is_ended_anyhow_goes_on_to_the_bit() {
    let bench = Bench::new(&[TWO, FOUR]);
    for (number, seed) in (seed()..seed() + 3).enumerate() {
        chain(&bench, &number.to_string(), seed, 2);
    }
}

#[test]
#[ignore = "a hundred blows take minutes"]
fn oracle_a_run_that_is_ended_a_hundred_times_goes_on_to_the_bit() {
    let bench = Bench::new(&[TWO, FOUR]);
    for (number, seed) in (seed()..seed() + 25).enumerate() {
        chain(&bench, &number.to_string(), seed, 4);
    }
}
