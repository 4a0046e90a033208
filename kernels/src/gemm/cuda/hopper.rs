//! The kernel of `wgmma` and bulk tensor copies: what it can do, and its tensor maps.

use moefold_profiles::Dtype;

use super::{Product, Tile, View, trans};
use crate::cuda::Cuda;
use crate::cuda::program::{Arg, Define, Program, Source, Swizzle, TensorMap, source};
use crate::gemm::Trans;

const SOURCE: Source = source!("grouped_gemm_sm90", "../../grouped_gemm_sm90.cu");

pub(super) const ENTRY: &str = "grouped_gemm_sm90";

const TILES: [Tile; 3] = [
    Tile { m: 128, n: 256 },
    Tile { m: 128, n: 192 },
    Tile { m: 128, n: 128 },
];

/// Tiles of a C of this dtype: registers hold one tile's results and the next one's sums, of 256 columns in bf16 alone.
pub(super) fn tiles(c: Dtype) -> &'static [Tile] {
    match c {
        Dtype::F32 => &TILES[1..],
        _ => &TILES,
    }
}

/// Threads: a warpgroup that copies and two that multiply.
const THREADS: u32 = 3 * 128;
/// 64 rows of 128 bytes: what shared memory is divided into.
const PANEL_BYTES: usize = 8192;
/// Stages of operands, and C on its way out.
const PANELS: usize = 24 + 4;
/// Two barriers a stage, of six at most.
const BARRIER_BYTES: usize = 2 * 6 * 8;
/// Bytes of shared memory without the table of row tiles.
pub(super) const SHARED: usize = PANELS * PANEL_BYTES + BARRIER_BYTES;

/// Whether the kernel does this product on this device: bf16 whose rows all start at multiples of 16
/// bytes, as bulk copies need, and groups whose table fits beside the operands.
pub(super) fn can(gpu: &Cuda, product: &Product) -> bool {
    gpu.architecture().has_wgmma()
        && [product.a.0, product.b.0].map(|view| view.dtype()) == [Dtype::Bf16; 2]
        && product.views().iter().all(View::is_wide)
        && !product.sizes.contains(&0)
        && [0.0, 1.0].contains(&product.beta)
        && (SHARED + product.table_bytes()) as u64 <= gpu.properties().shared_per_block.0
}

pub(super) fn launch(gpu: &Cuda, product: &Product, tile: Tile) {
    let (ta, tb) = (product.a.1, product.b.1);
    let program = program(ta, tb, product.c.dtype(), product.beta != 0.0, tile);
    let grid = product.grid(gpu, tile, 1, THREADS, SHARED + product.table_bytes());
    let [m, n, k] = product.sizes;
    let groups = product.groups();
    // Of B where the rows of A are grouped, of C where the sum is.
    let (slices_b, slices_c) = match ta {
        Trans::No => (groups, 1),
        Trans::Yes => (1, groups),
    };
    let encode =
        |view, dims, slices, tile| gpu.tensor_map(product.op, || map(view, dims, slices, tile));
    let a = match ta {
        Trans::No => encode(product.a.0, [k, m], None, [64, 128]),
        Trans::Yes => encode(product.a.0, [m, k], None, [64, 64]),
    };
    let b = match tb {
        Trans::No => encode(product.b.0, [n, k], Some(slices_b), [64, 64]),
        Trans::Yes => encode(product.b.0, [k, n], Some(slices_b), [64, tile.n]),
    };
    let across = 128 / product.c.dtype().bytes(1).0 as usize;
    let c = encode(product.c, [n, m], Some(slices_c), [across, 64]);
    gpu.launch(
        product.op,
        &program,
        ENTRY,
        grid,
        &[
            a,
            b,
            c,
            Arg::Address(product.c.address()),
            Arg::optional(product.bias),
            Arg::optional(product.offsets),
            Arg::size(groups),
            Arg::size(m),
            Arg::size(n),
            Arg::size(k),
            Arg::size(product.c.pitch()),
        ],
    );
}

pub(super) fn program(a: Trans, b: Trans, c: Dtype, add: bool, tile: Tile) -> Program {
    SOURCE.with(&[
        trans("TRANS_A", a),
        trans("TRANS_B", b),
        Define::flag("F32_C", c == Dtype::F32),
        Define::flag("ADD", add),
        Define::int("TILE_N", tile.n),
    ])
}

/// A matrix as rows of `dims[0]` elements, `dims[1]` of them, and so many times that; its tiles have
/// 128 bytes a row, swizzled.
fn map(view: View<'_>, dims: [usize; 2], slices: Option<usize>, tile: [usize; 2]) -> TensorMap {
    let row_bytes = view.dtype().bytes(view.pitch() as u64).0;
    let mut map = TensorMap {
        address: view.address(),
        dtype: view.dtype(),
        dims: dims.map(|dim| dim as u64).to_vec(),
        strides: vec![row_bytes],
        tile: tile.map(|size| size as u32).to_vec(),
        swizzle: Swizzle::B128,
    };
    if let Some(slices) = slices {
        map.dims.push(slices as u64);
        map.strides.push(row_bytes * dims[1] as u64);
        map.tile.push(1);
    }
    map
}
