// Attention sinks; see sinks.rs for the formulas.
//
// -DT    type of o, its gradient and the sinks
// -DVEC  elements of one access: 16 bytes where the host found every row aligned for it, else one
// `pieces` is the width of a head in accesses.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define TOKENS 128

// o *= sigmoid(lse - sink), all = log(exp(lse) + exp(sink)). A thread has a piece; the first of a row writes `all`.
KERNEL(THREADS, 4) sinks_forward(T* o, const float* lse, const T* sinks, float* all, i32 tokens, i32 heads, i32 pieces) {
  u64 piece = (u64)blockIdx.x * THREADS + threadIdx.x, row = piece / pieces;
  i32 token = row / heads, head = row % heads;
  if (token >= tokens) return;
  u64 at = (u64)head * tokens + token;
  float before = lse[at], sink = to_f32(sinks[head]), open = sigmoid_(before - sink);
  float value[VEC];
  widen(load_piece<VEC>((const T*)o, piece), value);
  UNROLL for (i32 e = 0; e < VEC; e++) value[e] *= open;
  store_piece<VEC>(o, piece, value);
  if (piece % pieces == 0) all[at] = max_(before, sink) + log_(1.f + exp_(-abs_(before - sink)));
}
EXPORT(sinks_forward)

// partial [token blocks] [heads] = -sum of exp(sink - lse) (do . o). Eight threads a row, TOKENS tokens of one head a
// block, 32 at a time.
KERNEL(THREADS, 4) sinks_sums(const T* d_o, const T* o, const float* lse, const T* sinks, float* partial, i32 tokens,
                              i32 heads, i32 pieces) {
  DYN_SMEM(shared);
  float* sums = (float*)shared;
  i32 head = blockIdx.x % heads, first = blockIdx.x / heads * TOKENS, lane = threadIdx.x % 8;
  float sink = to_f32(sinks[head]), sum = 0.f;
  for (i32 i = threadIdx.x / 8; i < TOKENS; i += THREADS / 8) {
    i32 token = first + i;
    float product = 0.f, prob = 0.f;
    if (token < tokens) {
      u64 row = ((u64)token * heads + head) * pieces;
      // Not unrolled further: the pieces of all steps at once cost registers.
      _Pragma("unroll 2") for (i32 p = lane; p < pieces; p += 8) {
        float upstream[VEC], value[VEC];
        widen(load_piece<VEC>(d_o, row + p), upstream);
        widen(load_piece<VEC>(o, row + p), value);
        UNROLL for (i32 e = 0; e < VEC; e++) product = fma_(upstream[e], value[e], product);
      }
      prob = exp_(sink - lse[(u64)head * tokens + token]);
    }
    sum = fma_(prob, product, sum);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0.f;
  UNROLL for (i32 warp = 0; warp < THREADS / 32; warp++) total += sums[warp];
  partial[blockIdx.x] = -total;
}
EXPORT(sinks_sums)
