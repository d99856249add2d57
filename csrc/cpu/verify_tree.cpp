// verify_tree on the CPU: one request per task, see verify.h. A row is copied into fixed point only when a rejection
// first changes it.
#include <optional>
#include <string>
#include <tuple>

#include "../arguments.h"
#include "team.h"
#include "verify.h"

namespace {

using specvis::Request;
using specvis::Scratch;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree_cpu(
    const Tensor& target_probs,                // (B, N, V)
    const Tensor& tokens,                      // (B, N)
    const Tensor& first_child,                 // (B, N)
    const Tensor& next_sibling,                // (B, N)
    const Tensor& uniforms,                    // (B, N)
    const std::optional<Tensor>& draft_probs,  // (B, M, V)
    const std::optional<Tensor>& draft_row,    // (B, N)
    const std::optional<Tensor>& neighbors,    // (C, k)
    const std::optional<Tensor>& delta,        // (B)
    const std::optional<Tensor>& omega,        // (B, P)
    const std::optional<Tensor>& greedy,       // (B)
    std::string cutoff, int64_t offset, std::string residual, std::string empty, int64_t max_depth) {
  const int64_t B = target_probs.size(0), N = target_probs.size(1), V = target_probs.size(2);
  Tensor accepted_nodes = specvis::new_empty(tokens, {B, max_depth}, ScalarType::Int);
  Tensor num_accepted = specvis::new_empty(tokens, {B}, ScalarType::Int);
  Tensor next_token = specvis::new_empty(tokens, {B});
  Tensor tv_excess = specvis::new_empty(target_probs, {B});
  Tensor status = specvis::new_empty(tokens, {B}, ScalarType::Int);

  Request first = {N,
                   V,
                   draft_probs ? draft_probs->size(1) : 0,
                   max_depth,
                   tokens.const_data_ptr<int64_t>(),
                   first_child.const_data_ptr<int32_t>(),
                   next_sibling.const_data_ptr<int32_t>(),
                   uniforms.const_data_ptr<float>(),
                   data<float>(draft_probs),
                   data<int32_t>(draft_row),
                   data<float>(omega),
                   {},
                   0,
                   0,
                   specvis::cutoff_named(cutoff),
                   specvis::residual_named(residual),
                   specvis::empty_named(empty),
                   nullptr,
                   0,
                   V};
  first.take_neighbors(neighbors, offset);
  const float* const target = target_probs.const_data_ptr<float>();
  const float* deltas = data<float>(delta);
  const bool* is_greedy = data<bool>(greedy);
  const specvis::VerifyOutputs outputs = {
      accepted_nodes.mutable_data_ptr<int32_t>(), num_accepted.mutable_data_ptr<int32_t>(),
      next_token.mutable_data_ptr<int64_t>(), tv_excess.mutable_data_ptr<float>(), status.mutable_data_ptr<int32_t>()};

  specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (draft_probs) scratch.draft.reset(new int64_t[V]);
    if (greedy) scratch.allocate_nodes(N);
    for (int64_t b = begin; b < end; ++b) {
      const Request request = specvis::request_at(first, b, deltas);
      const specvis::ProbRows rows = {target + b * N * V, V, scratch};
      outputs.write(b, max_depth,
                    [&](specvis::VerifyResult& out) { rows.verify(request, is_greedy && is_greedy[b], out); });
    }
  });
  return {accepted_nodes, num_accepted, next_token, tv_excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("verify_tree", SPECVIS_BOX(verify_tree, &verify_tree_cpu));
}
