// tree_attention on the CPU: each task takes rows and heads of keys.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>

#include "../arguments.h"
#include "attention.h"
#include "team.h"

namespace {

using specvis::Head;
using specvis::Row;
using specvis::Scratch;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTaskWork = 1 << 16;  // products; less is not worth another thread

template <class T>
void run(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths, const Tensor& ancestors,
         const std::optional<Tensor>& key_mask, float scale, Tensor& attended) {
  const int64_t R = q.size(0), N = q.size(1), H = q.size(2), D = q.size(3), T_ = k_cache.size(1);
  const int64_t Hkv = k_cache.size(2), B = ancestors.size(0), W = ancestors.size(2), G = H / Hkv;
  const int64_t S = key_mask ? key_mask->size(1) : 0;
  const int64_t* length_of = lengths.const_data_ptr<int64_t>();
  const uint64_t* words = static_cast<const uint64_t*>(ancestors.const_data_ptr());
  const bool* mask = key_mask ? key_mask->const_data_ptr<bool>() : nullptr;
  const T* const all_q = static_cast<const T*>(q.const_data_ptr());
  const T* const all_k = static_cast<const T*>(k_cache.const_data_ptr());
  const T* const all_v = static_cast<const T*>(v_cache.const_data_ptr());
  T* const out = static_cast<T*>(attended.mutable_data_ptr());

  int64_t work = 0;  // of a head, on average
  for (int64_t b = 0; b < B; ++b) work += std::clamp<int64_t>(length_of[b], 0, T_) * N * G * D * 2 / B;
  specvis::parallel_for(0, R * Hkv, kTaskWork / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    Row row;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / Hkv, h = i % Hkv, b = r % B;
      if (i == begin || h == 0) row.set(length_of[b], T_, mask + r * S, S, words + b * N * W, N, W);
      Head<T> head = {};
      head.q = all_q + r * q.stride(0) + h * G * q.stride(2);
      head.k = all_k + r * k_cache.stride(0) + h * k_cache.stride(2);
      head.v = all_v + r * v_cache.stride(0) + h * v_cache.stride(2);
      head.query_stride = q.stride(1);
      head.query_head_stride = q.stride(2);
      head.k_stride = k_cache.stride(1);
      head.v_stride = v_cache.stride(1);
      head.N = N;
      head.G = G;
      head.D = D;
      head.scale = scale;
      head.out = out + (r * N * H + h * G) * D;
      head.out_stride = H * D;
      specvis::attend(head, row, scratch);
    }
  });
}

Tensor tree_attention_cpu(const Tensor& q,                        // (R, N, H, D)
                          const Tensor& k_cache,                  // (R, T, Hkv, D)
                          const Tensor& v_cache,                  // (R, T, Hkv, D)
                          const Tensor& lengths,                  // (B)
                          const Tensor& ancestors,                // (B, N, W)
                          const std::optional<Tensor>& key_mask,  // (R, S)
                          double scale) {
  Tensor attended = specvis::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
  const auto run_as = [&](auto zero) {
    run<decltype(zero)>(q, k_cache, v_cache, lengths, ancestors, key_mask, static_cast<float>(scale), attended);
  };
  if (q.scalar_type() == ScalarType::Float)
    run_as(0.f);
  else if (q.scalar_type() == ScalarType::Half)
    run_as(c10::Half());
  else
    run_as(c10::BFloat16());
  return attended;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("tree_attention", SPECVIS_BOX(tree_attention, &tree_attention_cpu));
}
