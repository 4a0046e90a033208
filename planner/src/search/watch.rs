//! [`Watch`]: who is told how far a search has come, and may stop it.
//!
//! The search knows no clock and no signal. Before each part of its work, such as a layout or a candidate of one, it says
//! how far it is, and goes on or stops as it is told; what it has found by then is its answer, with a bound on what it
//! has not looked at.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far a search has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// What is searched for.
    pub aim: Aim,
    /// What is done.
    pub phase: Phase,
    /// To how many that is done so far.
    pub seen: u64,
    /// Of so many; 0 while they are counted.
    pub all: u64,
    /// What is begun of layouts that are looked at: schedules and candidates of each.
    pub begun: u64,
    /// The step of the best plan so far, seconds.
    pub best_s: Option<f64>,
}

moefold_profiles::named! {
    /// What a search is for.
    pub enum Aim {
        /// The best plan.
        Best = "the best plan",
        /// The best whose experts stay inside one NVLink domain.
        InsideDomain = "experts inside a domain",
        /// Plans that need less memory.
        Front = "less memory",
        /// Legal degrees near those that are not.
        Nearest = "legal degrees nearby",
        /// Other microbatches and virtual stages of the best, and other splits of the first few.
        Around = "around the best",
        /// Choices that are not searched.
        Untried = "choices not searched",
        /// The least memory that a plan needs, where nothing fits.
        Least = "the least memory",
        /// What fits, where nothing does.
        Fit = "what would fit",
    }
}

/// What a search does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Judges tuples of degrees by the rules.
    Judging,
    /// Lays schedules out.
    Scheduling,
    /// Prices the work of what layouts have in common.
    Pricing,
    /// Bounds the steps of legal layouts that may fit.
    Bounding,
    /// Looks at them, in the order of their bounds.
    Looking,
    /// Looks at all of them at a glance.
    Surveying,
}

/// Is told how far a search is, from several threads and thousands of times a second, and says whether it goes on.
pub type Watch<'a> = dyn Fn(&Progress) -> ControlFlow<()> + Sync + 'a;

/// Lets a search come to its end.
pub(super) fn unwatched(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Tells a watch of a search for something else.
pub(super) fn aimed<'a>(
    aim: Aim,
    watch: &'a Watch<'a>,
) -> impl Fn(&Progress) -> ControlFlow<()> + Sync + 'a {
    move |progress| watch(&Progress { aim, ..*progress })
}

/// Counts what several threads do, and tells a watch.
pub(super) struct Looks<'a> {
    watch: &'a Watch<'a>,
    phase: Phase,
    all: u64,
    seen: AtomicU64,
    begun: AtomicU64,
    pub(super) best_s: Option<f64>,
}

impl<'a> Looks<'a> {
    pub(super) fn new(watch: &'a Watch<'a>, phase: Phase, all: usize) -> Self {
        Self {
            watch,
            phase,
            all: all as u64,
            seen: AtomicU64::new(0),
            begun: AtomicU64::new(0),
            best_s: None,
        }
    }

    /// Tells the watch.
    pub(super) fn look(&self) -> ControlFlow<()> {
        (self.watch)(&Progress {
            aim: Aim::Best,
            phase: self.phase,
            seen: self.seen.load(Ordering::Relaxed),
            all: self.all,
            begun: self.begun.load(Ordering::Relaxed),
            best_s: self.best_s,
        })
    }

    /// Another candidate of a layout begins.
    pub(super) fn begin(&self) -> ControlFlow<()> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.look()
    }

    /// So many more are seen.
    pub(super) fn seen(&self, more: usize) {
        self.seen.fetch_add(more as u64, Ordering::Relaxed);
    }

    /// Does one more where the search goes on.
    pub(super) fn one<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        if self.look().is_break() {
            return None;
        }
        let done = work();
        self.seen(1);
        Some(done)
    }
}
