// select_tree on the CPU: threads take requests; a partial selection, then one pass in the candidates' order.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "rules.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> select_tree_cpu(
    const Tensor& tokens,   // (B, M)
    const Tensor& scores,   // (B, M)
    const Tensor& parents,  // (B, M)
    const Tensor& root,     // (B)
    const Tensor& size,     // (B)
    int64_t N) {
  const int64_t B = tokens.size(0), M = tokens.size(1);
  Tensor node_tokens = torch::stable::new_empty(tokens, {B, N});
  Tensor node_parents = torch::stable::new_empty(parents, {B, N});
  Tensor source = torch::stable::new_empty(parents, {B, N});
  Tensor status = torch::stable::new_empty(parents, {B});
  const int64_t* all_tokens = tokens.const_data_ptr<int64_t>();
  const float* all_scores = scores.const_data_ptr<float>();
  const int32_t* all_parents = parents.const_data_ptr<int32_t>();
  const int64_t* first = root.const_data_ptr<int64_t>();
  const int32_t* wanted = size.const_data_ptr<int32_t>();
  int64_t* token_out = node_tokens.mutable_data_ptr<int64_t>();
  int32_t* parent_out = node_parents.mutable_data_ptr<int32_t>();
  int32_t* source_out = source.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> best(M);
    std::vector<int32_t> node(M);  // -1: not kept
    for (int64_t b = begin; b < end; ++b) {
      const float* score = all_scores + b * M;
      const int32_t* parent = all_parents + b * M;
      int64_t* nodes_token = token_out + b * N;
      int32_t* nodes_parent = parent_out + b * N;
      int32_t* nodes_source = source_out + b * N;
      std::fill_n(nodes_token, N, 0);
      std::fill_n(nodes_parent, N, -2);
      std::fill_n(nodes_source, N, -1);
      nodes_token[0] = first[b];
      nodes_parent[0] = -1;
      status_out[b] = 0;

      best.clear();
      for (int64_t m = 0; m < M; ++m)
        if (score[m] > -std::numeric_limits<float>::infinity()) best.push_back(m);
      const int64_t room = std::clamp<int64_t>(wanted[b], 1, N) - 1;
      const int64_t kept = std::min<int64_t>(room, best.size());
      std::nth_element(best.begin(), best.begin() + kept, best.end(), [score](int64_t i, int64_t j) {
        return score[i] > score[j] || (score[i] == score[j] && i < j);
      });
      std::sort(best.begin(), best.begin() + kept);

      std::fill(node.begin(), node.end(), -1);
      for (int64_t n = 1; n <= kept; ++n) node[best[n - 1]] = static_cast<int32_t>(n);
      for (int64_t n = 1; n <= kept; ++n) {
        const int64_t m = best[n - 1], above = parent[m];
        if (above < -1 || above >= m || (above >= 0 && node[above] < 0)) {
          status_out[b] = specvis::kInvalidTree;
          continue;
        }
        nodes_token[n] = all_tokens[b * M + m];
        nodes_parent[n] = above < 0 ? 0 : node[above];
        nodes_source[n] = static_cast<int32_t>(m);
      }
    }
  });
  return {node_tokens, node_parents, source, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("select_tree", TORCH_BOX(&select_tree_cpu)); }
