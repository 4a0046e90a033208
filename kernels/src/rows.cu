// Copies of rows; see rows.rs.
//
// -DUNIT    bytes of one access: 16 where the host found every row aligned for it, else 4 or 2
// Widths, strides and offsets are in units.
#include "prelude.cuh"

#define THREADS 256
// Units that a thread has in flight.
#define HELD 4
// Units of one block's share of a chunk.
#define TILE (THREADS * HELD)

#if UNIT == 16
typedef Vec4 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u16 Unit;
#endif

// Units first, first + step, .. below `units`.
DEV void copy_units(const Unit* from, Unit* to, i32 first, i32 step, i32 units) {
  for (i32 i = first; i < units; i += HELD * step) {
    Unit held[HELD];
    UNROLL for (i32 j = 0; j < HELD; j++) if (i + j * step < units) held[j] = from[i + j * step];
    UNROLL for (i32 j = 0; j < HELD; j++) if (i + j * step < units) to[i + j * step] = held[j];
  }
}

// dst[i] = src[index[i]], or src[i] where there is no index, or zeros where it is negative. 2^shift threads
// share a row.
KERNEL(THREADS, 4) rows_copy(const Unit* src, u64 src_stride, Unit* dst, u64 dst_stride, const i32* index, i32 rows,
                             i32 width, i32 shift) {
  i32 row = blockIdx.x * (THREADS >> shift) + (threadIdx.x >> shift);
  if (row >= rows) return;
  i32 source = index ? index[row] : row, lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  Unit* to = dst + (u64)row * dst_stride;
  if (source < 0)
    for (i32 i = lane; i < width; i += lanes) to[i] = Unit{};
  else
    copy_units(src + (u64)source * src_stride, to, lane, lanes, width);
}
EXPORT(rows_copy)

// Contiguous chunks, each cut into tiles of one block. A line of the table: first unit in src, first unit
// in dst, units, and the number of tiles of the chunks before it.
KERNEL(THREADS, 4) rows_chunks(const Unit* src, Unit* dst, const Vec4* table, i32 chunks) {
  // The last chunk that starts at or before this tile.
  i32 low = 0, high = chunks;
  while (high - low > 1) {
    i32 middle = (low + high) / 2;
    if (table[middle].w <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  Vec4 chunk = table[low];
  u32 at = (blockIdx.x - chunk.w) * TILE;
  copy_units(src + chunk.x + at, dst + chunk.y + at, threadIdx.x, THREADS, min_(chunk.z - at, (u32)TILE));
}
EXPORT(rows_chunks)
