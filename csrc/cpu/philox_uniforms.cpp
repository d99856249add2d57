// philox_uniforms on the CPU: each task takes positions.
#include <algorithm>

#include "../shared/noise.h"
#include "../shared/params.h"
#include "team.h"

namespace specvis {

void philox_uniforms_cpu(const PhiloxUniforms& batch) {
  const int64_t n = batch.n;
  if (n == 0) return;
  parallel_for(batch.B * batch.L, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Noise noise(batch.seeds[row / batch.L], batch.positions[row]);
      for (int64_t i = 0; i < n; i += 4) {
        uint32_t words[4];
        noise.words(static_cast<uint32_t>(i / 4), words, batch.stream, batch.turn);
        for (int64_t j = i; j < std::min(i + 4, n); ++j) batch.uniforms[row * n + j] = to_uniform(words[j - i]);
      }
    }
  });
}

}  // namespace specvis
