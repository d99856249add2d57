// select_tree on the CPU: each task takes requests. A partial selection finds the candidates to keep; one pass in their
// order then gives them their slots.
#include <algorithm>
#include <limits>
#include <vector>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void select_tree_cpu(const SelectTree& batch) {
  const int64_t M = batch.M, N = batch.num_nodes;
  parallel_for(batch.B, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> best(M);
    std::vector<int32_t> node(M);  // the node of each candidate, or -1
    for (int64_t b = begin; b < end; ++b) {
      const float* const score = batch.scores + b * M;
      const int32_t* const parent = batch.parents + b * M;
      int64_t* const tokens = batch.node_tokens + b * N;
      int32_t *const parents = batch.node_parents + b * N, *const source = batch.source + b * N;
      std::fill_n(tokens, N, 0);
      std::fill_n(parents, N, -2);
      std::fill_n(source, N, -1);
      tokens[0] = batch.root[b];
      parents[0] = -1;
      batch.status[b] = 0;

      best.clear();
      for (int64_t m = 0; m < M; ++m)
        if (score[m] > -std::numeric_limits<float>::infinity()) best.push_back(m);
      const int64_t budget = std::clamp<int64_t>(batch.size[b], 1, N) - 1;
      const int64_t num_kept = std::min<int64_t>(budget, best.size());
      std::nth_element(best.begin(), best.begin() + num_kept, best.end(), [score](int64_t i, int64_t j) {
        return score[i] > score[j] || (score[i] == score[j] && i < j);
      });
      std::sort(best.begin(), best.begin() + num_kept);

      std::fill(node.begin(), node.end(), -1);
      for (int64_t n = 1; n <= num_kept; ++n) node[best[n - 1]] = static_cast<int32_t>(n);
      for (int64_t n = 1; n <= num_kept; ++n) {
        const int64_t m = best[n - 1], p = parent[m];
        if (p < -1 || p >= m || (p >= 0 && node[p] < 0)) {
          batch.status[b] = kInvalidTree;
          continue;
        }
        tokens[n] = batch.tokens[b * M + m];
        parents[n] = p < 0 ? 0 : node[p];
        source[n] = static_cast<int32_t>(m);
      }
    }
  });
}

}  // namespace specvis
