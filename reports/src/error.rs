//! [`ReportError`]: why a report was not written.

use std::path::PathBuf;

/// Why a report was not written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Nothing was given.
    #[error(
        "nothing to compare: name at least one plan.json, output of `plan --json` or run directory"
    )]
    NoInputs,
    /// A file cannot be read; the source says why.
    #[error("{path}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A plan cannot be read, or is not one that could run.
    #[error(transparent)]
    Plan(#[from] moefold_planner::plan::PlanFileError),
    /// A file is not what its place says.
    #[error("{path}: {what}", path = .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The key or line, and what is wrong with it.
        what: String,
    },
    /// Neither JSON nor a log.
    #[error(
        "{path}: {error}; expected a plan.json, what `plan --json` printed, a run directory, or after a plan a log of \
         Megatron-LM",
        path = .path.display()
    )]
    NoJson {
        /// The file.
        path: PathBuf,
        /// What a reader of JSON says of it.
        error: serde_json::Error,
    },
    /// JSON, but nothing that can be compared.
    #[error(
        "{path}: neither a plan.json (key `layout`) nor the output of `plan --json` (key `plans`)",
        path = .path.display()
    )]
    UnknownKind {
        /// The file.
        path: PathBuf,
    },
    /// A directory that is no run.
    #[error(
        "{path}: no {missing} in this directory; a finished run has plan.json, steps.jsonl and \
         summary.json",
        path = .path.display()
    )]
    NotARun {
        /// The directory.
        path: PathBuf,
        /// The first file that is missing.
        missing: &'static str,
    },
    /// Steps that another program ran, and a file of them that cannot be read.
    #[error(transparent)]
    Steps(#[from] moefold_profiles::import::ImportError),
    /// Steps of which it is not known what was planned.
    #[error(
        "{path}: a step was measured here, of no plan; name the plan.json that ran right before it: \
         compare plan.json {path}",
        path = .path.display()
    )]
    StepsAlone {
        /// The log, or the directory of a profile.
        path: PathBuf,
    },
    /// The inputs hold no plan at all.
    #[error("no plan in {}: the search found nothing feasible", .paths.join(", "))]
    NoPlans {
        /// The inputs.
        paths: Vec<String>,
    },
    /// A file cannot be written.
    #[error("cannot write {path}: {reason}", path = .path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
}
