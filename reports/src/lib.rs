//! Tables, plots and pages from plans and runs.
//!
//! Reads files that other parts wrote, puts them side by side and writes a
//! self-contained page, plots and tables. Depends on the data halves only: it knows what a plan and a
//! run look like and nothing of how either is made.

mod answer_text;
mod compare;
mod draw;
mod error;
mod figures;
mod files;
mod findings;
pub mod format;
mod held;
mod html;
mod inputs;
mod less_memory;
mod losses;
mod ops;
mod plots;
#[cfg(test)]
mod sample;
mod sizes;
mod subject;
pub mod tables;

pub use answer_text::plan_table;
pub use compare::{Page, Written, compare};
pub use error::ReportError;
pub use held::peak_text;
pub use less_memory::{front_table, shortage_table};
