// accept_gaussian on the CPU: each task takes requests. First come the log ratios of all positions, then the decisions.
#include <algorithm>
#include <cmath>

#include "gaussian.h"
#include "team.h"

namespace specvis {

void accept_gaussian_cpu(const AcceptGaussian& batch) {
  const int64_t G = batch.G, C = batch.C;
  parallel_for(batch.B, 1, [&](int64_t begin, int64_t end) {
    LastStep step(batch.last_step, C);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * G, n = batch.num_drafted ? std::min<int64_t>(batch.num_drafted[b], G) : G;  // may be < 0
      const Temperature temperature(batch.temperature, b);
      std::fill_n(batch.is_accepted + row, G, false);
      std::fill_n(batch.is_rejected + row, G, false);
      std::fill_n(batch.log_r + row, G, 0.0f);
      bool valid = true;
      for (int64_t i = row; i < row + n; ++i) {
        const float* const x = batch.tokens + i * C;
        double sum = batch.log_ratio[i];
        if (step) {
          step.move_to(i);
          sum += step.log_ratio(x, temperature.distance_factor);
        }
        batch.log_r[i] = static_cast<float>(sum);
        valid &= std::isfinite(batch.log_r[i]) && std::isfinite(batch.uniforms[i]) && all_finite(x, C);
      }
      batch.num_accepted[b] = 0;
      batch.status[b] = (valid ? 0 : kInvalidRow) | (temperature.is_undefined ? kInvalidRule : 0);
      if (batch.status[b]) {
        std::fill_n(batch.log_r + row, n, 0.0f);
        continue;
      }
      for (int64_t i = row; i < row + n; ++i) {
        batch.is_accepted[i] = accepts(batch.uniforms[i], batch.log_r[i]);
        batch.is_rejected[i] = !batch.is_accepted[i];
        batch.num_accepted[b] += batch.is_accepted[i];
        if (batch.truncate && batch.is_rejected[i]) break;
      }
    }
  });
}

}  // namespace specvis
