//! Bulk tensor copies: where a tile goes, and what becomes of its part outside the tensor.

use moefold_profiles::Dtype;

use super::warp::hopper_program;
use super::{Case, OP, Words, download, launch, pairs, room, swizzled_piece, upload};
use crate::bf16;
use crate::cuda::program::{Arg, Swizzle, TensorMap};
use crate::device::{Backend, Device};
use crate::tensor::Tensor;

/// A tile of a tensor [dims, outermost last], swizzled, at some place that may be outside.
#[derive(Clone)]
struct Tile {
    dtype: Dtype,
    swizzle: Swizzle,
    dims: Vec<usize>,
    sizes: Vec<usize>,
    at: Vec<i32>,
}

impl Tile {
    fn new<const RANK: usize>(
        dtype: Dtype,
        swizzle: Swizzle,
        dims: [usize; RANK],
        sizes: [usize; RANK],
        at: [i32; RANK],
    ) -> Self {
        Self {
            dtype,
            swizzle,
            dims: dims.into(),
            sizes: sizes.into(),
            at: at.into(),
        }
    }

    fn row_bytes(&self) -> usize {
        match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    fn element_bytes(&self) -> usize {
        self.dtype.bytes(1).0 as usize
    }

    /// Elements of 16 bytes.
    fn piece(&self) -> usize {
        16 / self.element_bytes()
    }

    /// Elements from one row of the tensor in memory to the next: rounded up to 16 bytes.
    fn pitch(&self) -> usize {
        self.dims[0].next_multiple_of(self.piece())
    }

    /// Elements in memory.
    fn room(&self) -> usize {
        self.pitch() * self.dims[1..].iter().product::<usize>()
    }

    fn elements(&self) -> usize {
        self.sizes.iter().product()
    }

    fn bytes(&self) -> usize {
        self.element_bytes() * self.elements()
    }

    /// The words that hold elements given by their bits.
    fn words(&self, elements: &[u32]) -> Vec<u32> {
        match self.dtype {
            Dtype::Bf16 => {
                let narrow: Vec<u16> = elements.iter().map(|&bits| bits as u16).collect();
                pairs(&narrow)
            }
            _ => elements.to_vec(),
        }
    }

    fn bits(&self, value: f32) -> u32 {
        match self.dtype {
            Dtype::Bf16 => bf16::narrow(value).into(),
            _ => value.to_bits(),
        }
    }

    fn value(&self, bits: u32) -> f32 {
        match self.dtype {
            Dtype::Bf16 => bf16::widen(bits as u16),
            _ => f32::from_bits(bits),
        }
    }

    fn map(&self, device: &Device, tensor: &Tensor) -> Arg {
        let Backend::Cuda(gpu) = &device.0.backend else {
            panic!("{device:?} has no tensor maps")
        };
        let mut stride = (self.element_bytes() * self.pitch()) as u64;
        let strides = self.dims[1..].iter().map(|&dim| {
            let this = stride;
            stride *= dim as u64;
            this
        });
        let map = TensorMap {
            address: tensor.address(),
            dtype: self.dtype,
            dims: self.dims.iter().map(|&d| d as u64).collect(),
            strides: strides.take(self.dims.len() - 1).collect(),
            tile: self.sizes.iter().map(|&t| t as u32).collect(),
            swizzle: self.swizzle,
        };
        gpu.tensor_map(OP, || map)
    }

    /// Calls `each` with the place in shared memory of every element of the tile, and its place in
    /// the tensor's memory where that is inside of rows of so many elements.
    fn each(&self, row_size: usize, mut each: impl FnMut(usize, Option<usize>)) {
        let (width, wide) = (self.sizes[0], self.piece());
        for i in 0..self.elements() {
            let (row, column) = (i / width, i % width);
            let piece = swizzled_piece(self.row_bytes(), row, column / wide);
            let shared = row * width + piece * wide + column % wide;
            let mut rest = i;
            let mut place = 0;
            let mut pitch = 1;
            let mut inside = true;
            for (dim, (&size, &tile)) in self.dims.iter().zip(&self.sizes).enumerate() {
                let index = self.at[dim] + (rest % tile) as i32;
                rest /= tile;
                let end = if dim == 0 { row_size } else { size };
                inside &= index >= 0 && index < end as i32;
                place += index.max(0) as usize * pitch;
                pitch *= if dim == 0 { self.pitch() } else { size };
            }
            each(shared, inside.then_some(place));
        }
    }

    /// Map, words, bytes and rank; what is particular of the kernel; as many coordinates.
    fn args(
        &self,
        device: &Device,
        tensor: &Tensor,
        words: &Tensor,
        own: &[Arg],
        coordinates: usize,
    ) -> Vec<Arg> {
        let mut args = vec![self.map(device, tensor), words.into()];
        args.extend([self.bytes(), self.dims.len()].map(Arg::size));
        args.extend(own);
        let at = self.at.iter().copied().chain(std::iter::repeat(0));
        args.extend(at.take(coordinates).map(Arg::I32));
        args
    }

    fn load(&self, device: &Device) -> Words {
        let memory: Vec<u32> = (1..=self.room() as u32).collect();
        let tensor = upload(device, &self.words(&memory));
        let out = room(device, self.bytes() / 4);
        let args = self.args(device, &tensor, &out, &[], 5);
        let shared = self.bytes() + 8;
        launch(device, &hopper_program(), "model_load", 128, shared, &args);
        let mut want = vec![0; self.elements()];
        self.each(self.dims[0], |shared, place| {
            want[shared] = place.map_or(0, |place| memory[place]);
        });
        Words {
            got: download(&[&out]),
            want: self.words(&want),
        }
    }

    fn store(&self, device: &Device, add: bool) -> Words {
        // Below 128, so that sums of two are exact in bf16.
        let number = |i: usize| self.bits((i * 37 % 101) as f32);
        let mut memory: Vec<u32> = (0..self.room()).map(|i| number(i + 5)).collect();
        let tile: Vec<u32> = (0..self.elements()).map(number).collect();
        let tensor = upload(device, &self.words(&memory));
        let from = upload(device, &self.words(&tile));
        let args = self.args(device, &tensor, &from, &[Arg::I32(add.into())], 4);
        let program = hopper_program();
        launch(device, &program, "model_store", 128, self.bytes(), &args);
        // What is written is whole pieces, the gap behind a row too.
        self.each(self.pitch(), |shared, place| {
            if let Some(place) = place {
                let before = if add { self.value(memory[place]) } else { 0.0 };
                memory[place] = self.bits(before + self.value(tile[shared]));
            }
        });
        Words {
            got: download(&[&tensor]),
            want: self.words(&memory),
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Dtype::{Bf16, F32};
    use Swizzle::{B32, B64, B128, None};
    let tiles = [
        Tile::new(Bf16, None, [100, 30], [24, 16], [8, 3]),
        // Edges of a tensor, of rows that end inside of 16 bytes too.
        Tile::new(Bf16, None, [99, 30], [24, 16], [88, 20]),
        Tile::new(Bf16, None, [100, 30], [24, 16], [-8, -9]),
        Tile::new(Bf16, None, [100, 30], [24, 16], [8, 30]),
        Tile::new(Bf16, B32, [100, 30], [16, 16], [32, 1]),
        Tile::new(Bf16, B32, [100, 30], [16, 16], [88, 21]),
        Tile::new(Bf16, B64, [100, 30], [32, 16], [32, 1]),
        Tile::new(Bf16, B64, [100, 30], [32, 16], [-8, 21]),
        Tile::new(Bf16, B128, [100, 30], [64, 16], [32, 1]),
        Tile::new(Bf16, B128, [100, 30], [64, 16], [72, -3]),
        Tile::new(Bf16, None, [40, 12, 5], [8, 4, 4], [16, 10, 3]),
        Tile::new(Bf16, B128, [72, 12, 5], [64, 4, 3], [16, 2, 1]),
        Tile::new(Bf16, B128, [72, 12, 5], [64, 5, 3], [16, 9, 3]),
        // Heads of tokens of sequences, as attention reads them: the first columns of a head and those
        // past its width, whole and beyond the end of a sequence.
        Tile::new(Bf16, B128, [96, 3, 40, 2], [64, 1, 16, 1], [0, 1, 8, 1]),
        Tile::new(Bf16, B128, [96, 3, 40, 2], [64, 1, 16, 1], [64, 2, 32, 0]),
        Tile::new(
            Bf16,
            None,
            [24, 3, 2, 5, 2],
            [8, 2, 2, 3, 1],
            [16, 2, 1, 3, 1],
        ),
        // Statistics of queries and sums of dq.
        Tile::new(F32, None, [192, 5], [64, 1], [128, 3]),
        Tile::new(F32, None, [128, 40], [128, 16], [0, 16]),
        Tile::new(F32, None, [99, 30], [12, 16], [92, 21]),
        Tile::new(F32, B128, [100, 30], [32, 16], [76, 21]),
    ];
    let mut cases = Vec::new();
    for tile in tiles {
        let what = format!(
            "of {:?} {} at {:?} in {:?}, {:?}",
            tile.sizes, tile.dtype, tile.at, tile.dims, tile.swizzle
        );
        let again = tile.clone();
        let load = move |device: &Device| again.load(device);
        cases.push(Case::new(format!("bulk load {what}"), load));
        // Stores of up to four dims, additions of up to three; none begins before the tensor.
        let before = tile.at.iter().any(|&at| at < 0);
        for (name, add, ranks) in [("store", false, 2..=4), ("add", true, 2..=3)] {
            if ranks.contains(&tile.dims.len()) && !before {
                let again = tile.clone();
                let store = move |device: &Device| again.store(device, add);
                cases.push(Case::new(format!("bulk {name} {what}"), store));
            }
        }
    }
    cases
}
