// Root-mean-square normalization of rows; see rms_norm.rs for the formulas.
//
// -DT, -DWEIGHT  types of x (and y, dy, dx), and of the weight
// -DVEC          elements of one access: 16 bytes of T, or 1 where some row is not aligned for that
// -DLANES        threads that share a row: up to 32 in a block of 256 that takes several rows, from 64 on a whole
//                block
// -DPIECES       accesses of a thread to its row, at most, which then stays in registers from the first read on; 0:
//                any number, and the row is read again
// or, for the sum of a weight's gradient over blocks of rows, alone:
// -DGRAD         type of the weight's gradient
//
// Floors, bytes of device memory for R rows of d: forward reads x, writes y and rstd, 2 R d T + 4 R; backward reads
// dy, x, rstd, writes dx, 3 R d T + 4 R. The sums of the weight's gradient over blocks of rows, written and read
// again, add 8 d for each of at most 528 blocks (as many as four to each multiprocessor of an H200), most of it in
// the cache of level two.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#ifndef GRAD

#define THREADS (LANES < 64 ? 256 : LANES)
#define ROWS (THREADS / LANES)
#define HELD (PIECES ? PIECES : 1)

// Every piece `i` of the row that is this thread's, the `k`-th it holds.
#if PIECES
#define EACH_PIECE(k, i) UNROLL for (i32 k = 0, i = lane; k < PIECES; k++, i += LANES) if (i < pieces)
#else
#define EACH_PIECE(k, i) for (i32 k = 0, i = lane; i < pieces; i += LANES)
#endif
#define EACH(e) UNROLL for (int e = 0; e < VEC; e++)

// A thread's share of a row.
struct Share {
  Piece<T, VEC> piece[HELD];
};

DEV void load(Share& share, const T* row, i32 lane, i32 pieces) {
#if PIECES
  EACH_PIECE(k, i) share.piece[k] = load_piece<VEC>(row, i);
#endif
}
DEV void get(const Share& share, const T* row, i32 k, i32 i, float (&out)[VEC]) {
#if PIECES
  widen(share.piece[k], out);
#else
  widen(load_piece<VEC>(row, i), out);
#endif
}

// Sum over the threads of a row, which all get it. All threads of the block take part.
DEV float row_sum(float value, float* scratch) {
#if LANES <= 32
  UNROLL
  for (u32 distance = LANES / 2; distance > 0; distance /= 2) value += shfl_xor(value, distance);
  return value;
#else
  return block_sum(value, scratch);
#endif
}

// The sum over each row of x^2, or where there is `dy` of dy w x: what ranks that share a row sum up.
KERNEL(THREADS, 1024 / THREADS)
rms_norm_sums(const T* dy, const T* x, const WEIGHT* w, float* sums, i32 rows, i32 width) {
  DYN_SMEM(shared);
  i32 row = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES, pieces = width / VEC;
  bool here = row < rows;
  const T *row_x = x + (u64)row * width, *row_dy = dy + (u64)row * width;
  float sum = 0.f;
  if (here) {
    for (i32 i = lane; i < pieces; i += LANES) {
      float value[VEC], gradient[VEC], weight[VEC];
      widen(load_piece<VEC>(row_x, i), value);
      if (dy) {
        widen(load_piece<VEC>(row_dy, i), gradient);
        widen(load_piece<VEC>(w, i), weight);
        EACH(e) sum += gradient[e] * weight[e] * value[e];
      } else {
        EACH(e) sum += value[e] * value[e];
      }
    }
  }
  sum = row_sum(sum, (float*)shared);
  if (here && lane == 0) sums[row] = sum;
}
EXPORT(rms_norm_sums)

// The mean is over `whole` elements: over the row, or where there are `squares` over what those are sums of.
KERNEL(THREADS, 1024 / THREADS)
rms_norm_forward(const T* x, const WEIGHT* w, const float* squares, T* y, float* rstd, i32 rows, i32 width, i32 whole,
                 float eps) {
  DYN_SMEM(shared);
  i32 row = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES, pieces = width / VEC;
  bool here = row < rows;
  const T* from = x + (u64)row * width;
  Share share;
  float sum = 0.f;
  if (here) {
    load(share, from, lane, pieces);
    if (!squares) {
      EACH_PIECE(k, i) {
        float value[VEC];
        get(share, from, k, i, value);
        EACH(e) sum += value[e] * value[e];
      }
    }
  }
  if (!squares) {
    sum = row_sum(sum, (float*)shared);
  } else if (here) {
    sum = squares[row];
  }
  float r = rsqrt_(sum / whole + eps);
  if (!here) return;
  if (lane == 0) rstd[row] = r;
  T* to = y + (u64)row * width;
  EACH_PIECE(k, i) {
    float value[VEC], weight[VEC];
    get(share, from, k, i, value);
    widen(load_piece<VEC>(w, i), weight);
    EACH(e) value[e] *= r * weight[e];
    store_piece(to, i, value);
  }
}
EXPORT(rms_norm_forward)

