//! `moefold compare`: plans and runs in tables, plots and a page.

use std::fmt::Write as _;

use moefold_executor::files::check_no_run;
use serde::Serialize;

use crate::cli::CompareArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;

/// What was written and found.
#[derive(Serialize)]
struct CompareJson {
    files: Vec<std::path::PathBuf>,
    findings: Vec<String>,
}

pub(crate) fn run(args: &CompareArgs, output: Output) -> Result<(), Failure> {
    check_no_run(&args.out, "a report is written").map_err(failure)?;
    let written = moefold_reports::compare(&args.inputs, &args.out).map_err(Failure::request)?;
    let answer = CompareJson {
        files: written.files,
        findings: written.findings,
    };
    output.answer(&answer, || {
        let mut text = answer.findings.join("\n");
        text.push('\n');
        text.push_str(&written.ops);
        text.push_str("\nWritten:\n");
        for file in &answer.files {
            writeln!(text, "  {}", file.display()).expect("a string takes any text");
        }
        text
    })
}
