// verify_tree on CUDA: a team of threads per request, see verify.cuh.
#include "verify.cuh"

namespace specvis {
namespace {

template <bool kHasDrafts>
__global__ void __launch_bounds__(kVerifyThreads) verify_tree_kernel(VerifyTree batch, Layout layout) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x / team.size();
  ProbRows rows = {batch.target_probs + b * batch.N * batch.V, batch.V};
  verify<kHasDrafts>(team, batch, b, rows, batch.greedy && batch.greedy[b], layout, shared);
}

using Kernel = void(VerifyTree, Layout);

Kernel* kernel_for(const VerifyTree& batch) {
  return batch.draft_probs ? verify_tree_kernel<true> : verify_tree_kernel<false>;
}

}  // namespace

cudaError_t verify_tree_scratch(const VerifyTree& batch, int64_t* bytes) {
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error == cudaSuccess) *bytes = Layout(batch, device).scratch_of(batch.B);
  return error;
}

cudaError_t verify_tree_cuda(const VerifyTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, device);
  return LAUNCH_CLUSTERS(kernel_for(batch), blocks_for(layout.cluster * batch.B), layout.cluster, layout.threads,
                         layout.shared, stream, batch, layout);
}

}  // namespace specvis
