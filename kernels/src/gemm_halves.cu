// A matrix of f32 as two of bf16 side by side: what rounding to bf16 keeps of every element, and what it drops, rounded in
// turn. Their sum has 16 bits of the 24. See gemm/cuda/halves.rs.
//
// -DVEC  elements of one access: 4 where the host found every row aligned for it, else one
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256

// `x` is rows of `pieces` accesses, `all` in total.
KERNEL(THREADS, 4) gemm_halves(const float* x, bf16* to, u64 all, i32 pieces) {
  u64 stride = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < all; i += stride) {
    float value[VEC], rest[VEC];
    widen(load_piece<VEC>(x, i), value);
    UNROLL for (i32 e = 0; e < VEC; e++) {
      float kept = to_f32(from_f32<bf16>(value[e]));
      // Of what is not finite nothing is left: it would be no number.
      rest[e] = kept - kept == 0.f ? value[e] - kept : 0.f;
      value[e] = kept;
    }
    u64 place = i / pieces * 2 * pieces + i % pieces;
    store_piece<VEC>(to, place, value);
    store_piece<VEC>(to, place + pieces, rest);
  }
}
EXPORT(gemm_halves)
