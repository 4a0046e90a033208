// Matrix products of bf16 on Hopper, grouped and dense; see gemm.rs and grouped_gemm.rs for what is
// computed, prelude/tiles.cuh for how groups are cut into tiles.
//
//   C = op(A) op(B) + bias, or C += where ADD, a product per group; the bias may be null.
// -DTRANS_A  0: A is [m, k] and the rows of A and C are grouped, B is a matrix per group;
//            1: A is [k, m] and what is summed over is grouped, C is a matrix per group
// -DTRANS_B  0: B is [k, n], 1: B is [n, k]
// -DF32_C    1: C is f32, 0: bf16
// -DADD      1: adds to C
// -DTILE_N   columns of a tile: 128, 192 or, of a bf16 C, 256; it has 128 rows
//
// One block a multiprocessor computes one tile after another. Its first warpgroup gives up registers,
// and one thread of it keeps as many stages of 64 along k in flight as fit, by bulk tensor copies.
// The two others multiply 64 rows each (wgmma m64nTILE_Nk16, both operands in shared memory); what one
// finds no rows for it leaves out. A tile's results stay in registers, as C has them, and leave while the next tile's
// products run: blocks that end their tiles together would else all wait for memory, and then all leave it idle.
//
// A transposed operand (A of TRANS_A, B without TRANS_B) is read as it lies in memory, in panels of 64
// along m or n. Copies know where a tensor ends, not where a group does:
// - Grouped rows: a tile may read rows of the next group, whose results are dropped. 64 rows that are
//   all the group's leave through shared memory by a bulk copy, fewer leave from registers, and at once.
// - Grouped sum: in the last stage of a group the rows behind it are overwritten with zeros, in both
//   operands, since zero times what the next group holds need not be zero.
// Adding to f32 is done by the copy engine, one addition to an element, so its result is as fixed as
// that of a load and a store; bf16 is added to in f32, from registers.
//
// Floor: 2 m n k operations, and each operand and C once from memory. A step of 64 moves
// (128 + TILE_N) * 128 bytes from the level-two cache for TILE_N * 2^14 operations: with 256 columns
// 48 bytes a cycle at the full rate of the tensor cores. The wider tile is the better one, as long as
// tiles fill the device. Of an f32 C registers hold no more than 192 columns twice: 53 bytes a cycle.
#include "prelude.cuh"
#include "prelude/tiles.cuh"

#define TILE_M 128
#define TILE_K 64
#define THREADS 384
// 64 rows of 128 bytes.
#define PANEL_BYTES 8192
#define BYTES_A (2 * PANEL_BYTES)
#define BYTES_B (TILE_N / 64 * PANEL_BYTES)
#define STAGE_BYTES (BYTES_A + BYTES_B)
#define STAGES (24 * PANEL_BYTES / STAGE_BYTES)
// Two panels a warpgroup: one is written while the other leaves.
#define OUT_BYTES (4 * PANEL_BYTES)
// Columns of C in a panel.
#define SLICE (F32_C ? 32 : 64)
// Whether whole panels of C leave by bulk copies.
#define BULK_OUT (F32_C || !ADD)

// TypeC is C's, Word what a register holds of C.
#if F32_C
typedef float TypeC, Word;
#else
typedef bf16 TypeC;
typedef u32 Word;
#endif
// Words that a thread holds of a tile, and of a panel.
#define WORDS (TILE_N / 2 * (i32)sizeof(TypeC) / 4)
#define PANEL_WORDS 16

struct alignas(2 * sizeof(TypeC)) Pair {
  TypeC value[2];
};

struct Pipe {
  u8* stages;
  u64 *full, *empty;
};

// What a warpgroup has of a tile whose results are to leave: panels from this row and column of C on, the next one's
// words first. `panels` is twice their number, plus which of two places in shared memory the next one takes.
struct Held {
  Word word[WORDS];
  i32 row, column, slice_c;
  i32 panels;
};

// What a block does for a tile, of either kind of grouping.
struct Work {
  i32 first_k;       // row of A and B where the sum starts
  i32 depth;         // how many it goes over
  i32 row, height;   // first row of C, and how many there are from it on
  i32 column;
  i32 slice_b, slice_c;  // matrix of B and C
};

