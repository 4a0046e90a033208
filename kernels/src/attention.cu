// Flash attention for every GPU from sm_80 on; see attention.rs for the formulas and attention/cuda.rs for the design.
//
// -DT           type of q, k, v, o and their gradients
// -DDK -DDV     widths of a head, rounded up to multiples of 16; what is beyond the true width is zero
// -DQUERIES     forward: queries of a block: 64 (one row tile of 16 a warp) or 128 (two)
// -DKEYS        forward: keys of a step
// -DTILE        backward: keys of a block and queries of a step
// -DCAUSAL      whether a query sees only the keys up to its own
// -DWINDOW      with it, whether it sees only the last `window` of those; without, no
// -DDOCUMENTS   with both, whether it sees only those of its own document: of each token of a sequence `bounds [2, tokens]`
//               has where its document begins, and behind all of those where it ends
// -DVEC         whether every row starts at a multiple of 16 bytes
//
// One text for both types. In bf16 a product is mma.sync on fragments that ldmatrix fetched; in f32 it is the same
// fragments with scalar arithmetic, slower and exact to f32.
#include "prelude.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif
#if DOCUMENTS
#define BOUNDS , const int* bounds
#else
#define BOUNDS
#endif

constexpr bool HALF = sizeof(T) == 2;
constexpr int PIECE = 16 / sizeof(T);
// A row of shared memory is an odd number of 16-byte pieces, so that eight rows of a column lie in different banks.
constexpr int PAD = PIECE;
constexpr int LDK = DK + PAD, LDV = DV + PAD;
constexpr float LOG2E = 1.4426950408889634f;

DEV float infinity() { return f32_of_bits(0x7f800000u); }

// ---- Tiles ----

// Starts copying `rows` rows (those from `count` on are zero) of `width` elements (zero from there to WIDTH).
template <int ROWS, int WIDTH>
DEV void load_tile(T* tile, const T* from, u64 stride, int count, int width) {
  constexpr int PIECES = WIDTH / PIECE;
  for (int i = threadIdx.x; i < ROWS * PIECES; i += blockDim.x) {
    int row = i / PIECES, column = i % PIECES * PIECE;
    int valid = row < count ? max_(min_(width - column, PIECE), 0) : 0;
    T* to = tile + row * (WIDTH + PAD) + column;
    const T* source = valid > 0 ? from + row * stride + column : from;
#if VEC
    cp_async16(to, source, valid * sizeof(T));
#else
    UNROLL for (int e = 0; e < PIECE; e++) to[e] = e < valid ? source[e] : from_f32<T>(0.f);
#endif
  }
}

// A thread's part of a 16 x 8 product tile: rows g and g + 8, columns 2t and 2t + 1, where g = lane / 4, t = lane % 4.
// Writes it as rows of `width` elements, the tile's first column being `column`.
DEV void store_rows(T* to, u64 stride, int count, int column, int width, const float (&d)[4]) {
  int row = lane_id() / 4;
  column += lane_id() % 4 * 2;
  UNROLL for (int half = 0; half < 2; half++) {
    if (row + 8 * half >= count) continue;
    T* at = to + (row + 8 * half) * stride + column;
    if (VEC && HALF) {
      if (column < width) *(u32*)at = pack_bf16(d[2 * half], d[2 * half + 1]);
    } else {
      UNROLL for (int e = 0; e < 2; e++)
        if (column + e < width) at[e] = from_f32<T>(d[2 * half + e]);
    }
  }
}

// ---- Products of a warp ----

// Fragments of 16 x 16 elements of A: rows of it one after the other, or its columns where TRANSPOSED.
template <int M, bool TRANSPOSED>
DEV void load_a(u32 (&a)[M][4], const T* from, int stride) {
  int row = lane_id() % 8, low = lane_id() / 8 % 2 * 8, high = lane_id() / 16 * 8;
  UNROLL for (int m = 0; m < M; m++) {
    if (TRANSPOSED)
      ldmatrix_x4_trans(a[m], from + (high + row) * stride + 16 * m + low);
    else
      ldmatrix_x4(a[m], from + (16 * m + low + row) * stride + high);
  }
}

