// Matrix products of bf16 on any tensor cores (mma.sync), dense and grouped; see gemm.rs and
// grouped_gemm.rs for what is computed, prelude/tiles.cuh for how groups are cut into tiles.
//
//   C = op(A) op(B) + bias + beta C, a product per group; the bias may be null. Rows of a matrix lie its
//   pitch apart, matrices of groups one behind the other.
// -DTRANS_A  0: A is [m, k] and the rows of A and C are grouped, B is a matrix per group;
//            1: A is [k, m] and what is summed over is grouped, C is a matrix per group
// -DTRANS_B  0: B is [k, n], 1: B is [n, k]
// -DTYPE_C   type of C
// -DVEC      8 where every row of A, B and C starts at a multiple of 16 bytes, else 1
// -DTILE_M   rows of a tile: 128, or 64 where that fills the device better
//
// A block of four warps computes one tile after another, 64 columns and half of the rows a warp. Four
// stages of 32 along k are in flight by cp.async; 16-byte chunks lie in shared memory so that neither
// their arrival nor ldmatrix meets a bank twice. An element is the sum over k in steps of 16, the same
// for every tile size. Two blocks share a multiprocessor, so that one computes while the other stores.
#include "prelude.cuh"
#include "prelude/tiles.cuh"

#define TILE_N 128
#define TILE_K 32
#define STAGES 4
#define THREADS 128
#define BYTES_A (TILE_M * TILE_K * 2)
#define BYTES_B (TILE_N * TILE_K * 2)
#define STAGE_BYTES (BYTES_A + BYTES_B)
// Floats of a row of C on its way out: eight more than it has, so that rows spread over the banks.
#define PITCH (TILE_N + 8)
#define OUT_BYTES (TILE_M * PITCH * 4)
#define POOL_BYTES (STAGES * STAGE_BYTES > OUT_BYTES ? STAGES * STAGE_BYTES : OUT_BYTES)
// Blocks of 16 rows and of 8 columns of a warp's part.
#define BLOCKS_M (TILE_M / 32)
#define BLOCKS_N (TILE_N / 16)

#if VEC == 1
#define OUT_VEC 1
#else
#define OUT_VEC (16 / sizeof(TYPE_C))
#endif
struct alignas(OUT_VEC * sizeof(TYPE_C)) Piece {
  TYPE_C value[OUT_VEC];
};

// Where a chunk of a row lies, in an operand's tile with rows of so many chunks.
template <i32 Chunks>
DEV u32 place(u32 row, u32 chunk) {
  return (row * Chunks + (chunk ^ (Chunks == 4 ? row / 2 % 4 : row % 8))) * 16;
}

// A tile of Rows x Width elements; those outside of `rows` x `width` are zero.
template <i32 Rows, i32 Width>
DEV void load(u8* to, const bf16* from, i32 pitch, i32 rows, i32 width) {
  UNROLL for (i32 i = 0; i < Rows * Width / 8 / THREADS; i++) {
    i32 at = i * THREADS + threadIdx.x, row = at / (Width / 8), chunk = at % (Width / 8);
    i32 valid = row < rows ? width - 8 * chunk : 0;
    u8* dst = to + place<Width / 8>(row, chunk);
#if VEC == 8
    cp_async16(dst, valid > 0 ? from + (i64)row * pitch + 8 * chunk : from, valid > 0 ? 16 : 0);
#else
    const bf16* src = from + (i64)row * pitch + 8 * chunk;
    u32 bits[8];
    UNROLL for (i32 e = 0; e < 8; e++) bits[e] = e < valid ? src[e].bits : 0;
    *(Vec4*)dst =
        Vec4{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16};
#endif
  }
}

// 16 rows from `row` on and 16 along k from `k` on of A's tile.
DEV void fragment_a(u32 (&r)[4], const u8* tile, u32 row, u32 k) {
  u32 matrix = lane_id() / 8, in_matrix = lane_id() % 8;
#if TRANS_A
  ldmatrix_x4_trans(r, tile + place<TILE_M / 8>(k + matrix / 2 * 8 + in_matrix, row / 8 + matrix % 2));
#else
  ldmatrix_x4(r, tile + place<TILE_K / 8>(row + matrix % 2 * 8 + in_matrix, k / 8 + matrix / 2));
#endif
}

// Two blocks of 8 columns from `column` on.
DEV void fragments_b(u32 (&low)[2], u32 (&high)[2], const u8* tile, u32 column, u32 k) {
  u32 matrix = lane_id() / 8, in_matrix = lane_id() % 8, r[4];
#if TRANS_B
  ldmatrix_x4(r, tile + place<TILE_K / 8>(column + matrix / 2 * 8 + in_matrix, k / 8 + matrix % 2));
#else
  ldmatrix_x4_trans(r, tile + place<TILE_N / 8>(k + matrix % 2 * 8 + in_matrix, column / 8 + matrix / 2));
#endif
  low[0] = r[0], low[1] = r[1], high[0] = r[2], high[1] = r[3];
}

