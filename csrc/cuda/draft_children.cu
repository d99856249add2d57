// draft_children on CUDA: guided_probs, then draw_children from its rows.
#include "../shared/params.h"

namespace specvis {

cudaError_t draft_children_cuda(const DraftChildren& batch, cudaStream_t stream) {
  const LogitRows& rows = batch.rows;
  const cudaError_t error = guided_probs_cuda({rows, batch.probs, batch.status}, stream);
  if (error != cudaSuccess) return error;
  return draw_children_cuda({rows.B * rows.N, rows.N, rows.V, batch.K, batch.probs, batch.uniforms, batch.seeds,
                             batch.positions, batch.tokens, nullptr, nullptr, rows.temperature},
                            stream);
}

}  // namespace specvis
