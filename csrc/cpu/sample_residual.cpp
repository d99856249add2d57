// sample_residual on the CPU: one pass over a row sums the residual by blocks. The token is then searched for among
// these sums, and within the block that is found.
#include <vector>

#include "../shared/params.h"
#include "rows.h"
#include "team.h"

namespace specvis {

void sample_residual_cpu(const SampleResidual& batch) {
  const int64_t V = batch.V;
  parallel_for(batch.R, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums((V + kResidualBlock - 1) / kResidualBlock);
    for (int64_t r = begin; r < end; ++r) {
      const float* const target = batch.target_probs + r * V;
      const float* const draft = batch.draft_probs ? batch.draft_probs + r * V : nullptr;
      const double omega = batch.omega ? batch.omega[r] : 1.0;
      const Total target_sum = sum_row(target, V);
      const Total draft_sum = draft ? sum_row(draft, V) : Total{0, true};
      int32_t& status = batch.status[r];
      status = (omega >= 0 ? 0 : kInvalidRule) | (draft_sum.valid ? 0 : kInvalidDraft);
      batch.tokens[r] = 0;
      if (!target_sum.valid) {
        status |= kInvalidRow;
        continue;
      }
      if (draft && !status) {
        const ResidualRow residual = {target, draft, 1 / static_cast<double>(target_sum.mass),
                                      1 / static_cast<double>(draft_sum.mass), slack_of(omega)};
        const double total = sum_blocks(residual, V, sums.data());
        if (total > 0) {
          batch.tokens[r] = draw(residual, sums.data(), total, batch.uniforms[r]);
          continue;
        }
        status |= kEmptyResidual;
      }
      batch.tokens[r] = draw(target, V, target_sum.mass, batch.uniforms[r]);
    }
  });
}

}  // namespace specvis
