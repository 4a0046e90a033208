//! Runs that are started again after ranks have died or hung, from the outside: `--restarts` and `--elastic`.

mod common {
    pub(crate) mod child;
    pub(crate) mod draws;
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod plans;
    pub(crate) mod program;
    pub(crate) mod rank;
    pub(crate) mod runs;
    pub(crate) mod tiny;
}

use std::fs;
use std::path::Path;

use common::child::{Guarded, await_steps, children, signal, state};
use common::draws::{When, await_moment, seed};
use common::json;
use common::outcome::run;
use common::plans::Bench;
use common::program::program;
use common::rank::is_rank;
use common::runs::{ENDLESS, FOUR, TWO, until};
use moefold_profiles::random::SplitMix64;

/// A run that restarts, while it goes on.
struct Restarting<'a> {
    bench: &'a Bench,
    out: &'a str,
    child: Guarded,
    /// The processes that are gone.
    gone: Vec<u32>,
}

impl<'a> Restarting<'a> {
    fn start(bench: &'a Bench, ranks: &str, out: &'a str, rest: &[&str]) -> Self {
        let first = ["--launch", "processes", "--out", out];
        let mut command = bench.execute(ranks, &[&first, rest].concat());
        Self {
            bench,
            out,
            child: Guarded::start(&mut command),
            gone: Vec::new(),
        }
    }

    /// The process of a rank, of those that are there now.
    fn rank(&mut self, rank: u32) -> u32 {
        let mut found = None;
        until("a rank", || {
            let mut all = children(self.child.0.id());
            all.retain(|process| !self.gone.contains(process));
            found = all.into_iter().find(|&process| is_rank(process, rank));
            found.is_some()
        });
        found.expect("it was waited for")
    }

    /// Steps of the newest checkpoint.
    fn saved(&self) -> u64 {
        self.bench
            .checkpoints(self.out)
            .0
            .into_iter()
            .max()
            .unwrap_or(0)
    }

    /// Waits until there is a checkpoint of more than so many steps.
    fn await_saved(&mut self, more_than: u64) {
        until(&format!("a newer checkpoint of {}", self.out), || {
            let ended = self.child.0.try_wait().expect("it is ours");
            assert!(ended.is_none(), "{} ended with {ended:?}", self.out);
            self.saved() > more_than
        });
    }

    /// Waits until a step is written.
    fn await_step(&self) {
        let steps = self.bench.path(&format!("{}/steps.jsonl", self.out));
        let written = || fs::metadata(&steps).and_then(|file| file.modified()).ok();
        let before = written();
        until("a step", || written() > before);
    }

    /// Sends a signal to a rank, and waits until the ranks of this try are gone; gives the steps that they have saved.
    fn strike(&mut self, how: &str, rank: u32) -> u64 {
        let struck = self.rank(rank);
        let all = children(self.child.0.id());
        signal(how, struck);
        await_end(&format!("the end of a try of {}", self.out), &all);
        self.gone.extend(all);
        self.saved()
    }

    /// Asks for the end of the run, once it goes on beyond so many steps.
    fn stop(mut self, beyond: u64) -> String {
        self.await_saved(beyond);
        signal("TERM", self.child.0.id());
        let (code, _, errors) = self.child.ended();
        assert_eq!(code, 143, "{}: {errors}", self.out);
        errors
    }
}

/// Waits until no process of these runs any more.
fn await_end(what: &str, processes: &[u32]) {
    until(what, || {
        let runs = |&process: &u32| state(process).is_some_and(|(state, _)| state != 'Z');
        !processes.iter().any(runs)
    });
}

/// Holds a run to one that nothing happened to: every step once, to the bit.
fn equals_whole(bench: &Bench, ranks: &str, run_dir: &str) {
    let steps = bench.steps(run_dir);
    let whole = format!("{run_dir}-whole");
    let count = steps.len().to_string();
    let (code, _, errors) = run(&mut bench.execute(ranks, &["--out", &whole, "--steps", &count]));
    assert_eq!(code, 0, "{errors}");
    assert!(
        steps == bench.steps(&whole),
        "{run_dir} differs from {whole}"
    );
}

