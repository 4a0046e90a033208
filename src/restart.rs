//! `execute --launch processes --restarts N`: ranks are started again after one has died, and `--elastic` plans again for
//! fewer where a place is lost.
//!
//! Every try is the same command with `--continue`, so it goes on in its directory from the newest checkpoint. What a
//! try leaves decides whether there is another ([`Tries::after`]).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::anyhow;
use moefold_executor::checkpoint;
use moefold_executor::claim::Claim;
use moefold_executor::run::RunDir;
use moefold_planner::plan::Plan;
use moefold_planner::search::Progress;

use crate::cli::{ExecuteArgs, Launch};
use crate::device::{Chosen, Copies};
use crate::failure::{Failure, failure};
use crate::launch;
use crate::output::Output;
use crate::plan;
use crate::signals;

/// Tries in a row that complete no checkpoint, after which there is no other.
const IDLE_TRIES: u32 = 3;

/// What `--restarts` and `--elastic` ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Restarts {
    /// How many at most.
    count: u32,
    /// Deaths at one place, without a checkpoint in between, with which it is lost; none are where nobody asks.
    deaths: Option<u32>,
}

impl Restarts {
    /// What the flags say; refuses what makes no sense under `--launch`.
    pub(crate) fn of(args: &ExecuteArgs) -> Result<Option<Self>, Failure> {
        let Some(count) = args.again.restarts else {
            return Ok(None);
        };
        let refuse = |what: String| Err(Failure::Request(anyhow!(what)));
        match args.launch {
            Launch::Processes => {}
            Launch::Threads => {
                return refuse(format!(
                    "--restarts {count}: ranks are threads of this process, which die with it: give --launch processes"
                ));
            }
            Launch::Env => {
                return refuse(format!(
                    "--restarts {count}: under --launch env the launcher starts ranks again: give it the count (torchrun \
                     --max-restarts {count}) and this command --continue"
                ));
            }
        }
        match args.again.elastic {
            Some(deaths) if deaths > count => refuse(format!(
                "--elastic: a place is lost when its rank has died {deaths} times in a row, and --restarts {count} is \
                 fewer: give --restarts {deaths}, or --elastic={count}"
            )),
            deaths => Ok(Some(Self { count, deaths })),
        }
    }
}

/// Runs a command on ranks that are processes, again and again as `restarts` allow.
pub(crate) fn run(
    args: &ExecuteArgs,
    plan: Plan,
    device: &Chosen,
    restarts: Restarts,
    output: Output,
) -> Result<(), Failure> {
    signals::catch()?;
    // The first try chooses no directory that the next would not know.
    let (dir, is_new) = if let Some(dir) = &args.out {
        if !args.again.goes_on {
            // Later tries go on with what is there: none of it may be another run's.
            drop(RunDir::claim(dir).map_err(failure)?);
        }
        (dir.clone(), false)
    } else {
        let claim = Claim::numbered(Path::new("runs"), "run").map_err(failure)?;
        (claim.hand_on(), true)
    };
    let ran = in_directory(&dir, args, plan, device, restarts, output);
    if is_new {
        // Where something is in it, it stays.
        let _ = std::fs::remove_dir(&dir);
    }
    ran
}

