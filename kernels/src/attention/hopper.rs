//! Attention on Hopper: `attention_sm90.cu`, bf16 by warpgroup products and bulk copies.
//!
//! Forward follows FlashAttention-3 (arXiv 2407.08608). One warp copies tiles ahead, two or three
//! warpgroups compute, 64 queries each. Scores are products of shared memory with shared memory;
//! probabilities stay in registers as the first operand of the product with the values. Inside a
//! warpgroup the softmax of a step runs beside the product with the values of the step before.
//! Warpgroups take turns at issuing products: one computes exponentials while the other multiplies.
//! Blocks stay on their multiprocessor and take tickets, so that the work evens out
//! whatever else runs there, and the next tile's keys arrive while the last is finished.
//!
//! Backward is one pass of five products over blocks of 128 keys (see [`super::cuda`] for why), two
//! warpgroups of 64 keys each, 64 queries a step. Scores are computed transposed, keys for rows, so
//! that probabilities and their gradients are first operands of dv and dk straight from registers.
//! Each warpgroup has half of the columns of dq; a warp of its own for each buffer adds them to the sums of the
//! tile when the turn has come, while the next steps are computed. A small kernel before it pads lse and
//! delta to whole steps, one after it turns the sums into bf16.
//!
//! What limits them, counted, not measured, in cycles of one multiprocessor for a step. A cycle has 4096
//! dense bf16 FLOPs, 16 exponentials, 128 other f32 operations and 128 bytes of shared memory. Shared memory
//! has the operands of products, the tiles that arrive and what warps write.
//!
//! | forward | queries x keys | products | exponentials | other f32 | shared memory | accumulators of a thread | KiB |
//! |---|---|---|---|---|---|---|---|
//! | 64/64 | 192 x 128 | 1536 | 1536 | 670 | 1220 | 32 + 64, probabilities 32, of 160 | 88 |
//! | 128/128 | 128 x 128 | 2048 | 1024 | 450 | 1792 | 64 + 64 + 32 of 240 | 160 |
//! | 192/128 | 128 x 128 | 2560 | 1024 | 450 | 2304 | 64 + 64 + 32 of 240 | 208 |
//!
//! | backward | products | exponentials | shared memory | accumulators of a thread | KiB |
//! |---|---|---|---|---|---|
//! | 64/64 | 1280 | 512 | 1670 | dk 32 + dv 32, scores 32 + 32, of 240 | 128 |
//! | 128/128 | 2560 | 512 | 2950 | 64 + 64 + 32 + 32 | 225 |
//! | 192/128 | 3328 | 512 | 4550 | 96 + 64 + 16 + 16, scores by halves | 225 |
//!
//! So forward is bound by the tensor cores as long as the softmax stays hidden (heads of 64 by
//! exponentials alike), backward by shared memory: wgmma reads both operands of the scores from
//! there for only 64 columns. Keys and values come from the second-level cache (64 to 80 KiB a step
//! of forward, an f32 tile of dq on top in backward): tickets go through heads in sections that fit
//! there.
//!
//! Work ends with its longest block. In causal attention the first block of keys meets all queries, the mean one half
//! of them: blocks even out once there are twice as many as multiprocessors. Where there are fewer, the heads of a group
//! are cut in parts, each with blocks and f32 sums of dk and dv of its own, which are then added in order. The number of
//! parts follows from shapes alone, as bits depend on it: the fewest that give 256 blocks (`group_parts`). More only
//! cost: 8 bytes of memory traffic for each element and part, and the start of every block. Simulated, not measured:
//! causal attention on tickets and in turns, 132 multiprocessors, heads of 128, 2.25 us a step (as on an H100 with one
//! part), 4 us to start a block, 3 TB/s for sums.
//!
//! | sequences x tokens, heads / of keys | spread evenly | 1 part | 2 | 4 | 8 parts, us | taken |
//! |---|---|---|---|---|---|---|
//! | 1 x 4096, 32 / 4 | 576 | 1158 | 643 | 679 | 746 | 2 |
//! | 1 x 4096, 8 / 1 | 144 | 1158 | 595 | 312 | 209 | 8 |
//! | 1 x 4096, 32 / 8 | 576 | 611 | 681 | 749 | | 1 |
//! | 2 x 4096, 32 / 4 | 1152 | 1187 | 1257 | 1343 | 1464 | 1 |
//! | 1 x 8192, 32 / 4 | 2269 | 2327 | 2398 | 2469 | 2611 | 1 |
//! | 1 x 32768, 8 / 1 | 8972 | 9222 | 9166 | 9223 | 9375 | 1 |
//! | 4 x 4096, 32 / 4 | 2304 | 2350 | 2528 | 2640 | 2903 | 1 |
//!
//! Measured on an H100, with the small kernels before and after: the first row takes 768 us (1225 with one part and one
//! thread that adds to dq), the third 735, MLA 1050.
//!
//! Sections of like size matter as much: the last row takes 2947 us where a section of 3 heads of keys follows one of
//! 13, for its longest blocks start last. MLA has a head of keys for each of queries and nothing to cut: 1 x 4096 with
//! 32 heads of 192/128 has 1024 blocks, 971 us where 896 are spread evenly.
//!
//! What would lift backward's bounds, counted in the same way:
//!
//! - At 192/128 a step moves 582 KB of shared memory: scores 147 (their keys twice, for registers hold
//!   only half of the queries), gradients of probabilities 98 (values twice), dv 33, dk 49, dq 98; ds 16,
//!   sums of dq 49 in and 49 out, arriving tiles 41. Sums that go from registers to device memory
//!   (`red.global.add.v4.f32`, when the turn has come) would take 98 off, 4550 cycles to 3780, and free
//!   the 48 KiB of their buffer; the products alone take 3328. Keys and values read once would take off
//!   another 82, but want 32 more registers of a thread than there are.

