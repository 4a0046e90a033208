//! Matrix products and the three products of a linear layer.
//!
//! `C[m,n] = op(A) op(B) + beta * C`, all row-major. A device of bf16 takes operands and C in bf16 or
//! f32, any of them, and sums in f32; where an operand is f32 it multiplies in f32. Tensors of more
//! than two dims count as the matrix of their rows ([`Tensor::num_rows`] x [`Tensor::width`]). Linear
//! weights are `[out, in]` as in Hugging Face checkpoints, so forward is `y = x W^T`, dgrad
//! `dx = dy W`, wgrad `dW += dy^T x`.
//!
//! A device implementation: a matrix product with either operand transposed and any `beta`; C is
//! not read where `beta` is 0 (it may hold NaN). An element of C must not depend on the number of
//! rows of A, nor on the number of threads. (A vendor's library, where one does dense products, is
//! free to sum in another order for another number of rows; the same shape has the same bits.)

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::Backend;
use crate::tensor::Tensor;

/// Whether an operand is read as its transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trans {
    /// As it lies in memory.
    No,
    /// Rows as columns.
    Yes,
}

/// The cost-table key of [`gemm()`] with `C: [m, n]` and contracted size `k`.
pub fn key(m: usize, n: usize, k: usize, pass: Pass) -> Op {
    Op::Gemm {
        m: m as u64,
        n: n as u64,
        k: k as u64,
        pass,
        dtype: Dtype::F32,
    }
}

/// `C[m,n] = op(A)[m,k] op(B)[k,n] + beta * C`.
///
/// # Panics
/// When the shapes do not agree.
pub fn gemm(a: &Tensor, ta: Trans, b: &Tensor, tb: Trans, c: &Tensor, beta: f32) {
    let shape = |t: &Tensor, trans| match trans {
        Trans::No => (t.num_rows(), t.width()),
        Trans::Yes => (t.width(), t.num_rows()),
    };
    let ((m, k), (kb, n)) = (shape(a, ta), shape(b, tb));
    assert!(
        k == kb && (m, n) == (c.num_rows(), c.width()),
        "gemm: {a:?} ({ta:?} transposed) times {b:?} ({tb:?} transposed) is not {c:?}"
    );
    match &a.device().0.backend {
        Backend::Cpu(cpu) => with("gemm", [a, b], [c], |[a, b], [c]| {
            cpu::gemm(cpu, (a.f32(), ta), (b.f32(), tb), c.f32(), [m, n, k], beta);
        }),
        Backend::Cuda(gpu) => cuda::Product {
            op: "gemm::gemm",
            a: (a, ta),
            b: (b, tb),
            c,
            sizes: [m, n, k],
            beta,
            offsets: None,
        }
        .run(gpu),
    }
}

/// `y[.., n] = x[.., k] W^T` with `W: [n, k]`; `y` is new, of the class of activations.
///
/// # Panics
/// When the widths differ.
pub fn forward(x: &Tensor, w: &Tensor) -> Tensor {
    let y = like_rows(x, w.num_rows());
    gemm(x, Trans::No, w, Trans::Yes, &y, 0.0);
    y
}

/// `dx[.., k] = dy[.., n] W` with `W: [n, k]`.
///
/// # Panics
/// When the widths differ.
pub fn dgrad(dy: &Tensor, w: &Tensor) -> Tensor {
    let dx = like_rows(dy, w.width());
    gemm(dy, Trans::No, w, Trans::No, &dx, 0.0);
    dx
}

/// `dW[n, k] += dy[.., n]^T x[.., k]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor) {
    gemm(dy, Trans::Yes, x, Trans::No, dw, 1.0);
}

/// A new tensor with the dims of `x` but another width.
fn like_rows(x: &Tensor, width: usize) -> Tensor {
    let mut dims = x.dims().to_vec();
    *dims.last_mut().expect("a matrix has dims") = width;
    x.device()
        .empty(crate::TensorClass::Activations, x.dtype(), &dims)
}

pub(crate) mod cuda;

pub(crate) mod cpu {
    //! Tiles of C dealt to threads; each is one product of the `gemm` crate.

    use super::Trans;
    use crate::matrix::{Matrix, MatrixMut};
    use crate::parallel::Cpu;
    use crate::product::multiply;

    /// Multiply-adds below which one thread does all of it.
    const WORTH_SHARING: usize = 1 << 22;

    pub(crate) fn gemm(
        cpu: &Cpu,
        (a, ta): (&[f32], Trans),
        (b, tb): (&[f32], Trans),
        c: &mut [f32],
        [m, n, k]: [usize; 3],
        beta: f32,
    ) {
        let operand = |data, trans, rows, cols| match trans {
            Trans::No => Matrix::new(data, rows, cols),
            Trans::Yes => Matrix::new(data, cols, rows).t(),
        };
        let a = operand(a, ta, m, k);
        let b = operand(b, tb, k, n);
        let mut tasks = Vec::new();
        let parts = cpu.parts(m * n * k, WORTH_SHARING);
        share(parts, a, b, MatrixMut::new(c, m, n), &mut tasks);
        cpu.tasks(tasks, |(a, b, c)| multiply(1.0, a, b, beta, c));
    }

    pub(crate) type Product<'a> = (Matrix<'a>, Matrix<'a>, MatrixMut<'a>);

    /// Cuts a product along the longer side of C.
    pub(crate) fn share<'a>(
        parts: usize,
        a: Matrix<'a>,
        b: Matrix<'a>,
        c: MatrixMut<'a>,
        tasks: &mut Vec<Product<'a>>,
    ) {
        let (m, n) = (c.num_rows(), c.num_cols());
        let mut rest = c;
        for part in 0..parts {
            let of = |len: usize| len * part / parts..len * (part + 1) / parts;
            if n >= m {
                let range = of(n);
                let (c, later) = rest.split_cols(range.len());
                tasks.push((a, b.cols(range), c));
                rest = later;
            } else {
                let range = of(m);
                let (c, later) = rest.split_rows(range.len());
                tasks.push((a.rows(range), b, c));
                rest = later;
            }
        }
    }
}

#[cfg(test)]
mod tests;
