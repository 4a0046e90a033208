//! Root-mean-square normalization of rows, with a weight.
//!
//! `y = x * rstd * w`, `rstd = 1 / sqrt(mean(x^2) + eps)` over the last dim (Zhang and Sennrich
//! 2019, arXiv 1910.07467). Backward, with `g = dy * w` and `xh = x * rstd`:
//! `dx = rstd * (g - xh * mean(g * xh))`, `dw += sum over rows of dy * xh`.
//!
//! A device implementation: one pass over each row, arithmetic in f32; `dw` (f32 or bf16) is added
//! to in an order that does not depend on how the work was cut (fixed blocks of rows, then the
//! blocks in a fixed order). The weight may be wider than `x`.
//!
//! A row may be shared: each of several devices holds some columns, and the means are over all of them
//! (the norm of a whole projection, cut over tensor-parallel ranks). Then a caller takes what each
//! device has of the two sums ([`squares`], [`products`]), adds them up, and passes them in [`Over`].

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::sweep;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::{add_blocks, programs};

/// The cost-table key of a norm of `x`.
pub fn key(x: &Tensor, pass: Pass) -> Op {
    Op::RmsNorm {
        rows: x.num_rows() as u64,
        dim: x.width() as u64,
        pass,
        dtype: x.dtype(),
    }
}

/// What the mean of a row is over.
#[derive(Debug, Clone, Copy)]
pub struct Over<'a> {
    /// Elements.
    pub width: usize,
    /// The rows' sums over all of them `[rows]` f32, where that is more than is here.
    pub sums: Option<&'a Tensor>,
}

impl Over<'_> {
    /// The rows of `x` alone.
    fn own(x: &Tensor) -> Self {
        Self {
            width: x.width(),
            sums: None,
        }
    }

    #[track_caller]
    fn expect(&self, op: &str, rows: usize) {
        if let Some(sums) = self.sums {
            expect_dims(op, "sums", sums, &[rows]);
        }
    }
}

/// The sum of the squares of each row of `x [.., d]`: `[rows]` f32, what [`forward_over`] takes. The
/// weight `w [d]` is not read.
pub fn squares(x: &Tensor, w: &Tensor) -> Tensor {
    row_sums("rms_norm::squares", None, x, w)
}

/// The sum of `dy w x` over each row: `[rows]` f32, what [`backward_over`] takes.
///
/// # Panics
/// When the shapes do not agree.
pub fn products(dy: &Tensor, x: &Tensor, w: &Tensor) -> Tensor {
    row_sums("rms_norm::products", Some(dy), x, w)
}

fn row_sums(op: &'static str, dy: Option<&Tensor>, x: &Tensor, w: &Tensor) -> Tensor {
    let _op = x.device().begin(|| sweep(SweepKind::Sum, x));
    expect_dims(op, "w", w, &[x.width()]);
    let device = x.device();
    let sums = device.empty(TensorClass::Activations, Dtype::F32, &[x.num_rows()]);
    match (&device.0.backend, dy) {
        (Backend::Cpu(cpu), None) => with(op, [x], [&sums], |[x], [sums]| {
            cpu::squares(cpu, x.f32(), sums.f32());
        }),
        (Backend::Cpu(cpu), Some(dy)) => {
            expect_dims(op, "dy", dy, x.dims());
            with(op, [dy, x, w], [&sums], |[dy, x, w], [sums]| {
                cpu::products(cpu, [dy.f32(), x.f32(), w.f32()], sums.f32());
            });
        }
        (Backend::Cuda(gpu), dy) => cuda::sums(gpu, op, dy, [x, w], &sums),
    }
    sums
}

/// `x [.., d]`, `w [d]` to `(y [.., d], rstd [rows])`.
///
/// # Panics
/// When the widths differ.
pub fn forward(x: &Tensor, w: &Tensor, eps: f32) -> (Tensor, Tensor) {
    forward_over(&Over::own(x), x, w, eps)
}

