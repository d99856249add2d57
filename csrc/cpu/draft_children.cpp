// draft_children on the CPU: each task takes rows of logits. Children are drawn among the tokens that the filters keep.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <optional>
#include <string>
#include <tuple>

#include "../arguments.h"
#include "draw_children.h"
#include "expand_tree.h"
#include "guided_row.h"
#include "team.h"

namespace {

using specvis::ChildFinder;
using specvis::Filters;
using specvis::GuidedRow;
using specvis::HighestScores;
using specvis::InverseCdf;
using specvis::Noise;
using specvis::ProbRow;
using specvis::RowSettings;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The K likeliest tokens, and how many there are.
class Likeliest {
 public:
  explicit Likeliest(int64_t K) : scores_(K) {}

  int64_t operator()(const ProbRow& row, int64_t K, int64_t* children) {
    find_(row.probs, row.n, 1, 0, K, K, children, scores_.data());
    int64_t n = 0;
    for (; n < K && scores_[n] > -specvis::kInf; ++n) children[n] = row.id(children[n]);
    return n;
  }

 private:
  ChildFinder find_;
  std::vector<float> scores_;
};

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor* uniforms, const RowSettings& settings,
              const Tensor* seeds, const Tensor* positions, int64_t K, Tensor& tokens, Tensor& probs, Tensor& status) {
  const int64_t B = logits.size(0), F = logits.size(1), V = logits.size(2);
  const T* const x = static_cast<const T*>(logits.const_data_ptr());
  const T* const u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float* const uniform = uniforms ? uniforms->const_data_ptr<float>() : nullptr;
  const int64_t* const seed = seeds ? seeds->const_data_ptr<int64_t>() : nullptr;
  const int64_t* const position = positions ? positions->const_data_ptr<int64_t>() : nullptr;
  int64_t* const token_out = tokens.mutable_data_ptr<int64_t>();
  float* const out = probs.mutable_data_ptr<float>();
  int32_t* const bits = status.mutable_data_ptr<int32_t>();
  specvis::parallel_for(0, B * F, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    GuidedRow guided(V);
    Likeliest likeliest(K);
    std::optional<InverseCdf> by_uniforms;
    std::optional<HighestScores> by_noise;
    if (uniform)
      by_uniforms.emplace(V);
    else
      by_noise.emplace(V, K);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / F;
      int64_t* const children = token_out + r * K;
      int64_t n = 0;
      bool valid = guided.read(x + r * V, u ? u + r * V : nullptr, settings.of(b, r));
      const ProbRow row = guided.write(out + r * V);
      if (valid)
        n = settings.temperature[b] == 0 ? likeliest(row, K, children)
            : uniform                    ? (*by_uniforms)(row, uniform + r * K, K, children, valid)
                                         : (*by_noise)(row, Noise(seed[b], position[r]), children, valid);
      std::fill(children + n, children + K, 0);
      bits[r] = valid ? 0 : specvis::kInvalidRow;
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> draft_children_cpu(const Tensor& logits, const std::optional<Tensor>& uncond,
                                                      const std::optional<Tensor>& uniforms, const Tensor& guidance,
                                                      const Tensor& temperature, const Tensor& top_k,
                                                      const Tensor& top_p, const std::optional<Tensor>& seeds,
                                                      const std::optional<Tensor>& positions,
                                                      const std::optional<Tensor>& id_range, int64_t first_id,
                                                      int64_t last_id, std::string filters, int64_t K) {
  const int64_t B = logits.size(0), F = logits.size(1), V = logits.size(2);
  Tensor tokens = specvis::new_empty(logits, {B, F, K}, ScalarType::Long);
  Tensor probs = specvis::new_empty(logits, {B, F, V}, ScalarType::Float);
  Tensor status = specvis::new_empty(logits, {B, F}, ScalarType::Int);
  const RowSettings settings = {guidance.const_data_ptr<float>(),
                                temperature.const_data_ptr<float>(),
                                top_k.const_data_ptr<int32_t>(),
                                top_p.const_data_ptr<float>(),
                                id_range ? id_range->const_data_ptr<int64_t>() : nullptr,
                                first_id,
                                last_id,
                                Filters::is_p_first(filters)};
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, uniforms ? &*uniforms : nullptr, settings,
                             seeds ? &*seeds : nullptr, positions ? &*positions : nullptr, K, tokens, probs, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  return {tokens, probs, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("draft_children", SPECVIS_BOX(draft_children, &draft_children_cpu));
}
