//! [`Rules`]: which degrees and choices are legal, and the space of those to try.
//!
//! Rules know the model, the batch and what else was chosen (runtime, precision, stages, overlap,
//! recomputation); every one that is broken is said, as an [`Illegal`](crate::layout::Illegal). Nothing
//! else makes a [`Layout`](crate::layout::Layout). Whether a layout fits into memory is not asked here.

mod choices;
mod degrees;
mod graphs;
mod keys;
mod space;
#[cfg(test)]
mod tests;

pub(crate) use choices::{clash, runs_beside, schedules, undivided};
pub use degrees::Rules;
pub(crate) use degrees::{MOST_POSITIONS, MOST_TOKENS};
pub(crate) use graphs::{bounds_rows, preprocesses, to_try as graphs_to_try};
pub(crate) use keys::{KeyWays, heads};
pub use space::{MAX_MICROBATCH_TOKENS, TOGETHER, Variants, nearest_legal, space, tuples};
