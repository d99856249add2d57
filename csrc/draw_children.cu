// draw_children on CUDA: a block per row. One pass weighs it, each warp a share; each child is looked for in
// a single share, without what was drawn before. Nothing is stored but the children.
#include "cuda.h"
#include "launch.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most
constexpr int64_t kFew = 128;  // children of a node; where there are more they are read from where they go

__global__ void __launch_bounds__(kThreads) draw_children_kernel(DrawChildren batch) {
  __shared__ int64_t sums[kMostWarps], few[kFew];
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K, share = (V + warps() - 1) / warps();
  const float* row = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * K;
  int64_t* drawn = K <= kFew ? few : tokens;

  bool sound = true;
  const auto weight = [&](int64_t v) {
    const float p = row[v];
    sound &= is_probability(p);
    return is_probability(p) ? to_fixed(p) : 0;
  };
  int64_t left = sum_shares(weight, V, sums);
  const bool valid = !block_any(!sound) && left > 0;
  int64_t n = 0;
  const auto rest = [&](int64_t v) {
    for (int64_t k = 0; k < n; ++k)
      if (drawn[k] == v) return int64_t{0};
    return to_fixed(row[v]);
  };
  for (; valid && n < K && left > 0; ++n) {
    const int64_t token = search(rest, V, sums, draw_at(batch.uniforms[r * K + n], left));
    const int64_t own = to_fixed(row[token]);
    left -= own;
    if (threadIdx.x == 0) {
      sums[token / share] -= own;
      drawn[n] = tokens[n] = token;
    }
    __syncthreads();
  }
  for (int64_t k = n + threadIdx.x; k < K; k += blockDim.x) tokens[k] = 0;
  if (threadIdx.x != 0) return;
  batch.count[r] = static_cast<int32_t>(n);
  batch.status[r] = valid ? 0 : kInvalidRow;
}

}  // namespace

cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  LAUNCH(draw_children_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
