// guided_probs on CUDA: one team of threads per row, see guided_row.cuh.
#include "guided_row.cuh"

namespace specvis {
namespace {

template <class Entries>
__global__ void __launch_bounds__(Entries::kMaxThreads, 1) guided_probs_kernel(GuidedProbs batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, shared);
  GuidedRow<Entries> row(team, shared, capacity, batch.rows, batch.first_row + blockIdx.x / team.size());
  if (row.valid()) row.to_probs();
  const int64_t r =
      __shfl_sync(kAllLanes, blockIdx.x, 0) / team.size();  // a shuffle makes the compiler find it again, not keep it
  row.write(batch.probs + r * batch.rows.V, batch.rows.V);
  if (team.thread() == 0 && batch.status) batch.status[r] = row.valid() ? 0 : kInvalidRow;
  team.end();
}

}  // namespace

cudaError_t guided_probs_cuda(const GuidedProbs& batch, cudaStream_t stream) {
  if (batch.rows.B * batch.rows.N == 0) return cudaSuccess;
  return launch_rows(guided_probs_kernel<Held>, guided_probs_kernel<Streamed>, batch, batch.rows.B * batch.rows.N,
                     stream);
}

}  // namespace specvis
