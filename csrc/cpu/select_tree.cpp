// select_tree on the CPU: each task takes requests. A partial selection finds the candidates to keep; one pass in their
// order then gives them their slots.
#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "../shared/rules.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> select_tree_cpu(const Tensor& tokens,   // (B, M)
                                                           const Tensor& scores,   // (B, M)
                                                           const Tensor& parents,  // (B, M)
                                                           const Tensor& root,     // (B)
                                                           const Tensor& size,     // (B)
                                                           int64_t num_nodes) {
  const int64_t B = tokens.size(0), M = tokens.size(1);
  Tensor node_tokens = specvis::new_empty(tokens, {B, num_nodes});
  Tensor node_parents = specvis::new_empty(parents, {B, num_nodes});
  Tensor source = specvis::new_empty(parents, {B, num_nodes});
  Tensor status = specvis::new_empty(parents, {B});
  const int64_t* all_tokens = tokens.const_data_ptr<int64_t>();
  const float* all_scores = scores.const_data_ptr<float>();
  const int32_t* all_parents = parents.const_data_ptr<int32_t>();
  const int64_t* first = root.const_data_ptr<int64_t>();
  const int32_t* sizes = size.const_data_ptr<int32_t>();
  int64_t* token_out = node_tokens.mutable_data_ptr<int64_t>();
  int32_t* parent_out = node_parents.mutable_data_ptr<int32_t>();
  int32_t* source_out = source.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> best(M);
    std::vector<int32_t> node(M);  // of each candidate, or -1
    for (int64_t b = begin; b < end; ++b) {
      const float* score = all_scores + b * M;
      const int32_t* parent = all_parents + b * M;
      int64_t* nodes_token = token_out + b * num_nodes;
      int32_t* nodes_parent = parent_out + b * num_nodes;
      int32_t* nodes_source = source_out + b * num_nodes;
      std::fill_n(nodes_token, num_nodes, 0);
      std::fill_n(nodes_parent, num_nodes, -2);
      std::fill_n(nodes_source, num_nodes, -1);
      nodes_token[0] = first[b];
      nodes_parent[0] = -1;
      status_out[b] = 0;

      best.clear();
      for (int64_t m = 0; m < M; ++m)
        if (score[m] > -std::numeric_limits<float>::infinity()) best.push_back(m);
      const int64_t budget = std::clamp<int64_t>(sizes[b], 1, num_nodes) - 1;
      const int64_t num_kept = std::min<int64_t>(budget, best.size());
      std::nth_element(best.begin(), best.begin() + num_kept, best.end(), [score](int64_t i, int64_t j) {
        return score[i] > score[j] || (score[i] == score[j] && i < j);
      });
      std::sort(best.begin(), best.begin() + num_kept);

      std::fill(node.begin(), node.end(), -1);
      for (int64_t n = 1; n <= num_kept; ++n) node[best[n - 1]] = static_cast<int32_t>(n);
      for (int64_t n = 1; n <= num_kept; ++n) {
        const int64_t m = best[n - 1], p = parent[m];
        if (p < -1 || p >= m || (p >= 0 && node[p] < 0)) {
          status_out[b] = specvis::kInvalidTree;
          continue;
        }
        nodes_token[n] = all_tokens[b * M + m];
        nodes_parent[n] = p < 0 ? 0 : node[p];
        nodes_source[n] = static_cast<int32_t>(m);
      }
    }
  });
  return {node_tokens, node_parents, source, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("select_tree", SPECVIS_BOX(select_tree, &select_tree_cpu));
}
