// Children that are drawn without replacement from one row at a time, on the CPU: for draw_children and draft_children.
#pragma once
#include <vector>

#include "../shared/noise.h"
#include "rows.h"

namespace specvis {

// Draws K children of a row of at most V by inverse CDF, and returns how many exist. One pass over the row sums it by
// blocks; each child is then searched for among these sums, and within the block that is found.
class InverseCdf {
 public:
  explicit InverseCdf(int64_t V);
  int64_t operator()(const ProbRow& row, const float* uniforms, int64_t K, int64_t* children, bool& valid);

 private:
  std::vector<int64_t> sums_, indices_;
  std::vector<char> drawn_;
};

// The children of one row with the highest scores log(p) - best + g, where g = -log(-log(1 - v)) for a uniform v. Since
// g is not above -log(v), a child that reaches the score s has v <= p * exp(-best - s). Noise is made where an id may
// still be one of the best, and its logarithms are computed where the noise is large enough for it.
class HighestScores {
 public:
  HighestScores(int64_t V, int64_t K);
  int64_t operator()(const ProbRow& row, const Noise& noise, int64_t* children, bool& valid);

 private:
  struct Child {
    float score;
    int64_t id;
    bool operator<(const Child& other) const {  // comes before it
      return score > other.score || (score == other.score && id < other.id);
    }
  };

  void look_at(const ProbRow& row, const Noise& noise, int64_t block);
  void offer(const Child& child);

  int64_t K_;
  float best_ = 0, limit_ = 0;
  std::vector<uint32_t> maxima_;
  std::vector<Child> children_;
};

}  // namespace specvis
