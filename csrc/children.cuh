// How one block draws K children from a row of probabilities without replacement, for draw_children and draft_children.
// Only the children are stored, and 0 where there is none.
#pragma once
#include "best_of.cuh"
#include "noise.h"

namespace specvis {
namespace {

constexpr int64_t kMaxShared = 128;  // children in shared memory; if a node has more, they are read from the output

struct Children {
  int64_t count;
  bool valid;  // of the row
};

// With uniforms each warp sums a share of the row in one pass. Each child is then searched for in a single share, in
// which the children drawn before count as 0.
__device__ Children draw_by_uniforms(const float* row, int64_t V, const float* uniforms, int64_t K, int64_t* tokens) {
  __shared__ int64_t sums[kMaxWarps], shared[kMaxShared];
  const int64_t share = (V + warps() - 1) / warps();
  int64_t* drawn = K <= kMaxShared ? shared : tokens;

  bool entries_valid = true;  // this thread's
  const auto mass = [&](int64_t v) {
    const float p = row[v];
    entries_valid &= is_probability(p);
    return is_probability(p) ? to_fixed_point(p) : 0;
  };
  int64_t remaining = sum_shares(mass, V, sums);
  const bool valid = !block_any(!entries_valid) && remaining > 0;
  int64_t n = 0;
  const auto remaining_mass = [&](int64_t v) {
    for (int64_t k = 0; k < n; ++k)
      if (drawn[k] == v) return int64_t{0};
    return to_fixed_point(row[v]);
  };
  for (; valid && n < K && remaining > 0; ++n) {
    const int64_t token = search(remaining_mass, V, sums, draw_threshold(uniforms[n], remaining));
    const int64_t token_mass = to_fixed_point(row[token]);
    remaining -= token_mass;
    if (threadIdx.x == 0) {
      sums[token / share] -= token_mass;
      drawn[n] = tokens[n] = token;
    }
    __syncthreads();
  }
  for (int64_t k = n + threadIdx.x; k < K; k += blockDim.x) tokens[k] = 0;
  return {n, valid};
}

// With seeds each thread makes the noise of four neighboring tokens at a time, and the largest scores are the children.
__device__ Children draw_by_noise(const float* row, int64_t V, const Noise& noise, int64_t K, int64_t* tokens) {
  bool entries_valid = true;  // this thread's
  float max_prob = 0;
  int64_t num_positive = 0;
  for_each_entry(row, V, [&](int64_t, float p) {
    entries_valid &= is_probability(p);
    max_prob = p > max_prob ? p : max_prob;
    num_positive += is_probability(p) && to_fixed_point(p) > 0;
  });
  const bool valid = !block_any(!entries_valid);
  num_positive = block_sum(num_positive);
  max_prob = float_of(static_cast<int32_t>(block_max(ordered(max_prob)) ^ 0x80000000u));
  const int64_t n = !valid ? 0 : num_positive < K ? num_positive : K;

  if (n > 0) {
    const float best = log_of(max_prob);
    const auto for_each_score = [&](auto f) {
#pragma unroll 1
      for (int64_t begin = int64_t{threadIdx.x} * 4; begin < V; begin += int64_t{blockDim.x} * 4) {
        float p[4];
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[j] = begin + j < V ? row[begin + j] : 0.0f;
          any |= to_fixed_point(p[j]) > 0;
        }
        if (!any) continue;
        uint32_t words[4];
        noise.words(static_cast<uint32_t>(begin / 4), words);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (to_fixed_point(p[j]) > 0) f(begin + j, (log_of(p[j]) - best) + to_gumbel(words[j]));
      }
    };
    float largest = -INFINITY;
    for_each_score([&](int64_t, float score) { largest = score > largest ? score : largest; });
    best_of(for_each_score, -INFINITY, largest, n, [=](int64_t rank, int64_t id) { tokens[rank] = id; });
  }
  for (int64_t k = n + threadIdx.x; k < K; k += blockDim.x) tokens[k] = 0;
  return {n, n > 0};
}

}  // namespace
}  // namespace specvis
