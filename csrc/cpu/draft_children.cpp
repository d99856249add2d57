// draft_children on the CPU: each task takes rows of logits. Children are drawn among the tokens that the filters keep.
#include <optional>

#include "draw_children.h"
#include "expand_tree.h"
#include "guided_row.h"
#include "team.h"

namespace specvis {
namespace {

// The K likeliest tokens, and how many there are.
class Likeliest {
 public:
  explicit Likeliest(int64_t K) : scores_(K) {}

  int64_t operator()(const ProbRow& row, int64_t K, int64_t* children) {
    find_(row.probs, row.n, 1, 0, K, K, children, scores_.data());
    int64_t n = 0;
    for (; n < K && scores_[n] > -kInf; ++n) children[n] = row.id(children[n]);
    return n;
  }

 private:
  ChildFinder find_;
  std::vector<float> scores_;
};

}  // namespace

void draft_children_cpu(const DraftChildren& batch) {
  const LogitRows& rows = batch.rows;
  const int64_t V = rows.V, K = batch.K;
  parallel_for(rows.B * rows.N, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    GuidedRow guided(V);
    Likeliest likeliest(K);
    std::optional<InverseCdf> by_uniforms;
    std::optional<HighestScores> by_noise;
    if (batch.uniforms)
      by_uniforms.emplace(V);
    else
      by_noise.emplace(V, K);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / rows.N;
      int64_t* const children = batch.tokens + r * K;
      int64_t n = 0;
      bool valid = guided.read(rows, r);
      const ProbRow row = guided.write(batch.probs + r * V);
      if (valid)
        n = rows.temperature[b] == 0 ? likeliest(row, K, children)
            : batch.uniforms         ? (*by_uniforms)(row, batch.uniforms + r * K, K, children, valid)
                                     : (*by_noise)(row, Noise(batch.seeds[b], batch.positions[r]), children, valid);
      std::fill(children + n, children + K, 0);
      batch.status[r] = valid ? 0 : kInvalidRow;
    }
  });
}

}  // namespace specvis
