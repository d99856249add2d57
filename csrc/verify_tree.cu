// verify_tree on CUDA: one block per request, see verify.cuh.
#include "verify.cuh"

namespace specvis {
namespace {

__global__ void __launch_bounds__(kVerifyThreads) verify_tree_kernel(VerifyTree batch, Layout layout) {
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x;
  const ProbRows rows = {batch.target_probs + b * batch.N * batch.V, batch.V};
  verify(batch, b, rows, batch.greedy && batch.greedy[b], layout, shared);
}

}  // namespace

cudaError_t verify_tree_scratch(const VerifyTree& batch, int64_t* bytes) {
  int64_t limit;
  const cudaError_t error = shared_limit(kVerifyReserved, &limit);
  *bytes = batch.B * Layout(batch, 0, limit).scratch;
  return error;
}

cudaError_t verify_tree_cuda(const VerifyTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  int64_t limit;
  cudaError_t error = shared_limit(kVerifyReserved, &limit);
  if (error == cudaSuccess) error = allow_shared(verify_tree_kernel, limit);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, 0, limit);
  LAUNCH(verify_tree_kernel, batch.B, threads_for(batch.V, kVerifyThreads), layout.shared, stream, batch, layout);
  return cudaGetLastError();
}

}  // namespace specvis
