// commit_tokens on the CPU: each task takes requests.
#include "../shared/commit_tokens.h"

#include <optional>
#include <tuple>

#include "../arguments.h"
#include "team.h"

namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> commit_tokens_cpu(Tensor tokens, Tensor counts, Tensor failed,
                                                     Tensor target_forwards, Tensor num_accepted_at,
                                                     Tensor num_drafted_at, Tensor tv_excess, const Tensor& node_tokens,
                                                     const Tensor& accepted_nodes, const Tensor& num_accepted,
                                                     const Tensor& next_token, const std::optional<Tensor>& step_excess,
                                                     const Tensor& status, const Tensor& depth) {
  specvis::CommitTokens batch = {};
  batch.B = tokens.size(0);
  batch.C = tokens.size(1);
  batch.L = num_accepted_at.size(1);
  batch.N = node_tokens.size(1);
  batch.P = accepted_nodes.size(1);
  Tensor new_tokens = specvis::new_empty(tokens, {batch.B, batch.P + 1});
  Tensor nodes = specvis::new_empty(tokens, {batch.B, batch.P + 1});
  Tensor num_new = specvis::new_empty(tokens, {batch.B});
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.counts = counts.mutable_data_ptr<int64_t>();
  batch.failed = failed.mutable_data_ptr<bool>();
  batch.target_forwards = target_forwards.mutable_data_ptr<int64_t>();
  batch.num_accepted_at = num_accepted_at.mutable_data_ptr<int64_t>();
  batch.num_drafted_at = num_drafted_at.mutable_data_ptr<int64_t>();
  batch.tv_excess = tv_excess.mutable_data_ptr<float>();
  batch.node_tokens = node_tokens.const_data_ptr<int64_t>();
  batch.accepted_nodes = accepted_nodes.const_data_ptr<int32_t>();
  batch.num_accepted = num_accepted.const_data_ptr<int32_t>();
  batch.next_token = next_token.const_data_ptr<int64_t>();
  batch.step_excess = step_excess ? step_excess->const_data_ptr<float>() : nullptr;
  batch.status = status.const_data_ptr<int32_t>();
  batch.depth = depth.const_data_ptr<int64_t>();
  batch.new_tokens = new_tokens.mutable_data_ptr<int64_t>();
  batch.nodes = nodes.mutable_data_ptr<int64_t>();
  batch.num_new = num_new.mutable_data_ptr<int64_t>();
  specvis::parallel_for(0, batch.B, 4096 / (batch.P + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t count = batch.counts[b];
      for (int64_t i = 0; i <= batch.P; ++i) batch.write(b, i, count);
      batch.account(b, count);
    }
  });
  return {new_tokens, nodes, num_new};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("commit_tokens", SPECVIS_BOX(commit_tokens, &commit_tokens_cpu));
}
