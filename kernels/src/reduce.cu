// Ordered sums and copies between buffers of one device; see reduce.rs.
//
// -DS, -DD   types of what is read and of what is written
// -DVEC      elements of one access: 16 bytes of the wider of both where the host found everything aligned for
//            it, else one
// Lengths are in accesses.
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

DEV void add(float (&sum)[VEC], const Source& source) {
  UNROLL for (i32 e = 0; e < VEC; e++) sum[e] += to_f32(source.value[e]);
}

KERNEL(THREADS, 2) reduce_sum(const Source* s0, const Source* s1, const Source* s2, const Source* s3, const Source* s4,
                              const Source* s5, const Source* s6, const Source* s7, const u64* far, i32 sources,
                              Result* dst, u64 length) {
  const Source* near[NEAR] = {s0, s1, s2, s3, s4, s5, s6, s7};
  u64 stride = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < length; i += stride) {
    Source held[NEAR];
    float sum[VEC];
    UNROLL for (i32 r = 0; r < NEAR; r++) if (r < sources) held[r] = near[r][i];
    UNROLL for (i32 e = 0; e < VEC; e++) sum[e] = to_f32(held[0].value[e]);
    UNROLL for (i32 r = 1; r < NEAR; r++) if (r < sources) add(sum, held[r]);
    for (i32 first = NEAR; first < sources; first += HELD) {
      UNROLL for (i32 r = 0; r < HELD; r++) if (first + r < sources) held[r] = ((const Source*)far[first - NEAR + r])[i];
      UNROLL for (i32 r = 0; r < HELD; r++) if (first + r < sources) add(sum, held[r]);
    }
    Result result;
    UNROLL for (i32 e = 0; e < VEC; e++) result.value[e] = from_f32<D>(sum[e]);
    dst[i] = result;
  }
}
EXPORT(reduce_sum)

// One line of the table a pair: source, destination, length, tiles of the pairs before it.
KERNEL(THREADS, 4) reduce_copy(const u64* table, i32 pairs) {
  // The last pair that starts at or before this tile.
  i32 low = 0, high = pairs;
  while (high - low > 1) {
    i32 middle = (low + high) / 2;
    if (table[4 * middle + 3] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const u64* line = table + 4 * low;
  const Source* src = (const Source*)line[0];
  Result* dst = (Result*)line[1];
  u64 length = line[2], at = (blockIdx.x - line[3]) * TILE + threadIdx.x;
  Source held[HELD];
  UNROLL for (i32 j = 0; j < HELD; j++) if (at + j * THREADS < length) held[j] = src[at + j * THREADS];
  UNROLL for (i32 j = 0; j < HELD; j++) if (at + j * THREADS < length) {
    Result result;
    UNROLL for (i32 e = 0; e < VEC; e++) result.value[e] = from_f32<D>(to_f32(held[j].value[e]));
    dst[at + j * THREADS] = result;
  }
}
EXPORT(reduce_copy)
