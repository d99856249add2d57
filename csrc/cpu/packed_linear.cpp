// packed_linear on the CPU: each task takes some panels of outputs.
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "products.h"
#include "team.h"

namespace {

using specvis::kPanel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTaskWork = 1 << 18;  // products; less is not worth another thread

template <class T>
void run(const Tensor& x, const Tensor& weight, const float* bias, int64_t outputs, float* y) {
  const int64_t M = x.size(0), K = x.size(1), panels = weight.size(0);
  const auto* const rows = static_cast<const T*>(x.const_data_ptr());
  const auto* const packed = static_cast<const T*>(weight.const_data_ptr());
  specvis::parallel_for(0, panels, kTaskWork / (M * K * kPanel + 1) + 1, [&](int64_t first, int64_t last) {
    const bool is_whole = last * kPanel <= outputs;
    const int64_t begin = first * kPanel, end = std::min(last * kPanel, outputs);
    const int64_t stride = is_whole ? outputs : (last - first) * kPanel;
    std::vector<float> padded(is_whole ? 0 : M * stride);
    float* const to = is_whole ? y + begin : padded.data();
    specvis::multiply(specvis::Product<T>{rows, M, K, packed, first, last, to, stride});
    for (int64_t m = 0; m < M && (bias || !is_whole); ++m)
      for (int64_t o = begin; o < end; ++o) y[m * outputs + o] = to[m * stride + o - begin] + (bias ? bias[o] : 0.f);
  });
}

Tensor packed_linear_cpu(const Tensor& x,                    // (M, K)
                         const Tensor& weight,               // (panels, k)
                         const std::optional<Tensor>& bias,  // (O)
                         int64_t outputs) {
  const bool is_float = x.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Half, "packed_linear: x must be float32 or bfloat16");
  STD_TORCH_CHECK(weight.size(1) == x.size(1) * kPanel && (is_float || x.size(1) % 2 == 0) &&
                      weight.size(0) == (outputs + kPanel - 1) / kPanel && (!bias || bias->size(0) == outputs),
                  "packed_linear: weight and bias must be for these inputs and outputs");
  Tensor y = specvis::new_empty(x, {x.size(0), outputs}, ScalarType::Float);
  (is_float ? run<float> : run<c10::BFloat16>)(x, weight, bias ? bias->const_data_ptr<float>() : nullptr, outputs,
                                               y.mutable_data_ptr<float>());
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("packed_linear", SPECVIS_BOX(packed_linear, &packed_linear_cpu));
}
