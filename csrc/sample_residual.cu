// sample_residual on CUDA: a block per row. One pass weighs target and draft, one the residual, of which each
// warp sums a share; the token is looked for in a single share. Nothing is stored.
#include "cuda.h"
#include "launch.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__global__ void __launch_bounds__(kThreads) sample_residual_kernel(SampleResidual batch) {
  __shared__ int64_t sums[kMostWarps];
  const int64_t r = blockIdx.x, V = batch.V;
  const float* target = batch.target_probs + r * V;
  const float* draft = batch.draft_probs ? batch.draft_probs + r * V : nullptr;
  const double omega = batch.omega ? batch.omega[r] : 1.0;
  const Total P = weigh(target, V);
  const Total Q = draft ? weigh(draft, V) : Total{0, true};
  int32_t status = omega >= 0 ? 0 : kInvalidRule;
  int64_t token = 0;
  if (P.valid && Q.valid) {
    const double unit = 1 / static_cast<double>(P.weight), draft_unit = 1 / static_cast<double>(Q.weight);
    const double slack = slack_of(omega);
    const auto rest = [=](int64_t v) {
      const int64_t weight = to_fixed(target[v]);
      if (weight == 0) return weight;
      const double drafted = static_cast<double>(to_fixed(draft[v]));
      return static_cast<int64_t>(
          residual_weight(static_cast<double>(weight), unit, drafted, draft_unit, slack));
    };
    int64_t total = 0;
    if (draft && status == 0) {
      total = sum_shares(rest, V, sums);
      if (total == 0) status |= kEmptyResidual;
    }
    token = total > 0 ? search(rest, V, sums, draw_at(batch.uniforms[r], total))
                      : draw([=](int64_t v) { return to_fixed(target[v]); }, V, P.weight, batch.uniforms[r]);
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
  LAUNCH(sample_residual_kernel, static_cast<unsigned>(batch.R), threads_for(batch.V, kThreads), 0, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
