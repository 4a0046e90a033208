//! Cases that hold a device to what the emulator's model of the hardware claims.
//!
//! Each runs one instruction of `model.cu` on small integers and gives the words that came out beside
//! those that the tables of the PTX ISA ask for: where a bulk copy puts a tile under each swizzle and
//! what it does past the edges, which lane holds which element of `ldmatrix`, `stmatrix`, `mma` and
//! `wgmma`, and what the fields of a matrix descriptor mean, for both majors, all swizzles and all
//! widths. The expectations are formulas by element, written apart from the emulator's. In tests the
//! device is the emulator; on a GPU they confirm it.

use moefold_profiles::Dtype;

use crate::bf16;
use crate::cuda::program::{Architecture, Arg, Define, Grid, Source, Swizzle, TensorMap, source};
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::Tensor;

const SOURCE: Source = source!("model");
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
    let mut cases = vec![
        Case::new("ldmatrix", ldmatrix),
        Case::new("mma.m16n8k16", mma),
        Case::new("shuffles and ballot", lanes),
    ];
    if architecture >= Architecture::SM90 {
        cases.push(Case::new("stmatrix", stmatrix));
        cases.extend(tiles());
    }
    if architecture.has_wgmma() {
        cases.extend(products());
    }
    cases
}

// ---- Words and launches ----

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

/// All defines that the source knows, so that one program serves several cases.
#[derive(Clone, Copy)]
struct Shape {
    rank: usize,
    add: bool,
    columns: usize,
    transpose: [bool; 2],
    a_registers: bool,
}

const PLAIN: Shape = Shape {
    rank: 2,
    add: false,
    columns: 64,
    transpose: [false; 2],
    a_registers: false,
};

fn launch(
    device: &Device,
    shape: Shape,
    entry: &'static str,
    threads: u32,
    shared: usize,
    args: &[Arg],
) {
    let Backend::Cuda(gpu) = &device.0.backend else {
        panic!("{device:?} has no model to confirm")
    };
    let program = SOURCE.with(&[
        Define::int("RANK", shape.rank),
        Define::flag("ADD", shape.add),
        Define::int("COLUMNS", shape.columns),
        Define::flag("TRANSPOSE_A", shape.transpose[0]),
        Define::flag("TRANSPOSE_B", shape.transpose[1]),
        Define::flag("A_REGISTERS", shape.a_registers),
    ]);
    let grid = Grid::linear(1, threads, shared);
    gpu.launch(OP, &program, entry, grid, args);
}

/// Two elements as a word, the first at the lower address.
fn pair(first: u16, second: u16) -> u32 {
    u32::from(first) | u32::from(second) << 16
}

fn pairs(elements: &[u16]) -> Vec<u32> {
    elements.chunks(2).map(|two| pair(two[0], two[1])).collect()
}

// ---- Fragments of a warp ----

/// Four matrices of 8x8 different elements, row by row: matrix, row, column.
fn element(matrix: usize, row: usize, column: usize) -> u16 {
    (1000 * matrix + 10 * row + column + 1) as u16
}

fn matrices() -> Vec<u32> {
    let all = (0..256).map(|i| element(i / 64, i / 8 % 8, i % 8));
    pairs(&all.collect::<Vec<_>>())
}

/// Registers `[lane][matrix]` as the PTX ISA's figure of an 8x8 fragment has them.
fn registers(count: usize, transposed: bool) -> Vec<u32> {
    let register = |i: usize| {
        let (lane, matrix) = (i / count, i % count);
        let (row, column) = (lane / 4, lane % 4 * 2);
        if transposed {
            pair(
                element(matrix, column, row),
                element(matrix, column + 1, row),
            )
        } else {
            pair(
                element(matrix, row, column),
                element(matrix, row, column + 1),
            )
        }
    };
    (0..32 * count).map(register).collect()
}

