// commit_kv on the CPU: each task moves the columns of some rows.
#include <cstring>
#include <vector>

#include "../shared/params.h"
#include "team.h"

namespace specvis {

void commit_kv_cpu(const CommitKv& batch) {
  constexpr int64_t kTaskBytes = 1 << 17;  // less is not worth another thread
  const Moves& moves = batch.moves;
  std::vector<char> is_valid(moves.B);
  for (int64_t b = 0; b < moves.B; ++b) {
    is_valid[b] = moves.is_valid(b);
    if (batch.new_lengths) batch.new_lengths[b] = moves.new_length(b);
  }
  const int64_t runs = moves.inner > 0 ? moves.num_runs() : 0,
                grain = kTaskBytes / ((moves.P + 1) * moves.inner + 1) + 1;
  parallel_for(runs * batch.num_caches, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t run = i % runs, row = moves.row(run), b = row % moves.B;
      char* const first = batch.caches[i / runs] + moves.begin(run) * moves.inner;
      const auto at = [&](int64_t column) { return first + moves.place(row, column) * moves.inner; };
      if (!is_valid[b]) continue;
      for (int64_t n = 0; n <= moves.num_accepted[b]; ++n) {
        const int64_t from = moves.source(b, n), to = moves.target(b, n);
        if (from == to) continue;
        std::memcpy(at(to), at(from), moves.inner);
      }
    }
  });
}

}  // namespace specvis
