// Blocks copy in bulk what was written to device memory by plain stores: of a tile of their own, and of one that the block
// before handed over; FAULT plants one error.
#include "prelude.cuh"

constexpr i32 TILE = 8 * 64;

// `turn`: a count of tickets, and whose turn it is to hand over.
KERNEL(32, 1) relay(GRID_CONST TensorMap own_map, GRID_CONST TensorMap handed_map, u16* own, u16* handed, u32* turn, u16* out) {
  DYN_SMEM(shared);
  u16* tiles = (u16*)shared;
  u64* bar = (u64*)(shared + 4 * TILE);
  u32 block = lane_id() == 0 ? atomic_add(turn, 1u) : 0;
  block = shfl(block, 0);
  if (lane_id() == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
  }
  syncwarp();

  // Fenced by those who write.
  for (i32 i = lane_id(); i < TILE; i += 32) own[block * TILE + i] = (u16)(block * TILE + i);
#if FAULT == 1
  fence_async();
#elif FAULT == 2
  if (lane_id() == 0) fence_async_global();
#else
  fence_async_global();
#endif
  syncwarp();

  if (lane_id() == 0) {
    mbar_expect(bar, 4 * TILE);
    tma_load_2d(tiles, &own_map, bar, 0, 8 * block);
    // The first block has nobody before it, and hands over to itself.
    if (block == 0)
      for (i32 i = 0; i < TILE; i++) handed[i] = (u16)(i + 7);
#if FAULT == 3
    fence_async_global();
#endif
    while (load_acquire(turn + 1) != block) {
    }
    // Fenced by the one who copies.
#if FAULT == 4
    fence_async();
#elif FAULT != 3 && FAULT != 5
    fence_async_global();
#endif
    tma_load_2d(tiles + TILE, &handed_map, bar, 0, 8 * block);
  }
  mbar_wait(bar, 0);
  for (i32 i = lane_id(); i < 2 * TILE; i += 32) out[block * 2 * TILE + i] = tiles[i];
  syncwarp();
  if (lane_id() == 0) {
    if (block + 1 < gridDim.x)
      for (i32 i = 0; i < TILE; i++) handed[(block + 1) * TILE + i] = tiles[TILE + i] + TILE;
    store_release(turn + 1, block + 1);
  }
}
EXPORT(relay)
