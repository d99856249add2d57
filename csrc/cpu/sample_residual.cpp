// sample_residual on the CPU: one pass over a row sums the residual by blocks. The token is then searched for among
// these sums, and within the block that is found.
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "rows.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> sample_residual_cpu(const Tensor& target_probs,                // (R, V)
                                               const std::optional<Tensor>& draft_probs,  // (R, V)
                                               const Tensor& uniforms,                    // (R)
                                               const std::optional<Tensor>& omega) {      // (R)
  const int64_t R = target_probs.size(0), V = target_probs.size(1);
  Tensor tokens = specvis::new_empty(uniforms, {R}, ScalarType::Long);
  Tensor status = specvis::new_empty(uniforms, {R}, ScalarType::Int);
  const float* targets = target_probs.const_data_ptr<float>();
  const float* drafts = draft_probs ? draft_probs->const_data_ptr<float>() : nullptr;
  const float* u = uniforms.const_data_ptr<float>();
  const float* omegas = omega ? omega->const_data_ptr<float>() : nullptr;
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums((V + specvis::kResidualBlock - 1) / specvis::kResidualBlock);
    for (int64_t r = begin; r < end; ++r) {
      const float* target = targets + r * V;
      const float* draft = drafts ? drafts + r * V : nullptr;
      const double omega_r = omegas ? omegas[r] : 1.0;
      const specvis::Total target_sum = specvis::sum_row(target, V);
      const specvis::Total draft_sum = draft ? specvis::sum_row(draft, V) : specvis::Total{0, true};
      status_out[r] = (omega_r >= 0 ? 0 : specvis::kInvalidRule) | (draft_sum.valid ? 0 : specvis::kInvalidDraft);
      token_out[r] = 0;
      if (!target_sum.valid) {
        status_out[r] |= specvis::kInvalidRow;
        continue;
      }
      if (draft && !status_out[r]) {
        const specvis::ResidualRow residual = {target, draft, 1 / static_cast<double>(target_sum.mass),
                                               1 / static_cast<double>(draft_sum.mass), specvis::slack_of(omega_r)};
        const double total = specvis::sum_blocks(residual, V, sums.data());
        if (total > 0) {
          token_out[r] = specvis::draw(residual, sums.data(), total, u[r]);
          continue;
        }
        status_out[r] |= specvis::kEmptyResidual;
      }
      token_out[r] = specvis::draw(target, V, target_sum.mass, u[r]);
    }
  });
  return {tokens, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("sample_residual", SPECVIS_BOX(sample_residual, &sample_residual_cpu));
}
