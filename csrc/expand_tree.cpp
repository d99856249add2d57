// expand_tree on the CPU: threads take rows; a pass for the largest of each block, then only the best blocks.
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

// The largest values offered so far, best first. Of equals the first one offered wins.
template <class Id>
struct Best {
  float* values;
  Id* ids;
  int64_t room, count;
  float floor;  // what is not above it does not count

  float bar() const { return count < room ? floor : values[room - 1]; }
  void offer(float value, int64_t id) {
    if (!(value > bar())) return;
    int64_t at = count < room ? count++ : room - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = static_cast<Id>(id);
  }
};

// The largest entry of each block of a row, as bits: positive floats are in order then, others are negative.
// Returns false if an entry is NaN, negative or too large.
WIDEST_VECTORS bool maxima(const float* row, int64_t V, int32_t* out) {
  int32_t bad = 0;
  for (int64_t start = 0; start < V; start += kBlock) {
    const int64_t stop = std::min(V, start + kBlock);
    int32_t most = 0;
    for (int64_t v = start; v < stop; ++v) {
      int32_t bits;
      std::memcpy(&bits, row + v, sizeof bits);
      most = bits > most ? bits : most;
      bad |= !(row[v] >= 0.0f) | !(row[v] <= 2.0f);
    }
    *out++ = most;
  }
  return !bad;
}

// Finds the row's best and returns whether the row is valid. They are at least the width-th largest of the
// blocks' maxima, as that many entries are.
bool scan(const float* row, int64_t V, Best<int64_t>& best, std::vector<int32_t>& most,
          std::vector<int32_t>& order) {
  const int64_t blocks = most.size();
  if (!maxima(row, V, most.data())) return false;
  int32_t bound = 1;
  if (best.room < blocks) {
    order = most;
    std::nth_element(order.begin(), order.begin() + best.room - 1, order.end(), std::greater<int32_t>());
    bound = std::max(bound, order[best.room - 1]);
  }
  --bound;
  std::memcpy(&best.floor, &bound, sizeof bound);
  for (int64_t i = 0; i < blocks; ++i) {
    if (most[i] <= bound) continue;
    for (int64_t v = i * kBlock; v < std::min(V, (i + 1) * kBlock); ++v) best.offer(row[v], v);
  }
  return best.count > 0 && specvis::to_fixed(best.values[0]) > 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expand_tree_cpu(
    const Tensor& draft_probs,  // (B, F, V)
    const Tensor& scores,       // (B, F)
    const Tensor& width,        // (B)
    int64_t K) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1), V = draft_probs.size(2);
  Tensor tokens = torch::stable::new_empty(draft_probs, {B, F, K}, ScalarType::Long);
  Tensor child_scores = torch::stable::new_empty(draft_probs, {B, F, K});
  Tensor frontier = torch::stable::new_empty(draft_probs, {B, K}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  const float* probs = draft_probs.const_data_ptr<float>();
  const float* score = scores.const_data_ptr<float>();
  const int32_t* wanted = width.const_data_ptr<int32_t>();
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  float* score_out = child_scores.mutable_data_ptr<float>();
  int32_t* frontier_out = frontier.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();
  const auto width_of = [=](int64_t b) { return std::clamp<int64_t>(wanted[b], 1, K); };

  torch::stable::parallel_for(0, B * F, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> most((V + kBlock - 1) / kBlock), order;
    for (int64_t row = begin; row < end; ++row) {
      Best<int64_t> best = {score_out + row * K, token_out + row * K, width_of(row / F), 0, 0.0f};
      status_out[row] = 0;
      if (score[row] > -kInf && !scan(probs + row * V, V, best, most, order)) {
        status_out[row] = specvis::kInvalidRow;
        best.count = 0;
      }
      for (int64_t k = 0; k < K; ++k) {
        float child = -kInf;
        if (k < best.count) {
          const float step = static_cast<float>(std::log(static_cast<double>(best.values[k])));
          child = score[row] + (step < 0 ? step : 0.0f);
        }
        best.values[k] = child;
        if (child == -kInf) best.ids[k] = 0;
      }
    }
  });

  torch::stable::parallel_for(0, B, std::max<int64_t>(1, 4096 / (F * K)), [&](int64_t begin, int64_t end) {
    std::vector<float> values(K);
    for (int64_t b = begin; b < end; ++b) {
      Best<int32_t> best = {values.data(), frontier_out + b * K, width_of(b), 0, -kInf};
      for (int64_t i = 0; i < F * K; ++i) best.offer(score_out[b * F * K + i], i);
      std::fill(best.ids + best.count, best.ids + K, -1);
    }
  });
  return {tokens, child_scores, frontier, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("expand_tree", TORCH_BOX(&expand_tree_cpu)); }
