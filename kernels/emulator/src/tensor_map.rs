//! Tensor maps of the emulator: what is in the 128 bytes, and where a box lies on both sides.

use moefold_kernels::cuda::program::{EncodedMap, Swizzle, TensorMap};
use moefold_profiles::Dtype;

use crate::matrix::swizzle;

/// Marks the maps that this emulator made.
const MAGIC: u64 = 0x6d6f_6566_6f6c_6421;

/// A map as the copy engine reads it. Dims innermost first, those past `rank` are 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) address: u64,
    pub(crate) dtype: Dtype,
    pub(crate) rank: usize,
    pub(crate) dims: [u64; 5],
    /// Bytes; the innermost is the size of an element.
    pub(crate) strides: [u64; 5],
    pub(crate) tile: [u32; 5],
    /// Bytes of a swizzled row; 16 without swizzle.
    pub(crate) row_bytes: u32,
}

/// The description of a map, checked as the driver checks it.
pub(crate) fn encode(map: &TensorMap) -> Result<EncodedMap, String> {
    let rank = map.dims.len();
    if !(2..=5).contains(&rank) || map.tile.len() != rank || map.strides.len() + 1 != rank {
        return Err(format!(
            "a tensor map has 2 to 5 dims, as many tile sizes and one stride less, got {map:?}"
        ));
    }
    let size = match map.dtype {
        Dtype::Bf16 => 2,
        Dtype::F32 | Dtype::I32 => 4,
        Dtype::Fp8 | Dtype::Fp4 => return Err(format!("no tensor map of {}", map.dtype)),
    };
    if !map.address.0.is_multiple_of(16) {
        return Err(format!(
            "a tensor map starts at a multiple of 16 bytes, got {:?}",
            map.address
        ));
    }
    if let Some(stride) = map
        .strides
        .iter()
        .find(|s| !s.is_multiple_of(16) || **s >= 1 << 40)
    {
        return Err(format!(
            "strides are multiples of 16 bytes below 2^40, got {stride}"
        ));
    }
    if let Some(dim) = map.dims.iter().find(|&&d| d == 0 || d > 1 << 32) {
        return Err(format!("dims are 1 to 2^32, got {dim}"));
    }
    if let Some(tile) = map.tile.iter().find(|&&t| t == 0 || t > 256) {
        return Err(format!(
            "a tile has 1 to 256 elements in each dim, got {tile}"
        ));
    }
    let (row_bytes, code) = match map.swizzle {
        Swizzle::None => (16, 0),
        Swizzle::B32 => (32, 1),
        Swizzle::B64 => (64, 2),
        Swizzle::B128 => (128, 3),
    };
    let inner = map.tile[0] * size;
    if !inner.is_multiple_of(16) {
        return Err(format!(
            "the inner row of a tile is a multiple of 16 bytes, got {inner}"
        ));
    }
    if map.swizzle != Swizzle::None && inner != row_bytes {
        return Err(format!(
            "the inner row of a tile swizzled by {row_bytes} bytes has that many, got {inner}"
        ));
    }
    let mut words = [0; 16];
    words[0] = map.address.0;
    words[1] = MAGIC;
    words[2] =
        rank as u64 | u64::from(size) << 8 | code << 16 | u64::from(map.dtype == Dtype::I32) << 24;
    for i in 0..rank {
        words[3 + i] = (map.dims[i] - 1) | (u64::from(map.tile[i] - 1) << 32);
        words[8 + i] = if i == 0 {
            u64::from(size)
        } else {
            map.strides[i - 1]
        };
    }
    Ok(EncodedMap(words))
}

impl Map {
    pub(crate) fn decode(words: &[u64; 16]) -> Result<Self, String> {
        if words[1] != MAGIC {
            return Err("the address is not that of a tensor map".to_owned());
        }
        let byte = |shift: u32| (words[2] >> shift & 0xff) as usize;
        let rank = byte(0);
        let mut map = Self {
            address: words[0],
            dtype: match (byte(8), byte(24)) {
                (2, _) => Dtype::Bf16,
                (_, 1) => Dtype::I32,
                _ => Dtype::F32,
            },
            rank,
            dims: [1; 5],
            strides: [0; 5],
            tile: [1; 5],
            row_bytes: 16 << byte(16),
        };
        for i in 0..rank {
            map.dims[i] = (words[3 + i] & 0xffff_ffff) + 1;
            map.tile[i] = (words[3 + i] >> 32) as u32 + 1;
            map.strides[i] = words[8 + i];
        }
        Ok(map)
    }

    /// Bytes of a whole box.
    pub(crate) fn box_bytes(&self) -> u32 {
        self.tile.iter().product::<u32>() * self.strides[0] as u32
    }

    /// Whether a box at these coordinates begins at a multiple of 16 bytes of a row. Hardware takes no other
    /// (an H100 ends the kernel with an illegal instruction).
    pub(crate) fn begins_at_a_piece(&self, at: &[i64; 5]) -> bool {
        (at[0] * self.strides[0] as i64) % 16 == 0
    }

    /// Calls `piece` for every 16 bytes of a box: their address in shared memory, their address in
    /// the tensor, and how many of them are inside it (the others are behind). Boxes begin at whole
    /// pieces of a row ([`Self::begins_at_a_piece`]).
    pub(crate) fn pieces(
        &self,
        shared: u32,
        at: &[i64; 5],
        mut piece: impl FnMut(u32, u64, usize),
    ) {
        let size = self.strides[0];
        let inner = self.tile[0] * size as u32;
        let rows = self.tile[1..].iter().product();
        for row in 0..rows {
            let mut rest = row;
            let mut address = self.address as i64 + at[0] * size as i64;
            let mut inside = true;
            for (dim, &at) in at.iter().enumerate().skip(1) {
                let index = at + i64::from(rest % self.tile[dim]);
                rest /= self.tile[dim];
                inside &= (0..self.dims[dim] as i64).contains(&index);
                address += index * self.strides[dim] as i64;
            }
            for start in (0..inner).step_by(16) {
                let first = at[0] * size as i64 + i64::from(start);
                let end = (self.dims[0] * size) as i64;
                let valid = if inside && first >= 0 {
                    (end - first).clamp(0, 16) as usize
                } else {
                    0
                };
                let on_chip = swizzle(shared + row * inner + start, self.row_bytes);
                piece(on_chip, (address + i64::from(start)) as u64, valid);
            }
        }
    }
}
