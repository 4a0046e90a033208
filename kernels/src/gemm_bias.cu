// The sums of columns that are the gradient of a bias, over blocks of rows; see gemm.rs. The blocks are then summed
// as those of a norm's weight (rms_norm.cu).
//
// -DT    type of the rows
// -DVEC  columns of one access: 16 bytes of T, or 1 where some row is not aligned for that
//
// Floor: R rows of n columns are read once, R n T bytes; the sums of blocks, at most 528 of them, are written and read
// again, 8 n bytes each, most of it in the cache of level two.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define WARPS 8

// partial[blockIdx.y] [width]: the sum of each column over `rows_per_block` rows. A warp takes every eighth row of 32
// pieces, and then come the warps in order.
KERNEL(32 * WARPS, 2)
gemm_bias_sums(const T* dy, float* partial, i32 rows, i32 width, i32 pitch, i32 rows_per_block) {
  DYN_SMEM(shared);
  float* sums = (float*)shared;
  i32 piece = blockIdx.x * 32 + lane_id(), first = blockIdx.y * rows_per_block;
  i32 end = min_(first + rows_per_block, rows);
  float sum[VEC] = {};
  if (piece * VEC < width) {
    _Pragma("unroll 4")
    for (i32 row = first + warp_id(); row < end; row += WARPS) {
      float value[VEC];
      widen(load_piece<VEC>(dy + (u64)row * pitch, piece), value);
      UNROLL
      for (int e = 0; e < VEC; e++) sum[e] += value[e];
    }
  }
  UNROLL
  for (int e = 0; e < VEC; e++) sums[(warp_id() * VEC + e) * 32 + lane_id()] = sum[e];
  __syncthreads();
  // Of the columns of the block, one a thread.
  i32 column = threadIdx.x / VEC, e = threadIdx.x % VEC;
  if (threadIdx.x >= 32 * VEC || blockIdx.x * 32 * VEC + threadIdx.x >= width) return;
  float total = 0.f;
  UNROLL
  for (u32 warp = 0; warp < WARPS; warp++) total += sums[(warp * VEC + e) * 32 + column];
  partial[(u64)blockIdx.y * width + blockIdx.x * 32 * VEC + threadIdx.x] = total;
}
EXPORT(gemm_bias_sums)
