// verify_tree on the CPU: one request per task, see verify.h. A row is copied into fixed point only when a rejection
// first changes it.
#include "team.h"
#include "verify.h"

namespace specvis {

void verify_tree_cpu(const VerifyTree& batch) {
  const int64_t N = batch.N, V = batch.V;
  parallel_for(batch.B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (batch.draft_probs) scratch.draft.reset(new int64_t[V]);
    if (batch.greedy) scratch.allocate_nodes(N);
    for (int64_t b = begin; b < end; ++b) {
      const ProbRows rows = {batch.target_probs + b * N * V, V, scratch};
      VerifyResult result = new_result(batch, b);
      rows.verify(VerifyRequest(batch, b), batch.greedy && batch.greedy[b], result);
      result.write(batch, b);
    }
  });
}

}  // namespace specvis
