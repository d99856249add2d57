// expand_tree on CUDA: one block per node finds its children, and the last block of a request to finish finds the next
// level. (One block for all nodes of a request would need no counter, but would read up to 40 rows one after the other
// while most of the GPU is idle.)
#include "best_of.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTree batch) {
  __shared__ bool last;
  const int64_t r = blockIdx.x, F = batch.F, V = batch.V, num_children = batch.num_children, b = r / F;
  const float* probs = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * num_children;
  float* child_scores = batch.child_scores + r * num_children;
  int32_t* frontier = batch.frontier + b * num_children;
  const float score = batch.scores[r];
  const int64_t width = batch.width[b], count = width < 1 ? 1 : width < num_children ? width : num_children;

  for (int64_t k = threadIdx.x; k < num_children; k += blockDim.x) {
    tokens[k] = 0;
    child_scores[k] = -INFINITY;
  }
  const bool active = score > -INFINITY;
  bool valid = true;
  if (active) {
    bool entries_valid = true;  // this thread's
    float largest = 0;
    for_each_entry(probs, V, [&](int64_t, float p) {
      entries_valid &= is_probability(p);
      largest = p > largest ? p : largest;
    });
    valid = !block_any(!entries_valid);
    valid = valid && block_any(to_fixed_point(largest) > 0);
    if (valid)
      best_of([=](auto f) { for_each_entry(probs, V, f); }, 0, largest, count,
              [&](int64_t rank, int64_t id) {
                const float log_prob = static_cast<float>(log(static_cast<double>(probs[id])));
                const float child = score + (log_prob < 0 ? log_prob : 0.0f);
                child_scores[rank] = child;
                tokens[rank] = child > -INFINITY ? id : 0;
              });
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;

  // First this block's results, then its count of one, become visible. Until the last block writes the next level
  // there, the first element of `frontier` counts the blocks that are done.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = F == 1 || atomicAdd(frontier, 1) == F - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int64_t k = threadIdx.x; k < num_children; k += blockDim.x) frontier[k] = -1;
  const float* children = batch.child_scores + b * F * num_children;
  float largest = -INFINITY;
  for_each_entry(children, F * num_children, [&](int64_t, float x) { largest = x > largest ? x : largest; });
  best_of([=](auto f) { for_each_entry(children, F * num_children, f); }, -INFINITY, largest, count,
          [=](int64_t rank, int64_t id) { frontier[rank] = static_cast<int32_t>(id); });
}

}  // namespace

cudaError_t expand_tree_cuda(const ExpandTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  if (batch.F > 1) {
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.B * batch.num_children);
    const cudaError_t error = cudaMemsetAsync(batch.frontier, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  LAUNCH(expand_tree_kernel, static_cast<unsigned>(batch.B * batch.F), threads_for(batch.V, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
