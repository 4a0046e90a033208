//! Launches of `reduce.cu`. Up to eight sources travel as arguments of the kernel; more, and the ranges of
//! copies, in a table in device memory.

use moefold_profiles::Dtype;

use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::platform::Address;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("reduce", "../reduce.cu");
const THREADS: u32 = 256;
/// Sources that are arguments of the kernel.
const NEAR: usize = 8;
/// Accesses of a range that one block copies.
const TILE: usize = 1024;
/// Blocks of a sum for each multiprocessor: as many as are resident.
const RESIDENT: usize = 8;

fn program([src, dst]: [Dtype; 2], vector: usize) -> Program {
    SOURCE.with(&[
        Define::dtype("S", src),
        Define::dtype("D", dst),
        Define::int("VEC", vector),
    ])
}

/// Every pair of types, for lengths of whole 16-byte pieces.
pub(crate) fn programs() -> Vec<Listed> {
    let list = |types| Listed {
        program: program(types, widest(types)),
        needs: Needs::Sm80,
        entries: vec![
            Entry::plain("reduce_sum", 96, 0),
            Entry::plain("reduce_copy", 64, 0),
        ],
    };
    [
        [Dtype::Bf16, Dtype::Bf16],
        [Dtype::Bf16, Dtype::F32],
        [Dtype::F32, Dtype::Bf16],
        [Dtype::F32, Dtype::F32],
    ]
    .map(list)
    .into()
}

/// Elements in 16 bytes of the wider type.
fn widest(types: [Dtype; 2]) -> usize {
    let bytes = types.map(|dtype| dtype.bytes(1).0 as usize);
    16 / bytes[0].max(bytes[1])
}

/// The most elements that all these tensors can be accessed by, and the program for them.
fn specialized<'a>(
    types: [Dtype; 2],
    tensors: impl Iterator<Item = &'a Tensor>,
) -> (Program, usize) {
    let widest = widest(types);
    let fits = |t: &Tensor| {
        let bytes = t.dtype().bytes(widest as u64).0;
        t.address().0.is_multiple_of(bytes) && t.len().is_multiple_of(widest)
    };
    let vector = if tensors.into_iter().all(fits) {
        widest
    } else {
        1
    };
    (program(types, vector), vector)
}

/// Words of 64 bits in device memory.
fn upload(near: &Tensor, words: &[u64]) -> Tensor {
    let halves: Vec<i32> = words
        .iter()
        .flat_map(|&word| [word as i32, (word >> 32) as i32])
        .collect();
    let device = near.device();
    device.from_i32(TensorClass::Transient, &halves, &[halves.len()])
}

pub(super) fn sum_ordered(gpu: &Cuda, srcs: &[&Tensor], dst: &Tensor) {
    const OP: &str = "reduce::sum_ordered";
    disjoint(OP, srcs, &[dst]);
    for src in srcs {
        src.expect_dtype(OP, srcs[0].dtype());
    }
    let types = [srcs[0].dtype(), dst.dtype()];
    let (program, vector) = specialized(types, srcs.iter().copied().chain([dst]));
    let (near, far) = srcs.split_at(srcs.len().min(NEAR));
    let far: Vec<u64> = far.iter().map(|src| src.address().0).collect();
    let far = (!far.is_empty()).then(|| upload(dst, &far));
    let mut arguments: Vec<Arg> = near.iter().map(|&src| src.into()).collect();
    arguments.resize(NEAR, Arg::Address(Address::NULL));
    let length = dst.len() / vector;
    arguments.extend([
        Arg::optional(far.as_ref()),
        Arg::size(srcs.len()),
        dst.into(),
        Arg::U64(length as u64),
    ]);
    let blocks = length.div_ceil(THREADS as usize);
    let blocks = blocks.min(RESIDENT * gpu.multiprocessors() as usize);
    let grid = Grid::linear(blocks, THREADS, 0);
    gpu.launch(OP, &program, "reduce_sum", grid, &arguments);
}

pub(super) fn copy_all(gpu: &Cuda, pairs: &[(&Tensor, &Tensor)]) {
    const OP: &str = "reduce::copy_all";
    let (srcs, dsts): (Vec<&Tensor>, Vec<&Tensor>) = pairs.iter().copied().unzip();
    disjoint(OP, &srcs, &dsts);
    let types = [srcs[0].dtype(), dsts[0].dtype()];
    for (src, dst) in pairs {
        src.expect_dtype(OP, types[0]);
        dst.expect_dtype(OP, types[1]);
    }
    let (program, vector) = specialized(types, srcs.iter().chain(&dsts).copied());
    let (mut table, mut tiles) = (Vec::new(), 0);
    for (src, dst) in pairs.iter().filter(|(src, _)| !src.is_empty()) {
        let length = src.len() / vector;
        let (from, to) = (src.address().0, dst.address().0);
        table.extend([from, to, length as u64, tiles as u64]);
        tiles += length.div_ceil(TILE);
    }
    if table.is_empty() {
        return;
    }
    let lines = table.len() / 4;
    let table = upload(dsts[0], &table);
    let grid = Grid::linear(tiles, THREADS, 0);
    let arguments = [(&table).into(), Arg::size(lines)];
    gpu.launch(OP, &program, "reduce_copy", grid, &arguments);
}
