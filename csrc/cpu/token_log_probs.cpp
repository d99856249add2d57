// token_log_probs on the CPU: each task takes tokens, and reads a row for each.
#include <algorithm>
#include <limits>

#include "filters.h"
#include "team.h"

namespace specvis {

void token_log_probs_cpu(const TokenLogProbs& batch) {
  const LogitRows& rows = batch.rows;
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const int64_t grain = std::max<int64_t>(1, 8192 / (rows.last_id - rows.first_id));
  parallel_for(rows.B * batch.K, grain, [&](int64_t begin, int64_t end) {
    FilteredRow row(rows.V);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = batch.row_numbers ? batch.row_numbers[i] : i % batch.K;
      float &sampled = batch.sampled[i], &full = batch.full[i];
      sampled = full = n < 0 ? 0 : kNever;
      batch.status[i] = 0;
      if (n < 0) continue;
      const int64_t r = i / batch.K * rows.N + std::min(n, rows.N - 1), token = batch.tokens[i];
      if (n >= rows.N || !row.read(rows, r)) {
        batch.status[i] = kInvalidRow;
        continue;
      }
      if (token < rows.first(r) || token >= rows.last(r)) continue;
      const float x = row.values()[token - row.base()], margin = x - row.best();
      row.compute_masses();
      full = margin - log_of(row.total());
      if (rows.temperature[r / rows.N] == 0) {
        sampled = margin == 0 ? 0 : kNever;
        continue;
      }
      row.apply(Filters(rows, r));
      if (x >= row.lowest()) sampled = margin - log_of(row.total());
    }
  });
}

}  // namespace specvis
