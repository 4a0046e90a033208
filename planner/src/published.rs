//! Published measurements: [`Row`], what others measured with which layout, and what is predicted for it.
//!
//! The tables under `data/published/` are part of the program; a user's own table of the same format goes
//! through the same reader ([`read`]). Tests and `moefold validate` price rows here ([`price()`]), so that
//! both speak of the same figures. Nothing is fitted here.

mod csv;
mod error;
mod judge;
mod price;
mod row;
mod tuned;

use std::path::Path;

pub use error::RowError;
pub use judge::{Errors, Group, Validation, Verdict, calibrated, judge, misses};
pub use price::{Priced, price, price_all};
pub use row::{Outcome, Row};
pub use tuned::{Choice, Tuned, tuned, tuned_rows};

/// The tables that ship with the program: file and text.
const SHIPPED: [(&str, &str); 4] = [
    (
        "simumax_b200.csv",
        include_str!("../data/published/simumax_b200.csv"),
    ),
    ("layouts.csv", include_str!("../data/published/layouts.csv")),
    (
        "megatron.csv",
        include_str!("../data/published/megatron.csv"),
    ),
    ("fsdp.csv", include_str!("../data/published/fsdp.csv")),
];

/// Every row that ships with the program, in the order of the tables.
pub fn shipped_rows() -> Vec<Row> {
    let tables = SHIPPED.iter();
    let rows = tables.flat_map(|(name, text)| {
        parse(Path::new(name), text).expect("the embedded tables are valid, which a test says")
    });
    rows.collect()
}

/// Reads a table of measurements.
pub fn read(path: &Path) -> Result<Vec<Row>, RowError> {
    let text = std::fs::read_to_string(path).map_err(|source| RowError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    parse(path, &text)
}

/// Reads the text of a table; `path` is named in errors.
pub fn parse(path: &Path, text: &str) -> Result<Vec<Row>, RowError> {
    let table = csv::Table::parse(path, text, &row::COLUMNS, &row::REQUIRED)?;
    let rows: Result<Vec<Row>, RowError> = table.lines().map(|line| Row::of(&line)).collect();
    let rows = rows?;
    if rows.is_empty() {
        return Err(RowError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests;
