// Root-mean-square normalization of rows; see rms_norm.rs for the formulas.
//
// -DT       type of x, y, w and their gradients
// -DLANES   threads that share a row: 32, or 256 where rows are wide
// A block of 256 threads takes 256 / LANES rows at a time. Accesses are of VEC elements, 16 bytes, where the host
// found every row aligned for it (-DVEC), else of one.
#include "prelude.cuh"

#define THREADS 256
#define ROWS (THREADS / LANES)
// Rows whose weight gradients one block sums before the blocks are summed in order.
#define BLOCK_ROWS 64

struct alignas(VEC * sizeof(T)) Piece {
  T value[VEC];
};

// Sum over the threads of a row; every one of them gets it. Threads of other rows take part.
DEV float row_sum(float value, float* scratch) {
  value = warp_sum(value);
#if LANES == 32
  return value;
#else
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  float total = 0.f;
  UNROLL for (int warp = 0; warp < LANES / 32; warp++) total += scratch[warp];
  return total;
#endif
}

KERNEL(THREADS, 1) rms_norm_forward(const T* x, const T* w, T* y, float* rstd, int rows, int width, float eps) {
  DYN_SMEM(shared);
  float* scratch = (float*)shared;
  int row = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES, pieces = width / VEC;
  bool here = row < rows;
  const Piece* from = (const Piece*)(x + (u64)row * width);
  float squares = 0.f;
  if (here)
    for (int i = lane; i < pieces; i += LANES) {
      Piece piece = from[i];
      UNROLL for (int e = 0; e < VEC; e++) squares += to_f32(piece.value[e]) * to_f32(piece.value[e]);
    }
  float r = rsqrt_(row_sum(squares, scratch) / width + eps);
  if (!here) return;
  if (lane == 0) rstd[row] = r;
  Piece* to = (Piece*)(y + (u64)row * width);
  for (int i = lane; i < pieces; i += LANES) {
    Piece piece = from[i], weight = ((const Piece*)w)[i];
    UNROLL for (int e = 0; e < VEC; e++) piece.value[e] = from_f32<T>(to_f32(piece.value[e]) * r * to_f32(weight.value[e]));
    to[i] = piece;
  }
}
EXPORT(rms_norm_forward)
