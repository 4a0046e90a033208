// Blocks of one launch; FAULT plants one error. The last block to finish adds up what all wrote.
#include "prelude.cuh"

KERNEL(64, 1) total(const i32* x, i32* partial, u32* finished, i32* sum) {
  DYN_SMEM(memory);
  i32* shared = (i32*)memory;
  i32 own = block_sum(x[blockIdx.x * 64 + threadIdx.x], shared);
  u32 before = 0;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = own;
#if FAULT != 1
    thread_fence();
#endif
    before = atomic_add(finished, 1u);
#if FAULT != 2
    thread_fence();
#endif
    shared[0] = before;
  }
#if FAULT == 3
  if (threadIdx.x == 1) *sum = own;
#endif
  __syncthreads();
  if (shared[0] + 1 != gridDim.x) return;
  i32 all = 0;
  for (u32 i = threadIdx.x; i < gridDim.x; i += 64) all += partial[i];
  __syncthreads();
  all = block_sum(all, shared);
  if (threadIdx.x == 0) {
    *sum = all;
    *finished = 0;
  }
}
EXPORT(total)
