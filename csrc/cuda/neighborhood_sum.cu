// neighborhood_sum on CUDA: a team per row reads it once, which says whether it is valid. The first block of the team
// then adds the token's neighbors up to the cutoff. The row is in the cache by then.
#include "../shared/params.h"
#include "kept_neighbors.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most
constexpr int kBlocks = 3;     // per multiprocessor, so that registers suffice
// Entries of a row, at least: all are in flight at once then, and a barrier of a cluster takes longer than that.
constexpr int64_t kOfBlock = 4096;

// The bits of a probability p are among those of 0 .. 2, once + 0.0f has made 0 of -0; the bits of other numbers and of
// NaN are larger. So the largest of a row says whether all of it are probabilities, and whether its sum is positive.
__device__ bool is_valid_row(Team& team, const float* row, int64_t V) {
  unsigned largest = 0;
  for_each_entry(row, V, team.thread(), team.threads(),
                 [&](int64_t, float p) { largest = max(largest, __float_as_uint(p + 0.0f)); });
  const float most = __uint_as_float(static_cast<unsigned>(team.max(__reduce_max_sync(kAllLanes, largest))));
  return is_probability(most) && to_fixed_point(most) > 0;
}

__global__ void __launch_bounds__(kThreads, kBlocks) neighborhood_sum_kernel(NeighborhoodSum batch) {
  Team team;
  const int64_t r = blockIdx.x / team.size(), V = batch.V;
  const float* row = batch.probs + r * V;
  const int64_t token = batch.tokens[r];
  const float delta = batch.delta[r];
  const bool valid = is_valid_row(team, row, V), inside = token >= 0 && token < V;
  team.end();
  if (team.rank() != 0) return;
  Team block = team.alone();
  int64_t token_mass = 0;
  NeighborPrefix prefix = {0, 0};
  if (valid && inside) {
    const auto mass = [row](int64_t v) { return to_fixed_point(row[v]); };
    token_mass = mass(token);
    const Budget budget(batch.cutoff, delta, token_mass, static_cast<int64_t>(kFixedOne), INT64_MAX);
    prefix = neighbor_prefix(block, mass, V, batch.neighbors, batch.neighbors.k(), token, budget);
  }
  if (threadIdx.x != 0) return;
  batch.relaxed_mass[r] = static_cast<float>(token_mass + prefix.mass) / static_cast<float>(kFixedOne);
  batch.num_neighbors[r] = static_cast<int32_t>(prefix.num_kept);
  batch.status[r] = (valid ? 0 : kInvalidRow) | (inside ? 0 : kInvalidTree);
}

}  // namespace

cudaError_t neighborhood_sum_cuda(const NeighborhoodSum& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(neighborhood_sum_kernel, &device);
  if (error != cudaSuccess) return error;
  const unsigned threads = threads_for(batch.V, kThreads), cluster = cluster_for(device, batch.R, batch.V / kOfBlock);
  return LAUNCH_CLUSTERS(neighborhood_sum_kernel, blocks_for(batch.R * cluster), cluster, threads, 0, stream, batch);
}

}  // namespace specvis