fn in_directory(
    dir: &Path,
    args: &ExecuteArgs,
    mut plan: Plan,
    device: &Chosen,
    restarts: Restarts,
    output: Output,
) -> Result<(), Failure> {
    let newest = || -> Result<_, Failure> { Ok(checkpoint::newest(dir).map_err(failure)?.0) };
    let mut tries = Tries::new(restarts, plan.request.gpus, newest()?.map(|from| from.step));
    let mut replanned: Option<PathBuf> = None;
    loop {
        let mut added: Vec<OsString> = vec!["--out".into(), dir.into()];
        if args.again.goes_on || tries.done > 0 {
            added.push("--continue".into());
        }
        if let Some(path) = &replanned {
            added.extend(["--replanned".into(), path.into()]);
        }
        let shown = match device {
            Chosen::Cuda(_) if tries.lost > 0 => {
                let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
                Some(still_shown(shown.as_deref(), &tries.places))
            }
            _ => None,
        };
        let ranks = plan.request.gpus;
        let Err(broken) = launch::attempt(ranks, &added, shown.as_deref()) else {
            return Ok(());
        };
        if broken.is_final || signals::told().load(Ordering::Relaxed) > 0 {
            return Err(broken.failure);
        }
        let from = newest()?;
        let saved = from.as_ref().map(|from| from.step);
        if saved == Some(args.train.steps.into()) {
            return Err(Failure::Runtime(anyhow!(
                "{}, after the last step: the checkpoint in {} has all steps, and `moefold convert` writes weights from it",
                broken.failure,
                dir.display()
            )));
        }
        let what = tries.after(&broken.culprits, ranks, saved).map_err(|why| {
            Failure::Runtime(anyhow!(
                "{}; {why}{}",
                broken.failure,
                by_hand(dir, saved.is_some())
            ))
        })?;
        let number = format!("restart {} of {}", tries.done, restarts.count);
        let mut said = format!("{}; {number}", broken.failure);
        if let Next::Fewer(lost) = what {
            let left = tries.places.len() as u32;
            let found = fewer(&plan, left, device, Copies::of(args));
            signalled(dir, saved.is_some())?;
            let (found, passed_over) = found.map_err(|why| {
                Failure::Infeasible(anyhow!(
                    "{}; there is no plan for the ranks that are left: {why}{}",
                    broken.failure,
                    by_hand(dir, saved.is_some())
                ))
            })?;
            plan = found;
            std::fs::create_dir_all(dir)?;
            let path = RunDir::plan_of(dir, plan.request.gpus);
            plan.save(&path).map_err(Failure::runtime)?;
            replanned = Some(path);
            for why in passed_over {
                output.note(&why)?;
            }
            said = format!(
                "{}; of {} places {} left, as rank {} has died {} there: planned again for {} ranks, {}; {number}",
                broken.failure,
                tries.places.len() + lost.len(),
                match tries.places.len() {
                    1 => "1 is".to_owned(),
                    left => format!("{left} are"),
                },
                listed(&lost),
                match restarts.deaths {
                    Some(1) | None => "once".to_owned(),
                    Some(deaths) => format!("{deaths} times in a row"),
                },
                plan.request.gpus,
                plan.planned.layout.pinned(),
            );
        }
        output.note(&match &from {
            Some(from) => format!("{said} goes on after {} steps", from.step),
            None => format!("{said} begins again, since no checkpoint is complete yet"),
        })?;
        signalled(dir, saved.is_some())?;
    }
}

/// Refuses to go on once a signal has asked for the end.
fn signalled(dir: &Path, is_saved: bool) -> Result<(), Failure> {
    match signals::told().load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => {
            let name = signals::name(signal);
            let why = anyhow!("{name}: not started again{}", by_hand(dir, is_saved));
            Err(Failure::Signalled(signal, why))
        }
    }
}

/// What a user may do who has more patience.
fn by_hand(dir: &Path, is_saved: bool) -> String {
    if is_saved {
        format!(
            "; `--continue --out {}` goes on from its newest checkpoint",
            dir.display()
        )
    } else {
        String::new()
    }
}

fn listed(ranks: &[u32]) -> String {
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    ranks.join(", ")
}

/// What was planned, planned again for at most `places` ranks: the most for which there is a plan that this machine can
/// run. Beside it, why more are not. Fails with that where no number does. A signal stops the search.
fn fewer(
    plan: &Plan,
    places: u32,
    device: &Chosen,
    copies: Copies,
) -> Result<(Plan, Vec<String>), String> {
    let mut passed_over = Vec::new();
    let is_told = || signals::told().load(Ordering::Relaxed) > 0;
    let watch = |_: &Progress| {
        if is_told() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    for ranks in (1..=places).rev() {
        if is_told() {
            break;
        }
        let found = plan::again(plan, ranks, &watch).map_err(|error| plan::refusal(*error));
        let found = found.and_then(|found| {
            device.of_plan(&found, Launch::Processes, None, copies)?;
            Ok(found)
        });
        match found {
            Ok(found) => return Ok((found, passed_over)),
            Err(why) => passed_over.push(format!(
                "no plan for {ranks} rank{}: {why}",
                if ranks == 1 { "" } else { "s" }
            )),
        }
    }
    Err(passed_over.join("; "))
}

/// `CUDA_VISIBLE_DEVICES` for ranks at `places`, where it was `shown` to all.
fn still_shown(shown: Option<&str>, places: &[u32]) -> String {
    let all: Vec<&str> = shown
        .filter(|shown| !shown.is_empty())
        .map(|shown| shown.split(',').collect())
        .unwrap_or_default();
    let one = |place: &u32| match all.get(*place as usize) {
        Some(device) => (*device).to_owned(),
        None => place.to_string(),
    };
    let left: Vec<String> = places.iter().map(one).collect();
    left.join(",")
}

/// How a run comes to its end by tries.
#[derive(Debug)]
struct Tries {
    restarts: Restarts,
    /// Restarts so far.
    done: u32,
    /// Where ranks can be, in order of ranks; a place is its number among the first ranks.
    places: Vec<u32>,
    /// Places that are lost.
    lost: u32,
    /// Steps of the newest checkpoint when the last try began.
    saved: Option<u64>,
    /// Tries in a row that completed no checkpoint.
    idle: u32,
    /// How often a rank has died at a place since the last checkpoint.
    deaths: BTreeMap<u32, u32>,
}

/// What comes after a try.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The same again.
    Same,
    /// The same on fewer ranks; these were at the places that are lost.
    Fewer(Vec<u32>),
}

