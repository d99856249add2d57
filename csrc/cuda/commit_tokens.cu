// commit_tokens on CUDA: one warp per request.
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 32;

__global__ void __launch_bounds__(kThreads) commit_tokens_kernel(CommitTokens batch) {
  const int64_t b = blockIdx.x, count = batch.counts[b];
  for (int64_t i = threadIdx.x; i <= batch.P; i += kThreads) batch.write(b, i, count);
  __syncwarp();  // every thread has read the count
  if (threadIdx.x == 0) batch.account(b, count);
}

}  // namespace

cudaError_t commit_tokens_cuda(const CommitTokens& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  LAUNCH(commit_tokens_kernel, blocks_for(batch.B), kThreads, 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