// d += a b for 16 steps of the inner index. b is N tiles of 8 columns, stored column by column, or row by row where ROWS.
template <int M, int N, bool ROWS>
DEV void multiply_16(float (&d)[M][N][4], const u32 (&a)[M][4], const T* b, int stride) {
  int row = lane_id() % 8, low = lane_id() / 8 % 2 * 8, high = lane_id() / 16 * 8;
  UNROLL for (int n = 0; n + 1 < N; n += 2) {
    u32 two[4];
    if (ROWS)
      ldmatrix_x4_trans(two, b + (low + row) * stride + 8 * n + high);
    else
      ldmatrix_x4(two, b + (8 * n + high + row) * stride + low);
    u32 first[2] = {two[0], two[1]}, second[2] = {two[2], two[3]};
    UNROLL for (int m = 0; m < M; m++) {
      mma_m16n8k16(d[m][n], a[m], first);
      mma_m16n8k16(d[m][n + 1], a[m], second);
    }
  }
  if (N % 2) {
    u32 last[2];
    if (ROWS)
      ldmatrix_x2_trans(last, b + (low + row) * stride + 8 * (N - 1));
    else
      ldmatrix_x2(last, b + (8 * (N - 1) + row) * stride + low);
    UNROLL for (int m = 0; m < M; m++) mma_m16n8k16(d[m][N - 1], a[m], last);
  }
}

// d += A B over K steps of the inner index, both in shared memory: A by rows or, where A_COLUMNS, by columns; B by
// columns or, where B_ROWS, by rows.
template <int M, int N, int K, bool A_COLUMNS, bool B_ROWS>
DEV void multiply(float (&d)[M][N][4], const T* a, int a_stride, const T* b, int b_stride) {
  if (HALF) {
    // Not unrolled whole: the addresses of all steps at once cost registers.
    _Pragma("unroll 2") for (int k = 0; k < K; k += 16) {
      u32 fragments[M][4];
      load_a<M, A_COLUMNS>(fragments, a + (A_COLUMNS ? k * a_stride : k), a_stride);
      multiply_16<M, N, B_ROWS>(d, fragments, b + (B_ROWS ? k * b_stride : k), b_stride);
    }
  } else {
    int row = lane_id() / 4, column = lane_id() % 4 * 2;
    for (int k = 0; k < K; k++) {
      float x[M][2];
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
          int i = 16 * m + 8 * half + row;
          x[m][half] = to_f32(A_COLUMNS ? a[k * a_stride + i] : a[i * a_stride + k]);
        }
      UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int e = 0; e < 2; e++) {
          int j = 8 * n + column + e;
          float y = to_f32(B_ROWS ? b[k * b_stride + j] : b[j * b_stride + k]);
          UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int half = 0; half < 2; half++)
              d[m][n][2 * half + e] = fma_(x[m][half], y, d[m][n][2 * half + e]);
        }
    }
  }
}

template <int M, int N>
DEV void clear(float (&d)[M][N][4]) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int e = 0; e < 4; e++) d[m][n][e] = 0.f;
}

// ---- Forward ----

#ifdef QUERIES

constexpr int M = QUERIES / 64;

// d += P V: the probabilities are their own A fragments in bf16; in f32 they go through the warp's `scratch`.
DEV void multiply_values(float (&o)[M][DV / 8][4], const float (&p)[M][KEYS / 8][4], const T* v, T* scratch) {
  if (HALF) {
    UNROLL for (int k = 0; k < KEYS; k += 16) {
      u32 a[M][4];
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < 4; i++) {
          const float(&from)[4] = p[m][k / 8 + i / 2];
          a[m][i] = pack_bf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      multiply_16<M, DV / 8, true>(o, a, v + k * LDV, LDV);
    }
  } else {
    int row = lane_id() / 4, column = lane_id() % 4 * 2;
    syncwarp();
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int e = 0; e < 4; e++)
          scratch[(16 * m + 8 * (e / 2) + row) * (KEYS + PAD) + 8 * n + column + e % 2] = from_f32<T>(p[m][n][e]);
    syncwarp();
    multiply<M, DV / 8, KEYS, false, true>(o, scratch, KEYS + PAD, v, LDV);
  }
}

