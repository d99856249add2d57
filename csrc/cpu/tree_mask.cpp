// tree_mask on the CPU: each task takes requests. Whole ranges are filled at once; then each set bit is followed.
#include <algorithm>
#include <cstring>
#include <limits>

#include "../shared/params.h"
#include "team.h"

namespace specvis {
namespace {

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
void fill(Mask mask, const int64_t* ancestors, int64_t N, int64_t W, int64_t length, int64_t start, int64_t columns,
          int64_t row_entries) {
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = n * row_entries;
    const auto show_node = [&](int64_t node) {
      const int64_t column = start + node;
      if (node < N && column >= 0 && column < columns) mask.show(row + column);
    };
    bool used = false;
    for (int64_t w = 0; w < W; ++w)
      for (auto bits = static_cast<uint64_t>(ancestors[n * W + w]); bits; bits &= bits - 1) {
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

}  // namespace

void tree_mask_cpu(const TreeMask& batch) {
  const int64_t N = batch.N, W = (N + 63) / 64, columns = batch.columns, row_entries = batch.row_bits;
  const int64_t entries = batch.form == Form::bits ? (N * row_entries + 7) / 8 : N * columns;  // entries of one request
  const auto run = [&](auto hidden, auto mask_at) {
    using T = decltype(hidden);
    parallel_for(batch.B, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        T* const entry = static_cast<T*>(batch.mask) + b * entries;
        std::fill_n(entry, entries, hidden);
        const int64_t cached = batch.lengths ? batch.lengths[b] : 0;
        const int64_t column = batch.start ? std::clamp(batch.start[b], -N, columns) : cached;  // beyond: no change
        fill(mask_at(entry), batch.ancestors + b * N * W, N, W, cached, column, columns, row_entries);
      }
    });
  };
  switch (batch.form) {
    case Form::bits: return run(uint8_t{0}, [](uint8_t* at) { return Packed{at}; });
    case Form::bytes: return run(uint8_t{0}, [](uint8_t* at) { return Dense<uint8_t>{at, 1}; });
    case Form::float32:
      return run(-std::numeric_limits<float>::infinity(), [](float* at) { return Dense<float>{at, 0}; });
    case Form::float16:  // the bits of -inf
      return run(uint16_t{0xfc00}, [](uint16_t* at) { return Dense<uint16_t>{at, 0}; });
    case Form::bfloat16: return run(uint16_t{0xff80}, [](uint16_t* at) { return Dense<uint16_t>{at, 0}; });
  }
}

}  // namespace specvis
