// sample_residual on the CPU: two passes over a row, the residual's total and the search; nothing is stored.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> sample_residual_cpu(
    const Tensor& target_probs,                // (R, V)
    const std::optional<Tensor>& draft_probs,  // (R, V)
    const Tensor& uniforms,                    // (R)
    const std::optional<Tensor>& omega) {      // (R)
  const int64_t R = target_probs.size(0), V = target_probs.size(1);
  Tensor tokens = torch::stable::new_empty(uniforms, {R}, ScalarType::Long);
  Tensor status = torch::stable::new_empty(uniforms, {R}, ScalarType::Int);
  const float* targets = target_probs.const_data_ptr<float>();
  const float* drafts = draft_probs ? draft_probs->const_data_ptr<float>() : nullptr;
  const float* u = uniforms.const_data_ptr<float>();
  const float* factors = omega ? omega->const_data_ptr<float>() : nullptr;
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* target = targets + r * V;
      const float* draft = drafts ? drafts + r * V : nullptr;
      const double factor = factors ? factors[r] : 1.0;
      const specvis::Total P = specvis::weigh(target, V);
      const specvis::Total Q = draft ? specvis::weigh(draft, V) : specvis::Total{0, true};
      status_out[r] = factor >= 0 ? 0 : specvis::kInvalidRule;
      token_out[r] = 0;
      if (!P.valid || !Q.valid) {
        status_out[r] |= specvis::kInvalidRow;
        continue;
      }
      if (draft && !status_out[r]) {
        const double slack = specvis::slack_of(factor);
        const auto rest = [&](int64_t v) {
          return specvis::residual_weight(specvis::to_fixed(target[v]), static_cast<double>(P.weight),
                                          specvis::to_fixed(draft[v]), static_cast<double>(Q.weight), slack);
        };
        int64_t total = 0;
        for (int64_t v = 0; v < V; ++v) total += rest(v);
        if (total > 0) {
          token_out[r] = specvis::draw(rest, V, total, u[r]);
          continue;
        }
        status_out[r] |= specvis::kEmptyResidual;
      }
      token_out[r] =
          specvis::draw([target](int64_t v) { return specvis::to_fixed(target[v]); }, V, P.weight, u[r]);
    }
  });
  return {tokens, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("sample_residual", TORCH_BOX(&sample_residual_cpu));
}
