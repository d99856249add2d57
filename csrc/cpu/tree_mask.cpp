// tree_mask on the CPU: each task takes requests. Whole ranges are filled at once; the rest follows the set bits.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "../arguments.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One request's mask as a flat array. All entries are hidden first; then some are made visible.
template <class T>
struct Dense {
  T* out;
  T visible;
  void show(int64_t i) { out[i] = visible; }
  void show(int64_t begin, int64_t end) { std::fill(out + begin, out + end, visible); }
};

struct Packed {
  uint8_t* out;
  void show(int64_t i) { out[i / 8] |= 1 << i % 8; }
  void show(int64_t begin, int64_t end) {
    for (; begin < end && begin % 8; ++begin) show(begin);
    const int64_t bytes = (end - begin) / 8;
    if (bytes > 0) std::memset(out + begin / 8, 0xff, bytes);
    for (begin += bytes * 8; begin < end; ++begin) show(begin);
  }
};

template <class Mask>
void fill(Mask mask, const uint64_t* ancestors, int64_t N, int64_t W, int64_t length, int64_t start, int64_t columns,
          int64_t row_entries) {
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = n * row_entries;
    const auto show_node = [&](int64_t node) {
      const int64_t column = start + node;
      if (node < N && column >= 0 && column < columns) mask.show(row + column);
    };
    bool used = false;
    for (int64_t w = 0; w < W; ++w)
      for (uint64_t bits = ancestors[n * W + w]; bits; bits &= bits - 1) {
        const int64_t node = w * 64 + __builtin_ctzll(bits);
        used |= node < N;
        show_node(node);
      }
    if (used)
      mask.show(row, row + std::clamp<int64_t>(length, 0, columns));
    else
      show_node(n);
  }
}

Tensor tree_mask_cpu(const Tensor& ancestors,               // (B, N, W)
                     const std::optional<Tensor>& lengths,  // (B)
                     const std::optional<Tensor>& start,    // (B)
                     std::string form, int64_t columns, ScalarType dtype) {
  const int64_t B = ancestors.size(0), N = ancestors.size(1), W = ancestors.size(2);
  const bool rows = form == "packed_rows", packed = rows || form == "packed", additive = form == "additive";
  const int64_t row_entries = rows ? (columns + 7) / 8 * 8 : columns;            // padding counted
  const int64_t entries = packed ? (N * row_entries + 7) / 8 : N * row_entries;  // of one request
  const ScalarType type = packed ? ScalarType::Byte : additive ? dtype : ScalarType::Bool;
  Tensor mask = rows     ? specvis::new_empty(ancestors, {B, N, row_entries / 8}, type)
                : packed ? specvis::new_empty(ancestors, {B, entries}, type)
                         : specvis::new_empty(ancestors, {B, N, columns}, type);
  const uint64_t* words = static_cast<const uint64_t*>(ancestors.const_data_ptr());
  const int32_t* length = lengths ? lengths->const_data_ptr<int32_t>() : nullptr;
  const int64_t* first = start ? start->const_data_ptr<int64_t>() : nullptr;
  void* out = mask.mutable_data_ptr();

  const auto run = [&](auto hidden, auto mask_at) {
    using T = decltype(hidden);
    specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        T* entry = static_cast<T*>(out) + b * entries;
        std::fill_n(entry, entries, hidden);
        const int64_t cached = length ? length[b] : 0;
        const int64_t column = first ? std::clamp(first[b], -N, columns) : cached;  // further away nothing changes
        fill(mask_at(entry), words + b * N * W, N, W, cached, column, columns, row_entries);
      }
    });
  };
  if (packed)
    run(uint8_t{0}, [](uint8_t* at) { return Packed{at}; });
  else if (!additive)
    run(uint8_t{0}, [](uint8_t* at) { return Dense<uint8_t>{at, 1}; });
  else if (dtype == ScalarType::Float)
    run(-std::numeric_limits<float>::infinity(), [](float* at) { return Dense<float>{at, 0}; });
  else if (dtype == ScalarType::Half)
    run(uint16_t{0xfc00}, [](uint16_t* at) { return Dense<uint16_t>{at, 0}; });  // the bits of -inf
  else
    run(uint16_t{0xff80}, [](uint16_t* at) { return Dense<uint16_t>{at, 0}; });
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("tree_mask", SPECVIS_BOX(tree_mask, &tree_mask_cpu)); }
