//! Launches of `rows.cu`: accesses as wide as addresses and widths allow.

use std::ops::Range;

use moefold_profiles::Dtype;

use super::Chunks;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::platform::Address;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("rows", "../rows.cu");
const THREADS: u32 = 256;
/// Units of a chunk that one block copies.
const TILE: usize = 1024;
/// Bytes of one access, the best first.
const UNITS: [usize; 3] = [16, 4, 2];

fn program(unit: usize) -> Program {
    SOURCE.with(&[Define::int("UNIT", unit)])
}

/// Every specialization.
pub(crate) fn programs() -> Vec<Listed> {
    let list = |unit| Listed {
        program: program(unit),
        needs: Needs::Sm80,
        entries: vec![
            Entry::plain("rows_copy", 64, 0),
            Entry::plain("rows_chunks", 64, 0),
        ],
    };
    UNITS.map(list).into()
}

/// The widest access that all these addresses and numbers of bytes are multiples of.
fn unit(addresses: &[Address], bytes: &[usize]) -> usize {
    let fits = |unit: &usize| {
        let mut addresses = addresses.iter();
        addresses.all(|a| a.0.is_multiple_of(*unit as u64))
            && bytes.iter().all(|b| b.is_multiple_of(*unit))
    };
    let unit = UNITS.into_iter().find(fits);
    unit.expect("elements are of two bytes or four, and aligned")
}

fn element_bytes(x: &Tensor) -> usize {
    x.dtype().bytes(1).0 as usize
}

/// How many threads share a row of so many accesses, as a power of two: four accesses each, but
/// at least 128 bytes side by side where they are there.
pub(crate) fn lanes_log2(accesses: usize) -> u32 {
    let lanes = accesses.div_ceil(4).max(accesses.min(8));
    lanes.next_power_of_two().min(THREADS as usize).ilog2()
}

/// Rows in memory, in bytes.
struct Rows {
    first: Address,
    stride: usize,
}

fn all_of(x: &Tensor) -> Rows {
    Rows {
        first: x.address(),
        stride: x.width() * element_bytes(x),
    }
}

fn columns_of(x: &Tensor, range: &Range<usize>) -> Rows {
    let skipped = (range.start * element_bytes(x)) as u64;
    Rows {
        first: x.address().offset(skipped),
        ..all_of(x)
    }
}

/// `width` bytes of each of `rows` rows.
fn copy(
    gpu: &Cuda,
    op: &'static str,
    [src, dst]: [Rows; 2],
    index: Option<&Tensor>,
    [rows, width]: [usize; 2],
) {
    let unit = unit(&[src.first, dst.first], &[src.stride, dst.stride, width]);
    let shift = lanes_log2(width / unit);
    gpu.launch(
        op,
        &program(unit),
        "rows_copy",
        Grid::linear(rows.div_ceil(THREADS as usize >> shift), THREADS, 0),
        &[
            Arg::Address(src.first),
            Arg::U64((src.stride / unit) as u64),
            Arg::Address(dst.first),
            Arg::U64((dst.stride / unit) as u64),
            Arg::optional(index),
            Arg::size(rows),
            Arg::size(width / unit),
            Arg::size(shift as usize),
        ],
    );
}

pub(super) fn gather(gpu: &Cuda, x: &Tensor, index: &Tensor, y: &Tensor) {
    disjoint("rows::gather", &[x, index], &[y]);
    index.expect_dtype("rows::gather", Dtype::I32);
    let (rows, bytes) = (index.len(), all_of(x).stride);
    let ends = [all_of(x), all_of(y)];
    copy(gpu, "rows::gather", ends, Some(index), [rows, bytes]);
}

pub(super) fn gather_columns(gpu: &Cuda, x: &Tensor, range: Range<usize>, y: &Tensor) {
    disjoint("rows::gather_columns", &[x], &[y]);
    let ends = [columns_of(x, &range), all_of(y)];
    let sizes = [x.num_rows(), range.len() * element_bytes(x)];
    copy(gpu, "rows::gather_columns", ends, None, sizes);
}

pub(super) fn scatter_columns(gpu: &Cuda, y: &Tensor, x: &Tensor, range: Range<usize>) {
    disjoint("rows::scatter_columns", &[y], &[x]);
    y.expect_dtype("rows::scatter_columns", x.dtype());
    let ends = [all_of(y), columns_of(x, &range)];
    let sizes = [x.num_rows(), range.len() * element_bytes(x)];
    copy(gpu, "rows::scatter_columns", ends, None, sizes);
}

pub(super) fn gather_chunks(gpu: &Cuda, x: &Tensor, chunks: &Chunks, y: &Tensor) {
    copy_chunks(gpu, "rows::gather_chunks", x, y, chunks, |far, near| {
        [far, near]
    });
}

pub(super) fn scatter_chunks(gpu: &Cuda, y: &Tensor, chunks: &Chunks, x: &Tensor) {
    copy_chunks(gpu, "rows::scatter_chunks", y, x, chunks, |far, near| {
        [near, far]
    });
}

/// Copies chunks that follow one another on one side; `place` says which side of `src` and
/// `dst` that is.
fn copy_chunks(
    gpu: &Cuda,
    op: &'static str,
    src: &Tensor,
    dst: &Tensor,
    chunks: &Chunks,
    place: impl Fn(usize, usize) -> [usize; 2],
) {
    let device = disjoint(op, &[src], &[dst]);
    if device.is_meta() {
        // The list of chunks takes memory, but nobody reads it.
        device.empty(TensorClass::Transient, Dtype::I32, &[chunks.count, 4]);
        return;
    }
    let ranges = chunks.listed(op);
    let row: usize = src.dims()[1..].iter().product();
    let bytes = row * element_bytes(src);
    let unit = unit(&[src.address(), dst.address()], &[bytes]);
    let units = bytes / unit;
    let mut table = Vec::with_capacity(4 * ranges.len());
    let (mut tiles, mut rows) = (0, 0);
    for chunk in ranges {
        let [from, to] = place(chunk.start * units, rows * units);
        let length = chunk.len() * units;
        table
            .extend([from, to, length, tiles].map(|n| {
                i32::try_from(n).unwrap_or_else(|_| panic!("{op}: {src:?} is too large"))
            }));
        tiles += length.div_ceil(TILE);
        rows += chunk.len();
    }
    let table = device.from_i32(TensorClass::Transient, &table, &[ranges.len(), 4]);
    gpu.launch(
        op,
        &program(unit),
        "rows_chunks",
        Grid::linear(tiles, THREADS, 0),
        &[
            src.into(),
            dst.into(),
            (&table).into(),
            Arg::size(ranges.len()),
        ],
    );
}
