// tree_from_paths on the CPU: each task takes requests, whose paths it reads once.
#include <algorithm>

#include "../arguments.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor tree_from_paths_cpu(const Tensor& paths,  // (B, L, D)
                           int64_t num_nodes) {
  const int64_t B = paths.size(0), L = paths.size(1), D = paths.size(2), N = num_nodes;
  Tensor parents = specvis::new_empty(paths, {B, N}, ScalarType::Int);
  const int64_t* all_paths = paths.const_data_ptr<int64_t>();
  int32_t* parents_out = parents.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* parent = parents_out + b * N;
      std::fill_n(parent, N, -2);
      bool wrong = false;
      for (int64_t i = 0; i < L * D; ++i) {
        const int64_t* node = all_paths + b * L * D + i;
        wrong |= *node >= N || (*node == 0 && i % D > 0);
        if (i % D == 0 || *node < 1 || *node >= N) continue;
        const auto above = static_cast<int32_t>(std::clamp<int64_t>(node[-1], -1, N));
        parent[*node] = parent[*node] == -2 || parent[*node] == above ? above : static_cast<int32_t>(N);
      }
      parent[0] = wrong ? static_cast<int32_t>(N) : -1;
    }
  });
  return parents;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("tree_from_paths", SPECVIS_BOX(tree_from_paths, &tree_from_paths_cpu));
}
