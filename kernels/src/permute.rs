//! Tokens into expert order and back, by a map of rows.
//!
//! Every token has `K` slots, one for each expert it chose; slot `t * K + j` becomes one row of the
//! permuted matrix, rows sorted by expert and within an expert by slot. Unpermute sums the `K` rows
//! of a token in slot order, weighted or not. Each is the backward of the other. Where some choices
//! are left out ([`limit`], [`map_of`]) a slot may have no row and a row no slot: -1 in the map, zeros
//! in what is gathered by it.
//!
//! A device implementation: the map by a stable counting sort, exactly the CPU's; sums gather (never
//! scatter with atomics), so that they have one order. Floors, in bytes: the map reads the ids twice
//! and writes 12 a slot; [`forward`] reads x once and writes y (a token's row is read once for all of
//! its slots); [`unpermute`] reads y and writes x; [`unpermute_weighted_backward`] reads dx once, reads
//! y, writes dy. A GPU takes at most [`MAX_EXPERTS`] experts and, where weights have a gradient,
//! [`MAX_WEIGHTED_SLOTS`] slots a token.

use std::ops::Range;

use moefold_profiles::{Dtype, Op, Pass, SweepKind};

use crate::buffer::{Output, with};
use crate::device::{Backend, TensorClass};
use crate::meta::Choices;
use crate::sizes;
use crate::tensor::{Tensor, expect_dims};

/// Experts that a GPU sorts by: their counts lie in the shared memory of a block.
pub const MAX_EXPERTS: usize = 1024;

/// Slots of a token whose weights a GPU gives a gradient: one lane of a warp each.
pub const MAX_WEIGHTED_SLOTS: usize = 32;

/// Where every slot goes and every row comes from.
#[derive(Debug, Clone)]
pub struct RowMap {
    /// Row of each slot `t * K + j`, -1 of one without: `[T * K]` i32.
    pub row_of: Tensor,
    /// Slot of each row, -1 of one without: `[N]` i32.
    pub slot_of: Tensor,
    /// Token of each row, -1 of one without: `[N]` i32.
    pub token_of: Tensor,
    /// First row of each expert, and N: `[E + 1]` i32.
    pub offsets: Tensor,
    tokens: usize,
    slots: usize,
    rows: usize,
    /// Whether every slot has a row and every row a slot.
    whole: bool,
}

/// Which rows a map has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// As many as slots, each of which has one.
    Slots,
    /// So many, one at least for every slot that has one; those behind the last belong to the last expert
    /// and have no slot.
    Rows(usize),
    /// So many for every expert, which no expert has more slots of; of each the last have none.
    Each(usize),
}

impl RowMap {
    /// Tokens.
    pub fn num_tokens(&self) -> usize {
        self.tokens
    }

    /// Rows after permutation: `T * K` where nothing is left out.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// Rows of each expert where nothing is left out, brought to the host, which waits for the device. They
    /// sum to N.
    ///
    /// # Panics
    /// When an id was not below the number of experts.
    pub fn counts(&self) -> Vec<usize> {
        let ends = self.offsets.to_i32();
        let device = self.offsets.device();
        if device.is_meta() {
            return device.assumed_rows(Choices {
                tokens: self.tokens,
                slots: self.slots,
                experts: ends.len() - 1,
            });
        }
        assert!(
            ends.last() == Some(&(self.num_rows() as i32)),
            "permute::map: ids that are not among {} experts",
            ends.len() - 1
        );
        ends.windows(2).map(|at| (at[1] - at[0]) as usize).collect()
    }
}

/// The cost-table key of a permutation into or out of `y: [N, h]`.
pub fn key(y: &Tensor, pass: Pass) -> Op {
    Op::Permute {
        rows: y.num_rows() as u64,
        dim: y.width() as u64,
        pass,
        dtype: y.dtype(),
    }
}

/// The same for the rows that `x: [T, h]` becomes.
fn key_of(map: &RowMap, x: &Tensor, pass: Pass) -> Op {
    Op::Permute {
        rows: map.num_rows() as u64,
        dim: x.width() as u64,
        pass,
        dtype: x.dtype(),
    }
}

/// The cost-table key of an inverse permutation out of or into `y: [N, h]`.
pub fn unpermute_key(y: &Tensor, pass: Pass) -> Op {
    Op::Unpermute {
        rows: y.num_rows() as u64,
        dim: y.width() as u64,
        pass,
        dtype: y.dtype(),
    }
}

