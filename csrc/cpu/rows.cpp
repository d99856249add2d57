// The passes over whole rows, written so that they vectorize. Only the widest vectors convert floats to 64-bit
// integers, so a fixed-point number is made of two 32-bit ones: the whole part of p * 2^18, and 24 bits of its
// fraction.
#include "rows.h"

namespace specvis {
namespace {

constexpr int kLow = 24;

struct Parts {
  int32_t high, low;
};

inline bool is_valid(float p) { return (p >= 0.0f) & (p <= 2.0f); }  // is_probability(p) without a branch

inline Parts parts_of(float p) {
  const float scaled = (is_valid(p) ? p : 0.0f) * static_cast<float>(kFixedOne / (1 << kLow));
  const int32_t high = static_cast<int32_t>(scaled);
  return {high, static_cast<int32_t>((scaled - static_cast<float>(high)) * (1 << kLow))};
}

}  // namespace

WIDEST_VECTORS void divide(const float* x, int64_t n, float divisor, float* quotients) {
  for (int64_t i = 0; i < n; ++i) quotients[i] = x[i] / divisor;
}

WIDEST_VECTORS Total sum_blocks(const float* row, int64_t V, int64_t* sums) {
  int64_t total = 0, num_valid = 0;
  for (int64_t begin = 0; begin < V; begin += kRowBlock) {
    const int64_t n = std::min(kRowBlock, V - begin);
    uint32_t high = 0, low = 0, valid_here = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Parts parts = parts_of(row[begin + i]);
      high += parts.high;
      low += parts.low;
      valid_here += is_valid(row[begin + i]);
    }
    const int64_t sum = (int64_t{high} << kLow) + low;
    if (sums) sums[begin / kRowBlock] = sum;
    total += sum;
    num_valid += valid_here;
  }
  return {total, num_valid == V && total > 0};
}

Total sum_row(const float* row, int64_t V) { return sum_blocks(row, V, nullptr); }

WIDEST_VECTORS Total sum_row(const float* row, int64_t V, int64_t* fixed_probs) {
  for (int64_t v = 0; v < V; ++v) {
    const Parts parts = parts_of(row[v]);
    fixed_probs[v] = (int64_t{parts.high} << kLow) + parts.low;
  }
  return sum_row(row, V);
}

WIDEST_VECTORS int64_t sum(const int64_t* fixed_probs, int64_t V) {
  int64_t total = 0;
  for (int64_t v = 0; v < V; ++v) total += fixed_probs[v];
  return total;
}

WIDEST_VECTORS double sum_blocks(const ResidualRow& residual, int64_t V, double* sums) {
  constexpr int64_t kLanes = 16;
  const ResidualRow row = residual;
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += kResidualBlock) {
    const int64_t end = std::min(begin + kResidualBlock, V);
    double lanes[kLanes] = {};
    int64_t v = begin;
    for (; v + kLanes <= end; v += kLanes)
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] += row(v + i);
    for (; v < end; ++v) lanes[0] += row(v);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    sums[begin / kResidualBlock] = sum;
    total += sum;
  }
  return total;
}

WIDEST_VECTORS int64_t argmax(const float* row, int64_t V) {
  int64_t max_mass = -1, from = 0;
  for (int64_t begin = 0; begin < V; begin += kRowBlock) {
    const int64_t end = std::min(begin + kRowBlock, V);
    float max = 0;
    for (int64_t v = begin; v < end; ++v) max = row[v] > max ? row[v] : max;
    if (to_fixed_point(max) <= max_mass) continue;
    max_mass = to_fixed_point(max);
    from = begin;
  }
  while (to_fixed_point(row[from]) < max_mass) ++from;
  return from;
}

}  // namespace specvis
