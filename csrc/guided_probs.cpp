// guided_probs on the CPU: each task takes rows. The logits that the filters keep are packed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "filters.h"

namespace {

using specvis::FilteredRow;
using specvis::kInvalidRow;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

double sum(const float* x, int64_t n) {  // eight sums side by side, since a single one would wait for every addition
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[i + lane];
  for (; i < n; ++i) lanes[0] += x[i];
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

WIDEST_VECTORS void divide(const float* x, int64_t n, float divisor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] / divisor;
}

template <class T>
int32_t row_probs(const T* logits, const T* uncond, float guidance, float temperature, int64_t top_k, float top_p,
                  int64_t first, int64_t last, FilteredRow& row, float* out) {  // out is zero
  if (!row.read(logits, uncond, guidance, temperature, first, last)) return kInvalidRow;
  const bool is_sampled = temperature != 0;
  if (is_sampled && top_k > 0 && top_k < last - first) {
    row.pack_for_top_k(top_k);
    row.keep_top_k(top_k);
  }
  row.compute_masses();
  if (is_sampled && top_p > 0 && top_p < 1) {
    row.keep_from(row.top_p_threshold(row.limit_of(top_p)));
    row.compute_masses();
  }
  const float* const e = row.exponentials();
  const float total = sum(e, row.size());
  if (!row.is_packed()) {
    divide(e + first - row.base(), last - first, total, out + first);
    return 0;
  }
  for (int64_t i = 0; i < row.size(); ++i)
    if (e[i] > 0) out[row.id(i)] = e[i] / total;
  return 0;
}

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor& guidance, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, int64_t first_id, int64_t last_id, Tensor& probs,
              Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* x = static_cast<const T*>(logits.const_data_ptr());
  const T* u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float* g = guidance.const_data_ptr<float>();
  const float* t = temperature.const_data_ptr<float>();
  const int32_t* k = top_k.const_data_ptr<int32_t>();
  const float* p = top_p.const_data_ptr<float>();
  float* out = probs.mutable_data_ptr<float>();
  int32_t* bits = status.mutable_data_ptr<int32_t>();
  const int64_t ids = last_id - first_id;
  torch::stable::parallel_for(0, B * N, std::max<int64_t>(1, 8192 / ids), [&](int64_t begin, int64_t end) {
    FilteredRow scratch(V);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / N, start = row * V;
      std::fill_n(out + start, V, 0.f);
      bits[row] = row_probs(x + start, u ? u + start : nullptr, g[b], t[b], k[b], p[b], first_id, last_id, scratch,
                            out + start);
    }
  });
}

std::tuple<Tensor, Tensor> guided_probs_cpu(const Tensor& logits, const std::optional<Tensor>& uncond,
                                            const Tensor& guidance, const Tensor& temperature, const Tensor& top_k,
                                            const Tensor& top_p, int64_t first_id, int64_t last_id) {
  Tensor probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)}, ScalarType::Int);
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, guidance, temperature, top_k, top_p, first_id,
                             last_id, probs, status);
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
