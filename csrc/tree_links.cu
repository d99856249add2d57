// tree_links on CUDA: one block per tree. Every node climbs to the root by itself, so that none waits for another. Then
// it searches for its first child and its next sibling among the later nodes.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most

__global__ void __launch_bounds__(kThreads) tree_links_kernel(TreeLinks batch) {
  const int64_t b = blockIdx.x, N = batch.N, W = (N + 63) / 64;
  const int32_t* parents = batch.parents + b * N;
  int32_t* depth = batch.depth + b * N;

  bool invalid = false;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    int64_t ancestor = n;
    int32_t steps = 0;
    for (; ancestor > 0 && parents[ancestor] >= 0 && parents[ancestor] < ancestor; ancestor = parents[ancestor])
      ++steps;
    const bool used = ancestor == 0 && parents[0] == -1;
    depth[n] = used ? steps : -1;
    invalid |= !used && (n == 0 || parents[n] != -2);
  }
  invalid = block_any(invalid);  // a barrier too: every depth is known
  if (threadIdx.x == 0) batch.status[b] = invalid ? kInvalidTree : 0;

  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const bool used = depth[n] >= 0;
    int64_t* ancestors = batch.ancestors + (b * N + n) * W;
    int64_t ancestor = used ? n : -1;
    for (int64_t w = W - 1; w >= 0; --w) {
      uint64_t word = 0;
      for (; ancestor >= w * 64; ancestor = parents[ancestor]) word |= uint64_t{1} << ancestor % 64;
      ancestors[w] = static_cast<int64_t>(word);
    }
    int64_t child = -1, sibling = -1;
    for (int64_t later = N - 1; used && later > n; --later) {
      if (depth[later] < 0) continue;
      if (parents[later] == n) child = later;
      if (parents[later] == parents[n]) sibling = later;
    }
    batch.first_child[b * N + n] = static_cast<int32_t>(child);
    batch.next_sibling[b * N + n] = static_cast<int32_t>(sibling);
  }
}

}  // namespace

cudaError_t tree_links_cuda(const TreeLinks& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  LAUNCH(tree_links_kernel, static_cast<unsigned>(batch.B), threads_for(batch.N, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