// A block is QUERIES queries of one head: four warps, 16 M rows each. Blocks of many keys come first, and the heads of a
// group one after the other, so that their keys and values stay in the second-level cache. While scores are computed the
// values arrive, and while those are multiplied the next keys.
KERNEL(128, 1) attention_forward(const T* q, const T* k, const T* v, T* o, float* lse, int seqs, int seq_len, int heads,
                                 int group, int qk_width, int v_width, int window, float scale BOUNDS) {
  DYN_SMEM(shared);
  T* tile_q = (T*)shared;
  T* tile_k = tile_q + QUERIES * LDK;
  T* tile_v = tile_k + KEYS * LDK;
  T* scratch = tile_v + KEYS * LDV + warp_id() * 16 * M * (KEYS + PAD);

  int blocks = (seq_len + QUERIES - 1) / QUERIES, pairs = heads * seqs;
  int block = blocks - 1 - (int)blockIdx.x / pairs, head = blockIdx.x % pairs % heads, seq = blockIdx.x % pairs / heads;
  int first = block * QUERIES, kv_heads = heads / group, kv_head = head / group;
  u64 q_stride = (u64)heads * qk_width, k_stride = (u64)kv_heads * qk_width, v_stride = (u64)kv_heads * v_width;
  u64 token = (u64)seq * seq_len;
  q += (token + first) * q_stride + (u64)head * qk_width;
  k += token * k_stride + (u64)kv_head * qk_width;
  v += token * v_stride + (u64)kv_head * v_width;

  // Where the document of a query begins.
  auto begin_of = [&](int query) {
#if DOCUMENTS
    return bounds[token + min_(query, seq_len - 1)];
#else
    return 0 * query;
#endif
  };

  // The first step that some query's window and document reach into.
  int start = WINDOW ? max_(first + 1 - window, begin_of(first)) / KEYS * KEYS : 0;
  int latest = begin_of(first + QUERIES - 1);
  load_tile<QUERIES, DK>(tile_q, q, q_stride, seq_len - first, qk_width);
  load_tile<KEYS, DK>(tile_k, k + start * k_stride, k_stride, seq_len - start, qk_width);
  cp_async_commit();

  float out[M][DV / 8][4], top[M][2], total[M][2];
  clear(out);
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int r = 0; r < 2; r++) {
      top[m][r] = -infinity();
      total[m][r] = 0.f;
    }
  float slope = scale * LOG2E;
  int warp_row = warp_id() * 16 * M, seen = CAUSAL ? min_(first + QUERIES, seq_len) : seq_len;

  for (int key = start; key < seen; key += KEYS) {
    cp_async_wait<0>();
    __syncthreads();  // these keys are here, and nobody reads the last values any more
    load_tile<KEYS, DV>(tile_v, v + key * v_stride, v_stride, seq_len - key, v_width);
    cp_async_commit();

    float s[M][KEYS / 8][4];
    clear(s);
    multiply<M, KEYS / 8, DK, false, false>(s, tile_q + warp_row * LDK, LDK, tile_k, LDK);

    // Without a window the block's first key is one that every query sees: `top` is a number from the first step on.
    if (key + KEYS > (CAUSAL ? first : seq_len) || (WINDOW && key + window < first + QUERIES) || (DOCUMENTS && key < latest)) {
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < KEYS / 8; n++)
          UNROLL for (int e = 0; e < 4; e++) {
            int row = first + warp_row + 16 * m + 8 * (e / 2) + lane_id() / 4;
            int column = key + 8 * n + lane_id() % 4 * 2 + e % 2;
            if (column > (CAUSAL ? row : seq_len - 1) || (WINDOW && column + window <= row) ||
                (DOCUMENTS && column < begin_of(row)))
              s[m][n][e] = -infinity();
          }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int r = 0; r < 2; r++) {
        float highest = top[m][r];
        UNROLL for (int n = 0; n < KEYS / 8; n++)
          highest = max_(highest, max_(s[m][n][2 * r], s[m][n][2 * r + 1]));
        highest = max_(highest, shfl_xor(highest, 1));
        highest = max_(highest, shfl_xor(highest, 2));
        // A row whose window is still to come has seen no key: its probabilities are zero, and so is what they scale.
        float seen_top = WINDOW && highest == -infinity() ? 0.f : highest;
        float shrink = exp2_((top[m][r] - seen_top) * slope), base = seen_top * slope;
        top[m][r] = highest;
        total[m][r] *= shrink;
        UNROLL for (int n = 0; n < DV / 8; n++)
          UNROLL for (int e = 0; e < 2; e++) out[m][n][2 * r + e] *= shrink;
        UNROLL for (int n = 0; n < KEYS / 8; n++)
          UNROLL for (int e = 0; e < 2; e++) {
            float p = exp2_(fma_(s[m][n][2 * r + e], slope, -base));
            total[m][r] += p;
            s[m][n][2 * r + e] = p;
          }
      }

    cp_async_wait<0>();
    __syncthreads();  // the values are here, and nobody reads the keys any more
    if (key + KEYS < seen) {
      load_tile<KEYS, DK>(tile_k, k + (key + KEYS) * k_stride, k_stride, seq_len - key - KEYS, qk_width);
      cp_async_commit();
    }
    multiply_values(out, s, tile_v, scratch);
  }

  u64 o_stride = (u64)heads * v_width;
  UNROLL for (int m = 0; m < M; m++) {
    int row = first + warp_row + 16 * m;
    UNROLL for (int r = 0; r < 2; r++) {
      float sum = total[m][r];
      sum += shfl_xor(sum, 1);
      sum += shfl_xor(sum, 2);
      float inverse = 1.f / sum;
      UNROLL for (int n = 0; n < DV / 8; n++)
        UNROLL for (int e = 0; e < 2; e++) out[m][n][2 * r + e] *= inverse;
      int at = row + 8 * r + (int)lane_id() / 4;
      if (lane_id() % 4 == 0 && at < seq_len)
        lse[(u64)head * seqs * seq_len + token + at] = top[m][r] * scale + log_(sum);
    }
    UNROLL for (int n = 0; n < DV / 8; n++)
      store_rows(o + (token + row) * o_stride + (u64)head * v_width, o_stride, seq_len - row, 8 * n, v_width, out[m][n]);
  }
}
EXPORT(attention_forward)

