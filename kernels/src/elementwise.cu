// Sums, scalings, fills and conversions of whole tensors; see elementwise.rs.
//
// -DTO     type of what is written, and of the other operand
// -DFROM   type of `x`
// -DPIECE  elements of one access: 16 bytes of the wider type, or 1
//
// Floors, bytes of device memory for n elements: add n (FROM + 2 TO), axpy the same, scale 2 n TO, fill n TO,
// convert n (FROM + TO). All accesses of a warp are contiguous; a thread has up to DEPTH pieces of each operand in
// flight.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define DEPTH 4

// y[i] = f(a[i], x[i]); ReadsA and ReadsX say which are read at all. `a` may be `y`.
template <bool ReadsA, bool ReadsX, class F>
DEV void map(const TO* a, const FROM* x, TO* y, u64 len, i32 head, F f) {
  Flat flat = flat_pass<PIECE>((u64)blockIdx.x * THREADS + threadIdx.x, len, head);
  if (flat.alone < len) {
    float left = ReadsA ? to_f32(a[flat.alone]) : 0.f, right = ReadsX ? to_f32(x[flat.alone]) : 0.f;
    y[flat.alone] = from_f32<TO>(f(left, right));
  }
  u64 first = (u64)blockIdx.x * THREADS * DEPTH + threadIdx.x;
  Piece<TO, PIECE> from_a[DEPTH];
  Piece<FROM, PIECE> from_x[DEPTH];
  UNROLL
  for (int d = 0; d < DEPTH; d++) {
    u64 i = first + d * THREADS;
    if (ReadsA && i < flat.pieces) from_a[d] = load_piece<PIECE>(a + head, i);
    if (ReadsX && i < flat.pieces) from_x[d] = load_piece<PIECE>(x + head, i);
  }
  UNROLL
  for (int d = 0; d < DEPTH; d++) {
    u64 i = first + d * THREADS;
    if (i >= flat.pieces) continue;
    float left[PIECE] = {}, right[PIECE] = {}, out[PIECE];
    if (ReadsA) widen(from_a[d], left);
    if (ReadsX) widen(from_x[d], right);
    UNROLL
    for (int e = 0; e < PIECE; e++) out[e] = f(left[e], right[e]);
    store_piece(y + head, i, out);
  }
}

KERNEL(THREADS, 4) elementwise_add(const TO* a, const FROM* x, TO* y, u64 len, i32 head) {
  map<true, true>(a, x, y, len, head, [](float a, float x) { return a + x; });
}
EXPORT(elementwise_add)

KERNEL(THREADS, 4) elementwise_axpy(float factor, const FROM* x, TO* y, u64 len, i32 head) {
  map<true, true>(y, x, y, len, head, [=](float y, float x) { return y + factor * x; });
}
EXPORT(elementwise_axpy)

KERNEL(THREADS, 4) elementwise_scale(TO* y, float factor, u64 len, i32 head) {
  map<true, false>(y, (const FROM*)nullptr, y, len, head, [=](float y, float) { return y * factor; });
}
EXPORT(elementwise_scale)

KERNEL(THREADS, 4) elementwise_fill(TO* y, float value, u64 len, i32 head) {
  map<false, false>((const TO*)nullptr, (const FROM*)nullptr, y, len, head, [=](float, float) { return value; });
}
EXPORT(elementwise_fill)

KERNEL(THREADS, 4) elementwise_convert(const FROM* x, TO* y, u64 len, i32 head) {
  map<false, true>((const TO*)nullptr, x, y, len, head, [](float, float x) { return x; });
}
EXPORT(elementwise_convert)
