// verify_chain on the CPU: one request per task, a tree in which node n's only child is n + 1, see verify.h.
#include <vector>

#include "team.h"
#include "verify.h"

namespace specvis {

void verify_chain_cpu(const VerifyChain& batch) {
  const int64_t B = batch.B, D = batch.D, V = batch.V;
  const Integers ends = batch.ends;
  int64_t num_valid = 0, before = 0;  // requests whose drafts are where they must be
  for (; num_valid < B && ends[num_valid] >= before && ends[num_valid] <= D; ++num_valid) before = ends[num_valid];

  parallel_for(B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (batch.draft_probs) scratch.draft.reset(new int64_t[V]);
    std::vector<int64_t> tokens;
    std::vector<int32_t> accepted_nodes;
    for (int64_t b = begin; b < end; ++b) {
      VerifyResult result = {};
      if (b < num_valid) {
        VerifyRequest request(batch, b);
        const int64_t first = b > 0 ? ends[b - 1] : 0;
        request.num_draft_rows = request.max_depth = ends[b] - first;
        request.N = request.max_depth + 1;
        tokens.resize(request.N);
        for (int64_t n = 1; n < request.N; ++n) tokens[n] = batch.draft_tokens[first + n - 1];
        request.tokens = tokens.data();
        request.uniforms += first + b;
        if (request.draft_probs) request.draft_probs += first * V;
        if (request.omega) request.omega += b;
        if (batch.bonus_tokens) request.bonus = batch.bonus_tokens + b;
        const bool is_greedy = batch.greedy && batch.greedy[b];
        if (is_greedy) scratch.allocate_nodes(request.N);
        accepted_nodes.resize(request.N);
        result.accepted_nodes = accepted_nodes.data();
        const ProbRows rows = {batch.target_probs + (request.bonus ? first : first + b) * V, V, scratch};
        rows.verify(request, is_greedy, result);
      } else {
        result.status = kInvalidTree;
      }
      result.write(batch, b);
    }
  });
}

}  // namespace specvis
