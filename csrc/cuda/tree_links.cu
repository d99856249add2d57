// tree_links on CUDA. One warp takes a tree of up to 64 nodes and keeps it in registers: every node's ancestors double
// from step to step, and of each set of siblings the bits are found at once. A block takes a larger tree. There every
// node climbs to the root by itself, and searches for its first child and its next sibling among the later nodes.
#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;   // at most
constexpr int kSmall = 64;      // nodes: two a lane, and their ancestors are one word
constexpr unsigned kNone = 64;  // no node of those

__device__ inline int lowest(uint64_t nodes) { return nodes ? __ffsll(static_cast<long long>(nodes)) - 1 : -1; }

// Lane l has the nodes l and l + 32. A parent precedes its child, so what a lower node needs is with lower nodes.
__global__ void __launch_bounds__(kWarp) small_kernel(TreeLinks batch) {
  __shared__ unsigned children[2][kSmall];  // the bits of each node's children among the lower and the upper nodes
  const int64_t b = blockIdx.x;
  const int N = static_cast<int>(batch.N), low = static_cast<int>(lane()), high = low + kWarp;
  const int32_t* parents = batch.parents + b * N;
  const int low_parent = low < N ? parents[low] : -2, high_parent = high < N ? parents[high] : -2;
#pragma unroll
  for (int half = 0; half < 2; ++half) children[half][low] = children[half][high] = 0;
  __syncwarp();

  // The ancestors that a node has found, in one word for each half, and the parent of the last of them.
  unsigned low_found = 1u << low, high_found = 0, upper_found = 1u << low;
  unsigned low_next = low_parent >= 0 && low_parent < low ? low_parent : kNone;
  unsigned high_next = high_parent >= 0 && high_parent < high ? high_parent : kNone;
  while (__any_sync(kAllLanes, low_next != kNone || high_next != kNone)) {
    const unsigned low_words = __shfl_sync(kAllLanes, low_found, low_next);
    const unsigned low_after = __shfl_sync(kAllLanes, low_next, low_next);
    const unsigned from_low = __shfl_sync(kAllLanes, low_found, high_next);
    const unsigned from_high = __shfl_sync(kAllLanes, high_found, high_next);
    const unsigned from_upper = __shfl_sync(kAllLanes, upper_found, high_next);
    const unsigned after_low = __shfl_sync(kAllLanes, low_next, high_next);
    const unsigned after_high = __shfl_sync(kAllLanes, high_next, high_next);
    if (low_next != kNone) {
      low_found |= low_words;
      low_next = low_after;
    }
    if (high_next != kNone) {
      const bool is_low = high_next < kWarp;
      high_found |= is_low ? from_low : from_high;
      upper_found |= is_low ? 0 : from_upper;
      high_next = is_low ? after_low : after_high;
    }
  }
  const bool has_root = __shfl_sync(kAllLanes, low_parent, 0) == -1;
  const bool low_used = has_root && low_found & 1, high_used = has_root && high_found & 1;
  const bool invalid = (!low_used && (low == 0 || low_parent != -2)) || (!high_used && high_parent != -2);
  const bool is_invalid = __any_sync(kAllLanes, invalid);

  const int low_group = low_used ? low_parent : -1, high_group = high_used ? high_parent : -1;
  const unsigned low_siblings = __match_any_sync(kAllLanes, low_group);
  const unsigned high_siblings = __match_any_sync(kAllLanes, high_group);
  const auto is_first = [](unsigned siblings) { return __ffs(siblings) - 1 == static_cast<int>(lane()); };
  if (low_group >= 0 && is_first(low_siblings)) children[0][low_group] = low_siblings;
  if (high_group >= 0 && is_first(high_siblings)) children[1][high_group] = high_siblings;
  __syncwarp();
  const auto children_of = [&](int node) { return uint64_t{children[1][node]} << kWarp | children[0][node]; };
  const auto write = [&](int n, bool used, int parent, uint64_t ancestors) {
    if (n >= N) return;
    const int64_t i = b * N + n;
    const uint64_t later = used && n > 0 ? children_of(parent) >> n >> 1 << n << 1 : 0;
    batch.ancestors[i] = static_cast<int64_t>(used ? ancestors : 0);
    batch.depth[i] = used ? __popcll(ancestors) - 1 : -1;
    batch.first_child[i] = lowest(children_of(n));
    batch.next_sibling[i] = lowest(later);
  };
  write(low, low_used, low_parent, low_found);
  write(high, high_used, high_parent, uint64_t{upper_found} << kWarp | high_found);
  if (low == 0) batch.status[b] = is_invalid ? kInvalidTree : 0;
}

// has_room: there is shared memory for a copy of the parents, and for the depths.
__global__ void __launch_bounds__(kThreads) large_kernel(TreeLinks batch, bool has_room) {
  DYNAMIC_SHARED(int32_t, shared);
  Team team;
  const int64_t b = blockIdx.x, N = batch.N, W = (N + 63) / 64;
  const int32_t* parents = batch.parents + b * N;
  int32_t* depth = batch.depth + b * N;
  if (has_room) {
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) shared[n] = parents[n];
    team.sync();
    parents = shared;
    depth = shared + N;
  }

  bool invalid = false;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    int64_t ancestor = n;
    int32_t steps = 0;
    for (; ancestor > 0 && parents[ancestor] >= 0 && parents[ancestor] < ancestor; ancestor = parents[ancestor])
      ++steps;
    const bool used = ancestor == 0 && parents[0] == -1;
    batch.depth[b * N + n] = depth[n] = used ? steps : -1;
    invalid |= !used && (n == 0 || parents[n] != -2);
  }
  invalid = team.any(invalid);  // a barrier too: every depth is known
  if (threadIdx.x == 0) batch.status[b] = invalid ? kInvalidTree : 0;

  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const bool used = depth[n] >= 0;
    int64_t* ancestors = batch.ancestors + (b * N + n) * W;
    int64_t ancestor = used ? n : -1;
    for (int64_t w = W - 1; w >= 0; --w) {
      uint64_t word = 0;
      for (; ancestor >= w * 64; ancestor = parents[ancestor]) word |= uint64_t{1} << ancestor % 64;
      ancestors[w] = static_cast<int64_t>(word);
    }
    int64_t child = -1, sibling = -1;
    for (int64_t later = N - 1; used && later > n; --later) {
      if (depth[later] < 0) continue;
      if (parents[later] == n) child = later;
      if (parents[later] == parents[n]) sibling = later;
    }
    batch.first_child[b * N + n] = static_cast<int32_t>(child);
    batch.next_sibling[b * N + n] = static_cast<int32_t>(sibling);
  }
}

}  // namespace

cudaError_t tree_links_cuda(const TreeLinks& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  if (batch.N <= kSmall) {
    LAUNCH(small_kernel, blocks_for(batch.B), kWarp, 0, stream, batch);
    return cudaGetLastError();
  }
  Device device;
  const cudaError_t error = device_for(large_kernel, &device);
  if (error != cudaSuccess) return error;
  const int64_t bytes = 2 * batch.N * static_cast<int64_t>(sizeof(int32_t));
  const bool has_room = bytes <= device.shared;
  LAUNCH(large_kernel, blocks_for(batch.B), threads_for(batch.N, kThreads), has_room ? bytes : 0, stream, batch,
         has_room);
  return cudaGetLastError();
}

}  // namespace specvis
