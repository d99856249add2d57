// tree_from_mask on the CPU: each task takes requests. A row is compared with its parent's.
#include "../arguments.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor tree_from_mask_cpu(const Tensor& mask) {  // (B, N, N)
  const int64_t B = mask.size(0), N = mask.size(1);
  Tensor parents = specvis::new_empty(mask, {B, N}, ScalarType::Int);
  const bool* sees = mask.const_data_ptr<bool>();
  int32_t* parents_out = parents.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * N; i < end * N; ++i) {
      const int64_t n = i % N;
      const bool *row = sees + i * N, *tree = sees + (i - n) * N;
      int64_t parent = N - 1;
      while (parent >= 0 && (!row[parent] || parent == n)) --parent;
      bool wrong = parent > n;
      for (int64_t c = 0; c < N && parent >= 0 && !wrong; ++c) {
        wrong = (row[c] && c != n) != (tree[parent * N + c] || c == parent);
      }
      parents_out[i] = static_cast<int32_t>(parent < 0 ? (n == 0 ? -1 : -2) : wrong ? N : parent);
    }
  });
  return parents;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("tree_from_mask", SPECVIS_BOX(tree_from_mask, &tree_from_mask_cpu));
}
