// verify_greedy on the CPU: each task takes requests and walks down their trees.
#include <algorithm>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void verify_greedy_cpu(const VerifyGreedy& batch) {
  const int64_t N = batch.N, max_depth = batch.max_depth;
  parallel_for(batch.B, 64, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Siblings siblings = {N, batch.tokens + b * N, batch.next_sibling + b * N};
      const int64_t* const target_tokens = batch.target_tokens + b * N;
      int32_t* const path = batch.accepted_nodes + b * max_depth;
      int64_t node = 0, depth = 0;
      batch.status[b] = 0;
      for (; depth < max_depth; ++depth) {
        const int64_t found =
            siblings.find(target_tokens[node], node, batch.first_child[b * N + node], &batch.status[b]);
        if (found < 0) break;
        path[depth] = static_cast<int32_t>(node = found);
      }
      std::fill(path + depth, path + max_depth, -1);
      batch.num_accepted[b] = static_cast<int32_t>(depth);
      batch.next_token[b] = target_tokens[node];
    }
  });
}

}  // namespace specvis
