// draw_tokens on the CPU: each task takes rows. Noise is made for the ids that may win, and its two logarithms are
// computed where the noise's upper bound does not rule the id out.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>

#include "filters.h"
#include "noise_words.h"

namespace {

using specvis::FilteredRow;
using specvis::kInvalidRow;
using specvis::kWords;
using specvis::Noise;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMostNoise = 22.3f;  // log(2^32), and a little more

// At least the noise of a word, and hardly more where it is large: -log(v), with log2 interpolated between the powers
// of two, which is too low; and the noise is -log(-log(1 - v)), which is not above -log(v).
inline float noise_bound(uint32_t word) {
  const float v = static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f;
  int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return static_cast<float>(bits) * (-0.69314718f / 8388608) + 0.69314718f * (127 + 31) + 1e-3f;
}

struct Winner {
  float score = -kInf, x = -kInf;
  int64_t id = 0;
};

// Bounds of the scores of kWords candidates; returns the largest.
WIDEST_VECTORS float bounds_of(const float* x, const uint32_t* words, float best, float* bounds) {
  float lanes[16];
  for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] = -kInf;
  for (int64_t i = 0; i < kWords; i += 16)
    for (int64_t lane = 0; lane < 16; ++lane) {
      const float bound = (x[i + lane] - best) + noise_bound(words[i + lane]);
      bounds[i + lane] = bound;
      lanes[lane] = bound > lanes[lane] ? bound : lanes[lane];
    }
  float most = lanes[0];
  for (int64_t lane = 1; lane < 16; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}

// Lets kWords candidates with these logits and words compete. id_of(i) is a candidate's id.
template <class IdOf>
void compete(const float* x, const uint32_t* words, float best, IdOf id_of, Winner& winner) {
  float bounds[kWords];
  if (bounds_of(x, words, best, bounds) < winner.score) return;
  for (int64_t i = 0; i < kWords; ++i) {
    if (bounds[i] < winner.score) continue;
    const float score = (x[i] - best) + specvis::to_gumbel(words[i]);
    const int64_t id = id_of(i);
    if (score > winner.score || (score == winner.score && id < winner.id)) winner = {score, x[i], id};
  }
}

Winner best_score(const FilteredRow& row, const Noise& noise) {
  Winner winner;
  const float* const x = row.values();
  uint32_t words[kWords];
  const float best = row.best();
  if (row.is_packed()) {
    const int32_t* const slots = row.packed_slots();
    for (int64_t begin = 0; begin < row.size(); begin += kWords) {
      specvis::words_of(noise, row.base(), slots + begin, words);
      compete(x + begin, words, best, [&](int64_t i) { return row.base() + slots[begin + i]; }, winner);
    }
    return winner;
  }
  const auto chunk = [&](int64_t begin) {
    for (int64_t start = begin; start < begin + FilteredRow::kChunk; start += kWords) {
      specvis::words_from(noise, row.base() + start, words);
      compete(x + start, words, best, [&](int64_t i) { return row.base() + start + i; }, winner);
    }
  };
  const int64_t first = (row.id_of_best() - row.base()) / FilteredRow::kChunk * FilteredRow::kChunk;
  chunk(first);
  for (int64_t begin = 0; begin < row.size(); begin += FilteredRow::kChunk) {
    const float* const maxima = row.maxima() + begin / FilteredRow::kChunk * FilteredRow::kGroups;
    const float largest = *std::max_element(maxima, maxima + FilteredRow::kGroups);
    if (begin != first && (largest - best) + kMostNoise >= winner.score) chunk(begin);
  }
  return winner;
}

// Draws from one row, perhaps several times. The filters' thresholds are found when a winner is not certain to be kept.
class Draws {
 public:
  Draws(FilteredRow& row, int64_t top_k, float top_p) : row_(row), top_k_(top_k), top_p_(top_p) {
    if (top_k_ > 0) row_.pack_for_top_k(top_k_);
    if (top_p_ > 0) {
      keep_top_k();
      row_.compute_masses();
      limit_ = row_.limit_of(top_p_);
    }
  }

  int64_t operator()(const Noise& noise) {
    const Winner winner = best_score(row_, noise);
    if (is_kept(winner.x)) return winner.id;
    keep_top_k();
    if (top_p_ > 0) row_.keep_from(row_.top_p_threshold(limit_));
    top_p_ = 0;
    return best_score(row_, noise).id;
  }

