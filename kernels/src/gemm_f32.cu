// Matrix products in exact f32 on any GPU, dense and grouped; see gemm.rs and grouped_gemm.rs for what
// is computed, prelude/tiles.cuh for how groups are cut into tiles. For f32 precision, and for products of f32 with
// bf16 that gemm/cuda/halves.rs does not do.
//
//   C = op(A) op(B) + bias + beta C, a product per group, as in gemm.cu; the bias is of B's type.
// -DTRANS_A, -DTRANS_B        as in gemm.cu
// -DTYPE_A, -DTYPE_B, -DTYPE_C  types of the three
//
// A block of 256 threads computes tiles of 128 x 128, 8 x 8 a thread in four blocks of 4 x 4, so that
// what a warp reads from shared memory lies side by side. The next 16 along k are on their way in
// registers during the arithmetic. An element is one chain of multiply-adds in order of k.
#include "prelude.cuh"
#include "prelude/tiles.cuh"

#define TILE 128
#define TILE_K 16
#define THREADS 256
// Floats from one k to the next: four more than there are, so that writes along k spread over banks.
#define PITCH (TILE + 4)
#define OPERAND (TILE_K * PITCH)
#define PER_THREAD (TILE * TILE_K / THREADS)

struct alignas(16) Four {
  float value[4];
};

// Element `i` of this thread's share of an operand's tile: where along k and where across. Threads of
// a warp go along what is contiguous in memory.
template <i32 AlongK>
DEV void place(i32 i, i32& depth, i32& across) {
  i32 at = i * THREADS + threadIdx.x;
  depth = AlongK ? at % TILE_K : at / TILE;
  across = AlongK ? at / TILE_K : at % TILE;
}

// Elements of a tile at `from`; zero outside of `depth` x `width`.
template <i32 AlongK, class V>
DEV void load(float (&r)[PER_THREAD], const V* from, i32 pitch, i32 depth, i32 width) {
  UNROLL for (i32 i = 0; i < PER_THREAD; i++) {
    i32 k, x;
    place<AlongK>(i, k, x);
    r[i] = k < depth && x < width ? to_f32(from[AlongK ? x * pitch + k : k * pitch + x]) : 0.f;
  }
}

template <i32 AlongK>
DEV void keep(float* to, const float (&r)[PER_THREAD]) {
  UNROLL for (i32 i = 0; i < PER_THREAD; i++) {
    i32 k, x;
    place<AlongK>(i, k, x);
    to[k * PITCH + x] = r[i];
  }
}

KERNEL(THREADS, 1)
gemm_f32(const TYPE_A* a, const TYPE_B* b, TYPE_C* c, const TYPE_B* bias, const i32* offsets, i32 groups, i32 m, i32 n,
         i32 k, i32 pitch_a, i32 pitch_b, i32 pitch_c, float beta) {
  DYN_SMEM(shared);
  float* pool = (float*)shared;
  i32* starts = (i32*)(pool + 4 * OPERAND);
#if TRANS_A
  lay_tiles(starts, offsets, groups, k, [=](i32 count) { return count > 0 || beta != 1.f ? ceil_div(m, TILE) : 0; });
#else
  lay_tiles(starts, offsets, groups, m, [=](i32 count) { return ceil_div(count, TILE); });
#endif
  i32 columns = ceil_div(n, TILE), tiles = starts[groups] * columns;
  i32 y0 = threadIdx.x / 16 * 4, x0 = threadIdx.x % 16 * 4;

  for (i32 index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile = tile_at(starts, groups, columns, index);
    i32 row = tile.row * TILE, column = tile.column * TILE, width = n - column;
    i64 group = tile.group;
#if TRANS_A
    i32 first = group_start(offsets, k, tile.group), depth = group_start(offsets, k, tile.group + 1) - first;
    i32 height = m - row;
    const TYPE_A* from_a = a + (i64)first * pitch_a + row;
    const TYPE_B* from_b = TRANS_B ? b + (i64)column * pitch_b + first : b + (i64)first * pitch_b + column;
    TYPE_C* to = c + (group * m + row) * pitch_c + column;
#else
    row += group_start(offsets, m, tile.group);
    i32 height = group_start(offsets, m, tile.group + 1) - row, depth = k;
    const TYPE_A* from_a = a + (i64)row * pitch_a;
    const TYPE_B* from_b = b + (group * (TRANS_B ? n : k) + (TRANS_B ? column : 0)) * pitch_b + (TRANS_B ? 0 : column);
    TYPE_C* to = c + (i64)row * pitch_c + column;
#endif
    float next_a[PER_THREAD], next_b[PER_THREAD];
    auto fetch = [&](i32 at) {
      load<!TRANS_A>(next_a, from_a + (TRANS_A ? (i64)at * pitch_a : (i64)at), pitch_a, depth - at, height);
      load<TRANS_B>(next_b, from_b + (TRANS_B ? (i64)at : (i64)at * pitch_b), pitch_b, depth - at, width);
    };

    float sum[8][8];
    UNROLL for (i32 i = 0; i < 8; i++) UNROLL for (i32 j = 0; j < 8; j++) sum[i][j] = 0.f;
    if (depth > 0) fetch(0);
    i32 side = 0;
    for (i32 at = 0; at < depth; at += TILE_K) {
      // Two sides: one barrier a step, since the other side is read by nobody any more.
      float *tile_a = pool + side * 2 * OPERAND, *tile_b = tile_a + OPERAND;
      side = 1 - side;
      keep<!TRANS_A>(tile_a, next_a);
      keep<TRANS_B>(tile_b, next_b);
      __syncthreads();
      if (at + TILE_K < depth) fetch(at + TILE_K);
      UNROLL for (i32 inner = 0; inner < TILE_K; inner++) {
        const float *line_a = tile_a + inner * PITCH + y0, *line_b = tile_b + inner * PITCH + x0;
        Four fa[2] = {*(const Four*)line_a, *(const Four*)(line_a + TILE / 2)};
        Four fb[2] = {*(const Four*)line_b, *(const Four*)(line_b + TILE / 2)};
        UNROLL for (i32 i = 0; i < 8; i++)
          UNROLL for (i32 j = 0; j < 8; j++)
            sum[i][j] = fma_(fa[i / 4].value[i % 4], fb[j / 4].value[j % 4], sum[i][j]);
      }
    }
    // The next tile may start on the side that was read last.
    __syncthreads();

    UNROLL for (i32 i = 0; i < 8; i++) {
      i32 y = i / 4 * (TILE / 2) + y0 + i % 4;
      UNROLL for (i32 j = 0; j < 8; j++) {
        i32 x = j / 4 * (TILE / 2) + x0 + j % 4;
        if (y < height && x < width) {
          TYPE_C* place = to + (i64)y * pitch_c + x;
          float value = sum[i][j];
          if (bias) value += to_f32(bias[column + x]);
          *place = from_f32<TYPE_C>(beta == 0.f ? value : fma_(beta, to_f32(*place), value));
        }
      }
    }
  }
}
EXPORT(gemm_f32)
