// The AdamW step; see adamw.rs for the formulas.
//
// -DGRAD    type of the gradient
// -DMOMENT  type of the moments
// -DMODEL   type of the model's weights
// -DWRITES  whether those are written
// -DPIECE   elements of one access: 4 (16 bytes of f32), or 1
// The gradient is scaled by `scale`, and by what lies at `factor` unless that is null.
//
// Floor, bytes of device memory for n weights: reads master, gradient and both moments, writes master, moments and
// model: n (8 + 4 MOMENT + GRAD + MODEL), 30 n with an f32 gradient, bf16 weights and f32 moments.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256

// As adamw.rs has them.
struct Numbers {
  float scale, beta1, rest1, beta2, rest2, keep, rate, root, eps;
};

DEV void update(float& w, float g, float& m, float& v, const Numbers& n) {
  g *= n.scale;
  m = n.beta1 * m + n.rest1 * g;
  v = n.beta2 * v + n.rest2 * (g * g);
  w = w * n.keep - n.rate * m / (sqrt_(v) * n.root + n.eps);
}

KERNEL(THREADS, 4)
adamw_step(const GRAD* grad, float* w, MOMENT* m, MOMENT* v, MODEL* model, const float* factor, u64 len, i32 head,
           float scale, float beta1, float rest1, float beta2, float rest2, float keep, float rate, float root, float eps) {
  if (factor) scale *= *factor;
  Numbers numbers = {scale, beta1, rest1, beta2, rest2, keep, rate, root, eps};
  u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  Flat flat = flat_pass<PIECE>(i, len, head);
  u64 at = flat.alone;
  if (at < len) {
    float weight = w[at], first = to_f32(m[at]), second = to_f32(v[at]);
    update(weight, to_f32(grad[at]), first, second, numbers);
    w[at] = weight;
    m[at] = from_f32<MOMENT>(first);
    v[at] = from_f32<MOMENT>(second);
    if (WRITES) model[at] = from_f32<MODEL>(weight);
  }
  if (i >= flat.pieces) return;
  auto grads = load_piece<PIECE>((const GRAD*)grad + head, i);
  auto weights = load_piece<PIECE>((const float*)w + head, i);
  auto firsts = load_piece<PIECE>((const MOMENT*)m + head, i);
  auto seconds = load_piece<PIECE>((const MOMENT*)v + head, i);
  float g[PIECE], first[PIECE], second[PIECE];
  widen(grads, g);
  widen(firsts, first);
  widen(seconds, second);
  UNROLL
  for (int e = 0; e < PIECE; e++) update(weights.value[e], g[e], first[e], second[e], numbers);
  store_piece(w + head, i, weights.value);
  store_piece(m + head, i, first);
  store_piece(v + head, i, second);
  if (WRITES) store_piece(model + head, i, weights.value);
}
EXPORT(adamw_step)
