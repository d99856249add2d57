// The children of a dynamic tree's nodes and the next level, for expand_tree and draft_frontier.
#pragma once
#include "best_of.cuh"

namespace specvis {
namespace {

__device__ inline int64_t clamped_width(int64_t width, int64_t max_width) {
  return width < 1 ? 1 : width < max_width ? width : max_width;
}

// The `count` most probable tokens of a row, as tokens and scores of a node's children. for_each and `again` are as in
// best_of.cuh. Returns whether the row is valid.
template <class ForEach, class Again>
__device__ bool find_children(BestOf& best, const ForEach& for_each, const Again& again, float score, int64_t count,
                              int64_t* tokens, float* child_scores) {
  bool entries_valid = true;  // this thread's
  float largest = 0;
  for_each([&](int64_t, float p) {
    entries_valid &= is_probability(p);
    largest = p > largest ? p : largest;
  });
  const uint32_t highest = best.find_bound(entries_valid ? order_of(largest, 0) : UINT32_MAX, count);
  if (highest == 0 || highest == UINT32_MAX || to_fixed_point(value_of(highest)) == 0) return false;
  best.rank(for_each, again, 0, [=](unsigned rank, int64_t id, float p) {
    const float log_prob = static_cast<float>(log(static_cast<double>(p)));
    const float child = score + (log_prob < 0 ? log_prob : 0.0f);
    child_scores[rank] = child;
    tokens[rank] = child > -INFINITY ? id : 0;
  });
  return true;
}

__device__ inline void clear_children(int64_t num_children, int64_t* tokens, float* child_scores) {
  for (int64_t k = threadIdx.x; k < num_children; k += blockDim.x) {
    tokens[k] = 0;
    child_scores[k] = -INFINITY;
  }
}

// Calls emit(rank, id) for the `count` best of the children, by one block. A barrier must come before.
template <class Emit>
__device__ void find_frontier(BestOf& best, const float* children, int64_t size, int64_t count, const Emit& emit) {
  const auto emit_child = [=](unsigned rank, int64_t id, float) { emit(rank, id); };
  if (size <= kFewRanked) return best.rank_few(children, static_cast<unsigned>(size), -INFINITY, count, emit_child);
  float largest = -INFINITY;
  const auto for_each = [=](auto f) {
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) f(i, children[i]);
  };
  for_each([&](int64_t, float x) { largest = x > largest ? x : largest; });
  best.find_bound(order_of(largest, -INFINITY), count);
  best.rank(for_each, for_each, -INFINITY, emit_child);
}

}  // namespace
}  // namespace specvis
