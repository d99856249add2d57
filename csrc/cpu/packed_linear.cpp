// packed_linear on the CPU: each task takes some panels of outputs.
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <vector>

#include "products.h"
#include "team.h"

namespace specvis {
namespace {

constexpr int64_t kTaskWork = 1 << 18;  // products; less is not worth another thread

template <class T>
void run(const PackedLinear& batch) {
  const int64_t M = batch.M, K = batch.K, outputs = batch.outputs;
  const auto* const rows = static_cast<const T*>(batch.x);
  const auto* const packed = static_cast<const T*>(batch.weight);
  parallel_for(batch.panels, kTaskWork / (M * K * kPanel + 1) + 1, [&](int64_t first, int64_t last) {
    const bool is_whole = last * kPanel <= outputs;
    const int64_t begin = first * kPanel, end = std::min(last * kPanel, outputs);
    const int64_t stride = is_whole ? outputs : (last - first) * kPanel;
    std::vector<float> padded(is_whole ? 0 : M * stride);
    float* const to = is_whole ? batch.y + begin : padded.data();
    multiply(Product<T>{rows, M, K, packed, first, last, to, stride});
    for (int64_t m = 0; m < M && (batch.bias || !is_whole); ++m)
      for (int64_t o = begin; o < end; ++o)
        batch.y[m * outputs + o] = to[m * stride + o - begin] + (batch.bias ? batch.bias[o] : 0.f);
  });
}

}  // namespace

void packed_linear_cpu(const PackedLinear& batch) {
  (batch.type == FloatType::float32 ? run<float> : run<c10::BFloat16>)(batch);
}

}  // namespace specvis
