#include "products.h"

#include <type_traits>
#include <utility>

#include "vectors.h"

namespace specvis {
namespace {

// sums[m] += x[m] * w for the next inputs, one of float32 or two of bfloat16, of kRows rows and kVectors vectors.
template <int kLanes, bool kHasDots, int kRows, int kVectors>
INLINE void add_products(const float* x, int64_t K, const float* const (&w)[kVectors],
                         Vec<kLanes> (&sums)[kRows][kVectors]) {
  Vec<kLanes> weight[kVectors];
#pragma GCC unroll 16
  for (int c = 0; c < kVectors; ++c) weight[c] = load<kLanes>(w[c]);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int c = 0; c < kVectors; ++c) sums[m][c] += weight[c] * x[m * K];
  }
}

template <int kLanes, bool kHasDots, int kRows, int kVectors>
INLINE void add_products(const c10::BFloat16* x, int64_t K, const c10::BFloat16* const (&w)[kVectors],
                         Vec<kLanes> (&sums)[kRows][kVectors]) {
  using Ints = typename Vector<kLanes>::Ints;
  Ints weight[kVectors];
#pragma GCC unroll 16
  for (int c = 0; c < kVectors; ++c) std::memcpy(&weight[c], w[c], sizeof weight[c]);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    int32_t pair;
    std::memcpy(&pair, x + m * K, sizeof pair);
    if constexpr (kHasDots) {
      const Ints pairs = Ints{} + pair;
#pragma GCC unroll 16
      for (int c = 0; c < kVectors; ++c) add_pairs<kLanes>(sums[m][c], weight[c], pairs);
    } else {
      const float even = bits_as_float(static_cast<uint32_t>(pair) << 16), odd = bits_as_float(pair & 0xffff0000);
#pragma GCC unroll 16
      for (int c = 0; c < kVectors; ++c) {
        sums[m][c] += bits_as_lanes<kLanes>(weight[c] << 16) * even;
        sums[m][c] += bits_as_lanes<kLanes>(weight[c] & int32_t(0xffff0000)) * odd;
      }
    }
  }
}

template <int n>
using Constant = std::integral_constant<int, n>;

// kRows rows and kPanels panels.
template <int kLanes, bool kHasDots, int kRows, int kPanels, class T>
INLINE void multiply(const Product<T>& p, int64_t row, int64_t panel) {
  constexpr int64_t kStep = 4 / sizeof(T);  // inputs at once
  constexpr int kVectors = kPanels * kPanel / kLanes, kInPanel = kPanel / kLanes;
  Vec<kLanes> sums[kRows][kVectors] = {};
  const T* const x = p.x + row * p.K;
  const T* w[kVectors];
  for (int c = 0; c < kVectors; ++c)
    w[c] = p.weight + (panel + c / kInPanel) * p.K * kPanel + c % kInPanel * kLanes * kStep;
  for (int64_t k = 0; k < p.K; k += kStep) {
    add_products<kLanes, kHasDots, kRows, kVectors>(x + k, p.K, w, sums);
#pragma GCC unroll 16
    for (int c = 0; c < kVectors; ++c) {
      w[c] += kPanel * kStep;
      __builtin_prefetch(w[c] + 2048 / sizeof(T));
    }
  }
  float* const y = p.y + row * p.y_stride + (panel - p.first) * kPanel;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int c = 0; c < kVectors; ++c) store<kLanes>(y + m * p.y_stride + c * kLanes, sums[m][c]);
  }
}

// How many rows and panels have their sums in registers, beside the numbers that are multiplied.
template <int kLanes>
constexpr int kMostRows = kLanes == 16  ? 12
                          : kLanes == 8 ? 3
                                        : 2;
template <int kLanes>
constexpr int panels_at_once(int64_t rows) {
  return kLanes < 16 ? 1 : rows <= 3 ? 4 : rows <= 4 ? 3 : rows <= 6 ? 2 : 1;
}

template <int kLanes, bool kHasDots, class T, int... kRows>
INLINE void multiply(const Product<T>& p, std::integer_sequence<int, kRows...>) {
  const auto multiply_rows = [&](auto num_rows, auto num_panels, int64_t row, int64_t end, int64_t panel) INLINED {
    if (end - row == num_rows) multiply<kLanes, kHasDots, num_rows, num_panels>(p, row, panel);
  };
  constexpr int64_t kMost = sizeof...(kRows);
  int64_t panel = p.first;
  if (p.rows <= kMost) {
    const int at_once = panels_at_once<kLanes>(p.rows);
    for (; at_once > 1 && panel + at_once <= p.last; panel += at_once)
      (multiply_rows(Constant<kRows + 1>(), Constant<panels_at_once<kLanes>(kRows + 1)>(), 0, p.rows, panel), ...);
  }
  const int64_t blocks = (p.rows + kMost - 1) / kMost;
  for (; panel < p.last; ++panel) {
    for (int64_t block = 0; block < blocks; ++block)
      (multiply_rows(Constant<kRows + 1>(), Constant<1>(), p.rows * block / blocks, p.rows * (block + 1) / blocks,
                     panel),
       ...);
  }
}

template <int kLanes, bool kHasDots = false, class T>
INLINE void multiply_by(const Product<T>& p) {
  multiply<kLanes, kHasDots>(p, std::make_integer_sequence<int, kMostRows<kLanes>>());
}

FOR_AVX512_BF16 void multiply_avx512_bf16(const Product<c10::BFloat16>& p) { multiply_by<16, true>(p); }
FOR_EACH_MACHINE(template <class T>, multiply, (const Product<T>& p), multiply_by<kLanes>(p))

template <class T>
auto best_multiply() {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (machine() == Machine::avx512_bf16) return &multiply_avx512_bf16;
  }
  return BEST_FUNCTION(multiply, <T>);
}

}  // namespace

template <class T>
void multiply(const Product<T>& product) {
  static const auto best = best_multiply<T>();
  best(product);
}
template void multiply(const Product<float>&);
template void multiply(const Product<c10::BFloat16>&);

}  // namespace specvis
