// expand_tree on CUDA: one block per node, see expand.cuh.
#include "expand.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTree batch) {
  const int64_t r = blockIdx.x, F = batch.F, V = batch.V, num_children = batch.num_children, b = r / F;
  const float* probs = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * num_children;
  float* child_scores = batch.child_scores + r * num_children;
  int32_t* frontier = batch.frontier + b * num_children;
  const float score = batch.scores[r];
  const int64_t count = clamped_width(batch.width[b], num_children);

  clear_children(num_children, tokens, child_scores);
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
      find_children([=](auto f) { for_each_entry(probs, V, f); }, [=](int64_t id) { return probs[id]; }, largest, score,
                    count, tokens, child_scores);
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;

  // Until the last block writes the next level there, the first element of `frontier` counts the blocks that are done.
  if (!is_last_block(frontier, F)) return;
  for (int64_t k = threadIdx.x; k < num_children; k += blockDim.x) frontier[k] = -1;
  find_frontier(batch.child_scores + b * F * num_children, F * num_children, count,
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
