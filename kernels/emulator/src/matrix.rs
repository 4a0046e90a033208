//! Where elements of matrices are: fragments of a warp, and wgmma operands in shared memory.
//!
//! Pure functions of the tables of the PTX ISA (chapters "Matrix Fragments for mma.m16n8k16",
//! "Register Fragments and Shared Memory Matrix Layouts" of wgmma, "Matrix Descriptor Format",
//! "Canonical Layouts"). Nothing here touches memory.

use moefold_kernels::bf16;

/// Rows of a warp's part of a product.
pub(crate) const ROWS: usize = 16;
/// Elements that one product sums over.
pub(crate) const DEPTH: usize = 16;
/// Widest product of a warpgroup.
pub(crate) const COLUMNS_MAX: usize = 256;

/// The pattern that swizzling of this many bytes makes of an address in shared memory: the 16-byte
/// piece of a row is exchanged by the row's number, rows counted from an aligned address.
pub(crate) fn swizzle(address: u32, row_bytes: u32) -> u32 {
    let mask = match row_bytes {
        128 => 0x70,
        64 => 0x30,
        32 => 0x10,
        _ => 0,
    };
    address ^ (address >> 3 & mask)
}

/// A wgmma operand in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) start: u32,
    pub(crate) leading: u32,
    pub(crate) stride: u32,
    /// Bytes of a swizzled row: 16 (none), 32, 64 or 128.
    pub(crate) row_bytes: u32,
}

impl Descriptor {
    /// Reads the 64 bits, or says what in them no hardware takes.
    pub(crate) fn decode(bits: u64) -> Result<Self, String> {
        let field = |shift: u32| ((bits >> shift & 0x3fff) as u32) << 4;
        let base_offset = bits >> 49 & 7;
        if base_offset != 0 {
            return Err(format!(
                "the descriptor has base offset {base_offset}; the emulator knows 0 only"
            ));
        }
        if bits & (3 << 14 | 3 << 30 | 7 << 46 | 0x3ff << 52) != 0 {
            return Err(format!(
                "the descriptor {bits:#018x} has bits set that mean nothing"
            ));
        }
        let row_bytes = [16, 128, 64, 32][(bits >> 62) as usize];
        Ok(Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
            row_bytes,
        })
    }

    /// Address of eight elements: with K-major those of row `row` from `8 piece` along K on; with
    /// MN-major those of `8 piece` on along M or N, at `row` along K.
    pub(crate) fn chunk(&self, mn_major: bool, row: u32, piece: u32) -> u32 {
        let (eights, row_in_eight) = (row / 8, row % 8);
        let linear = if self.row_bytes == 16 {
            // Core matrices of eight rows of 16 bytes, one after another.
            let (along_rows, along_pieces) = if mn_major {
                (self.leading, self.stride)
            } else {
                (self.stride, self.leading)
            };
            row_in_eight * 16 + eights * along_rows + piece * along_pieces
        } else {
            let pieces = self.row_bytes / 16;
            row_in_eight * self.row_bytes
                + eights * self.stride
                + piece % pieces * 16
                + piece / pieces * if mn_major { self.leading } else { 0 }
        };
        swizzle(self.start + linear, self.row_bytes)
    }
}

/// Row and column of element `i` of an accumulator of `wgmma`, inside the warp's 16 rows; the first
/// four are those of `mma.m16n8k16`.
pub(crate) fn accumulator(lane: usize, i: usize) -> (usize, usize) {
    let (tile, element) = (i / 4, i % 4);
    (
        lane / 4 + 8 * (element / 2),
        8 * tile + 2 * (lane % 4) + element % 2,
    )
}

/// Row and first column of the two elements of register `i` of an A fragment, [16, 16].
pub(crate) fn fragment_a(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2))
}

/// First row and column of the two elements of register `i` of a B fragment, [16, 8].
pub(crate) fn fragment_b(lane: usize, i: usize) -> (usize, usize) {
    (2 * (lane % 4) + 8 * i, lane / 4)
}

/// The two bf16 of a word, the one at the lower address first.
pub(crate) fn pair(word: u32) -> [f32; 2] {
    [
        f32::from_bits(word << 16),
        f32::from_bits(word & 0xffff_0000),
    ]
}

/// An A operand from the registers of 32 lanes.
pub(crate) fn gather_a(lanes: impl Fn(usize) -> [u32; 4]) -> [[f32; DEPTH]; ROWS] {
    let mut a = [[0.0; DEPTH]; ROWS];
    for lane in 0..32 {
        for (i, word) in lanes(lane).into_iter().enumerate() {
            let (row, column) = fragment_a(lane, i);
            a[row][column..column + 2].copy_from_slice(&pair(word));
        }
    }
    a
}

/// A B operand of `mma.m16n8k16` from the registers of 32 lanes.
pub(crate) fn gather_b(lanes: impl Fn(usize) -> [u32; 2]) -> [[f32; 8]; DEPTH] {
    let mut b = [[0.0; 8]; DEPTH];
    for lane in 0..32 {
        for (i, word) in lanes(lane).into_iter().enumerate() {
            let (row, column) = fragment_b(lane, i);
            let [lower, upper] = pair(word);
            b[row][column] = lower;
            b[row + 1][column] = upper;
        }
    }
    b
}

/// `d += a b`, the sum in f32 in order of the depth; `b` is [16, columns].
pub(crate) fn multiply(d: &mut [f32], a: &[[f32; DEPTH]; ROWS], b: &[f32], columns: usize) {
    for (d, a) in d.chunks_exact_mut(columns).zip(a) {
        for (&a, b) in a.iter().zip(b.chunks_exact(columns)) {
            for (d, &b) in d.iter_mut().zip(b) {
                *d += a * b;
            }
        }
    }
}

/// Eight bf16 of 16 bytes.
pub(crate) fn widen_chunk(bytes: [u8; 16]) -> [f32; 8] {
    std::array::from_fn(|i| bf16::widen(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
}
