//! One matrix product per expert, over rows sorted by expert.
//!
//! `counts[e]` rows of x belong to expert `e`, in order; they sum to the rows of x, and any may be
//! zero. Weights are `[experts, n, k]`, each `[out, in]`.
//!
//! A device implementation: the three products for all experts in as few launches as it can; wgrad
//! adds to `dw` and leaves experts without rows untouched. A row must not depend on the others.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The cost-table key: `w: [experts, n, k]` on `rows` rows in all.
pub fn key(w: &Tensor, rows: usize, pass: Pass) -> Op {
    let [groups, n, k] = sizes("key", w);
    Op::GroupedGemm {
        groups: groups as u64,
        rows: rows as u64,
        n: n as u64,
        k: k as u64,
        pass,
        dtype: Dtype::F32,
    }
}

/// `y[rows of e] = x[rows of e] W_e^T`: `x [N,k]`, `w [E,n,k]` to `y [N,n]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn forward(x: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    let [_, n, k] = sizes("forward", w);
    let rows = num_rows("forward", w, counts);
    expect_dims("grouped_gemm::forward", "x", x, &[rows, k]);
    let y = x
        .device()
        .empty(TensorClass::Activations, Dtype::F32, &[rows, n]);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with("grouped_gemm", [x, w], [&y], |[x, w], [y]| {
            cpu::forward(cpu, x.f32(), w.f32(), counts, y.f32(), [n, k]);
        }),
        Backend::Cuda(gpu) => gpu.unwritten("grouped_gemm::forward"),
    }
    y
}

/// `dx[rows of e] = dy[rows of e] W_e`: `dy [N,n]`, `w [E,n,k]` to `dx [N,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn dgrad(dy: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    let [_, n, k] = sizes("dgrad", w);
    let rows = num_rows("dgrad", w, counts);
    expect_dims("grouped_gemm::dgrad", "dy", dy, &[rows, n]);
    let dx = dy
        .device()
        .empty(TensorClass::Activations, Dtype::F32, &[rows, k]);
    match &dy.device().0.backend {
        Backend::Cpu(cpu) => with("grouped_gemm", [dy, w], [&dx], |[dy, w], [dx]| {
            cpu::dgrad(cpu, dy.f32(), w.f32(), counts, dx.f32(), [n, k]);
        }),
        Backend::Cuda(gpu) => gpu.unwritten("grouped_gemm::dgrad"),
    }
    dx
}

/// `dW_e += dy[rows of e]^T x[rows of e]`: `dy [N,n]`, `x [N,k]` into `dw [E,n,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn wgrad(dy: &Tensor, x: &Tensor, counts: &[usize], dw: &Tensor) {
    let [_, n, k] = sizes("wgrad", dw);
    let rows = num_rows("wgrad", dw, counts);
    expect_dims("grouped_gemm::wgrad", "dy", dy, &[rows, n]);
    expect_dims("grouped_gemm::wgrad", "x", x, &[rows, k]);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with("grouped_gemm", [dy, x], [dw], |[dy, x], [dw]| {
            cpu::wgrad(cpu, dy.f32(), x.f32(), counts, dw.f32(), [n, k]);
        }),
        Backend::Cuda(gpu) => gpu.unwritten("grouped_gemm::wgrad"),
    }
}

fn sizes(op: &str, w: &Tensor) -> [usize; 3] {
    w.dims().try_into().unwrap_or_else(|_| {
        panic!("grouped_gemm::{op}: weights are {w:?}, expected [experts, n, k]")
    })
}

fn num_rows(op: &str, w: &Tensor, counts: &[usize]) -> usize {
    assert!(
        counts.len() == w.dims()[0],
        "grouped_gemm::{op}: {} counts for the experts of {w:?}",
        counts.len()
    );
    counts.iter().sum()
}

mod cpu {
    use crate::gemm::cpu::share;
    use crate::matrix::{Matrix, MatrixMut};
    use crate::parallel::Cpu;
    use crate::product::multiply;

    pub(super) fn forward(
        cpu: &Cpu,
        x: &[f32],
        w: &[f32],
        counts: &[usize],
        y: &mut [f32],
        [n, k]: [usize; 2],
    ) {
        rows(
            cpu,
            Matrix::new(x, y.len() / n.max(1), k),
            counts,
            y,
            n,
            |e| Matrix::new(&w[e * n * k..][..n * k], n, k).t(),
        );
    }

    pub(super) fn dgrad(
        cpu: &Cpu,
        dy: &[f32],
        w: &[f32],
        counts: &[usize],
        dx: &mut [f32],
        [n, k]: [usize; 2],
    ) {
        rows(
            cpu,
            Matrix::new(dy, dx.len() / k.max(1), n),
            counts,
            dx,
            k,
            |e| Matrix::new(&w[e * n * k..][..n * k], n, k),
        );
    }

    /// Each expert's rows of `a` times its matrix, tasks being halves or so of one expert.
    fn rows<'a>(
        cpu: &Cpu,
        a: Matrix<'a>,
        counts: &[usize],
        out: &'a mut [f32],
        width: usize,
        matrix: impl Fn(usize) -> Matrix<'a>,
    ) {
        let mut tasks = Vec::new();
        let mut rest = MatrixMut::new(out, a.num_rows(), width);
        let mut start = 0;
        for (expert, &count) in counts.iter().enumerate() {
            let (c, later) = rest.split_rows(count);
            rest = later;
            share(
                cpu.threads(),
                a.rows(start..start + count),
                matrix(expert),
                c,
                &mut tasks,
            );
            start += count;
        }
        cpu.tasks(tasks, |(a, b, c)| multiply(1.0, a, b, 0.0, c));
    }

    pub(super) fn wgrad(
        cpu: &Cpu,
        dy: &[f32],
        x: &[f32],
        counts: &[usize],
        dw: &mut [f32],
        [n, k]: [usize; 2],
    ) {
        let rows: usize = counts.iter().sum();
        let (dy, x) = (Matrix::new(dy, rows, n), Matrix::new(x, rows, k));
        let mut tasks = Vec::new();
        let mut start = 0;
        for (&count, dw) in counts.iter().zip(dw.chunks_exact_mut((n * k).max(1))) {
            if count > 0 {
                let range = start..start + count;
                let c = MatrixMut::new(dw, n, k);
                share(
                    cpu.threads(),
                    dy.rows(range.clone()).t(),
                    x.rows(range),
                    c,
                    &mut tasks,
                );
            }
            start += count;
        }
        cpu.tasks(tasks, |(a, b, c)| multiply(1.0, a, b, 1.0, c));
    }
}

#[cfg(test)]
mod tests;
