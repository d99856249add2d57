// token_log_probs on CUDA: one team of threads per token reads a row, see guided_row.cuh.
#include "guided_row.cuh"

namespace specvis {
namespace {

template <class Entries>
__global__ void __launch_bounds__(Entries::kMaxThreads, 1)
    token_log_probs_kernel(TokenLogProbs batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, shared);
  const unsigned K = static_cast<unsigned>(batch.K), i = blockIdx.x / team.size(), b = i / K;
  const int64_t n = batch.row_numbers ? batch.row_numbers[i] : i - b * K;
  const auto write = [&](float sampled, float full, int32_t status) {
    batch.sampled[i] = sampled;
    batch.full[i] = full;
    batch.status[i] = status;
  };
  if (n < 0 || n >= batch.rows.N) {
    const float nothing = n < 0 ? 0.0f : -INFINITY;
    if (team.thread() == 0) write(nothing, nothing, n < 0 ? 0 : kInvalidRow);
    return;
  }
  const int64_t r = b * batch.rows.N + n, token = batch.tokens[i];
  GuidedRow<Entries> row(team, shared, capacity, batch.rows, r);
  if (!row.valid()) {
    team.end();
    if (team.thread() == 0) write(-INFINITY, -INFINITY, kInvalidRow);
    return;
  }
  int64_t all = 0, kept = 0;
  row.for_each_logit([&](float x) {
    const int64_t mass = mass_of(exp_of(x - row.best()));
    all += mass;
    kept += x >= row.lowest() ? mass : 0;
  });
  const auto log_of_sum = [&](int64_t mass) {
    return log_of(static_cast<float>(static_cast<double>(team.sum(mass)) / static_cast<double>(kMassOne)));
  };
  const float log_all = log_of_sum(all), log_kept = log_of_sum(kept);
  team.end();
  if (!row.allows(token)) {
    if (team.thread() == 0) write(-INFINITY, -INFINITY, 0);
    return;
  }
  row.for_each_logits([&](int id, const float (&x)[kWide]) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (id + j != token) continue;
      const float margin = x[j] - row.best();
      const bool is_kept = row.is_sampled() ? x[j] >= row.lowest() : margin == 0;
      write(is_kept ? margin - (row.is_sampled() ? log_kept : 0) : -INFINITY, margin - log_all, 0);
    }
  });
}

}  // namespace

cudaError_t token_log_probs_cuda(const TokenLogProbs& batch, cudaStream_t stream) {
  if (batch.rows.B * batch.K == 0) return cudaSuccess;
  return launch_rows(token_log_probs_kernel<Held>, token_log_probs_kernel<Streamed>, batch, batch.rows.B * batch.K,
                     stream);
}

}  // namespace specvis
