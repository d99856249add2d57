// guided_probs on the CPU: each task takes rows. The logits that the filters keep are packed.
#include <algorithm>

#include "guided_row.h"
#include "team.h"

namespace specvis {

void guided_probs_cpu(const GuidedProbs& batch) {
  const LogitRows& rows = batch.rows;
  const int64_t grain = std::max<int64_t>(1, 8192 / (rows.last_id - rows.first_id));
  parallel_for(rows.B * rows.N, grain, [&](int64_t begin, int64_t end) {
    GuidedRow guided(rows.V);
    for (int64_t r = begin; r < end; ++r) {
      batch.status[r] = guided.read(rows, r) ? 0 : kInvalidRow;
      guided.write(batch.probs + r * rows.V);
    }
  });
}

}  // namespace specvis
