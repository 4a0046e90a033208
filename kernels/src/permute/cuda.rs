//! Launches of `permute_map.cu` and `permute.cu`.

use moefold_profiles::Dtype;

use super::{MAX_EXPERTS, MAX_WEIGHTED_SLOTS, Room, RowMap};
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::operand::vector;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::rows::cuda::lanes_log2;
use crate::tensor::{Tensor, expect_dims};

const MAP: Source = source!("permute_map", "../permute_map.cu");
const ROWS: Source = source!("permute", "../permute.cu");
/// Threads of a block that sorts, and the warps they are.
const SORTERS: u32 = 512;
const WARPS: usize = SORTERS as usize / 32;
/// Most blocks that sort: each reads the histograms of all of them.
const MAX_BLOCKS: usize = 128;
/// Threads of a block that moves rows.
const THREADS: u32 = 256;

fn rows_program(dtype: Dtype, vector: usize) -> Program {
    ROWS.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
}

/// Every specialization for rows of whole 16-byte pieces.
pub(crate) fn programs() -> Vec<Listed> {
    let rows = |dtype, vector, needs| Listed {
        program: rows_program(dtype, vector),
        needs,
        entries: vec![
            Entry::plain("permute_forward", 64, 0),
            Entry::plain("permute_sum", 64, 0),
            Entry::plain("permute_spread", 64, 0),
        ],
    };
    let map = Listed {
        program: MAP.with(&[]),
        needs: Needs::Sm80,
        entries: vec![
            Entry::plain("permute_count", 64, 4 * MAX_EXPERTS),
            Entry::plain("permute_place", 64, 4 * (1 + WARPS) * MAX_EXPERTS),
            Entry::plain("permute_limit", 64, 0),
        ],
    };
    vec![
        map,
        rows(Dtype::Bf16, 8, Needs::Sm80),
        rows(Dtype::F32, 4, Needs::Sm80),
        rows(Dtype::Bf16, 1, Needs::Odd),
        rows(Dtype::F32, 1, Needs::Odd),
    ]
}

/// The map of the slots whose experts are from `first` on.
pub(super) fn map(gpu: &Cuda, ids: &Tensor, first: usize, room: Room, map: &RowMap) {
    const OP: &str = "permute::map";
    let RowMap {
        row_of,
        slot_of,
        token_of,
        offsets,
        ..
    } = map;
    disjoint(OP, &[ids], &[row_of, slot_of, token_of, offsets]);
    ids.expect_dtype(OP, Dtype::I32);
    let (slots, experts) = (ids.len(), offsets.len() - 1);
    let (each, rows) = match room {
        Room::Slots => (0, 0),
        Room::Rows(rows) => (0, rows),
        Room::Each(each) => (each, map.rows),
    };
    assert!(
        (1..=MAX_EXPERTS).contains(&experts),
        "{OP}: {experts} experts, expected 1 to {MAX_EXPERTS}"
    );
    let sorters = SORTERS as usize;
    let chunk = slots
        .div_ceil(MAX_BLOCKS)
        .next_multiple_of(sorters)
        .max(sorters);
    // One block at least: it writes the offsets.
    let blocks = slots.div_ceil(chunk).max(1);
    let device = ids.device();
    let table = device.empty(TensorClass::Transient, Dtype::I32, &[blocks, experts]);
    let sizes = [slots, first, experts, chunk, rows].map(Arg::size);
    let grid = |words: usize| Grid::linear(blocks, SORTERS, 4 * words);
    let program = MAP.with(&[]);
    let [n, f, e, c, rows] = sizes;
    let tensors = [ids, &table, slot_of, token_of].map(Arg::from);
    let [keys, counted, slots, tokens] = tensors;
    let count = [keys, counted, slots, tokens, n, f, e, c, rows];
    gpu.launch(OP, &program, "permute_count", grid(experts), &count);
    gpu.launch(
        OP,
        &program,
        "permute_place",
        grid((1 + WARPS) * experts),
        &[
            ids.into(),
            (&table).into(),
            row_of.into(),
            slot_of.into(),
            token_of.into(),
            offsets.into(),
            n,
            f,
            e,
            c,
            Arg::size(ids.width()),
            Arg::size(each),
            rows,
        ],
    );
}