fn ldmatrix(device: &Device) -> Words {
    let from = upload(device, &matrices());
    let out = [128, 128, 64, 64].map(|words| room(device, words));
    let args = [&from, &out[0], &out[1], &out[2], &out[3]].map(Arg::from);
    launch(device, PLAIN, "model_ldmatrix", 32, 512, &args);
    Words {
        got: download(&out.each_ref()),
        want: [
            registers(4, false),
            registers(4, true),
            registers(2, false),
            registers(2, true),
        ]
        .concat(),
    }
}

fn stmatrix(device: &Device) -> Words {
    let out = [128, 128].map(|words| room(device, words));
    let from = upload(device, &registers(4, false));
    let args = [&from, &out[0], &out[1]].map(Arg::from);
    launch(device, PLAIN, "model_stmatrix", 32, 512, &args);
    // Registers of plain fragments, stored transposed, give transposed matrices.
    let transposed = (0..256).map(|i| element(i / 64, i % 8, i / 8 % 8));
    let transposed = pairs(&transposed.collect::<Vec<_>>());
    Words {
        got: download(&out.each_ref()),
        want: [matrices(), transposed].concat(),
    }
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

fn mma(device: &Device) -> Words {
    let a: Vec<u32> = (0..128).map(|i| register_a(i / 4, i % 4)).collect();
    let b = (0..64).map(|i| {
        let (lane, k) = (i / 2, i / 2 % 4 * 2 + i % 2 * 8);
        let element = |k| bf16::narrow(value_b(k, lane / 4));
        pair(element(k), element(k + 1))
    });
    let (a, b) = (upload(device, &a), upload(device, &b.collect::<Vec<_>>()));
    let d = room(device, 128);
    launch(
        device,
        PLAIN,
        "model_mma",
        32,
        0,
        &[&a, &b, &d].map(Arg::from),
    );
    let want = |i: usize| {
        let (lane, i) = (i / 4, i % 4);
        let row = lane / 4 + if i >= 2 { 8 } else { 0 };
        product(row, lane % 4 * 2 + i % 2, 16)
    };
    Words {
        got: download(&[&d]),
        want: (0..128).map(want).collect(),
    }
}

fn lanes(device: &Device) -> Words {
    let out = room(device, 160);
    launch(device, PLAIN, "model_lanes", 32, 0, &[Arg::from(&out)]);
    let want = |lane: u32| {
        let up = if lane < 3 { lane } else { lane - 3 };
        let down = if lane > 28 { lane } else { lane + 3 };
        [lane ^ 5, 9, up, down, 0xaaaa_aaaa]
    };
    Words {
        got: download(&[&out]),
        want: (0..32).flat_map(want).collect(),
    }
}

// ---- Bulk copies ----

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

/// Tiles of a tensor of bf16 [dims, outermost last], swizzled, at some place that may be outside.
#[derive(Clone)]
struct Tile {
    swizzle: Swizzle,
    dims: Vec<usize>,
    sizes: Vec<usize>,
    at: Vec<i32>,
}

impl Tile {
    fn row_bytes(&self) -> usize {
        match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Elements from one row of the tensor in memory to the next: rounded up to 16 bytes.
    fn pitch(&self) -> usize {
        self.dims[0].next_multiple_of(8)
    }

    /// Elements in memory.
    fn room(&self) -> usize {
        self.pitch() * self.dims[1..].iter().product::<usize>()
    }

    fn elements(&self) -> usize {
        self.sizes.iter().product()
    }

    fn map(&self, device: &Device, tensor: &Tensor) -> Arg {
        let Backend::Cuda(gpu) = &device.0.backend else {
            panic!("{device:?} has no tensor maps")
        };
        let mut stride = 2 * self.pitch() as u64;
        let strides = self.dims[1..].iter().map(|&dim| {
            let this = stride;
            stride *= dim as u64;
            this
        });
        let map = TensorMap {
            address: tensor.address(),
            dtype: Dtype::Bf16,
            dims: self.dims.iter().map(|&d| d as u64).collect(),
            strides: strides.collect(),
            tile: self.sizes.iter().map(|&t| t as u32).collect(),
            swizzle: self.swizzle,
        };
        gpu.tensor_map(OP, &map)
    }

    /// Calls `each` with the place in shared memory of every element of the tile, and its place in
    /// the tensor's memory where it is inside.
    fn each(&self, mut each: impl FnMut(usize, Option<usize>)) {
        let width = self.sizes[0];
        for i in 0..self.elements() {
            let (row, column) = (i / width, i % width);
            let piece = swizzled_piece(self.row_bytes(), row, column / 8);
            let shared = row * width + piece * 8 + column % 8;
            let mut rest = i;
            let mut place = 0;
            let mut pitch = 1;
            let mut inside = true;
            for (dim, (&size, &tile)) in self.dims.iter().zip(&self.sizes).enumerate() {
                let index = self.at[dim] + (rest % tile) as i32;
                rest /= tile;
                inside &= index >= 0 && index < size as i32;
                place += index.max(0) as usize * pitch;
                pitch *= if dim == 0 { self.pitch() } else { size };
            }
            each(shared, inside.then_some(place));
        }
    }

    fn args(&self, device: &Device, tensor: &Tensor, words: &Tensor) -> Vec<Arg> {
        let mut args = vec![self.map(device, tensor), words.into()];
        args.push(Arg::size(2 * self.elements()));
        let at = [0, 1, 2].map(|dim| self.at.get(dim).copied().unwrap_or(0));
        args.extend(at.map(Arg::I32));
        args
    }

    fn load(&self, device: &Device) -> Words {
        let memory: Vec<u16> = (1..=self.room()).map(|i| i as u16).collect();
        let tensor = upload(device, &pairs(&memory));
        let out = room(device, self.elements() / 2);
        let shape = Shape {
            rank: self.dims.len(),
            ..PLAIN
        };
        let shared = 2 * self.elements() + 8;
        launch(
            device,
            shape,
            "model_load",
            128,
            shared,
            &self.args(device, &tensor, &out),
        );
        let mut want = vec![0; self.elements()];
        self.each(|shared, place| want[shared] = place.map_or(0, |place| memory[place]));
        Words {
            got: download(&[&out]),
            want: pairs(&want),
        }
    }

    fn store(&self, device: &Device, add: bool) -> Words {
        // Below 128, so that sums of two are exact in bf16.
        let number = |i: usize| bf16::narrow((i * 37 % 101) as f32);
        let mut memory: Vec<u16> = (0..self.room()).map(|i| number(i + 5)).collect();
        let tile: Vec<u16> = (0..self.elements()).map(number).collect();
        let (tensor, from) = (
            upload(device, &pairs(&memory)),
            upload(device, &pairs(&tile)),
        );
        let shape = Shape {
            rank: self.dims.len(),
            add,
            ..PLAIN
        };
        let shared = 2 * self.elements();
        launch(
            device,
            shape,
            "model_store",
            128,
            shared,
            &self.args(device, &tensor, &from),
        );
        self.each(|shared, place| {
            if let Some(place) = place {
                let before = if add { bf16::widen(memory[place]) } else { 0.0 };
                memory[place] = bf16::narrow(before + bf16::widen(tile[shared]));
            }
        });
        Words {
            got: download(&[&tensor]),
            want: pairs(&memory),
        }
    }
}

fn tiles() -> Vec<Case> {
    let flat = |swizzle, dims: [usize; 2], tile: [usize; 2], at: [i32; 2]| Tile {
        swizzle,
        dims: dims.to_vec(),
        sizes: tile.to_vec(),
        at: at.to_vec(),
    };
    let deep = |swizzle, dims: [usize; 3], tile: [usize; 3], at: [i32; 3]| Tile {
        swizzle,
        dims: dims.to_vec(),
        sizes: tile.to_vec(),
        at: at.to_vec(),
    };
    let tiles = [
        flat(Swizzle::None, [100, 30], [24, 16], [8, 3]),
        flat(Swizzle::None, [99, 30], [24, 16], [90, 20]),
        flat(Swizzle::None, [100, 30], [24, 16], [-5, -9]),
        flat(Swizzle::None, [100, 30], [24, 16], [8, 30]),
        flat(Swizzle::B32, [100, 30], [16, 16], [32, 1]),
        flat(Swizzle::B32, [100, 30], [16, 16], [93, 21]),
        flat(Swizzle::B64, [100, 30], [32, 16], [32, 1]),
        flat(Swizzle::B64, [100, 30], [32, 16], [-9, 21]),
        flat(Swizzle::B128, [100, 30], [64, 16], [32, 1]),
        flat(Swizzle::B128, [100, 30], [64, 16], [71, -3]),
        deep(Swizzle::None, [40, 12, 5], [8, 4, 4], [11, 10, 3]),
        deep(Swizzle::B128, [72, 12, 5], [64, 4, 3], [16, 2, 1]),
        deep(Swizzle::B128, [72, 12, 5], [64, 5, 3], [16, 9, 3]),
    ];
    let mut cases = Vec::new();
    for tile in tiles {
        let what = format!(
            "of {:?} at {:?} in {:?}, {:?}",
            tile.sizes, tile.at, tile.dims, tile.swizzle
        );
        let again = tile.clone();
        cases.push(Case::new(format!("bulk load {what}"), move |device| {
            again.load(device)
        }));
        for (name, add) in [("store", false), ("add", true)] {
            let again = tile.clone();
            cases.push(Case::new(format!("bulk {name} {what}"), move |device| {
                again.store(device, add)
            }));
        }
    }
    cases
}

// ---- wgmma ----

/// An operand of a wgmma in shared memory: `lines` rows of A or columns of B.
#[derive(Debug, Clone, Copy)]
struct Operand {
    /// Bytes of a swizzled row, 16 for none.
    row_bytes: usize,
    /// M- or N-major.
    transposed: bool,
    lines: usize,
    depth: usize,
}

impl Operand {
    /// Fields of the descriptor, and the step from one 16 of the depth to the next, in bytes.
    fn fields(&self) -> [usize; 3] {
        let eight_rows = 8 * self.row_bytes;
        let eights = self.lines.div_ceil(8);
        match (self.row_bytes, self.transposed) {
            // Eight rows of 16 bytes; eights of lines follow each other, then eights of the depth.
            (16, false) => [128 * eights, 128, 256 * eights],
            // Eights of the depth follow each other, then eights of lines.
            (16, true) => [128, 16 * self.depth, 256],
            // The leading offset has no meaning here.
            (_, false) => [16, eight_rows, 32],
            // Panels of as many lines as a row holds, one after another.
            (_, true) => [self.row_bytes * self.depth, eight_rows, 2 * eight_rows],
        }
    }

    /// Where element (`line`, `k`) lies.
    fn place(&self, line: usize, k: usize) -> usize {
        let [leading, stride, _] = self.fields();
        if self.row_bytes == 16 {
            return if self.transposed {
                line / 8 * stride + k / 8 * leading + k % 8 * 16 + line % 8 * 2
            } else {
                line / 8 * stride + k / 8 * leading + line % 8 * 16 + k % 8 * 2
            };
        }
        let wide = self.row_bytes / 2;
        let (row, column, panel) = if self.transposed {
            (k, line % wide, line / wide)
        } else {
            (line, k, 0)
        };
        let piece = swizzled_piece(self.row_bytes, row % 8, column / 8);
        panel * leading + row / 8 * stride + row % 8 * self.row_bytes + piece * 16 + column % 8 * 2
    }

    /// The shared memory that holds it; what no element is in is a NaN.
    fn image(&self, value: impl Fn(usize, usize) -> f32) -> Vec<u32> {
        let lines = self.lines.next_multiple_of(self.row_bytes / 2);
        let mut image = vec![0x7fff; lines * self.depth.max(self.row_bytes / 2)];
        for line in 0..self.lines {
            for k in 0..self.depth {
                image[self.place(line, k) / 2] = bf16::narrow(value(line, k));
            }
        }
        pairs(&image)
    }
}

/// A product of 64 rows.
#[derive(Debug, Clone, Copy)]
struct Product {
    columns: usize,
    row_bytes: usize,
    transpose: [bool; 2],
    a_registers: bool,
}

impl Product {
    /// As deep as one swizzled row; without swizzle, and with A in registers, as one instruction.
    fn depth(&self) -> usize {
        if self.a_registers {
            16
        } else {
            (self.row_bytes / 2).max(16)
        }
    }

    fn run(&self, device: &Device) -> Words {
        let depth = self.depth();
        let operand = |transposed, lines| Operand {
            row_bytes: self.row_bytes,
            transposed,
            lines,
            depth,
        };
        let a = operand(self.transpose[0], 64);
        let b = operand(self.transpose[1], self.columns);
        let image_a = if self.a_registers {
            (0..512).map(|i| register_a(i / 4, i % 4)).collect()
        } else {
            a.image(value_a)
        };
        let image_b = b.image(|column, k| value_b(k, column));
        let out = room(device, 64 * self.columns);
        let tensors = [upload(device, &image_a), upload(device, &image_b)];
        let mut args = Vec::new();
        for (operand, tensor) in [a, b].into_iter().zip(&tensors) {
            args.extend([Arg::from(tensor), Arg::size(4 * tensor.len())]);
            args.extend(operand.fields().map(Arg::size));
        }
        let code = match self.row_bytes {
            128 => 1,
            64 => 2,
            32 => 3,
            _ => 0,
        };
        args.extend([Arg::I32(code), Arg::size(depth / 16), Arg::from(&out)]);
        let shape = Shape {
            columns: self.columns,
            transpose: self.transpose,
            a_registers: self.a_registers,
            ..PLAIN
        };
        let shared = (4 * image_a.len()).next_multiple_of(1024) + 4 * image_b.len();
        launch(device, shape, "model_wgmma", 128, shared, &args);
        let own = self.columns / 2;
        let want = |i: usize| {
            let (t, i) = (i / own, i % own);
            let row = t / 32 * 16 + t % 32 / 4 + if i % 4 >= 2 { 8 } else { 0 };
            product(row, i / 4 * 8 + t % 4 * 2 + i % 2, depth)
        };
        Words {
            got: download(&[&out]),
            want: (0..64 * self.columns).map(want).collect(),
        }
    }
}

fn products() -> Vec<Case> {
    let majors = [[false, false], [false, true], [true, false], [true, true]];
    let mut all = Vec::new();
    for row_bytes in [16, 32, 64, 128] {
        for transpose in majors {
            all.push(Product {
                columns: 96,
                row_bytes,
                transpose,
                a_registers: false,
            });
        }
        for transposed in [false, true] {
            all.push(Product {
                columns: 96,
                row_bytes,
                transpose: [false, transposed],
                a_registers: true,
            });
        }
    }
    for columns in [8, 16, 32, 48, 64, 80, 112, 128, 160, 192, 224, 256] {
        all.push(Product {
            columns,
            row_bytes: 128,
            transpose: majors[columns / 16 % 4],
            a_registers: columns % 32 == 16,
        });
    }
    let named = all.into_iter().map(|product| {
        let major = |transposed| if transposed { "MN" } else { "K" };
        let a = match (product.a_registers, product.transpose[0]) {
            (true, _) => "registers",
            (false, transposed) => major(transposed),
        };
        let name = format!(
            "wgmma m64n{}k{}, a {a}, b {}, rows of {} bytes",
            product.columns,
            product.depth(),
            major(product.transpose[1]),
            product.row_bytes
        );
        Case::new(name, move |device| product.run(device))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulator_does_what_the_tables_say() {
        for architecture in [Architecture::SM80, Architecture::SM90] {
            let device = Device::emulated(architecture, Dtype::Bf16, 1);
            let Some(device) = crate::testing::at_hand(device) else {
                return;
            };
            for case in cases(architecture) {
                let words = crate::catch(|| case.run(&device));
                let Words { got, want } = words.unwrap_or_else(|e| panic!("{}: {e}", case.name));
                assert_eq!(got.len(), want.len(), "{}", case.name);
                let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
                if let Some(at) = wrong {
                    let (got, want) = (got[at], want[at]);
                    panic!("{}: word {at} is {got:#x}, expected {want:#x}", case.name);
                }
            }
        }
    }
}
