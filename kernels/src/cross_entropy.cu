// Softmax cross entropy over rows of logits, in steps; see cross_entropy.rs.
//
// -DT      type of the logits
// -DPIECE  elements of 16 bytes
//
// Floors, bytes of device memory for R rows of V: statistics reads R V T, finish reads and writes
// 2 R V T; what they have for a row alone is a few words. One block a row, which is read from the first place
// aligned to 16 bytes on wherever it starts; a thread has DEPTH pieces in flight. exp(x) is 2^(x log2 e), one
// instruction of the special function units: at two bytes a logit these are two thirds busy when memory is full.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define DEPTH 4
#define LOG2_E 1.4426950408889634f

// exp(x) for x <= 0.
DEV float exp_of(float x) { return exp2_(x * LOG2_E); }

DEV float minus_infinity() { return f32_of_bits(0xff800000u); }

// Elements of a row before its first aligned piece.
DEV i32 head_of(const T* row, i32 vocab) {
  return min_((i32)((16 - ((u64)row & 15)) % 16 / sizeof(T)), vocab);
}

// Gives `f` all elements of the thread's share of a row, PIECE at a time; minus infinity for none.
template <class F>
DEV void each(const T* row, i32 vocab, F f) {
  i32 head = head_of(row, vocab);
  Flat flat = flat_pass<PIECE>(threadIdx.x, vocab, head);
  if (flat.alone < vocab) {
    float value[PIECE];
    UNROLL
    for (int e = 0; e < PIECE; e++) value[e] = e == 0 ? to_f32(row[flat.alone]) : minus_infinity();
    f(value);
  }
  for (u32 first = threadIdx.x; first < flat.pieces; first += DEPTH * THREADS) {
    Piece<T, PIECE> piece[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++)
      if (first + d * THREADS < flat.pieces) piece[d] = load_piece<PIECE>(row + head, first + d * THREADS);
    UNROLL
    for (int d = 0; d < DEPTH; d++) {
      if (first + d * THREADS >= flat.pieces) continue;
      float value[PIECE];
      widen(piece[d], value);
      f(value);
    }
  }
}

DEV float largest(const float (&value)[PIECE]) {
  float top = value[0];
  UNROLL
  for (int e = 1; e < PIECE; e++) top = max_(top, value[e]);
  return top;
}

// Sum of exp(value - top).
DEV float exponentials(const float (&value)[PIECE], float top) {
  float sum = exp_of(value[0] - top);
  UNROLL
  for (int e = 1; e < PIECE; e++) sum += exp_of(value[e] - top);
  return sum;
}

// Where a target is among this rank's entries; `vocab` or more where it is not.
DEV u32 place_of(i32 target, i32 vocab_start) { return (u32)target - (u32)vocab_start; }

// The largest logit and the sum of exp(logit - largest) in one read: a thread's sum is rescaled where it meets a
// larger one (Milakov and Gimelshein 2018, arXiv 1805.02867).
KERNEL(THREADS, 4) cross_entropy_statistics(const T* logits, float* top, float* sum_exp, i32 vocab) {
  DYN_SMEM(shared);
  float most = minus_infinity(), sum = 0.f;
  each(logits + (u64)blockIdx.x * vocab, vocab, [&](const float (&value)[PIECE]) {
    float larger = max_(most, largest(value));
    // All so far may be minus infinity, which add nothing.
    float from = larger == minus_infinity() ? 0.f : larger;
    sum = sum * exp_of(most - from) + exponentials(value, from);
    most = larger;
  });
  float all = block_max(most, (float*)shared);
  sum = block_sum(sum == 0.f ? 0.f : sum * exp_of(most - all), (float*)shared);
  if (threadIdx.x > 0) return;
  top[blockIdx.x] = all;
  sum_exp[blockIdx.x] = sum;
}
EXPORT(cross_entropy_statistics)

// Takes sums over this rank's entries from their own largest logit to that of the group. One thread a row.
KERNEL(THREADS, 4)
cross_entropy_rebase(const T* logits, const float* own_top, const float* own_sum, const float* top,
                     const i32* targets, float* sum_exp, float* target, i32 rows, i32 vocab_start, i32 vocab) {
  i32 row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  u32 place = place_of(targets[row], vocab_start);
  sum_exp[row] = own_sum[row] * exp_of(own_top[row] - top[row]);
  target[row] = place < (u32)vocab ? to_f32(logits[(u64)row * vocab + place]) - top[row] : 0.f;
}
EXPORT(cross_entropy_rebase)

// What replaces a logit other than the target's.
DEV float gradient(float logit, float top, float factor) {
  return factor == 0.f ? 0.f : exp_of(logit - top) * factor;
}

KERNEL(THREADS, 4)
cross_entropy_finish(T* logits, const float* top, const float* sum_exp, const float* target, const i32* targets,
                     float* losses, i32 vocab_start, i32 vocab, float scale) {
  i32 id = targets[blockIdx.x];
  T* row = logits + (u64)blockIdx.x * vocab;
  float most = top[blockIdx.x], sum = sum_exp[blockIdx.x], factor = id < 0 ? 0.f : scale / sum;
  u32 place = place_of(id, vocab_start);
  bool has = id >= 0 && place < (u32)vocab;
  float logit = has ? to_f32(row[place]) : 0.f;
  // The target's logit is read before it is replaced.
  __syncthreads();
  i32 head = head_of(row, vocab);
  Flat flat = flat_pass<PIECE>(threadIdx.x, vocab, head);
  if (flat.alone < vocab) row[flat.alone] = from_f32<T>(gradient(to_f32(row[flat.alone]), most, factor));
  for (u32 first = threadIdx.x; first < flat.pieces; first += DEPTH * THREADS) {
    Piece<T, PIECE> piece[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++)
      if (first + d * THREADS < flat.pieces) piece[d] = load_piece<PIECE>((const T*)row + head, first + d * THREADS);
    UNROLL
    for (int d = 0; d < DEPTH; d++) {
      if (first + d * THREADS >= flat.pieces) continue;
      float value[PIECE];
      widen(piece[d], value);
      UNROLL
      for (int e = 0; e < PIECE; e++) value[e] = gradient(value[e], most, factor);
      store_piece(row + head, first + d * THREADS, value);
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  losses[blockIdx.x] = id < 0 ? 0.f : log_(sum) - target[blockIdx.x];
  if (has) row[place] = from_f32<T>(gradient(logit, most, factor) - scale);
}
EXPORT(cross_entropy_finish)
