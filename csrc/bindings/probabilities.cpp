// Ops on rows of logits or probabilities.
#include "bindings.h"

namespace specvis {
namespace {

Tensors<3> draft_children(const Tensor& logits, const MaybeTensor& uncond, const MaybeTensor& uniforms,
                          const Tensor& guidance, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                          const MaybeTensor& min_p, const MaybeTensor& seeds, const MaybeTensor& positions,
                          const MaybeTensor& id_range, int64_t first_id, int64_t last_id, const std::string& filters,
                          int64_t num_children) {
  Arguments a("draft_children", "FVK");
  DraftChildren batch = {};
  batch.rows = read_rows(a, 'F', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  a.size("num_children", num_children, 'K');
  read_randomness(a, batch, uniforms, "BFK", seeds, positions, "BF");
  const int64_t B = a.size('B'), F = a.size('F'), K = batch.K = num_children;
  a.require(F * K <= kMost, "there are too many candidates");
  Tensor tokens = a.make({B, F, K}, &batch.tokens), probs = a.make({B, F, a.size('V')}, &batch.probs);
  Tensor status = a.make({B, F}, &batch.status);
  RUN(draft_children, a, batch);
  return {tokens, probs, status};
}

Tensors<9> draft_frontier(const Tensor& logits, const MaybeTensor& uncond, const Tensor& scores,
                          const Tensor& ancestors, const Tensor& candidates, const Tensor& width, const Tensor& depth,
                          const Tensor& guidance, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                          const MaybeTensor& min_p, const MaybeTensor& id_range, int64_t first_id, int64_t last_id,
                          const std::string& filters, int64_t num_children, int64_t level, int64_t first_node,
                          int64_t first_candidate) {
  Arguments a("draft_frontier", "FVWK");
  DraftFrontier batch = {};
  batch.rows = read_rows(a, 'F', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  a.read("scores", scores, "BF", &batch.scores);
  a.read("ancestors", ancestors, "BFW", &batch.ancestors);
  a.read("candidates", candidates, "BF", &batch.candidates);
  a.read("width", width, "B", &batch.width);
  a.read("depth", depth, "B", &batch.depth);
  a.size("num_children", num_children, 'K');
  a.count("level", level, 1);
  a.count("first_node", first_node, 1);
  a.count("first_candidate", first_candidate, 0);
  const int64_t B = a.size('B'), F = a.size('F'), K = batch.K = num_children, W = batch.W = a.size('W');
  a.require(F * K + first_candidate <= kMost, "there are too many candidates");
  a.require(first_node + K <= 64 * W, "ancestors must have a word for each 64 nodes");
  batch.level = level;
  batch.first_node = first_node;
  batch.first_candidate = first_candidate;
  Tensor child_tokens = a.make({B, F * K}, &batch.child_tokens), child_scores = a.make({B, F * K}, &batch.child_scores);
  Tensor child_parents = a.make({B, F * K}, &batch.child_parents), tokens = a.make({B, K}, &batch.tokens);
  Tensor frontier_scores = a.make({B, K}, &batch.frontier_scores), rows = a.make({B, K}, &batch.parent_rows);
  Tensor frontier_ancestors = a.make({B, K, W}, &batch.frontier_ancestors);
  Tensor frontier_candidates = a.make({B, K}, &batch.frontier_candidates), status = a.make({B, F}, &batch.status);
  RUN(draft_frontier, a, batch);
  return {child_tokens, child_scores,       child_parents,       tokens, frontier_scores,
          rows,         frontier_ancestors, frontier_candidates, status};
}

Tensors<3> draw_children(const Tensor& draft_probs, const MaybeTensor& uniforms, const MaybeTensor& seeds,
                         const MaybeTensor& positions, int64_t num_children) {
  Arguments a("draw_children", "FVK");
  DrawChildren batch = {};
  a.read("draft_probs", draft_probs, "BFV", &batch.draft_probs);
  a.size("num_children", num_children, 'K');
  read_randomness(a, batch, uniforms, "BFK", seeds, positions, "BF");
  const int64_t B = a.size('B'), F = batch.F = a.size('F'), K = batch.K = num_children;
  a.require(F * K <= kMost, "there are too many candidates");
  batch.R = B * F;
  batch.V = a.size('V');
  Tensor tokens = a.make({B, F, K}, &batch.tokens), found = a.make({B, F}, &batch.num_children);
  Tensor status = a.make({B, F}, &batch.status);
  RUN(draw_children, a, batch);
  return {tokens, found, status};
}

Tensors<4> draw_tokens(const Tensor& logits, const MaybeTensor& uncond, const Tensor& guidance,
                       const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const MaybeTensor& min_p,
                       const Tensor& seeds, const Tensor& positions, const MaybeTensor& id_range, int64_t first_id,
                       int64_t last_id, const std::string& filters, const MaybeTensor& guesses, int64_t ahead) {
  Arguments a("draw_tokens", "NV");
  DrawTokens batch = {};
  batch.rows = read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  a.read("seeds", seeds, "B", &batch.seeds);
  a.read("positions", positions, "BN", &batch.positions);
  a.read("guesses", guesses, "BN", &batch.guesses);
  a.count("ahead", ahead, 0);
  batch.ahead = ahead;
  const int64_t B = a.size('B'), N = a.size('N');
  Tensor tokens = a.make({B, N}, &batch.tokens), num_accepted = a.make({B}, &batch.num_accepted);
  Tensor ahead_tokens = a.make({B, N}, &batch.ahead_tokens), status = a.make({B, N}, &batch.status);
  RUN(draw_tokens, a, batch);
  return {tokens, num_accepted, ahead_tokens, status};
}

Tensors<4> expand_tree(const Tensor& draft_probs, const Tensor& scores, const Tensor& width, int64_t num_children) {
  Arguments a("expand_tree", "FVK");
  ExpandTree batch = {};
  a.read("draft_probs", draft_probs, "BFV", &batch.draft_probs);
  a.read("scores", scores, "BF", &batch.scores);
  a.read("width", width, "B", &batch.width);
  a.size("num_children", num_children, 'K');
  const int64_t B = batch.B = a.size('B'), F = batch.F = a.size('F'), K = batch.num_children = num_children;
  a.require(F * K <= kMost, "there are too many candidates");
  batch.V = a.size('V');
  Tensor tokens = a.make({B, F, K}, &batch.tokens), child_scores = a.make({B, F, K}, &batch.child_scores);
  Tensor frontier = a.make({B, K}, &batch.frontier), status = a.make({B, F}, &batch.status);
  RUN(expand_tree, a, batch);
  return {tokens, child_scores, frontier, status};
}

Tensors<2> guided_probs(const Tensor& logits, const MaybeTensor& uncond, const Tensor& guidance,
                        const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const MaybeTensor& min_p,
                        const MaybeTensor& id_range, int64_t first_id, int64_t last_id, const std::string& filters) {
  Arguments a("guided_probs", "V");
  GuidedProbs batch = {};
  batch.rows = read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  const int64_t B = a.size('B'), N = a.size('N');
  Tensor probs = a.make({B, N, a.size('V')}, &batch.probs), status = a.make({B, N}, &batch.status);
  RUN(guided_probs, a, batch);
  return {probs, status};
}

Tensors<3> neighborhood_sum(const Tensor& probs, const Tensor& tokens, const Tensor& neighbors, const Tensor& delta,
                            const std::string& cutoff, int64_t offset) {
  Arguments a("neighborhood_sum", "VCk");
  NeighborhoodSum batch = {};
  a.read("probs", probs, "RV", &batch.probs);
  a.read("tokens", tokens, "R", &batch.tokens);
  batch.neighbors = a.read_neighbors(neighbors, offset);
  a.read("delta", delta, "R", &batch.delta);
  batch.cutoff = a.name<Cutoff>("cutoff", cutoff, {"tvd", "ratio", "jsd"});
  const int64_t R = batch.R = a.size('R');
  batch.V = a.size('V');
  Tensor relaxed_mass = a.make({R}, &batch.relaxed_mass), num_neighbors = a.make({R}, &batch.num_neighbors);
  Tensor status = a.make({R}, &batch.status);
  RUN(neighborhood_sum, a, batch);
  return {relaxed_mass, num_neighbors, status};
}

Tensor philox_uniforms(const Tensor& seeds, const Tensor& positions, int64_t n, int64_t stream, int64_t turn) {
  Arguments a("philox_uniforms", "");
  PhiloxUniforms batch = {};
  a.read("seeds", seeds, "B", &batch.seeds);
  a.read("positions", positions, "BL", &batch.positions);
  a.size("n", n, 'N');
  a.count("stream", stream, 0);
  a.count("turn", turn, 0);
  a.sizes("BL", batch.B, batch.L);
  batch.n = n, batch.stream = static_cast<uint32_t>(stream), batch.turn = static_cast<uint32_t>(turn);
  Tensor uniforms = a.make({batch.B, batch.L, n}, &batch.uniforms);
  RUN(philox_uniforms, a, batch);
  return uniforms;
}

Tensors<2> sample_residual(const Tensor& target_probs, const MaybeTensor& draft_probs, const Tensor& uniforms,
                           const MaybeTensor& omega) {
  Arguments a("sample_residual", "V");
  SampleResidual batch = {};
  a.read("target_probs", target_probs, "RV", &batch.target_probs);
  a.read("draft_probs", draft_probs, "RV", &batch.draft_probs);
  a.read("uniforms", uniforms, "R", &batch.uniforms);
  a.read("omega", omega, "R", &batch.omega);
  const int64_t R = batch.R = a.size('R');
  batch.V = a.size('V');
  Tensor tokens = a.make({R}, &batch.tokens), status = a.make({R}, &batch.status);
  RUN(sample_residual, a, batch);
  return {tokens, status};
}

Tensors<3> token_log_probs(const Tensor& logits, const MaybeTensor& uncond, const Tensor& guidance,
                           const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                           const MaybeTensor& min_p, const Tensor& tokens, const MaybeTensor& rows,
                           const MaybeTensor& id_range, int64_t first_id, int64_t last_id, const std::string& filters) {
  Arguments a("token_log_probs", "NV");
  TokenLogProbs batch = {};
  batch.rows = read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                         last_id, filters);
  const char* const sizes = rows ? "BK" : "BN";
  a.read("tokens", tokens, sizes, &batch.tokens);
  a.read("rows", rows, sizes, &batch.row_numbers);
  const int64_t B = a.size('B'), K = batch.K = a.size(sizes[1]);
  Tensor sampled = a.make({B, K}, &batch.sampled), full = a.make({B, K}, &batch.full);
  Tensor status = a.make({B, K}, &batch.status);
  RUN(token_log_probs, a, batch);
  return {sampled, full, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(draft_children);
  OP(draft_frontier);
  OP(draw_children);
  OP(draw_tokens);
  OP(expand_tree);
  OP(guided_probs);
  OP(neighborhood_sum);
  OP(philox_uniforms);
  OP(sample_residual);
  OP(token_log_probs);
}

}  // namespace specvis
