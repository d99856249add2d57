// expand_tree on the CPU: each task takes rows.
#include "expand_tree.h"

#include "../shared/params.h"
#include "team.h"

namespace specvis {

namespace {

constexpr int64_t kBlock = 64;

// Finds the largest entry of each block of a row, as the float's bits: they are in the order of the floats if these are
// positive, and negative if they are not. Returns false if an entry is NaN, negative or too large.
WIDEST_VECTORS bool block_maxima(const float* row, int64_t n, int32_t* out) {
  int32_t invalid = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    int32_t largest = 0;
    for (int64_t i = start; i < stop; ++i) {
      int32_t bits;
      std::memcpy(&bits, row + i, sizeof bits);
      largest = bits > largest ? bits : largest;
      invalid |= !(row[i] >= 0.0f) | !(row[i] <= 2.0f);
    }
    *out++ = largest;
  }
  return !invalid;
}

float float_of_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The largest float below a positive one; 0 below 0.
float below(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return float_of_bits(std::max(bits, 1) - 1);
}

}  // namespace

// Finds the row's largest entries, as many as `best` has capacity for, and returns whether the row is valid. None of
// them is below the capacity-th largest of the blocks' maxima, since that many entries are not.
bool ChildFinder::find_best(const float* row, int64_t n, float total, Best<int64_t>& best) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  maxima_.resize(blocks);
  if (!block_maxima(row, n, maxima_.data())) return false;
  if (best.capacity < blocks) {
    order_ = maxima_;
    std::nth_element(order_.begin(), order_.begin() + best.capacity - 1, order_.end(), std::greater<int32_t>());
    best.floor = below(float_of_bits(order_[best.capacity - 1]) / total);
  }
  const float floor = best.floor;
  float quotients[kBlock];
  for (int64_t block = 0; block < blocks; ++block) {
    if (!(float_of_bits(maxima_[block]) / total > floor)) continue;
    const int64_t start = block * kBlock, size = std::min(n - start, kBlock);
    const float* probs = row + start;
    if (total != 1) {
      divide(probs, size, total, quotients);
      probs = quotients;
    }
    for (int64_t i = 0; i < size; ++i) best.offer(probs[i], start + i);
  }
  return best.count > 0 && to_fixed_point(best.values[0]) > 0;
}

bool ChildFinder::operator()(const float* row, int64_t n, float total, float score, int64_t width, int64_t K,
                             int64_t* tokens, float* scores) {
  Best<int64_t> best = {scores, tokens, width, 0, 0.0f};
  const bool is_valid = find_best(row, n, total, best);
  const int64_t count = is_valid ? best.count : 0;
  for (int64_t k = 0; k < count; ++k) {
    const float log_prob = static_cast<float>(std::log(static_cast<double>(scores[k])));
    scores[k] = score + (log_prob < 0 ? log_prob : 0.0f);
    if (scores[k] == -kInf) tokens[k] = 0;
  }
  no_children(K - count, tokens + count, scores + count);
  return is_valid;
}

void expand_tree_cpu(const ExpandTree& batch) {
  const int64_t B = batch.B, F = batch.F, V = batch.V, K = batch.num_children;
  parallel_for(B * F, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    ChildFinder find_children;
    for (int64_t r = begin; r < end; ++r) {
      int64_t* const tokens = batch.tokens + r * K;
      float* const scores = batch.child_scores + r * K;
      batch.status[r] = 0;
      if (!(batch.scores[r] > -kInf))
        no_children(K, tokens, scores);
      else if (!find_children(batch.draft_probs + r * V, V, 1, batch.scores[r], clamped_width(batch.width[r / F], K), K,
                              tokens, scores))
        batch.status[r] = kInvalidRow;
    }
  });
  parallel_for(B, std::max<int64_t>(1, 4096 / (F * K)), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t b = begin; b < end; ++b)
      find_frontier(batch.child_scores + b * F * K, F * K, clamped_width(batch.width[b], K), K, scratch,
                    batch.frontier + b * K);
  });
}

}  // namespace specvis
