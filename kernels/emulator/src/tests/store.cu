// Tiles of 32 rows of 64 bf16, made in shared memory and stored in bulk; FAULT plants one error.
#include "prelude.cuh"

KERNEL(128, 1) store(GRID_CONST TensorMap map, i32 rounds) {
  DYN_SMEM(shared);
  u16* tile = (u16*)shared;
  for (i32 round = 0; round < rounds; round++) {
    for (u32 i = threadIdx.x; i < 32 * 64; i += 128) tile[i] = (u16)(round * 2048 + i);
#if FAULT != 1
    fence_async();
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
#if FAULT == 4
      tma_store_2d(&map, tile, 4, round * 32);
#elif FAULT == 5
      tma_store_2d(&map, tile, 0, round * 32 - 1);
#else
      tma_store_2d(&map, tile, 0, round * 32);
#endif
      bulk_commit();
#if FAULT == 2
      if (round + 1 < rounds) bulk_wait_read<0>();
#elif FAULT != 3
      bulk_wait_read<0>();
#endif
    }
    __syncthreads();
  }
#if FAULT == 3
  if (threadIdx.x == 0) bulk_wait<0>();
#endif
}
EXPORT(store)
