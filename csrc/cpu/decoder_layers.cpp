// decoder_layers on the CPU: all layers in one parallel region. Its phases end where one thread needs what another has
// computed, five times a layer. Norms are so cheap that each thread makes them for itself.
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace specvis {
namespace {

constexpr int64_t kThreadWork = 1 << 19;  // products; less is not worth another thread

// The memory of one thread.
template <class T>
struct Memory {
  std::vector<T> normed, queries;  // (R * N, E), (N, H / G, D)
  std::vector<float> y;            // a product
  AttentionScratch scratch;
};

template <class T>
struct Layers : DecoderLayers {
  std::vector<Row> rows;
  std::vector<Memory<T>> memory;
  // between phases
  std::vector<float> stream, qkv;  // (R * N, E padded), (R * N, Q padded)
  std::vector<T> attended, gated;  // (R * N, H * D), (R * N, F padded)
};

// RMSNorm; without a weight the row as it is. E is a multiple of 16.
template <int kLanes, class T>
INLINE void normalize(const float* x, const float* weight, int64_t E, float eps, T* to) {
  Vec<kLanes> squares = {}, factor = Vec<kLanes>{} + 1.f;
  if (weight) {
    for (int64_t i = 0; i < E; i += kLanes) squares += load<kLanes>(x + i) * load<kLanes>(x + i);
    factor = Vec<kLanes>{} + 1.f / std::sqrt(sum_of_lanes<kLanes>(squares) / E + eps);
  }
  for (int64_t i = 0; i < E; i += kLanes) {
    const Vec<kLanes> y = load<kLanes>(x + i) * factor;
    store<kLanes>(to + i, weight ? y * load<kLanes>(weight + i) : y);
  }
}

// LayerNorm of one head.
template <int kLanes>
INLINE void normalize_head(float* x, const float* scale, const float* shift, int64_t D, float eps) {
  const auto [mean, factor] = moments<kLanes>(x, D, eps);
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
  // Multiplies part i of the panels by rows of K inputs, and writes to `to`, where the part's first panel begins.
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
    const T* const w_qkv = static_cast<const T*>(s.matrices) + layer * s.layer_matrices();
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
      T* const cache = static_cast<T*>(s.kv_cache) + ((layer * s.R + r) * s.cache_len * 2 * s.G + g) * D;
      for (int64_t n = 0; n < s.N; ++n) {
        float* const row = &s.qkv[(r * s.N + n) * Q];
        const int64_t position = std::clamp<int64_t>(s.positions[r % s.Y * s.N + n], 0, s.P - 1);
        // Adds the bias to a head's part of the row, normalizes and turns it; `where` is its place among all heads of
        // q, k, v
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
        if (s.lengths[b] < 0 || s.lengths[b] >= s.cache_len - s.first_node - n) continue;
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
      attend(head, s.rows[r], scratch);
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
      normalize<kLanes>(&s.stream[m * padded_E], s.last_norm, E, s.eps, static_cast<T*>(s.hidden) + m * E);
  });
}

FOR_EACH_MACHINE(template <class T>, read, (Layers<T> & s, Team::Member& member), read<kLanes>(s, member))

template <class T>
void run(const DecoderLayers& batch) {
  static const auto best = BEST_FUNCTION(read, <T>);
  const auto layers = std::make_shared<Layers<T>>();
  Layers<T>& s = *layers;
  static_cast<DecoderLayers&>(s) = batch;
  int64_t columns = 0;
  s.rows.resize(s.R);
  for (int64_t r = 0; r < s.R; ++r) {
    const int64_t b = r % s.B;
    s.rows[r].set(s.lengths[b], s.cache_len, s.key_mask + r * s.S, s.S, s.ancestors + b * s.N * s.W, s.N, s.W);
    columns = std::max<int64_t>(columns, s.rows[r].columns.size());
  }
  const T* const x = static_cast<const T*>(s.x);
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
    for (int64_t i = 0; i < s.E; ++i) s.stream[m * padded_E + i] = to_float(x[m * s.E + i]);
  Team::run(std::make_shared<Team>(5 * s.L + 1), s.memory.size(),
            [layers](Team::Member member) { best(*layers, member); });
}

}  // namespace

void decoder_layers_cpu(const DecoderLayers& batch) {
  (batch.type == FloatType::float32 ? run<float> : run<c10::BFloat16>)(batch);
}

}  // namespace specvis
