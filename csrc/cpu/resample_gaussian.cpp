// resample_gaussian on the CPU: each task takes positions. At each it tries proposals until one is accepted.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "gaussian.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// Tries the proposals at one position until one is accepted.
struct Search {
  const float *proposals, *log_ratio, *uniforms, *fallback;
  int64_t C, M;
  specvis::LastStep step;
  std::vector<float> drawn;

  struct Found {
    const float* token;  // null if there is none
    int32_t num_tries, status;
  };

  Found at(int64_t i, double distance_factor) {
    if (step) {
      step.move_to(i);
      step.prepare_draws();
    }
    for (int64_t m = 0; m < M; ++m) {
      const int64_t j = i * M + m;
      const int32_t num_tries = static_cast<int32_t>(m + 1);
      const float* x = proposals + j * C;
      double sum = log_ratio[step ? i : j];
      if (step) {
        step.draw(x, drawn.data());
        x = drawn.data();
        sum += step.log_ratio(x, distance_factor);
      }
      const float log_r = static_cast<float>(sum);
      if (!std::isfinite(log_r) || !std::isfinite(uniforms[j]) || !specvis::all_finite(x, C))
        return {nullptr, num_tries, specvis::kInvalidRow};
      if (specvis::accepts_residual(uniforms[j], log_r)) return {x, num_tries, 0};
    }
    return {fallback + i * C, static_cast<int32_t>(M), specvis::kOutOfTries};
  }
};

std::tuple<Tensor, Tensor, Tensor> resample_gaussian_cpu(const Tensor& tokens,       // (B, G, C)
                                                         const Tensor& is_accepted,  // (B, G)
                                                         const Tensor& is_rejected,  // (B, G)
                                                         const Tensor& proposals,    // (B, G, M, C)
                                                         const Tensor& log_ratio,    // (B, G) or (B, G, M)
                                                         const Tensor& uniforms,     // (B, G, M)
                                                         const Tensor& fallback,     // (B, G, C)
                                                         const std::optional<Tensor>& target_means,       // (B, G, C)
                                                         const std::optional<Tensor>& target_log_sigmas,  // (B, G, C)
                                                         const std::optional<Tensor>& draft_means,        // (B, G, C)
                                                         const std::optional<Tensor>& draft_log_sigmas,   // (B, G, C)
                                                         const std::optional<Tensor>& temperature) {      // (B)
  const int64_t B = tokens.size(0), G = tokens.size(1), C = tokens.size(2), M = uniforms.size(2);
  Tensor out = specvis::new_empty(tokens, {B, G, C}, ScalarType::Float);
  Tensor num_tries = specvis::new_empty(uniforms, {B, G}, ScalarType::Int);
  Tensor status = specvis::new_empty(uniforms, {B, G}, ScalarType::Int);
  const float* drafts = tokens.const_data_ptr<float>();
  const bool* is_accepted_in = is_accepted.const_data_ptr<bool>();
  const bool* is_rejected_in = is_rejected.const_data_ptr<bool>();
  float* token_out = out.mutable_data_ptr<float>();
  int32_t* num_tries_out = num_tries.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B * G, 1, [&](int64_t begin, int64_t end) {
    Search search = {proposals.const_data_ptr<float>(),
                     log_ratio.const_data_ptr<float>(),
                     uniforms.const_data_ptr<float>(),
                     fallback.const_data_ptr<float>(),
                     C,
                     M,
                     {data<float>(target_means), data<float>(target_log_sigmas), data<float>(draft_means),
                      data<float>(draft_log_sigmas), C},
                     std::vector<float>(C)};
    for (int64_t i = begin; i < end; ++i) {
      Search::Found found = {is_accepted_in[i] ? drafts + i * C : nullptr, 0, 0};
      if (is_rejected_in[i]) {
        const specvis::Temperature temperature_i(data<float>(temperature), i / G);
        found = temperature_i.is_undefined ? Search::Found{nullptr, 0, specvis::kInvalidRule}
                                           : search.at(i, temperature_i.distance_factor);
      }
      if (found.token && !specvis::all_finite(found.token, C)) {
        found.status |= specvis::kInvalidRow;
        found.token = nullptr;
      }
      if (found.token)
        std::copy_n(found.token, C, token_out + i * C);
      else
        std::fill_n(token_out + i * C, C, 0.0f);
      num_tries_out[i] = found.num_tries;
      status_out[i] = found.status;
    }
  });
  return {out, num_tries, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("resample_gaussian", SPECVIS_BOX(resample_gaussian, &resample_gaussian_cpu));
}
