//! One matrix product per expert, over rows sorted by expert.
//!
//! `counts[e]` rows of x belong to expert `e`, in order, and any may be zero; they are given on the
//! host or as offsets on the device ([`Rows`]). Weights are `[experts, n, k]`, each `[out, in]`, or rest
//! the other way round ([`Matrices`]).
//!
//! A device implementation: the three products for all experts in as few launches as it can; wgrad
//! adds to `dw` and leaves experts without rows untouched. A row must not depend on the others.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::gemm::Trans;
use crate::sizes;
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
    pub(crate) fn expect(self, op: &str, experts: usize, x: &Tensor) {
        match self {
            Self::Counts(counts) => {
                assert!(
                    counts.len() == experts,
                    "grouped_gemm::{op}: {} counts for {experts} experts",
                    counts.len()
                );
                let rows = sizes::sum("grouped_gemm", counts.iter().copied());
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
    pub(crate) fn counts(self) -> Vec<usize> {
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
    pub(crate) fn offsets(self, device: &Device) -> Tensor {
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

/// A matrix for each expert, or where its gradient is summed.
#[derive(Debug, Clone, Copy)]
pub struct Matrices<'a> {
    tensor: &'a Tensor,
    /// How the second operand of a forward product reads each.
    forward: Trans,
}

impl<'a> Matrices<'a> {
    /// Matrices that rest `[experts, in, out]`, as GPT-OSS's checkpoints have them.
    pub fn by_input(tensor: &'a Tensor) -> Self {
        Self {
            tensor,
            forward: Trans::No,
        }
    }

    /// How many, and the widths of what a forward product gives and takes.
    fn sizes(&self, op: &str) -> [usize; 3] {
        let [experts, rows, columns] = self.tensor.dims().try_into().unwrap_or_else(|_| {
            panic!(
                "grouped_gemm::{op}: weights are {:?}, expected three dims",
                self.tensor
            )
        });
        match self.forward {
            Trans::Yes => [experts, rows, columns],
            Trans::No => [experts, columns, rows],
        }
    }

    /// How the second operand of the product that gives the gradient of x reads each.
    fn dgrad(&self) -> Trans {
        match self.forward {
            Trans::Yes => Trans::No,
            Trans::No => Trans::Yes,
        }
    }

    fn key(&self, rows: usize, pass: Pass, dtype: Dtype) -> Op {
        let [groups, n, k] = self.sizes("key").map(|size| size as u64);
        Op::GroupedGemm {
            groups,
            rows: rows as u64,
            n,
            k,
            pass,
            dtype,
        }
    }
}

/// Matrices that rest `[experts, out, in]`.
impl<'a> From<&'a Tensor> for Matrices<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self {
            tensor,
            forward: Trans::Yes,
        }
    }
}

/// The cost-table key: `w: [experts, n, k]` on `rows` rows in all.
pub fn key(w: &Tensor, rows: usize, pass: Pass) -> Op {
    Matrices::from(w).key(rows, pass, w.dtype())
}

/// `y[rows of e] = x[rows of e] W_e^T`: `x [N,k]`, `w [E,n,k]` to `y [N,n]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn forward(x: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    forward_of(x, w, Rows::Counts(counts))
}

/// [`forward`] of rows given either way, and weights in either order.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn forward_of<'a>(x: &Tensor, w: impl Into<Matrices<'a>>, rows: Rows<'_>) -> Tensor {
    let w = w.into();
    let [_, n, k] = w.sizes("forward");
    rows_times("forward", (x, k), (w, w.forward), n, rows)
}

/// `dx[rows of e] = dy[rows of e] W_e`: `dy [N,n]`, `w [E,n,k]` to `dx [N,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn dgrad(dy: &Tensor, w: &Tensor, counts: &[usize]) -> Tensor {
    dgrad_of(dy, w, Rows::Counts(counts))
}

/// [`dgrad`] of rows given either way, and weights in either order.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn dgrad_of<'a>(dy: &Tensor, w: impl Into<Matrices<'a>>, rows: Rows<'_>) -> Tensor {
    let w = w.into();
    let [_, n, k] = w.sizes("dgrad");
    rows_times("dgrad", (dy, n), (w, w.dgrad()), k, rows)
}

/// Rows of width `k` times the matrices of their experts, read so, to rows of width `n`.
fn rows_times(
    op: &'static str,
    (x, k): (&Tensor, usize),
    (w, trans): (Matrices<'_>, Trans),
    n: usize,
    rows: Rows<'_>,
) -> Tensor {
    let pass = match op {
        "forward" => Pass::Forward,
        _ => Pass::Dgrad,
    };
    let dtype = w.tensor.dtype();
    let _op = x.device().begin(|| w.key(x.num_rows(), pass, dtype));
    rows.expect(op, w.tensor.dims()[0], x);
    expect_dims(
        &format!("grouped_gemm::{op}"),
        "rows",
        x,
        &[x.num_rows(), k],
    );
    let y = like(x, n);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            with("grouped_gemm", [x, w.tensor], [&y], |[x, w], [y]| {
                cpu::rows_times(cpu, x.f32(), (w.f32(), trans), &counts, y.f32(), [n, k]);
            });
        }
        Backend::Cuda(gpu) => {
            let offsets = rows.offsets(x.device());
            cuda::rows_times(gpu, pass, x, (w.tensor, trans), &offsets, &y);
        }
    }
    y
}

