// Rows behind a sigmoid gate; see gate.rs for the formulas.
//
// -DT    type of the rows and their gradients
// -DVEC  elements of one access: 16 bytes where the host found every row aligned for it, else one
// A warp has a row. `pieces` is the width of a row in accesses.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256

// y += sigmoid(logit) x
KERNEL(THREADS, 4) gate_add(const T* x, const float* logits, T* y, i32 rows, i32 pieces) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  float open = sigmoid_(logits[row]);
  u64 first = (u64)row * pieces;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float value[VEC], sum[VEC];
    widen(load_piece<VEC>(x, first + i), value);
    widen(load_piece<VEC>(y, first + i), sum);
    UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = fma_(open, value[e], sum[e]);
    store_piece<VEC>(y, first + i, sum);
  }
}
EXPORT(gate_add)

// dx = sigmoid(logit) dy, dlogit = sigmoid'(logit) times the inner product of dy and x.
KERNEL(THREADS, 4) gate_backward(const T* dy, const T* x, const float* logits, T* dx, float* dlogits, i32 rows,
                                 i32 pieces) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  float open = sigmoid_(logits[row]), product = 0.f;
  u64 first = (u64)row * pieces;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float value[VEC], upstream[VEC];
    widen(load_piece<VEC>(x, first + i), value);
    widen(load_piece<VEC>(dy, first + i), upstream);
    UNROLL for (i32 e = 0; e < VEC; e++) {
      product = fma_(upstream[e], value[e], product);
      upstream[e] *= open;
    }
    store_piece<VEC>(dx, first + i, upstream);
  }
  product = warp_sum(product);
  if (lane_id() == 0) dlogits[row] = product * open * (1.f - open);
}
EXPORT(gate_backward)
