//! Reads the embedded CSV files by column name. They are part of the program: a malformed one is a
//! programmer's error and panics, which a test would see first.

use crate::collective::CollectiveKind;
use crate::dtype::Dtype;
use crate::op::Pass;

/// A line of a CSV file by column name.
pub(super) struct Line {
    file: &'static str,
    header: Vec<&'static str>,
    cells: Vec<&'static str>,
}

/// The lines of a file, without comments and the header.
pub(super) fn lines(file: &'static str, text: &'static str) -> impl Iterator<Item = Line> {
    let mut rows = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    let header: Vec<&str> = rows.next().unwrap_or_default().split(',').collect();
    rows.map(move |row| {
        let cells: Vec<&str> = row.split(',').collect();
        assert_eq!(
            cells.len(),
            header.len(),
            "{file}: `{row}` has a cell for every column"
        );
        Line {
            file,
            header: header.clone(),
            cells,
        }
    })
}

impl Line {
    pub(super) fn cell(&self, column: &str) -> &'static str {
        let at = self.header.iter().position(|name| *name == column);
        self.cells[at.unwrap_or_else(|| panic!("{} has a column {column}", self.file))]
    }

    pub(super) fn number<T: std::str::FromStr>(&self, column: &str) -> T {
        let cell = self.cell(column);
        let number = cell.parse().ok();
        number.unwrap_or_else(|| panic!("{}: `{cell}` in {column} is a number", self.file))
    }

    /// The cells of the columns named `prefix<number>` that are not empty, with their numbers.
    pub(super) fn series(&self, prefix: &str) -> Vec<(u64, f64)> {
        let columns = self.header.iter().zip(&self.cells);
        columns
            .filter_map(|(name, cell)| {
                let at = name.strip_prefix(prefix)?.parse().ok()?;
                (!cell.is_empty()).then(|| (at, cell.parse().expect("a rate is a number")))
            })
            .collect()
    }

    pub(super) fn dtype(&self, column: &str) -> Dtype {
        match self.cell(column) {
            "f32" => Dtype::F32,
            "bf16" => Dtype::Bf16,
            "fp8" => Dtype::Fp8,
            "fp4" => Dtype::Fp4,
            other => panic!("{}: `{other}` is a dtype", self.file),
        }
    }

    pub(super) fn pass(&self) -> Option<Pass> {
        match self.cell("pass") {
            "forward" => Some(Pass::Forward),
            "backward" => Some(Pass::Backward),
            "dgrad" => Some(Pass::Dgrad),
            "wgrad" => Some(Pass::Wgrad),
            "both" => None,
            other => panic!("{}: `{other}` is a pass", self.file),
        }
    }

    pub(super) fn kind(&self) -> CollectiveKind {
        let kinds = [
            CollectiveKind::AllReduce,
            CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter,
            CollectiveKind::AllToAll,
        ];
        let found = self.cell("kind");
        let kind = kinds.into_iter().find(|kind| kind.stem() == found);
        kind.unwrap_or_else(|| panic!("{}: `{found}` is a collective", self.file))
    }
}
