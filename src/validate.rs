//! `moefold validate`: predictions beside measurements, in sums and row by row; beside those of this machine
//! ([`here`]), or beside what a search finds in their place ([`tuned`]).

mod here;
mod tuned;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use moefold_planner::published::{self, Errors, Validation, Verdict};
use moefold_profiles::Profile;
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
    let own = args.file.as_deref().map(published::read);
    let own = own.transpose().map_err(Failure::request)?;
    let rows = own.as_deref().unwrap_or(&shipped);
    let profiles = profiles(&args.profile, rows)?;
    let priced = if own.is_none() && profiles.is_empty() {
        shipped_prices
    } else {
        published::price_all(rows, &profiles)
    };
    let validation = published::judge(rows, &priced, &misses);
    if let Some(path) = &args.page {
        let page = page(&validation);
        write_atomically(path, |out| out.write_all(page.as_bytes()))
            .with_context(|| format!("--page {}", path.display()))
            .map_err(Failure::Runtime)?;
    }
    output.answer(&validation, || text(&validation, output.verbose))
}

/// Profiles, each of a GPU that some of `rows` are of.
fn profiles(directories: &[PathBuf], rows: &[published::Row]) -> Result<Vec<Profile>, Failure> {
    let load = |directory: &PathBuf| {
        let profile = Profile::load(directory).map_err(Failure::request)?;
        if rows.iter().any(|row| profile.check(&row.cluster).is_ok()) {
            return Ok(profile);
        }
        let gpus: BTreeSet<&str> = rows.iter().map(|row| &row.cluster.gpu.name[..]).collect();
        Err(Failure::Request(anyhow!(
            "--profile {}: found a profile of {}, expected one of a GPU that rows are of: {}",
            directory.display(),
            profile.device,
            Vec::from_iter(gpus).join(", ")
        )))
    };
    directories.iter().map(load).collect()
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

/// What the columns of sums say.
const LEGEND: &str = "\
    Step: predicted over measured less one; bias is its median. Memory: the same of what is allocated on the fullest GPU.\n\
    Inside: steps within their 80% interval, which comes from rows of other sources and models.\n\
    Tau: Kendall's, over pairs of layouts that answer one question.\n";

/// A table of sums, what is not priced as it ran, and with `verbose` every row.
fn text(validation: &Validation, verbose: bool) -> String {
    let mut text = format!("{}\n{LEGEND}", sums(validation).text());
    let apart = apart(validation).into_iter();
    text.extend(apart.map(|line| format!("\n{line}\n")));
    if verbose {
        text.push('\n');
        text.push_str(&rows(&validation.rows, Sources::No).text());
    } else {
        text.push_str("\n`moefold -v validate` lists every row.\n");
    }
    text
}

/// The same for a book, with every row and where it was published.
fn page(validation: &Validation) -> String {
    let mut page = format!(
        "# Published measurements, row by row\n\n\
         `moefold validate --page` writes this page. [How sure is it](accuracy.md#validate) says what to make of it.\n\n\
         {LEGEND}\n{}",
        sums(validation).markdown()
    );
    let apart = apart(validation).into_iter();
    page.extend(apart.map(|line| format!("\n{line}.\n")));
    page.push_str("\n## Rows\n\n");
    page.push_str(&rows(&validation.rows, Sources::Yes).markdown());
    page
}

/// Rows whose memory or legality is judged otherwise than what came of the run, a line each.
fn apart(validation: &Validation) -> Vec<String> {
    let all = &validation.all;
    let lists = [
        ("Ran, and are said not to fit", &all.too_large),
        ("Ran, in more of the memory than plans fill", &all.tight),
        ("Ran, and cannot be planned", &all.refused),
        ("Ran out of memory, and fit in what plans fill", &all.missed),
    ];
    let named = lists.iter().filter(|(_, rows)| !rows.is_empty());
    named
        .map(|(what, rows)| format!("{what} ({}): {}", rows.len(), rows.join(", ")))
        .collect()
}

fn sums(validation: &Validation) -> Table {
    let mut table = Table::new([
        "source",
        "GPU",
        "precision",
        "CUDA graphs",
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
            group.source.clone(),
            group.gpu.clone(),
            group.precision.clone(),
            group.cuda_graph.unwrap_or("all").to_owned(),
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

/// Whether a table of rows says where each was published.
#[derive(Clone, Copy, PartialEq)]
enum Sources {
    Yes,
    No,
}

fn rows(verdicts: &[Verdict], sources: Sources) -> Table {
    let published = (sources == Sources::Yes).then_some("published");
    let headings = [
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
    ];
    let mut table = Table::new(headings.into_iter().chain(published));
    let number = |number: Option<f64>| number.map_or_else(dash, |number| format!("{number:.3}"));
    for row in verdicts {
        let error = row.measured_step_s.zip(row.predicted_step_s);
        let error = error.map(|(measured, predicted)| predicted / measured - 1.0);
        let cells = [
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
        ];
        let published = published.map(|_| row.source_ref.clone());
        table.row(cells.into_iter().chain(published));
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
