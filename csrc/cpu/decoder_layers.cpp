// decoder_layers on the CPU: all layers in one parallel region. Its phases end where one thread needs what another has
// computed, five times a layer. Norms are so cheap that each thread makes them for itself.
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "attention.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

using specvis::Head;
using specvis::kPanel;
using specvis::load;
using specvis::Machine;
using specvis::multiply;
using specvis::Product;
using specvis::round_up;
using specvis::Row;
using specvis::Scratch;
using specvis::silu;
using specvis::store;
using specvis::Team;
using specvis::Vec;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kThreadWork = 1 << 19;  // products; less is not worth another thread

// Of one thread.
template <class T>
struct Memory {
  std::vector<T> normed, queries;  // (R * N, E), (N, H / G, D)
  std::vector<float> y;            // a product
  Scratch scratch;
};

template <class T>
struct Layers {
  int64_t R, N, B, E, L, T_, H, G, D, F, P, Y, first_node;
  float eps, head_eps;
  bool has_first_norm, has_head_norms, has_halves;
  const T *x, *matrices;  // (R, N, E), and of each layer the packed weights
  const float *vectors, *last_norm, *rotations;
  const int64_t *lengths, *positions;
  T *kv_cache, *hidden;  // (L, R, T_, 2, G, D), (R, N, E)
  std::vector<Row> rows;
  std::vector<Memory<T>> memory;
  // between phases
  std::vector<float> stream, qkv;  // (R * N, E padded), (R * N, Q padded)
  std::vector<T> attended, gated;  // (R * N, H * D), (R * N, F padded)

  int64_t width_qkv() const { return round_up((H + 2 * G) * D, kPanel); }
  int64_t width_out() const { return round_up(E, kPanel); }
  int64_t width_gate() const { return round_up(F, kPanel); }
  int64_t layer_matrices() const {
    return width_qkv() * E + width_out() * H * D + 2 * width_gate() * E + width_out() * width_gate();
  }
  int64_t layer_vectors() const { return 2 * E + (H + 2 * G) * D + E + (has_head_norms ? 2 * (H + G) * D : 0); }
};

// RMSNorm; without a weight the row as it is. E is a multiple of 16.
template <int kLanes, class T>
INLINE void normalize(const float* x, const float* weight, int64_t E, float eps, T* to) {
  Vec<kLanes> squares = {}, factor = Vec<kLanes>{} + 1.f;
  if (weight) {
    for (int64_t i = 0; i < E; i += kLanes) squares += load<kLanes>(x + i) * load<kLanes>(x + i);
    factor = Vec<kLanes>{} + 1.f / std::sqrt(specvis::sum_of_lanes<kLanes>(squares) / E + eps);
  }
  for (int64_t i = 0; i < E; i += kLanes) {
    const Vec<kLanes> y = load<kLanes>(x + i) * factor;
    store<kLanes>(to + i, weight ? y * load<kLanes>(weight + i) : y);
  }
}

// LayerNorm of one head.
template <int kLanes>
INLINE void normalize_head(float* x, const float* scale, const float* shift, int64_t D, float eps) {
  const auto [mean, factor] = specvis::moments<kLanes>(x, D, eps);
  for (int64_t i = 0; i < D; i += kLanes)
    store<kLanes>(x + i, (load<kLanes>(x + i) - mean) * factor * load<kLanes>(scale + i) + load<kLanes>(shift + i));
}

// Turns pairs of entries, neighbors or (with halves) i and i + D / 2, by rotations (D / 2, 2).
INLINE void rotate(float* x, const float* rotation, int64_t D, bool has_halves) {
  for (int64_t i = 0; i < D / 2; ++i) {
    float &a = has_halves ? x[i] : x[2 * i], &b = has_halves ? x[i + D / 2] : x[2 * i + 1];
    const float cosine = rotation[2 * i], sine = rotation[2 * i + 1], old = a;
    a = old * cosine - b * sine;
    b = old * sine + b * cosine;
  }
}

