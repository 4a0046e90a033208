// Numbers that stay on the device; see scalars.rs. An f64 of the host comes as two floats whose sum it is.
#include "prelude.cuh"

#define THREADS 256

// *dst += factor * (the sum of `count` partial sums), rounded once. Which thread takes which depends on their
// number alone.
KERNEL(THREADS, 1) scalars_add(const double* partial, i32 count, float* dst, float factor_high, float factor_low) {
  DYN_SMEM(shared);
  double* sums = (double*)shared;
  double sum = 0.;
  for (i32 i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
  sums[threadIdx.x] = sum;
  UNROLL
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *dst = (float)(*dst + ((double)factor_high + factor_low) * sums[0]);
}
EXPORT(scalars_add)

// *factor = scale * min(1, limit / (norm + 1e-6)), of the norm whose square is given. One that is not a number
// clips nothing, as on the host.
KERNEL(32, 1) scalars_clip(const float* square, float scale_high, float scale_low, float limit_high, float limit_low,
                           float* factor) {
  if (threadIdx.x > 0) return;
  double norm = sqrt_(*square), limit = (double)limit_high + limit_low;
  double clip = limit / (norm + 1e-6);
  *factor = (float)(((double)scale_high + scale_low) * (clip < 1. ? clip : 1.));
}
EXPORT(scalars_clip)
