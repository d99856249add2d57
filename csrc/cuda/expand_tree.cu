// expand_tree on CUDA. Where a GPU has clusters, the nodes of a request are shared by the blocks of one, and its first
// block finds the next level. Elsewhere there is a block for each node, and a second launch finds the next levels.
// See expand.cuh.
#include "../shared/params.h"
#include "expand.cuh"
#include "fours.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

template <bool kIsHeld>
__device__ void expand_node(const ExpandTree& batch, int64_t r, int64_t count, BestOf& best) {
  const int64_t num_children = batch.num_children;
  int64_t* const tokens = batch.tokens + r * num_children;
  float* const child_scores = batch.child_scores + r * num_children;
  const float score = batch.scores[r];
  clear_children(num_children, tokens, child_scores);
  bool valid = true;
  if (score > -INFINITY) {
    const float* const probs = batch.draft_probs + r * batch.V;
    const ThreadRow<kIsHeld> row(probs, batch.V, threadIdx.x, blockDim.x);
    const auto for_each = [&](auto f) { row.for_each(f); };
    const auto again = [&](auto f) {
#pragma unroll 4
      for (int64_t v = threadIdx.x; v < batch.V; v += blockDim.x) f(v, probs[v]);
    };
    valid = find_children(best, for_each, again, score, count, tokens, child_scores);
    if (!valid) __syncthreads();  // other warps still look for this row's bound
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;
}

__device__ void write_frontier(const ExpandTree& batch, int64_t b, int64_t count, BestOf& best) {
  const int64_t size = batch.F * batch.num_children;
  const float* const children = batch.child_scores + b * size;
  int32_t* const frontier = batch.frontier + b * batch.num_children;
  for (int64_t k = threadIdx.x; k < batch.num_children; k += blockDim.x) {
    const bool is_in_order = batch.F == 1 && children[k] > -INFINITY;  // the children of an only node are
    frontier[k] = is_in_order ? static_cast<int32_t>(k) : -1;
  }
  if (batch.F == 1) return;
  find_frontier(best, children, size, count,
                [=](int64_t rank, int64_t id) { frontier[rank] = static_cast<int32_t>(id); });
}

// A cluster for each request. It has just as many blocks as give each block an equal number of nodes.
template <bool kIsHeld>
__global__ void __launch_bounds__(kThreads, 2) expand_tree_kernel(ExpandTree batch) {
  const Team request;
  Team block = request.alone();
  BestOf best(block);
  const int64_t b = blockIdx.x / request.size(), count = clamped_width(batch.width[b], batch.num_children);
#pragma unroll 1
  for (int64_t f = request.rank(); f < batch.F; f += request.size())
    expand_node<kIsHeld>(batch, b * batch.F + f, count, best);
  request.sync();
  if (request.rank() == 0) write_frontier(batch, b, count, best);
}

template <bool kIsHeld>
__global__ void __launch_bounds__(kThreads, 2) children_kernel(ExpandTree batch) {
  Team block = Team().alone();
  BestOf best(block);
  const int64_t r = blockIdx.x;
  expand_node<kIsHeld>(batch, r, clamped_width(batch.width[r / batch.F], batch.num_children), best);
}

__global__ void __launch_bounds__(kThreads) frontier_kernel(ExpandTree batch) {
  Team block = Team().alone();
  BestOf best(block);
  write_frontier(batch, blockIdx.x, clamped_width(batch.width[blockIdx.x], batch.num_children), best);
}

template <bool kIsHeld>
cudaError_t launch(const ExpandTree& batch, unsigned threads, cudaStream_t stream) {
  Device device;
  const cudaError_t error = device_for(expand_tree_kernel<kIsHeld>, &device);
  if (error != cudaSuccess) return error;
  if (device.has_clusters || batch.F == 1) {
    const int64_t nodes_a_block = (batch.F + kMaxCluster - 1) / kMaxCluster;
    const auto cluster = static_cast<unsigned>((batch.F + nodes_a_block - 1) / nodes_a_block);
    return LAUNCH_CLUSTERS(expand_tree_kernel<kIsHeld>, blocks_for(batch.B * cluster), cluster, threads, 0, stream,
                           batch);
  }
  LAUNCH(children_kernel<kIsHeld>, blocks_for(batch.B * batch.F), threads, 0, stream, batch);
  LAUNCH(frontier_kernel, blocks_for(batch.B), threads_for(batch.F * batch.num_children, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t expand_tree_cuda(const ExpandTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  const unsigned threads = threads_for((batch.V + 3) / 4, kThreads);
  return batch.V <= kHeldEntries * threads ? launch<true>(batch, threads, stream)
                                           : launch<false>(batch, threads, stream);
}

}  // namespace specvis
