// The map of a permutation by a stable counting sort of the slots by expert, and the choices that a limit of
// rows an expert leaves; see permute.rs.
//
// Every block owns a contiguous chunk of slots. `permute_count` leaves the histogram of each chunk in a
// table [blocks, experts]; `permute_place` sums it to the first row of each expert in this chunk and
// numbers the chunk's slots in order. Integers only, and no order of blocks matters.
#include "prelude.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
// Parts into which the blocks of the table are cut to be summed.
#define PARTS 4

// Set bits of a word.
DEV u32 ones(u32 x) {
  x -= (x >> 1) & 0x55555555u;
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return x * 0x01010101u >> 24;
}

// Before rows are placed all `rows` are without a slot; 0 where each will have one.
KERNEL(THREADS, 2) permute_count(const i32* ids, i32* table, i32* slot_of, i32* token_of, i32 slots, i32 first_expert,
                                 i32 experts, i32 chunk, i32 rows) {
  DYN_SMEM(shared);
  i32* counts = (i32*)shared;
  i32 thread = threadIdx.x, start = blockIdx.x * chunk, end = min_(slots, start + chunk);
  for (i32 e = thread; e < experts; e += THREADS) counts[e] = 0;
  for (i32 row = blockIdx.x * THREADS + thread; row < rows; row += gridDim.x * THREADS) slot_of[row] = token_of[row] = -1;
  __syncthreads();
  for (i32 slot = start + thread; slot < end; slot += THREADS) {
    u32 id = ids[slot] - first_expert;
    if (id < (u32)experts) atomic_add(&counts[id], 1);
  }
  __syncthreads();
  for (i32 e = thread; e < experts; e += THREADS) table[(u64)blockIdx.x * experts + e] = counts[e];
}
EXPORT(permute_count)

// An id that is no expert's has no row. Every expert has `each` rows, or where that is 0 as many as slots; the
// last one also those up to `rows`, or none more where that is 0.
KERNEL(THREADS, 2) permute_place(const i32* ids, const i32* table, i32* row_of, i32* slot_of, i32* token_of, i32* offsets,
                                 i32 slots, i32 first_expert, i32 experts, i32 chunk, i32 topk, i32 each, i32 rows) {
  DYN_SMEM(shared);
  i32* next = (i32*)shared;       // [experts] the row of the next slot of each expert
  i32* counts = next + experts;   // [WARPS, experts]
  i32 thread = threadIdx.x, warp = warp_id(), lane = lane_id();
  i32 blocks = gridDim.x, block = blockIdx.x;

  // 1. The rows of each expert in the chunks before this one, and in all.
  for (i32 item = thread; item < PARTS * experts; item += THREADS) {
    i32 expert = item % experts, part = item / experts, before = 0, all = 0;
    i32 last = blocks * (part + 1) / PARTS;
    for (i32 b = blocks * part / PARTS; b < last; b++) {
      i32 count = table[(u64)b * experts + expert];
      all += count;
      before += b < block ? count : 0;
    }
    counts[item] = before;
    counts[PARTS * experts + item] = all;
  }
  __syncthreads();
  for (i32 e = thread; e < experts; e += THREADS) {
    i32 before = 0, all = 0;
    UNROLL for (i32 part = 0; part < PARTS; part++) {
      before += counts[part * experts + e];
      all += counts[(PARTS + part) * experts + e];
    }
    next[e] = before;
    counts[2 * PARTS * experts + e] = each > 0 ? each : all;
  }
  __syncthreads();

  // 2. The first row of each expert: a scan over the experts, a run of them to a lane.
  if (warp == 0) {
    const i32* all = counts + 2 * PARTS * experts;
    i32 run = (experts + 31) / 32, first = min_(lane * run, experts), last = min_(first + run, experts), sum = 0;
    for (i32 e = first; e < last; e++) sum += all[e];
    i32 start = sum;
    UNROLL for (i32 distance = 1; distance < 32; distance *= 2) {
      i32 other = shfl_up(start, distance);
      if (lane >= distance) start += other;
    }
    if (block == 0 && lane == 31) offsets[experts] = rows > 0 ? rows : start;
    start -= sum;
    for (i32 e = first; e < last; e++) {
      next[e] += start;
      if (block == 0) offsets[e] = start;
      start += all[e];
    }
  }
  __syncthreads();

  // 3. The slots of the chunk, a warp's worth of them at a time.
  i32 begin = block * chunk, end = min_(slots, begin + chunk);
  for (i32 tile = begin; tile < end; tile += THREADS) {
    for (i32 i = thread; i < WARPS * experts; i += THREADS) counts[i] = 0;
    __syncthreads();
    i32 slot = tile + thread;
    u32 id = slot < end ? ids[slot] - first_expert : ~0u;
    bool here = id < (u32)experts;
    // The lanes with the same expert, one bit of its number after the other.
    u32 same = ballot(here);
    for (u32 bit = 1; bit < (u32)experts; bit *= 2) {
      u32 with = ballot((id & bit) != 0);
      same &= (id & bit) != 0 ? with : ~with;
    }
    u32 rank = ones(same & ((1u << lane) - 1));
    if (here && rank == 0) counts[warp * experts + id] = ones(same);
    __syncthreads();
    for (i32 e = thread; e < experts; e += THREADS) {
      i32 row = next[e];
      UNROLL for (i32 w = 0; w < WARPS; w++) {
        i32 count = counts[w * experts + e];
        counts[w * experts + e] = row;
        row += count;
      }
      next[e] = row;
    }
    __syncthreads();
    if (here) {
      i32 row = counts[warp * experts + id] + rank;
      row_of[slot] = row;
      slot_of[row] = slot;
      token_of[row] = slot / topk;
    } else if (slot < end) {
      row_of[slot] = -1;
    }
    __syncthreads();
  }
}
EXPORT(permute_place)

// The choices that a limit of rows an expert leaves, -1 for the others: the first slots of each, or those of the
// largest probabilities, the first of equal ones. A thread has a slot and counts those that are before it.
KERNEL(THREADS, 2) permute_limit(const i32* ids, const float* probs, const i32* row_of, const i32* slot_of,
                                 const i32* offsets, i32* kept, i32 slots, i32 capacity) {
  i32 slot = blockIdx.x * THREADS + threadIdx.x;
  if (slot >= slots) return;
  i32 id = ids[slot], start = offsets[id], end = offsets[id + 1], before = row_of[slot] - start;
  if (probs && end - start > capacity) {
    float own = probs[slot];
    before = 0;
    for (i32 row = start; row < end; row++) {
      i32 other = slot_of[row];
      float prob = probs[other];
      before += prob > own || (prob == own && other < slot);
    }
  }
  kept[slot] = before < capacity ? id : -1;
}
EXPORT(permute_limit)
