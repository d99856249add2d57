// guided_probs on CUDA: one block per row, see filters.cuh.
#include "filters.cuh"

namespace specvis {
namespace {

template <class T, bool kInShared>
__device__ void write_probs(const GuidedProbs& batch, Histogram* histogram) {
  const LogitRows& rows = batch.rows;
  const int64_t r = blockIdx.x, ids = batch.num_ids;
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, batch.first_id), reinterpret_cast<float*>(histogram + 1)};
  const Filtered filtered = filter(rows, r / rows.N, logits, ids, *histogram);
  const int64_t total = filtered.valid ? sum_masses(filtered, logits, ids) : 0;
  const float sum = static_cast<float>(static_cast<double>(total) / static_cast<double>(kMassOne));
  float* const probs = batch.probs + r * rows.V;
  for (int64_t v = threadIdx.x; v < rows.V; v += blockDim.x) {
    const int64_t i = v - batch.first_id;
    float p = 0;
    if (filtered.valid && i >= 0 && i < ids) {
      const float x = logits(i);
      if (filtered.keeps(x)) p = exp_of(x - filtered.best) / sum;
    }
    probs[v] = p;
  }
  if (threadIdx.x == 0) batch.status[r] = filtered.valid ? 0 : kInvalidRow;
}

template <class T>
__global__ void __launch_bounds__(kThreads) guided_probs_kernel(GuidedProbs batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  if (batch.num_ids <= capacity)
    write_probs<T, true>(batch, histogram);
  else
    write_probs<T, false>(batch, histogram);
}

}  // namespace

cudaError_t guided_probs_cuda(const GuidedProbs& batch, cudaStream_t stream) {
  if (batch.rows.B * batch.rows.N == 0) return cudaSuccess;
  switch (batch.rows.type) {
    case LogitType::float16: return launch_rows(guided_probs_kernel<__half>, batch, batch.num_ids, false, stream);
    case LogitType::bfloat16:
      return launch_rows(guided_probs_kernel<__nv_bfloat16>, batch, batch.num_ids, false, stream);
    default: return launch_rows(guided_probs_kernel<float>, batch, batch.num_ids, false, stream);
  }
}

}  // namespace specvis
