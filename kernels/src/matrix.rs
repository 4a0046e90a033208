//! Strided matrices over an op's slices, and the matrix product of the CPU.
//!
//! [`Matrix`] and [`MatrixMut`] are to two dimensions what slices are to one: a head of attention
//! is a column range of `[tokens, heads * width]`, a transpose is a swap of strides. [`multiply`]
//! wraps the `gemm` crate and adds what it does not promise: a row of the product does not depend on
//! how many rows there are.
#![expect(
    unsafe_code,
    reason = "strided tiles are pointers; bounds are checked when they are made"
)]

use std::marker::PhantomData;
use std::ops::Range;

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
        assert_eq!(data.len(), rows * cols, "a matrix is its whole slice");
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

    fn at(&self, row: usize, col: usize) -> f32 {
        assert!(row < self.rows && col < self.cols);
        // SAFETY: inside the slice this matrix was made of.
        unsafe { *self.base.add(row * self.row_stride + col * self.col_stride) }
    }
}

impl<'a> MatrixMut<'a> {
    /// A row-major slice as a matrix.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix is its whole slice");
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

/// The contracted size is summed in chunks of at most this, each summed in order: fixed here, since
/// the crate would choose it by the shape and the cache, and bits would follow.
const DEPTH_MAX: usize = 512;

/// The crate sums products of at most this many elements in another order (its kernel for small
/// results), as it does products of one row or one column.
const SMALL: usize = 256;

/// `C = alpha * A B + beta * C` on the calling thread.
///
/// An element is the same whatever the number of rows and columns around it.
pub(crate) fn multiply(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: MatrixMut<'_>) {
    assert!(
        a.rows == c.rows && a.cols == b.rows && b.cols == c.cols,
        "product of {}x{} and {}x{} into {}x{}",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        c.rows,
        c.cols
    );
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if c.rows > 1 && c.cols > 1 && c.rows * c.cols > SMALL {
        return chunks(alpha, a, b, beta, c);
    }
    let rows = c.rows.max(2);
    let cols = c.cols.max(2);
    let rows = rows.max((SMALL + 1).div_ceil(cols));
    padded(alpha, a, b, beta, c, rows, cols);
}

/// A product of few elements, done as a part of one with enough of them, `rows x cols`.
fn padded(
    alpha: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    beta: f32,
    mut c: MatrixMut<'_>,
    rows: usize,
    cols: usize,
) {
    let depth = a.cols;
    let pad = |m: Matrix<'_>, rows: usize, cols: usize| {
        let mut data = vec![0.0; rows * cols];
        for row in 0..m.rows {
            for col in 0..m.cols {
                data[row * cols + col] = m.at(row, col);
            }
        }
        data
    };
    let a_data = pad(a, rows, depth);
    let b_data = (b.cols < cols).then(|| pad(b, depth, cols));
    let b = b_data
        .as_deref()
        .map_or(b, |data| Matrix::new(data, depth, cols));
    let mut c_data = vec![0.0; rows * cols];
    if beta != 0.0 {
        for row in 0..c.rows {
            c_data[row * cols..][..c.cols].copy_from_slice(c.row(row));
        }
    }
    chunks(
        alpha,
        Matrix::new(&a_data, rows, depth),
        b,
        beta,
        MatrixMut::new(&mut c_data, rows, cols),
    );
    for row in 0..c.rows {
        let cols_wanted = c.cols;
        c.row(row)
            .copy_from_slice(&c_data[row * cols..][..cols_wanted]);
    }
}

/// The product in chunks of the contracted size.
fn chunks(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, mut c: MatrixMut<'_>) {
    let depth = a.cols;
    if depth == 0 {
        for row in 0..c.rows {
            let row = c.row(row);
            if beta == 0.0 {
                row.fill(0.0);
            } else {
                for x in row {
                    *x *= beta;
                }
            }
        }
        return;
    }
    let step = depth.div_ceil(depth.div_ceil(DEPTH_MAX));
    let mut beta = beta;
    for start in (0..depth).step_by(step) {
        let range = start..(start + step).min(depth);
        // SAFETY: all three matrices lie in slices borrowed for this call, C's exclusively, and
        // the sizes agree (asserted by the caller). The crate is told to read C only where beta
        // is not zero.
        unsafe {
            let (a, b) = (a.cols(range.clone()), b.rows(range));
            ::gemm::gemm(
                c.rows,
                c.cols,
                a.cols,
                c.base,
                1,
                c.row_stride as isize,
                beta != 0.0,
                a.base,
                a.col_stride as isize,
                a.row_stride as isize,
                b.base,
                b.col_stride as isize,
                b.row_stride as isize,
                beta,
                alpha,
                false,
                false,
                false,
                ::gemm::Parallelism::None,
            );
        }
        beta = 1.0;
    }
}