DEV Work work_at(const i32* starts, const i32* offsets, i32 groups, i32 columns, i32 index, i32 m, i32 k) {
  Tile tile = tile_at(starts, groups, columns, index);
  Work work;
  work.row = tile.row * TILE_M;
  work.column = tile.column * TILE_N;
#if TRANS_A
  work.first_k = group_start(offsets, k, tile.group);
  work.depth = group_start(offsets, k, tile.group + 1) - work.first_k;
  work.height = m - work.row;
  work.slice_b = 0, work.slice_c = tile.group;
#else
  work.first_k = 0, work.depth = k;
  work.row += group_start(offsets, m, tile.group);
  work.height = group_start(offsets, m, tile.group + 1) - work.row;
  work.slice_b = tile.group, work.slice_c = 0;
#endif
  return work;
}

// The stages that one thread fills, and their phase.
struct Turn {
  i32 stage;
  u32 phase;
};
DEV void advance(Turn& turn) {
  if (++turn.stage == STAGES) turn.stage = 0, turn.phase ^= 1;
}

DEV void fetch(const Pipe& pipe, Turn& turn, const TensorMap* map_a, const TensorMap* map_b, const Work& work) {
  for (i32 at = 0; at < work.depth; at += TILE_K) {
    u8 *stage_a = pipe.stages + turn.stage * STAGE_BYTES, *stage_b = stage_a + BYTES_A;
    u64* full = pipe.full + turn.stage;
    i32 k = work.first_k + at;
    mbar_wait(pipe.empty + turn.stage, turn.phase ^ 1);
    mbar_expect(full, STAGE_BYTES);
#if TRANS_A
    UNROLL for (i32 panel = 0; panel < TILE_M / 64; panel++)
      tma_load_2d(stage_a + panel * PANEL_BYTES, map_a, full, work.row + 64 * panel, k);
#else
    tma_load_2d(stage_a, map_a, full, k, work.row);
#endif
#if TRANS_B
    tma_load_3d(stage_b, map_b, full, k, work.column, work.slice_b);
#else
    UNROLL for (i32 panel = 0; panel < TILE_N / 64; panel++)
      tma_load_3d(stage_b + panel * PANEL_BYTES, map_b, full, work.column + 64 * panel, k, work.slice_b);
#endif
    advance(turn);
  }
}

// Operands of a step of 16, `k` elements into the stage.
DEV u64 operand_a(const u8* tile, i32 k) {
#if TRANS_A
  return desc_sw128_mn(tile + k * 128, PANEL_BYTES);
#else
  return desc_sw128_k(tile + k * 2);
#endif
}
DEV u64 operand_b(const u8* tile, i32 k) {
#if TRANS_B
  return desc_sw128_k(tile + k * 2);
#else
  return desc_sw128_mn(tile + k * 128, PANEL_BYTES);
#endif
}

DEV void clear_rows(u8* panel, i32 first) {
  UNROLL for (i32 at = 0; at < 64; at += 16) {
    i32 row = at + threadIdx.x % 128 / 8;
    if (row >= first) *(Vec4*)(panel + row * 128 + threadIdx.x % 8 * 16) = Vec4{0, 0, 0, 0};
  }
}

// The stage before this turn's may be filled again.
DEV void release_last(const Pipe& pipe, const Turn& turn) {
  if (lane_id() == 0) mbar_arrive(pipe.empty + (turn.stage > 0 ? turn.stage : STAGES) - 1);
}

// The sum over k of the 64 rows of warpgroup `half`. Between two stages `beside` is called, while products run.
template <class Beside>
DEV void multiply(float (&sum)[TILE_N / 2], const Pipe& pipe, Turn& turn, const Work& work, i32 half, Beside beside) {
  bool busy = work.height > 64 * half, begun = false;
  for (i32 left = work.depth; left > 0; left -= TILE_K) {
    u8 *stage_a = pipe.stages + turn.stage * STAGE_BYTES + half * PANEL_BYTES;
    u8 *stage_b = pipe.stages + turn.stage * STAGE_BYTES + BYTES_A;
    mbar_wait(pipe.full + turn.stage, turn.phase);
#if TRANS_A
    if (left < TILE_K) {
      clear_rows(stage_a, left);
#if !TRANS_B
      UNROLL for (i32 panel = 0; panel < TILE_N / 64; panel++)
        if (panel % 2 == half) clear_rows(stage_b + panel * PANEL_BYTES, left);
#endif
      fence_async();
      named_sync(1, 256);
    }
#endif
    if (busy) {
      wgmma_fence();
      UNROLL for (i32 k = 0; k < TILE_K; k += 16)
        wgmma<TILE_N, TRANS_A, !TRANS_B>(sum, operand_a(stage_a, k), operand_b(stage_b, k), begun || k > 0);
      wgmma_commit();
      beside();
      // All but these are done, so the stage before may be filled again.
      wgmma_wait<1>();
    } else {
      beside();
      // A lane that has not seen the stage arrive yet must not find it filled again.
      syncwarp();
    }
    if (begun) release_last(pipe, turn);
    begun = true;
    advance(turn);
  }
  wgmma_wait<0>();
  settle(sum);
  if (begun) release_last(pipe, turn);
}

