// draw_children on the CPU. With uniforms one pass over a row sums it by blocks; each child is then searched for among
// these sums, and within the block that is found. With seeds noise is made where an id may still be one of the best,
// and its logarithms are computed where the noise is large enough for it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "noise_words.h"
#include "rows.h"

namespace {

using specvis::kRowBlock;
using specvis::kWords;
using specvis::Noise;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Draws K children of one row by inverse CDF, and returns how many exist.
class InverseCdf {
 public:
  explicit InverseCdf(int64_t V) : V_(V), sums_((V + kRowBlock - 1) / kRowBlock), drawn_(V) {}

  int64_t operator()(const float* row, const float* uniforms, int64_t K, int64_t* children, bool& valid) {
    const specvis::Total total = specvis::sum_blocks(row, V_, sums_.data());
    valid = total.valid;
    int64_t remaining = total.valid ? total.mass : 0, n = 0;
    for (; n < K && remaining > 0; ++n) {
      int64_t threshold = specvis::draw_threshold(uniforms[n], remaining), block = 0;
      while (sums_[block] <= threshold) threshold -= sums_[block++];  // ends at the last positive sum at the latest
      int64_t v = block * kRowBlock;
      while ((threshold -= drawn_[v] ? 0 : specvis::to_fixed_point(row[v])) >= 0) ++v;
      sums_[block] -= specvis::to_fixed_point(row[v]);
      remaining -= specvis::to_fixed_point(row[v]);
      drawn_[v] = true;
      children[n] = v;
    }
    for (int64_t k = 0; k < n; ++k) drawn_[children[k]] = false;
    return n;
  }

 private:
  int64_t V_;
  std::vector<int64_t> sums_;
  std::vector<char> drawn_;
};

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

// The children of one row with the highest scores log(p) - best + g, where g = -log(-log(1 - v)) for a uniform v. Since
// g is not above -log(v), a child that reaches the score s has v <= p * exp(-best - s).
class HighestScores {
 public:
  HighestScores(int64_t V, int64_t K) : V_(V), K_(K), maxima_((V + kWords - 1) / kWords) { children_.reserve(K); }

  int64_t operator()(const float* row, const Noise& noise, int64_t* children, bool& valid) {
    const uint32_t largest = maxima_of(row, V_, maxima_.data());
    valid = largest <= kBitsOfTwo && specvis::to_fixed_point(float_of_bits(largest)) > 0;
    if (!valid) return 0;
    children_.clear();
    best_ = specvis::log_of(float_of_bits(largest));
    limit_ = std::numeric_limits<float>::infinity();
    const int64_t num_blocks = static_cast<int64_t>(maxima_.size());
    const int64_t first = std::find(maxima_.begin(), maxima_.end(), largest) - maxima_.begin();
    look_at(row, noise, first);  // where the scores are likely to be high
    for (int64_t block = 0; block < num_blocks; ++block)
      if (block != first) look_at(row, noise, block);
    for (size_t k = 0; k < children_.size(); ++k) children[k] = children_[k].id;
    return static_cast<int64_t>(children_.size());
  }

 private:
  struct Child {
    float score;
    int64_t id;
    bool operator<(const Child& other) const {  // comes before it
      return score > other.score || (score == other.score && id < other.id);
    }
  };

  void look_at(const float* row, const Noise& noise, int64_t block) {
    constexpr float kLeast = 0.5f;  // of v, times 2^31
    if (!(float_of_bits(maxima_[block]) * limit_ >= kLeast)) return;
    const float* probs = row + block * kWords;
    float padded[kWords] = {};
    if (block * kWords + kWords > V_) {
      std::copy(probs, row + V_, padded);
      probs = padded;
    }
    uint32_t words[kWords];
    int32_t may[kWords];
    specvis::words_from(noise, block * kWords, words);
    if (!find_candidates(probs, words, limit_, may)) return;
    for (int64_t i = 0; i < kWords; ++i)
      if (may[i] && specvis::to_fixed_point(probs[i]) > 0)
        offer({(specvis::log_of(probs[i]) - best_) + specvis::to_gumbel(words[i]), block * kWords + i});
  }

  void offer(const Child& child) {
    const bool is_full = static_cast<int64_t>(children_.size()) == K_;
    if (is_full && !(child < children_.back())) return;
    if (is_full) children_.pop_back();
    children_.insert(std::upper_bound(children_.begin(), children_.end(), child), child);
    if (static_cast<int64_t>(children_.size()) < K_) return;
    const double exact = std::exp(-static_cast<double>(best_) - static_cast<double>(children_.back().score));
    limit_ = static_cast<float>(exact * 2147483648.0 * 1.001);  // more than rounding can take away
  }

  int64_t V_, K_;
  float best_ = 0, limit_ = 0;
  std::vector<uint32_t> maxima_;
  std::vector<Child> children_;
};

std::tuple<Tensor, Tensor, Tensor> draw_children_cpu(const Tensor& draft_probs,               // (B, F, V)
                                                     const std::optional<Tensor>& uniforms,   // (B, F, K)
                                                     const std::optional<Tensor>& seeds,      // (B)
                                                     const std::optional<Tensor>& positions,  // (B, F)
                                                     int64_t K) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1), V = draft_probs.size(2);
  Tensor tokens = torch::stable::new_empty(draft_probs, {B, F, K}, ScalarType::Long);
  Tensor num_children = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  const float* probs = draft_probs.const_data_ptr<float>();
  const float* u = uniforms ? uniforms->const_data_ptr<float>() : nullptr;
  const int64_t* seed = seeds ? seeds->const_data_ptr<int64_t>() : nullptr;
  const int64_t* position = positions ? positions->const_data_ptr<int64_t>() : nullptr;
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  int32_t* num_children_out = num_children.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B * F, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    std::optional<InverseCdf> by_uniforms;
    std::optional<HighestScores> by_noise;
    if (u)
      by_uniforms.emplace(V);
    else
      by_noise.emplace(V, K);
    for (int64_t r = begin; r < end; ++r) {
      const float* row = probs + r * V;
      int64_t* children = token_out + r * K;
      bool valid = true;
      const int64_t n = u ? (*by_uniforms)(row, u + r * K, K, children, valid)
                          : (*by_noise)(row, Noise(seed[r / F], position[r]), children, valid);
      std::fill(children + n, children + K, 0);
      num_children_out[r] = static_cast<int32_t>(n);
      status_out[r] = valid ? 0 : specvis::kInvalidRow;
    }
  });
  return {tokens, num_children, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("draw_children", TORCH_BOX(&draw_children_cpu)); }
