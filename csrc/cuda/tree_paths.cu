// tree_paths on CUDA: one block per tree, after tree_links. Each leaf counts the leaves before it, which gives
// its row. The lowest bit in which the ancestors of two leaves differ is a child of their last common ancestor: whose
// it is comes first.
#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most

__global__ void __launch_bounds__(kThreads) tree_paths_kernel(TreePaths batch) {
  Team team;
  const int64_t b = blockIdx.x, N = batch.N, W = (N + 63) / 64, width = batch.max_depth + 1;
  const int32_t* parents = batch.parents + b * N;
  const int32_t* depth = batch.depth + b * N;
  const int32_t* first_child = batch.first_child + b * N;
  const int64_t* ancestors = batch.ancestors + b * N * W;
  int64_t* paths = batch.paths + b * N * width;
  const auto is_leaf = [&](int64_t n) {
    return depth[n] == batch.max_depth || (depth[n] >= 0 && depth[n] < batch.max_depth && first_child[n] < 0);
  };

  int64_t own_leaves = 0;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    if (!is_leaf(n)) continue;
    ++own_leaves;
    int64_t before = 0;
    for (int64_t other = 0; other < N; ++other) {
      if (other == n || !is_leaf(other)) continue;
      const int64_t *words = ancestors + n * W, *others = ancestors + other * W;
      while (*words == *others) ++words, ++others;
      const uint64_t differs = static_cast<uint64_t>(*words ^ *others);
      before += (static_cast<uint64_t>(*others) & differs & (0 - differs)) != 0;
    }
    int64_t* path = paths + before * width;
    for (int64_t i = depth[n] + 1; i < width; ++i) path[i] = -1;
    for (int64_t node = n; node >= 0; node = parents[node]) path[depth[node]] = node;
  }
  const int64_t num_leaves = team.sum(own_leaves);
  for (int64_t i = num_leaves * width + threadIdx.x; i < N * width; i += blockDim.x) paths[i] = -1;
}

}  // namespace

cudaError_t tree_paths_cuda(const TreePaths& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  LAUNCH(tree_paths_kernel, blocks_for(batch.B), threads_for(batch.N, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
