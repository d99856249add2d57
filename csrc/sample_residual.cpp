// sample_residual on the CPU: one pass over a row sums the residual by blocks. The token is then searched for among
// these sums, and within the block that is found.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 256, kLanes = 16;

struct Residual {
  const float *target, *draft;
  double unit, draft_unit, slack;

  // The mass of token v: an integer, so that the sum over a row is exact.
  double operator()(int64_t v) const {
    constexpr float kOne = static_cast<float>(specvis::kFixedOne);
    const double mass = std::floor(static_cast<double>(target[v] * kOne));
    const double draft_mass = std::floor(static_cast<double>(draft[v] * kOne));
    return std::floor(specvis::residual_mass(mass, unit, draft_mass, draft_unit, slack));
  }
};

// Sums the residual over blocks of the vocabulary, and returns the sum of all.
WIDEST_VECTORS double block_sums(const Residual residual, int64_t V, double* sums) {
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, V);
    double lanes[kLanes] = {};
    int64_t v = begin;
    for (; v + kLanes <= end; v += kLanes)
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] += residual(v + i);
    for (; v < end; ++v) lanes[0] += residual(v);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    sums[begin / kBlock] = sum;
    total += sum;
  }
  return total;
}

// Inverse CDF: first among the sums of the blocks, then within one block.
int64_t draw(const Residual& residual, int64_t V, const double* sums, double total, float uniform) {
  double threshold = static_cast<double>(specvis::draw_threshold(uniform, static_cast<int64_t>(total)));
  int64_t block = 0;
  while (sums[block] <= threshold) threshold -= sums[block++];  // ends at the last positive sum at the latest
  int64_t v = block * kBlock;
  while ((threshold -= residual(v)) >= 0) ++v;
  return v;
}

std::tuple<Tensor, Tensor> sample_residual_cpu(const Tensor& target_probs,                // (R, V)
                                               const std::optional<Tensor>& draft_probs,  // (R, V)
                                               const Tensor& uniforms,                    // (R)
                                               const std::optional<Tensor>& omega) {      // (R)
  const int64_t R = target_probs.size(0), V = target_probs.size(1);
  Tensor tokens = torch::stable::new_empty(uniforms, {R}, ScalarType::Long);
  Tensor status = torch::stable::new_empty(uniforms, {R}, ScalarType::Int);
  const float* targets = target_probs.const_data_ptr<float>();
  const float* drafts = draft_probs ? draft_probs->const_data_ptr<float>() : nullptr;
  const float* u = uniforms.const_data_ptr<float>();
  const float* omegas = omega ? omega->const_data_ptr<float>() : nullptr;
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums((V + kBlock - 1) / kBlock);
    for (int64_t r = begin; r < end; ++r) {
      const float* target = targets + r * V;
      const float* draft = drafts ? drafts + r * V : nullptr;
      const double omega_r = omegas ? omegas[r] : 1.0;
      const specvis::Total target_sum = specvis::sum_row(target, V);
      const specvis::Total draft_sum = draft ? specvis::sum_row(draft, V) : specvis::Total{0, true};
      status_out[r] = omega_r >= 0 ? 0 : specvis::kInvalidRule;
      token_out[r] = 0;
      if (!target_sum.valid || !draft_sum.valid) {
        status_out[r] |= specvis::kInvalidRow;
        continue;
      }
      if (draft && !status_out[r]) {
        const Residual residual = {target, draft, 1 / static_cast<double>(target_sum.mass),
                                   1 / static_cast<double>(draft_sum.mass), specvis::slack_of(omega_r)};
        const double total = block_sums(residual, V, sums.data());
        if (total > 0) {
          token_out[r] = draw(residual, V, sums.data(), total, u[r]);
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

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("sample_residual", TORCH_BOX(&sample_residual_cpu)); }