/// The map for the choices `ids [T, K]` among `experts`. Its counts stay on the device.
///
/// # Panics
/// When the experts are more than the device takes.
pub fn map(ids: &Tensor, experts: usize) -> RowMap {
    map_of(ids, 0..experts, Room::Slots)
}

/// The choices of `ids [T, K]` that are left where no expert may have more than `capacity`, -1 in place of
/// the others. `map` is that of all of them. The first slots stay, or where `probs [T, K]` are given those
/// of the largest, and of equal ones the first. Of an expert that has more, each slot looks at all.
///
/// # Panics
/// When the shapes do not agree.
pub fn limit(ids: &Tensor, map: &RowMap, capacity: usize, probs: Option<&Tensor>) -> Tensor {
    const OP: &str = "permute::limit";
    let _op = ids.device().begin(|| Op::Sweep {
        kind: SweepKind::Limit,
        len: ids.len() as u64,
        dtype: Dtype::I32,
    });
    expect_dims(OP, "ids", ids, &[map.tokens, map.slots]);
    if let Some(probs) = probs {
        expect_dims(OP, "probs", probs, ids.dims());
    }
    let device = ids.device();
    let kept = device.empty(TensorClass::Transient, Dtype::I32, ids.dims());
    match &device.0.backend {
        Backend::Cpu(_) => {
            let inputs = [ids, &map.slot_of, &map.offsets, probs.unwrap_or(ids)];
            with(
                OP,
                inputs,
                [&kept],
                |[ids, slot_of, offsets, by], [kept]| {
                    let by = probs.map(|_| by.f32());
                    let map = [slot_of.i32(), offsets.i32()];
                    cpu::limit(ids.i32(), map, capacity, by, kept.i32());
                },
            );
        }
        Backend::Cuda(gpu) => cuda::limit(gpu, [ids, &kept], probs, map, capacity),
    }
    kept
}

/// As [`map`], for the choices among a range of experts, in rows of some room: an id outside of it has none.
///
/// # Panics
/// When the experts are more than the device takes.
pub fn map_of(ids: &Tensor, experts: Range<usize>, room: Room) -> RowMap {
    let _op = ids.device().begin(|| Op::Sweep {
        kind: SweepKind::Sort,
        len: ids.len() as u64,
        dtype: Dtype::I32,
    });
    let &[tokens, slots] = ids.dims() else {
        panic!("permute::map: ids is {ids:?}, expected [tokens, topk]")
    };
    let device = ids.device();
    let new = |len| device.empty(TensorClass::Activations, Dtype::I32, &[len]);
    let rows = match room {
        Room::Slots => tokens * slots,
        Room::Rows(rows) => rows,
        Room::Each(each) => sizes::elements("permute::map", &[each, experts.len()]),
    };
    let map = RowMap {
        row_of: new(tokens * slots),
        slot_of: new(rows),
        token_of: new(rows),
        offsets: new(experts.len() + 1),
        tokens,
        slots,
        rows,
        whole: room == Room::Slots,
    };
    match &device.0.backend {
        Backend::Cpu(_) => {
            let outputs = [&map.row_of, &map.slot_of, &map.token_of, &map.offsets];
            with(
                "permute::map",
                [ids],
                outputs,
                |[ids], [row_of, slot_of, token_of, offsets]| {
                    let rows = [row_of, slot_of, token_of].map(Output::i32);
                    let offsets = offsets.i32();
                    cpu::map(ids.i32(), slots, experts.start, room, rows, offsets);
                },
            );
        }
        Backend::Cuda(gpu) => cuda::map(gpu, ids, experts.start, room, &map),
    }
    map
}

/// `x [T, h]` to `[N, h]`: each token's row copied to each of its rows.
///
/// # Panics
/// When x has other than the map's tokens.
pub fn forward(x: &Tensor, map: &RowMap) -> Tensor {
    let _op = x.device().begin(|| key_of(map, x, Pass::Forward));
    expect_dims("permute::forward", "x", x, &[map.tokens, x.width()]);
    let device = x.device();
    match &device.0.backend {
        Backend::Cuda(gpu) if map.whole => {
            let dims = [map.num_rows(), x.width()];
            let y = device.empty(TensorClass::Activations, x.dtype(), &dims);
            cuda::forward(gpu, x, map, &y);
            y
        }
        Backend::Cpu(_) | Backend::Cuda(_) => crate::rows::gather(x, &map.token_of),
    }
}

