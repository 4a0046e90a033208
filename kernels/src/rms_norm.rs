//! Root-mean-square normalization of rows, with a weight.
//!
//! `y = x * rstd * w`, `rstd = 1 / sqrt(mean(x^2) + eps)` over the last dim (Zhang and Sennrich
//! 2019, arXiv 1910.07467). Backward, with `g = dy * w` and `xh = x * rstd`:
//! `dx = rstd * (g - xh * mean(g * xh))`, `dw += sum over rows of dy * xh`.
//!
//! A device implementation: one pass over each row, arithmetic in f32; `dw` (f32 or bf16) is added
//! to in an order that does not depend on how the work was cut (fixed blocks of rows, then the
//! blocks in a fixed order). The weight may be wider than `x`.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
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

/// `x [.., d]`, `w [d]` to `(y [.., d], rstd [rows])`.
///
/// # Panics
/// When the widths differ.
pub fn forward(x: &Tensor, w: &Tensor, eps: f32) -> (Tensor, Tensor) {
    let _op = x.device().begin(|| key(x, Pass::Forward));
    expect_dims("rms_norm::forward", "w", w, &[x.width()]);
    let device = x.device();
    let y = device.empty(TensorClass::Activations, x.dtype(), x.dims());
    let rstd = device.empty(TensorClass::Activations, Dtype::F32, &[x.num_rows()]);
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "rms_norm::forward",
            [x, w],
            [&y, &rstd],
            |[x, w], [y, rstd]| {
                cpu::forward(cpu, x.f32(), w.f32(), eps, y.f32(), rstd.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::forward(gpu, x, w, eps, &y, &rstd),
    }
    (y, rstd)
}

/// `dy [.., d]`, `x [.., d]`, `w [d]`, `rstd [rows]` to `dx [.., d]`; adds to `dw [d]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, x: &Tensor, w: &Tensor, rstd: &Tensor, dw: &Tensor) -> Tensor {
    let _op = x.device().begin(|| key(x, Pass::Backward));
    expect_dims("rms_norm::backward", "dy", dy, x.dims());
    expect_dims("rms_norm::backward", "w", w, &[x.width()]);
    expect_dims("rms_norm::backward", "rstd", rstd, &[x.num_rows()]);
    expect_dims("rms_norm::backward", "dw", dw, &[x.width()]);
    let device = x.device();
    let dx = device.empty(TensorClass::Activations, x.dtype(), x.dims());
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "rms_norm::backward",
            [dy, x, w, rstd],
            [dw, &dx],
            |[dy, x, w, rstd], [dw, dx]| {
                let (dy, x, w, rstd) = (dy.f32(), x.f32(), w.f32(), rstd.f32());
                cpu::backward(cpu, dy, x, w, rstd, dw.f32(), dx.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::backward(gpu, [dy, x, w, rstd], dw, &dx),
    }
    dx
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sum, sum2, vectorized};

    pub(super) fn forward(
        cpu: &Cpu,
        x: &[f32],
        w: &[f32],
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
                forward_rows(&x[range.start * d..range.end * d], w, eps, y, rstd);
            },
        );
    }

    vectorized! {
        fn forward_rows(x: &[f32], w: &[f32], eps: f32, y: &mut [f32], rstd: &mut [f32]) {
            let d = w.len();
            for row in 0..rstd.len() {
                let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
                let r = 1.0 / (sum(x, |x| x * x) / d as f32 + eps).sqrt();
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
        dy: &[f32],
        x: &[f32],
        w: &[f32],
        rstd: &[f32],
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
            backward_rows(&dy[range.clone()], &x[range], w, &rstd[rows], dx, partial);
        });
        for partial in partial.chunks_exact(d.max(1)) {
            for (dw, &p) in dw.iter_mut().zip(partial) {
                *dw += p;
            }
        }
    }

    vectorized! {
        fn backward_rows(
            dy: &[f32],
            x: &[f32],
            w: &[f32],
            rstd: &[f32],
            dx: &mut [f32],
            dw: &mut [f32],
        ) {
            let d = w.len();
            let dw = &mut dw[..d];
            for (row, &r) in rstd.iter().enumerate() {
                let (dy, x, dx) = (&dy[row * d..][..d], &x[row * d..][..d], &mut dx[row * d..][..d]);
                for i in 0..d {
                    dx[i] = dy[i] * w[i];
                }
                let c = sum2(dx, x, |g, x| g * (x * r)) / d as f32;
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
