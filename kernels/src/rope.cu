// Rotary position embedding in place; see rope.rs for the formulas.
//
// -DT           type of x
// -DVEC         elements of one access: 16 bytes, or 1
// -DNEIGHBOURS  whether pairs are neighbouring elements, else i and i + half
// -DROWS        whether `rows` has the row of the tables that a token takes, else it takes its own
//
// Floor, bytes of device memory: reads and writes the rotated part of x, 2 tokens heads rotary T, and reads the
// tables, 4 tokens rotary, once. A thread takes VEC pairs of HEADS heads, so that it reads cosines and sines once
// for all of them and has 2 HEADS accesses of x in flight.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define HEADS 4

#ifndef ROWS
#define ROWS 0
#endif
#if ROWS
#define AT , const i32* rows
#else
#define AT
#endif

// The first `skipped` elements of a head pass. `direction` is 1, or -1 to rotate back.
KERNEL(THREADS, 3)
rope_rotate(T* x, const float* cos, const float* sin, i32 tokens, i32 heads, i32 width, i32 half, i32 skipped,
            float direction AT) {
  u32 pieces = half / VEC, groups = (heads + HEADS - 1) / HEADS;
  u32 item = blockIdx.x * THREADS + threadIdx.x;
  u32 piece = item % pieces, group = item / pieces % groups, token = item / pieces / groups;
  if (token >= tokens) return;
  i32 head = group * HEADS, count = min_(heads - head, HEADS);
  // Where the thread's 2 VEC elements of a head are.
  i32 one = NEIGHBOURS ? 2 * VEC * piece : VEC * piece, other = NEIGHBOURS ? one + VEC : one + half;
  T* start = x + ((u64)token * heads + head) * width + skipped;
  Piece<T, VEC> ones[HEADS], others[HEADS];
  UNROLL
  for (i32 h = 0; h < HEADS; h++) {
    if (h >= count) continue;
    ones[h] = load_piece<VEC>((const T*)start + h * width + one, 0);
    others[h] = load_piece<VEC>((const T*)start + h * width + other, 0);
  }
#if ROWS
  u64 row = rows[token];
#else
  u64 row = token;
#endif
  float c[VEC], s[VEC];
  widen(load_piece<VEC>(cos + row * half, piece), c);
  widen(load_piece<VEC>(sin + row * half, piece), s);
  UNROLL
  for (i32 h = 0; h < HEADS; h++) {
    if (h >= count) continue;
    float a[VEC], b[VEC], all[2 * VEC];
    widen(ones[h], a);
    widen(others[h], b);
    UNROLL
    for (int e = 0; e < VEC; e++) {
      all[e] = a[e];
      all[VEC + e] = b[e];
    }
    UNROLL
    for (int e = 0; e < VEC; e++) {
      const int first = NEIGHBOURS ? 2 * e : e, second = NEIGHBOURS ? 2 * e + 1 : VEC + e;
      float p = all[first], q = all[second], turn = s[e] * direction;
      all[first] = p * c[e] - q * turn;
      all[second] = q * c[e] + p * turn;
    }
    UNROLL
    for (int e = 0; e < VEC; e++) {
      a[e] = all[e];
      b[e] = all[VEC + e];
    }
    store_piece(start + h * width + one, 0, a);
    store_piece(start + h * width + other, 0, b);
  }
}
EXPORT(rope_rotate)
