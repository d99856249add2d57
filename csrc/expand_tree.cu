// expand_tree on CUDA: one block per node finds its children, and the last block of a request to finish finds the next
// level. (One block for all nodes of a request would need no counter, but would read up to 40 rows one after the other
// while most of the GPU is idle.)
//
// Each thread finds the largest of its entries. The K-th largest of these is a lower bound of the K-th largest entry of
// the row. The threads whose largest entry reaches the bound read their entries again, and rank those that reach it.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;         // at most
constexpr unsigned kMaxRanked = 512;  // entries; if more reach the bound, the best are taken one by one

// The largest of the thread's own entries below `limit`.
__device__ inline uint64_t largest_below(uint64_t limit, const float* row, int64_t n, float floor) {
  uint64_t largest = 0;
  for_each_entry(row, n, [&](int64_t v, float x) {
    const uint64_t candidate = entry(order_of(x, floor), v);
    if (candidate < limit && candidate > largest) largest = candidate;
  });
  return largest;
}

// Calls emit(rank, id) for the `count` largest entries above `floor`, the lower id first among equal ones. Some thread
// makes each call, after a barrier. `largest` is the largest of the thread's own entries, or `floor`.
template <class Emit>
__device__ void best_of(const float* row, int64_t n, float floor, float largest, int64_t count, const Emit& emit) {
  __shared__ uint64_t found[kMaxRanked];
  __shared__ unsigned num_found;
  const uint32_t own_largest = order_of(largest, floor);
  uint32_t bound = 0;
  for (uint32_t bit = 0x80000000u; bit > 0; bit >>= 1)
    if (__syncthreads_count(own_largest >= bound + bit) >= count) bound += bit;
  if (bound == 0) bound = 1;  // fewer than `count` threads have an entry above `floor`: take all entries

  if (threadIdx.x == 0) num_found = 0;
  __syncthreads();
  if (own_largest >= bound)
    for_each_entry(row, n, [&](int64_t v, float x) {
      const uint32_t order = order_of(x, floor);
      if (order < bound) return;
      const unsigned i = atomicAdd(&num_found, 1u);
      if (i < kMaxRanked) found[i] = entry(order, v);
    });
  __syncthreads();
  if (num_found <= kMaxRanked) {
    for (unsigned i = threadIdx.x; i < num_found; i += blockDim.x) {
      int64_t rank = 0;
      for (unsigned j = 0; j < num_found; ++j) rank += found[j] > found[i];
      if (rank < count) emit(rank, id_of(found[i]));
    }
    return;
  }
  uint64_t own_entry = largest_below(UINT64_MAX, row, n, floor);
  for (int64_t rank = 0; rank < count; ++rank) {
    const uint64_t best = block_max(own_entry);
    if (best == 0) break;
    if (own_entry != best) continue;
    emit(rank, id_of(best));
    own_entry = largest_below(best, row, n, floor);
  }
}

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
      best_of(probs, V, 0, largest, count, [&](int64_t rank, int64_t id) {
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
  best_of(children, F * num_children, -INFINITY, largest, count,
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
