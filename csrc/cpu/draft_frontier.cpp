// draft_frontier on the CPU: first each task takes rows of logits and writes their nodes' children; then each task
// takes requests.
#include "expand_tree.h"
#include "guided_row.h"
#include "team.h"

namespace specvis {
namespace {

// Writes the children of node r, and returns its status.
int32_t find_children(const DraftFrontier& batch, int64_t r, GuidedRow& guided, ChildFinder& finder) {
  const int64_t K = batch.K;
  int64_t* const tokens = batch.child_tokens + r * K;
  float* const scores = batch.child_scores + r * K;
  const float score = batch.scores[r];
  if (!(score > -kInf) || !guided.read(batch.rows, r)) {
    no_children(K, tokens, scores);
    return score > -kInf ? kInvalidRow : 0;
  }
  finder(guided.row.exponentials(), guided.row.size(), guided.total, score,
         clamped_width(batch.width[r / batch.rows.N], K), K, tokens, scores);
  for (int64_t k = 0; k < K; ++k)
    if (scores[k] > -kInf) tokens[k] = guided.row.id(tokens[k]);
  return 0;
}

}  // namespace

void draft_frontier_cpu(const DraftFrontier& batch) {
  const int64_t B = batch.rows.B, F = batch.rows.N, V = batch.rows.V, K = batch.K, W = batch.W;
  parallel_for(B * F, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    GuidedRow guided(V);
    ChildFinder finder;
    for (int64_t r = begin; r < end; ++r) batch.status[r] = find_children(batch, r, guided, finder);
  });
  parallel_for(B, std::max<int64_t>(1, 4096 / (F * K)), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    std::vector<int32_t> frontier(K);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first_child = b * F * K;
      find_frontier(batch.child_scores + first_child, F * K, clamped_width(batch.width[b], K), K, scratch,
                    frontier.data());
      for (int64_t f = 0; f < F; ++f)
        std::fill_n(batch.child_parents + first_child + f * K, K, batch.candidates[b * F + f]);
      for (int64_t k = 0; k < K; ++k) {
        const bool is_used = frontier[k] >= 0 && batch.depth[b] > batch.level;
        const int64_t chosen = std::max(frontier[k], 0), row = chosen / K, slot = b * K + k,
                      node = batch.first_node + k;
        const int64_t* const words = batch.ancestors + (b * F + row) * W;
        int64_t* const words_out = batch.frontier_ancestors + slot * W;
        batch.tokens[slot] = batch.child_tokens[first_child + chosen];
        batch.frontier_scores[slot] = is_used ? batch.child_scores[first_child + chosen] : -kInf;
        batch.parent_rows[slot] = row;
        batch.frontier_candidates[slot] = is_used ? static_cast<int32_t>(batch.first_candidate + chosen) : -1;
        for (int64_t w = 0; w < W; ++w) words_out[w] = is_used ? words[w] : 0;
        if (is_used) words_out[node / 64] |= static_cast<int64_t>(uint64_t{1} << node % 64);
      }
    }
  });
}

}  // namespace specvis
