//! Watches a search: says on a terminal how far it is, and stops it at a signal or when its time is over.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use indicatif::ProgressBar;
use moefold_planner::search::Progress;

use crate::failure::Failure;
use crate::output::Output;
use crate::signals;

/// See the module's documentation.
pub(crate) struct Watcher {
    started: Instant,
    limit: Option<Duration>,
    line: ProgressBar,
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
            line: output.spinner("judging layouts"),
        })
    }

    /// What a search is told.
    pub(crate) fn look(&self, progress: &Progress) -> ControlFlow<()> {
        if !self.line.is_hidden() && progress.layouts > 0 {
            let Progress { seen, layouts, .. } = progress;
            let best = progress.best_s;
            let best = best.map_or(String::new(), |best_s| {
                format!(", the best takes {best_s:.3} s a step")
            });
            self.line
                .set_message(format!("looked at {seen} of {layouts} layouts{best}"));
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
