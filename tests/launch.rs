//! `--launch processes` and `--launch env` from the outside: the same training as on rank threads, every
//! way in which processes fail to be a run, and profiles of them. Besides, what a signal does to a search.

mod common {
    pub(crate) mod child;
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod program;
    pub(crate) mod rank;
    pub(crate) mod tiny;
}

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::child::{Guarded, await_steps, children, signal, state};
use common::json;
use common::outcome::run;
use common::program::program;
use common::rank::is_rank;
use common::tiny::{Folder, fixture, tokens};
use moefold_profiles::CollectiveKind as Kind;
use moefold_profiles::directory::{Key, Profile, Sample};
use moefold_profiles::run::RunSummary;
use serde_json::Value;

/// A folder with a plan for the tiny Mixtral.
struct Bench(Folder);

impl Bench {
    fn new(ranks: u32, layout: &str) -> Self {
        let folder = Folder::new();
        folder.plan("plan.json", &ranks.to_string(), "24", Some(layout), &[]);
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path(name)
    }

    fn losses(&self, run: &str) -> Vec<(f64, f64)> {
        let steps = self.0.steps(run).into_iter();
        steps.map(|step| (step.loss, step.grad_norm)).collect()
    }

    fn execute(&self, rest: &[&str]) -> Command {
        let (plan, data) = (self.path("plan.json"), tokens());
        let first = [
            "execute",
            &plan,
            "--data",
            &data,
            "--device",
            "cpu",
            "--no-shuffle",
        ];
        program(&[&first, rest].concat())
    }

    /// One rank of several, on this machine.
    fn rank(&self, rank: u32, ranks: u32, port: u16, rest: &[&str]) -> Command {
        let mut command = self.execute(&[&["--launch", "env"], rest].concat());
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("MOEFOLD_SECRET", "a secret of the tests")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// A port that nobody listened at a moment ago.
fn port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("bound").port()
}

#[test]
fn differential_processes_train_as_threads_do_and_rank_0_leaves_everything() {
    for (ranks, layout) in [
        (2, "tp=1,ep=2,etp=1,mbs=1"),
        (4, "tp=2,ep=4,etp=1,mbs=1"),
        (2, "tp=1,cp=2,ep=2,etp=1,mbs=1"),
        (4, "tp=1,pp=2,ep=2,etp=1,mbs=2"),
    ] {
        let bench = Bench::new(ranks, layout);
        let go = |launch: &str| {
            let (dir, saved) = (bench.path(launch), bench.path(&format!("{launch}-saved")));
            let (code, answer, errors) = run(&mut bench.execute(&[
                "--launch",
                launch,
                "--steps",
                "4",
                "--lr",
                "2e-3",
                "--out",
                &dir,
                "--save-hf",
                &saved,
                "--json",
            ]));
            assert_eq!((code, errors.as_str()), (0, ""), "{launch}");
            let answer = json::document(&answer);
            assert_eq!(answer["run_dir"], dir.as_str());
            (dir, saved)
        };
        let (_, threads_saved) = go("threads");
        let (processes, processes_saved) = go("processes");
        assert_eq!(
            bench.losses("processes"),
            bench.losses("threads"),
            "to the bit"
        );
        let weights =
            |saved: &str| fs::read(Path::new(saved).join("model.safetensors")).expect("saved");
        assert!(
            weights(&processes_saved) == weights(&threads_saved),
            "the same weights"
        );

        let read =
            |name: &str| fs::read_to_string(Path::new(&processes).join(name)).expect("written");
        let summary: RunSummary = serde_json::from_str(&read("summary.json")).expect("a summary");
        let peaks: Vec<u32> = summary.peak_by_rank.iter().map(|peak| peak.rank).collect();
        assert_eq!(peaks, (0..ranks).collect::<Vec<_>>());
        assert!(
            summary.busy_s.contains_key("grouped_gemm"),
            "{:?}",
            summary.busy_s
        );
        let trace = json::read(Path::new(&processes).join("trace.json"));
        let events = trace["traceEvents"].as_array().expect("events");
        for rank in 0..ranks {
            let is_of = |event: &&Value| event["pid"] == rank && event["ph"] == "X";
            let spans = events.iter().filter(is_of).count();
            assert!(spans > 10, "{spans} spans of rank {rank}");
        }
    }
}

#[test]
fn the_failure_of_a_rank_is_passed_on_once_with_its_exit_code() {
    let bench = Bench::new(4, "tp=2,ep=4,etp=1,mbs=1");
    let out = bench.path("run");
    let (code, _, errors) = run(&mut bench.execute(&[
        "--launch",
        "processes",
        "--lr",
        "1e30",
        "--steps",
        "8",
        "--out",
        &out,
    ]));
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains("diverged"), "{errors}");
    assert_eq!(errors.matches("error: ").count(), 1, "{errors}");

