//! Matrix products on CUDA devices: which kernel, which tile, how many blocks.
//!
//! One [`Product`] describes them all: dense ones, and one product per group of rows. A product of
//! bf16 runs on Hopper's own kernel where it can ([`hopper`]), on `mma.sync` elsewhere; gradients of
//! f32 with bf16 run there in two halves ([`halves`]), and other products with an f32 operand in exact
//! f32. The tile depends on the shape, bits do not depend on the tile: an element is one sum in steps
//! of 16 (of 1 in f32) along k, whatever is computed beside it.
//!
//! Floor: 2 m n k operations at the rate of the tensor cores (of the f32 units), or each operand and
//! C once through memory where few rows meet a weight; in between, operands come from the level-two
//! cache (rows + columns of a tile) / (rows * columns) times per element of C and step of k, which
//! is what [`Tile::best`] keeps low.
//!
//! A product of fewer tiles than multiprocessors leaves the others idle: the gradient of a weight of 512
//! by 2048 is 64 tiles of 128 by 128, half of an H100, however many tokens are summed over. The library
//! cuts that sum in parts. Here parts would have to follow from the shape alone, for bits not to depend
//! on the device, and cost 8 bytes of memory traffic per part and element of C; it is not done.

use moefold_profiles::Dtype;

use super::{Trans, View};
use crate::TensorClass;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::platform::Address;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::reduce;
use crate::tensor::Tensor;

pub(crate) mod bias;
mod halves;
mod hopper;
mod library;

const TENSOR_CORES: Source = source!("gemm", "../gemm.cu");
const F32: Source = source!("gemm_f32", "../gemm_f32.cu");

/// `C = op(A) op(B) + bias + beta C`, once or per group of rows.
///
/// With groups, where A is not transposed its rows and those of C are grouped and B is a matrix per
/// group; where A is transposed the rows summed over are grouped and C is a matrix per group. Groups
/// without rows then keep their C (`beta` is 1).
pub(crate) struct Product<'a> {
    pub(crate) op: &'static str,
    pub(crate) a: (View<'a>, Trans),
    pub(crate) b: (View<'a>, Trans),
    pub(crate) c: View<'a>,
    /// One for every column of C, of B's dtype; of a product without groups.
    pub(crate) bias: Option<&'a Tensor>,
    /// m, n and k; of the grouped one, all rows.
    pub(crate) sizes: [usize; 3],
    pub(crate) beta: f32,
    /// Where each group starts and the last one ends, i32; without, there is one group.
    pub(crate) offsets: Option<&'a Tensor>,
}

impl View<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    fn address(&self) -> Address {
        let bytes = self.dtype().bytes(self.first as u64).0;
        self.tensor.address().offset(bytes)
    }

    /// Elements from row to row.
    fn pitch(&self) -> usize {
        self.tensor.width()
    }

    /// Whether it is made of 16-byte pieces that are aligned to as much.
    fn is_wide(&self) -> bool {
        let bytes = |elements: usize| self.dtype().bytes(elements as u64).0;
        [self.address().0, bytes(self.pitch()), bytes(self.width)]
            .iter()
            .all(|at| at.is_multiple_of(16))
    }
}

