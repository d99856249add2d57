// draw_children on CUDA: with uniforms one block per row, with noise a team, see children.cuh.
#include "../shared/params.h"
#include "children.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most, in a block

__device__ void store(const DrawChildren& batch, int64_t r, const Children& children) {
  if (threadIdx.x != 0 || !batch.num_children) return;
  batch.num_children[r] = static_cast<int32_t>(children.count);
  batch.status[r] = children.valid ? 0 : kInvalidRow;
}

__device__ bool is_greedy(const DrawChildren& batch, int64_t r) {
  return batch.temperature && batch.temperature[r / batch.F] == 0;
}

__global__ void __launch_bounds__(kThreads, 2) draw_children_kernel(DrawChildren batch) {
  const int64_t r = blockIdx.x, V = batch.V, K = batch.K;
  const float* const probs = batch.draft_probs + r * V;
  int64_t* const tokens = batch.tokens + r * K;
  Team block = Team().alone();
  if (is_greedy(batch, r)) return find_likeliest(block, probs, V, K, tokens);
  store(batch, r, draw_by_uniforms(probs, V, batch.uniforms + r * K, K, tokens));
}

__global__ void __launch_bounds__(kThreads) highest_scores_kernel(DrawChildren batch, int64_t capacity) {
  DYNAMIC_SHARED(float4, copy);
  Team team;
  const int64_t r = blockIdx.x / team.size(), V = batch.V, K = batch.K;
  const float* const probs = batch.draft_probs + r * V;
  int64_t* const tokens = batch.tokens + r * K;
  if (is_greedy(batch, r)) {
    find_likeliest(team, probs, V, K, tokens);
  } else {
    const Noise noise(batch.seeds[r / batch.F], batch.positions[r]);
    const Children children = draw_by_noise(team, probs, V, noise, K, tokens, copy, capacity);
    if (team.rank() == 0) store(batch, r, children);
  }
  team.end();
}

}  // namespace

cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  const unsigned threads = threads_for((batch.V + 3) / 4, kThreads);
  if (batch.uniforms) {
    LAUNCH(draw_children_kernel, blocks_for(batch.R), threads, 0, stream, batch);
    return cudaGetLastError();
  }
  Device device;
  const cudaError_t error = device_for(highest_scores_kernel, &device);
  if (error != cudaSuccess) return error;
  const unsigned cluster = cluster_for(device, batch.R);
  const int64_t fours = (batch.V + 3) / 4, all_threads = int64_t{cluster} * threads;
  int64_t capacity = (fours + all_threads - 1) / all_threads * threads;
  if (capacity * static_cast<int64_t>(sizeof(float4)) > device.shared) capacity = 0;
  return LAUNCH_CLUSTERS(highest_scores_kernel, blocks_for(batch.R * cluster), cluster, threads,
                         static_cast<size_t>(capacity) * sizeof(float4), stream, batch, capacity);
}

}  // namespace specvis
