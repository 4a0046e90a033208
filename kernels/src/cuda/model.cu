// What the emulator's model of the hardware claims, one instruction a kernel, for a GPU to confirm.
// Inputs and results are raw words: tiles of shared memory as they lie there, registers by thread.
#include "prelude.cuh"

// Words of a device buffer to shared memory, or back; both are multiples of 16 bytes.
DEV void fill_shared(u8* shared, const u32* from, i32 bytes) {
  for (i32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32*)shared)[i] = from[i];
  __syncthreads();
}
DEV void dump_shared(u32* to, const u8* shared, i32 bytes) {
  __syncthreads();
  for (i32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) to[i] = ((const u32*)shared)[i];
}

// Registers [lane][register] of ldmatrix from 512 bytes: lane i points to row i % 8 of matrix i / 8.
KERNEL(32, 1) model_ldmatrix(const u32* from, u32* x4, u32* x4_trans, u32* x2, u32* x2_trans) {
  DYN_SMEM(shared);
  fill_shared(shared, from, 512);
  const u8* row = shared + 16 * lane_id();
  u32 four[4], two[2];
  ldmatrix_x4(four, row);
  for (i32 i = 0; i < 4; i++) x4[4 * lane_id() + i] = four[i];
  ldmatrix_x4_trans(four, row);
  for (i32 i = 0; i < 4; i++) x4_trans[4 * lane_id() + i] = four[i];
  ldmatrix_x2(two, row);
  for (i32 i = 0; i < 2; i++) x2[2 * lane_id() + i] = two[i];
  ldmatrix_x2_trans(two, row);
  for (i32 i = 0; i < 2; i++) x2_trans[2 * lane_id() + i] = two[i];
}
EXPORT(model_ldmatrix)

// d of mma.m16n8k16 on registers [lane][register].
KERNEL(32, 1) model_mma(const u32* a, const u32* b, float* d) {
  u32 from_a[4], from_b[2];
  float sum[4];
  for (i32 i = 0; i < 4; i++) from_a[i] = a[4 * lane_id() + i];
  for (i32 i = 0; i < 2; i++) from_b[i] = b[2 * lane_id() + i];
  for (i32 i = 0; i < 4; i++) sum[i] = 1.f;
  mma_m16n8k16(sum, from_a, from_b);
  for (i32 i = 0; i < 4; i++) d[4 * lane_id() + i] = sum[i];
}
EXPORT(model_mma)

// Lanes get [lane][which]: of shfl_xor 5, shfl 9, shfl_up 3, shfl_down 3 of the lane's number, and the
// ballot of odd lanes.
KERNEL(32, 1) model_lanes(u32* out) {
  u32 lane = lane_id();
  u32 got[5] = {shfl_xor(lane, 5), shfl(lane, 9), shfl_up(lane, 3), shfl_down(lane, 3), ballot(lane % 2)};
  for (i32 i = 0; i < 5; i++) out[5 * lane + i] = got[i];
}
EXPORT(model_lanes)

#if ARCH >= 90
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

// Shared memory after a bulk load of one tile.
KERNEL(128, 1) model_load(GRID_CONST TensorMap map, u32* out, i32 bytes, i32 x, i32 y, i32 z) {
  DYN_SMEM(shared);
  u64* bar = (u64*)(shared + bytes);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, bytes);
#if RANK == 2
    tma_load_2d(shared, &map, bar, x, y);
#else
    tma_load_3d(shared, &map, bar, x, y, z);
#endif
  }
  __syncthreads();
  mbar_wait(bar, 0);
  dump_shared(out, shared, bytes);
}
EXPORT(model_load)

// A bulk store, or addition, of one tile that lies in shared memory as it lies in `from`.
KERNEL(128, 1) model_store(GRID_CONST TensorMap map, const u32* from, i32 bytes, i32 x, i32 y, i32 z) {
  DYN_SMEM(shared);
  for (i32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32*)shared)[i] = from[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
#if RANK == 2 && ADD
    tma_reduce_add_2d(&map, shared, x, y);
#elif RANK == 2
    tma_store_2d(&map, shared, x, y);
#elif ADD
    tma_reduce_add_3d(&map, shared, x, y, z);
#else
    tma_store_3d(&map, shared, x, y, z);
#endif
    bulk_commit();
    bulk_wait<0>();
  }
}
EXPORT(model_store)
#endif

#if ARCH == 90
// Accumulators [thread][register] of `steps` wgmma on operands that lie in shared memory as in `a` and
// `b`, their descriptors `step` bytes further each time.
KERNEL(128, 1) model_wgmma(const u32* a, i32 a_bytes, i32 a_leading, i32 a_stride, i32 a_step, const u32* b,
                           i32 b_bytes, i32 b_leading, i32 b_stride, i32 b_step, i32 swizzle, i32 steps,
                           float* out) {
  DYN_SMEM(shared);
  u8* shared_b = shared + (a_bytes + 1023) / 1024 * 1024;
  for (i32 i = threadIdx.x; i < a_bytes / 4; i += 128) ((u32*)shared)[i] = a[i];
  for (i32 i = threadIdx.x; i < b_bytes / 4; i += 128) ((u32*)shared_b)[i] = b[i];
  fence_async();
  __syncthreads();
  float d[COLUMNS / 2];
  UNROLL
  for (i32 i = 0; i < COLUMNS / 2; i++) d[i] = 1.f;
#if A_REGISTERS
  u32 registers[4];
  for (i32 i = 0; i < 4; i++) registers[i] = a[4 * threadIdx.x + i];
#endif
  wgmma_fence();
  for (i32 k = 0; k < steps; k++) {
    u64 from_b = descriptor(shared_b + k * b_step, b_leading, b_stride, (Swizzle)swizzle);
#if A_REGISTERS
    wgmma_rs<COLUMNS, TRANSPOSE_B>(d, registers, from_b, true);
#else
    u64 from_a = descriptor(shared + k * a_step, a_leading, a_stride, (Swizzle)swizzle);
    wgmma<COLUMNS, TRANSPOSE_A, TRANSPOSE_B>(d, from_a, from_b, true);
#endif
  }
  wgmma_commit();
  wgmma_wait<0>();
  UNROLL
  for (i32 i = 0; i < COLUMNS / 2; i++) out[threadIdx.x * (COLUMNS / 2) + i] = d[i];
}
EXPORT(model_wgmma)
#endif
