//! The matrix product of the CPU, on the calling thread.
//!
//! [`multiply`] wraps the `gemm` crate and adds what it does not promise: an element of the product
//! does not depend on how many rows and columns there are, and small shapes keep its speed. Dealing
//! products to threads is the ops' business.
#![expect(
    unsafe_code,
    reason = "the call into the matrix product takes pointers"
)]

use std::cell::RefCell;

use crate::matrix::{Matrix, MatrixMut};
use crate::turn::turned;

/// The contracted size is summed in chunks of at most this, each summed in order: fixed here, since
/// the crate would choose it by the shape and the cache, and bits would follow.
const DEPTH_MAX: usize = 512;

/// The crate sums products of at most this many elements in another order (its kernel for small
/// results), as it does products of one row or one column.
const SMALL: usize = 256;

/// Rows of C up to which a transposed B is turned into scratch first: the crate's own packing of it
/// is slow, which shows where few rows share it.
const THIN: usize = 512;

/// Rows of C that are finished before the next, where the contracted size takes several chunks: so
/// many stay in the cache between the chunks.
const TALL: usize = 512;

thread_local! {
    /// A transposed operand.
    static TURNED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `C = alpha * A B + beta * C` on the calling thread.
///
/// An element is the same whatever the number of rows and columns around it.
pub(crate) fn multiply(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: MatrixMut<'_>) {
    assert!(
        a.num_rows() == c.num_rows()
            && a.num_cols() == b.num_rows()
            && b.num_cols() == c.num_cols(),
        "product of {}x{} and {}x{} into {}x{}",
        a.num_rows(),
        a.num_cols(),
        b.num_rows(),
        b.num_cols(),
        c.num_rows(),
        c.num_cols()
    );
    if c.num_rows() == 0 || c.num_cols() == 0 {
        return;
    }
    if c.num_rows() > 1 && c.num_cols() > 1 && c.num_rows() * c.num_cols() > SMALL {
        if c.num_rows() <= THIN && b.is_turned() {
            return TURNED.with_borrow_mut(|scratch| {
                let b = turned(b, scratch);
                chunks(alpha, a, b, beta, c);
            });
        }
        return chunks(alpha, a, b, beta, c);
    }
    let rows = c.num_rows().max(2);
    let cols = c.num_cols().max(2);
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
    let depth = a.num_cols();
    let pad = |m: Matrix<'_>, rows: usize, cols: usize| {
        let mut data = vec![0.0; rows * cols];
        for row in 0..m.num_rows() {
            for col in 0..m.num_cols() {
                data[row * cols + col] = m.at(row, col);
            }
        }
        data
    };
    let a_data = pad(a, rows, depth);
    let b_data = (b.num_cols() < cols).then(|| pad(b, depth, cols));
    let b = b_data
        .as_deref()
        .map_or(b, |data| Matrix::new(data, depth, cols));
    let mut c_data = vec![0.0; rows * cols];
    if beta != 0.0 {
        for row in 0..c.num_rows() {
            c_data[row * cols..][..c.num_cols()].copy_from_slice(c.row(row));
        }
    }
    chunks(
        alpha,
        Matrix::new(&a_data, rows, depth),
        b,
        beta,
        MatrixMut::new(&mut c_data, rows, cols),
    );
    for row in 0..c.num_rows() {
        let cols_wanted = c.num_cols();
        c.row(row)
            .copy_from_slice(&c_data[row * cols..][..cols_wanted]);
    }
}

/// The product in chunks of the contracted size.
fn chunks(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, mut c: MatrixMut<'_>) {
    let depth = a.num_cols();
    if depth == 0 {
        for row in 0..c.num_rows() {
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
    if depth > step && c.num_rows() > TALL {
        // Equal blocks: a last one of a row or two would be summed in another order.
        let (num_rows, num_blocks) = (c.num_rows(), c.num_rows().div_ceil(TALL));
        let mut rest = c;
        for block in 0..num_blocks {
            let rows = num_rows * block / num_blocks..num_rows * (block + 1) / num_blocks;
            let (now, later) = rest.split_rows(rows.len());
            chunks(alpha, a.rows(rows), b, beta, now);
            rest = later;
        }
        return;
    }
    let mut beta = beta;
    for start in (0..depth).step_by(step) {
        let range = start..(start + step).min(depth);
        // SAFETY: all three matrices lie in slices borrowed for this call, C's exclusively, and
        // the sizes agree (asserted by the caller). The crate is told to read C only where beta
        // is not zero.
        unsafe {
            let (a, b) = (a.cols(range.clone()), b.rows(range));
            let (m, n, k) = (c.num_rows(), c.num_cols(), a.num_cols());
            let (a, a_rows, a_cols) = a.parts();
            let (b, b_rows, b_cols) = b.parts();
            let (c, c_rows) = c.parts();
            let read = beta != 0.0;
            ::gemm::gemm(
                m,
                n,
                k,
                c,
                1,
                c_rows,
                read,
                a,
                a_cols,
                a_rows,
                b,
                b_cols,
                b_rows,
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
