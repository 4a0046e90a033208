// Sums over all elements of a tensor, in f64; see total.rs.
//
// -DT      type of the elements
// -DPIECE  elements of one access: 16 bytes, or 1
// -DPOWER  1: the elements are summed; 2: their squares; 0: their products with those of y
//
// Floor: the bytes of what is read, once. f32 and bf16 are exact in f64 and so are their products, hence only the
// sums round.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define DEPTH 4

DEV double term(float x, float y) {
  if (POWER == 1) return x;
  return (double)x * (POWER == 2 ? x : y);
}

DEV double terms(const Piece<T, PIECE>& x_piece, const Piece<T, PIECE>& y_piece) {
  float x[PIECE], y[PIECE];
  widen(x_piece, x);
  if (POWER == 0) widen(y_piece, y);
  double sum = term(x[0], y[0]);
  UNROLL
  for (int e = 1; e < PIECE; e++) sum += term(x[e], y[e]);
  return sum;
}

// partial[block] = sum of the elements that its threads take: which ones depends on `len`, `head` and the number
// of blocks alone.
KERNEL(THREADS, 4) total(const T* x, const T* y, double* partial, u64 len, i32 head) {
  DYN_SMEM(shared);
  double* sums = (double*)shared;
  u64 step = (u64)gridDim.x * THREADS, i = (u64)blockIdx.x * THREADS + threadIdx.x;
  Flat flat = flat_pass<PIECE>(i, len, head);
  u64 alone = flat.alone;
  double sum = 0.;
  if (alone < len) sum = term(to_f32(x[alone]), POWER == 0 ? to_f32(y[alone]) : 0.f);
  for (; i + (DEPTH - 1) * step < flat.pieces; i += DEPTH * step) {
    Piece<T, PIECE> x_piece[DEPTH], y_piece[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++) {
      x_piece[d] = load_piece<PIECE>(x + head, i + d * step);
      if (POWER == 0) y_piece[d] = load_piece<PIECE>(y + head, i + d * step);
    }
    UNROLL
    for (int d = 0; d < DEPTH; d++) sum += terms(x_piece[d], y_piece[d]);
  }
  for (; i < flat.pieces; i += step) {
    Piece<T, PIECE> x_piece = load_piece<PIECE>(x + head, i), y_piece;
    if (POWER == 0) y_piece = load_piece<PIECE>(y + head, i);
    sum += terms(x_piece, y_piece);
  }
  sums[threadIdx.x] = sum;
  UNROLL
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}
EXPORT(total)
