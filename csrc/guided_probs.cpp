// guided_probs on the CPU: each task takes rows. The logits that the filters keep are packed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "filters.h"

namespace {

using specvis::FilteredRow;
using specvis::Filters;
using specvis::kInvalidRow;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

WIDEST_VECTORS void divide(const float* x, int64_t n, float divisor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] / divisor;
}

// The settings of one row.
struct Settings {
  float guidance, temperature;
  int32_t top_k;
  float top_p;
  bool p_first;
  int64_t first, last;
};

template <class T>
int32_t row_probs(const T* logits, const T* uncond, int64_t V, const Settings& s, FilteredRow& row,
                  float* out) {  // out is zero
  if (!(s.first >= 0 && s.first < s.last && s.last <= V)) return kInvalidRow;
  if (!row.read(logits, uncond, s.guidance, s.temperature, s.first, s.last)) return kInvalidRow;
  row.apply(Filters::of(s.temperature, s.top_k, s.top_p, s.last - s.first, s.p_first));
  const float* const e = row.exponentials();
  const float total = row.total();
  if (!row.is_packed()) {
    divide(e + s.first - row.base(), s.last - s.first, total, out + s.first);
    return 0;
  }
  for (int64_t i = 0; i < row.size(); ++i)
    if (e[i] > 0) out[row.id(i)] = e[i] / total;
  return 0;
}

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor& guidance, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor* id_range, int64_t first_id, int64_t last_id,
              bool p_first, Tensor& probs, Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* x = static_cast<const T*>(logits.const_data_ptr());
  const T* u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float* g = guidance.const_data_ptr<float>();
  const float* t = temperature.const_data_ptr<float>();
  const int32_t* k = top_k.const_data_ptr<int32_t>();
  const float* p = top_p.const_data_ptr<float>();
  const int64_t* const range = id_range ? id_range->const_data_ptr<int64_t>() : nullptr;
  float* out = probs.mutable_data_ptr<float>();
  int32_t* bits = status.mutable_data_ptr<int32_t>();
  const int64_t ids = last_id - first_id;
  torch::stable::parallel_for(0, B * N, std::max<int64_t>(1, 8192 / ids), [&](int64_t begin, int64_t end) {
    FilteredRow scratch(V);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / N, start = row * V;
      const Settings settings = {
          g[b], t[b], k[b], p[b], p_first, range ? range[2 * row] : first_id, range ? range[2 * row + 1] : last_id};
      std::fill_n(out + start, V, 0.f);
      bits[row] = row_probs(x + start, u ? u + start : nullptr, V, settings, scratch, out + start);
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
  Tensor probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)}, ScalarType::Int);
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, guidance, temperature, top_k, top_p,
                             id_range ? &*id_range : nullptr, first_id, last_id, Filters::is_p_first(filters), probs,
                             status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  return {probs, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("guided_probs", TORCH_BOX(&guided_probs_cpu)); }
