//! `moefold validate`: predictions beside measurements, in sums and row by row; beside those of this machine
//! ([`here`]), or beside what a search finds in their place ([`tuned`]).

mod here;
mod tuned;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use moefold_planner::published::{self, Errors, Group, Validation, Verdict};
use moefold_profiles::files::write_atomically;
use moefold_reports::tables::Table;

use crate::cli::ValidateArgs;
use crate::failure::Failure;
use crate::output::Output;

pub(crate) fn run(args: &ValidateArgs, output: Output) -> Result<(), Failure> {
    if args.here {
        return here::run(args, output);
    }
    if args.tuned {
        return tuned::run(args, output);
    }
    // Intervals come from published rows, whoever's rows are judged.
    let shipped = published::shipped_rows();
    let shipped_prices = published::price_all(&shipped, &[]);
    if let Some(path) = &args.calibration {
        write_calibration(path, &shipped, &shipped_prices)?;
    }
    let misses = published::misses(&shipped, &shipped_prices);
    let validation = match &args.file {
        None => published::judge(&shipped, &shipped_prices, &misses),
        Some(path) => {
            let rows = published::read(path).map_err(Failure::request)?;
            let priced = published::price_all(&rows, &[]);
            published::judge(&rows, &priced, &misses)
        }
    };
    output.answer(&validation, || text(&validation, output.verbose))
}

fn write_calibration(
    path: &Path,
    rows: &[published::Row],
    priced: &[published::Priced],
) -> Result<(), Failure> {
    let calibrated = published::calibrated(rows, priced);
    let calibrated = calibrated.ok_or_else(|| Failure::Runtime(anyhow!("there are no pairs")))?;
    let text = serde_json::to_string_pretty(&calibrated)
        .context("the calibration could not be written as JSON")
        .map_err(Failure::Runtime)?;
    write_atomically(path, |out| writeln!(out, "{text}"))
        .with_context(|| format!("--calibration {}", path.display()))
        .map_err(Failure::Runtime)
}

/// A table of sums, what is not priced as it ran, and with `--verbose` every row.
fn text(validation: &Validation, verbose: bool) -> String {
    let mut text = sums(validation).text();
    text.push_str(
        "\nStep: predicted over measured less one; bias is its median. Memory: the same of what is \
         allocated on the fullest GPU.\nInside: steps within their 80% interval, which comes from rows of \
         other sources and models.\nTau: Kendall's, over pairs of layouts that answer one question.\n",
    );
    for (what, named) in [
        (
            "Ran, and are said not to fit",
            lists(validation, |g| &g.too_large),
        ),
        (
            "Ran, and cannot be planned",
            lists(validation, |g| &g.refused),
        ),
        (
            "Ran out of memory, and are said to fit",
            lists(validation, |g| &g.missed),
        ),
    ] {
        if !named.is_empty() {
            writeln!(text, "\n{what} ({}): {}", named.len(), named.join(", "))
                .expect("a string takes any text");
        }
    }
    if verbose {
        text.push('\n');
        text.push_str(&rows(&validation.rows).text());
    } else {
        text.push_str("\n`moefold -v validate` lists every row.\n");
    }
    text
}

fn lists(validation: &Validation, of: fn(&Group) -> &Vec<String>) -> Vec<&str> {
    of(&validation.all).iter().map(String::as_str).collect()
}

fn sums(validation: &Validation) -> Table {
    let mut table = Table::new([
        "source",
        "GPU",
        "precision",
        ">rows",
        ">median",
        ">mean",
        ">p90",
        ">worst",
        ">bias",
        ">inside",
        ">pairs",
        ">tau",
        ">memory",
        ">worst",
        "furthest off",
    ]);
    let all = validation.groups.iter().chain(&validation.by_graphs);
    for group in all.chain([&validation.all]) {
        let step = |of: fn(&Errors) -> f64| percent(group.step.as_ref().map(of));
        let memory = |of: fn(&Errors) -> f64| percent(group.memory.as_ref().map(of));
        table.row([
            group.cuda_graph.map_or_else(
                || group.source.clone(),
                |graphs| format!("CUDA graphs: {graphs}"),
            ),
            group.gpu.clone(),
            group.precision.clone(),
            group.rows.to_string(),
            step(|errors| errors.median),
            step(|errors| errors.mean),
            step(|errors| errors.p90),
            step(|errors| errors.worst),
            group.step.map_or_else(dash, |errors| signed(errors.bias)),
            group
                .inside
                .map_or_else(dash, |share| format!("{:.0}%", 100.0 * share)),
            group.pairs.to_string(),
            group.tau.map_or_else(dash, |tau| format!("{tau:.2}")),
            memory(|errors| errors.mean),
            memory(|errors| errors.worst),
            group.worst.join(" "),
        ]);
    }
    table
}

fn rows(verdicts: &[Verdict]) -> Table {
    let mut table = Table::new([
        "row",
        "model",
        "GPU",
        ">GPUs",
        "precision",
        "layout",
        ">measured (s)",
        ">predicted (s)",
        ">error",
        ">80% from",
        ">to",
        ">memory (GiB)",
        ">predicted (GiB)",
        "verdict",
    ]);
    let number = |number: Option<f64>| number.map_or_else(dash, |number| format!("{number:.3}"));
    for row in verdicts {
        let error = row.measured_step_s.zip(row.predicted_step_s);
        let error = error.map(|(measured, predicted)| predicted / measured - 1.0);
        table.row([
            row.id.clone(),
            row.model.clone(),
            row.gpu.clone(),
            row.gpus.to_string(),
            row.precision.clone(),
            row.layout.clone(),
            number(row.measured_step_s),
            number(row.predicted_step_s),
            error.map_or_else(dash, signed),
            number(row.step_s_low),
            number(row.step_s_high),
            number(row.measured_gib),
            number(row.predicted_gib),
            row.verdict.to_owned(),
        ]);
    }
    table
}

fn dash() -> String {
    "-".to_owned()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(dash, |share| format!("{:.1}%", 100.0 * share))
}

fn signed(share: f64) -> String {
    format!("{:+.1}%", 100.0 * share)
}
