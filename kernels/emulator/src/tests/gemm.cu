// c[m, n] = a[m, k] b[n, k]: one warpgroup loads in bulk, one multiplies; FAULT plants one error.
#include "prelude.cuh"

constexpr i32 STAGES = 3;
constexpr i32 TILE = 64 * 64 * 2;

KERNEL(256, 1) gemm(GRID_CONST TensorMap a, GRID_CONST TensorMap b, float* c, i32 m, i32 n, i32 k) {
  DYN_SMEM(shared);
  u8* tiles_a = shared;
  u8* tiles_b = shared + STAGES * TILE;
  u64* full = (u64*)(shared + 2 * STAGES * TILE);
  u64* empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (i32 s = 0; s < STAGES; s++) {
#if FAULT == 2
      mbar_init(full + s, 2);
#else
      mbar_init(full + s, 1);
#endif
      mbar_init(empty + s, 128);
    }
#if FAULT != 5
    mbar_fence_init();
#endif
  }
#if FAULT != 8
  __syncthreads();
#endif
  i32 m0 = blockIdx.x * 64, n0 = blockIdx.y * 64, steps = (k + 63) / 64;
  if (threadIdx.x < 128) {
    reg_dec<40>();
    if (threadIdx.x == 0)
      for (i32 i = 0; i < steps; i++) {
        i32 s = i % STAGES, turn = i / STAGES & 1;
        mbar_wait(empty + s, turn ^ 1);
#if FAULT == 7
        mbar_expect(full + s, TILE);
#else
        mbar_expect(full + s, 2 * TILE);
#endif
        tma_load_2d(tiles_a + s * TILE, &a, full + s, i * 64, m0);
        tma_load_2d(tiles_b + s * TILE, &b, full + s, i * 64, n0);
      }
  } else {
    reg_inc<232>();
    float d[32];
    UNROLL
    for (i32 i = 0; i < 32; i++) d[i] = 0.f;
    for (i32 i = 0; i < steps; i++) {
      i32 s = i % STAGES, turn = i / STAGES & 1;
#if FAULT != 6
      mbar_wait(full + s, turn);
#endif
#if FAULT != 3
      wgmma_fence();
#endif
      UNROLL
      for (i32 q = 0; q < 4; q++)
        wgmma<64, 0, 0>(d, desc_sw128_k(tiles_a + s * TILE + 32 * q), desc_sw128_k(tiles_b + s * TILE + 32 * q),
                        true);
      wgmma_commit();
#if FAULT == 1
      mbar_arrive(empty + s);
      wgmma_wait<0>();
#elif FAULT == 4
      d[0] += 1.f;
      wgmma_wait<0>();
      mbar_arrive(empty + s);
#elif FAULT == 9
      settle(d);
      wgmma_wait<0>();
      mbar_arrive(empty + s);
#else
      wgmma_wait<0>();
      settle(d);
      mbar_arrive(empty + s);
#endif
    }
    u32 t = threadIdx.x - 128, warp = t / 32, lane = t % 32;
    UNROLL
    for (i32 j = 0; j < 8; j++)
      UNROLL
      for (i32 e = 0; e < 4; e++) {
        i32 row = m0 + 16 * warp + lane / 4 + 8 * (e / 2), column = n0 + 8 * j + 2 * (lane % 4) + e % 2;
        if (row < m && column < n) c[(i64)row * n + column] = d[4 * j + e];
      }
  }
}
EXPORT(gemm)
