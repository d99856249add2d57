// The largest entries of a row in order, found by one block.
//
// Each thread finds the largest of its entries. The K-th largest of these is a lower bound of the K-th largest entry of
// the row. The threads whose largest entry reaches the bound read their entries again, and rank those that reach it.
//
// A row is a function for_each(f) that calls f(v, x) for the entries of the calling thread, every time for the same.
#pragma once
#include "block.cuh"

namespace specvis {
namespace {

constexpr unsigned kMaxRanked = 512;  // entries; if more reach the bound, the best are taken one by one

// The largest of the thread's own entries below `limit`.
template <class ForEach>
__device__ uint64_t largest_below(uint64_t limit, const ForEach& for_each, float floor) {
  uint64_t largest = 0;
  for_each([&](int64_t v, float x) {
    const uint64_t candidate = entry(order_of(x, floor), v);
    if (candidate < limit && candidate > largest) largest = candidate;
  });
  return largest;
}

// Calls emit(rank, id) for the `count` largest entries above `floor`, the lower id first among equal ones. Some thread
// makes each call, after a barrier. `largest` is the largest of the thread's own entries, or `floor`.
template <class ForEach, class Emit>
__device__ void best_of(const ForEach& for_each, float floor, float largest, int64_t count, const Emit& emit) {
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
    for_each([&](int64_t v, float x) {
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
  uint64_t own_entry = largest_below(UINT64_MAX, for_each, floor);
  for (int64_t rank = 0; rank < count; ++rank) {
    const uint64_t best = block_max(own_entry);
    if (best == 0) break;
    if (own_entry != best) continue;
    emit(rank, id_of(best));
    own_entry = largest_below(best, for_each, floor);
  }
}

}  // namespace
}  // namespace specvis
