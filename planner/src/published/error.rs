//! [`RowError`]: why a table of measurements was refused.

use std::path::PathBuf;

/// Why a table of measurements was refused.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// The file could not be read.
    #[error("cannot read the measurements {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A column that a table of measurements does not have.
    #[error("{path}: found the column `{found}`; nearest: `{nearest}` (columns are {columns})")]
    UnknownColumn {
        /// The file.
        path: PathBuf,
        /// The column.
        found: String,
        /// The known column that is spelled most alike.
        nearest: String,
        /// All known columns.
        columns: String,
    },
    /// A column that every table has.
    #[error("{path}: there is no column `{column}`; every table has {required}")]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// The column.
        column: &'static str,
        /// All such columns.
        required: String,
    },
    /// A line whose cells do not go with the header.
    #[error("{path}, line {line}: found {found} cells, expected {expected}, as many as columns")]
    Cells {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Cells found.
        found: usize,
        /// Columns.
        expected: usize,
    },
    /// A cell that means nothing.
    #[error("{path}, line {line}: `{column}` is `{found}`; expected {expected}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// The cell.
        found: String,
        /// What would work.
        expected: String,
    },
    /// A table without a row.
    #[error("{path}: there is no measurement; expected a header and a row for each")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}