    let nowhere = bench.path("nowhere");
    let out = bench.path("refused");
    let (code, _, errors) =
        run(&mut bench.execute(&["--launch", "processes", "--init", &nowhere, "--out", &out]));
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("nowhere: does not exist"), "{errors}");
    assert_eq!(errors.matches("error: ").count(), 1, "{errors}");
}

#[test]
fn a_rank_that_dies_ends_the_others_which_say_who_it_was() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let (port, out) = (port(), bench.path("run"));
    let start = |rank| {
        let mut command = bench.rank(rank, 2, port, &["--steps", "100000", "--out", &out]);
        Guarded::start(&mut command)
    };
    let (first, mut second) = (start(0), start(1));
    await_steps(&out);
    second.kill();
    let (code, _, errors) = first.ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("because rank 1 failed: its process ended without a word"),
        "{errors}"
    );

    // And the other way round.
    let (port, out) = (self::port(), bench.path("again"));
    let start = |rank| {
        let mut command = bench.rank(rank, 2, port, &["--steps", "100000", "--out", &out]);
        Guarded::start(&mut command)
    };
    let (mut first, second) = (start(0), start(1));
    await_steps(&out);
    first.kill();
    let (code, _, errors) = second.ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("because rank 0 failed: the connection to it broke"),
        "{errors}"
    );
}

#[test]
fn ranks_that_never_come_and_ports_in_use_are_named() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let out = bench.path("run");
    let alone = |rank, port| {
        let mut command = bench.rank(rank, 2, port, &["--out", &out]);
        run(command.env("MOEFOLD_TIMEOUT_S", "0.5"))
    };
    let port = self::port();
    let (code, _, errors) = alone(0, port);
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains(&format!(
            "127.0.0.1:{port} for ranks [1] of 2, which did not come"
        )),
        "{errors}"
    );
    let (code, _, errors) = alone(1, port);
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("waited 0.5 s for rank 0, which did not answer"),
        "{errors}"
    );

    let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let (code, _, errors) = alone(0, holder.local_addr().expect("bound").port());
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains("the port is in use"), "{errors}");
    assert!(
        !Path::new(&out).join("plan.json").exists(),
        "nothing was run"
    );
}

#[test]
fn a_rank_that_fails_before_the_ranks_meet_is_not_waited_for() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let (port, out) = (port(), bench.path("run"));
    let mut first = bench.rank(0, 2, port, &["--out", &out]);
    let first = Guarded::start(first.env("MOEFOLD_TIMEOUT_S", "40"));
    let begun = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert!(begun.elapsed() < Duration::from_mins(1), "nobody listens");
        thread::sleep(Duration::from_millis(10));
    }
    let nowhere = bench.path("nowhere");
    let second = ["--out", &out, "--init", &nowhere];
    let (code, _, errors) = run(&mut bench.rank(1, 2, port, &second));
    assert_eq!(code, 2, "{errors}");
    let (code, _, errors) = first.ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("rank 1 failed before it could take part")
            && errors.contains("nowhere: does not exist"),
        "{errors}"
    );
}

#[test]
fn ranks_that_begin_with_other_weights_or_checkpoints_are_told_apart() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let (one, other) = (fixture("mixtral"), bench.path("other"));
    fs::create_dir(&other).expect("writable");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(format!("{one}/{name}"), format!("{other}/{name}")).expect("copies");
    }
    // All but its last value are the same.
    let path = format!("{other}/model.safetensors");
    let mut bytes = fs::read(&path).expect("there");
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("writable");
    for (name, init) in [("from-one", &one), ("from-random", &"random".to_owned())] {
        let out = bench.path(name);
        let flags = [
            "--steps",
            "1",
            "--save-every",
            "1",
            "--init",
            init,
            "--out",
            &out,
        ];
        let (code, _, errors) = run(&mut bench.execute(&flags));
        assert_eq!(code, 0, "{errors}");
    }
    let saved = ["from-one", "from-random"].map(|name| bench.path(name));
    for (flag, [first, second]) in [
        ("--init", [&one, &other]),
        ("--resume", [&saved[0], &saved[1]]),
    ] {
        let (port, out) = (port(), bench.path("run"));
        let start = |rank, from: &str| {
            let flags = ["--out", &out, "--steps", "2", flag, from];
            Guarded::start(&mut bench.rank(rank, 2, port, &flags))
        };
        for ended in [start(0, first), start(1, second)] {
            let (code, _, errors) = ended.ended();
            assert_eq!(code, 1, "{flag}: {errors}");
            assert!(
                errors.contains("rank 1 would train otherwise than rank 0: init is "),
                "{flag}: {errors}"
            );
        }
    }
}

