// tree_from_paths on CUDA: one block per tree. Each thread takes entries of the paths: first they write the largest
// parent of each node, then whoever has another one says so. So the order of the threads does not matter.
#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most

__global__ void __launch_bounds__(kThreads) tree_from_paths_kernel(TreeFromPaths batch) {
  Team team;
  const int64_t b = blockIdx.x, N = batch.N, D = batch.D, size = batch.L * D;
  const int64_t* paths = batch.paths + b * size;
  int32_t* parents = batch.parents + b * N;

  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) parents[n] = -2;
  __syncthreads();
  bool wrong = false;
  for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    const int64_t node = paths[i];
    wrong |= node >= N || (node == 0 && i % D > 0);
    if (i % D > 0 && node > 0 && node < N) {
      atomicMax(parents + node, static_cast<int32_t>(min(max(paths[i - 1], int64_t{-1}), N)));
    }
  }
  wrong = team.any(wrong);  // a barrier too
  if (threadIdx.x == 0) parents[0] = wrong ? static_cast<int32_t>(N) : -1;
  for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    const int64_t node = paths[i];
    const volatile int32_t* parent = parents + node;  // others may raise it now: it is read once, as it is then
    if (i % D > 0 && node > 0 && node < N && max(paths[i - 1], int64_t{-1}) < *parent) {
      atomicMax(parents + node, static_cast<int32_t>(N));
    }
  }
}

}  // namespace

cudaError_t tree_from_paths_cuda(const TreeFromPaths& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  LAUNCH(tree_from_paths_kernel, blocks_for(batch.B), threads_for(batch.L * batch.D + batch.N, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
