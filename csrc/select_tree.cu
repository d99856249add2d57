// select_tree on CUDA: one block per request. The lowest score to keep is found bit by bit. One pass in the order of
// the candidates gives the kept ones their slots; each then searches for its parent among them.
#include "block.cuh"
#include "floats.h"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 1024;  // at most

// One block at a time per multiprocessor: with two, there are too few registers on sm_100.
__global__ void __launch_bounds__(kThreads, 1) select_tree_kernel(SelectTree batch) {
  const int64_t b = blockIdx.x, M = batch.M, num_nodes = batch.num_nodes;
  const float* scores = batch.scores + b * M;
  const int32_t* parents = batch.parents + b * M;
  int64_t* node_tokens = batch.node_tokens + b * num_nodes;
  int32_t* node_parents = batch.node_parents + b * num_nodes;
  int32_t* source = batch.source + b * num_nodes;
  const int64_t size = batch.size[b], budget = (size < 1 ? 1 : size < num_nodes ? size : num_nodes) - 1;

  // Scores as integers of the same order; 0 for a candidate that does not exist.
  const auto order_of = [=](int64_t m) { return m < M && scores[m] > -INFINITY ? ordered(scores[m]) : 0; };
  const auto at_least = [=](uint64_t bound) {
    int64_t count = 0;
    for (int64_t start = 0; start < M; start += blockDim.x)
      count += __syncthreads_count(order_of(start + threadIdx.x) >= bound);
    return count;
  };
  uint32_t lowest = 0;  // of the kept scores
  for (uint32_t bit = 0x80000000u; bit > 0; bit >>= 1)
    if (at_least(lowest + bit) >= budget) lowest += bit;
  // How many of the candidates with the lowest score are kept.
  const int64_t ties = lowest > 0 ? budget - at_least(uint64_t{lowest} + 1) : 0;

  int64_t higher = 0, equal = 0;  // candidates with such scores before this chunk
  for (int64_t start = 0; start < M; start += blockDim.x) {
    const int64_t m = start + threadIdx.x;
    const uint32_t order = order_of(m);
    const bool is_higher = order > lowest, is_equal = order == lowest;
    const Scan scan = block_scan(int64_t{is_higher} << 32 | int64_t{is_equal});
    const int64_t equals = equal + (scan.before & 0xffffffff);
    const int64_t slot = 1 + higher + (scan.before >> 32) + (equals < ties ? equals : ties);
    if (is_higher || (is_equal && equals < ties)) source[slot] = static_cast<int32_t>(m);
    higher += scan.total >> 32;
    equal += scan.total & 0xffffffff;
  }
  const int64_t num_used = 1 + higher + ties;
  __syncthreads();

  bool invalid = false;
  for (int64_t n = threadIdx.x; n < num_nodes; n += blockDim.x) {
    int64_t parent = n == 0 ? -1 : -2, token = n == 0 ? batch.root[b] : 0;
    if (n > 0 && n < num_used) {
      const int64_t m = source[n], p = parents[m];
      if (p == -1) parent = 0;
      if (p >= 0 && p < m) {
        int64_t low = 1, high = n;  // nodes are in the order of their candidates
        while (low < high) {
          const int64_t middle = (low + high) / 2;
          if (source[middle] < p)
            low = middle + 1;
          else
            high = middle;
        }
        if (low < n && source[low] == p) parent = low;
      }
      invalid |= parent < 0;
      if (parent >= 0) token = batch.tokens[b * M + m];
    }
    node_parents[n] = static_cast<int32_t>(parent);
    node_tokens[n] = token;
  }
  invalid = block_any(invalid);  // a barrier too: every parent has been found
  for (int64_t n = threadIdx.x; n < num_nodes; n += blockDim.x)
    if (node_parents[n] < 0) source[n] = -1;  // the slot is unused
  if (threadIdx.x == 0) batch.status[b] = invalid ? kInvalidTree : 0;
}

}  // namespace

cudaError_t select_tree_cuda(const SelectTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  const int64_t items = batch.M > batch.num_nodes ? batch.M : batch.num_nodes;
  LAUNCH(select_tree_kernel, static_cast<unsigned>(batch.B), threads_for(items, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
