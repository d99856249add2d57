// draw_children on CUDA: one block per row, see children.cuh.
#include "children.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__device__ void store(const DrawChildren& batch, int64_t r, const Children& children) {
  if (threadIdx.x != 0) return;
  batch.num_children[r] = static_cast<int32_t>(children.count);
  batch.status[r] = children.valid ? 0 : kInvalidRow;
}

__global__ void __launch_bounds__(kThreads) draw_children_kernel(DrawChildren batch) {
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K;
  store(batch, r, draw_by_uniforms(batch.draft_probs + r * V, V, batch.uniforms + r * K, K, batch.tokens + r * K));
}

__global__ void __launch_bounds__(kThreads) highest_scores_kernel(DrawChildren batch) {
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K;
  const Noise noise(batch.seeds[r / batch.F], batch.positions[r]);
  store(batch, r, draw_by_noise(batch.draft_probs + r * V, V, noise, K, batch.tokens + r * K));
}

}  // namespace

cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  const auto kernel = batch.uniforms ? draw_children_kernel : highest_scores_kernel;
  LAUNCH(kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
