// tree_paths on the CPU: each task takes requests. A tree is walked depth first, so leaves are met in order.
#include <algorithm>
#include <vector>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void tree_paths_cpu(const TreePaths& batch) {
  const int64_t N = batch.N, max_depth = batch.max_depth, width = max_depth + 1;
  parallel_for(batch.B, 16, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> depth(N), first_child(N), next_sibling(N), youngest(N);
    for (int64_t b = begin; b < end; ++b) {
      const int32_t* const parent = batch.parents + b * N;
      int64_t* row = batch.paths + b * N * width;
      std::fill_n(row, N * width, -1);
      for (int64_t n = 0; n < N; ++n) {
        const int64_t p = parent[n];
        depth[n] = first_child[n] = next_sibling[n] = -1;
        if (n == 0 && p == -1) depth[n] = 0;
        if (n == 0 || p < 0 || p >= n || depth[p] < 0 || depth[p] == max_depth) continue;
        depth[n] = depth[p] + 1;
        (first_child[p] < 0 ? first_child[p] : next_sibling[youngest[p]]) = n;
        youngest[p] = n;
      }
      for (int64_t n = depth[0] == 0 ? 0 : -1; n >= 0;) {
        if (first_child[n] >= 0) {
          n = first_child[n];
          continue;
        }
        for (int64_t node = n; node >= 0; node = parent[node]) row[depth[node]] = node;
        row += width;
        while (n > 0 && next_sibling[n] < 0) n = parent[n];
        n = n > 0 ? next_sibling[n] : -1;
      }
    }
  });
}

}  // namespace specvis
