// Attention of the queries of one row and one head of keys, on the CPU. A key's score and a sum over keys are computed
// in an order that depends on the query and its own keys alone, so that it does not matter what is read beside it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace specvis {

// The memory in which a thread computes one head of a row after another.
struct AttentionScratch {
  std::unique_ptr<float[]> memory;
  int64_t size = 0;

  float* floats(int64_t n) {
    if (n > size) {
      memory.reset(new float[n]);
      size = n;
    }
    return memory.get();
  }
};

// What each of the N queries of a row sees.
struct Row {
  std::vector<int32_t> columns;    // the cached columns that all see, rising
  int64_t first_node, num_nodes;   // the columns of the nodes
  std::vector<int32_t> ancestors;  // each query's, one query after the other, rising
  std::vector<int64_t> ends;       // N + 1 numbers: the ancestors of query n are within [ends[n], ends[n + 1])
  int64_t most_ancestors;

  // A column outside of the cache of T is not seen. A row of negative length sees nothing.
  void set(int64_t length, int64_t T, const bool* mask, int64_t S, const int64_t* words, int64_t N, int64_t W) {
    first_node = std::clamp<int64_t>(length, 0, T);
    num_nodes = most_ancestors = 0;
    columns.clear();
    for (int64_t t = 0; t < first_node; ++t)
      if (t >= S || mask[t]) columns.push_back(static_cast<int32_t>(t));
    ancestors.clear();
    ends.assign(1, 0);
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t w = 0; w < W; ++w)
        for (auto bits = static_cast<uint64_t>(words[n * W + w]); bits; bits &= bits - 1) {
          const int64_t node = w * 64 + __builtin_ctzll(bits);
          if (length < 0 || length >= T - node) continue;
          ancestors.push_back(static_cast<int32_t>(node));
          num_nodes = std::max(num_nodes, node + 1);
        }
      most_ancestors = std::max<int64_t>(most_ancestors, ancestors.size() - ends.back());
      ends.push_back(ancestors.size());
    }
  }
};

// One row and one head of keys, with the N * G queries that look at it.
template <class T>
struct Head {
  const T *q, *k, *v;
  int64_t query_stride, query_head_stride, k_stride, v_stride;
  int64_t N, G, D;
  float scale;
  T* out;  // (N, heads, D)
  int64_t out_stride;
};

// T: float, c10::Half or c10::BFloat16
template <class T>
void attend(const Head<T>& head, const Row& row, AttentionScratch& scratch);

}  // namespace specvis
