//! [`Plot`]: the pictures of a comparison, each in a module of its own.
//!
//! A plot whose data is not there (no run, no capacity) is absent, never empty.

mod accuracy;
mod loss;
pub(crate) mod memory;
mod pipeline_memory;
mod rows;
mod step_time;
mod steps;
mod tradeoff;

use crate::draw::scene::Scene;
use crate::subject::Comparison;

/// One picture and what to look at in it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plot {
    /// File name without its ending.
    pub(crate) stem: String,
    /// What to look at, one or two sentences.
    pub(crate) caption: String,
    /// The picture.
    pub(crate) scene: Scene,
}

/// All plots of a comparison, in the order of a page.
pub(crate) fn all(comparison: &Comparison) -> Vec<Plot> {
    let mut plots = Vec::new();
    plots.extend(step_time::plot(comparison));
    plots.extend(memory::plot(comparison));
    plots.extend(pipeline_memory::plot(comparison));
    plots.extend(tradeoff::plot(comparison));
    plots.extend(steps::plot(comparison));
    plots.extend(accuracy::plots(comparison));
    plots.extend(loss::plot(comparison));
    plots
}
