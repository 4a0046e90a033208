//! [`Watch`]: who is told how far a search has come, and may stop it.
//!
//! The search knows no clock and no signal. Before each layout, and before each step of one that it simulates, it says
//! how far it is, and goes on or stops as it is told; what it has found by then is its answer, with a bound on what it
//! has not looked at.

use std::ops::ControlFlow;

/// How far a search has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Layouts looked at, in the order of their bounds.
    pub seen: u64,
    /// Legal layouts that may fit; 0 while they are still made.
    pub layouts: u64,
    /// The step of the best plan so far, seconds.
    pub best_s: Option<f64>,
}

/// Is told how far a search is, from several threads and thousands of times a second, and says whether it goes on.
pub type Watch<'a> = dyn Fn(&Progress) -> ControlFlow<()> + Sync + 'a;

/// Lets a search come to its end.
pub(super) fn unwatched(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}