impl Product<'_> {
    pub(crate) fn run(&self, gpu: &Cuda) {
        let [a, b, c] = self.views().map(|view| view.tensor);
        let bias = self.bias.into_iter();
        disjoint(
            self.op,
            &[a, b].into_iter().chain(bias).collect::<Vec<_>>(),
            &[c],
        );
        if c.is_empty() || self.c.width == 0 {
            return;
        }
        if self.library(gpu) {
            return;
        }
        let processors = gpu.multiprocessors() as usize;
        if hopper::can(gpu, self) {
            hopper::launch(
                gpu,
                self,
                Tile::best(hopper::tiles(self.c.dtype()), self, processors),
            );
        } else if [self.a.0, self.b.0].map(|view| view.dtype()) == [Dtype::Bf16; 2] {
            self.on_tensor_cores(gpu, Tile::best(&TILES, self, 2 * processors));
        } else if self.is_of_halves() {
            self.in_halves(gpu);
        } else {
            self.in_f32(gpu);
        }
    }

    fn views(&self) -> [View<'_>; 3] {
        [self.a.0, self.b.0, self.c]
    }

    fn on_tensor_cores(&self, gpu: &Cuda, tile: Tile) {
        let wide = self.views().iter().all(View::is_wide);
        let program = tensor_cores(self.a.1, self.b.1, self.c.dtype(), wide, tile);
        let shared = tensor_cores_shared(tile) + self.table_bytes();
        let grid = self.grid(gpu, tile, 2, 128, shared);
        gpu.launch(self.op, &program, "gemm", grid, &self.arguments());
    }

    /// Whether it is a gradient of f32 with whole matrices of bf16. A weight's is two sums into one C of f32.
    fn is_of_halves(&self) -> bool {
        let [a, b] = [self.a.0, self.b.0];
        let whole = [a, b].iter().all(|view| view.width == view.pitch());
        let gradient = self.b.1 == Trans::No && self.bias.is_none() && self.offsets.is_none();
        let mixed = (a.dtype(), b.dtype()) == (Dtype::F32, Dtype::Bf16);
        let rounds_once = self.a.1 == Trans::No || self.c.dtype() == Dtype::F32;
        mixed && rounds_once && whole && gradient && !self.sizes.contains(&0)
    }

    fn in_halves(&self, gpu: &Cuda) {
        let (a, b) = (self.a.0.tensor, self.b.0.tensor);
        let halves = halves::halves(self.op, gpu, a);
        let [m, n, k] = self.sizes;
        match self.a.1 {
            Trans::Yes => {
                for (half, beta) in [self.beta, 1.0].into_iter().enumerate() {
                    let columns = View::columns(&halves, half * m..(half + 1) * m);
                    let a = (columns, Trans::Yes);
                    Product { a, beta, ..*self }.run(gpu);
                }
            }
            // One product, as C may be of bf16 and is rounded once: B meets both halves.
            Trans::No => {
                let twice = b
                    .device()
                    .empty(TensorClass::Transient, Dtype::Bf16, &[2, k, n]);
                let [upper, lower] = [0, k * n].map(|at| twice.view(at, b.dims()));
                reduce::copy_all(&[(b, &upper), (b, &lower)]);
                Product {
                    a: (View::from(&halves), Trans::No),
                    b: (View::from(&twice), Trans::No),
                    sizes: [m, n, 2 * k],
                    ..*self
                }
                .run(gpu);
            }
        }
    }

    fn in_f32(&self, gpu: &Cuda) {
        let types = self.views().map(|view| view.dtype());
        let program = f32_units(self.a.1, self.b.1, types);
        let grid = self.grid(gpu, TILES[0], 1, 256, F32_SHARED + self.table_bytes());
        gpu.launch(self.op, &program, "gemm_f32", grid, &self.arguments());
    }

    fn arguments(&self) -> [Arg; 13] {
        let [m, n, k] = self.sizes.map(Arg::size);
        let [a, b, c] = self.views().map(|view| Arg::Address(view.address()));
        let [pitch_a, pitch_b, pitch_c] = self.views().map(|view| Arg::size(view.pitch()));
        let (bias, beta) = (Arg::optional(self.bias), Arg::F32(self.beta));
        let (offsets, groups) = (Arg::optional(self.offsets), Arg::size(self.groups()));
        [
            a, b, c, bias, offsets, groups, m, n, k, pitch_a, pitch_b, pitch_c, beta,
        ]
    }

    fn groups(&self) -> usize {
        self.offsets.map_or(1, |offsets| offsets.len() - 1)
    }

    /// Bytes of the table of row tiles before each group.
    fn table_bytes(&self) -> usize {
        4 * (self.groups() + 1)
    }

    /// Tiles of C, at most: only the device knows the groups.
    fn tiles(&self, tile: Tile) -> usize {
        let [m, n, k] = self.sizes;
        let rows = match (self.a.1, self.groups()) {
            (_, 1) => m.div_ceil(tile.m),
            // Every group that has rows ends with a tile that may be ragged.
            (Trans::No, groups) => m / tile.m + groups.min(m),
            (Trans::Yes, groups) => m.div_ceil(tile.m) * groups.min(k),
        };
        rows * n.div_ceil(tile.n)
    }

    /// As many blocks as run at once, if there are tiles for them.
    fn grid(&self, gpu: &Cuda, tile: Tile, resident: usize, threads: u32, shared: usize) -> Grid {
        let at_once = resident * gpu.multiprocessors() as usize;
        Grid::linear(self.tiles(tile).min(at_once), threads, shared)
    }
}

/// What a block computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    m: usize,
    n: usize,
}

/// Those of the kernel for any tensor cores; the f32 one has the first.
const TILES: [Tile; 2] = [Tile { m: 128, n: 128 }, Tile { m: 64, n: 128 }];

impl Tile {
    /// The tile with which the busiest of so many blocks reads the least, the first of equals.
    fn best(tiles: &[Self], product: &Product, at_once: usize) -> Self {
        let read = |tile: &&Self| product.tiles(**tile).div_ceil(at_once) * (tile.m + tile.n);
        *tiles.iter().min_by_key(read).expect("there is a tile")
    }
}

fn trans(name: &'static str, trans: Trans) -> Define {
    Define::flag(name, trans == Trans::Yes)
}

fn tensor_cores(a: Trans, b: Trans, c: Dtype, wide: bool, tile: Tile) -> Program {
    TENSOR_CORES.with(&[
        trans("TRANS_A", a),
        trans("TRANS_B", b),
        Define::dtype("TYPE_C", c),
        Define::int("VEC", if wide { 8 } else { 1 }),
        Define::int("TILE_M", tile.m),
    ])
}