/// [`forward`] of columns of rows, whose squares are over all of them.
///
/// # Panics
/// When the widths differ.
pub fn forward_over(over: &Over<'_>, x: &Tensor, w: &Tensor, eps: f32) -> (Tensor, Tensor) {
    let _op = x.device().begin(|| key(x, Pass::Forward));
    expect_dims("rms_norm::forward", "w", w, &[x.width()]);
    over.expect("rms_norm::forward", x.num_rows());
    let device = x.device();
    let y = device.empty(TensorClass::Activations, x.dtype(), x.dims());
    let rstd = device.empty(TensorClass::Activations, Dtype::F32, &[x.num_rows()]);
    // Any input stands where there are no sums.
    let sums = over.sums.unwrap_or(w);
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "rms_norm::forward",
            [x, w, sums],
            [&y, &rstd],
            |[x, w, sums], [y, rstd]| {
                let mean = cpu::Mean {
                    width: over.width,
                    sums: over.sums.map(|_| sums.f32()),
                };
                cpu::forward(cpu, x.f32(), w.f32(), &mean, eps, y.f32(), rstd.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::forward(gpu, x, w, over, eps, &y, &rstd),
    }
    (y, rstd)
}

/// `dy [.., d]`, `x [.., d]`, `w [d]`, `rstd [rows]` to `dx [.., d]`; adds to `dw [d]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, x: &Tensor, w: &Tensor, rstd: &Tensor, dw: &Tensor) -> Tensor {
    backward_over(&Over::own(x), dy, x, w, rstd, dw)
}

