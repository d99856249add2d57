// select_tree on CUDA: one block per request. The lowest score to keep is found digit by digit. Each thread has
// neighboring candidates, whose slots one scan over the threads gives; each kept candidate then searches for its parent
// among them.
#include "../shared/floats.h"
#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 1024;  // at most
constexpr int kHeld = 4;        // scores that a thread keeps in registers; it reads others again
constexpr unsigned kDigitBits = 8, kDigits = 32 / kDigitBits, kBins = 1 << kDigitBits;

// The scores of a thread's own candidates as integers in the order of the scores; 0 for a candidate that does not
// exist.
class OwnScores {
 public:
  __device__ OwnScores(const float* scores, int64_t M) : scores_(scores) {
    const int64_t share = (M + blockDim.x - 1) / blockDim.x;
    begin_ = threadIdx.x * share < M ? threadIdx.x * share : M;
    end_ = begin_ + share < M ? begin_ + share : M;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) held_[j] = begin_ + j < end_ ? read(begin_ + j) : 0;
  }
  // Calls f(m, order) for each in turn.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (begin_ + j < end_) f(begin_ + j, held_[j]);
    for (int64_t m = begin_ + kHeld; m < end_; ++m) f(m, read(m));
  }

 private:
  __device__ uint32_t read(int64_t m) const { return order_of(scores_[m], -INFINITY); }

  const float* scores_;
  int64_t begin_, end_;
  uint32_t held_[kHeld];
};

// Where the count of a digit stands: each lane looks at neighboring ones, in a bank of its own.
constexpr unsigned kShare = kBins / kWarp;
__device__ inline unsigned place_of(unsigned digit) { return digit % kShare * kWarp + digit / kShare; }

struct Digit {
  unsigned value;
  int64_t greater;  // how many candidates have a greater one
};

// The digit of the candidate that is the `wanted`-th largest, by each warp alone: lane 0 has the highest ones.
__device__ Digit find_digit(const unsigned* counts, int64_t wanted) {
  const unsigned highest = kBins - 1 - lane() * kShare;
  unsigned own[kShare], sum = 0;
#pragma unroll
  for (unsigned j = 0; j < kShare; ++j) sum += own[j] = counts[place_of(highest - j)];
  unsigned scan = sum;
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const unsigned lower = __shfl_up_sync(kAllLanes, scan, distance);
    if (lane() >= distance) scan += lower;
  }
  const unsigned reaching = __ballot_sync(kAllLanes, scan >= wanted);
  unsigned greater = scan - sum, value = highest;
  bool is_found = false;
#pragma unroll
  for (unsigned j = 0; j < kShare; ++j) {
    is_found |= greater + own[j] >= wanted;
    if (is_found) continue;
    greater += own[j];
    --value;
  }
  const int source = __ffs(reaching) - 1;
  return {__shfl_sync(kAllLanes, value, source), __shfl_sync(kAllLanes, greater, source)};
}

// One block at a time per multiprocessor: with two, there are too few registers on sm_100.
__global__ void __launch_bounds__(kThreads, 1) select_tree_kernel(SelectTree batch) {
  __shared__ unsigned counts[kDigits][kBins];  // counts the candidates that share the digits before
  Team team;
  const int64_t b = blockIdx.x, M = batch.M, num_nodes = batch.num_nodes;
  const int32_t* parents = batch.parents + b * M;
  int64_t* node_tokens = batch.node_tokens + b * num_nodes;
  int32_t* node_parents = batch.node_parents + b * num_nodes;
  int32_t* source = batch.source + b * num_nodes;
  const int64_t size = batch.size[b], budget = (size < 1 ? 1 : size < num_nodes ? size : num_nodes) - 1;
  const OwnScores scores(batch.scores + b * M, M);
  unsigned* const all_counts = counts[0];
  for (unsigned i = threadIdx.x; i < kDigits * kBins; i += blockDim.x) all_counts[i] = 0;
  int64_t num_candidates = 0;
  scores.for_each([&](int64_t, uint32_t order) { num_candidates += order > 0; });
  num_candidates = team.sum(num_candidates);  // a barrier too: the counts are 0

  // The lowest score that is kept, and how many of the candidates with that score are.
  uint32_t lowest = budget > 0 ? 0 : UINT32_MAX;
  int64_t ties = 0;
  if (budget > 0 && budget < num_candidates) {
    int64_t wanted = budget;
#pragma unroll 1
    for (unsigned d = 0; d < kDigits; ++d) {
      const unsigned shift = 32 - (d + 1) * kDigitBits;
      scores.for_each([&](int64_t, uint32_t order) {
        const bool is_like = order > 0 && (uint64_t{order ^ lowest} >> shift >> kDigitBits) == 0;
        if (is_like) atomicAdd(&counts[d][place_of(order >> shift & (kBins - 1))], 1u);
      });
      __syncthreads();
      const Digit digit = find_digit(counts[d], wanted);
      lowest |= digit.value << shift;
      wanted -= digit.greater;
    }
    ties = wanted;
  }

  int64_t num_higher = 0, num_equal = 0;  // among the thread's own candidates
  scores.for_each([&](int64_t, uint32_t order) {
    num_higher += order > lowest;
    num_equal += order == lowest;
  });
  const Scan scan = team.scan(num_higher << 32 | num_equal);
  int64_t higher = scan.before >> 32, equal = scan.before & 0xffffffff;
  scores.for_each([&](int64_t m, uint32_t order) {
    const bool is_higher = order > lowest, is_equal = order == lowest;
    const int64_t slot = 1 + higher + (equal < ties ? equal : ties);
    if (is_higher || (is_equal && equal < ties)) source[slot] = static_cast<int32_t>(m);
    higher += is_higher;
    equal += is_equal;
  });
  const int64_t num_used = 1 + (scan.total >> 32) + ties;
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
  invalid = team.any(invalid);  // a barrier too: every parent has been found
  for (int64_t n = threadIdx.x; n < num_nodes; n += blockDim.x)
    if (node_parents[n] < 0) source[n] = -1;  // the slot is unused
  if (threadIdx.x == 0) batch.status[b] = invalid ? kInvalidTree : 0;
}

}  // namespace

cudaError_t select_tree_cuda(const SelectTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  const int64_t items = batch.M > batch.num_nodes ? batch.M : batch.num_nodes;
  LAUNCH(select_tree_kernel, blocks_for(batch.B), threads_for(items, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
