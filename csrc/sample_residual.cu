// sample_residual on CUDA: one block per row. One pass sums target and draft; in another each warp sums a share of the
// residual. The token is then searched for in a single share. The residual is never stored.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__global__ void __launch_bounds__(kThreads) sample_residual_kernel(SampleResidual batch) {
  __shared__ int64_t sums[kMaxWarps];
  const int64_t r = blockIdx.x, V = batch.V;
  const float* target = batch.target_probs + r * V;
  const float* draft = batch.draft_probs ? batch.draft_probs + r * V : nullptr;
  const double omega = batch.omega ? batch.omega[r] : 1.0;
  const Total target_sum = sum_row(target, V);
  const Total draft_sum = draft ? sum_row(draft, V) : Total{0, true};
  int32_t status = omega >= 0 ? 0 : kInvalidRule;
  int64_t token = 0;
  if (target_sum.valid && draft_sum.valid) {
    const double unit = 1 / static_cast<double>(target_sum.mass), draft_unit = 1 / static_cast<double>(draft_sum.mass);
    const double slack = slack_of(omega);
    const auto residual = [=](int64_t v) {
      const int64_t mass = to_fixed_point(target[v]);
      if (mass == 0) return mass;
      const double draft_mass = static_cast<double>(to_fixed_point(draft[v]));
      return static_cast<int64_t>(residual_mass(static_cast<double>(mass), unit, draft_mass, draft_unit, slack));
    };
    int64_t total = 0;
    if (draft && status == 0) {
      total = sum_shares(residual, V, sums);
      if (total == 0) status |= kEmptyResidual;
    }
    token = total > 0
                ? search(residual, V, sums, draw_threshold(batch.uniforms[r], total))
                : draw([=](int64_t v) { return to_fixed_point(target[v]); }, V, target_sum.mass, batch.uniforms[r]);
  } else {
    status |= kInvalidRow;
  }
  if (threadIdx.x != 0) return;
  batch.tokens[r] = token;
  batch.status[r] = status;
}

}  // namespace

cudaError_t sample_residual_cuda(const SampleResidual& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  LAUNCH(sample_residual_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream, batch);
  return cudaGetLastError();
}

}  // namespace specvis
