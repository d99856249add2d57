// neighborhood_sum on the CPU: one pass over each row says whether it is valid; then the token's neighbors are summed.
#include "../shared/params.h"
#include "rows.h"
#include "team.h"

namespace specvis {

void neighborhood_sum_cpu(const NeighborhoodSum& batch) {
  const int64_t V = batch.V;
  parallel_for(batch.R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const row = batch.probs + r * V;
      const int64_t x = batch.tokens[r];
      const bool inside = x >= 0 && x < V;
      batch.status[r] = (sum_row(row, V).valid ? 0 : kInvalidRow) | (inside ? 0 : kInvalidTree);
      batch.relaxed_mass[r] = 0;
      batch.num_neighbors[r] = 0;
      if (batch.status[r]) continue;
      const int64_t token_mass = to_fixed_point(row[x]);
      const Budget budget(batch.cutoff, batch.delta[r], token_mass, static_cast<int64_t>(kFixedOne), INT64_MAX);
      const NeighborPrefix prefix = neighbor_prefix([row](int64_t v) { return to_fixed_point(row[v]); }, V,
                                                    batch.neighbors, batch.neighbors.k(), x, budget);
      batch.relaxed_mass[r] = static_cast<float>(token_mass + prefix.mass) / static_cast<float>(kFixedOne);
      batch.num_neighbors[r] = static_cast<int32_t>(prefix.num_kept);
    }
  });
}

}  // namespace specvis
