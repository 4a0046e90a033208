//! Cases that hold a device to what the emulator's model of the hardware claims.
//!
//! Each runs one instruction of `model.cu` or `model_sm90.cu` on small integers and gives the words that
//! came out beside those that the tables of the PTX ISA ask for: what of 16 bytes a cp.async fills with
//! zero, what atomics, named barriers and mbarriers answer, which lane holds which element of `ldmatrix`,
//! `stmatrix` and `mma` (`warp`); where a bulk copy of two to five dims puts a tile under each swizzle, and
//! what it does past the edges (`bulk`); which thread holds what of a `wgmma`, and what the fields of a
//! matrix descriptor mean, for both majors, all swizzles and all widths (`wgmma`). The expectations are
//! formulas by element, written apart from the emulator's. In tests the device is the emulator; on a GPU
//! they confirm it.
//!
//! Claims that no output can show are not here. The emulator's detectors stand for those: races, missing
//! fences, stray accesses.

use moefold_profiles::Dtype;

use crate::bf16;
use crate::cuda::program::{Architecture, Arg, Grid, Listed, Program};
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::Tensor;

mod bulk;
mod warp;
mod wgmma;

const OP: &str = "model";

/// One claim about the hardware.
pub struct Case {
    /// What is claimed.
    pub name: String,
    run: Box<dyn Fn(&Device) -> Words>,
}

/// What came out of a case, and what should have.
pub struct Words {
    /// As the device wrote them.
    pub got: Vec<u32>,
    /// As the tables say.
    pub want: Vec<u32>,
}

impl Case {
    fn new(name: impl Into<String>, run: impl Fn(&Device) -> Words + 'static) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }

    /// Runs it on a CUDA device of the architecture that it is for.
    pub fn run(&self, device: &Device) -> Words {
        (self.run)(device)
    }
}

/// All cases that a device of this architecture can run.
pub fn cases(architecture: Architecture) -> Vec<Case> {
    let mut cases = warp::cases();
    if architecture >= Architecture::SM90 {
        cases.extend(warp::hopper_cases());
        cases.extend(bulk::cases());
    }
    if architecture.has_wgmma() {
        cases.extend(wgmma::cases());
    }
    cases
}

/// What the cases launch, with its limits.
pub(crate) fn programs() -> Vec<Listed> {
    [warp::programs(), wgmma::programs()].concat()
}

fn upload(device: &Device, words: &[u32]) -> Tensor {
    let words: &[i32] = bytemuck::cast_slice(words);
    device.from_i32(TensorClass::Transient, words, &[words.len()])
}

fn room(device: &Device, words: usize) -> Tensor {
    device.empty(TensorClass::Transient, Dtype::I32, &[words])
}

fn download(tensors: &[&Tensor]) -> Vec<u32> {
    tensors
        .iter()
        .flat_map(|tensor| tensor.to_i32())
        .map(|word| word as u32)
        .collect()
}

fn launch(
    device: &Device,
    program: &Program,
    entry: &'static str,
    threads: u32,
    shared: usize,
    args: &[Arg],
) {
    let Backend::Cuda(gpu) = &device.0.backend else {
        panic!("{device:?} has no model to confirm")
    };
    let grid = Grid::linear(1, threads, shared);
    gpu.launch(OP, program, entry, grid, args);
}

/// Two elements as a word, the first at the lower address.
fn pair(first: u16, second: u16) -> u32 {
    u32::from(first) | u32::from(second) << 16
}

fn pairs(elements: &[u16]) -> Vec<u32> {
    elements.chunks(2).map(|two| pair(two[0], two[1])).collect()
}

/// Small integers: products and sums of them are exact in bf16 and f32.
fn value_a(row: usize, k: usize) -> f32 {
    ((row * 7 + k * 3) % 9) as f32 - 4.0
}

fn value_b(k: usize, column: usize) -> f32 {
    ((column * 5 + k * 11) % 7) as f32 - 3.0
}

/// An element of `1 + a b`.
fn product(row: usize, column: usize, depth: usize) -> u32 {
    let sum: f32 = (0..depth)
        .map(|k| value_a(row, k) * value_b(k, column))
        .sum();
    (1.0 + sum).to_bits()
}

/// Register `i` of thread `t` of an A fragment, 16 rows a warp.
fn register_a(t: usize, i: usize) -> u32 {
    let (warp, group, pair_of) = (t / 32, t % 32 / 4, t % 4);
    let row = 16 * warp + group + if i % 2 == 1 { 8 } else { 0 };
    let k = 2 * pair_of + if i >= 2 { 8 } else { 0 };
    pair(
        bf16::narrow(value_a(row, k)),
        bf16::narrow(value_a(row, k + 1)),
    )
}

/// Where 16 bytes of a row go: rows of 128 bytes repeat after 8, of 64 after 4 pairs, of 32 after 2
/// fours.
fn swizzled_piece(row_bytes: usize, row: usize, piece: usize) -> usize {
    match row_bytes {
        128 => piece ^ (row % 8),
        64 => piece ^ (row / 2 % 4),
        32 => piece ^ (row / 4 % 2),
        _ => piece,
    }
}
