// tree_links on the CPU: each task takes requests. One pass over the nodes meets parents before their children.
#include <algorithm>
#include <vector>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void tree_links_cpu(const TreeLinks& batch) {
  const int64_t N = batch.N, W = (N + 63) / 64;
  parallel_for(batch.B, 16, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> youngest(N);  // the last child of each node so far
    for (int64_t b = begin; b < end; ++b) {
      const int32_t* const parent = batch.parents + b * N;
      int64_t* const words = batch.ancestors + b * N * W;
      int32_t *const depth = batch.depth + b * N, *const child = batch.first_child + b * N;
      int32_t* const sibling = batch.next_sibling + b * N;
      batch.status[b] = 0;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t p = parent[n];
        depth[n] = child[n] = sibling[n] = -1;
        std::fill_n(words + n * W, W, 0);
        const bool used = n == 0 ? p == -1 : p >= 0 && p < n && depth[p] >= 0;
        if (!used) {
          if (n == 0 || p != -2) batch.status[b] = kInvalidTree;
          continue;
        }
        depth[n] = 0;
        if (n > 0) {
          depth[n] = depth[p] + 1;
          std::copy_n(words + p * W, W, words + n * W);
          (child[p] < 0 ? child[p] : sibling[youngest[p]]) = static_cast<int32_t>(n);
          youngest[p] = static_cast<int32_t>(n);
        }
        words[n * W + n / 64] |= static_cast<int64_t>(uint64_t{1} << n % 64);
      }
    }
  });
}

}  // namespace specvis