// dx, and the block's share of the weight's gradient: `partial[block] [width]`, the sum over its `rows_per_block`
// rows (a multiple of ROWS). The next rows are on their way while these are worked on. Shared memory holds `width`
// floats where a block has several rows at once. `products` are the rows' sums of dy w x where they are over more
// than the row, over `whole` elements.
KERNEL(THREADS, 512 / THREADS)
rms_norm_backward(const T* dy, const T* x, const WEIGHT* w, const float* rstd, const float* products, T* dx,
                  float* partial, i32 rows, i32 width, i32 whole, i32 rows_per_block) {
  DYN_SMEM(shared);
  i32 group = threadIdx.x / LANES, lane = threadIdx.x % LANES, pieces = width / VEC;
  i32 first = blockIdx.x * rows_per_block, end = min_(first + rows_per_block, rows);
  float* sums = partial + (u64)blockIdx.x * width;
#if PIECES
  float dw[PIECES][VEC] = {};
#endif
  Share next_dy, next_x;
  if (first + group < end) {
    load(next_dy, dy + (u64)(first + group) * width, lane, pieces);
    load(next_x, x + (u64)(first + group) * width, lane, pieces);
  }
  for (i32 base = first; base < end; base += ROWS) {
    i32 row = base + group;
    bool here = row < end;
    const T *row_dy = dy + (u64)row * width, *row_x = x + (u64)row * width;
    Share share_dy = next_dy, share_x = next_x;
    if (row + ROWS < end) {
      load(next_dy, row_dy + (u64)ROWS * width, lane, pieces);
      load(next_x, row_x + (u64)ROWS * width, lane, pieces);
    }
    float r = here ? rstd[row] : 0.f, dot = 0.f;
    if (here && !products) {
      EACH_PIECE(k, i) {
        float value[VEC], gradient[VEC], weight[VEC];
        get(share_dy, row_dy, k, i, gradient);
        get(share_x, row_x, k, i, value);
        widen(load_piece<VEC>(w, i), weight);
        EACH(e) dot += gradient[e] * weight[e] * value[e];
      }
    }
    if (!products) {
      dot = row_sum(dot, (float*)shared);
    } else if (here) {
      dot = products[row];
    }
    float mean = dot * r / whole;
    if (!here) continue;
    EACH_PIECE(k, i) {
      float value[VEC], gradient[VEC], weight[VEC], out[VEC];
      get(share_dy, row_dy, k, i, gradient);
      get(share_x, row_x, k, i, value);
      widen(load_piece<VEC>(w, i), weight);
      EACH(e) {
        float normed = value[e] * r;
        out[e] = r * (gradient[e] * weight[e] - normed * mean);
        float product = gradient[e] * normed;
#if PIECES
        dw[k][e] += product;
#else
        i32 column = i * VEC + e;
        sums[column] = base == first ? product : sums[column] + product;
#endif
      }
      store_piece(dx + (u64)row * width, i, out);
    }
  }
#if PIECES && LANES < 32
  // The rows of a warp first.
  UNROLL
  for (i32 k = 0; k < PIECES; k++) EACH(e) {
      UNROLL
      for (u32 distance = LANES; distance < 32; distance *= 2) dw[k][e] += shfl_xor(dw[k][e], distance);
    }
#endif
#if PIECES && LANES <= 32
  // Then the warps in order.
  float* columns = (float*)shared;
  for (u32 warp = 0; warp < THREADS / 32; warp++) {
    if (warp_id() == warp && lane_id() < LANES) {
      EACH_PIECE(k, i) EACH(e) {
        i32 column = i * VEC + e;
        columns[column] = warp == 0 ? dw[k][e] : columns[column] + dw[k][e];
      }
    }
    __syncthreads();
  }
  for (i32 column = threadIdx.x; column < width; column += THREADS) sums[column] = columns[column];
#elif PIECES
  EACH_PIECE(k, i) store_piece(sums, i, dw[k]);
#endif
}
EXPORT(rms_norm_backward)

#else

#define WARPS 16

// dw += the sum of `partial[blocks] [width]`: a block takes 32 columns, each of its warps some neighbouring blocks
// in order, and then come the warps in order.
KERNEL(32 * WARPS, 1) rms_norm_weight(const float* partial, GRAD* dw, i32 blocks, i32 width) {
  DYN_SMEM(shared);
  float* sums = (float*)shared;
  i32 column = blockIdx.x * 32 + lane_id(), share = (blocks + WARPS - 1) / WARPS;
  i32 first = warp_id() * share, end = min_(first + share, blocks);
  float sum = 0.f;
  if (column < width) {
    _Pragma("unroll 8")
    for (i32 block = first; block < end; block++) sum += partial[(u64)block * width + column];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp_id() > 0 || column >= width) return;
  UNROLL
  for (u32 warp = 1; warp < WARPS; warp++) sum += sums[32 * warp + lane_id()];
  dw[column] = from_f32<GRAD>(to_f32(dw[column]) + sum);
}
EXPORT(rms_norm_weight)

#endif
