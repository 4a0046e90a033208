// Flash attention on Hopper; see attention.rs for the formulas and attention/hopper.rs for the design.
//
// -DDK -DDV     widths of a head, rounded up to multiples of 16
// -DGROUPS      forward: warpgroups that compute, 64 queries each
// -DKEYS        forward: keys of a step
// -DSTAGES      forward: steps whose keys and values are in shared memory
// -DBACKWARD    the kernels of backward; DK and DV are 64 or 128
// -DCAUSAL      whether a query sees only the keys up to its own
//
// A tile in shared memory is panels of 64 columns: rows of 128 bytes, 128-byte swizzle.
#include "prelude.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr int PANELS_K = (DK + 63) / 64, PANELS_V = (DV + 63) / 64;

DEV float infinity() { return f32_of_bits(0x7f800000u); }

// One of the arrivals that `bar` counts, of a whole warp.
DEV void release(u64* bar) {
  syncwarp();
  if (lane_id() == 0) mbar_arrive(bar);
}

// Which work a ticket stands for. A section is heads of so few keys and values that they stay in the second-level cache;
// within it work comes by length, the longest first, `unit` 0 having `count - 1` behind it.
struct Work {
  int unit, pair;
};
DEV Work work_of(u32 ticket, int units, int pairs, int section) {
  int number = ticket / (u32)(units * section), rest = ticket % (u32)(units * section);
  int here = min_(section, pairs - number * section);
  return {rest / here, number * section + rest % here};
}

