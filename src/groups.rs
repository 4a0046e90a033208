//! `moefold groups`: every process group of a layout.

use anyhow::anyhow;
use moefold_planner::layout::Illegal;
use moefold_planner::mesh::{self, GroupListing};

use crate::cli::GroupsArgs;
use crate::failure::Failure;
use crate::flags::Placed;
use crate::output::Output;

pub(crate) fn run(args: &GroupsArgs, output: Output) -> Result<(), Failure> {
    let layout: Placed = args
        .layout
        .parse()
        .map_err(|error| Failure::Request(anyhow!("--layout {}: {error}", args.layout)))?;
    let mesh = mesh::mesh(args.gpus, &layout.degrees, layout.order.unwrap_or_default())
        .map_err(|broken| illegal(&args.layout, &broken))?;
    output.answer(&GroupListing::of(&mesh), || mesh::describe(&mesh))
}

/// All rules that a pinned layout breaks, one a line.
pub(crate) fn illegal(layout: &str, broken: &[Illegal]) -> Failure {
    let lines: Vec<String> = broken.iter().map(|rule| format!("  {rule}")).collect();
    Failure::Request(anyhow!(
        "--layout {layout} is not legal:\n{}",
        lines.join("\n")
    ))
}
