//! [`Plot`]: the pictures of a comparison, each in a module of its own.
//!
//! A plot whose data is not there (no run, no capacity) is absent, never empty.

mod accuracy;
mod difference;
mod load;
mod loss;
pub(crate) mod memory;
mod pipeline_memory;
mod plot;
mod rows;
mod step_time;
mod steps;
mod tradeoff;

use crate::subject::Comparison;

pub(crate) use plot::Plot;

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
    plots.extend(difference::plot(comparison));
    plots.extend(load::plot(comparison));
    plots
}
