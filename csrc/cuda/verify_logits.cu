// verify_logits on CUDA, by the kernels of other ops: guided_probs of all rows and verify_tree, or with seeds
// draw_tokens of all rows and verify_greedy. What the first tells the second is in scratch memory. Where the
// probabilities would take too much of it, one group of requests follows another.
#include <algorithm>

#include "../shared/params.h"

namespace specvis {
namespace {

// Bytes of probabilities in a group of more than one request.
#ifdef SPECVIS_EMULATED
constexpr int64_t kMostProbs = 40'000;  // so that tests have groups
#else
constexpr int64_t kMostProbs = 1 << 28;
#endif

// A group of requests, from request `first` on.
struct Group : VerifyTree {
  int64_t probs_bytes;

  Group(const VerifyLogits& batch, int64_t first) : VerifyTree{batch} {
    const int64_t of_request = batch.N * batch.V * static_cast<int64_t>(sizeof(float));
    B = std::min(batch.B - first, std::max<int64_t>(kMostProbs / of_request, 1));
    probs_bytes = (B * of_request + 15) / 16 * 16;
    first_request = first;
    temperature = batch.rows.temperature;
    ids = batch.rows;
  }
};

cudaError_t verify_by_seeds(const VerifyLogits& batch, cudaStream_t stream) {
  const LogitRows& rows = batch.rows;
  int64_t* const tokens = reinterpret_cast<int64_t*>(batch.scratch);
  int32_t* const row_status = reinterpret_cast<int32_t*>(tokens + rows.B * rows.N);
  const cudaError_t error = draw_tokens_cuda(
      {rows, batch.seeds, batch.positions, nullptr, 0, tokens, batch.num_accepted, tokens, row_status}, stream);
  if (error != cudaSuccess) return error;
  return verify_greedy_cuda(
      {batch.B, batch.N, batch.max_depth, tokens, batch.tokens, batch.first_child, batch.next_sibling,
       batch.accepted_nodes, batch.num_accepted, batch.next_token, batch.status, row_status, batch.tv_excess},
      stream);
}

}  // namespace

cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes) {
  *bytes = batch.seeds ? batch.B * batch.N * static_cast<int64_t>(sizeof(int64_t) + sizeof(int32_t)) : 0;
  for (int64_t first = 0; first < batch.B && !batch.seeds;) {
    const Group group(batch, first);
    int64_t of_tree = 0;
    const cudaError_t error = verify_tree_scratch(group, &of_tree);
    if (error != cudaSuccess) return error;
    *bytes = std::max(*bytes, group.probs_bytes + of_tree);
    first += group.B;
  }
  return cudaSuccess;
}

cudaError_t verify_logits_cuda(const VerifyLogits& batch, cudaStream_t stream) {
  if (batch.seeds) return verify_by_seeds(batch, stream);
  for (int64_t first = 0; first < batch.B;) {
    Group group(batch, first);
    float* const probs = reinterpret_cast<float*>(batch.scratch);
    group.target_probs = probs;
    group.scratch = batch.scratch + group.probs_bytes;
    LogitRows rows = batch.rows;
    rows.B = group.B;
    cudaError_t error = guided_probs_cuda({rows, probs, nullptr, first * rows.N}, stream);
    if (error == cudaSuccess) error = verify_tree_cuda(group, stream);
    if (error != cudaSuccess) return error;
    first += group.B;
  }
  return cudaSuccess;
}

}  // namespace specvis
