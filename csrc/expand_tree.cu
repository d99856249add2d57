// expand_tree on CUDA: a block per node finds its children, and a request's last block to finish finds the
// next level. (One block for all of a request's nodes would need no ticket, but would read up to 40 rows one
// after the other while most of the GPU is idle.)
//
// Each thread keeps the largest of its entries. Of these largest the K-th bounds the K-th of the whole row
// from below; the threads that reach it look at theirs again, and what they find there is ranked.
#include "cuda.h"
#include "floats.h"
#include "launch.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;      // at most
constexpr unsigned kRanked = 512;  // at most; where more are within the bound, the best are taken one by one

// An entry as an integer: by value, then by falling id. 0: not above `floor`.
__device__ inline uint32_t order_of(float x, float floor) { return x > floor ? ordered(x) : 0; }
__device__ inline uint64_t entry(uint32_t order, int64_t id) {
  return order ? uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(id)) : 0;
}
__device__ inline int64_t id_of(uint64_t entry) { return 0xffffffffu - static_cast<uint32_t>(entry); }

__device__ inline uint64_t block_max(uint64_t value) {
  __shared__ uint64_t most[kMostWarps];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  __syncthreads();  // everyone has read those of the call before
  if (lane() == 0) most[warp()] = value;
  __syncthreads();
  for (unsigned w = 0; w < warps(); ++w) value = most[w] > value ? most[w] : value;
  return value;
}

// The largest of the thread's own entries below `limit`.
__device__ inline uint64_t largest_below(uint64_t limit, const float* row, int64_t n, float floor) {
  uint64_t largest = 0;
  for_each_entry(row, n, [&](int64_t v, float x) {
    const uint64_t own = entry(order_of(x, floor), v);
    if (own < limit && own > largest) largest = own;
  });
  return largest;
}

// emit(rank, id) for the `wanted` largest entries above `floor`, the lower id first among equals, each by
// some thread behind a barrier. `largest` is the largest of the thread's own entries, or `floor`.
template <class Emit>
__device__ void best_of(const float* row, int64_t n, float floor, float largest, int64_t wanted,
                        const Emit& emit) {
  __shared__ uint64_t within[kRanked];
  __shared__ unsigned count;
  const uint32_t most = order_of(largest, floor);
  uint32_t bound = 0;
  for (uint32_t bit = 0x80000000u; bit > 0; bit >>= 1)
    if (__syncthreads_count(most >= bound + bit) >= wanted) bound += bit;
  if (bound == 0) bound = 1;  // too few threads have any: all entries

  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (most >= bound)
    for_each_entry(row, n, [&](int64_t v, float x) {
      const uint32_t order = order_of(x, floor);
      if (order < bound) return;
      const unsigned at = atomicAdd(&count, 1u);
      if (at < kRanked) within[at] = entry(order, v);
    });
  __syncthreads();
  if (count <= kRanked) {
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      int64_t rank = 0;
      for (unsigned j = 0; j < count; ++j) rank += within[j] > within[i];
      if (rank < wanted) emit(rank, id_of(within[i]));
    }
    return;
  }
  uint64_t own = largest_below(UINT64_MAX, row, n, floor);
  for (int64_t rank = 0; rank < wanted; ++rank) {
    const uint64_t best = block_max(own);
    if (best == 0) break;
    if (own != best) continue;
    emit(rank, id_of(best));
    own = largest_below(best, row, n, floor);
  }
}

__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTree batch) {
  __shared__ bool last;
  const int64_t r = blockIdx.x, F = batch.F, V = batch.V, K = batch.K, b = r / F;
  const float* probs = batch.draft_probs + r * V;
  int64_t* tokens = batch.tokens + r * K;
  float* child_scores = batch.child_scores + r * K;
  int32_t* frontier = batch.frontier + b * K;
  const float score = batch.scores[r];
  const int64_t width = batch.width[b], wanted = width < 1 ? 1 : width < K ? width : K;

  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) {
    tokens[k] = 0;
    child_scores[k] = -INFINITY;
  }
  const bool alive = score > -INFINITY;
  bool valid = true;
  if (alive) {
    bool sound = true;
    float largest = 0;
    for_each_entry(probs, V, [&](int64_t, float p) {
      sound &= is_probability(p);
      largest = p > largest ? p : largest;
    });
    valid = !block_any(!sound);
    valid = valid && block_any(to_fixed(largest) > 0);
    if (valid)
      best_of(probs, V, 0, largest, wanted, [&](int64_t rank, int64_t id) {
        const float step = static_cast<float>(log(static_cast<double>(probs[id])));
        const float child = score + (step < 0 ? step : 0.0f);
        child_scores[rank] = child;
        tokens[rank] = child > -INFINITY ? id : 0;
      });
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;

  __threadfence();  // what this block wrote, then its ticket, which lies where the next level will
  __syncthreads();
  if (threadIdx.x == 0) last = F == 1 || atomicAdd(frontier, 1) == F - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) frontier[k] = -1;
  const float* children = batch.child_scores + b * F * K;
  float largest = -INFINITY;
  for_each_entry(children, F * K, [&](int64_t, float x) { largest = x > largest ? x : largest; });
  best_of(children, F * K, -INFINITY, largest, wanted,
          [=](int64_t rank, int64_t id) { frontier[rank] = static_cast<int32_t>(id); });
}

}  // namespace

cudaError_t expand_tree_cuda(const ExpandTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  if (batch.F > 1) {
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.B * batch.K);
    const cudaError_t error = cudaMemsetAsync(batch.frontier, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  LAUNCH(expand_tree_kernel, static_cast<unsigned>(batch.B * batch.F), threads_for(batch.V, kThreads), 0,
         stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
