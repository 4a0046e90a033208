// Biases of experts on rows sorted by expert; see expert_bias.rs for the formulas.
//
// -DT    type of the rows and the biases
// -DVEC  elements of one access: 16 bytes where the host found every row aligned for it, else one
// `offsets` has where the rows of each expert start and where the last ones end. `pieces` is the width of a row in
// accesses. `probs` may be none.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

// The expert of a row that has one: the last to start at or before it.
DEV i32 expert_of(const i32* offsets, i32 experts, i32 row) {
  i32 first = 0, end = experts;
  while (end - first > 1) {
    i32 middle = (first + end) / 2;
    if (offsets[middle] <= row)
      first = middle;
    else
      end = middle;
  }
  return first;
}

// y += p bias. A warp has a row.
KERNEL(THREADS, 4) expert_bias_add(T* y, const T* bias, const float* probs, const i32* offsets, i32 rows, i32 pieces,
                                   i32 experts) {
  i32 row = blockIdx.x * WARPS + warp_id();
  if (row >= rows || row >= offsets[experts]) return;
  float prob = probs ? probs[row] : 1.f;
  u64 own = (u64)row * pieces, of_bias = (u64)expert_of(offsets, experts, row) * pieces;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float sum[VEC], add[VEC];
    widen(load_piece<VEC>((const T*)y, own + i), sum);
    widen(load_piece<VEC>(bias, of_bias + i), add);
    UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = fma_(prob, add[e], sum[e]);
    store_piece<VEC>(y, own + i, sum);
  }
}
EXPORT(expert_bias_add)

// dbias += the sum of p dy over the rows of expert blockIdx.y. A warp takes every eighth row of 32 pieces, and then come
// the warps in order.
KERNEL(THREADS, 4) expert_bias_sums(const T* dy, const float* probs, const i32* offsets, float* dbias, i32 pieces) {
  DYN_SMEM(shared);
  float* sums = (float*)shared;
  i32 expert = blockIdx.y, piece = blockIdx.x * 32 + lane_id(), end = offsets[expert + 1];
  float sum[VEC] = {};
  if (piece < pieces) {
    _Pragma("unroll 4")
    for (i32 row = offsets[expert] + warp_id(); row < end; row += WARPS) {
      float value[VEC], prob = probs ? probs[row] : 1.f;
      widen(load_piece<VEC>(dy + (u64)row * pieces * VEC, piece), value);
      UNROLL for (int e = 0; e < VEC; e++) sum[e] = fma_(prob, value[e], sum[e]);
    }
  }
  UNROLL for (int e = 0; e < VEC; e++) sums[(warp_id() * VEC + e) * 32 + lane_id()] = sum[e];
  __syncthreads();
  // Of the columns of the block, one a thread.
  i32 column = threadIdx.x / VEC, e = threadIdx.x % VEC, width = pieces * VEC;
  if (threadIdx.x >= 32 * VEC || blockIdx.x * 32 * VEC + threadIdx.x >= width) return;
  float total = 0.f;
  UNROLL for (u32 warp = 0; warp < WARPS; warp++) total += sums[(warp * VEC + e) * 32 + column];
  dbias[(u64)expert * width + blockIdx.x * 32 * VEC + threadIdx.x] += total;
}
EXPORT(expert_bias_sums)

// dprobs = the inner product of dy and the bias. A warp has a row.
KERNEL(THREADS, 4) expert_bias_probs(const T* dy, const T* bias, const i32* offsets, float* dprobs, i32 rows, i32 pieces,
                                     i32 experts) {
  i32 row = blockIdx.x * WARPS + warp_id();
  if (row >= rows || row >= offsets[experts]) return;
  u64 own = (u64)row * pieces, of_bias = (u64)expert_of(offsets, experts, row) * pieces;
  float product = 0.f;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float upstream[VEC], value[VEC];
    widen(load_piece<VEC>(dy, own + i), upstream);
    widen(load_piece<VEC>(bias, of_bias + i), value);
    UNROLL for (i32 e = 0; e < VEC; e++) product = fma_(upstream[e], value[e], product);
  }
  product = warp_sum(product);
  if (lane_id() == 0) dprobs[row] = product;
}
EXPORT(expert_bias_probs)
