//! Watches a search: says on stderr how far it is, and stops it at a signal or when its time is over.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use indicatif::ProgressBar;
use moefold_planner::search::{Aim, Phase, Progress};

use crate::failure::Failure;
use crate::output::Output;
use crate::signals;

/// Between two things said on a terminal.
const ON_TERMINAL: Duration = Duration::from_millis(100);
/// Between two lines elsewhere: with the time between two looks, no second passes without one.
const ELSEWHERE: Duration = Duration::from_millis(700);

/// See the module's documentation.
pub(crate) struct Watcher {
    started: Instant,
    limit: Option<Duration>,
    output: Output,
    line: ProgressBar,
    /// When something was said last, in milliseconds from the start.
    said_ms: AtomicU64,
}

impl Watcher {
    /// From here on the first SIGINT or SIGTERM stops the search, and the second ends the process.
    pub(crate) fn new(output: Output, limit_s: Option<f64>) -> Result<Self, Failure> {
        let limit = limit_s.map(Duration::try_from_secs_f64);
        let limit = limit
            .transpose()
            .ok()
            .filter(|limit| *limit != Some(Duration::ZERO));
        let Some(limit) = limit else {
            let found = limit_s.map_or(String::new(), |found| found.to_string());
            let message = anyhow!("--time-limit: found {found}, expected seconds above 0");
            return Err(Failure::Request(message));
        };
        signals::catch()?;
        Ok(Self {
            started: Instant::now(),
            limit,
            output,
            line: output.spinner("counting degrees"),
            said_ms: AtomicU64::new(0),
        })
    }

    /// What a search is told.
    pub(crate) fn look(&self, progress: &Progress) -> ControlFlow<()> {
        let elsewhere = self.line.is_hidden();
        let pause = if elsewhere { ELSEWHERE } else { ON_TERMINAL };
        let now_ms = self.started.elapsed().as_millis() as u64;
        let before_ms = self.said_ms.load(Ordering::Relaxed);
        let is_due = now_ms >= before_ms + pause.as_millis() as u64;
        // Of several threads one says it.
        let say = |said: &AtomicU64| {
            let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
            said.compare_exchange(before_ms, now_ms, set, get).is_ok()
        };
        if is_due && say(&self.said_ms) {
            if elsewhere {
                // Nothing is left to do when stderr is gone.
                let _ = self.output.note(&said(progress));
            } else {
                self.line.set_message(said(progress));
            }
        }
        if self.is_stopped() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    /// Whether the search is to end.
    pub(crate) fn is_stopped(&self) -> bool {
        let is_over = self
            .limit
            .is_some_and(|limit| self.started.elapsed() >= limit);
        is_over || signals::told().load(Ordering::Relaxed) != 0
    }

    /// The search is over, and its answer comes.
    pub(crate) fn done(&self) {
        self.line.finish_and_clear();
    }

    /// The failure of a search that was stopped before it found anything.
    pub(crate) fn found_nothing(&self) -> Failure {
        self.done();
        let signal = signals::told().load(Ordering::Relaxed);
        if signal != 0 {
            let name = signals::name(signal);
            return Failure::Signalled(signal, anyhow!("{name}: stopped before a plan was found"));
        }
        let limit_s = self.limit.unwrap_or_default().as_secs_f64();
        Failure::Runtime(anyhow!(
            "--time-limit {limit_s}: no plan was found in that time; give it more, or pin degrees with --layout"
        ))
    }

    /// After the answer: a failure where a signal has stopped the search.
    pub(crate) fn end() -> Result<(), Failure> {
        match signals::told().load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => {
                let name = signals::name(signal);
                let error =
                    anyhow!("{name}: the search was stopped; the answer is the best so far");
                Err(Failure::Signalled(signal, error))
            }
        }
    }
}

/// How far a search is, in words.
fn said(progress: &Progress) -> String {
    let Progress {
        aim,
        phase,
        seen,
        all,
        begun,
        best_s,
    } = *progress;
    let aim = match aim {
        Aim::Best => String::new(),
        other => format!("{}: ", other.name()),
    };
    let done = match phase {
        Phase::Judging if all == 0 => "counting degrees".to_owned(),
        Phase::Judging => format!("judged {seen} of {all} sets of degrees"),
        Phase::Scheduling => format!("laid out {seen} of {all} schedules"),
        Phase::Pricing => format!("priced the work of {seen} of {all} kinds of layouts"),
        Phase::Bounding => format!("bounded {seen} of {all} layouts"),
        Phase::Looking => format!("looked at {seen} of {all} layouts in {begun} tries"),
        Phase::Surveying => format!("surveyed {seen} of {all} layouts"),
    };
    let best = best_s.map_or(String::new(), |best_s| {
        format!(", the best takes {best_s:.3} s a step")
    });
    format!("{aim}{done}{best}")
}