// Four words of each of four neighbouring lanes, transposed among them.
DEV void transpose_quad(u32 (&x)[4]) {
  bool odd = lane_id() & 1, upper = lane_id() & 2;
  UNROLL for (int i = 0; i < 4; i += 2) {
    u32 other = shfl_xor(odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = other;
  }
  UNROLL for (int i = 0; i < 2; i++) {
    u32 other = shfl_xor(upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = other;
  }
}

// Writes a thread's two rows of a product of N columns, times `factor[row]`: `first` and the row eight after it, of which
// those before `end` exist, as bf16 rows of `width` elements, `stride` apart.
template <int N>
DEV void store_product(bf16* to, u64 stride, int first, int end, int width, const float (&d)[N / 2], const float (&factor)[2]) {
  UNROLL for (int r = 0; r < 2; r++) {
    bool here = first + 8 * r < end;
    bf16* row = to + (u64)(first + 8 * r) * stride;
    // Four tiles of 8 columns at a time, so that a lane has 16 bytes to write.
    UNROLL for (int i = 0; i < N / 32; i++) {
      u32 x[4];
      UNROLL for (int j = 0; j < 4; j++)
        x[j] = pack_bf16(d[16 * i + 4 * j + 2 * r] * factor[r], d[16 * i + 4 * j + 2 * r + 1] * factor[r]);
      transpose_quad(x);
      int column = 32 * i + lane_id() % 4 * 8;
      if (here && column < width) *(Vec4*)(row + column) = {x[0], x[1], x[2], x[3]};
    }
    UNROLL for (int i = N / 32 * 4; i < N / 8; i++)
      if (here && 8 * i < width)
        *(u32*)(row + 8 * i + lane_id() % 4 * 2) = pack_bf16(d[4 * i + 2 * r] * factor[r], d[4 * i + 2 * r + 1] * factor[r]);
  }
}

// The same in f32: the two elements of each lane, a whole sector of four.
template <int N>
DEV void store_product(float* to, u64 stride, int first, int end, int width, const float (&d)[N / 2], const float (&factor)[2]) {
  struct alignas(8) Two {
    float value[2];
  };
  UNROLL for (int r = 0; r < 2; r++) {
    float* row = to + (u64)(first + 8 * r) * stride + lane_id() % 4 * 2;
    UNROLL for (int i = 0; i < N / 8; i++)
      if (first + 8 * r < end && 8 * i < width)
        *(Two*)(row + 8 * i) = {d[4 * i + 2 * r] * factor[r], d[4 * i + 2 * r + 1] * factor[r]};
  }
}

// ---- Forward ----

#ifdef GROUPS

constexpr int QUERIES = 64 * GROUPS;
constexpr int Q_BYTES = PANELS_K * QUERIES * 128, K_BYTES = PANELS_K * KEYS * 128, V_BYTES = PANELS_V * KEYS * 128;

struct Barriers {
  u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  u32 ticket;  // goes with q
};

// Issues s = q k.
DEV void multiply_keys(float (&s)[KEYS / 2], const u8* q, const u8* k) {
  u64 a = desc_sw128_k(q), b = desc_sw128_k(k);
  UNROLL for (int i = 0; i < DK / 16; i++) {
    wgmma<KEYS, 0, 0>(s, a + (i / 4 * QUERIES * 128 + i % 4 * 32) / 16, b + (i / 4 * KEYS * 128 + i % 4 * 32) / 16, i > 0);
  }
  wgmma_commit();
}

// Issues o += p v, or o = p v where `fresh`.
DEV void multiply_values(float (&o)[DV / 2], const u32 (&p)[KEYS / 16][4], const u8* v, bool fresh) {
  u64 b = desc_sw128_mn(v, KEYS * 128);
  UNROLL for (int i = 0; i < KEYS / 16; i++) wgmma_rs<DV, 1>(o, p[i], b + i * 2048 / 16, i > 0 || !fresh);
  wgmma_commit();
}

DEV void load(const TensorMap* q, const TensorMap* k, const TensorMap* v, u8* tile_q, u8* tiles_k, u8* tiles_v, Barriers* bars,
              u32* tickets, int seqs, int seq_len, int heads, int group, int section) {
  int blocks = (seq_len + QUERIES - 1) / QUERIES, pairs = heads * seqs;
  u32 done = 0;
  for (u32 round = 0;; round++) {
    u32 ticket = atomic_add(tickets, 1u);
    bool over = ticket >= (u32)(blocks * pairs);
    Work work = over ? Work{0, 0} : work_of(ticket, blocks, pairs, section);
    int first = (blocks - 1 - work.unit) * QUERIES, head = work.pair % heads, seq = work.pair / heads;
    int seen = over ? 0 : CAUSAL ? min_(first + QUERIES, seq_len) : seq_len, steps = (seen + KEYS - 1) / KEYS;

    auto load_keys = [&](int step) {
      u32 stage = (done + step) % STAGES;
      mbar_wait(&bars->k_empty[stage], (done + step) / STAGES % 2 ^ 1);
      mbar_expect(&bars->k_full[stage], K_BYTES);
      UNROLL for (int panel = 0; panel < PANELS_K; panel++)
        tma_load_4d(tiles_k + stage * K_BYTES + panel * KEYS * 128, k, &bars->k_full[stage], panel * 64, head / group,
                    (steps - 1 - step) * KEYS, seq);
    };
    // The first keys do not wait for the queries before to be done with.
    if (!over) load_keys(0);
    mbar_wait(&bars->q_empty, round % 2 ^ 1);
    bars->ticket = ticket;
    if (over) {
      mbar_arrive(&bars->q_full);
      break;
    }
    mbar_expect(&bars->q_full, Q_BYTES);
    UNROLL for (int panel = 0; panel < PANELS_K; panel++)
      tma_load_4d(tile_q + panel * QUERIES * 128, q, &bars->q_full, panel * 64, head, first, seq);
    for (int step = 0; step < steps; step++) {
      if (step > 0) load_keys(step);
      u32 stage = (done + step) % STAGES;
      mbar_wait(&bars->v_empty[stage], (done + step) / STAGES % 2 ^ 1);
      mbar_expect(&bars->v_full[stage], V_BYTES);
      UNROLL for (int panel = 0; panel < PANELS_V; panel++)
        tma_load_4d(tiles_v + stage * V_BYTES + panel * KEYS * 128, v, &bars->v_full[stage], panel * 64, head / group,
                    (steps - 1 - step) * KEYS, seq);
    }
    done += steps;
  }
}

DEV void compute(int me, const u8* tile_q, const u8* tiles_k, const u8* tiles_v, Barriers* bars, bf16* o, float* lse, int seqs,
                 int seq_len, int heads, int v_width, int section, float scale) {
  int blocks = (seq_len + QUERIES - 1) / QUERIES, pairs = heads * seqs;
  float slope = scale * LOG2E;
  tile_q += me * 64 * 128;
  // Warpgroups take turns at issuing products: while one multiplies, the other computes exponentials.
  u32 own_turn = 1 + me, next_turn = 1 + (me + 1) % GROUPS;
  if (me == GROUPS - 1) named_arrive(1, 256);

  u32 done = 0;
  for (u32 round = 0;; round++) {
    mbar_wait(&bars->q_full, round % 2);
    u32 ticket = bars->ticket;
    if (ticket >= (u32)(blocks * pairs)) break;
    Work work = work_of(ticket, blocks, pairs, section);
    int first = (blocks - 1 - work.unit) * QUERIES, head = work.pair % heads, seq = work.pair / heads;
    int seen = CAUSAL ? min_(first + QUERIES, seq_len) : seq_len, steps = (seen + KEYS - 1) / KEYS;
    // This thread's rows of every product: `row` and `row + 8`, and columns from `column` on.
    int row = first + me * 64 + warp_id() % 4 * 16 + lane_id() / 4, column = lane_id() % 4 * 2;

    float s[KEYS / 2], out[DV / 2], top[2] = {-infinity(), -infinity()}, total[2] = {0.f, 0.f}, shrink[2];
    u32 p[KEYS / 16][4];

    // Scores of a step to probabilities; how much what was summed so far shrinks.
    auto softmax = [&](int step) {
      int key = (steps - 1 - step) * KEYS;
      if (key + KEYS > (CAUSAL ? first + me * 64 : seq_len)) {
        UNROLL for (int i = 0; i < KEYS / 2; i++) {
          int at = key + i / 4 * 8 + column + i % 2;
          if (at > (CAUSAL ? row + i % 4 / 2 * 8 : seq_len - 1)) s[i] = -infinity();
        }
      }
      UNROLL for (int r = 0; r < 2; r++) {
        float highest = top[r];
        UNROLL for (int i = 0; i < KEYS / 8; i++) highest = max_(highest, max_(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        highest = max_(highest, shfl_xor(highest, 1));
        highest = max_(highest, shfl_xor(highest, 2));
        // A row that has seen no key yet, where the diagonal is crossed in several steps.
        float base = KEYS < QUERIES && highest == -infinity() ? 0.f : highest * slope;
        shrink[r] = exp2_flush(fma_(top[r], slope, -base));
        top[r] = highest;
        float sum = 0.f;
        UNROLL for (int i = 0; i < KEYS / 8; i++)
          UNROLL for (int e = 0; e < 2; e++) {
            float x = exp2_flush(fma_(s[4 * i + 2 * r + e], slope, -base));
            sum += x;
            s[4 * i + 2 * r + e] = x;
          }
        total[r] = fma_(total[r], shrink[r], sum);
      }
    };
    auto pack = [&]() {
      UNROLL for (int i = 0; i < KEYS / 16; i++)
        UNROLL for (int j = 0; j < 4; j++) p[i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    };

    mbar_wait(&bars->k_full[done % STAGES], done / STAGES % 2);
    named_sync(own_turn, 256);
    wgmma_fence();
    multiply_keys(s, tile_q, tiles_k + done % STAGES * K_BYTES);
    named_arrive(next_turn, 256);
    wgmma_wait<0>();
    settle(s);
    release(&bars->k_empty[done % STAGES]);
    softmax(0);
    pack();

    auto wait_keys = [&](int step) {
      u32 now = done + step;
      if (step < steps) mbar_wait(&bars->k_full[now % STAGES], now / STAGES % 2);
    };
    wait_keys(1);
    // The products of a step: its scores, and the values of the step before.
    for (int step = 1; step < steps; step++) {
      u32 now = done + step, before = now - 1;
      named_sync(own_turn, 256);
      wgmma_fence();
      multiply_keys(s, tile_q, tiles_k + now % STAGES * K_BYTES);
      mbar_wait(&bars->v_full[before % STAGES], before / STAGES % 2);
      wgmma_fence();
      multiply_values(out, p, tiles_v + before % STAGES * V_BYTES, step == 1);
      named_arrive(next_turn, 256);
      wgmma_wait<1>();
      settle(s);
      release(&bars->k_empty[now % STAGES]);
      softmax(step);
      settle(s);
      // Here and not at the start of a step: the assembler would move the wait for the values ahead of the softmax, which
      // is to run beside them, were there no branch between the two.
      wait_keys(step + 1);
      wgmma_wait<0>();
      settle(out);
      release(&bars->v_empty[before % STAGES]);
      UNROLL for (int i = 0; i < DV / 2; i++) out[i] *= shrink[i % 4 / 2];
      pack();
    }
    release(&bars->q_empty);

    u32 last = done + steps - 1;
    mbar_wait(&bars->v_full[last % STAGES], last / STAGES % 2);
    wgmma_fence();
    multiply_values(out, p, tiles_v + last % STAGES * V_BYTES, steps == 1);
    UNROLL for (int r = 0; r < 2; r++) {
      total[r] += shfl_xor(total[r], 1);
      total[r] += shfl_xor(total[r], 2);
    }
    wgmma_wait<0>();
    settle(out);
    release(&bars->v_empty[last % STAGES]);
    done += steps;

    u64 token = (u64)seq * seq_len, stride = (u64)heads * v_width;
    float inverse[2] = {rcp_(total[0]), rcp_(total[1])};
    store_product<DV>(o + token * stride + (u64)head * v_width, stride, row, seq_len, v_width, out, inverse);
    UNROLL for (int r = 0; r < 2; r++)
      if (row + 8 * r < seq_len && lane_id() % 4 == 0)
        lse[(u64)head * seqs * seq_len + token + row + 8 * r] = fma_(top[r], scale, log_(total[r]));
  }
  // What the last warpgroup arrived for and nobody will wait for.
  if (me == 0) named_sync(1, 256);
}

// One warp loads, GROUPS warpgroups compute; blocks stay and take tickets, the longest work of a section first.
KERNEL(128 + 128 * GROUPS, 1)
attention_forward(GRID_CONST TensorMap q, GRID_CONST TensorMap k, GRID_CONST TensorMap v, bf16* o, float* lse, u32* tickets,
                  int seqs, int seq_len, int heads, int group, int v_width, int section, float scale) {
  DYN_SMEM(shared);
  u8* tile_q = shared;
  u8* tiles_k = tile_q + Q_BYTES;
  u8* tiles_v = tiles_k + STAGES * K_BYTES;
  Barriers* bars = (Barriers*)(tiles_v + STAGES * V_BYTES);
  if (threadIdx.x == 0) {
    mbar_init(&bars->q_full, 1);
    mbar_init(&bars->q_empty, 4 * GROUPS);
    UNROLL for (int i = 0; i < STAGES; i++) {
      mbar_init(&bars->k_full[i], 1);
      mbar_init(&bars->k_empty[i], 4 * GROUPS);
      mbar_init(&bars->v_full[i], 1);
      mbar_init(&bars->v_empty[i], 4 * GROUPS);
    }
    mbar_fence_init();
    tma_prefetch(&q);
    tma_prefetch(&k);
    tma_prefetch(&v);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    reg_dec<GROUPS == 2 ? 24 : 32>();
    if (threadIdx.x == 0)
      load(&q, &k, &v, tile_q, tiles_k, tiles_v, bars, tickets, seqs, seq_len, heads, group, section);
  } else {
    reg_inc<GROUPS == 2 ? 240 : 160>();
    compute(threadIdx.x / 128 - 1, tile_q, tiles_k, tiles_v, bars, o, lse, seqs, seq_len, heads, v_width, section, scale);
  }
}
EXPORT(attention_forward)

#endif

// ---- Backward ----

#ifdef BACKWARD

// A block has 128 keys, 64 a warpgroup, and `share` heads of the group that reads them; a step is 64 queries of one head.
// Products are of keys for rows, except dq: its columns are cut in PARTS of DQ, one for each warpgroup and a third, where there
// is one, for either in turn.
constexpr int KEYS = 128, QUERIES = 64, STAGES = 2, PARTS = DK == 192 ? 3 : 2, DQ = DK / PARTS;
// Where dk and dv take most registers and the tiles most of shared memory: probabilities are packed before their gradients
// are computed, both by halves, and one buffer each has to do for what goes into and comes out of dq.
constexpr bool LEAN = DK + DV > 256;
constexpr int DQ_STAGES = LEAN ? 1 : 2;
// Queries whose scores are computed at once.
constexpr int WIDTH = LEAN ? 32 : QUERIES;
constexpr int K_BYTES = PANELS_K * KEYS * 128, V_BYTES = PANELS_V * KEYS * 128;
constexpr int Q_BYTES = PANELS_K * QUERIES * 128, O_BYTES = PANELS_V * QUERIES * 128;
constexpr int DS_BYTES = KEYS * QUERIES * 2, SUM_BYTES = QUERIES * DK * 4, STAT_BYTES = QUERIES * 4;

struct Barriers {
  u64 kv_full, q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
  u64 sum_full[DQ_STAGES], sum_empty[DQ_STAGES];
  u32 ticket;
};

struct Tiles {
  u8 k[K_BYTES], v[V_BYTES], q[STAGES][Q_BYTES], d_o[STAGES][O_BYTES];
  u8 ds[DQ_STAGES][DS_BYTES];    // [key][query]
  u8 sum[DQ_STAGES][SUM_BYTES];  // of dq: [part][tile of 8 columns][thread][4]
  float lse[STAGES][QUERIES], delta[STAGES][QUERIES];
  Barriers bars;
};

// Of every query, in rows of whole steps: lse in base 2, infinite beyond the end of a sequence, and behind all of those
// delta = rowsum(do * o). Eight threads a query, 32 queries of one head a block.
KERNEL(256, 1) attention_prepare(const bf16* d_o, const bf16* o, const float* lse, float* stats, int seqs, int seq_len,
                                 int heads, int width) {
  int padded = (seq_len + QUERIES - 1) / QUERIES * QUERIES, pairs = heads * seqs, lane = threadIdx.x % 8;
  int pair = blockIdx.x % pairs, query = blockIdx.x / pairs * 32 + threadIdx.x / 8, head = pair % heads;
  u64 token = (u64)(pair / heads) * seq_len + query;
  bool here = query < seq_len;
  float sum = 0.f;
  if (here) {
    u64 row = (token * heads + head) * width;
    for (int i = lane * 8; i < width; i += 64) {
      Vec4 x = *(const Vec4*)(d_o + row + i), y = *(const Vec4*)(o + row + i);
      u32 left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
      UNROLL for (int e = 0; e < 4; e++)
        sum = fma_(upper_f32(left[e]), upper_f32(right[e]), fma_(lower_f32(left[e]), lower_f32(right[e]), sum));
    }
  }
  UNROLL for (int distance = 4; distance > 0; distance /= 2) sum += shfl_xor(sum, distance);
  if (lane == 0) {
    u64 at = (u64)pair * padded + query;
    stats[at] = here ? lse[(u64)head * seqs * seq_len + token] * LOG2E : infinity();
    stats[(u64)pairs * padded + at] = sum;
  }
}
EXPORT(attention_prepare)

// The place of a block: its keys' number, the first of its heads and the sequence.
struct Place {
  int block, head, seq, steps, query_blocks;
};
DEV Place place_of(u32 ticket, int seqs, int seq_len, int heads, int share, int section) {
  int blocks = (seq_len + KEYS - 1) / KEYS, query_blocks = (seq_len + QUERIES - 1) / QUERIES, shares = heads / share;
  Work work = work_of(ticket, blocks, shares * seqs, section);
  int first = CAUSAL ? work.unit * (KEYS / QUERIES) : 0;
  return {work.unit, work.pair % shares * share, work.pair / shares, (query_blocks - first) * share, query_blocks};
}

// Steps go from the last queries to the first, and for each through the heads of the block; see attention/cuda.rs for why.
DEV int query_block_of(const Place& place, int step, int share) { return place.query_blocks - 1 - step / share; }
DEV int head_of(const Place& place, int step, int share) { return place.head + step % share; }

DEV void load(const TensorMap* q, const TensorMap* k, const TensorMap* v, const TensorMap* d_o, const TensorMap* stats,
              Tiles* tiles, Place place, int seqs, int heads, int group, int share) {
  Barriers* bars = &tiles->bars;
  int kv_head = place.head / group;
  mbar_expect(&bars->kv_full, K_BYTES + V_BYTES);
  UNROLL for (int panel = 0; panel < PANELS_K; panel++)
    tma_load_4d(tiles->k + panel * KEYS * 128, k, &bars->kv_full, panel * 64, kv_head, place.block * KEYS, place.seq);
  UNROLL for (int panel = 0; panel < PANELS_V; panel++)
    tma_load_4d(tiles->v + panel * KEYS * 128, v, &bars->kv_full, panel * 64, kv_head, place.block * KEYS, place.seq);
  // Counted along: there are few registers for what divides a step.
  int from = query_block_of(place, 0, share) * QUERIES, head = place.head;
  for (int step = 0; step < place.steps; step++) {
    int stage = step % STAGES, parity = step / STAGES % 2 ^ 1;
    int pair = place.seq * heads + head;
    mbar_wait(&bars->q_empty[stage], parity);
    mbar_expect(&bars->q_full[stage], Q_BYTES + STAT_BYTES);
    UNROLL for (int panel = 0; panel < PANELS_K; panel++)
      tma_load_4d(tiles->q[stage] + panel * QUERIES * 128, q, &bars->q_full[stage], panel * 64, head, from, place.seq);
    tma_load_2d(tiles->lse[stage], stats, &bars->q_full[stage], from, pair);
    mbar_wait(&bars->do_empty[stage], parity);
    mbar_expect(&bars->do_full[stage], O_BYTES + STAT_BYTES);
    UNROLL for (int panel = 0; panel < PANELS_V; panel++)
      tma_load_4d(tiles->d_o[stage] + panel * QUERIES * 128, d_o, &bars->do_full[stage], panel * 64, head, from, place.seq);
    tma_load_2d(tiles->delta[stage], stats, &bars->do_full[stage], from, seqs * heads + pair);
    if (++head == place.head + share) {
      head = place.head;
      from -= QUERIES;
    }
  }
}

// Adds the dq of every step of `stage` to the sums when all blocks of earlier keys have; the first of them overwrites. A tile
// is of one head: only blocks of the same heads add to it, which follow each other on tickets. What is waited for is that a
// copy is through device memory, so each stage has a thread of its own. Blocks hand over by plain accesses, and what they
// hand over was written by bulk copies: a fence between the two on either side.
DEV void add(const TensorMap* sums, u32* turns, Tiles* tiles, Place place, int heads, int share, int stage) {
  Barriers* bars = &tiles->bars;
  for (int step = stage; step < place.steps; step += DQ_STAGES) {
    int pair = place.seq * heads + head_of(place, step, share);
    int tile = pair * place.query_blocks + query_block_of(place, step, share);
    mbar_wait(&bars->sum_full[stage], step / DQ_STAGES % 2);
    while (load_acquire(turns + tile) != (u32)place.block) {
    }
    fence_async_global();
    if (place.block == 0)
      tma_store_2d(sums, tiles->sum[stage], 0, tile * (DK / 2));
    else
      tma_reduce_add_2d(sums, tiles->sum[stage], 0, tile * (DK / 2));
    bulk_commit();
    bulk_wait_read<0>();
    mbar_arrive(&bars->sum_empty[stage]);
    bulk_wait<0>();
    fence_async_global();
    thread_fence();
    store_release(turns + tile, place.block + 1);
  }
}

DEV void compute(int me, Tiles* tiles, Place place, void* d_k, void* d_v, int seqs, int seq_len, int heads, int group, int share,
                 int qk_width, int v_width, float scale) {
  Barriers* bars = &tiles->bars;
  float slope = scale * LOG2E;
  int thread = threadIdx.x % 128, lane = lane_id(), column = lane % 4 * 2;
  // This thread's rows of the products with keys for rows are `row` and `row + 8` of the block.
  int row = me * 64 + thread / 32 * 16 + lane / 4;

  float sum_k[DK / 2], sum_v[DV / 2];
  UNROLL for (int i = 0; i < DK / 2; i++) sum_k[i] = 0.f;
  UNROLL for (int i = 0; i < DV / 2; i++) sum_v[i] = 0.f;
  u64 keys = desc_sw128_k(tiles->k + me * 64 * 128), values = desc_sw128_k(tiles->v + me * 64 * 128);
  mbar_wait(&bars->kv_full, 0);
  mbar_wait(&bars->q_full[0], 0);
  for (int step = 0; step < place.steps; step++) {
    int stage = step % STAGES, parity = step / STAGES % 2;
    const u8* q = tiles->q[stage];
    const u8* d_o = tiles->d_o[stage];

    u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
    float s[WIDTH / 2], dp[WIDTH / 2];
    auto multiply_q = [&](int from) {
      wgmma_fence();
      UNROLL for (int i = 0; i < DK / 16; i++)
        wgmma<WIDTH, 0, 0>(s, keys + (i / 4 * KEYS * 128 + i % 4 * 32) / 16,
                           desc_sw128_k(q) + (i / 4 * QUERIES * 128 + from * 128 + i % 4 * 32) / 16, i > 0);
      wgmma_commit();
    };
    auto multiply_do = [&](int from) {
      wgmma_fence();
      UNROLL for (int i = 0; i < DV / 16; i++)
        wgmma<WIDTH, 0, 0>(dp, values + (i / 4 * KEYS * 128 + i % 4 * 32) / 16,
                           desc_sw128_k(d_o) + (i / 4 * QUERIES * 128 + from * 128 + i % 4 * 32) / 16, i > 0);
      wgmma_commit();
    };
    int first_query = query_block_of(place, step, share) * QUERIES - place.block * KEYS;
    bool edge = CAUSAL ? first_query < KEYS : place.block * KEYS + KEYS > seq_len;
    multiply_q(0);
    mbar_wait(&bars->do_full[stage], parity);
    if (!LEAN) multiply_do(0);
    UNROLL for (int from = 0; from < QUERIES; from += WIDTH) {
      if (from > 0) multiply_q(from);
      wgmma_wait<LEAN ? 0 : 1>();
      settle(s);
      UNROLL for (int i = 0; i < WIDTH / 8; i++) {
        const float* lse = tiles->lse[stage] + from + 8 * i + column;
        UNROLL for (int e = 0; e < 4; e++) s[4 * i + e] = exp2_flush(fma_(s[4 * i + e], slope, -lse[e % 2]));
      }
      if (edge) {
        UNROLL for (int i = 0; i < WIDTH / 2; i++) {
          int key = row + i % 4 / 2 * 8, query = from + i / 4 * 8 + column + i % 2;
          if (CAUSAL ? key > first_query + query : place.block * KEYS + key >= seq_len) s[i] = 0.f;
        }
      }
      UNROLL for (int i = 0; i < WIDTH / 16; i++)
        UNROLL for (int j = 0; j < 4; j++) p[from / 16 + i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
    if (LEAN) multiply_do(0);
    wgmma_fence();
    UNROLL for (int i = 0; i < QUERIES / 16; i++)
      wgmma_rs<DV, 1>(sum_v, p[i], desc_sw128_mn(d_o, QUERIES * 128) + i * 2048 / 16, true);
    wgmma_commit();

    u8* tile_ds = tiles->ds[step % DQ_STAGES];
    UNROLL for (int from = 0; from < QUERIES; from += WIDTH) {
      if (from == 0) {
        wgmma_wait<1>();
      } else {
        multiply_do(from);
        wgmma_wait<0>();
      }
      settle(dp);
      UNROLL for (int i = 0; i < WIDTH / 2; i++) {
        int at = from / 2 + i;
        u32 pair = p[at / 8][at / 2 % 4];
        float value = !LEAN ? s[at] : at % 2 ? upper_f32(pair) : lower_f32(pair);
        dp[i] = value * (dp[i] - tiles->delta[stage][at / 4 * 8 + column + at % 2]);
      }
      // The other warpgroup may still read the last step's: there is another buffer, or it has said that it is done.
      if (LEAN && step > 0 && from == 0) named_sync(2 + me, 256);
      UNROLL for (int i = 0; i < WIDTH / 16; i++) {
        int at = from / 16 + i;
        UNROLL for (int j = 0; j < 4; j++) ds[at][j] = pack_bf16(dp[8 * i + 2 * j], dp[8 * i + 2 * j + 1]);
        int key = me * 64 + thread / 32 * 16 + lane % 16, chunk = 2 * at + lane / 16;
        stmatrix_x4(tile_ds + key * 128 + (chunk ^ key % 8) * 16, ds[at]);
      }
    }
    fence_async();
    named_sync(1, 256);  // both warpgroups have written theirs

    float dq[DQ / 2];
    auto multiply_ds = [&](int part) {
      const u8* columns = tiles->k + DQ * part / 64 * KEYS * 128 + DQ * part % 64 * 2;
      wgmma_fence();
      UNROLL for (int i = 0; i < KEYS / 16; i++)
        wgmma<DQ, 1, 1>(dq, desc_sw128_mn(tile_ds, 0) + i * 2048 / 16, desc_sw128_mn(columns, KEYS * 128) + i * 2048 / 16,
                        i > 0);
      wgmma_commit();
    };
    struct alignas(16) Four {
      float value[4];
    };
    auto hand_over = [&](int part) {
      Four* sum = (Four*)tiles->sum[step % DQ_STAGES] + part * (DQ / 8) * 128 + thread;
      UNROLL for (int i = 0; i < DQ / 8; i++) sum[i * 128] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    };
    multiply_ds(me);
    wgmma_fence();
    UNROLL for (int i = 0; i < QUERIES / 16; i++)
      wgmma_rs<DK, 1>(sum_k, ds[i], desc_sw128_mn(q, QUERIES * 128) + i * 2048 / 16, true);
    wgmma_commit();
    wgmma_wait<2>();
    release(&bars->do_empty[stage]);
    wgmma_wait<1>();
    settle(dq);
    mbar_wait(&bars->sum_empty[step % DQ_STAGES], step / DQ_STAGES % 2 ^ 1);
    hand_over(me);
    if (PARTS == 3 && step % 2 == me) {
      multiply_ds(2);
      wgmma_wait<0>();
      settle(dq);
      hand_over(2);
    }
    fence_async();
    release(&bars->sum_full[step % DQ_STAGES]);
    // Before the wait for dk, as the assembler would move that ahead of the stores otherwise.
    if (step + 1 < place.steps) mbar_wait(&bars->q_full[(step + 1) % STAGES], (step + 1) / STAGES % 2);
    wgmma_wait<0>();
    release(&bars->q_empty[stage]);
    if (LEAN && step + 1 < place.steps) named_arrive(3 - me, 256);
  }
  settle(sum_k);
  settle(sum_v);

  int kv_heads = heads / group, kv_head = place.head / group, part = place.head % group / share;
  int first = place.block * KEYS + row;
  u64 token = ((u64)part * seqs + place.seq) * seq_len, k_stride = (u64)kv_heads * qk_width, v_stride = (u64)kv_heads * v_width;
  u64 at_k = token * k_stride + (u64)kv_head * qk_width, at_v = token * v_stride + (u64)kv_head * v_width;
  float scales[2] = {scale, scale}, ones[2] = {1.f, 1.f};
  if (share == group) {
    store_product<DK>((bf16*)d_k + at_k, k_stride, first, seq_len, qk_width, sum_k, scales);
    store_product<DV>((bf16*)d_v + at_v, v_stride, first, seq_len, v_width, sum_v, ones);
  } else {
    store_product<DK>((float*)d_k + at_k, k_stride, first, seq_len, qk_width, sum_k, scales);
    store_product<DV>((float*)d_v + at_v, v_stride, first, seq_len, v_width, sum_v, ones);
  }
}

// One warp loads, one or two add to dq, two warpgroups compute. `turns` behind its first entry, the tickets, counts for each tile
// of dq the blocks of keys that have added to it. dk and dv are bf16 where a block has all heads of a group, else f32 sums
// of each of its parts, one behind the other.
KERNEL(384, 1)
attention_backward(GRID_CONST TensorMap q, GRID_CONST TensorMap k, GRID_CONST TensorMap v, GRID_CONST TensorMap d_o,
                   GRID_CONST TensorMap stats, GRID_CONST TensorMap sums, u32* turns, void* d_k, void* d_v, int seqs,
                   int seq_len, int heads, int group, int share, int qk_width, int v_width, int section, float scale) {
  DYN_SMEM(shared);
  Tiles* tiles = (Tiles*)shared;
  Barriers* bars = &tiles->bars;
  if (threadIdx.x == 0) {
    bars->ticket = atomic_add(turns, 1u);
    mbar_init(&bars->kv_full, 1);
    UNROLL for (int i = 0; i < STAGES; i++) {
      mbar_init(&bars->q_full[i], 1);
      mbar_init(&bars->q_empty[i], 8);
      mbar_init(&bars->do_full[i], 1);
      mbar_init(&bars->do_empty[i], 8);
    }
    UNROLL for (int i = 0; i < DQ_STAGES; i++) {
      mbar_init(&bars->sum_full[i], 8);
      mbar_init(&bars->sum_empty[i], 1);
    }
    mbar_fence_init();
  }
  __syncthreads();
  Place place = place_of(bars->ticket, seqs, seq_len, heads, share, section);
  if (threadIdx.x < 128) {
    reg_dec<24>();
    if (threadIdx.x == 0) load(&q, &k, &v, &d_o, &stats, tiles, place, seqs, heads, group, share);
    for (int stage = 0; stage < DQ_STAGES; stage++)
      if (threadIdx.x == 32 * (1 + stage)) add(&sums, turns + 1, tiles, place, heads, share, stage);
  } else {
    reg_inc<240>();
    compute(threadIdx.x / 128 - 1, tiles, place, d_k, d_v, seqs, seq_len, heads, group, share, qk_width, v_width, scale);
  }
}
EXPORT(attention_backward)

// The sums of dq as bf16: one tile a block.
KERNEL(128 * PARTS, 1) attention_dq(const float* sums, bf16* d_q, int seq_len, int heads, int width, float scale) {
  int query_blocks = (seq_len + QUERIES - 1) / QUERIES, pair = blockIdx.x / query_blocks, head = pair % heads;
  int part = threadIdx.x / 128, thread = threadIdx.x % 128;
  int row = blockIdx.x % query_blocks * QUERIES + thread / 32 * 16 + lane_id() / 4;
  struct alignas(16) Four {
    float value[4];
  }* sum = (Four*)sums + ((u64)blockIdx.x * PARTS + part) * (DQ / 8) * 128 + thread;
  float d[DQ / 2], scales[2] = {scale, scale};
  UNROLL for (int i = 0; i < DQ / 8; i++) {
    Four four = sum[i * 128];
    UNROLL for (int e = 0; e < 4; e++) d[4 * i + e] = four.value[e];
  }
  u64 stride = (u64)heads * width, token = (u64)(pair / heads) * seq_len;
  store_product<DQ>(d_q + token * stride + (u64)head * width + part * DQ, stride, row, seq_len, width - part * DQ, d, scales);
}
EXPORT(attention_dq)

#endif
