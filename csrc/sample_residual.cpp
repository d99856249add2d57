// sample_residual on the CPU: a pass over a row for the residual's sums by block, a search among these, and one
// through the block that it finds.
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

  // A whole number; sums of up to a row of them are exact.
  double operator()(int64_t v) const {
    constexpr float kOne = static_cast<float>(specvis::kFixedOne);
    const double weight = std::floor(static_cast<double>(target[v] * kOne));
    const double drafted = std::floor(static_cast<double>(draft[v] * kOne));
    return std::floor(specvis::residual_weight(weight, unit, drafted, draft_unit, slack));
  }
};

// The residual's sums over blocks of the vocabulary; returns their sum.
WIDEST_VECTORS double block_sums(const Residual rest, int64_t V, double* sums) {
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, V);
    double lanes[kLanes] = {};
    int64_t v = begin;
    for (; v + kLanes <= end; v += kLanes)
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] += rest(v + i);
    for (; v < end; ++v) lanes[0] += rest(v);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    sums[begin / kBlock] = sum;
    total += sum;
  }
  return total;
}

// Inverse CDF by the sums of the blocks, then within one.
int64_t draw(const Residual& rest, int64_t V, const double* sums, double total, float uniform) {
  double left = static_cast<double>(specvis::draw_at(uniform, static_cast<int64_t>(total)));
  int64_t block = 0;
  while (sums[block] <= left) left -= sums[block++];  // the last that weighs anything stops this
  int64_t v = block * kBlock;
  while ((left -= rest(v)) >= 0) ++v;
  return v;
}

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
    std::vector<double> sums((V + kBlock - 1) / kBlock);
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
        const Residual rest = {target, draft, 1 / static_cast<double>(P.weight),
                               1 / static_cast<double>(Q.weight), specvis::slack_of(factor)};
        const double total = block_sums(rest, V, sums.data());
        if (total > 0) {
          token_out[r] = draw(rest, V, sums.data(), total, u[r]);
          continue;
        }
        status_out[r] |= specvis::kEmptyResidual;
      }
      token_out[r] = specvis::draw(target, V, P.weight, u[r]);
    }
  });
  return {tokens, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("sample_residual", TORCH_BOX(&sample_residual_cpu));
}