use moefold_profiles::Dtype;

use super::cuda::WIDTHS;
use super::{Mask, Sizes};
use crate::TensorClass;
use crate::cuda::Cuda;
use crate::cuda::program::{
    Arg, Define, Entry, Grid, Listed, Needs, Program, Source, Swizzle, TensorMap, source,
};
use crate::reduce::{self, cuda::NEAR};
use crate::tensor::Tensor;

const SOURCE: Source = source!("attention_sm90", "../attention_sm90.cu");

/// Steps whose keys and values are in shared memory at once.
const STAGES: usize = 2;

/// Sizes on chip of the forward kernel, by the widths of a head.
#[derive(Clone, Copy)]
struct Forward {
    dk: usize,
    dv: usize,
    /// Warpgroups that compute, 64 queries each.
    groups: usize,
    /// Keys of a step.
    keys: usize,
}

/// A width that the products take.
fn padded(width: usize) -> usize {
    width.next_multiple_of(if width <= 128 { 16 } else { 32 })
}

/// Bytes of a tile: panels of 64 columns.
fn tile_bytes(rows: usize, width: usize) -> usize {
    width.div_ceil(64) * rows * 128
}

impl Forward {
    fn of(widths: [usize; 2]) -> Self {
        let [dk, dv] = widths.map(padded);
        // Registers: accumulators of out and scores and the probabilities' half of those.
        let (groups, keys) = if dk.max(dv) <= 64 {
            (3, 128)
        } else if dk <= 192 && dv <= 128 {
            (2, 128)
        } else {
            (2, 64)
        };
        Self {
            dk,
            dv,
            groups,
            keys,
        }
    }

    fn queries(self) -> usize {
        64 * self.groups
    }

    fn threads(self) -> u32 {
        128 * (1 + self.groups as u32)
    }

    fn shared(self) -> usize {
        let stage = tile_bytes(self.keys, self.dk) + tile_bytes(self.keys, self.dv);
        let barriers = 8 * (2 + 4 * STAGES) + 8;
        tile_bytes(self.queries(), self.dk) + STAGES * stage + barriers
    }

    fn program(self, mask: Mask) -> Program {
        SOURCE.with(&[
            Define::int("DK", self.dk),
            Define::int("DV", self.dv),
            Define::int("GROUPS", self.groups),
            Define::int("KEYS", self.keys),
            Define::int("STAGES", STAGES),
            Define::flag("CAUSAL", mask == Mask::Causal),
        ])
    }
}

/// Whether these kernels do it: on Hopper, in bf16, where every row is `aligned` to 16 bytes, and no window is
/// asked for: few keys of a block of 128 would be in it, and the portable kernels have smaller ones.
pub(super) fn applies(gpu: &Cuda, mask: Mask, aligned: bool) -> bool {
    let windowed = matches!(mask, Mask::Window(_));
    gpu.architecture().has_wgmma() && gpu.dtype() == Dtype::Bf16 && aligned && !windowed
}

