//! Copies of rows: gathered by an index, and in contiguous chunks.
//!
//! A row is the last dim. Chunks are what an all-to-all needs around it: rows that arrive by source
//! rank and expert are put in order by expert and source rank, and back.
//!
//! A device implementation: one launch that reads the index or the list of chunks; the floor is every
//! byte moved once in and once out. A GPU moves 16 bytes at a time where every row starts at a multiple
//! of that, else an element. It does not check an index.

use std::ops::Range;

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::sizes;
use crate::tensor::{Tensor, expect_dims};

/// The cost-table key of copies of `len` elements.
fn key(kind: SweepKind, len: usize, dtype: Dtype) -> Op {
    Op::Sweep {
        kind,
        len: len as u64,
        dtype,
    }
}

/// `y[i] = x[index[i]]`, zeros where the index is negative: `x [R, w]`, `index [N]` i32 to `y [N, w]`.
///
/// # Panics
/// When an index is beyond the rows of x.
pub fn gather(x: &Tensor, index: &Tensor) -> Tensor {
    let _op = x
        .device()
        .begin(|| key(SweepKind::Gather, index.len() * x.width(), x.dtype()));
    let &[_, width] = x.dims() else {
        panic!("rows::gather: x is {x:?}, expected [rows, width]")
    };
    let device = x.device();
    let y = device.empty(TensorClass::Activations, x.dtype(), &[index.len(), width]);
    match &device.0.backend {
        Backend::Cpu(cpu) => with("rows::gather", [x, index], [&y], |[x, index], [y]| {
            cpu::gather(cpu, x.f32(), index.i32(), y.f32(), width);
        }),
        Backend::Cuda(gpu) => cuda::gather(gpu, x, index, &y),
    }
    y
}

/// Chunks of rows, in order, none of them empty.
#[derive(Debug, Clone, Default)]
pub struct Chunks {
    /// Empty where they are not listed.
    ranges: Vec<Range<usize>>,
    /// How many they are.
    count: usize,
    /// Of all of them.
    rows: usize,
    /// Where the last row of them ends.
    end: usize,
}

impl Chunks {
    /// So many that partition `rows` rows, for tensors without memory: where each is, nobody asks there.
    pub fn unlisted(count: usize, rows: usize) -> Self {
        Self {
            ranges: Vec::new(),
            count,
            rows,
            end: rows,
        }
    }

    /// Where each is, for an op on tensors that have memory.
    fn listed(&self, op: &str) -> &[Range<usize>] {
        assert_eq!(self.ranges.len(), self.count, "{op}: chunks are not listed");
        &self.ranges
    }
}

/// Those that are not empty.
///
/// # Panics
/// When they have more rows than memory can hold.
impl FromIterator<Range<usize>> for Chunks {
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(all: I) -> Self {
        let all = all.into_iter();
        let mut ranges = Vec::with_capacity(all.size_hint().0);
        ranges.extend(all.filter(|range| !range.is_empty()));
        Self {
            count: ranges.len(),
            rows: sizes::sum("rows::Chunks", ranges.iter().map(ExactSizeIterator::len)),
            end: ranges.iter().map(|range| range.end).max().unwrap_or(0),
            ranges,
        }
    }
}

/// The rows of `chunks`, one chunk after the other: `x [R, w]` to `[sum of chunk lengths, w]`.
///
/// # Panics
/// When a chunk is not inside x.
pub fn gather_chunks(x: &Tensor, chunks: &Chunks) -> Tensor {
    let rows = chunks.rows;
    assert!(
        chunks.end <= x.dims()[0],
        "rows::gather_chunks: rows up to {} of {x:?}",
        chunks.end
    );
    let _op = x
        .device()
        .begin(|| key(SweepKind::Chunks, rows * x.width(), x.dtype()));
    let mut dims = x.dims().to_vec();
    dims[0] = rows;
    let y = x.device().empty(x.class(), x.dtype(), &dims);
    let width: usize = dims[1..].iter().product();
    match &x.device().0.backend {
        Backend::Cpu(_) => with("rows::gather_chunks", [x], [&y], |[x], [y]| {
            let chunks = chunks.listed("rows::gather_chunks");
            cpu::gather_chunks(x.words(), chunks, y.words(), width);
        }),
        Backend::Cuda(gpu) => cuda::gather_chunks(gpu, x, chunks, &y),
    }
    y
}

/// The inverse of [`gather_chunks`]: consecutive rows of `y` go to `chunks` of a new tensor of as many
/// rows; the chunks cover it exactly.
///
/// # Panics
/// When the chunks do not partition the rows of y.
pub fn scatter_chunks(y: &Tensor, chunks: &Chunks) -> Tensor {
    let _op = y
        .device()
        .begin(|| key(SweepKind::Chunks, y.len(), y.dtype()));
    assert!(
        partition(y, chunks),
        "rows::scatter_chunks: {:?} do not partition the rows of {y:?}",
        chunks.ranges
    );
    let x = y.device().empty(y.class(), y.dtype(), y.dims());
    let width: usize = y.dims()[1..].iter().product();
    match &y.device().0.backend {
        Backend::Cpu(_) => with("rows::scatter_chunks", [y], [&x], |[y], [x]| {
            let chunks = chunks.listed("rows::scatter_chunks");
            cpu::scatter_chunks(y.words(), chunks, x.words(), width);
        }),
        Backend::Cuda(gpu) => cuda::scatter_chunks(gpu, y, chunks, &x),
    }
    x
}

