// What the vendor's library reads of every group of a grouped product; see gemm/cuda/library.rs.
//
// Floor: nine numbers a group are written.
#include "prelude.cuh"

// A table of `groups` numbers for each of: addresses of A, B and C, sizes m, n and k, elements from row to row of A, B
// and C. Where `sum`, rows of A and B are grouped and C is a matrix per group; else rows of A and C are, and B is a
// matrix per group. `pitch_*` are elements, `size_*` bytes of one.
KERNEL(128, 1)
grouped_tables(u64 a, u64 b, u64 c, const i32* offsets, u64* tables, i32 groups, i32 m, i32 n, i32 k, i32 rows_b,
               i32 pitch_a, i32 pitch_b, i32 pitch_c, i32 size_ab, i32 size_c, i32 sum) {
  i32 group = blockIdx.x * 128 + threadIdx.x;
  if (group >= groups) return;
  u64 first = offsets[group], count = offsets[group + 1] - first;
  u64 row_a = first, row_b = sum ? first : (u64)group * rows_b, row_c = sum ? (u64)group * m : first;
  u64 fields[9] = {
      a + row_a * pitch_a * size_ab, b + row_b * pitch_b * size_ab, c + row_c * pitch_c * size_c,
      sum ? m : count, (u64)n, sum ? count : k,
      (u64)pitch_a, (u64)pitch_b, (u64)pitch_c,
  };
  UNROLL
  for (i32 field = 0; field < 9; field++) tables[(u64)field * groups + group] = fields[field];
}
EXPORT(grouped_tables)
