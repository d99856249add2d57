// neighborhood_sum on the CPU: a pass over each row for its validity, then a walk along its neighbors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <tuple>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> neighborhood_sum_cpu(
    const Tensor& probs,      // (R, V)
    const Tensor& tokens,     // (R)
    const Tensor& neighbors,  // (C, k)
    const Tensor& cutoff,     // (R)
    std::string kind, int64_t offset) {
  const int64_t R = probs.size(0), V = probs.size(1);
  Tensor mass = torch::stable::new_empty(probs, {R});
  Tensor kept = torch::stable::new_empty(probs, {R}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(probs, {R}, ScalarType::Int);
  const specvis::Neighbors near(neighbors.const_data_ptr(), neighbors.scalar_type() == ScalarType::UInt16,
                                neighbors.size(0), neighbors.size(1), offset);
  const specvis::Cutoff rule = specvis::cutoff_named(kind);
  const float* p = probs.const_data_ptr<float>();
  const int64_t* x = tokens.const_data_ptr<int64_t>();
  const float* most = cutoff.const_data_ptr<float>();
  float* mass_out = mass.mutable_data_ptr<float>();
  int32_t* kept_out = kept.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = p + r * V;
      const bool valid = specvis::weigh(row, V).valid, inside = x[r] >= 0 && x[r] < V;
      status_out[r] = (valid ? 0 : specvis::kInvalidRow) | (inside ? 0 : specvis::kInvalidTree);
      mass_out[r] = 0;
      kept_out[r] = 0;
      if (status_out[r]) continue;
      const int64_t own = specvis::to_fixed(row[x[r]]);
      const specvis::Budget budget(rule, most[r], own, static_cast<int64_t>(specvis::kFixedOne));
      const specvis::Kept found = specvis::kept_prefix(
          [row](int64_t v) { return specvis::to_fixed(row[v]); }, V, near, near.columns(), x[r], budget);
      mass_out[r] = static_cast<float>(own + found.mass) / static_cast<float>(specvis::kFixedOne);
      kept_out[r] = static_cast<int32_t>(found.count);
    }
  });
  return {mass, kept, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("neighborhood_sum", TORCH_BOX(&neighborhood_sum_cpu));
}
