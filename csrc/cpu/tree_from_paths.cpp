// tree_from_paths on the CPU: each task takes requests, whose paths it reads once.
#include <algorithm>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void tree_from_paths_cpu(const TreeFromPaths& batch) {
  const int64_t L = batch.L, D = batch.D, N = batch.N;
  parallel_for(batch.B, 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* const parent = batch.parents + b * N;
      std::fill_n(parent, N, -2);
      bool wrong = false;
      for (int64_t i = 0; i < L * D; ++i) {
        const int64_t* const node = batch.paths + b * L * D + i;
        wrong |= *node >= N || (*node == 0 && i % D > 0);
        if (i % D == 0 || *node < 1 || *node >= N) continue;
        const auto above = static_cast<int32_t>(std::clamp<int64_t>(node[-1], -1, N));
        parent[*node] = parent[*node] == -2 || parent[*node] == above ? above : static_cast<int32_t>(N);
      }
      parent[0] = wrong ? static_cast<int32_t>(N) : -1;
    }
  });
}

}  // namespace specvis
