// Pieces: neighbouring elements read or written in one access, held in registers as words, so that two
// bf16 share one. The same code on both targets; include after `prelude.cuh`.
#pragma once

// `N` elements of type V (1, 2, 4 or 8), aligned to their size or to 16 bytes.
template <class V, int N>
struct Piece;

template <int N>
struct alignas(N < 4 ? N * 4 : 16) Piece<float, N> {
  float value[N];
};

template <int N>
struct alignas(N * 2) Piece<bf16, N> {
  u32 pair[N / 2];
};

template <>
struct Piece<bf16, 1> {
  bf16 value;
};

template <int N>
DEV void widen(const Piece<float, N>& piece, float (&out)[N]) {
  UNROLL
  for (int i = 0; i < N; i++) out[i] = piece.value[i];
}
template <int N>
DEV void widen(const Piece<bf16, N>& piece, float (&out)[N]) {
  UNROLL
  for (int i = 0; i < N / 2; i++) unpack_bf16(piece.pair[i], out[2 * i], out[2 * i + 1]);
}
DEV void widen(const Piece<bf16, 1>& piece, float (&out)[1]) { out[0] = to_f32(piece.value); }

template <int N>
DEV void narrow(Piece<float, N>& piece, const float (&in)[N]) {
  UNROLL
  for (int i = 0; i < N; i++) piece.value[i] = in[i];
}
template <int N>
DEV void narrow(Piece<bf16, N>& piece, const float (&in)[N]) {
  UNROLL
  for (int i = 0; i < N / 2; i++) piece.pair[i] = pack_bf16(in[2 * i], in[2 * i + 1]);
}
DEV void narrow(Piece<bf16, 1>& piece, const float (&in)[1]) { piece.value = to_bf16(in[0]); }

// Piece `i` from `start` on, which is aligned for it.
template <int N, class V>
DEV Piece<V, N> load_piece(const V* start, u64 i) {
  return ((const Piece<V, N>*)start)[i];
}
template <int N, class V>
DEV void store_piece(V* start, u64 i, const float (&in)[N]) {
  Piece<V, N> piece;
  narrow(piece, in);
  ((Piece<V, N>*)start)[i] = piece;
}

// How threads share `len` elements of which `head` come before the first aligned piece of N.
struct Flat {
  // Whole pieces.
  u64 pieces;
  // The element that a thread takes alone, before the pieces or after them; from `len` on, none.
  u64 alone;
};

// `thread` counts from 0 over all that take part: at least 2 N.
template <int N>
DEV Flat flat_pass(u64 thread, u64 len, i32 head) {
  u64 pieces = (len - head) / N;
  return Flat{pieces, thread < (u64)head ? thread : thread + pieces * N};
}
