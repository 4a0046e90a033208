// Routing of tokens to experts; see router.rs for the rules.
//
// -DSCORE     how logits become scores, as below
// -DPER_LANE  experts that a lane holds: 32 lanes hold all
// -DVEC       logits of one access: 4 where the host found every row aligned for it, else 1
// -DBEST      experts that score a group; 0 where groups are not limited
// A warp has a token; lane l has experts l * PER_LANE on, so that the lowest of several lanes has the lowest
// expert.
#include "prelude.cuh"
#include "prelude/pieces.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

#define SOFTMAX 0
#define SIGMOID 1
#define SQRT_SOFTPLUS 2
// Whether scores are each by itself, rather than a distribution.
#define SINGLE (SCORE != SOFTMAX)
// Added to sums of single scores that are divided by, as all may underflow.
#define TINY 1e-20f
#define LOWEST (-3.402823466e38f)

// The lane's experts of a row; 0 where there are no more.
DEV void load_row(const float* row, i32 experts, float (&own)[PER_LANE]) {
  i32 first = lane_id() * PER_LANE;
  UNROLL for (i32 i = 0; i < PER_LANE; i += VEC) {
    if (first + i < experts) {
      Piece<float, VEC> piece = *(const Piece<float, VEC>*)(row + first + i);
      UNROLL for (i32 e = 0; e < VEC; e++) own[i + e] = piece.value[e];
    } else {
      UNROLL for (i32 e = 0; e < VEC; e++) own[i + e] = 0.f;
    }
  }
}
DEV void store_row(float* row, i32 experts, const float (&own)[PER_LANE]) {
  i32 first = lane_id() * PER_LANE;
  UNROLL for (i32 i = 0; i < PER_LANE; i += VEC) {
    if (first + i < experts) {
      Piece<float, VEC> piece;
      UNROLL for (i32 e = 0; e < VEC; e++) piece.value[e] = own[i + e];
      *(Piece<float, VEC>*)(row + first + i) = piece;
    }
  }
}

#if SINGLE
DEV float single_score(float logit) {
#if SCORE == SIGMOID
  return sigmoid_(logit);
#else
  float e = exp_(-abs_(logit));
  float log = e < 0.03f ? e * (1.f - e * (0.5f - e * (1.f / 3.f - e * 0.25f))) : log_(1.f + e);
  return sqrt_(max_(logit, 0.f) + log);
#endif
}
// The slope of a score by its logit, over the score.
DEV float single_slope(float score) {
#if SCORE == SIGMOID
  return 1.f - score;
#else
  // softplus = score^2, and its slope is 1 - e^-softplus.
  float softplus = score * score;
  if (softplus < 0.1f) return 0.5f * (1.f - softplus * (0.5f - softplus * (1.f / 6.f - softplus * (1.f / 24.f))));
  return 0.5f * (1.f - exp_(-softplus)) / softplus;
#endif
}
#endif

// A number that orders as the float does, above 1; NaN orders lowest, at 1. 0 is nobody's.
DEV u32 rank_of(float x) {
  u32 bits = bits_of_f32(x + 0.f);  // no negative zero
  u32 rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return x != x ? 1u : rank;
}

// The number of the lowest set bit; some is.
DEV u32 lowest(u32 bits) { return (bits_of_f32((float)(bits & (0u - bits))) >> 23) - 127; }