/// `dW_e += dy[rows of e]^T x[rows of e]`: `dy [N,n]`, `x [N,k]` into `dw [E,n,k]`.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn wgrad(dy: &Tensor, x: &Tensor, counts: &[usize], dw: &Tensor) {
    wgrad_of(dy, x, Rows::Counts(counts), dw);
}

/// [`wgrad`] of rows given either way, and weights in either order.
///
/// # Panics
/// When shapes or counts do not agree.
pub fn wgrad_of<'a>(dy: &Tensor, x: &Tensor, rows: Rows<'_>, dw: impl Into<Matrices<'a>>) {
    let dw = dw.into();
    let _op = x
        .device()
        .begin(|| dw.key(x.num_rows(), Pass::Wgrad, x.dtype()));
    let [experts, n, k] = dw.sizes("wgrad");
    rows.expect("wgrad", experts, x);
    expect_dims("grouped_gemm::wgrad", "dy", dy, &[x.num_rows(), n]);
    expect_dims("grouped_gemm::wgrad", "x", x, &[x.num_rows(), k]);
    // Rows of a matrix are the columns of the first.
    let [a, b] = match dw.forward {
        Trans::Yes => [dy, x],
        Trans::No => [x, dy],
    };
    let dw = dw.tensor;
    match &x.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            let sizes = [a.width(), b.width()];
            with("grouped_gemm", [a, b], [dw], |[a, b], [dw]| {
                cpu::wgrad(cpu, a.f32(), b.f32(), &counts, dw.f32(), sizes);
            });
        }
        Backend::Cuda(gpu) => cuda::wgrad(gpu, a, b, &rows.offsets(x.device()), dw),
    }
}

/// As many rows as `x`, of another width.
fn like(x: &Tensor, width: usize) -> Tensor {
    x.device()
        .empty(TensorClass::Activations, x.dtype(), &[x.num_rows(), width])
}

mod cuda {
    //! The products of [`crate::gemm`] with offsets.

    use moefold_profiles::Pass;

    use crate::cuda::Cuda;
    use crate::gemm::Trans;
    use crate::gemm::cuda::Product;
    use crate::tensor::Tensor;

    pub(super) fn rows_times(
        gpu: &Cuda,
        pass: Pass,
        x: &Tensor,
        (w, trans): (&Tensor, Trans),
        offsets: &Tensor,
        y: &Tensor,
    ) {
        Product {
            op: match pass {
                Pass::Forward => "grouped_gemm::forward",
                _ => "grouped_gemm::dgrad",
            },
            a: (x.into(), Trans::No),
            b: (w.into(), trans),
            c: y.into(),
            bias: None,
            sizes: [x.num_rows(), y.width(), x.width()],
            beta: 0.0,
            offsets: Some(offsets),
        }
        .run(gpu);
    }

    pub(super) fn wgrad(gpu: &Cuda, a: &Tensor, b: &Tensor, offsets: &Tensor, dw: &Tensor) {
        Product {
            op: "grouped_gemm::wgrad",
            a: (a.into(), Trans::Yes),
            b: (b.into(), Trans::No),
            c: dw.into(),
            bias: None,
            sizes: [a.width(), b.width(), a.num_rows()],
            beta: 1.0,
            offsets: Some(offsets),
        }
        .run(gpu);
    }
}

mod cpu {
    use crate::gemm::Trans;
    use crate::gemm::cpu::share;
    use crate::matrix::{Matrix, MatrixMut};
    use crate::parallel::Cpu;
    use crate::product::multiply;

    pub(super) fn rows_times(
        cpu: &Cpu,
        x: &[f32],
        (w, trans): (&[f32], Trans),
        counts: &[usize],
        y: &mut [f32],
        [n, k]: [usize; 2],
    ) {
        let x = Matrix::new(x, y.len() / n.max(1), k);
        rows(cpu, x, counts, y, n, |e| {
            let w = &w[e * n * k..][..n * k];
            match trans {
                Trans::Yes => Matrix::new(w, n, k).t(),
                Trans::No => Matrix::new(w, k, n),
            }
        });
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
        a: &[f32],
        b: &[f32],
        counts: &[usize],
        dw: &mut [f32],
        [n, k]: [usize; 2],
    ) {
        let rows: usize = counts.iter().sum();
        let a = Matrix::new(&a[..rows * n], rows, n);
        let b = Matrix::new(&b[..rows * k], rows, k);
        let mut tasks = Vec::new();
        let mut start = 0;
        for (&count, dw) in counts.iter().zip(dw.chunks_exact_mut((n * k).max(1))) {
            if count > 0 {
                let range = start..start + count;
                let c = MatrixMut::new(dw, n, k);
                share(
                    cpu.threads(),
                    a.rows(range.clone()).t(),
                    b.rows(range),
                    c,
                    &mut tasks,
                );
            }
            start += count;
        }
        cpu.tasks(tasks, |(a, b, c)| multiply(1.0, a, b, 1.0, c));
    }
}
