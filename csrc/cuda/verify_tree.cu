// verify_tree on CUDA: a team of threads per request, see verify.cuh.
#include "verify.cuh"

namespace specvis {
namespace {

// A request's slices of a batch of trees: of N nodes, with num_draft_rows rows of the draft.
struct Tree {
  static constexpr bool kHasBonus = false;
  const VerifyTree& batch;
  int64_t b;

  __device__ int64_t num_nodes() const { return batch.N; }
  __device__ int64_t max_depth() const { return batch.max_depth; }
  __device__ int64_t num_draft_rows() const { return batch.num_draft_rows; }
  __device__ const float* target_probs() const {
    return batch.target_probs + (b - batch.first_request) * batch.N * batch.V;
  }
  // Whether an id is one of the node's row.
  __device__ bool allows(int32_t node, uint32_t id) const {
    const int64_t r = b * batch.N + node;
    return id >= batch.ids.first(r) && id < batch.ids.last(r);
  }
  __device__ const float* draft_probs() const { return batch.draft_probs + b * batch.num_draft_rows * batch.V; }
  __device__ double omega(int64_t depth) const { return batch.omega ? batch.omega[b * batch.max_depth + depth] : 1.0; }
  __device__ int32_t* accepted_nodes() const { return batch.accepted_nodes + b * batch.max_depth; }
};

template <bool kHasDrafts>
__global__ void __launch_bounds__(kVerifyThreads) verify_tree_kernel(VerifyTree batch, Layout layout) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = batch.first_request + blockIdx.x / team.size();
  const auto node_at = [&](int64_t n) {
    const int64_t i = b * batch.N + n;
    return Node{batch.tokens[i],
                batch.first_child[i],
                batch.next_sibling[i],
                batch.draft_row ? batch.draft_row[i] : -1,
                batch.uniforms[i],
                n == 0 ? 0 : -1,
                0,
                0,
                {}};
  };
  const bool is_greedy = batch.temperature ? batch.temperature[b] == 0 : batch.greedy && batch.greedy[b];
  verify<kHasDrafts>(team, batch, b, Tree{batch, b}, node_at, is_greedy, layout, shared);
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
