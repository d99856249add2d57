// What is kept of a step: cache entries and tokens.
#include <vector>

#include "bindings.h"

namespace specvis {
namespace {

Tensor commit_kv(const std::vector<Tensor>& caches, const Tensor& accepted_nodes, const Tensor& num_accepted,
                 const Tensor& lengths, const MaybeTensor& start, const MaybeTensor& slots, int64_t row_dim,
                 int64_t column_dim) {
  Arguments a("commit_kv", "T");
  a.require(!caches.empty(), "caches", "must be at least one tensor");
  const Tensor& first = caches[0];
  std::vector<char*> data;
  for (const Tensor& cache : caches) {
    const auto sizes = cache.sizes(), first_sizes = first.sizes();
    a.require(cache.scalar_type() == first.scalar_type() && sizes.size() == first_sizes.size() &&
                  std::equal(sizes.begin(), sizes.end(), first_sizes.begin()),
              "caches", "must have one shape and dtype");
    data.push_back(static_cast<char*>(a.write("caches", cache)));
  }
  CommitKv batch = {};
  Moves& moves = batch.moves;
  a.read("accepted_nodes", accepted_nodes, "BP", &moves.accepted_nodes);
  a.read("num_accepted", num_accepted, "B", &moves.num_accepted);
  a.read("lengths", lengths, "B", &moves.lengths);
  a.read("start", start, "B", &moves.start);
  a.read("slots", slots, "RT", &moves.slots);
  if (!start) moves.start = moves.lengths;
  const auto bytes = static_cast<int64_t>(first.element_size());
  a.require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, "caches must have 1, 2, 4 or 8 bytes an element");
  a.require(row_dim >= -1 && row_dim < column_dim && column_dim < first.dim() && first.size(column_dim) >= 1,
            "row_dim and column_dim are no dimensions of the caches, in this order");
  a.require(slots.has_value() == (row_dim == -1), "row_dim must be -1 with slots, and only then");
  moves.B = a.size('B');
  moves.P = a.size('P');
  moves.R = slots ? a.size('R') : first.size(row_dim);
  moves.T = slots ? a.size('T') : first.size(column_dim);
  a.require_rows_of_requests(moves.R);
  set_layout(moves, [&](int64_t d) { return first.size(d); }, first.dim(), row_dim, column_dim, bytes);
  Tensor new_lengths = a.make({moves.B}, &batch.new_lengths);
  for (char* cache : data) {
    batch.caches[batch.num_caches++] = cache;
    if (batch.num_caches < kCachesALaunch && cache != data.back()) continue;
    RUN(commit_kv, a, batch);
    batch.num_caches = 0;
    batch.new_lengths = nullptr;
  }
  return new_lengths;
}

Tensors<3> commit_tokens(const Tensor& tokens, const Tensor& counts, const Tensor& node_tokens,
                         const Tensor& accepted_nodes, const Tensor& num_accepted, const Tensor& next_token,
                         const MaybeTensor& failed, const MaybeTensor& target_forwards,
                         const MaybeTensor& num_accepted_at, const MaybeTensor& num_drafted_at,
                         const MaybeTensor& tv_excess, const MaybeTensor& step_excess, const MaybeTensor& status,
                         const MaybeTensor& depth) {
  Arguments a("commit_tokens", "CLN");
  for (const MaybeTensor* account :
       {&target_forwards, &num_accepted_at, &num_drafted_at, &tv_excess, &step_excess, &status, &depth})
    a.require(account->has_value() == failed.has_value(), "its accounts must be given together");
  CommitTokens batch = {};
  a.write("tokens", tokens, "BC", &batch.tokens);
  a.write("counts", counts, "B", &batch.counts);
  a.write("failed", failed, "B", &batch.failed);
  a.write("target_forwards", target_forwards, "B", &batch.target_forwards);
  a.write("num_accepted_at", num_accepted_at, "BL", &batch.num_accepted_at);
  a.write("num_drafted_at", num_drafted_at, "BL", &batch.num_drafted_at);
  a.write("tv_excess", tv_excess, "B", &batch.tv_excess);
  a.read("node_tokens", node_tokens, "BN", &batch.node_tokens);
  a.read("accepted_nodes", accepted_nodes, "BP", &batch.accepted_nodes);
  a.read("num_accepted", num_accepted, "B", &batch.num_accepted);
  a.read("next_token", next_token, "B", &batch.next_token);
  a.read("step_excess", step_excess, "B", &batch.step_excess);
  a.read("status", status, "B", &batch.status);
  a.read("depth", depth, "B", &batch.depth);
  const int64_t B = batch.B = a.size('B'), P = batch.P = a.size('P');
  if (!failed) a.size("tokens", a.size('C'), 'L');
  a.sizes("CLN", batch.C, batch.L, batch.N);
  a.require(batch.C >= batch.L, "tokens has too few columns");
  Tensor new_tokens = a.make({B, P + 1}, &batch.new_tokens), nodes = a.make({B, P + 1}, &batch.nodes);
  Tensor num_new = a.make({B}, &batch.num_new);
  RUN(commit_tokens, a, batch);
  return {new_tokens, nodes, num_new};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(commit_kv);
  OP(commit_tokens);
}

}  // namespace specvis
