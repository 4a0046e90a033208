// The logarithms of sums of exponentials of router logits, and the gradient of their squares; see z_loss.rs.
// A warp has a token.
#include "prelude.cuh"

#define THREADS 256

// lse [T] of logits [T, E]
KERNEL(THREADS, 4) z_loss_forward(const float* logits, float* lse, i32 tokens, i32 experts) {
  i32 token = blockIdx.x * (THREADS / 32) + warp_id();
  if (token >= tokens) return;
  const float* row = logits + (u64)token * experts;
  float top = -3.402823466e38f, sum = 0.f;
  for (i32 e = lane_id(); e < experts; e += 32) top = max_(top, row[e]);
  top = warp_max(top);
  for (i32 e = lane_id(); e < experts; e += 32) sum += exp_(row[e] - top);
  sum = warp_sum(sum);
  if (lane_id() == 0) lse[token] = top + log_(sum);
}
EXPORT(z_loss_forward)

// dlogits [T, E] += 2 factor lse softmax(logits)
KERNEL(THREADS, 4) z_loss_backward(const float* logits, const float* lse, float factor, float* dlogits, i32 tokens,
                                   i32 experts) {
  i32 token = blockIdx.x * (THREADS / 32) + warp_id();
  if (token >= tokens) return;
  u64 first = (u64)token * experts;
  float z = lse[token], slope = 2.f * factor * z;
  for (i32 e = lane_id(); e < experts; e += 32)
    dlogits[first + e] = fma_(slope, exp_(logits[first + e] - z), dlogits[first + e]);
}
EXPORT(z_loss_backward)