/// Tiles of `rows` tokens and 64 columns of one head of `x [tokens, heads, width]`; what lies
/// beyond the end of a sequence or the width of a head is zero.
fn map(op: &'static str, gpu: &Cuda, x: &Tensor, s: Sizes, rows: usize) -> Arg {
    let (heads, width) = (x.dims()[1] as u64, x.dims()[2] as u64);
    let row = heads * width * 2;
    gpu.tensor_map(op, || TensorMap {
        address: x.address(),
        dtype: Dtype::Bf16,
        dims: vec![width, heads, s.seq_len as u64, s.seqs as u64],
        strides: vec![width * 2, row, row * s.seq_len as u64],
        tile: vec![64, 1, rows as u32, 1],
        swizzle: Swizzle::B128,
    })
}

pub(super) fn forward(
    op: &'static str,
    gpu: &Cuda,
    s: Sizes,
    scale: f32,
    [q, k, v]: [&Tensor; 3],
    o: &Tensor,
    lse: &Tensor,
) {
    let tiling = Forward::of([s.dk, s.dv]);
    let pairs = s.heads * s.seqs;
    let tiles = s.seq_len.div_ceil(tiling.queries()) * pairs;
    if tiles == 0 {
        return;
    }
    // Query heads whose keys and values take half of the second-level cache.
    let group = s.heads / s.kv_heads;
    let head_bytes = (s.seq_len * (s.dk + s.dv) * 2) as u64;
    let kv_heads = (gpu.properties().l2.0 / 2 / head_bytes).max(1) as usize;
    let section = (kv_heads * group).min(pairs);
    let tickets = q.device().zeros(TensorClass::Transient, Dtype::I32, &[1]);
    let mut args = vec![
        map(op, gpu, q, s, tiling.queries()),
        map(op, gpu, k, s, tiling.keys),
        map(op, gpu, v, s, tiling.keys),
        o.into(),
        lse.into(),
        (&tickets).into(),
    ];
    args.extend([s.seqs, s.seq_len, s.heads, group, s.dv, section].map(Arg::size));
    args.push(Arg::F32(scale));
    gpu.launch(
        op,
        &tiling.program(s.mask),
        "attention_forward",
        Grid::linear(
            tiles.min(gpu.multiprocessors() as usize),
            tiling.threads(),
            tiling.shared(),
        ),
        &args,
    );
}

/// Sizes on chip of the backward kernels.
#[derive(Clone, Copy)]
struct Backward {
    dk: usize,
    dv: usize,
}

impl Backward {
    /// Keys of a block and queries of a step.
    const KEYS: usize = 128;
    const QUERIES: usize = 64;

    /// None where heads are too wide for dk and dv of a block to stay in registers.
    fn of(widths: [usize; 2]) -> Option<Self> {
        match widths.map(|width| width.div_ceil(64)) {
            [1 | 2, 1 | 2] => {
                let [dk, dv] = widths.map(|width| width.next_multiple_of(64));
                Some(Self { dk, dv })
            }
            [3, 1 | 2] => Some(Self { dk: 192, dv: 128 }),
            _ => None,
        }
    }

    /// Parts that the columns of dq are cut in.
    fn dq_parts(self) -> u32 {
        if self.dk == 192 { 3 } else { 2 }
    }

    /// As `Tiles` has it.
    fn shared(self) -> usize {
        let dq_stages = if self.dk + self.dv > 256 { 1 } else { 2 };
        let dq_stage = Self::KEYS * Self::QUERIES * 2 + Self::QUERIES * self.dk * 4;
        let block = tile_bytes(Self::KEYS, self.dk) + tile_bytes(Self::KEYS, self.dv);
        let step = tile_bytes(Self::QUERIES, self.dk) + tile_bytes(Self::QUERIES, self.dv);
        let stats = 2 * Self::QUERIES * 4;
        let barriers = 8 * (1 + 4 * STAGES + 2 * dq_stages) + 8;
        block + STAGES * (step + stats) + dq_stages * dq_stage + barriers
    }