/// [`backward`] of columns of rows, whose products are over all of them.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward_over(
    over: &Over<'_>,
    dy: &Tensor,
    x: &Tensor,
    w: &Tensor,
    rstd: &Tensor,
    dw: &Tensor,
) -> Tensor {
    let _op = x.device().begin(|| key(x, Pass::Backward));
    expect_dims("rms_norm::backward", "dy", dy, x.dims());
    expect_dims("rms_norm::backward", "w", w, &[x.width()]);
    expect_dims("rms_norm::backward", "rstd", rstd, &[x.num_rows()]);
    expect_dims("rms_norm::backward", "dw", dw, &[x.width()]);
    over.expect("rms_norm::backward", x.num_rows());
    let device = x.device();
    let sums = over.sums.unwrap_or(rstd);
    let dx = device.empty(TensorClass::Activations, x.dtype(), x.dims());
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "rms_norm::backward",
            [dy, x, w, rstd, sums],
            [dw, &dx],
            |[dy, x, w, rstd, sums], [dw, dx]| {
                let mean = cpu::Mean {
                    width: over.width,
                    sums: over.sums.map(|_| sums.f32()),
                };
                let inputs = [dy.f32(), x.f32(), w.f32(), rstd.f32()];
                cpu::backward(cpu, inputs, &mean, dw.f32(), dx.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::backward(gpu, [dy, x, w, rstd], over, dw, &dx),
    }
    dx
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sum, sum2, vectorized};

    /// What the mean of a row is over, and the rows' sums where those are given.
    #[derive(Clone, Copy)]
    pub(super) struct Mean<'a> {
        pub(super) width: usize,
        pub(super) sums: Option<&'a [f32]>,
    }

    impl Mean<'_> {
        /// Of rows from `first` on.
        fn from(self, first: usize) -> Self {
            Self {
                sums: self.sums.map(|sums| &sums[first..]),
                ..self
            }
        }
    }

    pub(super) fn squares(cpu: &Cpu, x: &[f32], sums: &mut [f32]) {
        let d = x.len() / sums.len().max(1);
        cpu.rows(sums.len(), x.len(), [(sums, 1)], |range, [sums]| {
            square_rows(&x[range.start * d..range.end * d], sums);
        });
    }

    vectorized! {
        fn square_rows(x: &[f32], sums: &mut [f32]) {
            let d = x.len() / sums.len().max(1);
            for row in 0..sums.len() {
                sums[row] = sum(&x[row * d..][..d], |x| x * x);
            }
        }
    }

    pub(super) fn products(cpu: &Cpu, [dy, x, w]: [&[f32]; 3], sums: &mut [f32]) {
        let d = w.len();
        cpu.rows(sums.len(), 2 * x.len(), [(sums, 1)], |range, [sums]| {
            let range = range.start * d..range.end * d;
            product_rows(&dy[range.clone()], &x[range], w, sums);
        });
    }

    vectorized! {
        fn product_rows(dy: &[f32], x: &[f32], w: &[f32], sums: &mut [f32]) {
            let d = w.len();
            let mut g = vec![0.0; d];
            for row in 0..sums.len() {
                let (dy, x) = (&dy[row * d..][..d], &x[row * d..][..d]);
                for i in 0..d {
                    g[i] = dy[i] * w[i];
                }
                sums[row] = sum2(&g, x, |g, x| g * x);
            }
        }
    }

    pub(super) fn forward(
        cpu: &Cpu,
        x: &[f32],
        w: &[f32],
        mean: &Mean<'_>,
        eps: f32,
        y: &mut [f32],
        rstd: &mut [f32],
    ) {
        let d = w.len();
        cpu.rows(
            rstd.len(),
            x.len(),
            [(y, d), (rstd, 1)],
            |range, [y, rstd]| {
                let mean = mean.from(range.start);
                forward_rows(&x[range.start * d..range.end * d], w, mean, eps, y, rstd);
            },
        );
    }

    vectorized! {
        fn forward_rows(
            x: &[f32],
            w: &[f32],
            mean: Mean<'_>,
            eps: f32,
            y: &mut [f32],
            rstd: &mut [f32],
        ) {
            let d = w.len();
            for row in 0..rstd.len() {
                let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
                let squares = match mean.sums {
                    Some(sums) => sums[row],
                    None => sum(x, |x| x * x),
                };
                let r = 1.0 / (squares / mean.width as f32 + eps).sqrt();
                for i in 0..d {
                    y[i] = x[i] * r * w[i];
                }
                rstd[row] = r;
            }
        }
    }

    /// Rows whose weight gradients are summed together before the blocks are.
    const BLOCK: usize = 64;

    pub(super) fn backward(
        cpu: &Cpu,
        [dy, x, w, rstd]: [&[f32]; 4],
        mean: &Mean<'_>,
        dw: &mut [f32],
        dx: &mut [f32],
    ) {
        let (d, num_rows) = (w.len(), rstd.len());
        let num_blocks = num_rows.div_ceil(BLOCK);
        let mut partial = vec![0.0; num_blocks * d];
        let blocks = dx
            .chunks_mut((BLOCK * d).max(1))
            .zip(partial.chunks_mut(d.max(1)));
        let tasks = blocks.enumerate().collect::<Vec<_>>();
        cpu.tasks(tasks, |(block, (dx, partial))| {
            let rows = block * BLOCK..block * BLOCK + dx.len() / d;
            let range = rows.start * d..rows.end * d;
            let (dy, x, mean) = (&dy[range.clone()], &x[range], mean.from(rows.start));
            backward_rows([dy, x, w, &rstd[rows]], mean, dx, partial);
        });
        for partial in partial.chunks_exact(d.max(1)) {
            for (dw, &p) in dw.iter_mut().zip(partial) {
                *dw += p;
            }
        }
    }

    vectorized! {
        fn backward_rows(
            inputs: [&[f32]; 4],
            mean: Mean<'_>,
            dx: &mut [f32],
            dw: &mut [f32],
        ) {
            let [dy, x, w, rstd] = inputs;
            let d = w.len();
            let dw = &mut dw[..d];
            for (row, &r) in rstd.iter().enumerate() {
                let (dy, x, dx) = (&dy[row * d..][..d], &x[row * d..][..d], &mut dx[row * d..][..d]);
                for i in 0..d {
                    dx[i] = dy[i] * w[i];
                }
                let c = match mean.sums {
                    Some(sums) => sums[row] * r / mean.width as f32,
                    None => sum2(dx, x, |g, x| g * (x * r)) / mean.width as f32,
                };
                for i in 0..d {
                    let xh = x[i] * r;
                    dx[i] = r * (dx[i] - xh * c);
                    dw[i] += dy[i] * xh;
                }
            }
        }
    }
}

mod cuda;
