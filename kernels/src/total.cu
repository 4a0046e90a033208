// Sums over all elements of a tensor, in f64; see total.rs.
//
// -DT        type of the elements
// -DPIECE    elements of one access: 16 bytes, or 1
// -DSQUARED  whether the squares are summed
//
// Floor: the bytes of the tensor, read once. f32 and bf16 are exact in f64 and so are their squares, hence only
// the sums round.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define DEPTH 4

DEV double term(float x) {
  double value = x;
  return SQUARED ? value * value : value;
}

DEV double terms(const Piece<T, PIECE>& piece) {
  float x[PIECE];
  widen(piece, x);
  double sum = term(x[0]);
  UNROLL
  for (int e = 1; e < PIECE; e++) sum += term(x[e]);
  return sum;
}

// partial[block] = sum of the elements that its threads take: which ones depends on `len`, `head` and the number
// of blocks alone.
KERNEL(THREADS, 4) total(const T* x, double* partial, u64 len, i32 head) {
  DYN_SMEM(shared);
  double* sums = (double*)shared;
  u64 step = (u64)gridDim.x * THREADS, i = (u64)blockIdx.x * THREADS + threadIdx.x;
  Flat flat = flat_pass<PIECE>(i, len, head);
  double sum = flat.alone < len ? term(to_f32(x[flat.alone])) : 0.;
  for (; i + (DEPTH - 1) * step < flat.pieces; i += DEPTH * step) {
    Piece<T, PIECE> piece[DEPTH];
    UNROLL
    for (int d = 0; d < DEPTH; d++) piece[d] = load_piece<PIECE>(x + head, i + d * step);
    UNROLL
    for (int d = 0; d < DEPTH; d++) sum += terms(piece[d]);
  }
  for (; i < flat.pieces; i += step) sum += terms(load_piece<PIECE>(x + head, i));
  sums[threadIdx.x] = sum;
  UNROLL
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}
EXPORT(total)
