// The passes over whole rows, in operations that vectorize. No processor's vectors turn floats into 64-bit
// integers but the widest, so a weight is made of two 32-bit ones: p * 2^18, and 24 bits of its fraction.
#include "rows.h"

namespace specvis {
namespace {

constexpr int kLow = 24;

struct Parts {
  int32_t high, low;
};

inline bool sound(float p) { return (p >= 0.0f) & (p <= 2.0f); }  // is_probability() without a branch

inline Parts parts_of(float p) {
  const float scaled = (sound(p) ? p : 0.0f) * static_cast<float>(kFixedOne / (1 << kLow));
  const int32_t high = static_cast<int32_t>(scaled);
  return {high, static_cast<int32_t>((scaled - static_cast<float>(high)) * (1 << kLow))};
}

}  // namespace

WIDEST_VECTORS Total weigh_blocks(const float* row, int64_t V, int64_t* sums) {
  int64_t total = 0, good = 0;
  for (int64_t begin = 0; begin < V; begin += kRowBlock) {
    const int64_t n = std::min(kRowBlock, V - begin);
    uint32_t high = 0, low = 0, fine = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Parts parts = parts_of(row[begin + i]);
      high += parts.high;
      low += parts.low;
      fine += sound(row[begin + i]);
    }
    const int64_t sum = (int64_t{high} << kLow) + low;
    if (sums) sums[begin / kRowBlock] = sum;
    total += sum;
    good += fine;
  }
  return {total, good == V && total > 0};
}

Total weigh(const float* row, int64_t V) { return weigh_blocks(row, V, nullptr); }

WIDEST_VECTORS Total weigh(const float* row, int64_t V, int64_t* copy) {
  for (int64_t v = 0; v < V; ++v) {
    const Parts parts = parts_of(row[v]);
    copy[v] = (int64_t{parts.high} << kLow) + parts.low;
  }
  return weigh(row, V);
}

WIDEST_VECTORS int64_t sum(const int64_t* weights, int64_t V) {
  int64_t total = 0;
  for (int64_t v = 0; v < V; ++v) total += weights[v];
  return total;
}

WIDEST_VECTORS int64_t argmax(const float* row, int64_t V) {
  int64_t most = -1, from = 0;
  for (int64_t begin = 0; begin < V; begin += kRowBlock) {
    const int64_t end = std::min(begin + kRowBlock, V);
    float top = 0;
    for (int64_t v = begin; v < end; ++v) top = row[v] > top ? row[v] : top;
    if (to_fixed(top) <= most) continue;
    most = to_fixed(top);
    from = begin;
  }
  while (to_fixed(row[from]) < most) ++from;
  return from;
}

}  // namespace specvis
