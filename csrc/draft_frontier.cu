// draft_frontier on CUDA: one block per node filters its row, see filters.cuh, and finds its children; the last block
// of a request to finish finds the next level, see expand.cuh. No row of probabilities is stored.
#include "expand.cuh"
#include "filters.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;             // at most
constexpr int64_t kReserved = 16 * 1024;  // bytes of shared memory for the arrays that the functions declare

// The children of node r. Returns whether its row is valid.
template <class T, bool kInShared>
__device__ bool expand_row(const DraftFrontier& batch, int64_t r, int64_t count, const IdRange& range,
                           Histogram* histogram) {
  const LogitRows& rows = batch.rows;
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, range.first), reinterpret_cast<float*>(histogram + 1)};
  const Filtered filtered = filter(rows, r / rows.N, logits, range.count, *histogram);
  if (!filtered.valid || !range.valid) return false;
  const float sum = sum_exponentials(filtered, logits, range.count);
  const auto prob_of = [&](int64_t id) { return filtered.probability(logits(id - range.first), sum); };
  const auto for_each = [&](auto f) {
    for (int64_t id = range.first + threadIdx.x; id < range.first + range.count; id += blockDim.x) f(id, prob_of(id));
  };
  float largest = 0;
  for_each([&](int64_t, float p) { largest = p > largest ? p : largest; });
  find_children(for_each, prob_of, largest, batch.scores[r], count, batch.child_tokens + r * batch.K,
                batch.child_scores + r * batch.K);
  return true;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) draft_frontier_kernel(DraftFrontier batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  const int64_t r = blockIdx.x, F = batch.rows.N, K = batch.K, W = batch.W, b = r / F;
  const int64_t count = clamped_width(batch.width[b], K);
  clear_children(K, batch.child_tokens + r * K, batch.child_scores + r * K);
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) batch.child_parents[r * K + k] = batch.candidates[r];
  bool valid = true;
  if (batch.scores[r] > -INFINITY) {
    const IdRange range = id_range_of(batch.rows, r);
    valid = range.count <= capacity ? expand_row<T, true>(batch, r, count, range, histogram)
                                    : expand_row<T, false>(batch, r, count, range, histogram);
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;

  // Until the last block writes the next level, its first candidate counts the blocks that are done.
  int32_t* const candidates = batch.frontier_candidates + b * K;
  if (!is_last_block(candidates, F)) return;
  const int64_t* const child_tokens = batch.child_tokens + b * F * K;
  const float* const child_scores = batch.child_scores + b * F * K;
  const auto store = [&](int64_t k, int64_t child, bool is_used) {
    const int64_t slot = b * K + k, row = child / K, node = batch.first_node + k;
    batch.tokens[slot] = child_tokens[child];
    batch.frontier_scores[slot] = is_used ? child_scores[child] : -INFINITY;
    batch.parent_rows[slot] = row;
    candidates[k] = is_used ? static_cast<int32_t>(batch.first_candidate + child) : -1;
    for (int64_t w = 0; w < W; ++w) {
      const uint64_t own_bit = w == node / 64 ? uint64_t{1} << node % 64 : 0;
      const uint64_t words = static_cast<uint64_t>(batch.ancestors[(b * F + row) * W + w]) | own_bit;
      batch.frontier_ancestors[slot * W + w] = is_used ? static_cast<int64_t>(words) : 0;
    }
  };
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) store(k, 0, false);
  find_frontier(child_scores, F * K, count,
                [&](int64_t rank, int64_t child) { store(rank, child, batch.depth[b] > batch.level); });
}

template <class T>
cudaError_t launch(const DraftFrontier& batch, cudaStream_t stream) {
  return launch_rows(draft_frontier_kernel<T>, batch, batch.rows.B * batch.rows.N, stream, kThreads, kReserved);
}

}  // namespace

cudaError_t draft_frontier_cuda(const DraftFrontier& batch, cudaStream_t stream) {
  if (batch.rows.B == 0) return cudaSuccess;
  if (batch.rows.N > 1) {
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.rows.B * batch.K);
    const cudaError_t error = cudaMemsetAsync(batch.frontier_candidates, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  switch (batch.rows.type) {
    case LogitType::float16: return launch<__half>(batch, stream);
    case LogitType::bfloat16: return launch<__nv_bfloat16>(batch, stream);
    default: return launch<float>(batch, stream);
  }
}

}  // namespace specvis
