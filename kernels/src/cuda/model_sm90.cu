// As model.cu, from Hopper on.
//
// -DCOLUMNS      only the product of warpgroups, so many columns wide, with
// -DTRANSPOSE_A -DTRANSPOSE_B -DA_REGISTERS
#include "prelude.cuh"

#ifndef COLUMNS

DEV void dump_shared(u32* to, const u8* shared, i32 bytes) {
  __syncthreads();
  for (i32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) to[i] = ((const u32*)shared)[i];
}

// 512 bytes of shared memory after stmatrix of registers [lane][register].
KERNEL(32, 1) model_stmatrix(const u32* registers, u32* plain, u32* trans) {
  DYN_SMEM(shared);
  u32 r[4];
  for (i32 i = 0; i < 4; i++) r[i] = registers[4 * lane_id() + i];
  stmatrix_x4(shared + 16 * lane_id(), r);
  dump_shared(plain, shared, 512);
  __syncthreads();
  stmatrix_x4_trans(shared + 16 * lane_id(), r);
  dump_shared(trans, shared, 512);
}
EXPORT(model_stmatrix)

// Answers of an mbarrier of two arrivals, in order: before anything, after one, after both, and in the next phase.
KERNEL(32, 1) model_mbarrier(u32* out) {
  DYN_SMEM(shared);
  u64* bar = (u64*)shared;
  if (lane_id() == 0) {
    mbar_init(bar, 2);
    mbar_fence_init();
    for (i32 round = 0; round < 2; round++) {
      u32 parity = round % 2;
      u32* to = out + 6 * round;
      to[0] = mbar_try(bar, parity);
      to[1] = mbar_try(bar, parity ^ 1);
      mbar_arrive(bar);
      to[2] = mbar_try(bar, parity);
      mbar_expect(bar, 0);
      to[3] = mbar_try(bar, parity);
      to[4] = mbar_try(bar, parity ^ 1);
      mbar_wait(bar, parity);
      to[5] = round;
    }
  }
}
EXPORT(model_mbarrier)

// Shared memory after a bulk load of one tile.
KERNEL(128, 1) model_load(GRID_CONST TensorMap map, u32* out, i32 bytes, i32 rank, i32 x, i32 y, i32 z, i32 w, i32 v) {
  DYN_SMEM(shared);
  u64* bar = (u64*)(shared + bytes);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, bytes);
    if (rank == 2)
      tma_load_2d(shared, &map, bar, x, y);
    else if (rank == 3)
      tma_load_3d(shared, &map, bar, x, y, z);
    else if (rank == 4)
      tma_load_4d(shared, &map, bar, x, y, z, w);
    else
      tma_load_5d(shared, &map, bar, x, y, z, w, v);
  }
  __syncthreads();
  mbar_wait(bar, 0);
  dump_shared(out, shared, bytes);
}
EXPORT(model_load)

// A bulk store, or addition, of one tile that lies in shared memory as it lies in `from`.
KERNEL(128, 1) model_store(GRID_CONST TensorMap map, const u32* from, i32 bytes, i32 rank, i32 add, i32 x, i32 y, i32 z, i32 w) {
  DYN_SMEM(shared);
  for (i32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32*)shared)[i] = from[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (rank == 2 && add)
      tma_reduce_add_2d(&map, shared, x, y);
    else if (rank == 2)
      tma_store_2d(&map, shared, x, y);
    else if (rank == 3 && add)
      tma_reduce_add_3d(&map, shared, x, y, z);
    else if (rank == 3)
      tma_store_3d(&map, shared, x, y, z);
    else
      tma_store_4d(&map, shared, x, y, z, w);
    bulk_commit();
    bulk_wait<0>();
  }
}
EXPORT(model_store)

#elif ARCH == 90

struct Operands {
  const u8 *a, *b;
  i32 a_leading, a_stride, a_step, b_leading, b_stride, b_step;
  Swizzle swizzle;
};

template <i32 Steps>
DEV void multiply(float (&d)[COLUMNS / 2], const u32 (&registers)[4], const Operands& from) {
  // Or the assembler would set the accumulators behind the fence.
  settle(d);
  wgmma_fence();
  UNROLL for (i32 k = 0; k < Steps; k++) {
    u64 b = descriptor(from.b + k * from.b_step, from.b_leading, from.b_stride, from.swizzle);
#if A_REGISTERS
    wgmma_rs<COLUMNS, TRANSPOSE_B>(d, registers, b, true);
#else
    u64 a = descriptor(from.a + k * from.a_step, from.a_leading, from.a_stride, from.swizzle);
    wgmma<COLUMNS, TRANSPOSE_A, TRANSPOSE_B>(d, a, b, true);
#endif
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Accumulators [thread][register] of 1, 2 or 4 wgmma on operands that lie in shared memory as in `a` and
// `b`, their descriptors `step` bytes further each time, of B from byte `b_start` on.
KERNEL(128, 1) model_wgmma(const u32* a, i32 a_bytes, i32 a_leading, i32 a_stride, i32 a_step, const u32* b,
                           i32 b_bytes, i32 b_leading, i32 b_stride, i32 b_step, i32 b_start, i32 swizzle,
                           i32 steps, float* out) {
  DYN_SMEM(shared);
  u8* shared_b = shared + (a_bytes + 1023) / 1024 * 1024;
  for (i32 i = threadIdx.x; i < a_bytes / 4; i += 128) ((u32*)shared)[i] = a[i];
  for (i32 i = threadIdx.x; i < b_bytes / 4; i += 128) ((u32*)shared_b)[i] = b[i];
  fence_async();
  __syncthreads();
  float d[COLUMNS / 2];
  UNROLL
  for (i32 i = 0; i < COLUMNS / 2; i++) d[i] = 1.f;
  u32 registers[4] = {};
#if A_REGISTERS
  for (i32 i = 0; i < 4; i++) registers[i] = a[4 * threadIdx.x + i];
#endif
  // As a loop of an unknown length, they would be made to wait for each other.
  Operands from = {shared,    shared_b + b_start, a_leading, a_stride,        a_step,
                   b_leading, b_stride,           b_step,    (Swizzle)swizzle};
  if (steps == 1)
    multiply<1>(d, registers, from);
  else if (steps == 2)
    multiply<2>(d, registers, from);
  else
    multiply<4>(d, registers, from);
  UNROLL
  for (i32 i = 0; i < COLUMNS / 2; i++) out[threadIdx.x * (COLUMNS / 2) + i] = d[i];
}
EXPORT(model_wgmma)

#endif
