//! Strided matrices over an op's slices, and the matrix product of the CPU.
//!
//! [`Matrix`] and [`MatrixMut`] are to two dimensions what slices are to one: a head of attention
//! is a column range of `[tokens, heads * width]`, a transpose is a swap of strides. What is computed with them is
//! elsewhere ([`crate::product`], [`crate::turn`]).
#![expect(
    unsafe_code,
    reason = "strided tiles are pointers; bounds are checked when they are made"
)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::sizes;

/// A shared view of `rows x cols` elements of a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    base: *const f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    data: PhantomData<&'a [f32]>,
}

/// An exclusive view of `rows x cols` elements of a slice; columns are adjacent in memory.
pub(crate) struct MatrixMut<'a> {
    base: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    data: PhantomData<&'a mut [f32]>,
}

// SAFETY: they stand for a `&[f32]` and a `&mut [f32]`, which are `Send` and `Sync`.
unsafe impl Send for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Sync for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Send for MatrixMut<'_> {}

impl<'a> Matrix<'a> {
    /// A row-major slice as a matrix.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        let len = sizes::elements("matrix", &[rows, cols]);
        assert_eq!(data.len(), len, "a matrix is its whole slice");
        Self {
            base: data.as_ptr(),
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            data: PhantomData,
        }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn num_cols(&self) -> usize {
        self.cols
    }

    /// Whether it is a transpose: its columns lie apart, its rows' elements do not.
    pub(crate) fn is_turned(&self) -> bool {
        self.row_stride == 1 && self.col_stride != 1
    }

    /// The first element, and the strides of rows and columns.
    pub(crate) fn parts(&self) -> (*const f32, isize, isize) {
        (
            self.base,
            self.row_stride as isize,
            self.col_stride as isize,
        )
    }

    /// A range of rows.
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows);
        let base = self.base.wrapping_add(range.start * self.row_stride);
        Self {
            base,
            rows: range.len(),
            ..self
        }
    }

    /// A range of columns.
    pub(crate) fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }

    /// One row of a matrix whose columns are adjacent.
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        assert!(row < self.rows && self.col_stride == 1);
        // SAFETY: the row lies in the slice this matrix was made of, borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.base.add(row * self.row_stride), self.cols) }
    }

    /// One element.
    pub(crate) fn at(&self, row: usize, col: usize) -> f32 {
        assert!(row < self.rows && col < self.cols);
        // SAFETY: inside the slice this matrix was made of.
        unsafe { *self.base.add(row * self.row_stride + col * self.col_stride) }
    }
}

impl<'a> MatrixMut<'a> {
    /// A row-major slice as a matrix.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        let len = sizes::elements("matrix", &[rows, cols]);
        assert_eq!(data.len(), len, "a matrix is its whole slice");
        Self {
            base: data.as_mut_ptr(),
            rows,
            cols,
            row_stride: cols,
            data: PhantomData,
        }
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn num_cols(&self) -> usize {
        self.cols
    }

    /// The first element, and the stride of rows; columns are adjacent.
    pub(crate) fn parts(&mut self) -> (*mut f32, isize) {
        (self.base, self.row_stride as isize)
    }

    /// The same matrix for a shorter time.
    pub(crate) fn reborrow(&mut self) -> MatrixMut<'_> {
        MatrixMut {
            data: PhantomData,
            ..*self
        }
    }

    /// The first `rows` rows, and the others.
    pub(crate) fn split_rows(self, rows: usize) -> (Self, Self) {
        assert!(rows <= self.rows);
        let base = self.base.wrapping_add(rows * self.row_stride);
        (
            Self { rows, ..self },
            Self {
                base,
                rows: self.rows - rows,
                ..self
            },
        )
    }

    /// The first `cols` columns, and the others. The two interleave in memory and share nothing.
    pub(crate) fn split_cols(self, cols: usize) -> (Self, Self) {
        assert!(cols <= self.cols);
        let base = self.base.wrapping_add(cols);
        (
            Self { cols, ..self },
            Self {
                base,
                cols: self.cols - cols,
                ..self
            },
        )
    }

    /// Rows `range` alone.
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        self.split_rows(range.end).0.split_rows(range.start).1
    }

    /// One row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the slice this matrix was made of; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.row_stride), self.cols) }
    }
}