template <int kLanes, class T>
INLINE void read(Layers<T>& s, Team::Member& member) {
  const int64_t M = s.R * s.N, E = s.E, D = s.D, heads = s.H / s.G, Q = s.width_qkv(), F = s.width_gate();
  const int64_t padded_E = s.width_out();
  const int64_t tasks = s.memory.size();
  auto& [normed, queries, y, scratch] = s.memory[member.number];
  bool is_normed = false;
  const auto norm = [&](const float* weight) INLINED {
    if (is_normed) return;
    for (int64_t m = 0; m < M; ++m) normalize<kLanes>(&s.stream[m * padded_E], weight, E, s.eps, &normed[m * E]);
    is_normed = true;
  };
  // Part i of so many panels, times rows of K inputs, to `to`, where the first of these panels begins.
  const auto product =
      [&](const T* x, int64_t K, const T* weight, int64_t panels, int64_t i, float* to, int64_t stride)
          INLINED { multiply(Product<T>{x, M, K, weight, panels * i / tasks, panels * (i + 1) / tasks, to, stride}); };
  const auto add_to_stream = [&](const T* x, int64_t K, const T* weight, const float* bias, int64_t i) INLINED {
    const int64_t panels = padded_E / kPanel, begin = panels * i / tasks * kPanel;
    const int64_t end = std::min(panels * (i + 1) / tasks * kPanel, E), stride = panels * kPanel;
    product(x, K, weight, panels, i, y.data() + begin, stride);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t c = begin; c < end; c += kLanes) {
        Vec<kLanes> sum = load<kLanes>(&y[m * stride + c]);
        if (bias) sum += load<kLanes>(bias + c);
        store<kLanes>(&s.stream[m * padded_E + c], load<kLanes>(&s.stream[m * padded_E + c]) + sum);
      }
  };

  for (int64_t layer = 0; layer < s.L; ++layer) {
    const T* const w_qkv = s.matrices + layer * s.layer_matrices();
    const T* const w_out = w_qkv + Q * E;
    const T* const w_gate = w_out + padded_E * s.H * D;
    const T* const w_down = w_gate + 2 * F * E;
    const float* const first_norm = s.vectors + layer * s.layer_vectors();
    const float* const second_norm = first_norm + E;
    const float* const out_bias = second_norm + E;
    const float* const qkv_bias = out_bias + E;
    const float* const head_norms = qkv_bias + (s.H + 2 * s.G) * D;

    is_normed = false;
    member.phase(tasks, [&](int64_t i) INLINED {
      norm(s.has_first_norm ? first_norm : nullptr);
      product(normed.data(), E, w_qkv, Q / kPanel, i, &s.qkv[Q / kPanel * i / tasks * kPanel], Q);
    });

    member.phase(s.R * s.G, [&](int64_t i) INLINED {
      const int64_t r = i / s.G, g = i % s.G, b = r % s.B;
      T* const cache = s.kv_cache + ((layer * s.R + r) * s.T_ * 2 * s.G + g) * D;
      for (int64_t n = 0; n < s.N; ++n) {
        float* const row = &s.qkv[(r * s.N + n) * Q];
        const int64_t position = std::clamp<int64_t>(s.positions[r % s.Y * s.N + n], 0, s.P - 1);
        // A head's part of the row, with the bias, normalized and turned; where: among all heads of q, k and v
        const auto finish = [&](int64_t where, bool is_value) INLINED {
          float* const x = row + where * D;
          for (int64_t d = 0; d < D; d += kLanes)
            store<kLanes>(x + d, load<kLanes>(x + d) + load<kLanes>(qkv_bias + where * D + d));
          if (!is_value && s.has_head_norms)
            normalize_head<kLanes>(x, head_norms + where * D, head_norms + (s.H + s.G + where) * D, D, s.head_eps);
          if (!is_value) rotate(x, s.rotations + position * D, D, s.has_halves);
          return x;
        };
        for (int64_t h = 0; h < heads; ++h) {
          const float* const q = finish(g * heads + h, false);
          for (int64_t d = 0; d < D; d += kLanes) store<kLanes>(&queries[(n * heads + h) * D + d], load<kLanes>(q + d));
        }
        const float* const k = finish(s.H + g, false);
        const float* const v = finish(s.H + s.G + g, true);
        if (s.lengths[b] < 0 || s.lengths[b] >= s.T_ - s.first_node - n) continue;
        const int64_t column = s.lengths[b] + s.first_node + n;
        for (int64_t d = 0; d < D; d += kLanes) {
          store<kLanes>(cache + column * 2 * s.G * D + d, load<kLanes>(k + d));
          store<kLanes>(cache + (column * 2 + 1) * s.G * D + d, load<kLanes>(v + d));
        }
      }
      Head<T> head = {};
      head.q = queries.data();
      head.k = cache;
      head.v = cache + s.G * D;
      head.query_stride = heads * D;
      head.query_head_stride = D;
      head.k_stride = head.v_stride = 2 * s.G * D;
      head.N = s.N;
      head.G = heads;
      head.D = D;
      head.scale = 1.f / std::sqrt(static_cast<float>(D));
      head.out = &s.attended[(r * s.N * s.H + g * heads) * D];
      head.out_stride = s.H * D;
      specvis::attend(head, s.rows[r], scratch);
    });

    member.phase(tasks, [&](int64_t i) INLINED { add_to_stream(s.attended.data(), s.H * D, w_out, out_bias, i); });

    is_normed = false;
    member.phase(tasks, [&](int64_t i) INLINED {
      norm(second_norm);
      const int64_t begin = F / kPanel * i / tasks, end = F / kPanel * (i + 1) / tasks,
                    stride = 2 * (end - begin) * kPanel;
      multiply(Product<T>{normed.data(), M, E, w_gate, 2 * begin, 2 * end, y.data(), stride});
      for (int64_t m = 0; m < M; ++m)
        for (int64_t panel = begin; panel < end; ++panel)
          for (int64_t c = 0; c < kPanel; c += kLanes) {
            const float* const gate = &y[m * stride + 2 * (panel - begin) * kPanel + c];
            store<kLanes>(&s.gated[m * F + panel * kPanel + c],
                          silu<kLanes>(load<kLanes>(gate)) * load<kLanes>(gate + kPanel));
          }
    });

    member.phase(tasks, [&](int64_t i) INLINED { add_to_stream(s.gated.data(), F, w_down, nullptr, i); });
  }

  member.phase(tasks, [&](int64_t i) INLINED {
    for (int64_t m = M * i / tasks; m < M * (i + 1) / tasks; ++m)
      normalize<kLanes>(&s.stream[m * padded_E], s.last_norm, E, s.eps, s.hidden + m * E);
  });
}

