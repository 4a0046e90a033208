// Keys and values of latent attention; see latent_kv.rs for what lies where.
//
// -DT    type of all tensors
// -DVEC  elements of one access: 16 bytes where the host found every part of every head aligned for it, else one
// Widths are in accesses. Of copies a warp has a head of a token; of the sum over heads a block has a token.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
typedef Piece<T, VEC> Part;

// kv [rows, nope + v] and shared [rows / heads, rope] to keys [rows, nope + rope] and values [rows, v].
KERNEL(THREADS, 6) latent_kv_forward(const Part* kv, const Part* shared, Part* keys, Part* values, i32 rows, i32 heads,
                                     i32 nope, i32 rope, i32 v) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  const Part* from = kv + (u64)row * (nope + v);
  const Part* tail = shared + (u64)(row / heads) * rope;
  Part* key = keys + (u64)row * (nope + rope);
  Part* value = values + (u64)row * v;
  for (i32 i = lane_id(); i < nope + v + rope; i += 32) {
    if (i < nope)
      key[i] = from[i];
    else if (i < nope + v)
      value[i - nope] = from[i];
    else
      key[i - v] = tail[i - nope - v];
  }
}
EXPORT(latent_kv_forward)

// dkeys and dvalues to dkv: all but the part that heads share.
KERNEL(THREADS, 6) latent_kv_backward(const Part* dkeys, const Part* dvalues, Part* dkv, i32 rows, i32 heads, i32 nope,
                                      i32 rope, i32 v) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  const Part* dkey = dkeys + (u64)row * (nope + rope);
  const Part* dvalue = dvalues + (u64)row * v;
  Part* to = dkv + (u64)row * (nope + v);
  for (i32 i = lane_id(); i < nope + v; i += 32) to[i] = i < nope ? dkey[i] : dvalue[i - nope];
}
EXPORT(latent_kv_backward)

// dshared [tokens, rope], the sum over heads: threads of a piece take every so manieth head, and then the first of
// them adds up their sums in order.
KERNEL(THREADS, 4) latent_kv_sum(const T* dkeys, T* dshared, i32 heads, i32 nope, i32 rope) {
  DYN_SMEM(memory);
  float* sums = (float*)memory;  // [THREADS, VEC]
  if (rope == 0) return;
  i32 piece = threadIdx.x % rope, first = threadIdx.x / rope, step = THREADS / rope;
  const T* from = dkeys + (u64)blockIdx.x * heads * (nope + rope) * VEC;
  float sum[VEC];
  UNROLL for (int e = 0; e < VEC; e++) sum[e] = 0.f;
  if (first < step) {
    for (i32 head = first; head < heads; head += step) {
      float part[VEC];
      widen(load_piece<VEC>(from, (u64)head * (nope + rope) + nope + piece), part);
      UNROLL for (int e = 0; e < VEC; e++) sum[e] += part[e];
    }
  }
  UNROLL for (int e = 0; e < VEC; e++) sums[threadIdx.x * VEC + e] = sum[e];
  __syncthreads();
  if (first > 0) return;
  for (i32 other = 1; other < step; other++) {
    UNROLL for (int e = 0; e < VEC; e++) sum[e] += sums[(other * rope + piece) * VEC + e];
  }
  store_piece<VEC>(dshared, (u64)blockIdx.x * rope + piece, sum);
}
EXPORT(latent_kv_sum)
