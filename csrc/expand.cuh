// The children of a dynamic tree's nodes, for expand_tree and draft_frontier. One block per node finds its children,
// and the last block of a request to finish finds the next level. (One block for all nodes of a request would need no
// counter, but would read up to 40 rows one after the other while most of the GPU is idle.)
#pragma once
#include "best_of.cuh"

namespace specvis {
namespace {

__device__ inline int64_t clamped_width(int64_t width, int64_t max_width) {
  return width < 1 ? 1 : width < max_width ? width : max_width;
}

// The `count` most probable tokens of a row, as tokens and scores of a node's children. for_each is as in best_of.cuh,
// prob_of(id) is an entry, and `largest` is the largest of the thread's own.
template <class ForEach, class ProbOf>
__device__ void find_children(const ForEach& for_each, const ProbOf& prob_of, float largest, float score, int64_t count,
                              int64_t* tokens, float* child_scores) {
  best_of(for_each, 0, largest, count, [&](int64_t rank, int64_t id) {
    const float log_prob = static_cast<float>(log(static_cast<double>(prob_of(id))));
    const float child = score + (log_prob < 0 ? log_prob : 0.0f);
    child_scores[rank] = child;
    tokens[rank] = child > -INFINITY ? id : 0;
  });
}

__device__ inline void clear_children(int64_t num_children, int64_t* tokens, float* child_scores) {
  for (int64_t k = threadIdx.x; k < num_children; k += blockDim.x) {
    tokens[k] = 0;
    child_scores[k] = -INFINITY;
  }
}

// Is this the last of a request's F blocks? Each calls it once what it has written is to be seen by the last one, which
// then may read it. `counter` is 0 before, and means nothing if F is 1.
__device__ inline bool is_last_block(int32_t* counter, int64_t F) {
  __shared__ bool last;
  __threadfence();  // first this block's results, then its count of one, become visible
  __syncthreads();
  if (threadIdx.x == 0) last = F == 1 || atomicAdd(counter, 1) == F - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Calls emit(rank, id) for the `count` best of so many children.
template <class Emit>
__device__ void find_frontier(const float* children, int64_t size, int64_t count, const Emit& emit) {
  float largest = -INFINITY;
  for_each_entry(children, size, [&](int64_t, float x) { largest = x > largest ? x : largest; });
  best_of([=](auto f) { for_each_entry(children, size, f); }, -INFINITY, largest, count, emit);
}

}  // namespace
}  // namespace specvis
