// draw_tokens on the CPU: each task takes rows, see draws.h.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "../arguments.h"
#include "draws.h"
#include "team.h"

namespace {

using specvis::FilteredRow;
using specvis::Filters;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor& guidance, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor& seeds, const Tensor& positions,
              const Tensor* id_range, int64_t first_id, int64_t last_id, bool p_first, int64_t ahead, Tensor& tokens,
              Tensor& ahead_tokens, Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* const x = static_cast<const T*>(logits.const_data_ptr());
  const T* const u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float *const g = guidance.const_data_ptr<float>(), *const t = temperature.const_data_ptr<float>();
  const int32_t* const k = top_k.const_data_ptr<int32_t>();
  const float* const p = top_p.const_data_ptr<float>();
  const int64_t *const seed = seeds.const_data_ptr<int64_t>(), *const position = positions.const_data_ptr<int64_t>();
  const int64_t* const range = id_range ? id_range->const_data_ptr<int64_t>() : nullptr;
  int64_t *const out = tokens.mutable_data_ptr<int64_t>(), *const out_ahead = ahead_tokens.mutable_data_ptr<int64_t>();
  int32_t* const bits = status.mutable_data_ptr<int32_t>();
  specvis::parallel_for(0, B * N, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    FilteredRow scratch(V);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / N;
      const specvis::DrawRow r = {g[b],
                                  t[b],
                                  k[b],
                                  p[b],
                                  p_first,
                                  range ? range[2 * row] : first_id,
                                  range ? range[2 * row + 1] : last_id,
                                  seed[b],
                                  position[row],
                                  ahead};
      bits[row] = specvis::draw_row(x + row * V, u ? u + row * V : nullptr, V, r, scratch, out[row], out_ahead[row]);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> draw_tokens_cpu(const Tensor& logits,                   // (B, N, V)
                                                           const std::optional<Tensor>& uncond,    // (B, N, V)
                                                           const Tensor& guidance,                 // (B)
                                                           const Tensor& temperature,              // (B)
                                                           const Tensor& top_k,                    // (B)
                                                           const Tensor& top_p,                    // (B)
                                                           const Tensor& seeds,                    // (B)
                                                           const Tensor& positions,                // (B, N)
                                                           const std::optional<Tensor>& id_range,  // (B, N, 2)
                                                           int64_t first_id, int64_t last_id, std::string filters,  //
                                                           const std::optional<Tensor>& guesses,  // (B, N)
                                                           int64_t ahead) {
  const int64_t B = logits.size(0), N = logits.size(1);
  Tensor tokens = specvis::new_empty(positions, {B, N}), ahead_tokens = specvis::new_empty(tokens, {B, N});
  Tensor num_accepted = specvis::new_empty(positions, {B}, ScalarType::Int);
  Tensor status = specvis::new_empty(positions, {B, N}, ScalarType::Int);
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, guidance, temperature, top_k, top_p, seeds, positions,
                             id_range ? &*id_range : nullptr, first_id, last_id, Filters::is_p_first(filters), ahead,
                             tokens, ahead_tokens, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  const int64_t* const token = tokens.const_data_ptr<int64_t>();
  const int32_t* const bits = status.const_data_ptr<int32_t>();
  const int64_t* const guess = guesses ? guesses->const_data_ptr<int64_t>() : nullptr;
  int32_t* const accepted = num_accepted.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < B; ++b) {
    int64_t n = 0;
    while (guess && n < N && !bits[b * N + n] && guess[b * N + n] == token[b * N + n]) ++n;
    accepted[b] = static_cast<int32_t>(n);
  }
  return {tokens, num_accepted, ahead_tokens, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("draw_tokens", SPECVIS_BOX(draw_tokens, &draw_tokens_cpu));
}