#[test]
fn oracle_a_run_whose_ranks_die_and_hang_goes_on_by_itself() {
    let bench = Bench::new(&[TWO]);
    let flags = ["--restarts", "9", "--save-every", "2", "--heartbeat-s", "5"];
    let mut it = Restarting::start(&bench, "2", "run", &[&ENDLESS[..], &flags].concat());
    let mut saved = 0;
    for (how, rank) in [("KILL", 1), ("KILL", 0), ("STOP", 1)] {
        it.await_saved(saved);
        saved = it.strike(how, rank);
    }
    // A signal is no failure.
    let errors = it.stop(saved);
    for part in [
        "note: rank 1 was ended by signal 9; restart 1 of 9 goes on after ",
        "note: rank 0 was ended by signal 9; restart 2 of 9 goes on after ",
        "because rank 1 failed: it has been silent for 5.0 s",
        "; restart 3 of 9 goes on after ",
        "error: SIGTERM: stopped after",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert_eq!(errors.matches("restart ").count(), 3, "{errors}");
    equals_whole(&bench, "2", "run");
}

#[test]
fn restarts_end_with_their_number_and_where_nothing_comes_of_them() {
    let bench = Bench::new(&[TWO]);
    // Rank 1 dies more often than is allowed for; what is there can be taken up by hand.
    let arguments = [&ENDLESS[..], &["--restarts", "1", "--save-every", "1"]].concat();
    let mut it = Restarting::start(&bench, "2", "run", &arguments);
    it.await_saved(0);
    let saved = it.strike("KILL", 1);
    it.await_saved(saved);
    it.strike("KILL", 1);
    let (code, _, errors) = it.child.ended();
    assert_eq!(code, 1, "{errors}");
    for part in [
        "has been restarted 1 times (--restarts 1)",
        "`--continue --out run` goes on",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    let saved = bench
        .checkpoints("run")
        .0
        .into_iter()
        .max()
        .expect("one is there");
    let steps = (saved + 2).to_string();
    let by_hand = ["--out", "run", "--continue", "--steps", &steps];
    let (code, _, errors) = run(&mut bench.execute("2", &by_hand));
    assert_eq!(code, 0, "{errors}");
    equals_whole(&bench, "2", "run");

    // No checkpoint comes between deaths.
    let arguments = [&ENDLESS[..], &["--restarts", "9", "--save-every", "900000"]].concat();
    let mut it = Restarting::start(&bench, "2", "idle", &arguments);
    for _ in 0..3 {
        it.rank(1);
        it.await_step();
        it.strike("KILL", 1);
    }
    let (code, _, errors) = it.child.ended();
    assert_eq!(code, 1, "{errors}");
    assert_eq!(
        errors.matches("begins again, since no checkpoint").count(),
        2,
        "{errors}"
    );
    assert!(
        errors.contains("3 tries in a row have completed no checkpoint"),
        "{errors}"
    );

    // Numbers that are none would come again.
    let diverging = [
        "--lr",
        "1e30",
        "--steps",
        "8",
        "--restarts",
        "3",
        "--save-every",
        "1",
    ];
    let (code, _, errors) = Restarting::start(&bench, "2", "diverging", &diverging)
        .child
        .ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("diverged") && !errors.contains("restart"),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn oracle_a_run_that_loses_ranks_goes_on_with_those_that_are_left() {
    // Weights that rest divided allow no pipeline: three ranks cannot share eight sequences and four heads.
    let bench = Bench::new(&[]);
    let sharded = ["--zero", "fsdp"];
    bench.0.plan("4.json", FOUR.0, "8", Some(FOUR.1), &sharded);
    let flags = ["--restarts", "2", "--elastic=1", "--save-every", "1"];
    let mut it = Restarting::start(&bench, "4", "run", &[&ENDLESS[..], &flags].concat());
    it.await_saved(0);
    let saved = it.strike("KILL", 2);
    let errors = it.stop(saved + 1);
    let first = json::read(bench.path("run/env.json"))["resumed"]["step"]
        .as_u64()
        .expect("it goes on from one");
    let said = format!("restart 1 of 2 goes on after {first} steps");
    for part in [
        "no plan for 3 ranks",
        "rank 2 was ended by signal 9; of 4 places 3 are left, as rank 2 has died once there",
        "planned again for 2 ranks, tp=",
        &said,
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    // By hand: a plan for two, and the checkpoint of a run on four.
    bench.0.plan("2.json", "2", "8", None, &sharded);
    assert!(
        json::read(bench.path("2.json")) == json::read(bench.path("run/plan.json")),
        "the same plan"
    );
    let steps = bench.steps("run");
    let (first, all) = (first.to_string(), steps.len().to_string());
    for (ranks, arguments) in [
        (
            "4",
            ["--out", "four", "--steps", &first, "--save-every", &first].as_slice(),
        ),
        ("2", &["--out", "two", "--steps", &all, "--resume", "four"]),
    ] {
        let (code, _, errors) = run(&mut bench.execute(ranks, arguments));
        assert_eq!(code, 0, "{errors}");
    }
    assert!(
        steps == [bench.steps("four"), bench.steps("two")].concat(),
        "to the bit"
    );
}

#[test]
fn oracle_a_run_whose_parent_is_killed_is_taken_up_by_another() {
    let bench = Bench::new(&[TWO]);
    let flags = ["--restarts", "2", "--save-every", "1"];
    let mut it = Restarting::start(&bench, "2", "run", &[&ENDLESS[..], &flags].concat());
    it.await_saved(0);
    await_steps(&bench.path("run"));
    let ranks = children(it.child.0.id());
    it.child.kill();
    await_end("ranks without a parent", &ranks);
    let steps = (it.saved() + 3).to_string();
    let again = [&flags[..], &["--continue", "--steps", &steps]].concat();
    let (code, _, errors) = Restarting::start(&bench, "2", "run", &again).child.ended();
    assert_eq!(code, 0, "{errors}");
    equals_whole(&bench, "2", "run");
}

#[test]
fn a_run_whose_places_allow_no_layout_ends_with_exit_code_3_and_keeps_what_it_has() {
    let bench = Bench::new(&[TWO]);
    // Two such devices have room for the experts, one has not.
    let mut plan = json::read(bench.path("2.json"));
    let peak = plan["predicted"]["memory_gib_by_pp_rank"][0].as_f64();
    plan["cluster"]["name"] = "small".into();
    plan["cluster"]["gpu"]["memory_gib"] = (1.1 * peak.expect("a number")).into();
    fs::write(bench.path("2.json"), plan.to_string()).expect("writable");
    let flags = ["--restarts", "3", "--elastic=1", "--save-every", "1"];
    let mut it = Restarting::start(&bench, "2", "run", &[&ENDLESS[..], &flags].concat());
    it.await_saved(0);
    let saved = it.strike("KILL", 1);
    let (code, _, errors) = it.child.ended();
    assert_eq!(code, 3, "{errors}");
    for part in [
        "error: rank 1 was ended by signal 9; there is no plan for the ranks that are left: no plan for 1 rank: ",
        "`--continue --out run` goes on from its newest checkpoint",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert!(!Path::new(&bench.path("run/plan-1-ranks.json")).exists());
    let steps = (saved + 2).to_string();
    let by_hand = ["--out", "run", "--continue", "--steps", &steps];
    let (code, _, errors) = run(&mut bench.execute("2", &by_hand));
    assert_eq!(code, 0, "{errors}");
}

#[test]
fn a_rank_that_dies_after_the_last_step_is_not_started_again() {
    let bench = Bench::new(&[TWO]);
    let (code, _, errors) =
        run(&mut bench.execute("2", &["--out", "run", "--steps", "2", "--save-every", "1"]));
    assert_eq!(code, 0, "{errors}");
    // The last checkpoint is complete before the one that is not kept any more is removed, which takes a while.
    for number in 0..30_000 {
        let name = format!("run/checkpoints/step-1/{number}");
        fs::write(bench.path(&name), "").expect("writable");
    }
    let flags = [
        "--restarts",
        "3",
        "--save-every",
        "1",
        "--steps",
        "3",
        "--continue",
    ];
    let mut it = Restarting::start(&bench, "2", "run", &flags);
    it.await_saved(2);
    it.strike("KILL", 1);
    let (code, _, errors) = it.child.ended();
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains(
            "rank 1 was ended by signal 9, after the last step: the checkpoint in run has all steps"
        ) && !errors.contains("restart"),
        "{errors}"
    );
    // As it says.
    let convert = ["convert", "run", "--out", "weights"];
    let (code, _, errors) = run(program(&convert).current_dir(bench.0.0.path()));
    assert_eq!(code, 0, "{errors}");
    assert!(Path::new(&bench.path("weights/model.safetensors")).is_file());
}

#[test]
fn restarts_that_make_no_sense_are_refused_by_the_flag() {
    let bench = Bench::new(&[TWO]);
    for (flags, expected) in [
        ("--restarts 2", "--save-every"),
        ("--elastic --save-every 1 --launch processes", "--restarts"),
        (
            "--restarts 2 --save-every 1",
            "--restarts 2: ranks are threads of this process",
        ),
        (
            "--restarts 2 --save-every 1 --launch env",
            "torchrun --max-restarts 2",
        ),
        (
            "--restarts 1 --save-every 1 --launch processes --elastic",
            "give --restarts 2, or --elastic=1",
        ),
        (
            "--restarts 0 --save-every 1 --launch processes",
            "--restarts",
        ),
        ("--restarts 2 --dry-run", "--dry-run"),
    ] {
        let flags: Vec<&str> = flags.split(' ').collect();
        let (code, _, errors) = run(&mut bench.execute("2", &flags));
        assert_eq!(code, 2, "{flags:?}: {errors}");
        assert!(
            errors.contains(expected),
            "{expected:?} is not in: {errors}"
        );
    }
    assert!(!Path::new(&bench.path("runs")).exists());
}

#[test]
#[ignore = "eighty blows take minutes"]
fn oracle_a_run_that_restarts_again_and_again_equals_one_that_does_not() {
    let bench = Bench::new(&[TWO, FOUR]);
    for seed in seed()..seed() + 20 {
        let mut draws = SplitMix64::new(seed);
        let ranks = [2, 4][draws.below(2) as usize];
        // What fails names it.
        let (out, name) = (format!("MOEFOLD_SEED={seed}"), ranks.to_string());
        let every = (1 + draws.below(3)).to_string();
        let flags = [
            "--restarts",
            "4",
            "--save-every",
            &every,
            "--heartbeat-s",
            "2",
        ];
        let mut it = Restarting::start(&bench, &name, &out, &[&ENDLESS[..], &flags].concat());
        let mut saved = 0;
        for _ in 0..4 {
            let when = When::drawn(&mut draws);
            // Of a rank that is stopped, the others hear after a while.
            let (how, rank) = (
                ["KILL", "KILL", "KILL", "STOP"][draws.below(4) as usize],
                draws.below(ranks),
            );
            it.await_saved(saved);
            await_moment(&bench, &out, when);
            saved = it.strike(how, rank as u32);
        }
        it.stop(saved);
        equals_whole(&bench, &name, &out);
    }
}
