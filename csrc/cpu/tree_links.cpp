// tree_links on the CPU: each task takes requests. One pass over the nodes meets parents before their children.
#include <algorithm>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "../shared/rules.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_links_cpu(const Tensor& parents) {  // (B, N)
  const int64_t B = parents.size(0), N = parents.size(1), W = (N + 63) / 64;
  Tensor ancestors = specvis::new_empty(parents, {B, N, W}, ScalarType::Long);
  Tensor depth = specvis::new_empty(parents, {B, N});
  Tensor first_child = specvis::new_empty(parents, {B, N});
  Tensor next_sibling = specvis::new_empty(parents, {B, N});
  Tensor status = specvis::new_empty(parents, {B});
  const int32_t* all_parents = parents.const_data_ptr<int32_t>();
  int64_t* ancestors_out = ancestors.mutable_data_ptr<int64_t>();
  int32_t* depth_out = depth.mutable_data_ptr<int32_t>();
  int32_t* child_out = first_child.mutable_data_ptr<int32_t>();
  int32_t* sibling_out = next_sibling.mutable_data_ptr<int32_t>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 16, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> youngest(N);  // the last child of each node so far
    for (int64_t b = begin; b < end; ++b) {
      const int32_t* parent = all_parents + b * N;
      int64_t* words = ancestors_out + b * N * W;
      int32_t* depths = depth_out + b * N;
      int32_t* child = child_out + b * N;
      int32_t* sibling = sibling_out + b * N;
      status_out[b] = 0;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t p = parent[n];
        depths[n] = child[n] = sibling[n] = -1;
        std::fill_n(words + n * W, W, 0);
        const bool used = n == 0 ? p == -1 : p >= 0 && p < n && depths[p] >= 0;
        if (!used) {
          if (n == 0 || p != -2) status_out[b] = specvis::kInvalidTree;
          continue;
        }
        depths[n] = 0;
        if (n > 0) {
          depths[n] = depths[p] + 1;
          std::copy_n(words + p * W, W, words + n * W);
          (child[p] < 0 ? child[p] : sibling[youngest[p]]) = static_cast<int32_t>(n);
          youngest[p] = static_cast<int32_t>(n);
        }
        words[n * W + n / 64] |= static_cast<int64_t>(uint64_t{1} << n % 64);
      }
    }
  });
  return {ancestors, depth, first_child, next_sibling, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("tree_links", SPECVIS_BOX(tree_links, &tree_links_cpu)); }
