// Rows of probabilities on the CPU: their sums, copies in fixed point, argmax, and draws from them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../shared/rules.h"

namespace specvis {

// n probabilities of the ids base + slots[i], or without slots base + i; they ascend. The base is a multiple of 4. The
// slots can be read up to a multiple of 64.
struct ProbRow {
  const float* probs;
  int64_t n, base;
  const int32_t* slots;
  int64_t id(int64_t i) const { return base + (slots ? slots[i] : i); }
};

void divide(const float* x, int64_t n, float divisor, float* quotients);

// The sum of a row in fixed point. An entry that is no probability counts as 0.
Total sum_row(const float* row, int64_t V);

// The row's sum. Unless it is null, `sums` also receives the sum of every kRowBlock entries.
constexpr int64_t kRowBlock = 128;  // so few that the sums of their 32-bit parts fit in 32 bits
Total sum_blocks(const float* row, int64_t V, int64_t* sums);

// The row's sum. `fixed_probs` receives the row in fixed point.
Total sum_row(const float* row, int64_t V, int64_t* fixed_probs);

int64_t sum(const int64_t* fixed_probs, int64_t V);

// The id of the largest entry in fixed point, the lowest id on ties.
int64_t argmax(const float* row, int64_t V);

// The mass of one entry, and of n entries, in a row of probabilities or of fixed_probs.
inline int64_t entry_mass(float p) { return to_fixed_point(p); }
inline int64_t entry_mass(int64_t mass) { return mass; }
inline int64_t block_mass(const float* row, int64_t n) { return sum_row(row, n).mass; }
inline int64_t block_mass(const int64_t* row, int64_t n) { return sum(row, n); }

// Inverse CDF: the row is searched a block at a time, then the block entry by entry.
template <class T>
int64_t draw(const T* row, int64_t V, int64_t total, float uniform) {
  constexpr int64_t kBlock = 1024;
  int64_t remaining = draw_threshold(uniform, total), v = 0;
  for (; v + kBlock < V; v += kBlock) {
    const int64_t block = block_mass(row + v, kBlock);
    if (block > remaining) break;
    remaining -= block;
  }
  for (; v + 1 < V && (remaining -= entry_mass(row[v])) >= 0;) ++v;
  return v;
}

// The residual of a target's row after a sampled candidate was rejected. Both rows are valid.
struct ResidualRow {
  const float *target, *draft;
  double unit, draft_unit, slack;

  // The mass of token v: an integer, so that the sum over a row is exact.
  double operator()(int64_t v) const {
    constexpr float kOne = static_cast<float>(kFixedOne);
    const double mass = std::floor(static_cast<double>(target[v] * kOne));
    const double draft_mass = std::floor(static_cast<double>(draft[v] * kOne));
    return std::floor(residual_mass(mass, unit, draft_mass, draft_unit, slack));
  }
};

// The sum of the residual. `sums` receives the sum of every kResidualBlock tokens.
constexpr int64_t kResidualBlock = 256;
double sum_blocks(const ResidualRow& residual, int64_t V, double* sums);

// Inverse CDF: first among the sums of the blocks, then within one block. mass(v) is a token's; the total is positive.
template <class Mass>
int64_t draw(const Mass& mass, const double* sums, double total, float uniform) {
  double threshold = static_cast<double>(draw_threshold(uniform, static_cast<int64_t>(total)));
  int64_t block = 0;
  while (sums[block] <= threshold) threshold -= sums[block++];  // ends at the last positive sum at the latest
  int64_t v = block * kResidualBlock;
  while ((threshold -= mass(v)) >= 0) ++v;
  return v;
}

// The longest prefix of a token's first num_considered neighbors that fits the budget. The running sum only grows, so
// the first neighbor that does not fit ends it. mass(v) is an entry of the row.
template <class Mass>
NeighborPrefix neighbor_prefix(Mass mass, int64_t V, const Neighbors& neighbors, int64_t num_considered, int64_t token,
                               const Budget& budget) {
  NeighborPrefix prefix = {0, 0};
  if (!budget.any || !neighbors.has(token)) return prefix;
  for (; prefix.num_kept < num_considered; ++prefix.num_kept) {
    const int64_t id = neighbors(token, prefix.num_kept);
    const int64_t sum = prefix.mass + (id >= 0 && id < V ? mass(id) : 0);
    if (!budget.fits(sum)) break;
    prefix.mass = sum;
  }
  return prefix;
}

}  // namespace specvis
