//! Names of what is in weights: a [`GlobalTensor`], a [`Region`] of one, and which [`State`] of its
//! elements.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Refuses values that no training could go on from; `what` they are of a tensor.
pub(crate) fn check_finite(tensor: &str, what: &str, values: &[f32]) -> Result<(), Error> {
    let Some(at) = values.iter().position(|value| !value.is_finite()) else {
        return Ok(());
    };
    Err(Error::NotFinite {
        tensor: tensor.to_owned(),
        what: what.to_owned(),
        found: f64::from(values[at]),
        count: values.iter().filter(|value| !value.is_finite()).count(),
        of: values.len(),
    })
}

/// A tensor of the whole model.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GlobalTensor {
    /// Its name in checkpoints.
    pub name: String,
    /// Its shape: one dim to three.
    pub dims: Vec<usize>,
}

impl GlobalTensor {
    /// Rows and columns; a vector is one column, several matrices are one of all their rows.
    pub fn matrix(&self) -> [usize; 2] {
        match *self.dims {
            [len] => [len, 1],
            [rows, cols] => [rows, cols],
            [count, rows, cols] => [count * rows, cols],
            _ => panic!(
                "{} has {} dims; one to three exist",
                self.name,
                self.dims.len()
            ),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it.
    pub fn whole(&self) -> Region<'_> {
        let [rows, cols] = self.matrix();
        Region {
            tensor: &self.name,
            dims: &self.dims,
            rows: 0..rows,
            cols: 0..cols,
        }
    }
}

/// A rectangle of a global tensor as [`GlobalTensor::matrix`] has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region<'a> {
    /// The tensor's name.
    pub tensor: &'a str,
    /// Its global shape.
    pub dims: &'a [usize],
    /// Rows of the rectangle.
    pub rows: Range<usize>,
    /// Its columns.
    pub cols: Range<usize>,
}

impl Region<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rectangles that elements `range` of this one form, in order; it counts row by row.
    pub fn parts(&self, range: Range<usize>) -> Vec<Self> {
        let width = self.cols.len();
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (row, col, left) = (at / width, at % width, range.end - at);
            let (rows, cols) = if col == 0 && left >= width {
                (left / width, width)
            } else {
                (1, left.min(width - col))
            };
            let (row, col) = (self.rows.start + row, self.cols.start + col);
            parts.push(Self {
                rows: row..row + rows,
                cols: col..col + cols,
                ..self.clone()
            });
            at += rows * cols;
        }
        parts
    }

    /// Columns of the global tensor.
    pub(super) fn width(&self) -> usize {
        match self.dims {
            [_] => 1,
            dims => *dims.last().expect("a tensor has dims"),
        }
    }
}

/// A [`Region`] in messages and files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rectangle {
    pub(crate) tensor: String,
    pub(crate) dims: Vec<usize>,
    /// The first row, and the one after the last.
    pub(crate) rows: [usize; 2],
    /// The same of columns.
    pub(crate) cols: [usize; 2],
}

impl Rectangle {
    pub(crate) fn region(&self) -> Region<'_> {
        Region {
            tensor: &self.tensor,
            dims: &self.dims,
            rows: self.rows[0]..self.rows[1],
            cols: self.cols[0]..self.cols[1],
        }
    }
}

impl From<&Region<'_>> for Rectangle {
    fn from(region: &Region<'_>) -> Self {
        Self {
            tensor: region.tensor.to_owned(),
            dims: region.dims.to_vec(),
            rows: [region.rows.start, region.rows.end],
            cols: [region.cols.start, region.cols.end],
        }
    }
}

/// What the optimizer knows of every element, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The weight itself.
    Master,
    /// Decaying mean of its gradients.
    FirstMoment,
    /// Decaying mean of their squares.
    SecondMoment,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Master, Self::FirstMoment, Self::SecondMoment];

    /// Those of a tensor's elements: the optimizer updates no correction bias, so these have values alone.
    pub fn of(tensor: &str) -> &'static [Self] {
        if tensor.ends_with("e_score_correction_bias") {
            &[Self::Master]
        } else {
            &Self::ALL
        }
    }

    /// Its name in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::FirstMoment => "first_moment",
            Self::SecondMoment => "second_moment",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_parts_of_a_range_are_its_elements_in_order() {
        let region = Region {
            tensor: "w",
            dims: &[9, 7],
            rows: 2..6,
            cols: 1..6,
        };
        let places = |region: &Region<'_>| -> Vec<(usize, usize)> {
            let cols = || region.cols.clone();
            let rows = region.rows.clone();
            rows.flat_map(|row| cols().map(move |col| (row, col)))
                .collect()
        };
        let all = places(&region);
        for start in 0..=all.len() {
            for end in start..=all.len() {
                let parts = region.parts(start..end);
                let found: Vec<_> = parts.iter().flat_map(places).collect();
                assert_eq!(found, all[start..end], "{start}..{end}");
                assert!(parts.len() <= 3, "{start}..{end}: {parts:?}");
            }
        }
    }
}