#[test]
fn a_rank_that_would_train_otherwise_ends_the_run_before_it_begins() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let run_dir = bench.path("run");
    for (flags, expected) in [
        (["--lr", "0.5"], "lr is 0.5 there and 0.0003 here"),
        (["--seed", "7"], "seed 7"),
        (["--steps", "3"], "steps in all is 3 there"),
    ] {
        let port = port();
        let start = |rank, flags: &[&str]| {
            let out = ["--out", &run_dir];
            Guarded::start(&mut bench.rank(rank, 2, port, &[&out, flags].concat()))
        };
        for (rank, ended) in [start(0, &[]), start(1, &flags)].into_iter().enumerate() {
            let (code, _, errors) = ended.ended();
            assert_eq!(code, 1, "rank {rank}: {errors}");
            assert!(
                errors.contains("rank 1 would train otherwise than rank 0")
                    && errors.contains(expected),
                "rank {rank}: {errors}"
            );
        }
    }
}

#[test]
fn a_launcher_that_says_too_little_or_too_much_is_refused_by_the_variable() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let refused = |command: &mut Command, expected: &str| {
        let (code, _, errors) = run(command);
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains(expected), "{expected} is not in: {errors}");
    };
    refused(
        &mut bench.execute(&["--launch", "env"]),
        "neither RANK (torchrun) nor SLURM_PROCID",
    );
    for missing in [
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MOEFOLD_SECRET",
    ] {
        let mut command = bench.rank(0, 2, 29500, &[]);
        refused(
            command.env_remove(missing),
            &format!("{missing} is not set"),
        );
    }
    let mut command = bench.rank(0, 2, 29500, &[]);
    refused(command.env("RANK", "2"), "RANK is 2 and WORLD_SIZE is 2");
    refused(
        &mut bench.rank(0, 3, port(), &[]),
        "the plan is for 2 ranks, and 3 were started",
    );
    let mut command = bench.rank(0, 2, 29500, &[]);
    refused(
        command.env("MOEFOLD_TIMEOUT_S", "soon"),
        "MOEFOLD_TIMEOUT_S: found \"soon\"",
    );
}

#[test]
fn a_rank_that_hangs_ends_the_run_within_its_heartbeat() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    for (hung, who) in [(1, "rank 1 failed"), (0, "rank 0 failed")] {
        let (port, out) = (port(), bench.path(&format!("run-{hung}")));
        let flags = ["--steps", "100000", "--out", &out, "--heartbeat-s", "2"];
        let start = |rank| Guarded::start(&mut bench.rank(rank, 2, port, &flags));
        let (first, second) = (start(0), start(1));
        await_steps(&out);
        let (other, stopped) = if hung == 1 {
            (first, second)
        } else {
            (second, first)
        };
        let begun = Instant::now();
        signal("STOP", stopped.0.id());
        let (code, _, errors) = other.ended();
        assert_eq!(code, 1, "{errors}");
        assert!(
            errors.contains(who) && errors.contains("it has been silent for 2.0 s"),
            "{errors}"
        );
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(7), "rank {hung}: {took:?}");
    }
}

/// Nor does the process that started the ranks wait for it.
#[test]
fn a_rank_that_hangs_ends_the_command_within_its_heartbeat() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    for hung in [1, 0] {
        let out = bench.path(&format!("run-{hung}"));
        let flags = "--launch processes --steps 100000 --heartbeat-s 2 --out";
        let flags: Vec<&str> = flags.split(' ').chain([out.as_str()]).collect();
        let mut command = bench.execute(&flags);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let parent = Guarded::start(&mut command);
        await_steps(&out);
        let mut ranks = children(parent.0.id()).into_iter();
        let stopped = ranks.find(|&process| is_rank(process, hung));
        let begun = Instant::now();
        signal("STOP", stopped.expect("it trains"));
        let (code, _, errors) = parent.ended();
        assert_eq!(code, 1, "{errors}");
        let who = format!("rank {hung} failed");
        assert!(
            errors.contains(&who) && errors.contains("it has been silent for 2.0 s"),
            "{errors}"
        );
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(7), "rank {hung}: {took:?}");
    }
}

