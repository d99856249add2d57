// sample_residual on CUDA: a team per row keeps target and draft in registers. It sums both, then the residual, and the
// warp in whose share the token falls searches for it there. The residual is never stored.
#include "../shared/params.h"
#include "row_pair.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

__global__ void __launch_bounds__(kThreads, 1) sample_residual_kernel(SampleResidual batch, int64_t share) {
  Team team;
  const int64_t r = blockIdx.x / team.size(), V = batch.V;
  const bool has_draft = batch.draft_probs;
  RowPair rows(team, batch.target_probs + r * V, has_draft ? batch.draft_probs + r * V : nullptr, V, share);
  const double omega = batch.omega ? batch.omega[r] : 1.0;
  const float uniform = batch.uniforms[r];
  Total target_sum, draft_sum;
  rows.sum(team, &target_sum, &draft_sum);
  int32_t status = (omega >= 0 ? 0 : kInvalidRule) | (has_draft && !draft_sum.valid ? kInvalidDraft : 0);
  int64_t token = team.thread() == 0 ? 0 : -1;  // known to the thread that writes it
  if (target_sum.valid) {
    const double unit = 1 / static_cast<double>(target_sum.mass), slack = slack_of(omega);
    const double draft_unit = 1 / static_cast<double>(draft_sum.mass);
    bool from_target = !has_draft || status != 0;
    const auto mass = [&](int64_t, float p, float q) {
      const double of_target = whole_mass(p);
      if (from_target) return of_target;
      return whole_part(residual_mass(of_target, unit, whole_mass(q), draft_unit, slack));
    };
    for (int64_t total = 0; true; from_target = true) {
      token = rows.draw(team, mass, uniform, &total);
      if (total > 0) break;
      status |= kEmptyResidual;
    }
  } else {
    status |= kInvalidRow;
  }
  team.end();
  if (token >= 0) batch.tokens[r] = token;
  if (team.thread() == 0) batch.status[r] = status;
}

}  // namespace

cudaError_t sample_residual_cuda(const SampleResidual& batch, cudaStream_t stream) {
  if (batch.R == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(sample_residual_kernel, &device);
  if (error != cudaSuccess) return error;
  const PairTeam team(device, batch.R, batch.V, kThreads);
  return LAUNCH_CLUSTERS(sample_residual_kernel, blocks_for(batch.R * team.cluster), team.cluster, team.threads, 0,
                         stream, batch, team.share);
}

}  // namespace specvis
