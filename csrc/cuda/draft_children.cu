// draft_children on CUDA: one team per row writes its probabilities, see guided_row.cuh, and draws from them, see
// children.cuh.
#include "children.cuh"
#include "guided_row.cuh"

namespace specvis {
namespace {

// The K most probable tokens of a valid row.
template <class Row>
__device__ void find_likeliest(Team& team, const Row& row, int64_t K, int64_t* tokens) {
  const auto for_each = [&](auto f) { row.for_each_prob(f); };
  float largest = 0;
  for_each([&](int64_t, float p) { largest = p > largest ? p : largest; });
  BestOf best(team);
  best.find_bound(order_of(largest, 0), K);
  best.rank(for_each, for_each, 0, [=](unsigned rank, int64_t id, float) { tokens[rank] = id; });
}

template <class Entries>
__global__ void __launch_bounds__(kMaxDraftThreads, 1) draft_children_kernel(DraftChildren batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, shared);
  const LogitRows& rows = batch.rows;
  const int64_t r = blockIdx.x / team.size(), b = r / rows.N, V = rows.V, K = batch.K;
  float* const probs = batch.probs + r * V;
  int64_t* const tokens = batch.tokens + r * K;
  const bool is_greedy = rows.temperature[b] == 0;
  bool valid;
  {
    GuidedRow<Entries> row(team, shared, capacity, rows, r);
    valid = row.valid();
    if (valid) row.to_probs();
    row.write(probs, V);
    if (team.rank() == 0 && (is_greedy || !valid)) clear_tokens(0, K, tokens);
    if (is_greedy && valid) find_likeliest(team, row, K, tokens);
  }
  if (team.thread() == 0) batch.status[r] = valid ? 0 : kInvalidRow;
  team.sync();  // the row is written
  if (is_greedy || !valid) return;
  if (batch.uniforms) {
    if (team.rank() == 0) draw_by_uniforms(probs, V, batch.uniforms + r * K, K, tokens);
    return;
  }
  constexpr int64_t kCapacity = 2 * kBins * sizeof(unsigned) / sizeof(float4);  // the histogram's memory
  draw_by_noise(team, probs, V, Noise(batch.seeds[b], batch.positions[r]), K, tokens,
                reinterpret_cast<float4*>(shared->low), kCapacity);
  team.end();
}

}  // namespace

cudaError_t draft_children_cuda(const DraftChildren& batch, cudaStream_t stream) {
  if (batch.rows.B == 0) return cudaSuccess;
  return launch_rows(draft_children_kernel<Held>, draft_children_kernel<Streamed>, batch, batch.rows.B * batch.rows.N,
                     stream, kMaxDraftThreads);
}

}  // namespace specvis
