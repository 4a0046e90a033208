//! One matrix product per expert, over rows sorted by expert.
//!
//! `counts[e]` rows of x belong to expert `e`, in order, and any may be zero; they are given on the
//! host or as offsets on the device ([`Rows`]). Weights are `[experts, n, k]`, each `[out, in]`.
//!
//! A device implementation: the three products for all experts in as few launches as it can; wgrad
//! adds to `dw` and leaves experts without rows untouched. A row must not depend on the others.

use moefold_profiles::{Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// Which rows belong to which expert.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// How many each has; they sum to the rows of x.
    Counts(&'a [usize]),
    /// Where those of each start, and where the last ones end: i32 `[experts + 1]` on the device,
    /// rising from 0 to at most the rows of x. Rows behind the last are not read, and of results
    /// not written.
    Offsets(&'a Tensor),
}

impl Rows<'_> {
    /// Asserts that they are of so many experts and cover the rows of `x`.
    #[track_caller]
    fn expect(self, op: &str, experts: usize, x: &Tensor) {
        match self {
            Self::Counts(counts) => {
                assert!(
                    counts.len() == experts,
                    "grouped_gemm::{op}: {} counts for {experts} experts",
                    counts.len()
                );
                let rows: usize = counts.iter().sum();
                assert!(
                    rows == x.num_rows(),
                    "grouped_gemm::{op}: counts of {rows} rows for {x:?}"
                );
            }
            Self::Offsets(offsets) => {
                expect_dims(
                    &format!("grouped_gemm::{op}"),
                    "offsets",
                    offsets,
                    &[experts + 1],
                );
            }
        }
    }

    /// The counts, on the host.
    fn counts(self) -> Vec<usize> {
        match self {
            Self::Counts(counts) => counts.to_vec(),
            Self::Offsets(offsets) => {
                let starts = offsets.to_i32();
                let count =
                    |pair: &[i32]| usize::try_from(pair[1] - pair[0]).expect("offsets rise");
                starts.windows(2).map(count).collect()
            }
        }
    }

    /// The offsets, on the device.
    fn offsets(self, device: &Device) -> Tensor {
        match self {
            Self::Counts(counts) => {
                let start = |end: &mut i32, count: &usize| {
                    *end += i32::try_from(*count).expect("rows are counted in i32");
                    Some(*end)
                };
                let mut offsets = vec![0];
                offsets.extend(counts.iter().scan(0, start));
                device.from_i32(TensorClass::Transient, &offsets, &[offsets.len()])
            }
            Self::Offsets(offsets) => offsets.clone(),
        }
    }
}

/// The cost-table key: `w: [experts, n, k]` on `rows` rows in all.
pub fn key(w: &Tensor, rows: usize, pass: Pass) -> Op {
    let [groups, n, k] = sizes("key", w);
    Op::GroupedGemm {
        groups: groups as u64,
        rows: rows as u64,
        n: n as u64,
        k: k as u64,
        pass,
        dtype: w.dtype(),
    }
}

/// `y[rows of e] = x[rows of e] W_e^T`: `x [N,k]`, `w [E,n,k]` to `y [N,n]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn forward(x: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    forward_of(x, w, Rows::Counts(counts))
}

/// [`forward`] of rows given either way.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn forward_of(x: &Tensor, w: &Tensor, rows: Rows<'_>) -> Tensor {
    let _op = x.device().begin(|| key(w, x.num_rows(), Pass::Forward));
    let [experts, n, k] = sizes("forward", w);
    rows.expect("forward", experts, x);
    expect_dims("grouped_gemm::forward", "x", x, &[x.num_rows(), k]);
    let y = like(x, n);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            with("grouped_gemm", [x, w], [&y], |[x, w], [y]| {
                cpu::forward(cpu, x.f32(), w.f32(), &counts, y.f32(), [n, k]);
            });
        }
        Backend::Cuda(gpu) => cuda::forward(gpu, x, w, &rows.offsets(x.device()), &y),
    }
    y
}

/// `dx[rows of e] = dy[rows of e] W_e`: `dy [N,n]`, `w [E,n,k]` to `dx [N,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn dgrad(dy: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    dgrad_of(dy, w, Rows::Counts(counts))
}

