//! [`Table`]: rows and columns as aligned text, Markdown, CSV and HTML.
//!
//! Text alignment follows the column: words to the left, numbers to the right. No colour and no
//! terminal width in here; the command line decides those. Values arrive as text already, since
//! how many digits a figure deserves is known where it is made; [`crate::format`] has the usual ways.

use std::fmt::{self, Write as _};

/// How a column is aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under named columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows. A heading that starts with `>` makes a right-aligned column.
    pub fn new<S: AsRef<str>>(headings: impl IntoIterator<Item = S>) -> Self {
        let columns = headings
            .into_iter()
            .map(|heading| match heading.as_ref().strip_prefix('>') {
                Some(name) => (name.to_owned(), Align::Right),
                None => (heading.as_ref().to_owned(), Align::Left),
            })
            .collect();
        Self {
            columns,
            rows: Vec::new(),
        }
    }

    /// Appends a row; one cell a column.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(
            cells.len(),
            self.columns.len(),
            "a row has one cell a column"
        );
        self.rows.push(cells);
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Headings and their alignment.
    pub fn columns(&self) -> &[(String, Align)] {
        &self.columns
    }

    /// The rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Aligned text: a heading line, then one line a row, two spaces between columns, nothing
    /// trailing.
    pub fn text(&self) -> String {
        let widths = self.widths(|cell| cell.chars().count());
        let mut out = String::new();
        let headings: Vec<&str> = self.columns.iter().map(|(name, _)| name.as_str()).collect();
        self.text_line(&mut out, &headings, &widths);
        for row in &self.rows {
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            self.text_line(&mut out, &cells, &widths);
        }
        out
    }

    fn text_line(&self, out: &mut String, cells: &[&str], widths: &[usize]) {
        let mut line = String::new();
        for ((cell, &width), (_, align)) in cells.iter().zip(widths).zip(&self.columns) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            pad(&mut line, cell, width, *align);
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }

    /// A GitHub-flavoured Markdown table, padded so that the source reads as a table too.
    pub fn markdown(&self) -> String {
        let escape = |cell: &str| cell.replace('|', "\\|").replace('\n', " ");
        let widths = self.widths(|cell| escape(cell).chars().count().max(3));
        let mut out = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = String>| {
            for ((cell, &width), (_, align)) in cells.zip(&widths).zip(&self.columns) {
                out.push_str("| ");
                pad(&mut out, &cell, width, *align);
                out.push(' ');
            }
            out.push_str("|\n");
        };
        line(&mut self.columns.iter().map(|(name, _)| escape(name)));
        line(
            &mut widths
                .iter()
                .zip(&self.columns)
                .map(|(&width, (_, align))| match align {
                    Align::Left => "-".repeat(width),
                    Align::Right => format!("{}:", "-".repeat(width - 1)),
                }),
        );
        for row in &self.rows {
            line(&mut row.iter().map(|cell| escape(cell)));
        }
        out
    }

    /// Comma-separated values (RFC 4180), one heading line, `\n` line ends.
    pub fn csv(&self) -> String {
        let mut out = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            for (i, cell) in cells.enumerate() {
                if i > 0 {
                    out.push(',');
                }
                if cell.contains([',', '"', '\n', '\r']) {
                    write!(out, "\"{}\"", cell.replace('"', "\"\""))
                        .expect("writing to a string does not fail");
                } else {
                    out.push_str(cell);
                }
            }
            out.push('\n');
        };
        line(&mut self.columns.iter().map(|(name, _)| name.as_str()));
        for row in &self.rows {
            line(&mut row.iter().map(String::as_str));
        }
        out
    }

    fn widths(&self, measure: impl Fn(&str) -> usize) -> Vec<usize> {
        (0..self.columns.len())
            .map(|i| {
                let heading = measure(&self.columns[i].0);
                let cells = self.rows.iter().map(|row| measure(&row[i]));
                cells.fold(heading, usize::max)
            })
            .collect()
    }
}

/// The aligned text.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

fn pad(out: &mut String, cell: &str, width: usize, align: Align) {
    let fill = " ".repeat(width.saturating_sub(cell.chars().count()));
    match align {
        Align::Left => {
            out.push_str(cell);
            out.push_str(&fill);
        }
        Align::Right => {
            out.push_str(&fill);
            out.push_str(cell);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new(["layout", ">step (s)", "note"]);
        table.row(["TP2 EP8", "10.50", "winner"]);
        table.row(["TP4", "9.5", "a|b, \"c\""]);
        table
    }

    #[test]
    fn golden_text_aligns_numbers_right_and_leaves_nothing_trailing() {
        assert_eq!(
            sample().text(),
            "layout   step (s)  note\n\
             TP2 EP8     10.50  winner\n\
             TP4           9.5  a|b, \"c\"\n"
        );
    }

    #[test]
    fn golden_markdown_escapes_bars() {
        assert_eq!(
            sample().markdown(),
            "| layout  | step (s) | note      |\n\
             | ------- | -------: | --------- |\n\
             | TP2 EP8 |    10.50 | winner    |\n\
             | TP4     |      9.5 | a\\|b, \"c\" |\n"
        );
    }

    #[test]
    fn golden_csv_quotes_what_needs_it() {
        assert_eq!(
            sample().csv(),
            "layout,step (s),note\nTP2 EP8,10.50,winner\nTP4,9.5,\"a|b, \"\"c\"\"\"\n"
        );
    }

    #[test]
    fn an_empty_table_is_its_headings() {
        let table = Table::new(["a", ">b"]);
        assert!(table.is_empty());
        assert_eq!(table.text(), "a  b\n");
    }

    #[test]
    fn width_counts_characters_not_bytes() {
        let mut table = Table::new(["name", ">n"]);
        table.row(["8×4", "1"]);
        table.row(["8x4", "2"]);
        assert_eq!(table.text(), "name  n\n8×4   1\n8x4   2\n");
    }
}
