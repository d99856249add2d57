// draft_frontier on CUDA: one block per node filters its row, see filters.cuh, and finds its children, see expand.cuh.
// A second launch finds the next levels, unless the root is the only node. No row of probabilities is stored.
#include "expand.cuh"
#include "filters.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;             // at most
constexpr int64_t kReserved = 16 * 1024;  // bytes of shared memory for the arrays that the functions declare

// The children of node r. Returns whether its row is valid.
template <class T, bool kInShared>
__device__ bool expand_row(const DraftFrontier& batch, int64_t r, int64_t count, const IdRange& range,
                           Histogram* histogram, BestOf& best) {
  const LogitRows& rows = batch.rows;
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, range.first), reinterpret_cast<float*>(histogram + 1)};
  const Filtered filtered = filter(rows, r / rows.N, logits, range.count, *histogram);
  if (!filtered.valid || !range.valid) return false;
  const float sum = sum_exponentials(filtered, logits, range.count);
  const auto for_each = [&](auto f) {
    for (int64_t id = range.first + threadIdx.x; id < range.first + range.count; id += blockDim.x) {
      f(id, filtered.probability(logits(id - range.first), sum));
    }
  };
  return find_children(best, for_each, for_each, batch.scores[r], count, batch.child_tokens + r * batch.K,
                       batch.child_scores + r * batch.K);
}

__device__ void write_frontier(const DraftFrontier& batch, int64_t b, int64_t count, BestOf& best) {
  const int64_t F = batch.rows.N, K = batch.K, W = batch.W;
  const int64_t* const child_tokens = batch.child_tokens + b * F * K;
  const float* const child_scores = batch.child_scores + b * F * K;
  const auto store = [&](int64_t k, int64_t child, bool is_used) {
    const int64_t slot = b * K + k, row = child / K, node = batch.first_node + k;
    batch.tokens[slot] = child_tokens[child];
    batch.frontier_scores[slot] = is_used ? child_scores[child] : -INFINITY;
    batch.parent_rows[slot] = row;
    batch.frontier_candidates[slot] = is_used ? static_cast<int32_t>(batch.first_candidate + child) : -1;
    for (int64_t w = 0; w < W; ++w) {
      const uint64_t own_bit = w == node / 64 ? uint64_t{1} << node % 64 : 0;
      const uint64_t words = static_cast<uint64_t>(batch.ancestors[(b * F + row) * W + w]) | own_bit;
      batch.frontier_ancestors[slot * W + w] = is_used ? static_cast<int64_t>(words) : 0;
    }
  };
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) store(k, 0, false);
  find_frontier(best, child_scores, F * K, count,
                [&](int64_t rank, int64_t child) { store(rank, child, batch.depth[b] > batch.level); });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) draft_frontier_kernel(DraftFrontier batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  Team block = Team().alone();
  BestOf best(block);
  const int64_t r = blockIdx.x, F = batch.rows.N, K = batch.K, b = r / F;
  const int64_t count = clamped_width(batch.width[b], K);
  clear_children(K, batch.child_tokens + r * K, batch.child_scores + r * K);
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) batch.child_parents[r * K + k] = batch.candidates[r];
  bool valid = true;
  if (batch.scores[r] > -INFINITY) {
    const IdRange range = id_range_of(batch.rows, r);
    valid = range.count <= capacity ? expand_row<T, true>(batch, r, count, range, histogram, best)
                                    : expand_row<T, false>(batch, r, count, range, histogram, best);
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;
  if (F > 1) return;
  __syncthreads();  // the children are written
  write_frontier(batch, b, count, best);
}

__global__ void __launch_bounds__(kThreads, 1) frontier_kernel(DraftFrontier batch) {
  Team block = Team().alone();
  BestOf best(block);
  write_frontier(batch, blockIdx.x, clamped_width(batch.width[blockIdx.x], batch.K), best);
}

template <class T>
cudaError_t launch(const DraftFrontier& batch, cudaStream_t stream) {
  const int64_t num_rows = batch.rows.B * batch.rows.N;
  const cudaError_t error = launch_rows(draft_frontier_kernel<T>, batch, num_rows, stream, kThreads, kReserved);
  if (error != cudaSuccess || batch.rows.N == 1) return error;
  LAUNCH(frontier_kernel, static_cast<unsigned>(batch.rows.B), threads_for(batch.rows.N * batch.K, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t draft_frontier_cuda(const DraftFrontier& batch, cudaStream_t stream) {
  if (batch.rows.B == 0) return cudaSuccess;
  switch (batch.rows.type) {
    case LogitType::float16: return launch<__half>(batch, stream);
    case LogitType::bfloat16: return launch<__nv_bfloat16>(batch, stream);
    default: return launch<float>(batch, stream);
  }
}

}  // namespace specvis
