//! Matrix products and the three products of a linear layer.
//!
//! `C[m,n] = op(A) op(B) + beta * C`, all row-major. A device of bf16 takes operands and C in bf16 or
//! f32, any of them, and sums in f32; an operand of f32 keeps 16 bits of its 24 at least. Tensors of more
//! than two dims count as the matrix of their rows ([`Tensor::num_rows`] x [`Tensor::width`]), of which
//! an operand or C may be some columns alone ([`View`]): the queries of a fused projection, say. Linear
//! weights are `[out, in]` as in Hugging Face checkpoints, so forward is `y = x W^T`, dgrad
//! `dx = dy W`, wgrad `dW += dy^T x`; with a bias of the outputs `y = x W^T + b`, `db += sum of rows of dy`.
//!
//! A device implementation: a matrix product with either operand transposed, any `beta` and any
//! distance from row to row; a bias is added to the sum before it is rounded; C is
//! not read where `beta` is 0 (it may hold NaN). An element of C must not depend on the number of
//! rows of A, nor on the number of threads. (A vendor's library, where one does dense products, is
//! free to sum in another order for another number of rows; the same shape has the same bits.)

use std::ops::Range;

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

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

/// A matrix in a tensor: all of its rows, and all or some of its columns.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub(crate) tensor: &'a Tensor,
    first: usize,
    width: usize,
}

impl<'a> View<'a> {
    /// These columns of a tensor.
    ///
    /// # Panics
    /// When it has not so many.
    pub fn columns(tensor: &'a Tensor, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= tensor.width(),
            "gemm: columns {columns:?} of {tensor:?}"
        );
        Self {
            tensor,
            first: columns.start,
            width: columns.len(),
        }
    }

    fn num_rows(&self) -> usize {
        self.tensor.num_rows()
    }

    /// Rows and columns, read so.
    fn shape(&self, trans: Trans) -> (usize, usize) {
        match trans {
            Trans::No => (self.num_rows(), self.width),
            Trans::Yes => (self.width, self.num_rows()),
        }
    }
}

impl<'a> From<&'a Tensor> for View<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::columns(tensor, 0..tensor.width())
    }
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
pub fn gemm<'a>(
    a: impl Into<View<'a>>,
    ta: Trans,
    b: impl Into<View<'a>>,
    tb: Trans,
    c: impl Into<View<'a>>,
    beta: f32,
) {
    multiply(
        "gemm::gemm",
        (a.into(), ta),
        (b.into(), tb),
        None,
        c.into(),
        beta,
    );
}

/// `C[m,n] = op(A)[m,k] op(B)[k,n] + bias[n] + beta * C`, the bias on every row.
///
/// # Panics
/// When the shapes do not agree.
pub fn gemm_bias<'a>(
    a: impl Into<View<'a>>,
    ta: Trans,
    b: impl Into<View<'a>>,
    tb: Trans,
    bias: &'a Tensor,
    c: impl Into<View<'a>>,
    beta: f32,
) {
    multiply(
        "gemm::gemm_bias",
        (a.into(), ta),
        (b.into(), tb),
        Some(bias),
        c.into(),
        beta,
    );
}

