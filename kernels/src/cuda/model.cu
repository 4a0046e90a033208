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

// What numbers become, [number][which]: 2^x without subnormals, as bf16, the larger and the smaller of it and 1.
KERNEL(32, 1) model_numbers(const float* x, u32* out) {
  float own = x[lane_id()];
  u32* to = out + 4 * lane_id();
  to[0] = bits_of_f32(exp2_flush(own));
  to[1] = pack_bf16(own, 1.f);
  to[2] = bits_of_f32(max_(own, 1.f));
  to[3] = bits_of_f32(min_(own, 1.f));
}
EXPORT(model_numbers)

// Shared memory after lane l copied l % 17 of 16 bytes.
KERNEL(32, 1) model_copy(const u32* from, u32* out) {
  DYN_SMEM(shared);
  cp_async16(shared + 16 * lane_id(), from + 4 * lane_id(), lane_id() % 17);
  cp_async_commit();
  cp_async_wait<0>();
  dump_shared(out, shared, 512);
}
EXPORT(model_copy)

// What atomics of one thread give back and leave behind.
KERNEL(32, 1) model_atomics(u32* words, u32* out) {
  if (lane_id() == 0) {
    out[0] = atomic_add(words, 5u);
    out[1] = atomic_add((i32*)words, -7);
    out[2] = bits_of_f32(atomic_add((float*)words + 1, 0.5f));
    out[3] = atomic_max((i32*)words + 2, 3);
    out[4] = atomic_max(words + 2, 0xfffffff0u);
    out[5] = atomic_exch(words + 3, 9u);
    out[6] = atomic_cas(words + 3, 8u, 1u);
    out[7] = atomic_cas(words + 3, 9u, 2u);
    store_release(words + 4, 11);
    out[8] = load_acquire(words + 4);
    for (i32 i = 0; i < 5; i++) out[9 + i] = load_acquire(words + i);
  }
}
EXPORT(model_atomics)

// y = 2 x: one warpgroup hands to another through a named barrier, and is told through a second when it may go on.
KERNEL(256, 1) model_hand_over(const u32* x, u32* y, i32 rounds) {
  DYN_SMEM(memory);
  u32* shared = (u32*)memory;
  u32 t = threadIdx.x % 128;
  for (i32 round = 0; round < rounds; round++) {
    if (threadIdx.x < 128) {
      if (round > 0) named_sync(2, 256);
      shared[t] = x[128 * round + t];
      named_arrive(1, 256);
    } else {
      named_sync(1, 256);
      y[128 * round + t] = 2 * shared[127 - t];
      if (round + 1 < rounds) named_arrive(2, 256);
    }
  }
}
EXPORT(model_hand_over)
