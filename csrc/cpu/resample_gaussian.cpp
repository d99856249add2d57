// resample_gaussian on the CPU: each task takes positions. At each it tries proposals until one is accepted.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gaussian.h"
#include "team.h"

namespace specvis {
namespace {

// Tries the proposals at one position until one is accepted.
struct Search {
  const ResampleGaussian& batch;
  LastStep step;
  std::vector<float> drawn;

  struct Found {
    const float* token;  // null if none is drawn
    int32_t num_tries, status;
  };

  Found at(int64_t i, double distance_factor) {
    const int64_t C = batch.C, M = batch.M;
    if (step) {
      step.move_to(i);
      step.prepare_draws();
    }
    for (int64_t m = 0; m < M; ++m) {
      const int64_t j = i * M + m;
      const int32_t num_tries = static_cast<int32_t>(m + 1);
      const float* x = batch.proposals + j * C;
      double sum = batch.log_ratio[step ? i : j];
      if (step) {
        step.draw(x, drawn.data());
        x = drawn.data();
        sum += step.log_ratio(x, distance_factor);
      }
      const float log_r = static_cast<float>(sum), uniform = batch.uniforms[j];
      if (!std::isfinite(log_r) || !std::isfinite(uniform) || !all_finite(x, C))
        return {nullptr, num_tries, kInvalidRow};
      if (accepts_residual(uniform, log_r)) return {x, num_tries, 0};
    }
    return {batch.fallback + i * C, static_cast<int32_t>(M), kOutOfTries};
  }
};

}  // namespace

void resample_gaussian_cpu(const ResampleGaussian& batch) {
  const int64_t G = batch.G, C = batch.C;
  parallel_for(batch.B * G, 1, [&](int64_t begin, int64_t end) {
    Search search = {batch, LastStep(batch.last_step, C), std::vector<float>(C)};
    for (int64_t i = begin; i < end; ++i) {
      Search::Found found = {batch.is_accepted[i] ? batch.tokens + i * C : nullptr, 0, 0};
      if (batch.is_rejected[i]) {
        const Temperature temperature(batch.temperature, i / G);
        found = temperature.is_undefined ? Search::Found{nullptr, 0, kInvalidRule}
                                         : search.at(i, temperature.distance_factor);
      }
      if (found.token && !all_finite(found.token, C)) {
        found.status |= kInvalidRow;
        found.token = nullptr;
      }
      float* const to = batch.new_tokens + i * C;
      if (found.token)
        std::copy_n(found.token, C, to);
      else
        std::fill_n(to, C, 0.0f);
      batch.num_tries[i] = found.num_tries;
      batch.status[i] = found.status;
    }
  });
}

}  // namespace specvis
