// draw_children on the CPU: one pass over a row sums it by blocks. Each child is then searched for among these sums,
// and within the block that is found.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "rows.h"

namespace {

using specvis::kRowBlock;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> draw_children_cpu(const Tensor& draft_probs,               // (B, F, V)
                                                     const std::optional<Tensor>& uniforms,   // (B, F, K)
                                                     const std::optional<Tensor>& seeds,      // (B)
                                                     const std::optional<Tensor>& positions,  // (B, F)
                                                     int64_t K) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1), V = draft_probs.size(2);
  Tensor tokens = torch::stable::new_empty(draft_probs, {B, F, K}, ScalarType::Long);
  Tensor num_children = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(draft_probs, {B, F}, ScalarType::Int);
  const float* probs = draft_probs.const_data_ptr<float>();
  const float* u = uniforms->const_data_ptr<float>();
  int64_t* token_out = tokens.mutable_data_ptr<int64_t>();
  int32_t* num_children_out = num_children.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B * F, std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> sums((V + kRowBlock - 1) / kRowBlock);
    std::vector<char> drawn(V);
    for (int64_t r = begin; r < end; ++r) {
      const float* row = probs + r * V;
      int64_t* children = token_out + r * K;
      const specvis::Total total = specvis::sum_blocks(row, V, sums.data());
      int64_t remaining = total.valid ? total.mass : 0, n = 0;
      for (; n < K && remaining > 0; ++n) {
        int64_t threshold = specvis::draw_threshold(u[r * K + n], remaining), block = 0;
        while (sums[block] <= threshold) threshold -= sums[block++];  // ends at the last positive sum at the latest
        int64_t v = block * kRowBlock;
        while ((threshold -= drawn[v] ? 0 : specvis::to_fixed_point(row[v])) >= 0) ++v;
        sums[block] -= specvis::to_fixed_point(row[v]);
        remaining -= specvis::to_fixed_point(row[v]);
        drawn[v] = true;
        children[n] = v;
      }
      for (int64_t k = 0; k < n; ++k) drawn[children[k]] = false;
      std::fill(children + n, children + K, 0);
      num_children_out[r] = static_cast<int32_t>(n);
      status_out[r] = total.valid ? 0 : specvis::kInvalidRow;
    }
  });
  return {tokens, num_children, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("draw_children", TORCH_BOX(&draw_children_cpu)); }