template <class T>
FOR_AVX512 void read_avx512(Layers<T>& s, Team::Member& member) {
  read<16>(s, member);
}
template <class T>
FOR_AVX2 void read_avx2(Layers<T>& s, Team::Member& member) {
  read<8>(s, member);
}
template <class T>
void read_portable(Layers<T>& s, Team::Member& member) {
  read<4>(s, member);
}

template <class T>
void run(const std::shared_ptr<Layers<T>>& layers, int64_t columns) {
  static const auto best = specvis::machine() >= Machine::avx512 ? read_avx512<T>
                           : specvis::machine() == Machine::avx2 ? read_avx2<T>
                                                                 : read_portable<T>;
  Layers<T>& s = *layers;
  const int64_t M = s.R * s.N, padded_E = s.width_out();
  s.memory.resize(Team::threads_for(M * s.L * (s.layer_matrices() + 2 * columns * s.H * s.D), kThreadWork));
  for (Memory<T>& memory : s.memory) {
    memory.normed.resize(M * s.E);
    memory.queries.resize(s.N * s.H / s.G * s.D);
    memory.y.resize(M * std::max(2 * s.width_gate(), padded_E));
  }
  s.stream.resize(M * padded_E);
  s.qkv.resize(M * s.width_qkv());
  s.attended.resize(M * s.H * s.D);
  s.gated.resize(M * s.width_gate());
  for (int64_t m = 0; m < M; ++m)
    for (int64_t i = 0; i < s.E; ++i) s.stream[m * padded_E + i] = specvis::to_float(s.x[m * s.E + i]);
  Team::run(std::make_shared<Team>(5 * s.L + 1), s.memory.size(),
            [layers](Team::Member member) { best(*layers, member); });
}

