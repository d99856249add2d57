// draw_tokens on the CPU: each task takes rows, see draws.h.
#include <algorithm>

#include "draws.h"
#include "team.h"

namespace specvis {

void draw_tokens_cpu(const DrawTokens& batch) {
  const LogitRows& rows = batch.rows;
  const int64_t B = rows.B, N = rows.N;
  parallel_for(B * N, std::max<int64_t>(1, 8192 / rows.V), [&](int64_t begin, int64_t end) {
    FilteredRow scratch(rows.V);
    for (int64_t r = begin; r < end; ++r)
      batch.status[r] = draw_row(rows, r, batch.seeds[r / N], batch.positions[r], batch.ahead, scratch, batch.tokens[r],
                                 batch.ahead_tokens[r]);
  });
  for (int64_t b = 0; b < B; ++b) {
    const auto is_accepted = [&](int64_t r) { return !batch.status[r] && batch.guesses[r] == batch.tokens[r]; };
    int64_t n = 0;
    while (batch.guesses && n < N && is_accepted(b * N + n)) ++n;
    batch.num_accepted[b] = static_cast<int32_t>(n);
  }
}

}  // namespace specvis
