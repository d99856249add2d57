// expand_tree on the CPU: each task takes rows. One pass finds the largest entry of each block; then only the blocks
// with the largest are read again.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "rules.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;

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

// Finds the largest entry of each block of a row, as the float's bits: they are in the order of the floats if these are
// positive, and negative if they are not. Returns false if an entry is NaN, negative or too large.
WIDEST_VECTORS bool block_maxima(const float* row, int64_t V, int32_t* out) {
  int32_t invalid = 0;
  for (int64_t start = 0; start < V; start += kBlock) {
    const int64_t stop = std::min(V, start + kBlock);
    int32_t largest = 0;
    for (int64_t v = start; v < stop; ++v) {
      int32_t bits;
      std::memcpy(&bits, row + v, sizeof bits);
      largest = bits > largest ? bits : largest;
      invalid |= !(row[v] >= 0.0f) | !(row[v] <= 2.0f);
    }
    *out++ = largest;
  }
  return !invalid;
}

// Finds the row's largest entries, as many as `best` has capacity for, and returns whether the row is valid. None of
// them is below the capacity-th largest of the blocks' maxima, since that many entries are not.
bool find_best(const float* row, int64_t V, Best<int64_t>& best, std::vector<int32_t>& maxima,
               std::vector<int32_t>& order) {
  const int64_t blocks = maxima.size();
  if (!block_maxima(row, V, maxima.data())) return false;
  int32_t bound = 1;
  if (best.capacity < blocks) {
    order = maxima;
    std::nth_element(order.begin(), order.begin() + best.capacity - 1, order.end(), std::greater<int32_t>());
    bound = std::max(bound, order[best.capacity - 1]);
  }
  --bound;
  std::memcpy(&best.floor, &bound, sizeof bound);
  for (int64_t i = 0; i < blocks; ++i) {
    if (maxima[i] <= bound) continue;
    for (int64_t v = i * kBlock; v < std::min(V, (i + 1) * kBlock); ++v) best.offer(row[v], v);
  }
  return best.count > 0 && specvis::to_fixed_point(best.values[0]) > 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expand_tree_cpu(const Tensor& draft_probs,  // (B, F, V)
                                                           const Tensor& scores,       // (B, F)
                                                           const Tensor& width,        // (B)
                                                           int64_t num_children) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1), V = draft_probs.size(2);
  Tensor tokens = torch::stable::new_empty(draft_probs, {B, F, num_children}, ScalarType::Long);
  Tensor child_scores = torch::stable::new_empty(draft_probs, {B, F, num_children});
  Tensor frontier = torch::stable::new_empty(draft_probs, {B, num_children}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  const float* probs = draft_probs.const_data_ptr<float>();
  const float* score = scores.const_data_ptr<float>();
  const int32_t* widths = width.const_data_ptr<int32_t>();
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  float* score_out = child_scores.mutable_data_ptr<float>();
  int32_t* frontier_out = frontier.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();
  const auto width_of = [=](int64_t b) { return std::clamp<int64_t>(widths[b], 1, num_children); };

  torch::stable::parallel_for(0, B * F, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> maxima((V + kBlock - 1) / kBlock), order;
    for (int64_t row = begin; row < end; ++row) {
      Best<int64_t> best = {score_out + row * num_children, token_out + row * num_children, width_of(row / F), 0, 0.0f};
      status_out[row] = 0;
      if (score[row] > -kInf && !find_best(probs + row * V, V, best, maxima, order)) {
        status_out[row] = specvis::kInvalidRow;
        best.count = 0;
      }
      for (int64_t k = 0; k < num_children; ++k) {
        float child = -kInf;
        if (k < best.count) {
          const float log_prob = static_cast<float>(std::log(static_cast<double>(best.values[k])));
          child = score[row] + (log_prob < 0 ? log_prob : 0.0f);
        }
        best.values[k] = child;
        if (child == -kInf) best.ids[k] = 0;
      }
    }
  });

  torch::stable::parallel_for(0, B, std::max<int64_t>(1, 4096 / (F * num_children)), [&](int64_t begin, int64_t end) {
    std::vector<float> values(num_children);
    for (int64_t b = begin; b < end; ++b) {
      Best<int32_t> best = {values.data(), frontier_out + b * num_children, width_of(b), 0, -kInf};
      for (int64_t i = 0; i < F * num_children; ++i) best.offer(score_out[b * F * num_children + i], i);
      std::fill(best.ids + best.count, best.ids + num_children, -1);
    }
  });
  return {tokens, child_scores, frontier, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("expand_tree", TORCH_BOX(&expand_tree_cpu)); }