 private:
  bool is_kept(float x) const {
    return (top_k_ <= 0 || row_.count_above(x) < top_k_) && (!(top_p_ > 0) || row_.mass_above(x) < limit_);
  }
  void keep_top_k() {
    if (top_k_ > 0) row_.keep_top_k(top_k_);
    top_k_ = 0;
  }

  FilteredRow& row_;
  int64_t top_k_;  // 0: off, or done
  float top_p_;
  int64_t limit_ = 0;
};

struct Row {
  float guidance, temperature;
  int64_t top_k;
  float top_p;
  int64_t seed, position, first, last, ahead;
};

// Returns the status.
template <class T>
int32_t draw_row(const T* logits, const T* uncond, int64_t V, const Row& r, FilteredRow& row, int64_t& token,
                 int64_t& ahead_token) {
  token = ahead_token = 0;
  if (!(r.first >= 0 && r.first < r.last && r.last <= V)) return kInvalidRow;
  if (!row.read(logits, uncond, r.guidance, r.temperature, r.first, r.last)) return kInvalidRow;
  if (r.temperature == 0) {
    token = ahead_token = row.id_of_best();
    return 0;
  }
  Draws draw(row, r.top_k < r.last - r.first ? r.top_k : 0, r.top_p < 1 ? r.top_p : 0);
  const Noise noise(r.seed, r.position);
  token = draw(noise);
  ahead_token = r.ahead ? draw(noise.ahead_by(r.ahead)) : token;
  return 0;
}

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor& guidance, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor& seeds, const Tensor& positions,
              const Tensor* id_range, int64_t ahead, Tensor& tokens, Tensor& ahead_tokens, Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* const x = static_cast<const T*>(logits.const_data_ptr());
  const T* const u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float *const g = guidance.const_data_ptr<float>(), *const t = temperature.const_data_ptr<float>();
  const int32_t* const k = top_k.const_data_ptr<int32_t>();
  const float* const p = top_p.const_data_ptr<float>();
  const int64_t *const seed = seeds.const_data_ptr<int64_t>(), *const position = positions.const_data_ptr<int64_t>();
  const int64_t* const range = id_range ? id_range->const_data_ptr<int64_t>() : nullptr;
  int64_t *const out = tokens.mutable_data_ptr<int64_t>(), *const out_ahead = ahead_tokens.mutable_data_ptr<int64_t>();
  int32_t* const bits = status.mutable_data_ptr<int32_t>();
  torch::stable::parallel_for(0, B * N, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    FilteredRow scratch(V);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / N;
      const Row r = {
          g[b], t[b], k[b], p[b], seed[b], position[row], range ? range[2 * row] : 0, range ? range[2 * row + 1] : V,
          ahead};
      bits[row] = draw_row(x + row * V, u ? u + row * V : nullptr, V, r, scratch, out[row], out_ahead[row]);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> draw_tokens_cpu(const Tensor& logits, const std::optional<Tensor>& uncond,
                                                           const Tensor& guidance, const Tensor& temperature,
                                                           const Tensor& top_k, const Tensor& top_p,
                                                           const Tensor& seeds, const Tensor& positions,
                                                           const std::optional<Tensor>& id_range,
                                                           const std::optional<Tensor>& guesses, int64_t ahead) {
  const int64_t B = logits.size(0), N = logits.size(1);
  Tensor tokens = torch::stable::new_empty(positions, {B, N}), ahead_tokens = torch::stable::new_empty(tokens, {B, N});
  Tensor num_accepted = torch::stable::new_empty(positions, {B}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(positions, {B, N}, ScalarType::Int);
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, guidance, temperature, top_k, top_p, seeds, positions,
                             id_range ? &*id_range : nullptr, ahead, tokens, ahead_tokens, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  const int64_t* const token = tokens.const_data_ptr<int64_t>();
  const int32_t* const bits = status.const_data_ptr<int32_t>();
  const int64_t* const guess = guesses ? guesses->const_data_ptr<int64_t>() : nullptr;
  int32_t* const accepted = num_accepted.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < B; ++b) {
    int64_t n = 0;
    while (guess && n < N && !bits[b * N + n] && guess[b * N + n] == token[b * N + n]) ++n;
    accepted[b] = static_cast<int32_t>(n);
  }
  return {tokens, num_accepted, ahead_tokens, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("draw_tokens", TORCH_BOX(&draw_tokens_cpu)); }
