//! [`Table`]: comma-separated lines under a header. A cell may stand in double quotes, where a quote is
//! written twice; lines that begin with `#` are remarks.

use std::path::Path;

use moefold_profiles::nearest::nearest;

use super::error::RowError;

/// A table as text.
pub(super) struct Table<'a> {
    path: &'a Path,
    header: Vec<String>,
    /// Line number and cells.
    rows: Vec<(usize, Vec<String>)>,
}

/// One line of it.
pub(super) struct Line<'a> {
    table: &'a Table<'a>,
    number: usize,
    cells: &'a [String],
}

impl<'a> Table<'a> {
    /// Reads a text; columns must be known, and those that every table has must be there.
    pub(super) fn parse(
        path: &'a Path,
        text: &str,
        known: &[&'static str],
        required: &[&'static str],
    ) -> Result<Self, RowError> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line.trim_end()))
            .filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
        let (_, header) = lines.next().ok_or_else(|| RowError::Empty {
            path: path.to_owned(),
        })?;
        let header = cells(header);
        for found in &header {
            if !known.contains(&found.as_str()) {
                return Err(RowError::UnknownColumn {
                    path: path.to_owned(),
                    found: found.clone(),
                    nearest: nearest(found, known.iter().copied())
                        .unwrap_or_default()
                        .to_owned(),
                    columns: known.join(", "),
                });
            }
        }
        let missing = |column: &&&str| !header.iter().any(|name| name == **column);
        if let Some(&column) = required.iter().find(missing) {
            return Err(RowError::MissingColumn {
                path: path.to_owned(),
                column,
                required: required.join(", "),
            });
        }
        let mut rows = Vec::new();
        for (line, text) in lines {
            let cells = cells(text);
            if cells.len() != header.len() {
                return Err(RowError::Cells {
                    path: path.to_owned(),
                    line,
                    found: cells.len(),
                    expected: header.len(),
                });
            }
            rows.push((line, cells));
        }
        Ok(Self { path, header, rows })
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.rows.iter().map(|(number, cells)| Line {
            table: self,
            number: *number,
            cells,
        })
    }
}

impl Line<'_> {
    /// The file it is from, without folder and extension.
    pub(super) fn table(&self) -> String {
        let stem = self.table.path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    /// A cell; empty where the table has no such column.
    pub(super) fn cell(&self, column: &'static str) -> &str {
        let at = self.table.header.iter().position(|name| name == column);
        at.map_or("", |at| self.cells[at].as_str())
    }

    /// Refuses a cell.
    pub(super) fn refuse(&self, column: &'static str, expected: impl Into<String>) -> RowError {
        RowError::Value {
            path: self.table.path.to_owned(),
            line: self.number,
            column,
            found: self.cell(column).to_owned(),
            expected: expected.into(),
        }
    }

    /// What a cell means; nothing where it is empty.
    pub(super) fn meaning<T>(
        &self,
        column: &'static str,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, RowError> {
        match self.cell(column) {
            "" => Ok(None),
            cell => read(cell)
                .map(Some)
                .map_err(|expected| self.refuse(column, expected)),
        }
    }

    /// A whole number above 0; nothing where the cell is empty.
    pub(super) fn count(&self, column: &'static str) -> Result<Option<u64>, RowError> {
        self.meaning(column, |cell| {
            let number = cell.parse().ok().filter(|&number: &u64| number > 0);
            number.ok_or_else(|| "a whole number above 0".to_owned())
        })
    }

    /// A degree.
    pub(super) fn degree(&self, column: &'static str) -> Result<Option<u32>, RowError> {
        let narrow = |count: u64| {
            u32::try_from(count).map_err(|_| self.refuse(column, "a number of ranks or less"))
        };
        self.count(column)?.map(narrow).transpose()
    }

    /// A number above 0; nothing where the cell is empty.
    pub(super) fn quantity(&self, column: &'static str) -> Result<Option<f64>, RowError> {
        self.meaning(column, |cell| {
            let number = cell.parse().ok();
            let number = number.filter(|number: &f64| number.is_finite() && *number > 0.0);
            number.ok_or_else(|| "a number above 0".to_owned())
        })
    }
}

/// The cells of a line.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        let cell = cells.last_mut().expect("there is a cell at any time");
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                cell.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            _ => cell.push(character),
        }
    }
    for cell in &mut cells {
        *cell = cell.trim().to_owned();
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_quotes_hold_commas_and_themselves() {
        assert_eq!(
            cells(r#"a, "b, c","say ""d""",,e"#),
            ["a", "b, c", r#"say "d""#, "", "e"]
        );
        assert_eq!(cells(""), [""]);
    }
}