DEV void add_bias(float (&sum)[TILE_N / 2], const bf16* bias, i32 column, i32 n) {
  i32 x = column + lane_id() % 4 * 2;
  UNROLL for (i32 j = 0; j < TILE_N / 8; j++)
    if (x + 8 * j < n) {
      UNROLL for (i32 e = 0; e < 2; e++) {
        float value = to_f32(bias[x + 8 * j + e]);
        sum[4 * j + e] += value, sum[4 * j + 2 + e] += value;
      }
    }
}

// From registers, 8 rows by 8 columns of a warp at a time; rows from `height` on are not there.
DEV void store_rows(TypeC* c, const float (&sum)[TILE_N / 2], const Work& work, i32 half, i32 m, i32 n,
                    i32 pitch) {
  i32 y = 64 * half + warp_id() % 4 * 16 + lane_id() / 4, x = work.column + lane_id() % 4 * 2;
  UNROLL for (i32 lower = 0; lower < 2; lower++) {
    i32 at = y + 8 * lower;
    if (at >= work.height) continue;
    TypeC* line = c + ((i64)work.slice_c * m + work.row + at) * pitch;
    UNROLL for (i32 j = 0; j < TILE_N / 8; j++)
      if (x + 8 * j < n) {
        Pair* place = (Pair*)(line + x + 8 * j);
        Pair pair;
        UNROLL for (i32 e = 0; e < 2; e++) {
          float value = sum[4 * j + 2 * lower + e];
          pair.value[e] = from_f32<TypeC>(ADD ? to_f32(place->value[e]) + value : value);
        }
        *place = pair;
      }
  }
}