/// [`dgrad`] of rows given either way.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn dgrad_of(dy: &Tensor, w: &Tensor, rows: Rows<'_>) -> Tensor {
    let _op = dy.device().begin(|| key(w, dy.num_rows(), Pass::Dgrad));
    let [experts, n, k] = sizes("dgrad", w);
    rows.expect("dgrad", experts, dy);
    expect_dims("grouped_gemm::dgrad", "dy", dy, &[dy.num_rows(), n]);
    let dx = like(dy, k);
    match &dy.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            with("grouped_gemm", [dy, w], [&dx], |[dy, w], [dx]| {
                cpu::dgrad(cpu, dy.f32(), w.f32(), &counts, dx.f32(), [n, k]);
            });
        }
        Backend::Cuda(gpu) => cuda::dgrad(gpu, dy, w, &rows.offsets(dy.device()), &dx),
    }
    dx
}

/// `dW_e += dy[rows of e]^T x[rows of e]`: `dy [N,n]`, `x [N,k]` into `dw [E,n,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn wgrad(dy: &Tensor, x: &Tensor, counts: &[usize], dw: &Tensor) {
    wgrad_of(dy, x, Rows::Counts(counts), dw);
}

/// [`wgrad`] of rows given either way.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn wgrad_of(dy: &Tensor, x: &Tensor, rows: Rows<'_>, dw: &Tensor) {
    let _op = x.device().begin(|| {
        let [groups, n, k] = sizes("wgrad", dw).map(|size| size as u64);
        Op::GroupedGemm {
            groups,
            rows: x.num_rows() as u64,
            n,
            k,
            pass: Pass::Wgrad,
            dtype: x.dtype(),
        }
    });
    let [experts, n, k] = sizes("wgrad", dw);
    rows.expect("wgrad", experts, x);
    expect_dims("grouped_gemm::wgrad", "dy", dy, &[x.num_rows(), n]);
    expect_dims("grouped_gemm::wgrad", "x", x, &[x.num_rows(), k]);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            with("grouped_gemm", [dy, x], [dw], |[dy, x], [dw]| {
                cpu::wgrad(cpu, dy.f32(), x.f32(), &counts, dw.f32(), [n, k]);
            });
        }
        Backend::Cuda(gpu) => cuda::wgrad(gpu, dy, x, &rows.offsets(x.device()), dw),
    }
}

fn sizes(op: &str, w: &Tensor) -> [usize; 3] {
    w.dims().try_into().unwrap_or_else(|_| {
        panic!("grouped_gemm::{op}: weights are {w:?}, expected [experts, n, k]")
    })
}

/// As many rows as `x`, of another width.
fn like(x: &Tensor, width: usize) -> Tensor {
    x.device()
        .empty(TensorClass::Activations, x.dtype(), &[x.num_rows(), width])
}

mod cuda {
    //! The products of [`crate::gemm`] with offsets.

    use crate::cuda::Cuda;
    use crate::gemm::Trans;
    use crate::gemm::cuda::Product;
    use crate::tensor::Tensor;

    pub(super) fn forward(gpu: &Cuda, x: &Tensor, w: &Tensor, offsets: &Tensor, y: &Tensor) {
        Product {
            op: "grouped_gemm::forward",
            a: (x.into(), Trans::No),
            b: (w.into(), Trans::Yes),
            c: y.into(),
            bias: None,
            sizes: [x.num_rows(), y.width(), x.width()],
            beta: 0.0,
            offsets: Some(offsets),
        }
        .run(gpu);
    }

    pub(super) fn dgrad(gpu: &Cuda, dy: &Tensor, w: &Tensor, offsets: &Tensor, dx: &Tensor) {
        Product {
            op: "grouped_gemm::dgrad",
            a: (dy.into(), Trans::No),
            b: (w.into(), Trans::No),
            c: dx.into(),
            bias: None,
            sizes: [dy.num_rows(), dx.width(), dy.width()],
            beta: 0.0,
            offsets: Some(offsets),
        }
        .run(gpu);
    }

    pub(super) fn wgrad(gpu: &Cuda, dy: &Tensor, x: &Tensor, offsets: &Tensor, dw: &Tensor) {
        Product {
            op: "grouped_gemm::wgrad",
            a: (dy.into(), Trans::Yes),
            b: (x.into(), Trans::No),
            c: dw.into(),
            bias: None,
            sizes: [dy.width(), x.width(), x.num_rows()],
            beta: 1.0,
            offsets: Some(offsets),
        }
        .run(gpu);
    }
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
        let dy = Matrix::new(&dy[..rows * n], rows, n);
        let x = Matrix::new(&x[..rows * k], rows, k);
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
