#include "draws.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "noise_words.h"

namespace specvis {
namespace {

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
    const float score = (x[i] - best) + to_gumbel(words[i]);
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
      words_of(noise, row.base(), slots + begin, words);
      compete(x + begin, words, best, [&](int64_t i) { return row.base() + slots[begin + i]; }, winner);
    }
    return winner;
  }
  const auto chunk = [&](int64_t begin) {
    for (int64_t start = begin; start < begin + FilteredRow::kChunk; start += kWords) {
      words_from(noise, row.base() + start, words);
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
  Draws(FilteredRow& row, const Filters& filters)
      : row_(row), top_k_(filters.top_k), top_p_(filters.top_p), min_p_(filters.min_p) {
    if (filters.p_first && top_k_ > 0 && top_p_ > 0) {
      row_.apply(filters);
      top_k_ = 0;
      top_p_ = min_p_ = 0;
      return;
    }
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
    row_.keep_min_p(min_p_);
    top_p_ = min_p_ = 0;
    return best_score(row_, noise).id;
  }

 private:
  bool is_kept(float x) const {
    return exp_of(x - row_.best()) >= min_p_ && (top_k_ <= 0 || row_.count_above(x) < top_k_) &&
           (!(top_p_ > 0) || row_.mass_above(x) < limit_);
  }
  void keep_top_k() {
    if (top_k_ > 0) row_.keep_top_k(top_k_);
    top_k_ = 0;
  }

  FilteredRow& row_;
  int64_t top_k_;  // 0: off, or done
  float top_p_, min_p_;
  int64_t limit_ = 0;
};

}  // namespace

int32_t draw_row(const LogitRows& rows, int64_t r, int64_t seed, int64_t position, int64_t ahead, FilteredRow& row,
                 int64_t& token, int64_t& ahead_token) {
  token = ahead_token = 0;
  if (!row.read(rows, r)) return kInvalidRow;
  if (rows.temperature[r / rows.N] == 0) {
    token = ahead_token = row.id_of_best();
    return 0;
  }
  Draws draw(row, Filters(rows, r));
  const Noise noise(seed, position);
  token = draw(noise);
  ahead_token = ahead ? draw(noise.ahead_by(ahead)) : token;
  return 0;
}

}  // namespace specvis
