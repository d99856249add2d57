// neighborhood_sum on the CPU: one pass over each row says whether it is valid; then the token's neighbors are summed.
#include <string>
#include <tuple>

#include "../arguments.h"
#include "rows.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> neighborhood_sum_cpu(const Tensor& probs,      // (R, V)
                                                        const Tensor& tokens,     // (R)
                                                        const Tensor& neighbors,  // (C, k)
                                                        const Tensor& delta,      // (R)
                                                        std::string cutoff, int64_t offset) {
  const int64_t R = probs.size(0), V = probs.size(1);
  Tensor relaxed_mass = specvis::new_empty(probs, {R});
  Tensor num_neighbors = specvis::new_empty(probs, {R}, ScalarType::Int);
  Tensor status = specvis::new_empty(probs, {R}, ScalarType::Int);
  const specvis::Neighbors table = specvis::neighbors_of(neighbors, offset);
  const specvis::Cutoff rule = specvis::cutoff_named(cutoff);
  const float* p = probs.const_data_ptr<float>();
  const int64_t* x = tokens.const_data_ptr<int64_t>();
  const float* d = delta.const_data_ptr<float>();
  float* mass_out = relaxed_mass.mutable_data_ptr<float>();
  int32_t* num_neighbors_out = num_neighbors.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = p + r * V;
      const bool valid = specvis::sum_row(row, V).valid, inside = x[r] >= 0 && x[r] < V;
      status_out[r] = (valid ? 0 : specvis::kInvalidRow) | (inside ? 0 : specvis::kInvalidTree);
      mass_out[r] = 0;
      num_neighbors_out[r] = 0;
      if (status_out[r]) continue;
      const int64_t token_mass = specvis::to_fixed_point(row[x[r]]);
      const specvis::Budget budget(rule, d[r], token_mass, static_cast<int64_t>(specvis::kFixedOne), INT64_MAX);
      const specvis::NeighborPrefix prefix = specvis::neighbor_prefix(
          [row](int64_t v) { return specvis::to_fixed_point(row[v]); }, V, table, table.k(), x[r], budget);
      mass_out[r] = static_cast<float>(token_mass + prefix.mass) / static_cast<float>(specvis::kFixedOne);
      num_neighbors_out[r] = static_cast<int32_t>(prefix.num_kept);
    }
  });
  return {relaxed_mass, num_neighbors, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("neighborhood_sum", SPECVIS_BOX(neighborhood_sum, &neighborhood_sum_cpu));
}
