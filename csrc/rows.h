// Rows of probabilities on the CPU: totals, copies in fixed point, and draws.
#pragma once
#include <cstdint>

#include "rules.h"

namespace specvis {

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
