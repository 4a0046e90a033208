// Rows of a table by token id, and the sums of their gradients in token order; see embedding.rs.
//
// -DT     type of the table and of y, or of dy
// -DGRAD  type of the table's gradient
// -DVEC   elements of one access: 16 bytes of T, or 1
//
// Floors, bytes of device memory for n tokens of h with u distinct ids in the table: forward reads u h T at least (rows
// come again from cache) and writes n h T; backward reads n h T and updates 2 u h GRAD.
//
// Backward must add the rows of equal ids in token order. The tokens are put in order of id first, 8 bytes a token of
// workspace and no more traffic than that and the ids (which lie in cache) take: `embedding_order` is a stable
// counting sort in one launch. Each of its blocks owns the ids of one residue, reads all ids, counts how many come
// before its own and so knows where they go without asking another block. Sorting rows of dy, or adding with
// atomics, would move far more.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

// Row of the table for an id; not below `vocab` where the table has none.
DEV u32 table_row(i32 id, i32 vocab_start) { return (u32)id - (u32)vocab_start; }

// One block a token.
KERNEL(256, 4)
embedding_forward(const i32* ids, const T* table, T* y, i32 vocab_start, i32 vocab, i32 width) {
  u32 row = table_row(ids[blockIdx.x], vocab_start);
  const T* from = table + (u64)row * width;
  T* to = y + (u64)blockIdx.x * width;
  for (u32 i = threadIdx.x; i < width / VEC; i += blockDim.x) {
    Piece<T, VEC> piece = {};
    if (row < (u32)vocab) piece = load_piece<VEC>(from, i);
    ((Piece<T, VEC>*)to)[i] = piece;
  }
}
EXPORT(embedding_forward)

// A token whose row the table has.
struct alignas(8) Entry {
  i32 row, token;
};

#define WARPS 8
// Ids that a lane reads at once.
#define DEPTH 4

DEV i32 ones(u32 bits) {
  bits -= bits >> 1 & 0x55555555;
  bits = (bits & 0x33333333) + (bits >> 2 & 0x33333333);
  return ((bits + (bits >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24;
}

// What a warp does with its share of the tokens, 32 at a time in order: `f(token, row)`, row `vocab` or more for none.
template <class F>
DEV void each_token(const i32* ids, i32 tokens, i32 vocab_start, F f) {
  i32 step = 32 * DEPTH, share = (tokens + WARPS * step - 1) / (WARPS * step) * step;
  i32 first = warp_id() * share, end = min_(first + share, tokens);
  for (i32 base = first + lane_id(); base - (i32)lane_id() < end; base += step) {
    u32 row[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++) row[d] = base + 32 * d < end ? table_row(ids[base + 32 * d], vocab_start) : ~0u;
    UNROLL
    for (int d = 0; d < DEPTH; d++) f(base + 32 * d, row[d]);
  }
}

// order[..] = the tokens whose rows the table has, sorted by row % buckets (a power of two), row, token. The rest of
// `order` stays as it was. A block's rows number `rows`, a warp's counters of them lie in shared memory.
KERNEL(32 * WARPS, 1)
embedding_order(const i32* ids, Entry* order, i32 tokens, i32 vocab_start, i32 vocab, i32 rows, i32 shift) {
  DYN_SMEM(shared);
  i32* scratch = (i32*)shared;
  // next[row][warp]: first how many such tokens a warp has, then where its next one goes.
  i32* next = scratch + 32;
  u32 bucket = blockIdx.x, mask = (1u << shift) - 1;
  i32 counters = rows * WARPS;
  for (i32 i = threadIdx.x; i < counters; i += 32 * WARPS) next[i] = 0;
  __syncthreads();
  i32 below = 0;
  each_token(ids, tokens, vocab_start, [&](i32, u32 row) {
    if (row >= (u32)vocab) return;
    below += (row & mask) < bucket;
    if ((row & mask) == bucket) atomic_add(&next[(row >> shift) * WARPS + warp_id()], 1);
  });
  below = block_sum(below, scratch);
  // Running sums: every thread over a stretch of counters, the threads of a warp, the warps.
  i32 stretch = (counters + 32 * WARPS - 1) / (32 * WARPS);
  i32 first = threadIdx.x * stretch, end = min_(first + stretch, counters), sum = 0;
  for (i32 i = first; i < end; i++) sum += next[i];
  i32 running = sum;
  UNROLL
  for (u32 distance = 1; distance < 32; distance *= 2) {
    i32 earlier = shfl_up(running, distance);
    if (lane_id() >= distance) running += earlier;
  }
  if (lane_id() == 31) scratch[warp_id()] = running;
  __syncthreads();
  i32 start = below + running - sum;
  for (u32 warp = 0; warp < warp_id(); warp++) start += scratch[warp];
  for (i32 i = first; i < end; i++) {
    i32 count = next[i];
    next[i] = start;
    start += count;
  }
  __syncthreads();
  each_token(ids, tokens, vocab_start, [&](i32 token, u32 row) {
    bool mine = row < (u32)vocab && (row & mask) == bucket;
    u32 same = ballot(mine);
    if (same == 0) return;
    u32 own = row >> shift;
    for (i32 bit = 1; bit < rows; bit *= 2) {
      u32 with = ballot((own & bit) != 0);
      same &= own & bit ? with : ~with;
    }
    i32* place = &next[own * WARPS + warp_id()];
    i32 at = mine ? *place + ones(same & ((1u << lane_id()) - 1)) : 0;
    syncwarp();
    bool last = same >> lane_id() == 1;
    if (mine && last) *place = at + 1;
    syncwarp();
    if (mine) order[at] = Entry{(i32)row, token};
  });
}
EXPORT(embedding_order)

// Pieces of dy that a thread has in flight.
#define BATCH 8

// dtable[row] += the rows of dy of its tokens, in order. One block for every place in `order` and 256 pieces of the width;
// the block at a row's first place works, the others have nothing to do.
KERNEL(256, 3)
embedding_backward(const T* dy, const Entry* order, GRAD* dtable, i32 tokens, i32 width) {
  i32 at = blockIdx.x, row = order[at].row, before = at > 0 ? order[at - 1].row : -1;
  if (row < 0 || row == before) return;
  u32 i = blockIdx.y * blockDim.x + threadIdx.x;
  bool here = i < width / VEC;
  GRAD* out = dtable + (u64)row * width;
  float sum[VEC] = {};
  if (here) widen(load_piece<VEC>((const GRAD*)out, i), sum);
  i32 count = 32;
  for (i32 base = at; count == 32; base += 32) {
    i32 place = base + lane_id();
    Entry entry = place < tokens ? order[place] : Entry{-1, 0};
    // Equal rows are neighbours, so those of this row come first.
    count = ones(ballot(entry.row == row));
    for (i32 j = 0; j < count; j += BATCH) {
      Piece<T, VEC> piece[BATCH];
      UNROLL
      for (i32 b = 0; b < BATCH; b++) {
        i32 token = shfl(entry.token, j + b);
        if (here && j + b < count) piece[b] = load_piece<VEC>(dy + (u64)token * width, i);
      }
      UNROLL
      for (i32 b = 0; b < BATCH; b++) {
        if (!here || j + b >= count) continue;
        float value[VEC];
        widen(piece[b], value);
        UNROLL
        for (int e = 0; e < VEC; e++) sum[e] += value[e];
      }
    }
  }
  if (here) store_piece(out, i, sum);
}
EXPORT(embedding_backward)