impl Tries {
    fn new(restarts: Restarts, ranks: u32, saved: Option<u64>) -> Self {
        Self {
            restarts,
            done: 0,
            places: (0..ranks).collect(),
            lost: 0,
            saved,
            idle: 0,
            deaths: BTreeMap::new(),
        }
    }

    /// A try on so many `ranks` ended because of some; `saved` are the steps of the newest checkpoint. Fails with why
    /// there is no other try.
    fn after(&mut self, culprits: &[u32], ranks: u32, saved: Option<u64>) -> Result<Next, String> {
        if saved > self.saved {
            self.saved = saved;
            self.idle = 0;
            self.deaths.clear();
        } else {
            self.idle += 1;
        }
        // What all ranks die of is at no place.
        let mut lost = Vec::new();
        if (culprits.len() as u32) < ranks {
            for &rank in culprits {
                let deaths = self.deaths.entry(self.places[rank as usize]).or_default();
                *deaths += 1;
                if self.restarts.deaths.is_some_and(|most| *deaths >= most) {
                    lost.push(rank);
                }
            }
        }
        if self.done == self.restarts.count {
            let count = self.restarts.count;
            return Err(format!(
                "it has been restarted {count} times (--restarts {count})"
            ));
        }
        if lost.is_empty() && self.idle >= IDLE_TRIES {
            return Err(format!(
                "it is not restarted, since {IDLE_TRIES} tries in a row have completed no checkpoint"
            ));
        }
        self.done += 1;
        if lost.is_empty() {
            return Ok(Next::Same);
        }
        let at: Vec<u32> = lost
            .iter()
            .map(|&rank| self.places[rank as usize])
            .collect();
        self.places.retain(|place| !at.contains(place));
        self.lost += lost.len() as u32;
        self.idle = 0;
        self.deaths.clear();
        Ok(Next::Fewer(lost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(count: u32, deaths: Option<u32>, ranks: u32) -> Tries {
        Tries::new(Restarts { count, deaths }, ranks, None)
    }

    #[test]
    fn tries_end_with_their_number_and_sooner_where_nothing_comes_of_them() {
        let mut few = tries(2, None, 4);
        assert_eq!(few.after(&[1], 4, Some(2)), Ok(Next::Same));
        assert_eq!(few.after(&[1], 4, Some(4)), Ok(Next::Same));
        assert_eq!(
            few.after(&[1], 4, Some(6)).expect_err("were two"),
            "it has been restarted 2 times (--restarts 2)"
        );
        // The first try may complete none, and two more; a checkpoint begins the count again.
        let mut idle = tries(9, None, 4);
        for saved in [None, None, Some(2), Some(2), Some(2)] {
            assert_eq!(idle.after(&[0], 4, saved), Ok(Next::Same), "{saved:?}");
        }
        let why = idle.after(&[3], 4, Some(2)).expect_err("three in a row");
        assert!(why.contains("3 tries in a row"), "{why}");
    }

    #[test]
    fn a_place_is_lost_with_as_many_deaths_without_a_checkpoint() {
        let mut twice = tries(9, Some(2), 4);
        assert_eq!(twice.after(&[2], 4, Some(2)), Ok(Next::Same));
        assert_eq!(twice.after(&[1], 4, Some(2)), Ok(Next::Same));
        // A checkpoint came: the first death of this place again.
        assert_eq!(twice.after(&[2], 4, Some(4)), Ok(Next::Same));
        assert_eq!(twice.after(&[2], 4, Some(4)), Ok(Next::Fewer(vec![2])));
        assert_eq!(twice.places, [0, 1, 3]);
        // Ranks have other places now: rank 2 is at the fourth.
        let mut once = tries(9, Some(1), 4);
        assert_eq!(once.after(&[1], 4, None), Ok(Next::Fewer(vec![1])));
        assert_eq!(once.after(&[1], 3, None), Ok(Next::Fewer(vec![1])));
        assert_eq!(once.places, [0, 3]);
        assert_eq!(once.after(&[0], 2, None), Ok(Next::Fewer(vec![0])));
        // What all die of loses none.
        let mut all = tries(9, Some(1), 2);
        assert_eq!(all.after(&[0, 1], 2, None), Ok(Next::Same));
        assert_eq!(all.places, [0, 1]);
    }

    #[test]
    fn golden_the_gpus_that_are_left_are_shown() {
        assert_eq!(still_shown(None, &[0, 2, 3]), "0,2,3");
        assert_eq!(still_shown(Some(""), &[1]), "1");
        assert_eq!(still_shown(Some("4,5,GPU-6,7"), &[0, 2]), "4,GPU-6");
    }
}
