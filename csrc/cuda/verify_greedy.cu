// verify_greedy on CUDA: one block per request. It copies the tree to shared memory, where one thread walks down: each
// step waits for the one before it, and there it waits the least.
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 128;              // at most
constexpr int64_t kMaxShared = 48 * 1024;  // bytes; a larger tree is read where it is
constexpr int64_t kNodeBytes = 2 * sizeof(int64_t) + 2 * sizeof(int32_t);

__global__ void __launch_bounds__(kThreads) verify_greedy_kernel(VerifyGreedy batch, bool in_shared) {
  DYNAMIC_SHARED(int64_t, shared);
  const int64_t b = blockIdx.x, N = batch.N;
  const int64_t *target_tokens = batch.target_tokens + b * N, *tokens = batch.tokens + b * N;
  const int32_t *first_child = batch.first_child + b * N, *next_sibling = batch.next_sibling + b * N;
  const int32_t* row_status = batch.row_status ? batch.row_status + b * N : nullptr;
  const auto child_of = [&](int64_t n) { return row_status && row_status[n] ? -1 : first_child[n]; };
  int32_t* accepted_nodes = batch.accepted_nodes + b * batch.max_depth;
  if (in_shared) {
    int64_t *target_copy = shared, *token_copy = shared + N;
    int32_t* child_copy = reinterpret_cast<int32_t*>(shared + 2 * N);
    int32_t* sibling_copy = child_copy + N;
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
      target_copy[n] = target_tokens[n];
      token_copy[n] = tokens[n];
      child_copy[n] = child_of(n);
      sibling_copy[n] = next_sibling[n];
    }
    target_tokens = target_copy;
    tokens = token_copy;
    first_child = child_copy;
    next_sibling = sibling_copy;
    row_status = nullptr;
  }
  for (int64_t d = threadIdx.x; d < batch.max_depth; d += blockDim.x) accepted_nodes[d] = -1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Siblings siblings = {N, tokens, next_sibling};
  int64_t node = 0, depth = 0;
  int32_t status = 0;
  for (; depth < batch.max_depth; ++depth) {
    const int64_t found = siblings.find(target_tokens[node], node, child_of(node), &status);
    if (found < 0) break;
    node = found;
    accepted_nodes[depth] = static_cast<int32_t>(node);
  }
  batch.num_accepted[b] = static_cast<int32_t>(depth);
  batch.next_token[b] = target_tokens[node];
  batch.status[b] = status | (batch.row_status ? batch.row_status[b * N + node] : 0);
  if (batch.tv_excess) batch.tv_excess[b] = 0;
}

}  // namespace

cudaError_t verify_greedy_cuda(const VerifyGreedy& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  const int64_t bytes = batch.N * kNodeBytes;
  const bool in_shared = bytes <= kMaxShared;
  LAUNCH(verify_greedy_kernel, blocks_for(batch.B), threads_for(batch.N, kThreads), in_shared ? bytes : 0, stream,
         batch, in_shared);
  return cudaGetLastError();
}

}  // namespace specvis
