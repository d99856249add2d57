// draft_frontier on the CPU: each task takes rows of logits and leaves their nodes' children; then each takes requests.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <optional>
#include <string>
#include <tuple>

#include "../arguments.h"
#include "expand_tree.h"
#include "guided_row.h"
#include "team.h"

namespace {

using specvis::ChildFinder;
using specvis::clamped_width;
using specvis::Filters;
using specvis::GuidedRow;
using specvis::kInf;
using specvis::RowSetting;
using specvis::RowSettings;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The children of one node. Returns the status.
template <class T>
int32_t find_children(const T* logits, const T* uncond, const RowSetting& setting, float score, int64_t width,
                      int64_t K, GuidedRow& guided, ChildFinder& finder, int64_t* tokens, float* scores) {
  if (!(score > -kInf) || !guided.read(logits, uncond, setting)) {
    specvis::no_children(K, tokens, scores);
    return score > -kInf ? specvis::kInvalidRow : 0;
  }
  finder(guided.row.exponentials(), guided.row.size(), guided.total, score, width, K, tokens, scores);
  for (int64_t k = 0; k < K; ++k)
    if (scores[k] > -kInf) tokens[k] = guided.row.id(tokens[k]);
  return 0;
}

template <class T>
void all_children(const Tensor& logits, const Tensor* uncond, const Tensor& scores, const Tensor& width,
                  const RowSettings& settings, int64_t K, Tensor& child_tokens, Tensor& child_scores, Tensor& status) {
  const int64_t B = logits.size(0), F = logits.size(1), V = logits.size(2);
  const T* const x = static_cast<const T*>(logits.const_data_ptr());
  const T* const u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float* const score = scores.const_data_ptr<float>();
  const int32_t* const widths = width.const_data_ptr<int32_t>();
  int64_t* const tokens = child_tokens.mutable_data_ptr<int64_t>();
  float* const out_scores = child_scores.mutable_data_ptr<float>();
  int32_t* const bits = status.mutable_data_ptr<int32_t>();
  specvis::parallel_for(0, B * F, std::max<int64_t>(1, 8192 / V), [&](int64_t begin, int64_t end) {
    GuidedRow guided(V);
    ChildFinder finder;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / F;
      bits[row] = find_children(x + row * V, u ? u + row * V : nullptr, settings.of(b, row), score[row],
                                clamped_width(widths[b], K), K, guided, finder, tokens + row * K, out_scores + row * K);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> draft_frontier_cpu(
    const Tensor& logits, const std::optional<Tensor>& uncond, const Tensor& scores, const Tensor& ancestors,
    const Tensor& candidates, const Tensor& width, const Tensor& depth, const Tensor& guidance,
    const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const std::optional<Tensor>& id_range,
    int64_t first_id, int64_t last_id, std::string filters, int64_t K, int64_t level, int64_t first_node,
    int64_t first_candidate) {
  const int64_t B = logits.size(0), F = logits.size(1), W = ancestors.size(2);
  const auto empty = [&](std::initializer_list<int64_t> sizes, ScalarType type) {
    return specvis::new_empty(logits, sizes, type);
  };
  Tensor child_tokens = empty({B, F * K}, ScalarType::Long), child_scores = empty({B, F * K}, ScalarType::Float);
  Tensor child_parents = empty({B, F * K}, ScalarType::Int), status = empty({B, F}, ScalarType::Int);
  Tensor tokens = empty({B, K}, ScalarType::Long), frontier_scores = empty({B, K}, ScalarType::Float);
  Tensor rows = empty({B, K}, ScalarType::Long), frontier_ancestors = empty({B, K, W}, ScalarType::Long);
  Tensor frontier_candidates = empty({B, K}, ScalarType::Int);
  const RowSettings settings = {guidance.const_data_ptr<float>(),
                                temperature.const_data_ptr<float>(),
                                top_k.const_data_ptr<int32_t>(),
                                top_p.const_data_ptr<float>(),
                                id_range ? id_range->const_data_ptr<int64_t>() : nullptr,
                                first_id,
                                last_id,
                                Filters::is_p_first(filters)};
  const auto run = [&](auto type) {
    all_children<decltype(type)>(logits, uncond ? &*uncond : nullptr, scores, width, settings, K, child_tokens,
                                 child_scores, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }

  const int64_t* const child_token = child_tokens.const_data_ptr<int64_t>();
  const float* const child_score = child_scores.const_data_ptr<float>();
  const int64_t* const words = ancestors.const_data_ptr<int64_t>();
  const int32_t* const candidate = candidates.const_data_ptr<int32_t>();
  const int32_t* const widths = width.const_data_ptr<int32_t>();
  const int64_t* const depths = depth.const_data_ptr<int64_t>();
  int32_t* const parent_out = child_parents.mutable_data_ptr<int32_t>();
  int64_t *const token_out = tokens.mutable_data_ptr<int64_t>(), *const row_out = rows.mutable_data_ptr<int64_t>();
  int64_t* const words_out = frontier_ancestors.mutable_data_ptr<int64_t>();
  float* const score_out = frontier_scores.mutable_data_ptr<float>();
  int32_t* const candidate_out = frontier_candidates.mutable_data_ptr<int32_t>();
  specvis::parallel_for(0, B, std::max<int64_t>(1, 4096 / (F * K)), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    std::vector<int32_t> frontier(K);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first_child = b * F * K;
      specvis::find_frontier(child_score + first_child, F * K, clamped_width(widths[b], K), K, scratch,
                             frontier.data());
      for (int64_t f = 0; f < F; ++f) std::fill_n(parent_out + first_child + f * K, K, candidate[b * F + f]);
      for (int64_t k = 0; k < K; ++k) {
        const bool is_used = frontier[k] >= 0 && depths[b] > level;
        const int64_t chosen = std::max(frontier[k], 0), row = chosen / K, slot = b * K + k, node = first_node + k;
        token_out[slot] = child_token[first_child + chosen];
        score_out[slot] = is_used ? child_score[first_child + chosen] : -kInf;
        row_out[slot] = row;
        candidate_out[slot] = is_used ? static_cast<int32_t>(first_candidate + chosen) : -1;
        for (int64_t w = 0; w < W; ++w) words_out[slot * W + w] = is_used ? words[(b * F + row) * W + w] : 0;
        if (is_used) words_out[slot * W + node / 64] |= static_cast<int64_t>(uint64_t{1} << node % 64);
      }
    }
  });
  return {child_tokens, child_scores,       child_parents,       tokens, frontier_scores,
          rows,         frontier_ancestors, frontier_candidates, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("draft_frontier", SPECVIS_BOX(draft_frontier, &draft_frontier_cpu));
}
