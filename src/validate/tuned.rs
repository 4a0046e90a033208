//! `moefold validate --tuned`: layouts that experts tuned, beside what a search finds in their place.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use moefold_planner::published::{self, Tuned};
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ValidateArgs;
use crate::failure::Failure;
use crate::output::Output;

/// A tuned layout is as good as the found one where it takes at most this share more.
const AS_GOOD: f64 = 0.05;

/// What `--json` prints.
#[derive(Serialize)]
struct TunedJson {
    /// Rows that cannot be compared, and why.
    refused: BTreeMap<String, String>,
    rows: Vec<Tuned>,
}

pub(super) fn run(args: &ValidateArgs, output: Output) -> Result<(), Failure> {
    let rows = match &args.file {
        None => published::tuned_rows(published::shipped_rows()),
        Some(path) => published::read(path).map_err(Failure::request)?,
    };
    let bar = output.progress(rows.len() as u64, "searching");
    let mut answer = TunedJson {
        refused: BTreeMap::new(),
        rows: Vec::new(),
    };
    for row in &rows {
        match published::tuned(row) {
            Ok(tuned) => answer.rows.push(tuned),
            Err(why) => {
                answer.refused.insert(row.id.clone(), why);
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    output.answer(&answer, || text(&answer))
}

fn text(answer: &TunedJson) -> String {
    let mut table = Table::new([
        "row",
        "model",
        "GPU",
        ">GPUs",
        "tuned",
        ">measured (s)",
        ">step (s)",
        "found",
        ">step (s)",
        ">tuned takes",
        "of which",
    ]);
    for row in &answer.rows {
        let layout = |choice: &published::Choice| {
            format!(
                "{}, {}",
                choice.layout,
                format::recompute(&choice.recompute)
            )
        };
        let slower = row.tuned.step_s / row.found.step_s - 1.0;
        let mut more: Vec<(&str, f64)> = row
            .more_s
            .iter()
            .map(|(name, more)| (*name, *more))
            .collect();
        more.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        let reasons = more
            .iter()
            .take(3)
            .map(|(name, more)| format!("{name} {}", format::signed_seconds(*more)));
        table.row([
            row.id.clone(),
            row.model.clone(),
            row.gpu.clone(),
            row.gpus.to_string(),
            format!(
                "{}{}",
                layout(&row.tuned),
                if row.fits { "" } else { " (too large)" }
            ),
            row.measured_step_s
                .map_or_else(|| "-".to_owned(), |step| format!("{step:.2}")),
            format!("{:.2}", row.tuned.step_s),
            layout(&row.found),
            format!("{:.2}", row.found.step_s),
            format::signed_percent(slower),
            if slower.abs() <= AS_GOOD {
                "-".to_owned()
            } else {
                reasons.collect::<Vec<_>>().join(", ")
            },
        ]);
    }
    let slower = |row: &&Tuned| row.tuned.step_s / row.found.step_s - 1.0;
    let near = |row: &&Tuned| row.fits && slower(row).abs() <= AS_GOOD;
    let mut text = format!(
        "{}\nTuned: as published. Found: by a search where degrees, stages and recomputation are free, all else as \
         published. {} of {} tuned layouts fit and are predicted within {:.0}% of what is found.\n",
        table.text(),
        answer.rows.iter().filter(near).count(),
        answer.rows.len(),
        100.0 * AS_GOOD
    );
    let lost = |row: &&Tuned| row.fits && slower(row) < 0.0;
    for row in answer.rows.iter().filter(lost) {
        writeln!(text, "{}: the search finds nothing as fast", row.id)
            .expect("a string takes any text");
    }
    for (id, why) in &answer.refused {
        writeln!(text, "{id}: {why}").expect("a string takes any text");
    }
    text
}