// logits [T, E], bias [E] or none, to ids and probs [T, K] and scores [T, E]. With `partial`, leaves there for each
// block the sums of its scores [E] and its counts [E]. A warp takes `run` tokens.
KERNEL(THREADS, PER_LANE > 16 ? 1 : 2) router_forward(const float* logits, const float* bias, i32* ids, float* probs, float* scores,
                                  float* partial, i32 tokens, i32 experts, i32 topk, i32 run, i32 normalize, float scale,
                                  i32 groups, i32 kept_groups) {
  DYN_SMEM(shared);
  i32 lane = lane_id(), first_expert = lane * PER_LANE;
  float sums[PER_LANE];
  i32* counts = (i32*)shared;                                  // [E], with statistics
  float* values = (float*)shared + (partial ? experts : 0);    // [WARPS, E], with groups or statistics
  float* own_values = values + warp_id() * experts;
  UNROLL for (i32 i = 0; i < PER_LANE; i++) sums[i] = 0.f;
  if (partial) {
    for (i32 e = threadIdx.x; e < experts; e += THREADS) counts[e] = 0;
    __syncthreads();
  }
  i32 start = (blockIdx.x * WARPS + warp_id()) * run, end = min_(tokens, start + run);
  for (i32 token = start; token < end; token++) {
    const float* row = logits + (u64)token * experts;
    float logit[PER_LANE], score[PER_LANE];
    load_row(row, experts, logit);

    // 1. Scores, and how much one of them is of the whole.
    float share;
#if SINGLE
    float sum = 0.f;
    UNROLL for (i32 i = 0; i < PER_LANE; i++) {
      score[i] = single_score(logit[i]);
      sum += first_expert + i < experts ? score[i] : 0.f;
    }
    share = rcp_(warp_sum(sum) + TINY);
#else
    float top = LOWEST, sum = 0.f;
    UNROLL for (i32 i = 0; i < PER_LANE; i++) top = max_(top, first_expert + i < experts ? logit[i] : top);
    top = warp_max(top);
    UNROLL for (i32 i = 0; i < PER_LANE; i++) {
      score[i] = exp_(logit[i] - top);
      sum += first_expert + i < experts ? score[i] : 0.f;
    }
    float inverse = rcp_(warp_sum(sum));
    UNROLL for (i32 i = 0; i < PER_LANE; i++) score[i] *= inverse;
    share = 1.f;
#endif
    store_row(scores + (u64)token * experts, experts, score);
    UNROLL for (i32 i = 0; i < PER_LANE; i++) sums[i] += score[i] * share;

    // 2. What the choice is by.
    u32 rank[PER_LANE];
    float value[PER_LANE];
    UNROLL for (i32 i = 0; i < PER_LANE; i++) {
      bool here = first_expert + i < experts;
      value[i] = bias && here ? score[i] + bias[first_expert + i] : BEST > 1 ? score[i] : logit[i];
      rank[i] = here ? rank_of(value[i]) : 0;
    }
#if BEST
    // 3. Only experts of the best groups: lane g scores group g, from its g-th expert on so that banks differ.
    i32 group_size = experts / groups;
    store_row(own_values, experts, value);
    syncwarp();
    float best[BEST];
    UNROLL for (i32 b = 0; b < BEST; b++) best[b] = -f32_of_bits(0x7f800000u);
    if (lane < groups) {
      i32 at = lane % group_size;
      for (i32 e = 0; e < group_size; e++) {
        float next = own_values[lane * group_size + at];
        at = at + 1 < group_size ? at + 1 : 0;
        UNROLL for (i32 b = 0; b < BEST; b++) {
          float larger = next > best[b] ? next : best[b];
          next = next > best[b] ? best[b] : next;
          best[b] = larger;
        }
      }
    }
    syncwarp();
    float group_score = best[0];
    UNROLL for (i32 b = 1; b < BEST; b++) group_score += best[b];
    u32 group_rank = lane < groups ? rank_of(group_score) : 0, kept = 0;
    for (i32 i = 0; i < kept_groups; i++) {
      u32 lead = lowest(ballot(group_rank == warp_max(group_rank)));
      kept |= 1u << lead;
      if (lane == lead) group_rank = 0;
    }
    UNROLL for (i32 i = 0; i < PER_LANE; i++) {
      i32 group = (first_expert + i) / group_size;
      if (group < 32 && (kept >> group & 1) == 0) rank[i] = 0;
    }
#endif

    // 4. The best experts in turn; lane k keeps the k-th.
    i32 id = 0;
    for (i32 k = 0; k < topk; k++) {
      u32 best_rank = 0;
      i32 best_i = 0;
      UNROLL for (i32 i = 0; i < PER_LANE; i++) {
        bool better = rank[i] > best_rank;
        best_rank = better ? rank[i] : best_rank;
        best_i = better ? i : best_i;
      }
      u32 lead = lowest(ballot(best_rank == warp_max(best_rank)));
      i32 winner = shfl(first_expert + best_i, lead);
      if (lane == k) id = winner;
      UNROLL for (i32 i = 0; i < PER_LANE; i++) if (first_expert + i == winner) rank[i] = 0;
    }

    // 5. Their probabilities, a lane each.
    bool here = lane < topk;
    float own_logit = here ? row[id] : 0.f, prob;
#if SINGLE
    prob = here ? single_score(own_logit) : 0.f;
    if (normalize) prob *= rcp_(warp_sum(prob) + TINY);
#else
    // Normalized from the logits, since scores of all chosen experts may underflow.
    float largest = normalize ? warp_max(here ? own_logit : LOWEST) : top;
    prob = here ? exp_(own_logit - largest) : 0.f;
    prob *= normalize ? rcp_(warp_sum(prob)) : inverse;
#endif
    if (here) {
      ids[(u64)token * topk + lane] = id;
      probs[(u64)token * topk + lane] = prob * scale;
      if (partial) atomic_add(&counts[id], 1);
    }
  }
  if (!partial) return;

  // The block's statistics: its warps in order.
  store_row(own_values, experts, sums);
  __syncthreads();
  float* out = partial + (u64)blockIdx.x * 2 * experts;
  for (i32 e = threadIdx.x; e < experts; e += THREADS) {
    float sum = 0.f;
    UNROLL for (i32 warp = 0; warp < WARPS; warp++) sum += values[warp * experts + e];
    out[e] = sum;
    out[experts + e] = f32_of_bits(counts[e]);
  }
}
EXPORT(router_forward)

