// The AdamW step; see adamw.rs for the formulas.
//
// -DGRAD    type of the gradient
// -DMASTER  type of the masters: float, or bf16 where they are the remainders of the model's weights
// -DMOMENT  type of the moments
// -DMODEL   type of the model's weights
// -DWRITES  whether those are written
// -DPIECE   elements of one access: 4 (16 bytes of f32), or 1
// The gradient is scaled by `scale`, and by what lies at `factor` unless that is null.
//
// Floor, bytes of device memory for n weights: reads master, gradient and both moments, writes master, moments and
// model: n (2 MASTER + 4 MOMENT + GRAD + MODEL), 30 n with an f32 gradient, bf16 weights and f32 moments. Remainders
// need the model's weights read too: 28 n.
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

// The model's weight that a master gives, as an f32: of bf16 the nearest, ties away from zero; NaN stays NaN.
DEV float weight_of(float master, const float*) { return master; }
DEV float weight_of(float master, const bf16*) {
  u32 bits = bits_of_f32(master);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return f32_of_bits((is_nan ? bits | 0x400000u : bits + 0x8000u) & 0xffff0000u);
}

// Two halves that are bits and no numbers: the upper half of what lies in each.
template <int N>
DEV void pack(Piece<bf16, N>& piece, const u32 (&in)[N]) {
  UNROLL
  for (int e = 0; e < N / 2; e++) piece.pair[e] = in[2 * e] >> 16 | (in[2 * e + 1] & 0xffff0000u);
}
DEV void pack(Piece<bf16, 1>& piece, const u32 (&in)[1]) { piece.value.bits = (u16)(in[0] >> 16); }

template <int N, class V>
DEV void load_masters(const float* w, const V*, u64 i, float (&out)[N]) {
  widen(load_piece<N>(w, i), out);
}
// Of remainders: the lower halves of masters, beside weights that are one in the last place more where the half is
// 0x8000 or above. Both come as the upper halves of f32.
template <int N>
DEV void load_masters(const bf16* remainders, const bf16* model, u64 i, float (&out)[N]) {
  float weights[N], lower[N];
  widen(load_piece<N>(model, i), weights);
  widen(load_piece<N>(remainders, i), lower);
  UNROLL
  for (int e = 0; e < N; e++) {
    u32 rest = bits_of_f32(lower[e]) >> 16;
    out[e] = f32_of_bits((bits_of_f32(weights[e]) - (rest >> 15 << 16)) | rest);
  }
}

template <int N>
DEV void store_masters(float* w, u64 i, const float (&masters)[N]) {
  store_piece(w, i, masters);
}
template <int N>
DEV void store_masters(bf16* remainders, u64 i, const float (&masters)[N]) {
  u32 lower[N];
  UNROLL
  for (int e = 0; e < N; e++) lower[e] = bits_of_f32(masters[e]) << 16;
  Piece<bf16, N> piece;
  pack(piece, lower);
  ((Piece<bf16, N>*)remainders)[i] = piece;
}

// Neighbouring elements, number `i` of them from the pointers on.
template <int N>
DEV void step(const GRAD* grad, MASTER* w, MOMENT* m, MOMENT* v, MODEL* model, u64 i, const Numbers& numbers) {
  float g[N], masters[N], first[N], second[N];
  widen(load_piece<N>(grad, i), g);
  load_masters(w, model, i, masters);
  widen(load_piece<N>(m, i), first);
  widen(load_piece<N>(v, i), second);
  UNROLL
  for (int e = 0; e < N; e++) update(masters[e], g[e], first[e], second[e], numbers);
  store_masters(w, i, masters);
  store_piece(m, i, first);
  store_piece(v, i, second);
#if WRITES
  UNROLL
  for (int e = 0; e < N; e++) masters[e] = weight_of(masters[e], model);
  store_piece(model, i, masters);
#endif
}

KERNEL(THREADS, 4)
adamw_step(const GRAD* grad, MASTER* w, MOMENT* m, MOMENT* v, MODEL* model, const float* factor, u64 len, i32 head,
           float scale, float beta1, float rest1, float beta2, float rest2, float keep, float rate, float root, float eps) {
  if (factor) scale *= *factor;
  Numbers numbers = {scale, beta1, rest1, beta2, rest2, keep, rate, root, eps};
  u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  Flat flat = flat_pass<PIECE>(i, len, head);
  if (flat.alone < len) step<1>(grad, w, m, v, model, flat.alone, numbers);
  if (i < flat.pieces) step<PIECE>(grad + head, w + head, m + head, v + head, model + head, i, numbers);
}
EXPORT(adamw_step)