#[test]
fn ranks_end_with_the_process_that_started_them_whatever_ends_it() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    for how in ["TERM", "KILL"] {
        let out = bench.path(how);
        let arguments = ["--launch", "processes", "--steps", "100000", "--out", &out];
        let mut command = bench.execute(&arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut parent = Guarded::start(&mut command);
        await_steps(&out);
        let ranks = children(parent.0.id());
        assert_eq!(ranks.len(), 2);
        signal(how, parent.0.id());
        parent.0.wait().expect("it is ours");
        let begun = Instant::now();
        let runs = |&rank: &u32| state(rank).is_some_and(|(state, _)| state != 'Z');
        while ranks.iter().any(runs) {
            if begun.elapsed() > Duration::from_secs(20) {
                ranks
                    .iter()
                    .filter(|rank| runs(rank))
                    .for_each(|&rank| signal("KILL", rank));
                panic!("ranks outlive {how}");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn processes_are_profiled_and_the_profile_prices_their_plans() {
    let bench = Bench::new(2, "tp=1,ep=2,etp=1,mbs=1");
    let (plan, out) = (bench.path("plan.json"), bench.path("profile"));
    let profile = |rest: &[&str]| {
        let first = ["profile", "--plan", &plan, "--device", "cpu", "--out", &out];
        program(&[&first[..], &["--budget-s", "0.1"], rest].concat())
    };
    let (code, answer, errors) = run(&mut profile(&["--launch", "processes", "--json"]));
    assert_eq!((code, errors.as_str()), (0, ""));
    let answer = json::document(&answer);
    assert_eq!(answer["directory"], out.as_str());
    let measured = Profile::load(Path::new(&out)).expect("rank 0 wrote it");
    assert_eq!(
        (measured.device.as_str(), measured.concurrent_ranks),
        ("cpu", 2)
    );
    assert!(
        measured.command.contains("--launch env"),
        "{}",
        measured.command
    );
    for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll] {
        let is_of = |sample: &Sample| matches!(sample.key, Key::Collective(c) if c.kind == kind);
        assert!(measured.samples.iter().any(is_of), "{kind:?}");
    }
    assert!(!measured.shared_device);

    let rest = ["--profile", &out];
    bench.0.plan(
        "again.json",
        "2",
        "24",
        Some("tp=1,ep=2,etp=1,mbs=1"),
        &rest,
    );
    let planned = fs::read_to_string(bench.path("again.json")).expect("written");
    assert!(planned.contains(&measured.hash()), "it names its source");

    let mut alone = profile(&["--launch", "env", "--ranks", "4"]);
    let started = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("MOEFOLD_SECRET", "a secret of the tests"),
    ];
    let (code, _, errors) = run(alone.envs(started));
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("--ranks 4: 2 ranks were started"),
        "{errors}"
    );
}

/// The first SIGINT ends a search, with the best that it has found.
#[test]
fn a_search_that_is_interrupted_answers_with_the_best_so_far() {
    let arguments = "plan --model deepseek-v3 --cluster dgx-h100 --gpus 256 --seq-len 4096 --global-batch 2048 --front";
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    // A machine may be slow; a search of twenty limits is slower.
    for seconds in [2.0, 4.0, 8.0, 16.0, 1.0, 0.5] {
        let mut command = program(&arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = Guarded::start(&mut command);
        thread::sleep(Duration::from_secs_f64(seconds));
        signal("INT", child.0.id());
        let (code, stdout, stderr) = child.ended();
        if code == 0 {
            // It was over before.
            continue;
        }
        assert_eq!(code, 130, "{stderr}");
        if stdout.is_empty() {
            assert!(
                stderr.contains("SIGINT: stopped before a plan was found"),
                "{stderr}"
            );
            continue;
        }
        assert!(
            stderr.contains("SIGINT: the search was stopped; the answer is the best so far"),
            "{stderr}"
        );
        assert!(stdout.contains("Looked at"), "{stdout}");
        return;
    }
    panic!("no search was under way with a plan found");
}
