// neighborhood_sum on CUDA: a block per row reads it once for its validity, then its threads take the token's
// neighbors, one each, until the cutoff. The row is in cache by then.
#include "cuda.h"
#include "launch.h"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most
constexpr int kBlocks = 3;     // of an SM: what leaves enough registers

__global__ void __launch_bounds__(kThreads, kBlocks) neighborhood_sum_kernel(NeighborhoodSum batch) {
  const int64_t r = blockIdx.x, V = batch.V;
  const float* row = batch.probs + r * V;
  const int64_t token = batch.tokens[r];
  const bool valid = weigh(row, V).valid, inside = token >= 0 && token < V;
  int64_t own = 0;
  Kept found = {0, 0};
  if (valid && inside) {
    const auto weight = [row](int64_t v) { return to_fixed(row[v]); };
    own = weight(token);
    const Budget budget(batch.kind, batch.cutoff[r], own, static_cast<int64_t>(kFixedOne));
    found = kept_prefix(weight, V, batch.neighbors, batch.neighbors.columns(), token, budget);
  }
  if (threadIdx.x != 0) return;
  batch.mass[r] = static_cast<float>(own + found.mass) / static_cast<float>(kFixedOne);
  batch.kept[r] = static_cast<int32_t>(found.count);
  batch.status[r] = (valid ? 0 : kInvalidRow) | (inside ? 0 : kInvalidTree);
}

}  // namespace

cudaError_t neighborhood_sum_cuda(const NeighborhoodSum& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  LAUNCH(neighborhood_sum_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
