// Ordered sums, maxima and copies between buffers of one device; see reduce.rs.
//
// -DS, -DD   types of what is read and of what is written
// -DVEC      elements of one access: 16 bytes of the wider of both where the host found everything aligned for
//            it, else one
// Lengths are in accesses. The result of a sum or a maximum may be one of its sources: a thread reads all of an
// access before it writes it.
#include "prelude.cuh"

#define THREADS 256
// Sources whose addresses are arguments; those of more lie in memory.
#define NEAR 8
// Accesses of a copy that a thread has in flight, and those of one block.
#define HELD 4
#define TILE (THREADS * HELD)

struct alignas(VEC * sizeof(S)) Source {
  S value[VEC];
};
struct alignas(VEC * sizeof(D)) Result {
  D value[VEC];
};

template <bool LARGEST>
DEV void add(float (&sum)[VEC], const Source& source) {
  UNROLL for (i32 e = 0; e < VEC; e++) {
    float value = to_f32(source.value[e]);
    sum[e] = LARGEST ? max_(sum[e], value) : sum[e] + value;
  }
}

template <bool LARGEST>
DEV void reduce(const Source* s0, const Source* s1, const Source* s2, const Source* s3, const Source* s4,
                const Source* s5, const Source* s6, const Source* s7, const u64* far, i32 sources, Result* dst, u64 length) {
  const Source* near[NEAR] = {s0, s1, s2, s3, s4, s5, s6, s7};
  u64 stride = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < length; i += stride) {
    Source held[NEAR];
    float sum[VEC];
    UNROLL for (i32 r = 0; r < NEAR; r++) if (r < sources) held[r] = near[r][i];
    UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = to_f32(held[0].value[e]);
    UNROLL for (i32 r = 1; r < NEAR; r++) if (r < sources) add<LARGEST>(sum, held[r]);
    for (i32 first = NEAR; first < sources; first += HELD) {
      UNROLL for (i32 r = 0; r < HELD; r++) if (first + r < sources) held[r] = ((const Source*)far[first - NEAR + r])[i];
      UNROLL for (i32 r = 0; r < HELD; r++) if (first + r < sources) add<LARGEST>(sum, held[r]);
    }
    Result result;
    UNROLL for (i32 e = 0; e < VEC; e++) result.value[e] = from_f32<D>(sum[e]);
    dst[i] = result;
  }
}

KERNEL(THREADS, 2) reduce_sum(const Source* s0, const Source* s1, const Source* s2, const Source* s3, const Source* s4,
                              const Source* s5, const Source* s6, const Source* s7, const u64* far, i32 sources,
                              Result* dst, u64 length) {
  reduce<false>(s0, s1, s2, s3, s4, s5, s6, s7, far, sources, dst, length);
}
EXPORT(reduce_sum)

KERNEL(THREADS, 2) reduce_max(const Source* s0, const Source* s1, const Source* s2, const Source* s3, const Source* s4,
                              const Source* s5, const Source* s6, const Source* s7, const u64* far, i32 sources,
                              Result* dst, u64 length) {
  reduce<true>(s0, s1, s2, s3, s4, s5, s6, s7, far, sources, dst, length);
}
EXPORT(reduce_max)

// Up to NEAR pairs: sources, destinations, lengths. A row of the grid a pair, a column a tile.
KERNEL(THREADS, 4) reduce_copy(const Source* s0, const Source* s1, const Source* s2, const Source* s3, const Source* s4,
                               const Source* s5, const Source* s6, const Source* s7, Result* d0, Result* d1, Result* d2,
                               Result* d3, Result* d4, Result* d5, Result* d6, Result* d7, u64 l0, u64 l1, u64 l2,
                               u64 l3, u64 l4, u64 l5, u64 l6, u64 l7) {
  const Source* src = s0;
  Result* dst = d0;
  u64 length = l0;
#define PAIR(n)          \
  if (blockIdx.y == n) { \
    src = s##n;          \
    dst = d##n;          \
    length = l##n;       \
  }
  PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) PAIR(7)
  u64 at = (u64)blockIdx.x * TILE + threadIdx.x;
  Source held[HELD];
  UNROLL for (i32 j = 0; j < HELD; j++) if (at + j * THREADS < length) held[j] = src[at + j * THREADS];
  UNROLL for (i32 j = 0; j < HELD; j++) if (at + j * THREADS < length) {
    Result result;
    UNROLL for (i32 e = 0; e < VEC; e++) result.value[e] = from_f32<D>(to_f32(held[j].value[e]));
    dst[at + j * THREADS] = result;
  }
}
EXPORT(reduce_copy)
