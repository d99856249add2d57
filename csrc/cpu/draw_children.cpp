// draw_children on the CPU: each task takes rows.
#include "draw_children.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "../shared/params.h"
#include "noise_words.h"
#include "team.h"

namespace specvis {

InverseCdf::InverseCdf(int64_t V) : sums_((V + kRowBlock - 1) / kRowBlock), drawn_(V) {}

int64_t InverseCdf::operator()(const ProbRow& row, const float* uniforms, int64_t K, int64_t* children, bool& valid) {
  const Total total = sum_blocks(row.probs, row.n, sums_.data());
  valid = total.valid;
  int64_t remaining = total.valid ? total.mass : 0;
  indices_.clear();
  for (int64_t k = 0; k < K && remaining > 0; ++k) {
    int64_t threshold = draw_threshold(uniforms[k], remaining), block = 0;
    while (sums_[block] <= threshold) threshold -= sums_[block++];  // ends at the last positive sum at the latest
    int64_t i = block * kRowBlock;
    while ((threshold -= drawn_[i] ? 0 : to_fixed_point(row.probs[i])) >= 0) ++i;
    sums_[block] -= to_fixed_point(row.probs[i]);
    remaining -= to_fixed_point(row.probs[i]);
    drawn_[i] = true;
    indices_.push_back(i);
    children[k] = row.id(i);
  }
  for (int64_t i : indices_) drawn_[i] = false;
  return static_cast<int64_t>(indices_.size());
}

namespace {

constexpr uint32_t kMinusZero = 0x80000000u, kBitsOfTwo = 0x40000000u;

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The largest entry of every kWords, as bits: these are in the order of the numbers, and negative ones and NaN are
// above all probabilities. Returns the largest of all.
WIDEST_VECTORS uint32_t maxima_of(const float* row, int64_t V, uint32_t* maxima) {
  uint32_t largest = 0;
  for (int64_t begin = 0; begin < V; begin += kWords) {
    const int64_t n = std::min(kWords, V - begin);
    uint32_t max = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, row + begin + i, sizeof bits);
      bits = bits == kMinusZero ? 0 : bits;
      max = bits > max ? bits : max;
    }
    maxima[begin / kWords] = max;
    largest = max > largest ? max : largest;
  }
  return largest;
}

// Which of kWords ids may have a score that is large enough: those with v <= p * limit. Returns whether any may.
WIDEST_VECTORS bool find_candidates(const float* probs, const uint32_t* words, float limit, int32_t* may) {
  int32_t any = 0;
  for (int64_t i = 0; i < kWords; ++i) {
    const float v = static_cast<float>(static_cast<int32_t>(words[i] >> 1)) + 0.5f;  // times 2^31
    may[i] = v <= probs[i] * limit;
    any |= may[i];
  }
  return any;
}

}  // namespace

HighestScores::HighestScores(int64_t V, int64_t K) : K_(K), maxima_((V + kWords - 1) / kWords) { children_.reserve(K); }

int64_t HighestScores::operator()(const ProbRow& row, const Noise& noise, int64_t* children, bool& valid) {
  const uint32_t largest = maxima_of(row.probs, row.n, maxima_.data());
  valid = largest <= kBitsOfTwo && to_fixed_point(float_of_bits(largest)) > 0;
  if (!valid) return 0;
  children_.clear();
  best_ = log_of(float_of_bits(largest));
  limit_ = std::numeric_limits<float>::infinity();
  const int64_t num_blocks = (row.n + kWords - 1) / kWords;
  const int64_t first = std::find(maxima_.begin(), maxima_.end(), largest) - maxima_.begin();
  look_at(row, noise, first);  // where the scores are likely to be high
  for (int64_t block = 0; block < num_blocks; ++block)
    if (block != first) look_at(row, noise, block);
  for (size_t k = 0; k < children_.size(); ++k) children[k] = children_[k].id;
  return static_cast<int64_t>(children_.size());
}

void HighestScores::look_at(const ProbRow& row, const Noise& noise, int64_t block) {
  constexpr float kLeast = 0.5f;  // the least v, times 2^31
  if (!(float_of_bits(maxima_[block]) * limit_ >= kLeast)) return;
  const int64_t begin = block * kWords;
  const float* probs = row.probs + begin;
  float padded[kWords] = {};
  if (begin + kWords > row.n) {
    std::copy(probs, row.probs + row.n, padded);
    probs = padded;
  }
  uint32_t words[kWords];
  int32_t may[kWords];
  if (row.slots)
    words_of(noise, row.base, row.slots + begin, words);
  else
    words_from(noise, row.base + begin, words);
  if (!find_candidates(probs, words, limit_, may)) return;
  for (int64_t i = 0; i < kWords; ++i)
    if (may[i] && to_fixed_point(probs[i]) > 0)
      offer({(log_of(probs[i]) - best_) + to_gumbel(words[i]), row.id(begin + i)});
}

void HighestScores::offer(const Child& child) {
  const bool is_full = static_cast<int64_t>(children_.size()) == K_;
  if (is_full && !(child < children_.back())) return;
  if (is_full) children_.pop_back();
  children_.insert(std::upper_bound(children_.begin(), children_.end(), child), child);
  if (static_cast<int64_t>(children_.size()) < K_) return;
  const double exact = std::exp(-static_cast<double>(best_) - static_cast<double>(children_.back().score));
  limit_ = static_cast<float>(exact * 2147483648.0 * 1.001);  // more than rounding can take away
}

void draw_children_cpu(const DrawChildren& batch) {
  const int64_t F = batch.F, V = batch.V, K = batch.K;
  parallel_for(batch.R, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    std::optional<InverseCdf> by_uniforms;
    std::optional<HighestScores> by_noise;
    if (batch.uniforms)
      by_uniforms.emplace(V);
    else
      by_noise.emplace(V, K);
    for (int64_t r = begin; r < end; ++r) {
      const ProbRow row = {batch.draft_probs + r * V, V, 0, nullptr};
      int64_t* const children = batch.tokens + r * K;
      bool valid = true;
      const int64_t n = batch.uniforms
                            ? (*by_uniforms)(row, batch.uniforms + r * K, K, children, valid)
                            : (*by_noise)(row, Noise(batch.seeds[r / F], batch.positions[r]), children, valid);
      std::fill(children + n, children + K, 0);
      batch.num_children[r] = static_cast<int32_t>(n);
      batch.status[r] = valid ? 0 : kInvalidRow;
    }
  });
}

}  // namespace specvis