#endif

// ---- Backward ----

#ifdef TILE

constexpr int WARPS = TILE / 16 * 2, LDT = TILE + PAD;
// What a warp has of each product: 16 rows, and half of the columns.
constexpr int NT = TILE / 16, NK = DK / 16, NV = DV / 16;

// delta [heads, tokens] = rowsum(do * o): eight threads a row, 32 tokens of one head a block.
KERNEL(256, 1) attention_delta(const T* d_o, const T* o, float* delta, int tokens, int heads, int width) {
  int head = blockIdx.x % heads, token = blockIdx.x / heads * 32 + threadIdx.x / 8, lane = threadIdx.x % 8;
  float sum = 0.f;
  if (token < tokens) {
    u64 row = ((u64)token * heads + head) * width;
#if VEC
    for (int i = lane * PIECE; i < width; i += 8 * PIECE) {
      struct alignas(16) Piece {
        T value[PIECE];
      } x = *(const Piece*)(d_o + row + i), y = *(const Piece*)(o + row + i);
      UNROLL for (int e = 0; e < PIECE; e++) sum = fma_(to_f32(x.value[e]), to_f32(y.value[e]), sum);
    }
#else
    for (int i = lane; i < width; i += 8) sum = fma_(to_f32(d_o[row + i]), to_f32(o[row + i]), sum);
#endif
  }
  UNROLL for (int distance = 4; distance > 0; distance /= 2) sum += shfl_xor(sum, distance);
  if (token < tokens && lane == 0) delta[(u64)head * tokens + token] = sum;
}
EXPORT(attention_delta)

