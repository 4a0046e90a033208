//! [`compare`]: from plans and runs to a page, plots and tables.

use std::path::{Path, PathBuf};

use crate::draw::svg;
use crate::files::Directory;
use crate::inputs::Input;
use crate::subject::Comparison;
use crate::{ReportError, figures, findings, html, plots};

/// What a comparison wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The files, `report.html` first.
    pub files: Vec<PathBuf>,
    /// What the comparison says, in sentences, the most important first.
    pub findings: Vec<String>,
}

/// Compares any mix of `plan.json`, output of `plan --json` and run directories: writes
/// `report.html`, every plot as SVG and PNG, `tables.md` and a CSV a table into `out_dir`, which is
/// made where it is not there. The same inputs give the same bytes.
pub fn compare(inputs: &[PathBuf], out_dir: &Path) -> Result<Written, ReportError> {
    if inputs.is_empty() {
        return Err(ReportError::NoInputs);
    }
    let read: Vec<Input> = inputs
        .iter()
        .map(|path| Input::read(path))
        .collect::<Result<_, _>>()?;
    let comparison = Comparison::of(read);
    if comparison.subjects.is_empty() {
        return Err(ReportError::NoPlans {
            paths: inputs.iter().map(|p| p.display().to_string()).collect(),
        });
    }
    let findings = findings::of(&comparison);
    let plots = plots::all(&comparison);
    let tables = figures::all(&comparison);
    let mut out = Directory::create(out_dir)?;
    out.text(
        "report.html",
        &html::page(&comparison, &findings, &plots, &tables),
    )?;
    for plot in &plots {
        out.text(&format!("{}.svg", plot.stem), &svg::document(&plot.scene))?;
        out.png(&format!("{}.png", plot.stem), &plot.scene)?;
    }
    let mut markdown = String::from("# Comparison\n\n");
    for finding in &findings {
        markdown.push_str(&format!("- {finding}\n"));
    }
    for table in &tables {
        markdown.push_str(&format!("\n## {}\n\n", table.title));
        markdown.push_str(&table.shown.markdown());
        out.text(&format!("{}.csv", table.stem), &table.raw.csv())?;
    }
    out.text("tables.md", &markdown)?;
    Ok(Written {
        files: out.into_written(),
        findings,
    })
}
