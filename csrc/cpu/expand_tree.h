// The children of a dynamic tree's nodes and the next level, on the CPU, for expand_tree and draft_frontier.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "rows.h"

namespace specvis {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The largest values offered so far, the largest first. Of equal values the one offered first is kept.
template <class Id>
struct Best {
  float* values;
  Id* ids;
  int64_t capacity, count;
  float floor;  // only larger values count

  float lowest() const { return count < capacity ? floor : values[capacity - 1]; }
  void offer(float value, int64_t id) {
    if (!(value > lowest())) return;
    int64_t i = count < capacity ? count++ : capacity - 1;
    for (; i > 0 && value > values[i - 1]; --i) {
      values[i] = values[i - 1];
      ids[i] = ids[i - 1];
    }
    values[i] = value;
    ids[i] = static_cast<Id>(id);
  }
};

// Finds the children of one node at a time. One pass finds the largest entry of each block of the row; then only the
// blocks with the largest are read again.
class ChildFinder {
 public:
  // The children of a node with this score, the `width` likeliest of n tokens, whose probabilities are row[i] / total.
  // All K tokens and scores are written; a token is its index i. Returns false if the row is invalid.
  bool operator()(const float* row, int64_t n, float total, float score, int64_t width, int64_t K, int64_t* tokens,
                  float* scores);

 private:
  bool find_best(const float* row, int64_t n, float total, Best<int64_t>& best);

  std::vector<int32_t> maxima_, order_;
};

inline void no_children(int64_t K, int64_t* tokens, float* scores) {
  std::fill_n(tokens, K, 0);
  std::fill_n(scores, K, -kInf);
}

// The `width` best of n children, best first, and then -1 up to K.
inline void find_frontier(const float* child_scores, int64_t n, int64_t width, int64_t K, std::vector<float>& scratch,
                          int32_t* frontier) {
  scratch.resize(K);
  Best<int32_t> best = {scratch.data(), frontier, width, 0, -kInf};
  for (int64_t i = 0; i < n; ++i) best.offer(child_scores[i], i);
  std::fill(frontier + best.count, frontier + K, -1);
}

inline int64_t clamped_width(int32_t width, int64_t K) { return std::clamp<int64_t>(width, 1, K); }

}  // namespace specvis