// A block takes a ticket, and with it TILE keys of one key/value head, the longest work first. It goes through the
// queries that see them from the last to the first, for each through the heads of the group, and holds the sums of
// dk and dv in registers. Those of dq are shared by blocks: `sums` has one tile of f32 for TILE queries of a head, in the
// order of the registers, and `turns` behind its first entry counts the blocks of keys that have added to each. A block
// adds when all before it have, so the order is that of the keys. It only ever waits for smaller tickets. The last to add
// writes dq.
KERNEL(WARPS * 32, 1) attention_backward(const T* d_o, const T* q, const T* k, const T* v, const float* lse,
                                         const float* delta, T* d_q, T* d_k, T* d_v, float* sums, u32* turns, int seqs,
                                         int seq_len, int heads, int group, int qk_width, int v_width, int window,
                                         float scale BOUNDS) {
  DYN_SMEM(shared);
  T* tile_k = (T*)shared;
  T* tile_v = tile_k + TILE * LDK;
  T* tile_q = tile_v + TILE * LDV;
  T* tile_do = tile_q + TILE * LDK;
  T* tile_p = tile_do + TILE * LDV;  // [key][query], as the next
  T* tile_ds = tile_p + TILE * LDT;
  float* tile_lse = (float*)(tile_ds + TILE * LDT);
  float* tile_delta = tile_lse + TILE;
  u32* ticket = (u32*)(tile_delta + TILE);

  if (threadIdx.x == 0) *ticket = atomic_add(turns, 1u);
  __syncthreads();
  int blocks = (seq_len + TILE - 1) / TILE, kv_heads = heads / group, pairs = kv_heads * seqs;
  int block = *ticket / pairs, kv_head = *ticket % pairs % kv_heads, seq = *ticket % pairs / kv_heads;
  // The block of the last query that sees any of the keys.
  int end = WINDOW ? min_(blocks - 1, (block * TILE + TILE - 2 + window) / TILE) : blocks - 1;
#if DOCUMENTS
  end = min_(end, (bounds[(u64)(seqs + seq) * seq_len + min_(block * TILE + TILE, seq_len) - 1] - 1) / TILE);
#endif
  int first = block * TILE, steps = (CAUSAL ? end + 1 - block : blocks) * group;
  u64 q_stride = (u64)heads * qk_width, k_stride = (u64)kv_heads * qk_width;
  u64 o_stride = (u64)heads * v_width, v_stride = (u64)kv_heads * v_width;
  u64 token = (u64)seq * seq_len, tokens = (u64)seqs * seq_len;

  // Where the document of a query begins.
  auto begin_of = [&](int query) {
#if DOCUMENTS
    return bounds[token + min_(query, seq_len - 1)];
#else
    return 0 * query;
#endif
  };

  // Queries beyond the end have probability and gradient zero.
  auto load_step = [&](int step) {
    int from = (end - step / group) * TILE, head = kv_head * group + step % group;
    load_tile<TILE, DK>(tile_q, q + (token + from) * q_stride + (u64)head * qk_width, q_stride, seq_len - from, qk_width);
    load_tile<TILE, DV>(tile_do, d_o + (token + from) * o_stride + (u64)head * v_width, o_stride, seq_len - from, v_width);
    for (int i = threadIdx.x; i < 2 * TILE; i += blockDim.x) {
      int row = i % TILE;
      bool here = from + row < seq_len;
      u64 at = head * tokens + token + from + row;
      if (i < TILE)
        tile_lse[row] = here ? lse[at] * LOG2E : infinity();
      else
        tile_delta[row] = here ? delta[at] : 0.f;
    }
    cp_async_commit();
  };
  load_tile<TILE, DK>(tile_k, k + (token + first) * k_stride + (u64)kv_head * qk_width, k_stride, seq_len - first, qk_width);
  load_tile<TILE, DV>(tile_v, v + (token + first) * v_stride + (u64)kv_head * v_width, v_stride, seq_len - first, v_width);
  load_step(0);

  // Of every product with keys for rows a warp has 16 keys, of dq 16 queries.
  int row = (int)warp_id() / 2 * 16, half = warp_id() % 2;
  float slope = scale * LOG2E;
  float sum_k[1][NK][4], sum_v[1][NV][4];
  clear(sum_k);
  clear(sum_v);
  u32* turn = nullptr;
  int earliest = 0;

  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();  // the tiles are here, and all of the last step's additions to dq are made
    if (threadIdx.x == 0 && turn) {
      thread_fence();
      store_release(turn, block - earliest + 1);
    }

    float p[1][NT][4], dp[1][NT][4];
    clear(p);
    clear(dp);
    multiply<1, NT, DK, false, false>(p, tile_k + row * LDK, LDK, tile_q + half * (TILE / 2) * LDK, LDK);
    multiply<1, NT, DV, false, false>(dp, tile_v + row * LDV, LDV, tile_do + half * (TILE / 2) * LDV, LDV);

    int query_block = end - step / group, head = kv_head * group + step % group, ahead = query_block * TILE - first;
    bool edge = CAUSAL ? query_block == block : first + TILE > seq_len;
    if (WINDOW) edge = edge || ahead + TILE > window;
    if (DOCUMENTS) edge = edge || first < begin_of(first + ahead + TILE - 1);
    UNROLL for (int n = 0; n < NT; n++) {
      int column = half * (TILE / 2) + 8 * n + lane_id() % 4 * 2;
      UNROLL for (int e = 0; e < 4; e++) {
        int i = column + e % 2, j = row + 8 * (e / 2) + lane_id() / 4;
        float value = exp2_(fma_(p[0][n][e], slope, -tile_lse[i]));
        bool hidden = WINDOW ? j > ahead + i || j + window <= ahead + i : CAUSAL ? j > i : first + j >= seq_len;
        if (DOCUMENTS && edge) hidden = hidden || first + j < begin_of(first + ahead + i);
        if (edge && hidden) value = 0.f;
        p[0][n][e] = value;
        dp[0][n][e] = value * (dp[0][n][e] - tile_delta[i]);
      }
      UNROLL for (int r = 0; r < 2; r++) {
        int at = (row + 8 * r + lane_id() / 4) * LDT + column;
        if (HALF) {
          *(u32*)(tile_p + at) = pack_bf16(p[0][n][2 * r], p[0][n][2 * r + 1]);
          *(u32*)(tile_ds + at) = pack_bf16(dp[0][n][2 * r], dp[0][n][2 * r + 1]);
        } else {
          UNROLL for (int e = 0; e < 2; e++) {
            tile_p[at + e] = from_f32<T>(p[0][n][2 * r + e]);
            tile_ds[at + e] = from_f32<T>(dp[0][n][2 * r + e]);
          }
        }
      }
    }
    __syncthreads();  // probabilities and their gradients are whole

    multiply<1, NV, TILE, false, true>(sum_v, tile_p + row * LDT, LDT, tile_do + half * (DV / 2), LDV);
    multiply<1, NK, TILE, false, true>(sum_k, tile_ds + row * LDT, LDT, tile_q + half * (DK / 2), LDK);
    u64 tile = ((u64)seq * heads + head) * blocks + query_block;
    turn = turns + 1 + tile;
    // The block of the first key that these queries see.
    earliest = WINDOW ? max_(query_block * TILE + 1 - window, begin_of(query_block * TILE)) / TILE : 0;
    if (threadIdx.x == 0)
      while (load_acquire(turn) != (u32)(block - earliest)) {
      }
    __syncthreads();  // nobody reads the queries any more, and it is this block's turn to add
    if (step + 1 < steps) load_step(step + 1);

    float d[1][NK][4];
    clear(d);
    multiply<1, NK, TILE, true, true>(d, tile_ds + row, LDT, tile_k + half * (DK / 2), LDK);
    struct alignas(16) Four {
      float value[4];
    }* sum = (Four*)(sums + tile * (TILE * DK)) + warp_id() * NK * 32 + lane_id();
    bool last = block == (CAUSAL ? query_block : blocks - 1);
    int from = query_block * TILE + row;
    UNROLL for (int n = 0; n < NK; n++) {
      if (block > earliest) {
        Four before = sum[32 * n];
        UNROLL for (int e = 0; e < 4; e++) d[0][n][e] += before.value[e];
      }
      if (last) {
        UNROLL for (int e = 0; e < 4; e++) d[0][n][e] *= scale;
        store_rows(d_q + (token + from) * q_stride + (u64)head * qk_width, q_stride, seq_len - from,
                   half * (DK / 2) + 8 * n, qk_width, d[0][n]);
      } else {
        Four after;
        UNROLL for (int e = 0; e < 4; e++) after.value[e] = d[0][n][e];
        sum[32 * n] = after;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    thread_fence();
    store_release(turn, block - earliest + 1);
  }

  int from = first + row;
  UNROLL for (int n = 0; n < NK; n++) {
    UNROLL for (int e = 0; e < 4; e++) sum_k[0][n][e] *= scale;
    store_rows(d_k + (token + from) * k_stride + (u64)kv_head * qk_width, k_stride, seq_len - from,
               half * (DK / 2) + 8 * n, qk_width, sum_k[0][n]);
  }
  UNROLL for (int n = 0; n < NV; n++)
    store_rows(d_v + (token + from) * v_stride + (u64)kv_head * v_width, v_stride, seq_len - from,
               half * (DV / 2) + 8 * n, v_width, sum_v[0][n]);
}
EXPORT(attention_backward)

#endif
