// draft_frontier on CUDA: one team per node filters its row, see guided_row.cuh, and finds its children, see
// expand.cuh. A second launch finds the next levels, unless the root is the only node. No row of probabilities is
// stored.
#include "expand.cuh"
#include "guided_row.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most, of the second launch

// Slot k of the frontier.
__device__ void store(const DraftFrontier& batch, int64_t b, unsigned k, unsigned child, bool is_used) {
  const int64_t F = batch.rows.N, K = batch.K, W = batch.W, slot = b * K + k, row = child / static_cast<unsigned>(K);
  const int64_t node = batch.first_node + k;
  batch.tokens[slot] = batch.child_tokens[b * F * K + child];
  batch.frontier_scores[slot] = is_used ? batch.child_scores[b * F * K + child] : -INFINITY;
  batch.parent_rows[slot] = row;
  batch.frontier_candidates[slot] = is_used ? static_cast<int32_t>(batch.first_candidate + child) : -1;
  for (int64_t w = 0; w < W; ++w) {
    const uint64_t own_bit = w == node / 64 ? uint64_t{1} << node % 64 : 0;
    const uint64_t words = static_cast<uint64_t>(batch.ancestors[(b * F + row) * W + w]) | own_bit;
    batch.frontier_ancestors[slot * W + w] = is_used ? static_cast<int64_t>(words) : 0;
  }
}

__global__ void __launch_bounds__(kThreads, 1) frontier_kernel(DraftFrontier batch) {
  Team block = Team().alone();
  BestOf best(block);
  const int64_t b = blockIdx.x, K = batch.K, size = batch.rows.N * K;
  for (unsigned k = threadIdx.x; k < K; k += blockDim.x) store(batch, b, k, 0, false);
  find_frontier(best, batch.child_scores + b * size, size, clamped_width(batch.width[b], K),
                [&](unsigned rank, unsigned child) { store(batch, b, rank, child, batch.depth[b] > batch.level); });
}

__device__ void clear_children(const DraftFrontier& batch, unsigned r) {
  const int64_t K = batch.K;
  clear_children(K, batch.child_tokens + r * K, batch.child_scores + r * K);
  for (int64_t k = threadIdx.x; k < K; k += blockDim.x) batch.child_parents[r * K + k] = batch.candidates[r];
}

template <class Entries>
__global__ void __launch_bounds__(Entries::kMaxThreads, 1)
    draft_frontier_kernel(DraftFrontier batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, shared);
  const unsigned r = blockIdx.x / team.size(), F = static_cast<unsigned>(batch.rows.N), b = r / F;
  if (team.rank() == 0) clear_children(batch, r);
  bool valid = true;
  if (batch.scores[r] > -INFINITY) {
    GuidedRow<Entries> row(team, shared, capacity, batch.rows, r);
    valid = row.valid();
    if (valid) {
      row.to_probs();
      const auto for_each = [&](auto f) { row.for_each_prob(f); };
      BestOf best(team);
      find_children(best, for_each, for_each, batch.scores[r], clamped_width(batch.width[b], batch.K),
                    batch.child_tokens + r * batch.K, batch.child_scores + r * batch.K);
    }
  }
  if (team.thread() == 0) batch.status[r] = valid ? 0 : kInvalidRow;
  if (F > 1) {
    team.end();
    return;
  }
  team.sync();  // the children are written
  if (team.rank() > 0) return;
  for (unsigned k = threadIdx.x; k < batch.K; k += blockDim.x) {
    const bool exists = batch.child_scores[r * batch.K + k] > -INFINITY;  // the children are in the frontier's order
    store(batch, b, k, exists ? k : 0, exists && batch.depth[b] > batch.level);
  }
}

}  // namespace

cudaError_t draft_frontier_cuda(const DraftFrontier& batch, cudaStream_t stream) {
  if (batch.rows.B == 0) return cudaSuccess;
  const int64_t B = batch.rows.B, F = batch.rows.N;
  const cudaError_t error =
      launch_rows(draft_frontier_kernel<Held>, draft_frontier_kernel<Streamed>, batch, B * F, stream);
  if (error != cudaSuccess || F == 1) return error;
  LAUNCH(frontier_kernel, blocks_for(B), threads_for(F * batch.K, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
