// Rows of probabilities on the CPU: totals, copies in fixed point, the largest, and draws.
#pragma once
#include <algorithm>
#include <cstdint>

#include "rules.h"

namespace specvis {

// The row's total in fixed point; what is no probability weighs nothing.
Total weigh(const float* row, int64_t V);

// The same, and what every kRowBlock entries weigh goes to `sums`, unless it is null.
constexpr int64_t kRowBlock = 128;  // entries whose 32-bit sums fit in 32 bits
Total weigh_blocks(const float* row, int64_t V, int64_t* sums);

// The same, and every entry's weight goes to `copy`.
Total weigh(const float* row, int64_t V, int64_t* copy);

int64_t sum(const int64_t* weights, int64_t V);

// The heaviest entry, lowest id on ties.
int64_t argmax(const float* row, int64_t V);

// What an entry weighs, and what entries weigh together, of a row of probabilities or of weights.
inline int64_t weight_of(float p) { return to_fixed(p); }
inline int64_t weight_of(int64_t weight) { return weight; }
inline int64_t weight_of(const float* row, int64_t n) { return weigh(row, n).weight; }
inline int64_t weight_of(const int64_t* row, int64_t n) { return sum(row, n); }

// Inverse CDF: a block at a time, then within one.
template <class T>
int64_t draw(const T* row, int64_t V, int64_t total, float uniform) {
  constexpr int64_t kBlock = 1024;
  int64_t left = draw_at(uniform, total), v = 0;
  for (; v + kBlock < V; v += kBlock) {
    const int64_t block = weight_of(row + v, kBlock);
    if (block > left) break;
    left -= block;
  }
  for (; v + 1 < V && (left -= weight_of(row[v])) >= 0;) ++v;
  return v;
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
