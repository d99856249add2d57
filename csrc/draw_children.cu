// draw_children on CUDA: one block per row. In one pass each warp sums a share of the row. Each child is then searched
// for in a single share, in which the children drawn before count as 0. Only the children are stored.
#include "block.cuh"
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

}  // namespace

cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  LAUNCH(draw_children_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
