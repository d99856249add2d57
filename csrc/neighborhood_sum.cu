// neighborhood_sum on CUDA: one block per row reads it once to say whether it is valid. Then its threads take the
// token's neighbors, one each, until the cutoff. The row is in the cache by then.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most
constexpr int kBlocks = 3;     // per multiprocessor, so that registers suffice

__global__ void __launch_bounds__(kThreads, kBlocks) neighborhood_sum_kernel(NeighborhoodSum batch) {
  const int64_t r = blockIdx.x, V = batch.V;
  const float* row = batch.probs + r * V;
  const int64_t token = batch.tokens[r];
  const bool valid = sum_row(row, V).valid, inside = token >= 0 && token < V;
  int64_t token_mass = 0;
  NeighborPrefix prefix = {0, 0};
  if (valid && inside) {
    const auto mass = [row](int64_t v) { return to_fixed_point(row[v]); };
    token_mass = mass(token);
    const Budget budget(batch.cutoff, batch.delta[r], token_mass, static_cast<int64_t>(kFixedOne));
    prefix = neighbor_prefix(mass, V, batch.neighbors, batch.neighbors.k(), token, budget);
  }
  if (threadIdx.x != 0) return;
  batch.relaxed_mass[r] = static_cast<float>(token_mass + prefix.mass) / static_cast<float>(kFixedOne);
  batch.num_neighbors[r] = static_cast<int32_t>(prefix.num_kept);
  batch.status[r] = (valid ? 0 : kInvalidRow) | (inside ? 0 : kInvalidTree);
}

}  // namespace

cudaError_t neighborhood_sum_cuda(const NeighborhoodSum& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  LAUNCH(neighborhood_sum_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
