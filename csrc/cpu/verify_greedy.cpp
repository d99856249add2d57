// verify_greedy on the CPU: each task takes requests and walks down their trees.
#include <algorithm>
#include <tuple>

#include "../arguments.h"
#include "../shared/rules.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_greedy_cpu(const Tensor& target_tokens,  // (B, N)
                                                             const Tensor& tokens,         // (B, N)
                                                             const Tensor& first_child,    // (B, N)
                                                             const Tensor& next_sibling,   // (B, N)
                                                             int64_t max_depth) {
  const int64_t B = tokens.size(0), N = tokens.size(1);
  Tensor accepted_nodes = specvis::new_empty(first_child, {B, max_depth});
  Tensor num_accepted = specvis::new_empty(first_child, {B});
  Tensor next_token = specvis::new_empty(tokens, {B});
  Tensor status = specvis::new_empty(first_child, {B});
  const int64_t* all_target_tokens = target_tokens.const_data_ptr<int64_t>();
  const int64_t* all_tokens = tokens.const_data_ptr<int64_t>();
  const int32_t* all_first_children = first_child.const_data_ptr<int32_t>();
  const int32_t* all_next_siblings = next_sibling.const_data_ptr<int32_t>();
  int32_t* accepted_nodes_out = accepted_nodes.mutable_data_ptr<int32_t>();
  int32_t* num_accepted_out = num_accepted.mutable_data_ptr<int32_t>();
  int64_t* next_token_out = next_token.mutable_data_ptr<int64_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 64, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const specvis::Siblings siblings = {N, all_tokens + b * N, all_next_siblings + b * N};
      int32_t* path = accepted_nodes_out + b * max_depth;
      int64_t node = 0, depth = 0;
      status_out[b] = 0;
      for (; depth < max_depth; ++depth) {
        const int64_t wanted = all_target_tokens[b * N + node];
        const int64_t found = siblings.find(wanted, node, all_first_children[b * N + node], &status_out[b]);
        if (found < 0) break;
        path[depth] = static_cast<int32_t>(node = found);
      }
      std::fill(path + depth, path + max_depth, -1);
      num_accepted_out[b] = static_cast<int32_t>(depth);
      next_token_out[b] = all_target_tokens[b * N + node];
    }
  });
  return {accepted_nodes, num_accepted, next_token, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("verify_greedy", SPECVIS_BOX(verify_greedy, &verify_greedy_cpu));
}
