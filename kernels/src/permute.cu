// Rows into expert order and back; see permute.rs. The map is made in permute_map.cu.
//
// -DT       type of the rows
// -DVEC     elements of one access: 16 bytes where the host found every row aligned for it, else one
// `pieces` is the width of a row in accesses. 2^shift threads share a token.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
// Accesses of a copy that a thread has in flight.
#define HELD 4
// Rows of a sum that a thread has in flight.
#define SLOTS 4

using Part = Piece<T, VEC>;

// Reads each token's row once and writes it to each of its rows.
KERNEL(THREADS, 4) permute_forward(const Part* x, Part* y, const i32* row_of, i32 tokens, i32 topk, i32 pieces, i32 shift) {
  i32 token = blockIdx.x * (THREADS >> shift) + (threadIdx.x >> shift), lanes = 1 << shift;
  if (token >= tokens) return;
  const Part* from = x + (u64)token * pieces;
  const i32* rows = row_of + (u64)token * topk;
  for (i32 i = threadIdx.x & (lanes - 1); i < pieces; i += HELD * lanes) {
    Part held[HELD];
    UNROLL for (i32 j = 0; j < HELD; j++) if (i + j * lanes < pieces) held[j] = from[i + j * lanes];
    for (i32 slot = 0; slot < topk; slot++) {
      Part* to = y + (u64)rows[slot] * pieces;
      UNROLL for (i32 j = 0; j < HELD; j++) if (i + j * lanes < pieces) to[i + j * lanes] = held[j];
    }
  }
}
EXPORT(permute_forward)

// Sums the rows of each token in slot order, times their weights where there are any. A slot may have none.
KERNEL(THREADS, 4) permute_sum(const Part* y, const float* weights, Part* x, const i32* row_of, i32 tokens, i32 topk,
                               i32 pieces, i32 shift) {
  i32 token = blockIdx.x * (THREADS >> shift) + (threadIdx.x >> shift), lanes = 1 << shift;
  if (token >= tokens) return;
  u64 first = (u64)token * topk;
  for (i32 i = threadIdx.x & (lanes - 1); i < pieces; i += lanes) {
    float sum[VEC];
    UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = 0.f;
    for (i32 slot = 0; slot < topk; slot += SLOTS) {
      Part held[SLOTS];
      float weight[SLOTS];
      i32 rows[SLOTS];
      UNROLL for (i32 j = 0; j < SLOTS; j++) rows[j] = slot + j < topk ? row_of[first + slot + j] : -1;
      UNROLL for (i32 j = 0; j < SLOTS; j++) if (rows[j] >= 0) {
        held[j] = y[(u64)rows[j] * pieces + i];
        weight[j] = weights ? weights[first + slot + j] : 1.f;
      }
      UNROLL for (i32 j = 0; j < SLOTS; j++) if (rows[j] >= 0) {
        float row[VEC];
        widen(held[j], row);
        UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = fma_(row[e], weight[j], sum[e]);
      }
    }
    Part out;
    narrow(out, sum);
    x[(u64)token * pieces + i] = out;
  }
}
EXPORT(permute_sum)

// The gradient of the weighted sum. A warp has a token, whose dx it reads once: dy = dx * weight to each of
// its rows, and the scalar product of dx with each of its y, which lane `slot` collects.
KERNEL(THREADS, 4) permute_spread(const Part* dx, const Part* y, const float* weights, const i32* row_of, Part* dy,
                                  float* dweights, i32 tokens, i32 topk, i32 pieces) {
  i32 token = blockIdx.x * (THREADS / 32) + warp_id(), lane = lane_id();
  if (token >= tokens) return;
  u64 first = (u64)token * topk;
  i32 own_row = lane < topk ? row_of[first + lane] : 0;
  float own_weight = lane < topk ? weights[first + lane] : 0.f, product = 0.f;
  const Part* from = dx + (u64)token * pieces;
  for (i32 start = 0; start < pieces; start += HELD * 32) {
    i32 i = start + lane;
    Part d[HELD];
    UNROLL for (i32 j = 0; j < HELD; j++) if (i + 32 * j < pieces) d[j] = from[i + 32 * j];
    for (i32 slot = 0; slot < topk; slot++) {
      u64 row = (u64)shfl(own_row, slot) * pieces;
      float weight = shfl(own_weight, slot), sum = 0.f;
      Part held[HELD];
      UNROLL for (i32 j = 0; j < HELD; j++) if (i + 32 * j < pieces) held[j] = y[row + i + 32 * j];
      UNROLL for (i32 j = 0; j < HELD; j++) if (i + 32 * j < pieces) {
        float g[VEC], of_y[VEC];
        widen(d[j], g);
        widen(held[j], of_y);
        UNROLL for (i32 e = 0; e < VEC; e++) {
          sum = fma_(g[e], of_y[e], sum);
          g[e] *= weight;
        }
        Part out;
        narrow(out, g);
        dy[row + i + 32 * j] = out;
      }
      sum = warp_sum(sum);
      if (lane == slot) product += sum;
    }
  }
  if (lane < topk) dweights[first + lane] = product;
}
EXPORT(permute_spread)