fn multiply(
    op: &'static str,
    (a, ta): (View<'_>, Trans),
    (b, tb): (View<'_>, Trans),
    bias: Option<&Tensor>,
    c: View<'_>,
    beta: f32,
) {
    let ((m, k), (kb, n)) = (a.shape(ta), b.shape(tb));
    assert!(
        k == kb && (m, n) == c.shape(Trans::No),
        "{op}: {a:?} ({ta:?} transposed) times {b:?} ({tb:?} transposed) is not {c:?}"
    );
    if let Some(bias) = bias {
        assert!(
            bias.len() == n && bias.dtype() == b.tensor.dtype(),
            "{op}: a bias {bias:?} beside {b:?}, expected {n} of its dtype"
        );
    }
    let _op = a.tensor.device().begin(|| {
        let pass = match (ta, tb) {
            (Trans::Yes, _) => Pass::Wgrad,
            (Trans::No, Trans::No) => Pass::Dgrad,
            (Trans::No, Trans::Yes) => Pass::Forward,
        };
        let dtype = match [a, b].map(|view| view.tensor.dtype()) {
            [one, other] if one == other => one,
            _ => Dtype::F32,
        };
        Op::Gemm {
            m: m as u64,
            n: n as u64,
            k: k as u64,
            pass,
            dtype,
        }
    });
    match &a.tensor.device().0.backend {
        Backend::Cpu(cpu) => {
            let whole =
                |view: &View<'_>| (view.tensor.width(), view.first..view.first + view.width);
            let product = cpu::Strided {
                a: (whole(&a), ta),
                b: (whole(&b), tb),
                c: whole(&c),
                sizes: [m, n, k],
                beta,
            };
            let (x, w, y) = (a.tensor, b.tensor, c.tensor);
            match bias {
                None => with(op, [x, w], [y], |[x, w], [y]| {
                    product.run(cpu, x.f32(), w.f32(), None, y.f32());
                }),
                Some(bias) => with(op, [x, w, bias], [y], |[x, w, bias], [y]| {
                    product.run(cpu, x.f32(), w.f32(), Some(bias.f32()), y.f32());
                }),
            }
        }
        Backend::Cuda(gpu) => cuda::Product {
            op,
            a: (a, ta),
            b: (b, tb),
            c,
            bias,
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

/// `y[.., n] = x[.., k] W^T + b` with `W: [n, k]` and `b: [n]` of one dtype; `y` is new, of the class
/// of activations.
///
/// # Panics
/// When the widths differ.
pub fn forward_bias(x: &Tensor, w: &Tensor, bias: &Tensor) -> Tensor {
    let y = like_rows(x, w.num_rows());
    gemm_bias(x, Trans::No, w, Trans::Yes, bias, &y, 0.0);
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

/// `db[n] += sum over the rows of dy[.., n]`: the gradient of a bias.
///
/// # Panics
/// When the widths differ.
pub fn bias_grad<'a>(dy: impl Into<View<'a>>, db: &Tensor) {
    let dy = dy.into();
    assert!(
        db.len() == dy.width,
        "gemm::bias_grad: {db:?} for the columns of {dy:?}"
    );
    let _op = db.device().begin(|| Op::Sweep {
        kind: SweepKind::Sum,
        len: (dy.num_rows() * dy.width) as u64,
        dtype: dy.tensor.dtype(),
    });
    match &db.device().0.backend {
        Backend::Cpu(cpu) => with("gemm::bias_grad", [dy.tensor], [db], |[x], [db]| {
            let (pitch, first) = (dy.tensor.width(), dy.first);
            cpu::bias_grad(cpu, x.f32(), (pitch, first), db.f32());
        }),
        Backend::Cuda(gpu) => cuda::bias::grad(gpu, dy, db),
    }
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

    use std::ops::Range;

    use super::Trans;
    use crate::matrix::{Matrix, MatrixMut};
    use crate::parallel::Cpu;
    use crate::product::multiply;

    /// Multiply-adds below which one thread does all of it.
    const WORTH_SHARING: usize = 1 << 22;

    /// Elements of a row of the tensor, and which of them are the matrix.
    type Columns = (usize, Range<usize>);

    /// A product of columns of tensors.
    pub(super) struct Strided {
        pub(super) a: (Columns, Trans),
        pub(super) b: (Columns, Trans),
        pub(super) c: Columns,
        pub(super) sizes: [usize; 3],
        pub(super) beta: f32,
    }

    impl Strided {
        pub(super) fn run(
            self,
            cpu: &Cpu,
            a: &[f32],
            b: &[f32],
            bias: Option<&[f32]>,
            c: &mut [f32],
        ) {
            let [m, n, k] = self.sizes;
            let operand = |data, ((pitch, columns), trans): (Columns, Trans), rows, cols| {
                let stored = match trans {
                    Trans::No => rows,
                    Trans::Yes => cols,
                };
                let matrix = Matrix::new(data, stored, pitch).cols(columns);
                match trans {
                    Trans::No => matrix,
                    Trans::Yes => matrix.t(),
                }
            };
            let (pitch, columns) = self.c;
            let mut beta = self.beta;
            if let Some(bias) = bias {
                let rows = [(&mut *c, pitch)];
                cpu.rows(m, m * n, rows, |_, [c]| {
                    for row in c.chunks_exact_mut(pitch.max(1)) {
                        for (c, bias) in row[columns.clone()].iter_mut().zip(bias) {
                            // What C holds is not read where beta is 0.
                            *c = if beta == 0.0 {
                                *bias
                            } else {
                                beta.mul_add(*c, *bias)
                            };
                        }
                    }
                });
                beta = 1.0;
            }
            let a = operand(a, self.a, m, k);
            let b = operand(b, self.b, k, n);
            let c = MatrixMut::new(c, m, pitch).split_cols(columns.end).0;
            let c = c.split_cols(columns.start).1;
            let mut tasks = Vec::new();
            share(cpu.parts(m * n * k, WORTH_SHARING), a, b, c, &mut tasks);
            cpu.tasks(tasks, |(a, b, c)| multiply(1.0, a, b, beta, c));
        }
    }

    /// Columns are dealt to threads, so that each is summed in order of the rows.
    pub(super) fn bias_grad(cpu: &Cpu, dy: &[f32], (pitch, first): (usize, usize), db: &mut [f32]) {
        let work = db.len() * dy.len() / pitch.max(1);
        cpu.rows(db.len(), work, [(db, 1)], |columns, [db]| {
            let columns = first + columns.start..first + columns.end;
            let mut sums = vec![0.0_f32; db.len()];
            for row in dy.chunks_exact(pitch.max(1)) {
                for (sum, dy) in sums.iter_mut().zip(&row[columns.clone()]) {
                    *sum += dy;
                }
            }
            for (db, sum) in db.iter_mut().zip(&sums) {
                *db += sum;
            }
        });
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
