// Parts of an attention made one; see merge.rs for the formulas.
//
// -DT    type of o and the part
// -DVEC  elements of one access: 16 bytes where the host found every row aligned for it, else one
// A warp has a head of a token. `pieces` is the width of a head in accesses.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256

// part [tokens, heads, width] with part_lse [heads, tokens], into rows `at` .. of o and columns `at` .. of lse [heads, all].
KERNEL(THREADS, 4) merge(const T* part, const float* part_lse, T* o, float* lse, i32 rows, i32 heads, i32 pieces,
                         i32 tokens, i32 all, i32 at) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  i32 token = row / heads, head = row % heads;
  float* own = lse + (u64)head * all + at + token;
  float first = *own, second = part_lse[(u64)head * tokens + token], top = max_(first, second);
  float a = exp_(first - top), b = exp_(second - top), sum = a + b, share = a / sum, part_share = b / sum;
  u64 from = (u64)row * pieces, to = ((u64)at * heads + row) * pieces;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float x[VEC], y[VEC];
    widen(load_piece<VEC>(part, from + i), x);
    widen(load_piece<VEC>(o, to + i), y);
    UNROLL for (i32 e = 0; e < VEC; e++) y[e] = fma_(part_share, x[e], share * y[e]);
    store_piece<VEC>(o, to + i, y);
  }
  syncwarp();  // all have read it
  if (lane_id() == 0) *own = top + log_(sum);
}
EXPORT(merge)
