// Threads of one block and plain shared memory; FAULT plants one error.
#include "prelude.cuh"

// y = x reversed, twice through the same shared memory.
KERNEL(128, 1) turn(const float* x, float* y, i32 n) {
  DYN_SMEM(memory);
  float* shared = (float*)memory;
  u32 t = threadIdx.x;
  if (FAULT != 3 || t != 5) shared[t] = 0.f;
  __syncthreads();
#if FAULT == 2
  shared[t] = x[t == 17 ? n : t];
#else
  if (FAULT != 3 || t != 5) shared[t] = x[t];
#endif
#if FAULT != 1
  __syncthreads();
#endif
#if FAULT == 4
  y[t] = shared[t == 3 ? 128 : 127 - t];
#elif FAULT == 5
  named_sync(1, t < 64 ? 64 : 128);
  y[t] = shared[127 - t];
#elif FAULT == 6
  if (t < 100) __syncthreads();
  named_sync(1, 128);
  y[t] = shared[127 - t];
#elif FAULT == 7
  y[t] = t < 16 ? shfl(shared[127 - t], lane_id()) : (float)ballot(true);
#elif FAULT == 8
  Vec4 four = *(const Vec4*)(shared + t % 64 + 1);
  y[t] = f32_of_bits(four.x ^ four.w);
#elif FAULT == 9
  // A shuffle orders no memory.
  shared[t] = shared[t] + 1.f;
  float own = shfl(shared[t], lane_id());
  y[t] = shared[t ^ 1] + own;
#elif FAULT == 10
  y[t] = shared[127 - t];
  if (t == 0) y[n] = 0.f;
#else
  y[t] = shared[127 - t];
#endif
}
EXPORT(turn)

// y = x by way of cp.async.
KERNEL(32, 1) copy(const float* x, float* y) {
  DYN_SMEM(shared);
  u32 t = threadIdx.x;
  cp_async16(shared + 16 * t, x + 4 * t, t == 31 ? 4 : 16);
  cp_async_commit();
#if FAULT != 1
  cp_async_wait<0>();
#endif
#if FAULT != 2
  syncwarp();
#endif
#if FAULT == 1
  u32 from = t;
#else
  u32 from = 31 - t;
#endif
  ((Vec4*)y)[from] = ((Vec4*)shared)[from];
#if FAULT == 3
  u32 r[4];
  ldmatrix_x4(r, shared + 16 * t + 2);
#endif
}
EXPORT(copy)

// y = 2 x: half the block hands to the other half through a named barrier, and is told through another
// when it may go on.
KERNEL(128, 1) hand_over(const float* x, float* y, i32 rounds) {
  DYN_SMEM(memory);
  float* shared = (float*)memory;
  u32 t = threadIdx.x % 64;
  for (i32 round = 0; round < rounds; round++) {
    if (threadIdx.x < 64) {
      if (round > 0) named_sync(2, 128);
      shared[t] = x[64 * round + t];
#if FAULT != 1
      named_arrive(1, 128);
#endif
    } else {
#if FAULT != 2
      named_sync(1, 128);
#endif
      y[64 * round + t] = 2.f * shared[63 - t];
      if (FAULT != 3 && round + 1 < rounds) named_arrive(2, 128);
    }
  }
}
EXPORT(hand_over)
