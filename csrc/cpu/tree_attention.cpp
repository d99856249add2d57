// tree_attention on the CPU: each task takes rows and heads of keys.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "../shared/params.h"
#include "attention.h"
#include "team.h"

namespace specvis {
namespace {

constexpr int64_t kTaskWork = 1 << 16;  // products; less is not worth another thread

template <class T>
void run(const TreeAttention& batch) {
  const int64_t N = batch.N, H = batch.H, D = batch.D, B = batch.B, heads = batch.G, G = H / heads;
  const int64_t *const q = batch.q_strides, *const k = batch.k_strides, *const v = batch.v_strides;
  int64_t work = 0;  // the work for a head, on average
  for (int64_t b = 0; b < B; ++b) work += std::clamp<int64_t>(batch.lengths[b], 0, batch.T) * N * G * D * 2 / B;
  parallel_for(batch.R * heads, kTaskWork / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    AttentionScratch scratch;
    Row row;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / heads, h = i % heads, b = r % B;
      if (i == begin || h == 0)
        row.set(batch.lengths[b], batch.T, batch.key_mask + r * batch.S, batch.S, batch.ancestors + b * N * batch.W, N,
                batch.W);
      Head<T> head = {};
      head.q = static_cast<const T*>(batch.q) + r * q[0] + h * G * q[2];
      head.k = static_cast<const T*>(batch.k) + r * k[0] + h * k[2];
      head.v = static_cast<const T*>(batch.v) + r * v[0] + h * v[2];
      head.query_stride = q[1];
      head.query_head_stride = q[2];
      head.k_stride = k[1];
      head.v_stride = v[1];
      head.N = N;
      head.G = G;
      head.D = D;
      head.scale = batch.scale;
      head.out = static_cast<T*>(batch.attended) + (r * N * H + h * G) * D;
      head.out_stride = H * D;
      attend(head, row, scratch);
    }
  });
}

}  // namespace

void tree_attention_cpu(const TreeAttention& batch) {
  switch (batch.type) {
    case FloatType::float32: return run<float>(batch);
    case FloatType::float16: return run<c10::Half>(batch);
    case FloatType::bfloat16: return run<c10::BFloat16>(batch);
  }
}

}  // namespace specvis
