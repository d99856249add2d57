// tree_from_mask on the CPU: each task takes requests. A row is compared with its parent's.
#include "../shared/params.h"
#include "team.h"

namespace specvis {

void tree_from_mask_cpu(const TreeFromMask& batch) {
  const int64_t N = batch.N;
  parallel_for(batch.B, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * N; i < end * N; ++i) {
      const int64_t n = i % N;
      const bool *row = batch.mask + i * N, *tree = batch.mask + (i - n) * N;
      int64_t parent = N - 1;
      while (parent >= 0 && (!row[parent] || parent == n)) --parent;
      bool wrong = parent > n;
      for (int64_t c = 0; c < N && parent >= 0 && !wrong; ++c) {
        wrong = (row[c] && c != n) != (tree[parent * N + c] || c == parent);
      }
      batch.parents[i] = static_cast<int32_t>(parent < 0 ? (n == 0 ? -1 : -2) : wrong ? N : parent);
    }
  });
}

}  // namespace specvis