    fn program(self, mask: Mask) -> Program {
        SOURCE.with(&[
            Define::int("DK", self.dk),
            Define::int("DV", self.dv),
            Define::flag("BACKWARD", true),
            Define::flag("CAUSAL", mask == Mask::Causal),
        ])
    }
}

/// False where the portable kernels have to do it.
pub(super) fn backward(
    op: &'static str,
    gpu: &Cuda,
    s: Sizes,
    scale: f32,
    [d_o, q, k, v, o, lse]: [&Tensor; 6],
    [dq, dk, dv]: [&Tensor; 3],
) -> bool {
    let Some(tiling) = Backward::of([s.dk, s.dv]) else {
        return false;
    };
    let program = tiling.program(s.mask);
    let pairs = s.heads * s.seqs;
    let query_blocks = s.seq_len.div_ceil(Backward::QUERIES);
    let (tiles, padded) = (query_blocks * pairs, query_blocks * Backward::QUERIES);
    if tiles == 0 {
        return true;
    }
    let device = q.device();
    let scratch = |dims: &[usize]| device.empty(TensorClass::Transient, Dtype::F32, dims);

    let stats = scratch(&[2 * pairs, padded]);
    let mut args: Vec<Arg> = [d_o, o, lse, &stats].map(Arg::from).to_vec();
    args.extend([s.seqs, s.seq_len, s.heads, s.dv].map(Arg::size));
    let blocks = pairs * padded / 32;
    gpu.launch(
        op,
        &program,
        "attention_prepare",
        Grid::linear(blocks, 256, 0),
        &args,
    );

    // The rows of a tile of dq are the kernel's own affair: 128 elements each, one copy in all.
    let tile_rows = Backward::QUERIES * tiling.dk / 128;
    let sums = scratch(&[tiles * tile_rows, 128]);
    let turns = device.zeros(TensorClass::Transient, Dtype::I32, &[1 + tiles]);
    let (group, parts) = (s.heads / s.kv_heads, group_parts(s));
    let share = group / parts;
    // dk and dv of each part, where there are several.
    let part_sums = (parts > 1).then(|| [dk, dv].map(|sum| scratch(&[parts, sum.len()])));
    let [to_k, to_v] = match &part_sums {
        Some([of_k, of_v]) => [of_k, of_v],
        None => [dk, dv],
    };
    let mut args = vec![
        map(op, gpu, q, s, Backward::QUERIES),
        map(op, gpu, k, s, Backward::KEYS),
        map(op, gpu, v, s, Backward::KEYS),
        map(op, gpu, d_o, s, Backward::QUERIES),
        rows_map(op, gpu, &stats, [1, Backward::QUERIES]),
        rows_map(op, gpu, &sums, [tile_rows, 128]),
    ];
    args.extend([&turns, to_k, to_v].map(Arg::from));
    let shares = pairs / share;
    let section = section(gpu, s, tiling, share);
    args.extend([s.seqs, s.seq_len, s.heads, group, share].map(Arg::size));
    args.extend([s.dk, s.dv, section].map(Arg::size));
    args.push(Arg::F32(scale));
    let blocks = s.seq_len.div_ceil(Backward::KEYS) * shares;
    gpu.launch(
        op,
        &program,
        "attention_backward",
        Grid::linear(blocks, 384, tiling.shared()),
        &args,
    );

    let mut args: Vec<Arg> = [&sums, dq].map(Arg::from).to_vec();
    args.extend([s.seq_len, s.heads, s.dk].map(Arg::size));
    args.push(Arg::F32(scale));
    let grid = Grid::linear(tiles, 128 * tiling.dq_parts(), 0);
    gpu.launch(op, &program, "attention_dq", grid, &args);

    for (of_parts, sum) in part_sums.iter().flatten().zip([dk, dv]) {
        let of_parts: Vec<Tensor> = (0..parts)
            .map(|part| of_parts.view(part * sum.len(), sum.dims()))
            .collect();
        reduce::sum_ordered(&of_parts.iter().collect::<Vec<_>>(), sum);
    }
    true
}

/// Blocks that even out where the longest has twice the work of the mean, as in causal attention: about two for each
/// multiprocessor of an H100. Not asked of the device, as bits depend on it.
const BLOCKS: usize = 256;

