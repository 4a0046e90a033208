// The gated activation of an MLP; see swiglu.rs for the formulas.
//
// -DT            type of x, y and their gradients
// -DVEC          elements of one access: 16 bytes where the host found every row aligned for it, else one
// -DINTERLEAVED  whether gate and up alternate in a row of x, or are its halves
// A warp has a row. `pieces` is the width of y in accesses.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256

// Where the gates and ups of VEC elements of y lie: a piece of either half, or two pieces side by side.
#if INTERLEAVED
#define FIRST(i) (2 * (i))
#define SECOND(i) (2 * (i) + 1)
#define GATE(first, second, e) (2 * (e) < VEC ? first[2 * (e) % VEC] : second[2 * (e) % VEC])
#define UP(first, second, e) (2 * (e) + 1 < VEC ? first[(2 * (e) + 1) % VEC] : second[(2 * (e) + 1) % VEC])
#else
#define FIRST(i) (i)
#define SECOND(i) (pieces + (i))
#define GATE(first, second, e) first[e]
#define UP(first, second, e) second[e]
#endif

// To about 1e-6 in five instructions of arithmetic and two of the special unit, without the branch of an exact
// reciprocal. Where e^-x overflows the result is zero.
DEV float logistic(float x) {
  float root = rsqrt_(1.f + exp2_(-1.4426950408889634f * x));
  return root * root;
}

// NaN stays NaN.
DEV float clamp_gate(float gate, float limit) { return gate > limit ? limit : gate; }
DEV float clamp_up(float up, float limit) { return up > limit ? limit : up < -limit ? -limit : up; }

// y = g sigmoid(alpha g) (u + offset) prob, g and u clamped.
KERNEL(THREADS, 4) swiglu_forward(const T* x, const float* probs, T* y, i32 rows, i32 pieces, float alpha,
                                  float offset, float limit) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  u64 of_x = 2 * (u64)row * pieces, of_y = (u64)row * pieces;
  float prob = probs ? probs[row] : 1.f;

  for (i32 i = lane_id(); i < pieces; i += 32) {
    float first[VEC], second[VEC], out[VEC];
    widen(load_piece<VEC>(x, of_x + FIRST(i)), first);
    widen(load_piece<VEC>(x, of_x + SECOND(i)), second);
    UNROLL for (i32 e = 0; e < VEC; e++) {
      float g = clamp_gate(GATE(first, second, e), limit), u = clamp_up(UP(first, second, e), limit) + offset;
      out[e] = g * logistic(alpha * g) * u * prob;
    }
    store_piece<VEC>(y, of_y + i, out);
  }
}
EXPORT(swiglu_forward)

// With g', u' the gradients by the clamped values, which are those by x where nothing was clamped, else 0:
// g' = dy prob (u + offset) (s + alpha g s (1 - s)), u' = dy prob g s, dprob = sum of dy g s (u + offset).
KERNEL(THREADS, 4) swiglu_backward(const T* dy, const T* x, const float* probs, T* dx, float* dprobs,
                                   i32 rows, i32 pieces, float alpha, float offset, float limit) {
  i32 row = blockIdx.x * (THREADS / 32) + warp_id();
  if (row >= rows) return;
  u64 of_x = 2 * (u64)row * pieces, of_y = (u64)row * pieces;
  float prob = probs ? probs[row] : 1.f, dprob = 0.f;
  for (i32 i = lane_id(); i < pieces; i += 32) {
    float first[VEC], second[VEC], upstream[VEC], dfirst[VEC], dsecond[VEC];
    widen(load_piece<VEC>(x, of_x + FIRST(i)), first);
    widen(load_piece<VEC>(x, of_x + SECOND(i)), second);
    widen(load_piece<VEC>(dy, of_y + i), upstream);
    UNROLL for (i32 e = 0; e < VEC; e++) {
      float gate = GATE(first, second, e), up = UP(first, second, e);
      float g = clamp_gate(gate, limit), u = clamp_up(up, limit) + offset;
      float s = logistic(alpha * g), silu = g * s, dout = upstream[e];
      dprob = fma_(dout * silu, u, dprob);
      dout *= prob;
      float dgate = dout * u * fma_(alpha * silu, 1.f - s, s), dup = dout * silu;
      GATE(dfirst, dsecond, e) = gate > limit ? 0.f : dgate;
      UP(dfirst, dsecond, e) = abs_(up) > limit ? 0.f : dup;
    }
    store_piece<VEC>(dx, of_x + FIRST(i), dfirst);
    store_piece<VEC>(dx, of_x + SECOND(i), dsecond);
  }
  dprob = warp_sum(dprob);
  if (dprobs && lane_id() == 0) dprobs[row] = dprob;
}
EXPORT(swiglu_backward)
