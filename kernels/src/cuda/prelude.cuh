// What every kernel includes first: one vocabulary, two targets.
//
// On a GPU (`prelude/gpu.cuh`, compiled by NVRTC) a name is the instruction; on the CPU
// (`prelude/host.cuh`, the emulator's own, compiled by a C++17 compiler) it is a call into its model of
// that instruction. No other header is included, neither CUDA's nor libc's. What an architecture lacks is
// not declared for it: `-DARCH=80` has cp.async and mma.sync, 90 and newer have mbarriers and bulk
// tensor copies, and only 90 has wgmma.
#pragma once

#ifndef ARCH
#error "a program is compiled with -DARCH=80, 90 or 100"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// The upper half of a float; arithmetic is done in f32.
struct bf16 {
  u16 bits;
};

// The unit of a wide access: 16 aligned bytes, eight bf16 or four words.
struct alignas(16) Vec4 {
  u32 x, y, z, w;
};

// CUtensorMap on the GPU, the emulator's own description on the CPU. A kernel takes it as a
// `GRID_CONST TensorMap` parameter and passes its address on.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// How the 16-byte chunks of a row of 32, 64 or 128 bytes are permuted by the row's number; the values
// are those of a wgmma descriptor.
enum Swizzle : u32 { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "prelude/gpu.cuh"
#else
#include "prelude/host.cuh"
#endif

// ---- Below: the same code on both targets. -------------------------------------------------------

DEV u32 lane_id() { return threadIdx.x % 32; }
DEV u32 warp_id() { return threadIdx.x / 32; }

DEV float to_f32(float x) { return x; }
DEV float to_f32(bf16 x) { return f32_of_bits((u32)x.bits << 16); }

DEV void store_f32_(float& out, float x) { out = x; }
DEV void store_f32_(bf16& out, float x) { out = to_bf16(x); }
// To nearest even.
template <class V>
DEV V from_f32(float x) {
  V out;
  store_f32_(out, x);
  return out;
}

// The two bf16 of a word; the one at the lower address first.
DEV float lower_f32(u32 pair) { return f32_of_bits(pair << 16); }
DEV float upper_f32(u32 pair) { return f32_of_bits(pair & 0xffff0000u); }
DEV void unpack_bf16(u32 pair, float& lower, float& upper) {
  lower = lower_f32(pair);
  upper = upper_f32(pair);
}

DEV i32 min_(i32 a, i32 b) { return a < b ? a : b; }
DEV i32 max_(i32 a, i32 b) { return a > b ? a : b; }
DEV u32 min_(u32 a, u32 b) { return a < b ? a : b; }
DEV u32 max_(u32 a, u32 b) { return a > b ? a : b; }
DEV i64 min_(i64 a, i64 b) { return a < b ? a : b; }
DEV i64 max_(i64 a, i64 b) { return a > b ? a : b; }
DEV u64 min_(u64 a, u64 b) { return a < b ? a : b; }
DEV u64 max_(u64 a, u64 b) { return a > b ? a : b; }

// No overflow on either side: exp of a negative number only.
DEV float sigmoid_(float x) {
  float e = exp_(-abs_(x));
  float r = rcp_(1.f + e);
  return x >= 0.f ? r : e * r;
}

// All 32 lanes get the result; the order of the sum is that of a butterfly, the same every time.
template <class V>
DEV V warp_sum(V v) {
  UNROLL
  for (i32 distance = 16; distance > 0; distance /= 2) v += shfl_xor(v, distance);
  return v;
}
template <class V>
DEV V warp_max(V v) {
  UNROLL
  for (i32 distance = 16; distance > 0; distance /= 2) v = max_(v, shfl_xor(v, distance));
  return v;
}

// All threads get the result. Every thread of the block must call; the block is a multiple of 32
// threads; `scratch` is shared memory for one value a warp, free again on return.
template <class V>
DEV V block_sum(V v, V* scratch) {
  v = warp_sum(v);
  if (lane_id() == 0) scratch[warp_id()] = v;
  __syncthreads();
  v = warp_sum(lane_id() < blockDim.x / 32 ? scratch[lane_id()] : V(0));
  __syncthreads();
  return v;
}
template <class V>
DEV V block_max(V v, V* scratch) {
  v = warp_max(v);
  if (lane_id() == 0) scratch[warp_id()] = v;
  __syncthreads();
  v = warp_max(scratch[lane_id() < blockDim.x / 32 ? lane_id() : 0]);
  __syncthreads();
  return v;
}

#if ARCH == 90
// Where a wgmma operand lies in shared memory (PTX ISA, "Matrix Descriptor Format"). Offsets are in
// bytes; what they mean depends on the major-ness, see the two below.
DEV u64 descriptor(const void* start, u32 leading_bytes, u32 stride_bytes, Swizzle swizzle) {
  return (u64)((smem_addr(start) & 0x3ffff) >> 4) | (u64)(leading_bytes >> 4) << 16 |
         (u64)(stride_bytes >> 4) << 32 | (u64)swizzle << 62;
}

// K-major (not transposed), 128-byte rows of 64 bf16 with 128-byte swizzle: groups of eight rows lie
// 1024 bytes apart. The tile starts at a multiple of 1024 bytes; to go 16 further along K inside it,
// add 32 bytes to the pointer.
DEV u64 desc_sw128_k(const void* start) { return descriptor(start, 16, 1024, SWIZZLE_128); }

// MN-major (transposed), 128-byte rows of 64 bf16 along M or N, with 128-byte swizzle: eight rows of
// K, the next eight 1024 bytes on, and the next 64 of M or N `panel_bytes` on. To go 16 further along
// K, add 2048 bytes to the pointer.
DEV u64 desc_sw128_mn(const void* start, u32 panel_bytes) {
  return descriptor(start, panel_bytes, 1024, SWIZZLE_128);
}
#endif