/// The gradient of [`forward`]: `dy [N, h]` to `dx [T, h]`, the sum over a token's rows.
///
/// # Panics
/// When dy has other than the map's rows.
pub fn backward(dy: &Tensor, map: &RowMap) -> Tensor {
    unpermute(dy, map, None)
}

/// `values [T, K]`, one a slot, to `[N]`, one a row (routing probabilities that travel with rows).
///
/// # Panics
/// When there is not one value a slot.
pub fn permute_slots(values: &Tensor, map: &RowMap) -> Tensor {
    expect_dims(
        "permute::permute_slots",
        "values",
        values,
        &[map.tokens, map.slots],
    );
    let by_row = crate::rows::gather(&values.reshape(&[values.len(), 1]), &map.slot_of);
    by_row.reshape(&[map.num_rows()])
}

/// The gradient of [`permute_slots`]: `[N]` to `[T, K]`.
///
/// # Panics
/// When there is not one value a row.
pub fn unpermute_slots(values: &Tensor, map: &RowMap) -> Tensor {
    let n = map.num_rows();
    expect_dims("permute::unpermute_slots", "values", values, &[n]);
    let slots = crate::rows::gather(&values.reshape(&[n, 1]), &map.row_of);
    slots.reshape(&[map.tokens, map.slots])
}

/// `y [N, h]` to `[T, h]`: the sum of a token's rows, each times its weight where `weights [T, K]`
/// are given.
///
/// # Panics
/// When the shapes do not agree.
pub fn unpermute(y: &Tensor, map: &RowMap, weights: Option<&Tensor>) -> Tensor {
    let _op = y.device().begin(|| unpermute_key(y, Pass::Forward));
    let h = y.width();
    expect_dims("permute::unpermute", "y", y, &[map.num_rows(), h]);
    let device = y.device();
    let x = device.empty(TensorClass::Activations, y.dtype(), &[map.tokens, h]);
    let sizes = [map.tokens, map.slots, h];
    match &device.0.backend {
        Backend::Cpu(cpu) => match weights {
            None => with(
                "permute::unpermute",
                [y, &map.row_of],
                [&x],
                |[y, row_of], [x]| {
                    cpu::sum_slots(cpu, y.f32(), row_of.i32(), None, x.f32(), sizes);
                },
            ),
            Some(w) => {
                expect_dims("permute::unpermute", "weights", w, &[map.tokens, map.slots]);
                with(
                    "permute::unpermute",
                    [y, &map.row_of, w],
                    [&x],
                    |[y, row_of, w], [x]| {
                        cpu::sum_slots(cpu, y.f32(), row_of.i32(), Some(w.f32()), x.f32(), sizes);
                    },
                );
            }
        },
        Backend::Cuda(gpu) => cuda::sum_slots(gpu, y, map, weights, &x),
    }
    x
}

/// The gradient of [`unpermute`] without weights: `dx [T, h]` to `dy [N, h]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn unpermute_backward(dx: &Tensor, map: &RowMap) -> Tensor {
    forward(dx, map)
}

/// The gradient of [`unpermute`] with weights: `dx [T, h]`, and the `y [N, h]` and `weights [T, K]`
/// it read, to `(dy [N, h], dweights [T, K])`.
///
/// # Panics
/// When the shapes do not agree.
pub fn unpermute_weighted_backward(
    dx: &Tensor,
    map: &RowMap,
    y: &Tensor,
    weights: &Tensor,
) -> (Tensor, Tensor) {
    const OP: &str = "permute::unpermute_weighted_backward";
    let _op = y.device().begin(|| unpermute_key(y, Pass::Backward));
    let (n, h) = (map.num_rows(), dx.width());
    assert!(map.whole, "{OP}: of a map that leaves slots out");
    expect_dims(OP, "dx", dx, &[map.tokens, h]);
    expect_dims(OP, "y", y, &[n, h]);
    expect_dims(OP, "weights", weights, &[map.tokens, map.slots]);
    let device = dx.device();
    let dy = device.empty(TensorClass::Activations, dx.dtype(), &[n, h]);
    match &device.0.backend {
        Backend::Cpu(cpu) => {
            let row_weights = permute_slots(weights, map);
            let drow = device.empty(TensorClass::Transient, Dtype::F32, &[n]);
            let inputs = [dx, y, &row_weights, &map.token_of];
            with(OP, inputs, [&dy, &drow], |[dx, y, w, token], [dy, dw]| {
                let values = [dx.f32(), y.f32(), w.f32()];
                cpu::spread(cpu, values, token.i32(), dy.f32(), dw.f32());
            });
            (dy, unpermute_slots(&drow, map))
        }
        Backend::Cuda(gpu) => {
            let dweights = device.empty(TensorClass::Activations, Dtype::F32, weights.dims());
            cuda::spread(gpu, OP, [dx, y, weights], map, [&dy, &dweights]);
            (dy, dweights)
        }
    }
}

