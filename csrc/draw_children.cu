// draw_children on CUDA: one block per row, and only the children are stored. With uniforms each warp sums a share of
// the row in one pass. Each child is then searched for in a single share, in which the children drawn before count as
// 0. With seeds each thread makes the noise of four neighboring tokens at a time, and the largest scores are the
// children.
#include "best_of.cuh"
#include "noise.h"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;        // at most
constexpr int64_t kMaxShared = 128;  // children in shared memory; if a node has more, they are read from the output

__global__ void __launch_bounds__(kThreads) draw_children_kernel(DrawChildren batch) {
  __shared__ int64_t sums[kMaxWarps], shared[kMaxShared];
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K, share = (V + warps() - 1) / warps();
  const float* row = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * K;
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
    const int64_t token = search(remaining_mass, V, sums, draw_threshold(batch.uniforms[r * K + n], remaining));
    const int64_t token_mass = to_fixed_point(row[token]);
    remaining -= token_mass;
    if (threadIdx.x == 0) {
      sums[token / share] -= token_mass;
      drawn[n] = tokens[n] = token;
    }
    __syncthreads();
  }
  for (int64_t k = n + threadIdx.x; k < K; k += blockDim.x) tokens[k] = 0;
  if (threadIdx.x != 0) return;
  batch.num_children[r] = static_cast<int32_t>(n);
  batch.status[r] = valid ? 0 : kInvalidRow;
}

__global__ void __launch_bounds__(kThreads) highest_scores_kernel(DrawChildren batch) {
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K;
  const float* row = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * K;
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
    const Noise noise(batch.seeds[r / batch.F], batch.positions[r]);
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
  if (threadIdx.x != 0) return;
  batch.num_children[r] = static_cast<int32_t>(n);
  batch.status[r] = n > 0 ? 0 : kInvalidRow;
}

}  // namespace

cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  const auto kernel = batch.uniforms ? draw_children_kernel : highest_scores_kernel;
  LAUNCH(kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
