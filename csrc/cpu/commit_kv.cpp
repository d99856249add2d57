// commit_kv on the CPU: each task moves the columns of some rows.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "../shared/moves.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTaskBytes = 1 << 17;  // less is not worth another thread

Tensor commit_kv_cpu(std::vector<Tensor> caches, const Tensor& accepted_nodes, const Tensor& num_accepted,
                     const Tensor& lengths, const std::optional<Tensor>& start, const std::optional<Tensor>& slots,
                     int64_t row_dim, int64_t column_dim) {
  const int64_t B = accepted_nodes.size(0);
  const Tensor& first = caches[0];
  Tensor new_lengths = specvis::new_empty(lengths, {B});
  specvis::Moves moves = {};
  moves.B = B;
  moves.P = accepted_nodes.size(1);
  moves.R = slots ? slots->size(0) : first.size(row_dim);
  moves.T = slots ? slots->size(1) : first.size(column_dim);
  moves.accepted_nodes = accepted_nodes.const_data_ptr<int32_t>();
  moves.num_accepted = num_accepted.const_data_ptr<int32_t>();
  moves.lengths = lengths.const_data_ptr<int64_t>();
  moves.start = start ? start->const_data_ptr<int64_t>() : moves.lengths;
  moves.slots = slots ? slots->const_data_ptr<int64_t>() : nullptr;
  specvis::set_layout(
      moves, [&](int64_t d) { return first.size(d); }, first.dim(), row_dim, column_dim, first.element_size());

  std::vector<char> is_valid(B);
  std::vector<char*> data(caches.size());
  for (size_t c = 0; c < caches.size(); ++c) data[c] = static_cast<char*>(caches[c].mutable_data_ptr());
  int64_t* new_length = new_lengths.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < B; ++b) {
    is_valid[b] = moves.is_valid(b);
    new_length[b] = moves.new_length(b);
  }
  const int64_t runs = moves.num_runs(), grain = kTaskBytes / ((moves.P + 1) * moves.inner + 1) + 1;
  specvis::parallel_for(0, runs * static_cast<int64_t>(caches.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* cache = data[i / runs];
      const int64_t run = i % runs, b = moves.row(run) % B;
      if (!is_valid[b]) continue;
      for (int64_t n = 0; n <= moves.num_accepted[b]; ++n) {
        const int64_t from = moves.source(b, n), to = moves.target(b, n);
        if (from == to) continue;
        std::memcpy(cache + moves.offset(run, to), cache + moves.offset(run, from), moves.inner);
      }
    }
  });
  return new_lengths;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("commit_kv", SPECVIS_BOX(commit_kv, &commit_kv_cpu)); }
