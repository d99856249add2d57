// guided_probs on CUDA: one block per row, see filters.cuh.
#include "filters.cuh"

namespace specvis {
namespace {

template <class T>
__global__ void __launch_bounds__(kRowThreads) guided_probs_kernel(GuidedProbs batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  const int64_t r = blockIdx.x;
  float* const probs = batch.probs + r * batch.rows.V;
  const IdRange range = id_range_of(batch.rows, r);
  const bool valid = range.count <= capacity ? write_probs<T, true>(batch.rows, r, range, probs, histogram)
                                             : write_probs<T, false>(batch.rows, r, range, probs, histogram);
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;
}

}  // namespace

cudaError_t guided_probs_cuda(const GuidedProbs& batch, cudaStream_t stream) {
  const int64_t num_rows = batch.rows.B * batch.rows.N;
  if (num_rows == 0) return cudaSuccess;
  switch (batch.rows.type) {
    case LogitType::float16: return launch_rows(guided_probs_kernel<__half>, batch, num_rows, stream);
    case LogitType::bfloat16: return launch_rows(guided_probs_kernel<__nv_bfloat16>, batch, num_rows, stream);
    default: return launch_rows(guided_probs_kernel<float>, batch, num_rows, stream);
  }
}

}  // namespace specvis