KERNEL(THREADS, 2)
gemm(const bf16* a, const bf16* b, TYPE_C* c, const bf16* bias, const i32* offsets, i32 groups, i32 m, i32 n, i32 k,
     i32 pitch_a, i32 pitch_b, i32 pitch_c, float beta) {
  DYN_SMEM(shared);
  i32* starts = (i32*)(shared + POOL_BYTES);
#if TRANS_A
  lay_tiles(starts, offsets, groups, k, [=](i32 count) { return count > 0 || beta != 1.f ? ceil_div(m, TILE_M) : 0; });
#else
  lay_tiles(starts, offsets, groups, m, [=](i32 count) { return ceil_div(count, TILE_M); });
#endif
  i32 columns = ceil_div(n, TILE_N), tiles = starts[groups] * columns;
  u32 warp_row = warp_id() / 2 * (TILE_M / 2), warp_column = warp_id() % 2 * (TILE_N / 2);

  for (i32 index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile = tile_at(starts, groups, columns, index);
    i32 row = tile.row * TILE_M, column = tile.column * TILE_N, width = n - column;
    i64 group = tile.group;
#if TRANS_A
    i32 first = group_start(offsets, k, tile.group), depth = group_start(offsets, k, tile.group + 1) - first;
    i32 height = m - row;
    const bf16* from_a = a + (i64)first * pitch_a + row;
    const bf16* from_b = TRANS_B ? b + (i64)column * pitch_b + first : b + (i64)first * pitch_b + column;
    TYPE_C* to = c + (group * m + row) * pitch_c + column;
#else
    row += group_start(offsets, m, tile.group);
    i32 height = group_start(offsets, m, tile.group + 1) - row, depth = k;
    const bf16* from_a = a + (i64)row * pitch_a;
    const bf16* from_b = b + (group * (TRANS_B ? n : k) + (TRANS_B ? column : 0)) * pitch_b + (TRANS_B ? 0 : column);
    TYPE_C* to = c + (i64)row * pitch_c + column;
#endif
    i32 steps = ceil_div(depth, TILE_K);

    auto fetch = [&](i32 step) {
      if (step < steps) {
        u8* stage = shared + step % STAGES * STAGE_BYTES;
        i32 at = step * TILE_K, left = depth - at;
        if (TRANS_A)
          load<TILE_K, TILE_M>(stage, from_a + (i64)at * pitch_a, pitch_a, left, height);
        else
          load<TILE_M, TILE_K>(stage, from_a + at, pitch_a, height, left);
        if (TRANS_B)
          load<TILE_N, TILE_K>(stage + BYTES_A, from_b + at, pitch_b, width, left);
        else
          load<TILE_K, TILE_N>(stage + BYTES_A, from_b + (i64)at * pitch_b, pitch_b, left, width);
      }
      // A group of copies a step, empty ones too, so that waiting can count them.
      cp_async_commit();
    };

    float sum[BLOCKS_M][BLOCKS_N][4];
    UNROLL for (i32 i = 0; i < BLOCKS_M; i++)
      UNROLL for (i32 j = 0; j < BLOCKS_N; j++)
        UNROLL for (i32 e = 0; e < 4; e++) sum[i][j][e] = 0.f;

    for (i32 step = 0; step < STAGES - 1; step++) fetch(step);
    for (i32 step = 0; step < steps; step++) {
      cp_async_wait<STAGES - 2>();
      // The stage of this step is there for all, and all are done with that of the step before.
      __syncthreads();
      fetch(step + STAGES - 1);
      const u8* stage = shared + step % STAGES * STAGE_BYTES;
      UNROLL for (i32 inner = 0; inner < TILE_K; inner += 16) {
        u32 fa[BLOCKS_M][4], fb[BLOCKS_N][2];
        UNROLL for (i32 i = 0; i < BLOCKS_M; i++) fragment_a(fa[i], stage, warp_row + 16 * i, inner);
        UNROLL for (i32 j = 0; j < BLOCKS_N; j += 2)
          fragments_b(fb[j], fb[j + 1], stage + BYTES_A, warp_column + 8 * j, inner);
        UNROLL for (i32 i = 0; i < BLOCKS_M; i++)
          UNROLL for (i32 j = 0; j < BLOCKS_N; j++) mma_m16n8k16(sum[i][j], fa[i], fb[j]);
      }
    }
    cp_async_wait<0>();
    __syncthreads();

    // Through shared memory, so that rows leave in wide pieces.
    float* out = (float*)shared;
    UNROLL for (i32 i = 0; i < BLOCKS_M; i++)
      UNROLL for (i32 j = 0; j < BLOCKS_N; j++)
        UNROLL for (i32 half = 0; half < 2; half++) {
          i32 at = warp_row + 16 * i + 8 * half + lane_id() / 4;
          float* place = out + at * PITCH + warp_column + 8 * j + lane_id() % 4 * 2;
          place[0] = sum[i][j][2 * half], place[1] = sum[i][j][2 * half + 1];
        }
    __syncthreads();
    for (i32 at = threadIdx.x; at < TILE_M * (i32)(TILE_N / OUT_VEC); at += THREADS) {
      i32 y = at / (i32)(TILE_N / OUT_VEC), x = at % (i32)(TILE_N / OUT_VEC) * (i32)OUT_VEC;
      if (y < height && x < width) {
        Piece* place = (Piece*)(to + (i64)y * pitch_c + x);
        Piece piece;
        float value[OUT_VEC];
        UNROLL for (i32 e = 0; e < (i32)OUT_VEC; e++) value[e] = out[y * PITCH + x + e];
        if (bias)
          UNROLL for (i32 e = 0; e < (i32)OUT_VEC; e++) value[e] += to_f32(bias[column + x + e]);
        if (beta != 0.f) {
          piece = *place;
          UNROLL for (i32 e = 0; e < (i32)OUT_VEC; e++) value[e] = fma_(beta, to_f32(piece.value[e]), value[e]);
        }
        UNROLL for (i32 e = 0; e < (i32)OUT_VEC; e++) piece.value[e] = from_f32<TYPE_C>(value[e]);
        *place = piece;
      }
    }
    // The next tile's copies overwrite what was read here.
    __syncthreads();
  }
}
EXPORT(gemm)
