// guided_probs on the CPU: each task takes rows. The logits that the filters keep are packed.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "../arguments.h"
#include "guided_row.h"
#include "team.h"

namespace {

using specvis::Filters;
using specvis::GuidedRow;
using specvis::kInvalidRow;
using specvis::RowSettings;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const RowSettings& settings, Tensor& probs, Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* x = static_cast<const T*>(logits.const_data_ptr());
  const T* u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  float* out = probs.mutable_data_ptr<float>();
  int32_t* bits = status.mutable_data_ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, 8192 / (settings.last - settings.first));
  specvis::parallel_for(0, B * N, grain, [&](int64_t begin, int64_t end) {
    GuidedRow guided(V);
    for (int64_t row = begin; row < end; ++row) {
      const bool is_valid = guided.read(x + row * V, u ? u + row * V : nullptr, settings.of(row / N, row));
      guided.write(out + row * V);
      bits[row] = is_valid ? 0 : kInvalidRow;
    }
  });
}

std::tuple<Tensor, Tensor> guided_probs_cpu(const Tensor& logits,                   // (B, N, V)
                                            const std::optional<Tensor>& uncond,    // (B, N, V)
                                            const Tensor& guidance,                 // (B)
                                            const Tensor& temperature,              // (B)
                                            const Tensor& top_k,                    // (B)
                                            const Tensor& top_p,                    // (B)
                                            const std::optional<Tensor>& id_range,  // (B, N, 2)
                                            int64_t first_id, int64_t last_id, std::string filters) {
  Tensor probs = specvis::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = specvis::new_empty(logits, {logits.size(0), logits.size(1)}, ScalarType::Int);
  const RowSettings settings = {guidance.const_data_ptr<float>(),
                                temperature.const_data_ptr<float>(),
                                top_k.const_data_ptr<int32_t>(),
                                top_p.const_data_ptr<float>(),
                                id_range ? id_range->const_data_ptr<int64_t>() : nullptr,
                                first_id,
                                last_id,
                                Filters::is_p_first(filters)};
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, settings, probs, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  return {probs, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("guided_probs", SPECVIS_BOX(guided_probs, &guided_probs_cpu));
}
