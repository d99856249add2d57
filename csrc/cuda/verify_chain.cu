// verify_chain on CUDA: a team of threads per request, a tree in which node n's only child is n + 1, see verify.cuh.
#include "verify.cuh"

namespace specvis {
namespace {

// A request's slices of a batch of chains.
struct Chain {
  static constexpr bool kHasBonus = true;
  const VerifyChain& batch;
  int64_t b, first, num_drafts;  // the first draft, and how many there are
  const int64_t* bonus;          // or null

  __device__ int64_t num_nodes() const { return num_drafts + 1; }
  __device__ int64_t max_depth() const { return num_drafts; }
  __device__ int64_t num_draft_rows() const { return num_drafts; }
  __device__ const float* draft_probs() const { return batch.draft_probs + first * batch.V; }
  __device__ double omega(int64_t) const { return batch.omega ? batch.omega[b] : 1.0; }
  __device__ int32_t* accepted_nodes() const { return nullptr; }
};

// Do the drafts of requests 0 to b follow each other, the last of them within D? So no two such requests share a row,
// a node or a uniform number.
__device__ bool is_in_place(const VerifyChain& batch, int64_t b) {
  bool falls = false;
  for (int64_t i = threadIdx.x; i <= b; i += blockDim.x) {
    const int64_t first = i > 0 ? batch.ends[i - 1] : 0, end = batch.ends[i];
    falls |= end < first || end > batch.D;
  }
  return !__syncthreads_or(falls);
}

// After the layout's part, scratch memory holds the nodes of all requests, for each block of a cluster.
template <bool kHasDrafts>
__global__ void __launch_bounds__(kVerifyThreads) verify_chain_kernel(VerifyChain batch, Layout layout) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x / team.size();
  if (!is_in_place(batch, b)) {
    if (team.thread() != 0) return;
    batch.next_token[b] = 0;
    write(batch, b, 0, 0, kInvalidTree);
    return;
  }
  const int64_t first = b > 0 ? batch.ends[b - 1] : 0, num_drafts = batch.ends[b] - first;
  const int64_t* const bonus = batch.bonus_tokens ? batch.bonus_tokens + b : nullptr;
  ProbRows rows = {batch.target_probs + (bonus ? first : first + b) * batch.V, batch.V};
  const auto node_at = [&](int64_t n) {
    const int32_t node = static_cast<int32_t>(n);
    return Node{n > 0 ? batch.draft_tokens[first + n - 1] : 0,
                n < num_drafts ? node + 1 : -1,
                -1,
                batch.draft_probs ? node : -1,
                batch.uniforms[first + b + n],
                n == 0 ? 0 : -1,
                0,
                0,
                {}};
  };
  Node* const nodes = reinterpret_cast<Node*>(batch.scratch + layout.scratch_of(batch.B)) +
                      team.rank() * (batch.D + batch.B) + first + b;
  verify<kHasDrafts>(team, batch, b, rows, Chain{batch, b, first, num_drafts, bonus}, node_at,
                     batch.greedy && batch.greedy[b], layout, shared, nodes);
}

using Kernel = void(VerifyChain, Layout);

Kernel* kernel_for(const VerifyChain& batch) {
  return batch.draft_probs ? verify_chain_kernel<true> : verify_chain_kernel<false>;
}

}  // namespace

cudaError_t verify_chain_scratch(const VerifyChain& batch, int64_t* bytes) {
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, device);
  *bytes = layout.scratch_of(batch.B) + layout.cluster * (batch.D + batch.B) * static_cast<int64_t>(sizeof(Node));
  return error;
}

cudaError_t verify_chain_cuda(const VerifyChain& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, device);
  return LAUNCH_CLUSTERS(kernel_for(batch), blocks_for(layout.cluster * batch.B), layout.cluster, layout.threads,
                         layout.shared, stream, batch, layout);
}

}  // namespace specvis
