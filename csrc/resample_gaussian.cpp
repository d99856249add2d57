// resample_gaussian on the CPU: threads take positions, and tries one after the other until one is kept.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "gaussian.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const float* floats(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor> resample_gaussian_cpu(
    const Tensor& tokens,                                                                       // (B, G, C)
    const Tensor& keep, const Tensor& redraw,                                                   // (B, G)
    const Tensor& proposals,                                                                    // (B, G, M, C)
    const Tensor& log_ratio,                                                                    // (B, G) or (B, G, M)
    const Tensor& uniforms,                                                                     // (B, G, M)
    const Tensor& fallback,                                                                     // (B, G, C)
    const std::optional<Tensor>& target_means, const std::optional<Tensor>& target_log_sigmas,  // (B, G, C)
    const std::optional<Tensor>& draft_means, const std::optional<Tensor>& draft_log_sigmas,    // (B, G, C)
    const std::optional<Tensor>& temperature) {                                                 // (B)
  const int64_t B = tokens.size(0), G = tokens.size(1), C = tokens.size(2), M = uniforms.size(2);
  Tensor out = torch::stable::new_empty(tokens, {B, G, C}, ScalarType::Float);
  Tensor tries = torch::stable::new_empty(uniforms, {B, G}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(uniforms, {B, G}, ScalarType::Int);
  const float* drafts = tokens.const_data_ptr<float>();
  const bool* kept = keep.const_data_ptr<bool>();
  const bool* wanted = redraw.const_data_ptr<bool>();
  const float* proposal = proposals.const_data_ptr<float>();
  const float* given = log_ratio.const_data_ptr<float>();
  const float* u = uniforms.const_data_ptr<float>();
  const float* last = fallback.const_data_ptr<float>();
  float* token_out = out.mutable_data_ptr<float>();
  int32_t* tries_out = tries.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B * G, 1, [&](int64_t begin, int64_t end) {
    specvis::LastStep step(floats(target_means), floats(target_log_sigmas), floats(draft_means),
                           floats(draft_log_sigmas), C);
    std::vector<float> drawn(C);
    for (int64_t i = begin; i < end; ++i) {
      const float* token = kept[i] ? drafts + i * C : nullptr;  // null: 0
      tries_out[i] = status_out[i] = 0;
      if (wanted[i]) {
        const specvis::Temperature T(floats(temperature), i / G);
        token = nullptr;
        if (T.refused) {
          status_out[i] = specvis::kInvalidRule;
        } else {
          if (step) {
            step.move_to(i);
            step.prepare_draws();
          }
          int64_t m = 0;
          for (bool more = true; more && m < M; ++m) {
            const int64_t j = i * M + m;
            const float* x = proposal + j * C;
            double sum = given[step ? i : j];
            if (step) {
              step.draw(x, drawn.data());
              x = drawn.data();
              sum += step.log_ratio(x, T.half_precision);
            }
            const float log_r = static_cast<float>(sum);
            if (!std::isfinite(log_r) || !std::isfinite(u[j]) || !specvis::all_finite(x, C)) {
              status_out[i] = specvis::kInvalidRow;
              more = false;
            } else if (specvis::happens_beyond(u[j], log_r)) {
              token = x;
              more = false;
            }
          }
          tries_out[i] = static_cast<int32_t>(m);
          if (!token && !status_out[i]) {
            status_out[i] = specvis::kOutOfTries;
            token = last + i * C;
          }
        }
      }
      if (token && !specvis::all_finite(token, C)) {
        status_out[i] |= specvis::kInvalidRow;
        token = nullptr;
      }
      if (token)
        std::copy_n(token, C, token_out + i * C);
      else
        std::fill_n(token_out + i * C, C, 0.0f);
    }
  });
  return {out, tries, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("resample_gaussian", TORCH_BOX(&resample_gaussian_cpu));
}
