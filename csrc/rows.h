// Rows of probabilities on the CPU: totals, copies in fixed point, and draws.
#pragma once
#include <cstdint>

#include "rules.h"

namespace specvis {

struct Total {
  int64_t weight;
  bool valid;
};

// The row's total in fixed point. `copy`, if not null, receives the weights.
inline Total weigh(const float* probs, int64_t V, int64_t* copy = nullptr) {
  int64_t total = 0;
  bool sound = true;
  for (int64_t v = 0; v < V; ++v) {
    const bool ok = is_probability(probs[v]);
    const int64_t weight = to_fixed(ok ? probs[v] : 0.0f);
    if (copy) copy[v] = weight;
    sound &= ok;
    total += weight;
  }
  return {total, sound && total > 0};
}

// Inverse CDF over V weights; weight(v) gives them.
template <class Weight>
int64_t draw(Weight weight, int64_t V, int64_t total, float uniform) {
  const int64_t aim = draw_at(uniform, total);
  int64_t sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    sum += weight(v);
    if (sum > aim) return v;
  }
  return V - 1;
}

// A code's neighbors: either width of table, as token ids.
class Neighbors {
 public:
  Neighbors() = default;
  Neighbors(const void* table, bool narrow, int64_t C, int64_t columns, int64_t offset)
      : table_(table), narrow_(narrow), C_(C), columns_(columns), offset_(offset) {}

  int64_t columns() const { return columns_; }
  bool has(int64_t token) const { return token >= offset_ && token - offset_ < C_; }
  // The j-th neighbor of a token that has() any; out of the vocabulary if the table says so.
  int64_t operator()(int64_t token, int64_t j) const {
    const int64_t at = (token - offset_) * columns_ + j;
    return offset_ + (narrow_ ? int64_t{static_cast<const uint16_t*>(table_)[at]}
                              : int64_t{static_cast<const int32_t*>(table_)[at]});
  }

 private:
  const void* table_ = nullptr;
  bool narrow_ = false;
  int64_t C_ = 0, columns_ = 0, offset_ = 0;
};

struct Kept {
  int64_t mass, count;
};

// The longest prefix of the first `columns` neighbors that the budget allows: sums only grow, so stop at the
// first overflow. weight(v) gives the row.
template <class Weight>
Kept kept_prefix(Weight weight, int64_t V, const Neighbors& neighbors, int64_t columns, int64_t token,
                 const Budget& budget) {
  Kept kept = {0, 0};
  if (!budget.any || !neighbors.has(token)) return kept;
  for (; kept.count < columns; ++kept.count) {
    const int64_t id = neighbors(token, kept.count);
    const int64_t sum = kept.mass + (id >= 0 && id < V ? weight(id) : 0);
    if (!budget.fits(sum)) break;
    kept.mass = sum;
  }
  return kept;
}

}  // namespace specvis
