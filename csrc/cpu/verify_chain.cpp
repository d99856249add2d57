// verify_chain on the CPU: one request per task, a tree in which node n's only child is n + 1, see verify.h.
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "team.h"
#include "verify.h"

namespace {

using specvis::Integers;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_chain_cpu(const Tensor& target_probs,                 // (T, V)
                                                            const Tensor& draft_tokens,                 // (D)
                                                            const Tensor& cu_num_draft_tokens,          // (B)
                                                            const Tensor& uniforms,                     // (D + B)
                                                            const std::optional<Tensor>& bonus_tokens,  // (B)
                                                            const std::optional<Tensor>& draft_probs,   // (D, V)
                                                            const std::optional<Tensor>& neighbors,     // (C, k)
                                                            const std::optional<Tensor>& delta,         // (B)
                                                            const std::optional<Tensor>& omega,         // (B)
                                                            const std::optional<Tensor>& greedy,        // (B)
                                                            std::string cutoff, int64_t offset, std::string residual,
                                                            std::string empty) {
  const int64_t B = cu_num_draft_tokens.size(0), D = draft_tokens.size(0), V = target_probs.size(1);
  Tensor num_accepted = specvis::new_empty(target_probs, {B}, ScalarType::Int);
  Tensor next_token = specvis::new_empty(target_probs, {B}, ScalarType::Long);
  Tensor tv_excess = specvis::new_empty(target_probs, {B});
  Tensor status = specvis::new_empty(target_probs, {B}, ScalarType::Int);
  int32_t* const num_accepted_of = num_accepted.mutable_data_ptr<int32_t>();
  int64_t* const next_token_of = next_token.mutable_data_ptr<int64_t>();
  float* const tv_excess_of = tv_excess.mutable_data_ptr<float>();
  int32_t* const status_of = status.mutable_data_ptr<int32_t>();

  specvis::Request chain = {};
  chain.V = chain.last_id = V;
  chain.cutoff = specvis::cutoff_named(cutoff);
  chain.residual = specvis::residual_named(residual);
  chain.empty = specvis::empty_named(empty);
  chain.take_neighbors(neighbors, offset);
  const Integers drafts = specvis::integers_of(draft_tokens), ends = specvis::integers_of(cu_num_draft_tokens);
  const float* const target = target_probs.const_data_ptr<float>();
  const float* const uniform = uniforms.const_data_ptr<float>();
  const int64_t* const bonus = data<int64_t>(bonus_tokens);
  const float* const draft = data<float>(draft_probs);
  const float *const deltas = data<float>(delta), *const omegas = data<float>(omega);
  const bool* const is_greedy = data<bool>(greedy);

  int64_t num_valid = 0, before = 0;  // requests whose drafts are where they must be
  for (; num_valid < B && ends[num_valid] >= before && ends[num_valid] <= D; ++num_valid) before = ends[num_valid];

  specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    specvis::Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (draft) scratch.draft.reset(new int64_t[V]);
    std::vector<int64_t> tokens;
    std::vector<int32_t> accepted_nodes;
    for (int64_t b = begin; b < end; ++b) {
      specvis::VerifyResult out = {};
      if (b < num_valid) {
        specvis::Request request = chain;
        const int64_t first = b > 0 ? ends[b - 1] : 0;
        request.num_draft_rows = request.max_depth = ends[b] - first;
        request.N = request.max_depth + 1;
        tokens.resize(request.N);
        for (int64_t n = 1; n < request.N; ++n) tokens[n] = drafts[first + n - 1];
        request.tokens = tokens.data();
        request.uniforms = uniform + first + b;
        if (draft) request.draft = draft + first * V;
        if (omegas) request.omega = omegas + b;
        if (deltas) request.delta = deltas[b];
        if (bonus) request.bonus = bonus + b;
        if (is_greedy && is_greedy[b]) scratch.allocate_nodes(request.N);
        accepted_nodes.resize(request.N);
        out.accepted_nodes = accepted_nodes.data();
        const specvis::ProbRows rows = {target + (bonus ? first : first + b) * V, V, scratch};
        rows.verify(request, is_greedy && is_greedy[b], out);
      } else {
        out.status = specvis::kInvalidTree;
      }
      num_accepted_of[b] = out.num_accepted;
      next_token_of[b] = out.next_token;
      tv_excess_of[b] = static_cast<float>(out.tv_excess);
      status_of[b] = out.status;
    }
  });
  return {num_accepted, next_token, tv_excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("verify_chain", SPECVIS_BOX(verify_chain, &verify_chain_cpu));
}