#if BULK_OUT
// Takes a tile's results over. All that was held before has left: of `panels` the place alone is kept.
DEV void hold(Held& held, const float (&sum)[TILE_N / 2], const Work& work, i32 half, i32 n) {
  UNROLL for (i32 i = 0; i < WORDS; i++) {
#if F32_C
    held.word[i] = sum[i];
#else
    held.word[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
#endif
  }
  held.row = work.row + 64 * half, held.column = work.column, held.slice_c = work.slice_c;
  held.panels |= 2 * min_(TILE_N / SLICE, ceil_div(n - work.column, SLICE));
}

// One panel, swizzled as the tensor map has it: the warp's 16 rows.
DEV void fill_panel(u8* panel, const Word (&word)[WORDS]) {
  i32 lane = lane_id(), row0 = warp_id() % 4 * 16;
#if F32_C
  // Of a half warp, rows of one parity write one quarter of the columns and rows of the other another,
  // so that all banks are used.
  bool odd = lane / 4 % 2;
  i32 row = row0 + lane / 4, chunk = (4 * odd + lane % 4 / 2) ^ row % 8;
  UNROLL for (i32 j = 0; j < SLICE / 8; j++)
    UNROLL for (i32 lower = 0; lower < 2; lower++) {
      i32 mine = 4 * j + 2 * lower, other = 4 * (j ^ 2) + 2 * lower;
      Pair* place = (Pair*)(panel + (row + 8 * lower) * 128 + (chunk ^ 2 * j) * 16 + lane % 2 * 8);
      *place = Pair{odd ? word[other] : word[mine], odd ? word[other + 1] : word[mine + 1]};
    }
#else
  i32 row = row0 + lane % 16;
  UNROLL for (i32 j = 0; j < SLICE / 8; j += 2) {
    u32 packed[4] = {word[2 * j], word[2 * j + 1], word[2 * j + 2], word[2 * j + 3]};
    stmatrix_x4(panel + row * 128 + ((j + lane / 16) ^ row % 8) * 16, packed);
  }
#endif
}

// The next panel of what is held, if any, by a bulk copy through one of two panels in turn.
DEV void leave(Held& held, const TensorMap* map_c, u8* panels, i32 half) {
  if (held.panels < 2) return;
  bool leader = threadIdx.x % 128 == 0;
  u8* panel = panels + (2 * half + held.panels % 2) * PANEL_BYTES;
  // The panel is free once the copy before the last has read it.
  if (leader) bulk_wait_read<1>();
  named_sync(2 + half, 128);
  fill_panel(panel, held.word);
  fence_async();
  named_sync(2 + half, 128);
  if (leader) {
#if ADD
    tma_reduce_add_3d(map_c, panel, held.column, held.row, held.slice_c);
#else
    tma_store_3d(map_c, panel, held.column, held.row, held.slice_c);
#endif
    bulk_commit();
  }
  // Registers have no index: what is next moves to where this was.
  UNROLL for (i32 i = PANEL_WORDS; i < WORDS; i++) held.word[i - PANEL_WORDS] = held.word[i];
  held.column += SLICE, held.panels = (held.panels - 2) ^ 1;
}
#endif

KERNEL(THREADS, 1)
grouped_gemm_sm90(GRID_CONST TensorMap map_a, GRID_CONST TensorMap map_b, GRID_CONST TensorMap map_c, TypeC* c,
                  const bf16* bias, const i32* offsets, i32 groups, i32 m, i32 n, i32 k, i32 pitch) {
  DYN_SMEM(shared);
  u8* panels = shared + STAGES * STAGE_BYTES;
  Pipe pipe = {shared, (u64*)(panels + OUT_BYTES), (u64*)(panels + OUT_BYTES) + STAGES};
  i32* starts = (i32*)(pipe.empty + STAGES);
  if (threadIdx.x == 0) {
    for (i32 stage = 0; stage < STAGES; stage++) {
      mbar_init(pipe.full + stage, 1);
      // Every warp that reads it.
      mbar_init(pipe.empty + stage, 8);
    }
    mbar_fence_init();
    tma_prefetch(&map_a), tma_prefetch(&map_b), tma_prefetch(&map_c);
  }
#if TRANS_A
  lay_tiles(starts, offsets, groups, k, [=](i32 count) { return count > 0 ? ceil_div(m, TILE_M) : 0; });
#else
  lay_tiles(starts, offsets, groups, m, [=](i32 count) { return ceil_div(count, TILE_M); });
#endif
  i32 columns = ceil_div(n, TILE_N), tiles = starts[groups] * columns;
  Turn turn = {0, 0};

  if (warp_id() < 4) {
    reg_dec<24>();
    if (threadIdx.x == 0)
      for (i32 index = blockIdx.x; index < tiles; index += gridDim.x)
        fetch(pipe, turn, &map_a, &map_b, work_at(starts, offsets, groups, columns, index, m, k));
  } else {
    reg_inc<240>();
    i32 half = warp_id() / 4 - 1;
#if BULK_OUT
    Held held;
    held.panels = 0;
    auto beside = [&] { leave(held, &map_c, panels, half); };
#else
    auto beside = [] {};
#endif
    for (i32 index = blockIdx.x; index < tiles; index += gridDim.x) {
      Work work = work_at(starts, offsets, groups, columns, index, m, k);
      float sum[TILE_N / 2];
      multiply(sum, pipe, turn, work, half, beside);
      if (work.height <= 64 * half) continue;
      if (bias) add_bias(sum, bias, work.column, n);
#if BULK_OUT
      // Copies end where C does; only groups of rows end inside of it.
      if (TRANS_A || work.height >= 64 * half + 64) {
        while (held.panels > 1) beside();
        hold(held, sum, work, half, n);
        continue;
      }
#endif
      store_rows(c, sum, work, half, m, n, pitch);
    }
#if BULK_OUT
    while (held.panels > 1) beside();
#endif
    // Shared memory is given up only once it has been read.
    if (threadIdx.x % 128 == 0) bulk_wait<0>();
  }
}
EXPORT(grouped_gemm_sm90)