/// Whether some chunks partition the rows of a tensor. Of one without memory it is enough that they are as
/// many rows: sorting the chunks would take longer than all else that is done there.
fn partition(y: &Tensor, chunks: &Chunks) -> bool {
    let rows = y.dims()[0];
    if y.device().is_meta() {
        return chunks.rows == rows;
    }
    let chunks = chunks.listed("rows::scatter_chunks");
    let mut sorted: Vec<&Range<usize>> = chunks.iter().collect();
    sorted.sort_by_key(|chunk| chunk.start);
    let ends = || std::iter::once(0).chain(sorted.iter().map(|chunk| chunk.end));
    let mut pairs = sorted.iter().zip(ends());
    pairs.all(|(chunk, end)| chunk.start == end) && ends().last() == Some(rows)
}

/// Columns `range` of every row, contiguous: `x [.., w]` to `[rows, range.len()]`.
///
/// # Panics
/// When the range is not inside the width.
pub fn gather_columns(x: &Tensor, range: Range<usize>) -> Tensor {
    let dims = [x.num_rows(), range.len()];
    let y = x.device().empty(x.class(), x.dtype(), &dims);
    gather_columns_into(x, range, &y);
    y
}

/// [`gather_columns`] over `y [rows, range.len()]`.
///
/// # Panics
/// As [`gather_columns`], and when `y` is not of this shape.
pub fn gather_columns_into(x: &Tensor, range: Range<usize>, y: &Tensor) {
    let _op = x
        .device()
        .begin(|| key(SweepKind::Chunks, y.len(), x.dtype()));
    assert!(
        range.start <= range.end && range.end <= x.width(),
        "rows::gather_columns: columns {range:?} of {x:?}"
    );
    expect_dims("rows::gather_columns", "y", y, &[x.num_rows(), range.len()]);
    let width = x.width();
    match &x.device().0.backend {
        Backend::Cpu(_) => with("rows::gather_columns", [x], [y], |[x], [y]| {
            cpu::gather_columns(x.words(), range, y.words(), width);
        }),
        Backend::Cuda(gpu) => cuda::gather_columns(gpu, x, range, y),
    }
}

/// Writes `y [rows, range.len()]` over columns `range` of every row of `x [.., w]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn scatter_columns(y: &Tensor, x: &Tensor, range: Range<usize>) {
    let _op = y
        .device()
        .begin(|| key(SweepKind::Chunks, y.len(), y.dtype()));
    assert!(
        range.start <= range.end && range.end <= x.width(),
        "rows::scatter_columns: columns {range:?} of {x:?}"
    );
    expect_dims(
        "rows::scatter_columns",
        "y",
        y,
        &[x.num_rows(), range.len()],
    );
    let width = x.width();
    match &x.device().0.backend {
        Backend::Cpu(_) => with("rows::scatter_columns", [y], [x], |[y], [x]| {
            cpu::scatter_columns(y.words(), range, x.words(), width);
        }),
        Backend::Cuda(gpu) => cuda::scatter_columns(gpu, y, x, range),
    }
}

mod cpu {
    use std::ops::Range;

    use crate::parallel::Cpu;

    pub(super) fn gather(cpu: &Cpu, x: &[f32], index: &[i32], y: &mut [f32], width: usize) {
        cpu.rows(index.len(), 2 * y.len(), [(y, width)], |range, [y]| {
            for (&i, y) in index[range].iter().zip(y.chunks_exact_mut(width.max(1))) {
                match usize::try_from(i) {
                    Ok(i) => y.copy_from_slice(&x[i * width..][..width]),
                    Err(_) => y.fill(0.0),
                }
            }
        });
    }

    pub(super) fn gather_chunks(x: &[u32], chunks: &[Range<usize>], y: &mut [u32], width: usize) {
        let mut rest = y;
        for chunk in chunks {
            let from = &x[chunk.start * width..chunk.end * width];
            let (to, later) = rest.split_at_mut(from.len());
            to.copy_from_slice(from);
            rest = later;
        }
    }

    pub(super) fn scatter_chunks(y: &[u32], chunks: &[Range<usize>], x: &mut [u32], width: usize) {
        let mut rest = y;
        for chunk in chunks {
            let to = &mut x[chunk.start * width..chunk.end * width];
            let (from, later) = rest.split_at(to.len());
            to.copy_from_slice(from);
            rest = later;
        }
    }

    pub(super) fn gather_columns(x: &[u32], range: Range<usize>, y: &mut [u32], width: usize) {
        let rows = x
            .chunks_exact(width.max(1))
            .zip(y.chunks_exact_mut(range.len().max(1)));
        rows.for_each(|(x, y)| y.copy_from_slice(&x[range.clone()]));
    }

    pub(super) fn scatter_columns(y: &[u32], range: Range<usize>, x: &mut [u32], width: usize) {
        let rows = x
            .chunks_exact_mut(width.max(1))
            .zip(y.chunks_exact(range.len().max(1)));
        rows.for_each(|(x, y)| x[range.clone()].copy_from_slice(y));
    }
}

pub(crate) mod cuda;