mod cpu {
    use super::Room;
    use crate::parallel::Cpu;
    use crate::simd::{dot, vectorized};

    /// An id that is no expert's has no row.
    pub(super) fn map(
        ids: &[i32],
        slots: usize,
        first: usize,
        room: Room,
        [row_of, slot_of, token_of]: [&mut [i32]; 3],
        offsets: &mut [i32],
    ) {
        let experts = offsets.len() - 1;
        let expert = |id: i32| {
            let id = usize::try_from(id).ok()?.checked_sub(first)?;
            (id < experts).then_some(id)
        };
        slot_of.fill(-1);
        token_of.fill(-1);
        offsets.fill(0);
        for id in ids.iter().filter_map(|&id| expert(id)) {
            offsets[id + 1] += 1;
        }
        if let Room::Each(each) = room {
            offsets[1..].fill(each as i32);
        }
        for id in 0..experts {
            offsets[id + 1] += offsets[id];
        }
        let mut next = offsets.to_vec();
        if let Room::Rows(rows) = room {
            offsets[experts] = rows as i32;
        }
        for (slot, (&id, row_of)) in ids.iter().zip(row_of).enumerate() {
            let Some(id) = expert(id) else {
                *row_of = -1;
                continue;
            };
            let row = next[id];
            next[id] += 1;
            *row_of = row;
            slot_of[row as usize] = slot as i32;
            token_of[row as usize] = (slot / slots) as i32;
        }
    }

    pub(super) fn limit(
        ids: &[i32],
        [slot_of, offsets]: [&[i32]; 2],
        capacity: usize,
        probs: Option<&[f32]>,
        kept: &mut [i32],
    ) {
        kept.copy_from_slice(ids);
        for ends in offsets.windows(2) {
            let mut slots = slot_of[ends[0] as usize..ends[1] as usize].to_vec();
            if let Some(probs) = probs {
                // Stable, so that of equal ones the first stays first.
                slots.sort_by(|&a, &b| probs[b as usize].total_cmp(&probs[a as usize]));
            }
            let dropped = slots.iter().skip(capacity);
            dropped.for_each(|&slot| kept[slot as usize] = -1);
        }
    }

    pub(super) fn sum_slots(
        cpu: &Cpu,
        y: &[f32],
        row_of: &[i32],
        weights: Option<&[f32]>,
        x: &mut [f32],
        [tokens, slots, h]: [usize; 3],
    ) {
        cpu.rows(tokens, y.len(), [(x, h)], |range, [x]| {
            for (token, x) in range.zip(x.chunks_exact_mut(h.max(1))) {
                x.fill(0.0);
                for slot in token * slots..(token + 1) * slots {
                    let Ok(row) = usize::try_from(row_of[slot]) else {
                        continue;
                    };
                    let row = &y[row * h..][..h];
                    add_scaled(x, row, weights.map_or(1.0, |w| w[slot]));
                }
            }
        });
    }

    vectorized! {
        fn add_scaled(x: &mut [f32], y: &[f32], scale: f32) {
            for (x, &y) in x.iter_mut().zip(y) {
                *x += y * scale;
            }
        }
    }

    pub(super) fn spread(
        cpu: &Cpu,
        [dx, y, weights]: [&[f32]; 3],
        token_of: &[i32],
        dy: &mut [f32],
        dw: &mut [f32],
    ) {
        let n = token_of.len();
        if n == 0 {
            return;
        }
        let h = y.len() / n;
        cpu.rows(n, 3 * y.len(), [(dy, h), (dw, 1)], |range, [dy, dw]| {
            let rows = range.zip(dy.chunks_exact_mut(h.max(1))).zip(dw);
            for ((row, dy), dw) in rows {
                let dx = &dx[token_of[row] as usize * h..][..h];
                *dw = spread_row(dx, &y[row * h..][..h], weights[row], dy);
            }
        });
    }

    vectorized! {
        fn spread_row(dx: &[f32], y: &[f32], weight: f32, dy: &mut [f32]) -> f32 {
            for (dy, &dx) in dy.iter_mut().zip(dx) {
                *dy = dx * weight;
            }
            dot(dx, y)
        }
    }
}

pub(crate) mod cuda;
