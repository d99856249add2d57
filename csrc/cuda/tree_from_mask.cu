// tree_from_mask on CUDA: one block per tree. Each warp takes rows and compares them with their parents' rows.
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 1024;  // at most

__global__ void __launch_bounds__(kThreads) tree_from_mask_kernel(TreeFromMask batch) {
  const int64_t b = blockIdx.x;
  const int N = static_cast<int>(batch.N);  // a mask of more nodes than an int counts would be 2**62 bytes
  const bool* tree = batch.mask + b * batch.N * batch.N;
  for (int n = warp(); n < N; n += warps()) {
    const bool* row = tree + n * batch.N;
    int parent = -1;
    for (int c = lane(); c < N; c += kWarp) {
      if (row[c] && c != n) parent = c;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      parent = max(parent, __shfl_xor_sync(kAllLanes, parent, distance));
    }
    bool wrong = parent > n;
    for (int c = lane(); c < N && parent >= 0; c += kWarp) {
      wrong |= (row[c] && c != n) != (tree[parent * batch.N + c] || c == parent);
    }
    wrong = __ballot_sync(kAllLanes, wrong);
    if (lane() == 0) batch.parents[b * batch.N + n] = parent < 0 ? (n == 0 ? -1 : -2) : wrong ? N : parent;
  }
}

}  // namespace

cudaError_t tree_from_mask_cuda(const TreeFromMask& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  LAUNCH(tree_from_mask_kernel, blocks_for(batch.B), threads_for(batch.N * kWarp, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