/// In how many equal parts the heads of a group are cut for backward, each with blocks of its own: as few as give
/// [`BLOCKS`], or as many as there can be. A sum takes no more of them at once than [`NEAR`].
fn group_parts(s: Sizes) -> usize {
    let group = s.heads / s.kv_heads;
    let blocks = s.seq_len.div_ceil(Backward::KEYS) * s.kv_heads * s.seqs;
    let mut all = (1..=group.min(NEAR)).filter(|&parts| group.is_multiple_of(parts));
    let enough = all.clone().find(|parts| blocks * parts >= BLOCKS);
    enough.or(all.next_back()).unwrap_or(1)
}

/// How many parts of groups, of `share` heads each, are a section: as many as take half of the second-level cache with
/// their queries and what goes with those; or where those are few, of three waves of blocks, for within a section the
/// longest work comes first. Sections are of like size, as a short one at the end would have long work in few blocks.
fn section(gpu: &Cuda, s: Sizes, tiling: Backward, share: usize) -> usize {
    let shares = s.heads / share * s.seqs;
    let bytes = (s.seq_len * share * (2 * s.dk + 2 * s.dv + 4 * tiling.dk)) as u64;
    let cached = (gpu.properties().l2.0 / 2 / bytes) as usize;
    let key_blocks = s.seq_len.div_ceil(Backward::KEYS);
    let waves = (3 * gpu.multiprocessors() as usize).div_ceil(key_blocks);
    shares.div_ceil(shares.div_ceil(cached.max(waves)))
}

/// Tiles of a matrix of f32, as it lies.
fn rows_map(op: &'static str, gpu: &Cuda, x: &Tensor, [rows, columns]: [usize; 2]) -> Arg {
    gpu.tensor_map(op, || TensorMap {
        address: x.address(),
        dtype: Dtype::F32,
        dims: vec![x.width() as u64, x.num_rows() as u64],
        strides: vec![x.width() as u64 * 4],
        tile: vec![columns as u32, rows as u32],
        swizzle: Swizzle::None,
    })
}

/// What the models of today launch: heads of 64, 128 and 256, and MLA's 192 and 128.
pub(super) fn programs() -> Vec<Listed> {
    const SHOWS: &[&str] = &["HGMMA", "UTMALDG", "USETMAXREG"];
    let listed = |program, entries| Listed {
        program,
        needs: Needs::Wgmma,
        entries,
    };
    let product = |name, registers, shared| Entry {
        shows: SHOWS,
        ..Entry::plain(name, registers, shared)
    };
    let mut all = Vec::new();
    let masks = [Mask::Causal, Mask::Full];
    let cases = WIDTHS
        .into_iter()
        .flat_map(|widths| masks.map(|mask| (widths, mask)));
    for (widths, mask) in cases {
        let forward = Forward::of(widths);
        // An equal share of 65536, shared out again among the roles once the kernel runs.
        let registers = if forward.groups == 2 { 168 } else { 128 };
        let entries = vec![product("attention_forward", registers, forward.shared())];
        all.push(listed(forward.program(mask), entries));
        if let Some(backward) = Backward::of(widths) {
            let entries = vec![
                Entry::plain("attention_prepare", 64, 0),
                product("attention_backward", 168, backward.shared()),
                Entry::plain("attention_dq", 64, 0),
            ];
            all.push(listed(backward.program(mask), entries));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts([seq_len, seqs, heads, kv_heads]: [usize; 4]) -> usize {
        group_parts(Sizes {
            mask: Mask::Causal,
            seqs,
            seq_len,
            heads,
            kv_heads,
            dk: 128,
            dv: 128,
        })
    }

    #[test]
    fn groups_are_cut_where_there_are_few_blocks() {
        for (sizes, want) in [
            ([4096, 1, 32, 4], 2),
            ([4096, 2, 32, 4], 1),
            ([8192, 1, 32, 4], 1),
            ([4096, 1, 8, 1], 8),
            ([4096, 1, 32, 8], 1),
            ([4096, 1, 32, 32], 1),
            ([32768, 1, 8, 1], 1),
            ([4096, 1, 96, 8], 1),
            // What divides the group, and no more than are summed at once.
            ([4096, 1, 24, 2], 4),
            ([4096, 1, 12, 1], 6),
            ([1024, 1, 16, 1], 8),
            ([1, 1, 11, 1], 1),
        ] {
            assert_eq!(parts(sizes), want, "{sizes:?}");
        }
    }
}
