// accept_gaussian on the CPU: each task takes requests. First come the log ratios of all positions, then the decisions.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> accept_gaussian_cpu(
    const Tensor& tokens,                                                                                 // (B, G, C)
    const Tensor& log_ratio, const Tensor& uniforms,                                                      // (B, G)
    const std::optional<Tensor>& target_means, const std::optional<Tensor>& target_log_sigmas,            // (B, G, C)
    const std::optional<Tensor>& draft_means, const std::optional<Tensor>& draft_log_sigmas,              // (B, G, C)
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& num_drafted, bool truncate) {  // (B)
  const int64_t B = tokens.size(0), G = tokens.size(1), C = tokens.size(2);
  Tensor num_accepted = specvis::new_empty(uniforms, {B}, ScalarType::Int);
  Tensor is_accepted = specvis::new_empty(uniforms, {B, G}, ScalarType::Bool);
  Tensor is_rejected = specvis::new_empty(uniforms, {B, G}, ScalarType::Bool);
  Tensor log_r = specvis::new_empty(uniforms, {B, G}, ScalarType::Float);
  Tensor status = specvis::new_empty(uniforms, {B}, ScalarType::Int);
  const float* x = tokens.const_data_ptr<float>();
  const float* earlier_log_ratio = log_ratio.const_data_ptr<float>();
  const float* u = uniforms.const_data_ptr<float>();
  const int32_t* num_drafted_in = data<int32_t>(num_drafted);
  int32_t* num_accepted_out = num_accepted.mutable_data_ptr<int32_t>();
  bool* is_accepted_out = is_accepted.mutable_data_ptr<bool>();
  bool* is_rejected_out = is_rejected.mutable_data_ptr<bool>();
  float* log_r_out = log_r.mutable_data_ptr<float>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    specvis::LastStep step(data<float>(target_means), data<float>(target_log_sigmas), data<float>(draft_means),
                           data<float>(draft_log_sigmas), C);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * G, n = num_drafted_in ? std::min<int64_t>(num_drafted_in[b], G) : G;  // may be negative
      const specvis::Temperature temperature_b(data<float>(temperature), b);
      std::fill_n(is_accepted_out + row, G, false);
      std::fill_n(is_rejected_out + row, G, false);
      std::fill_n(log_r_out + row, G, 0.0f);
      bool valid = true;
      for (int64_t i = row; i < row + n; ++i) {
        double sum = earlier_log_ratio[i];
        if (step) {
          step.move_to(i);
          sum += step.log_ratio(x + i * C, temperature_b.distance_factor);
        }
        log_r_out[i] = static_cast<float>(sum);
        valid &= std::isfinite(log_r_out[i]) && std::isfinite(u[i]) && specvis::all_finite(x + i * C, C);
      }
      num_accepted_out[b] = 0;
      status_out[b] = (valid ? 0 : specvis::kInvalidRow) | (temperature_b.is_undefined ? specvis::kInvalidRule : 0);
      if (status_out[b]) {
        std::fill_n(log_r_out + row, n, 0.0f);
        continue;
      }
      for (int64_t i = row; i < row + n; ++i) {
        is_accepted_out[i] = specvis::accepts(u[i], log_r_out[i]);
        is_rejected_out[i] = !is_accepted_out[i];
        num_accepted_out[b] += is_accepted_out[i];
        if (truncate && is_rejected_out[i]) break;
      }
    }
  });
  return {num_accepted, is_accepted, is_rejected, log_r, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("accept_gaussian", SPECVIS_BOX(accept_gaussian, &accept_gaussian_cpu));
}