// The partial statistics of all blocks in order: a block has 32 experts, warp w sums partials w, w + 32, ..
KERNEL(1024, 1) router_totals(const float* partial, float* sums, i32* counts, i32 experts, i32 blocks) {
  DYN_SMEM(shared);
  float* warp_sums = (float*)shared;             // [32, 32]
  i32* warp_counts = (i32*)(warp_sums + 1024);   // [32, 32]
  i32 expert = blockIdx.x * 32 + lane_id();
  float sum = 0.f;
  i32 count = 0;
  if (expert < experts)
    for (i32 block = warp_id(); block < blocks; block += 32) {
      const float* from = partial + (u64)block * 2 * experts;
      sum += from[expert];
      count += bits_of_f32(from[experts + expert]);
    }
  warp_sums[threadIdx.x] = sum;
  warp_counts[threadIdx.x] = count;
  __syncthreads();
  if (warp_id() != 0 || expert >= experts) return;
  sum = 0.f;
  count = 0;
  for (i32 warp = 0; warp < 32; warp++) {
    sum += warp_sums[warp * 32 + lane_id()];
    count += warp_counts[warp * 32 + lane_id()];
  }
  sums[expert] = sum;
  counts[expert] = count;
}
EXPORT(router_totals)

// dprobs [T, K] and what forward gave, to dlogits [T, E]. `dscores` is [T, E], [E] with a stride of 0, or none.
KERNEL(THREADS, 2) router_backward(const float* dprobs, const i32* ids, const float* probs, const float* scores,
                                   const float* dscores, i32 dscores_stride, float* dlogits, i32 tokens, i32 experts,
                                   i32 topk, i32 normalize, float scale) {
  DYN_SMEM(shared);
  i32 lane = lane_id(), token = blockIdx.x * WARPS + warp_id();
  if (token >= tokens) return;
  float* chosen = (float*)shared + warp_id() * experts;  // [E] what each chosen expert adds

  // 1. Through the probabilities, a lane each.
  bool here = lane < topk, inside = !SINGLE && !normalize;
  u64 slot = (u64)token * topk + lane;
  i32 id = here ? ids[slot] : 0;
  float dprob = here ? dprobs[slot] : 0.f, prob = here ? probs[slot] : 0.f, mean = 0.f;
  if (normalize) {
    float total = warp_sum(prob), product = warp_sum(prob * dprob);
    mean = total != 0.f ? product / total : 0.f;
  }
  float gain = inside ? scale * dprob : prob * (dprob - mean);
#if SINGLE
  gain *= here ? single_slope(scores[(u64)token * experts + id]) : 0.f;
#endif
  for (i32 e = lane; e < experts; e += 32) chosen[e] = 0.f;
  syncwarp();
  if (here) chosen[id] = gain;
  syncwarp();

  // 2. Through the scores of all.
  float own[PER_LANE], d[PER_LANE];
  load_row(chosen, experts, own);
  if (inside || dscores) {
    float score[PER_LANE], sum = 0.f, product = 0.f;
    load_row(scores + (u64)token * experts, experts, score);
    UNROLL for (i32 i = 0; i < PER_LANE; i++) d[i] = 0.f;
    if (dscores) load_row(dscores + (u64)token * dscores_stride, experts, d);
    UNROLL for (i32 i = 0; i < PER_LANE; i++) {
      if (inside) d[i] += own[i];
      sum += score[i];
      product = fma_(score[i], d[i], product);
    }
    product = warp_sum(product);
#if SINGLE
    float share = rcp_(warp_sum(sum) + TINY);
    product *= share;
    UNROLL for (i32 i = 0; i < PER_LANE; i++) own[i] += score[i] * single_slope(score[i]) * (d[i] - product) * share;
#else
    UNROLL for (i32 i = 0; i < PER_LANE; i++) own[i] = score[i] * (d[i] - product) + (inside ? 0.f : own[i]);
#endif
  }
  store_row(dlogits + (u64)token * experts, experts, own);
}
EXPORT(router_backward)