pub(super) fn limit(
    gpu: &Cuda,
    [ids, kept]: [&Tensor; 2],
    probs: Option<&Tensor>,
    map: &RowMap,
    capacity: usize,
) {
    const OP: &str = "permute::limit";
    disjoint(OP, &[ids, &map.row_of, &map.slot_of, &map.offsets], &[kept]);
    let tensors = [&map.row_of, &map.slot_of, &map.offsets, kept].map(Arg::from);
    let [row_of, slot_of, offsets, kept] = tensors;
    gpu.launch(
        OP,
        &MAP.with(&[]),
        "permute_limit",
        Grid::linear(ids.len().div_ceil(SORTERS as usize), SORTERS, 0),
        &[
            ids.into(),
            Arg::optional(probs),
            row_of,
            slot_of,
            offsets,
            kept,
            Arg::size(ids.len()),
            Arg::size(capacity),
        ],
    );
}

/// The program and the width of a row in its accesses.
fn specialized(tensors: &[&Tensor]) -> (Program, usize) {
    let vector = vector(tensors);
    let program = rows_program(tensors[0].dtype(), vector);
    (program, tensors[0].width() / vector)
}

pub(super) fn forward(gpu: &Cuda, x: &Tensor, map: &RowMap, y: &Tensor) {
    const OP: &str = "permute::forward";
    disjoint(OP, &[x, &map.row_of], &[y]);
    let (program, pieces) = specialized(&[x, y]);
    let shift = lanes_log2(pieces);
    let blocks = map.tokens.div_ceil(THREADS as usize >> shift);
    let sizes = [map.tokens, map.slots, pieces, shift as usize].map(Arg::size);
    let [tokens, slots, pieces, shift] = sizes;
    let tensors = [x, y, &map.row_of].map(Arg::from);
    let [x, y, row_of] = tensors;
    gpu.launch(
        OP,
        &program,
        "permute_forward",
        Grid::linear(blocks, THREADS, 0),
        &[x, y, row_of, tokens, slots, pieces, shift],
    );
}

pub(super) fn sum_slots(
    gpu: &Cuda,
    y: &Tensor,
    map: &RowMap,
    weights: Option<&Tensor>,
    x: &Tensor,
) {
    const OP: &str = "permute::unpermute";
    disjoint(OP, &[y, &map.row_of], &[x]);
    if let Some(weights) = weights {
        expect_dims(OP, "weights", weights, &[map.tokens, map.slots]);
        weights.expect_dtype(OP, Dtype::F32);
    }
    let (program, pieces) = specialized(&[y, x]);
    // Every access of the output has the rows of a token to itself.
    let lanes = pieces.next_power_of_two().min(THREADS as usize);
    let blocks = map.tokens.div_ceil(THREADS as usize / lanes);
    gpu.launch(
        OP,
        &program,
        "permute_sum",
        Grid::linear(blocks, THREADS, 0),
        &[
            y.into(),
            Arg::optional(weights),
            x.into(),
            (&map.row_of).into(),
            Arg::size(map.tokens),
            Arg::size(map.slots),
            Arg::size(pieces),
            Arg::size(lanes.ilog2() as usize),
        ],
    );
}

pub(super) fn spread(
    gpu: &Cuda,
    op: &'static str,
    [dx, y, weights]: [&Tensor; 3],
    map: &RowMap,
    [dy, dweights]: [&Tensor; 2],
) {
    disjoint(op, &[dx, y, weights, &map.row_of], &[dy, dweights]);
    weights.expect_dtype(op, Dtype::F32);
    y.expect_dtype(op, dx.dtype());
    assert!(
        map.slots <= MAX_WEIGHTED_SLOTS,
        "{op}: {} slots a token, expected at most {MAX_WEIGHTED_SLOTS}",
        map.slots
    );
    let (program, pieces) = specialized(&[dx, y, dy]);
    let blocks = map.tokens.div_ceil(THREADS as usize / 32);
    gpu.launch(
        op,
        &program,
        "permute_spread",
        Grid::linear(blocks, THREADS, 0),
        &[
            dx.into(),
            y.into(),
            weights.into(),
            (&map.row_of).into(),
            dy.into(),
            dweights.into(),
            Arg::size(map.tokens),
            Arg::size(map.slots),
            Arg::size(pieces),
        ],
    );
}