/// Four stages of 32 along k, or the tile of C in padded rows of f32.
fn tensor_cores_shared(tile: Tile) -> usize {
    let stages = 4 * (tile.m + tile.n) * 32 * 2;
    stages.max(tile.m * (tile.n + 8) * 4)
}

fn f32_units(a: Trans, b: Trans, [type_a, type_b, type_c]: [Dtype; 3]) -> Program {
    F32.with(&[
        trans("TRANS_A", a),
        trans("TRANS_B", b),
        Define::dtype("TYPE_A", type_a),
        Define::dtype("TYPE_B", type_b),
        Define::dtype("TYPE_C", type_c),
    ])
}

/// Two sides of two operands, 16 along k in padded rows.
const F32_SHARED: usize = 4 * 16 * (128 + 4) * 4;

/// What layers of bf16 ask for: forward, the router's into f32, dgrad, wgrad into main gradients of
/// either dtype; and whether the wgmma kernel adds to C.
const LAYER: [(Trans, Trans, Dtype, &[bool]); 5] = [
    (Trans::No, Trans::Yes, Dtype::Bf16, &[false]),
    (Trans::No, Trans::No, Dtype::Bf16, &[false, true]),
    (Trans::Yes, Trans::No, Dtype::F32, &[true]),
    (Trans::Yes, Trans::No, Dtype::Bf16, &[true]),
    (Trans::No, Trans::Yes, Dtype::F32, &[false]),
];

/// Whether a program of these ops is for a product that no layer asks for: another choice of transposes,
/// types and adding. The kernels do them all.
pub(crate) fn is_unlike_models(program: &Program) -> bool {
    let flag = |name| program.int(name) == Some(1);
    let is = |name, dtype| program.define(name) == Some(Define::dtype(name, dtype).value);
    let trans = |trans: Trans| trans == Trans::Yes;
    let transposed = |a, b| flag("TRANS_A") == trans(a) && flag("TRANS_B") == trans(b);
    let in_f32 = IN_F32.iter().any(|&(a, b, types)| {
        let names = ["TYPE_A", "TYPE_B", "TYPE_C"];
        transposed(a, b)
            && names
                .into_iter()
                .zip(types)
                .all(|(name, dtype)| is(name, dtype))
    });
    let layer = LAYER.iter().any(|&(a, b, c, adds)| {
        let same_c = match program.int("F32_C") {
            Some(f32_c) => (c == Dtype::F32) == (f32_c == 1) && adds.contains(&flag("ADD")),
            None => program.int("TILE_M").is_some() && is("TYPE_C", c),
        };
        transposed(a, b) && same_c
    });
    !in_f32 && !layer
}

/// What is computed in f32: layers of f32.
const IN_F32: [(Trans, Trans, [Dtype; 3]); 3] = [
    (Trans::No, Trans::Yes, [Dtype::F32; 3]),
    (Trans::No, Trans::No, [Dtype::F32; 3]),
    (Trans::Yes, Trans::No, [Dtype::F32; 3]),
];

/// Experts of the largest table of row tiles that is counted on.
const GROUPS: usize = 512;

/// The programs that models launch.
pub(crate) fn programs() -> Vec<Listed> {
    let table = 4 * (GROUPS + 1);
    let one = |program, needs, name, registers, shared: usize, shows: &'static [_]| Listed {
        program,
        needs,
        entries: vec![Entry {
            name,
            registers,
            shared: (shared + table) as u32,
            shows,
        }],
    };
    let mut listed = [bias::programs(), halves::programs(), library::programs()].concat();
    for (a, b, c, adds) in LAYER {
        for tile in TILES {
            let shared = tensor_cores_shared(tile);
            let mut push = |wide, needs, shows| {
                let program = tensor_cores(a, b, c, wide, tile);
                listed.push(one(program, needs, "gemm", 255, shared, shows));
            };
            push(true, Needs::Sm80, &["HMMA", "LDGSTS"]);
            push(false, Needs::Odd, &["HMMA"]);
        }
        for (&tile, &add) in hopper::tiles(c)
            .iter()
            .flat_map(|tile| adds.iter().map(move |add| (tile, add)))
        {
            let program = hopper::program(a, b, c, add, tile);
            let shows = &["HGMMA", "UTMALDG", "USETMAXREG"];
            let entry = one(
                program,
                Needs::Wgmma,
                hopper::ENTRY,
                168,
                hopper::SHARED,
                shows,
            );
            listed.push(entry);
        }
    }
    for (a, b, types) in IN_F32 {
        let program = f32_units(a, b, types);
        listed.push(one(
            program,
            Needs::Sm80,
            "gemm_f32",
            255,
            F32_SHARED,
            &["FFMA"],
        ));
    }
    listed
}

#[cfg(test)]
mod tests;
