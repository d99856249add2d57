// Which drafts are accepted.
#include "bindings.h"

namespace specvis {
namespace {

template <class Batch>
void read_neighbors(Arguments& a, Batch& batch, const MaybeTensor& neighbors, const MaybeTensor& delta,
                    const std::string& cutoff, int64_t offset, const std::string& residual) {
  a.require(neighbors.has_value() == delta.has_value(), "neighbors and delta must be given together");
  if (neighbors) batch.neighbors = a.read_neighbors(*neighbors, offset);
  a.read("delta", delta, "B", &batch.delta);
  batch.cutoff = a.name<Cutoff>("cutoff", cutoff, {"tvd", "ratio", "jsd"});
  batch.residual = a.name<ResidualRule>("residual", residual, {"optimal", "relaxed", "released"});
}

Empty empty_of(const Arguments& a, const std::string& empty) {
  return a.name<Empty>("empty", empty, {"target", "uniform"});
}

// accepted_nodes, num_accepted, next_token, tv_excess, status
using Verified = Tensors<5>;

// Reads the tree and makes the results of verify_logits and verify_tree, whose rows have been read.
Verified read_tree(Arguments& a, VerifyParams& batch, const Tensor& tokens, const Tensor& first_child,
                   const Tensor& next_sibling, const MaybeTensor& draft_probs, const MaybeTensor& draft_row,
                   const MaybeTensor& omega, int64_t max_depth) {
  a.read("tokens", tokens, "BN", &batch.tokens);
  a.read("first_child", first_child, "BN", &batch.first_child);
  a.read("next_sibling", next_sibling, "BN", &batch.next_sibling);
  a.require(draft_probs.has_value() == draft_row.has_value(), "draft_probs and draft_row must be given together");
  a.read("draft_probs", draft_probs, "BMV", &batch.draft_probs);
  a.read("draft_row", draft_row, "BN", &batch.draft_row);
  a.size("max_depth", max_depth, 'P');
  a.read("omega", omega, "BP", &batch.omega);
  const int64_t B = batch.B = a.size('B');
  a.sizes("NV", batch.N, batch.V);
  batch.num_draft_rows = draft_probs ? a.size('M') : 0;
  batch.max_depth = max_depth;
  return {a.make({B, max_depth}, &batch.accepted_nodes), a.make({B}, &batch.num_accepted),
          a.make({B}, &batch.next_token), a.make({B}, &batch.tv_excess), a.make({B}, &batch.status)};
}

Tensors<5> couple_tokens(const Tensor& target_probs, const Tensor& draft_probs, const Tensor& tokens,
                         const Tensor& uniforms, const MaybeTensor& omega, const MaybeTensor& neighbors,
                         const MaybeTensor& delta, const MaybeTensor& groups, const std::string& cutoff, int64_t offset,
                         const std::string& residual) {
  Arguments a("couple_tokens", "WVCk");
  CoupleTokens batch = {};
  a.read("target_probs", target_probs, "BWV", &batch.target_probs);
  a.read("draft_probs", draft_probs, "BWV", &batch.draft_probs);
  a.read("tokens", tokens, "BW", &batch.tokens);
  a.read("uniforms", uniforms, "BW2", &batch.uniforms);
  a.read("omega", omega, "BW", &batch.omega);
  a.read("groups", groups, "BWg", &batch.groups);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  const int64_t B = batch.B = a.size('B'), W = batch.W = a.size('W');
  batch.V = a.size('V');
  batch.group_size = groups ? a.size('g') : 0;
  batch.is_relaxed = neighbors || groups;
  Tensor new_tokens = a.make({B, W}, &batch.new_tokens), is_kept = a.make({B, W}, &batch.is_kept);
  Tensor num_kept = a.make({B}, &batch.num_kept);
  Tensor tv_excess = a.make({B, W}, &batch.tv_excess), status = a.make({B, W}, &batch.status);
  RUN(couple_tokens, a, batch);
  return {new_tokens, is_kept, num_kept, tv_excess, status};
}

Tensors<4> verify_chain(const Tensor& target_probs, const Tensor& draft_tokens, const Tensor& cu_num_draft_tokens,
                        const Tensor& uniforms, const MaybeTensor& bonus_tokens, const MaybeTensor& draft_probs,
                        const MaybeTensor& neighbors, const MaybeTensor& delta, const MaybeTensor& omega,
                        const MaybeTensor& greedy, const std::string& cutoff, int64_t offset,
                        const std::string& residual, const std::string& empty, const std::string& rule, int64_t window,
                        double entropy) {
  Arguments a("verify_chain", "VCk");
  VerifyChain batch = {};
  a.read("target_probs", target_probs, "TV", &batch.target_probs);
  batch.draft_tokens = a.read_integers("draft_tokens", draft_tokens, "D");
  batch.ends = a.read_integers("cu_num_draft_tokens", cu_num_draft_tokens, "B");
  a.read("uniforms", uniforms, "U", &batch.uniforms);
  a.read("bonus_tokens", bonus_tokens, "B", &batch.bonus_tokens);
  a.read("draft_probs", draft_probs, "DV", &batch.draft_probs);
  a.read("omega", omega, "B", &batch.omega);
  a.read("greedy", greedy, "B", &batch.greedy);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  batch.rule = a.name<ChainRule>("rule", rule, {"strict", "block", "fly"});
  a.require(batch.rule == ChainRule::strict ||
                (!omega && !neighbors && batch.residual == ResidualRule::optimal && batch.empty == Empty::target),
            "block and fly take no relaxation");
  a.require(batch.rule != ChainRule::block || draft_probs, "block needs draft_probs");
  if (batch.rule == ChainRule::fly) a.count("window", window, 1);
  batch.window = window;
  batch.entropy = static_cast<float>(entropy);
  const int64_t B = batch.B = a.size('B'), D = batch.D = a.size('D');
  batch.V = a.size('V');
  a.require(a.size('U') == D + B && a.size('T') == (bonus_tokens ? D : D + B),
            "there must be a row for each draft and request");
  Tensor num_accepted = a.make({B}, &batch.num_accepted), next_token = a.make({B}, &batch.next_token);
  Tensor tv_excess = a.make({B}, &batch.tv_excess), status = a.make({B}, &batch.status);
  RUN_WITH_SCRATCH(verify_chain, a, batch);
  return {num_accepted, next_token, tv_excess, status};
}

Tensors<4> verify_greedy(const Tensor& target_tokens, const Tensor& tokens, const Tensor& first_child,
                         const Tensor& next_sibling, int64_t max_depth) {
  Arguments a("verify_greedy", "N");
  VerifyGreedy batch = {};
  a.read("target_tokens", target_tokens, "BN", &batch.target_tokens);
  a.read("tokens", tokens, "BN", &batch.tokens);
  a.read("first_child", first_child, "BN", &batch.first_child);
  a.read("next_sibling", next_sibling, "BN", &batch.next_sibling);
  a.size("max_depth", max_depth, 'P');
  const int64_t B = batch.B = a.size('B');
  batch.N = a.size('N');
  batch.max_depth = max_depth;
  Tensor accepted_nodes = a.make({B, max_depth}, &batch.accepted_nodes),
         num_accepted = a.make({B}, &batch.num_accepted);
  Tensor next_token = a.make({B}, &batch.next_token), status = a.make({B}, &batch.status);
  RUN(verify_greedy, a, batch);
  return {accepted_nodes, num_accepted, next_token, status};
}

Verified verify_logits(const Tensor& logits, const MaybeTensor& uncond, const Tensor& tokens, const Tensor& first_child,
                       const Tensor& next_sibling, const MaybeTensor& uniforms, const Tensor& guidance,
                       const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const MaybeTensor& min_p,
                       const MaybeTensor& id_range, const MaybeTensor& draft_probs, const MaybeTensor& draft_row,
                       const MaybeTensor& neighbors, const MaybeTensor& delta, const MaybeTensor& omega,
                       const MaybeTensor& seeds, const MaybeTensor& positions, int64_t first_id, int64_t last_id,
                       const std::string& filters, const std::string& cutoff, int64_t offset,
                       const std::string& residual, const std::string& empty, int64_t max_depth) {
  Arguments a("verify_logits", "NVMCk");
  VerifyLogits batch = {};
  batch.rows = read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  read_randomness(a, batch, uniforms, "BN", seeds, positions, "BN");
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  Verified results = read_tree(a, batch, tokens, first_child, next_sibling, draft_probs, draft_row, omega, max_depth);
  RUN_WITH_SCRATCH(verify_logits, a, batch);
  return results;
}

Verified verify_tree(const Tensor& target_probs, const Tensor& tokens, const Tensor& first_child,
                     const Tensor& next_sibling, const Tensor& uniforms, const MaybeTensor& draft_probs,
                     const MaybeTensor& draft_row, const MaybeTensor& neighbors, const MaybeTensor& delta,
                     const MaybeTensor& omega, const MaybeTensor& greedy, const std::string& cutoff, int64_t offset,
                     const std::string& residual, const std::string& empty, int64_t max_depth) {
  Arguments a("verify_tree", "NVMCk");
  VerifyTree batch = {};
  a.read("target_probs", target_probs, "BNV", &batch.target_probs);
  a.read("uniforms", uniforms, "BN", &batch.uniforms);
  a.read("greedy", greedy, "B", &batch.greedy);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  Verified results = read_tree(a, batch, tokens, first_child, next_sibling, draft_probs, draft_row, omega, max_depth);
  batch.ids.last_id = batch.V;
  RUN_WITH_SCRATCH(verify_tree, a, batch);
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(couple_tokens);
  OP(verify_chain);
  OP(verify_greedy);
  OP(verify_logits);
  OP(verify_tree);
}

}  // namespace specvis