Tensor decoder_layers_cpu(const Tensor& x,                         // (R, N, E)
                          const Tensor& matrices,                  // (L, m)
                          const Tensor& vectors,                   // (L, v)
                          const std::optional<Tensor>& last_norm,  // (E)
                          Tensor kv_cache,                         // (L, R, T, 2, G, D)
                          const Tensor& lengths,                   // (B)
                          const Tensor& ancestors,                 // (B, N, W)
                          const Tensor& positions,                 // (Y, N)
                          const Tensor& rotations,                 // (P, d, 2)
                          const std::optional<Tensor>& key_mask,   // (R, S)
                          int64_t heads, int64_t ffn_dim, int64_t first_node, double eps, double head_eps,
                          bool has_first_norm, bool has_head_norms, bool has_halves) {
  Tensor hidden = specvis::new_empty(x, {x.size(0), x.size(1), x.size(2)});
  const auto run_as = [&](auto zero) {
    using T = decltype(zero);
    const auto layers = std::make_shared<Layers<T>>();
    Layers<T>& s = *layers;
    s.R = x.size(0);
    s.N = x.size(1);
    s.E = x.size(2);
    s.B = lengths.size(0);
    s.L = kv_cache.size(0);
    s.T_ = kv_cache.size(2);
    s.G = kv_cache.size(4);
    s.D = kv_cache.size(5);
    s.H = heads;
    s.F = ffn_dim;
    s.P = rotations.size(0);
    s.Y = positions.size(0);
    s.first_node = first_node;
    s.eps = static_cast<float>(eps);
    s.head_eps = static_cast<float>(head_eps);
    s.has_first_norm = has_first_norm;
    s.has_head_norms = has_head_norms;
    s.has_halves = has_halves;
    const int64_t W = ancestors.size(2), S = key_mask ? key_mask->size(1) : 0;
    STD_TORCH_CHECK(s.E % 16 == 0 && s.D % 16 == 0, "decoder_layers: x and kv_cache must have multiples of 16 entries");
    STD_TORCH_CHECK(rotations.size(1) * 2 == s.D, "decoder_layers: rotations must be of D / 2 pairs");
    STD_TORCH_CHECK(s.R % s.Y == 0, "decoder_layers: the rows must be a multiple of those of positions");
    STD_TORCH_CHECK(matrices.size(1) == s.layer_matrices() && vectors.size(1) == s.layer_vectors(),
                    "decoder_layers: matrices and vectors must be packed for these sizes");
    STD_TORCH_CHECK(first_node + s.N <= 64 * W, "decoder_layers: ancestors must have a word for each 64 nodes");
    s.x = static_cast<const T*>(x.const_data_ptr());
    s.matrices = static_cast<const T*>(matrices.const_data_ptr());
    s.vectors = vectors.const_data_ptr<float>();
    s.last_norm = last_norm ? last_norm->const_data_ptr<float>() : nullptr;
    s.rotations = rotations.const_data_ptr<float>();
    s.lengths = lengths.const_data_ptr<int64_t>();
    s.positions = positions.const_data_ptr<int64_t>();
    s.kv_cache = static_cast<T*>(kv_cache.mutable_data_ptr());
    s.hidden = static_cast<T*>(hidden.mutable_data_ptr());
    const bool* const mask = key_mask ? key_mask->const_data_ptr<bool>() : nullptr;
    const uint64_t* const words = static_cast<const uint64_t*>(ancestors.const_data_ptr());
    s.rows.resize(s.R);
    int64_t columns = 0;
    for (int64_t r = 0; r < s.R; ++r) {
      s.rows[r].set(s.lengths[r % s.B], s.T_, mask + r * S, S, words + r % s.B * s.N * W, s.N, W);
      columns = std::max<int64_t>(columns, s.rows[r].columns.size());
    }
    run(layers, columns);
  };
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Half, "decoder_layers: x must be float32 or bfloat16");
  if (x.scalar_type() == ScalarType::Float)
    run_as(0.f);
  else
    run_as(c10::BFloat16());
  return hidden;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("decoder_layers", SPECVIS_BOX(decoder_layers, &decoder_layers_cpu));
}
