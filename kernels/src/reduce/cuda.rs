//! Launches of `reduce.cu`. Up to eight sources, and eight pairs of copies, travel as arguments of the
//! kernel; sources of more in a table in device memory, pairs of more in a further launch.

use moefold_profiles::Dtype;

use super::How;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::platform::Address;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::tensor::Tensor;

const SOURCE: Source = source!("reduce", "../reduce.cu");
const THREADS: u32 = 256;
/// Sources, or pairs of copies, that are arguments of the kernel.
pub(crate) const NEAR: usize = 8;
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

/// Every pair of types.
pub(crate) fn programs() -> Vec<Listed> {
    let list = |types, vector, needs| Listed {
        program: program(types, vector),
        needs,
        entries: vec![
            Entry::plain("reduce_sum", 96, 0),
            Entry::plain("reduce_max", 96, 0),
            Entry::plain("reduce_copy", 64, 0),
        ],
    };
    let mut listed = Vec::new();
    for src in [Dtype::Bf16, Dtype::F32] {
        for dst in [Dtype::Bf16, Dtype::F32] {
            let types = [src, dst];
            listed.push(list(types, widest(types), Needs::Sm80));
            listed.push(list(types, 1, Needs::Odd));
        }
    }
    listed
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

pub(super) fn reduce(gpu: &Cuda, how: How, srcs: &[&Tensor], dst: &Tensor) {
    let op = how.op();
    let mut others = srcs.to_vec();
    others.retain(|src| !src.same_memory(dst));
    disjoint(op, &others, &[dst]);
    for src in srcs {
        src.expect_dtype(op, srcs[0].dtype());
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
    let entry = match how {
        How::Sum => "reduce_sum",
        How::Max => "reduce_max",
    };
    gpu.launch(op, &program, entry, grid, &arguments);
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
    // Integers are copied as the bits they are: as floats of their size, which nothing converts.
    let types = if types == [Dtype::I32; 2] {
        [Dtype::F32; 2]
    } else {
        types
    };
    let (program, vector) = specialized(types, srcs.iter().chain(&dsts).copied());
    let full: Vec<_> = pairs.iter().filter(|(src, _)| !src.is_empty()).collect();
    for pairs in full.chunks(NEAR) {
        let column = |of: &dyn Fn(&(&Tensor, &Tensor)) -> Arg, absent: Arg| {
            let mut column: Vec<Arg> = pairs.iter().map(|&pair| of(pair)).collect();
            column.resize(NEAR, absent);
            column
        };
        let length = |pair: &(&Tensor, &Tensor)| pair.0.len() / vector;
        let arguments = [
            column(&|pair| pair.0.into(), Arg::Address(Address::NULL)),
            column(&|pair| pair.1.into(), Arg::Address(Address::NULL)),
            column(&|pair| Arg::U64(length(pair) as u64), Arg::U64(0)),
        ]
        .concat();
        let longest = pairs.iter().map(|&pair| length(pair)).max().unwrap_or(0);
        let mut grid = Grid::linear(longest.div_ceil(TILE), THREADS, 0);
        grid.blocks[1] = pairs.len() as u32;
        gpu.launch(OP, &program, "reduce_copy", grid, &arguments);
    }
}
