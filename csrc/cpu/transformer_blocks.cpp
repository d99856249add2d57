// transformer_blocks on the CPU: all blocks in one parallel region. A phase is attention, whose tasks are some queries
// of a head, or all that follows it up to the next one's queries, keys and values, whose tasks are some rows.
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

constexpr int64_t kTaskRows = 24, kTaskQueries = 96;
constexpr int64_t kThreadWork = 1 << 19;  // products; less is not worth another thread

// The memory of one thread.
template <class T>
struct Memory {
  std::vector<T> rows, hidden;  // (kTaskRows, E), (kTaskRows, F)
  std::vector<float> y;         // a product
  std::vector<T> queries;       // (kTaskQueries, D)
  AttentionScratch scratch;
};

template <class T>
struct Blocks : TransformerBlocks {
  std::vector<int64_t> columns;  // (R, n): `wanted`, each a column of the row
  std::vector<Row> rows;
  std::vector<Memory<T>> memory;
  // between phases
  std::vector<float> stream;     // (R * N, E)
  std::vector<T> qkv, attended;  // (R * N, 3 E), (R * N, E)
};

// By Abramowitz and Stegun's 7.1.26 of the error function, which is exact to 2e-7.
template <int kLanes>
INLINE Vec<kLanes> gelu(Vec<kLanes> x) {
  const Vec<kLanes> a = (x < 0 ? -x : x) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * a);
  Vec<kLanes> sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const Vec<kLanes> tail = sum * t * exp_of_lanes<kLanes>(-a * a) * 0.5f;  // the tail of the normal distribution
  return x * (x < 0 ? tail : 1.f - tail);
}

template <int kLanes, class T>
INLINE void norm(const float* x, const float* weight, int64_t E, float eps, T* to) {
  const auto [mean, factor] = moments<kLanes>(x, E, eps);
  for (int64_t i = 0; i < E; i += kLanes)
    store<kLanes>(to + i,
                  (load<kLanes>(x + i) - mean) * factor * load<kLanes>(weight + i) + load<kLanes>(weight + E + i));
}

template <int kLanes, class T>
INLINE void read(Blocks<T>& s, Team::Member& member) {
  const int64_t E = s.E, F = s.F, D = E / s.H, padded_E = round_up(E, kPanel);
  auto& [rows, hidden, y, queries, scratch] = s.memory[member.number];
  // y = x W, and then use(i-th row, c, kLanes outputs) for each
  const auto product = [&](const T* x, int64_t num_rows, int64_t K, const T* weight, const float* bias, int64_t outputs,
                           auto use) INLINED {
    const int64_t stride = round_up(outputs, kPanel);
    multiply(Product<T>{x, num_rows, K, weight, 0, stride / kPanel, y.data(), stride});
    for (int64_t m = 0; m < num_rows; ++m)
      for (int64_t c = 0; c < outputs; c += kLanes)
        use(m, c, load<kLanes>(&y[m * stride + c]) + load<kLanes>(bias + c));
  };
  const auto project = [&](int64_t layer, int64_t begin, int64_t end) INLINED {
    const float* const v = s.vectors + layer * s.layer_vectors();
    for (int64_t m = begin; m < end; ++m) norm<kLanes>(&s.stream[m * E], v, E, s.eps, &rows[(m - begin) * E]);
    product(
        rows.data(), end - begin, E, static_cast<const T*>(s.matrices) + layer * s.layer_matrices(), v + 2 * E, 3 * E,
        [&](int64_t m, int64_t c, Vec<kLanes> sum) INLINED { store<kLanes>(&s.qkv[(begin + m) * 3 * E + c], sum); });
  };
  const auto for_rows = [&](int64_t num_rows, auto task) INLINED {
    const int64_t tasks = (num_rows + kTaskRows - 1) / kTaskRows;
    member.phase(tasks, [&](int64_t i) INLINED { task(num_rows * i / tasks, num_rows * (i + 1) / tasks); });
  };

  for_rows(s.R * s.N, [&](int64_t begin, int64_t end) INLINED { project(0, begin, end); });
  for (int64_t layer = 0; layer < s.L; ++layer) {
    const bool is_last = layer + 1 == s.L;
    const int64_t n = is_last ? s.n : s.N, parts = (n + kTaskQueries - 1) / kTaskQueries;
    member.phase(s.R * s.H * parts, [&](int64_t i) INLINED {
      const int64_t r = i / (s.H * parts), h = i / parts % s.H, begin = n * (i % parts) / parts,
                    end = n * (i % parts + 1) / parts;
      const T* const first = &s.qkv[r * s.N * 3 * E + h * D];
      for (int64_t m = begin; m < end; ++m)
        std::copy_n(first + (is_last ? s.columns[r * n + m] : m) * 3 * E, D, &queries[(m - begin) * D]);
      Head<T> head = {};
      head.q = queries.data();
      head.k = first + E;
      head.v = first + 2 * E;
      head.query_stride = head.query_head_stride = D;
      head.k_stride = head.v_stride = 3 * E;
      head.N = end - begin;
      head.G = 1;
      head.D = D;
      head.scale = 1.f / std::sqrt(static_cast<float>(D));
      head.out = &s.attended[(r * n + begin) * E + h * D];
      head.out_stride = E;
      attend(head, s.rows[r], scratch);
    });

    const float* const v = s.vectors + layer * s.layer_vectors();
    const float *const out_bias = v + 5 * E, *const second_norm = out_bias + E, *const up_bias = second_norm + 2 * E;
    const T* const w_out = static_cast<const T*>(s.matrices) + layer * s.layer_matrices() + round_up(3 * E, kPanel) * E;
    const T* const w_up = w_out + padded_E * E;
    const T* const w_down = w_up + round_up(F, kPanel) * E;
    for_rows(s.R * n, [&](int64_t begin, int64_t end) INLINED {
      const int64_t num_rows = end - begin;
      float* stream = &s.stream[begin * E];
      std::vector<float> picked;
      if (is_last) {
        picked.resize(num_rows * E);
        for (int64_t m = begin; m < end; ++m)
          std::copy_n(&s.stream[(m / n * s.N + s.columns[m]) * E], E, &picked[(m - begin) * E]);
        stream = picked.data();
      }
      const auto add = [&](int64_t m, int64_t c, Vec<kLanes> sum)
                           INLINED { store<kLanes>(stream + m * E + c, load<kLanes>(stream + m * E + c) + sum); };
      product(&s.attended[begin * E], num_rows, E, w_out, out_bias, E, add);
      for (int64_t m = 0; m < num_rows; ++m) norm<kLanes>(stream + m * E, second_norm, E, s.eps, &rows[m * E]);
      product(rows.data(), num_rows, E, w_up, up_bias, F, [&](int64_t m, int64_t c, Vec<kLanes> sum) INLINED {
        store<kLanes>(&hidden[m * F + c], gelu<kLanes>(sum));
      });
      product(hidden.data(), num_rows, F, w_down, up_bias + F, E, add);
      if (!is_last) return project(layer + 1, begin, end);
      for (int64_t m = 0; m < num_rows; ++m) {
        T* const to = static_cast<T*>(s.out) + (begin + m) * E;
        if (s.last_norm) {
          norm<kLanes>(stream + m * E, s.last_norm, E, s.eps, to);
        } else {
          for (int64_t i = 0; i < E; i += kLanes) store<kLanes>(to + i, load<kLanes>(stream + m * E + i));
        }
      }
    });
  }
}

FOR_EACH_MACHINE(template <class T>, read, (Blocks<T> & s, Team::Member& member), read<kLanes>(s, member))

template <class T>
void run(const TransformerBlocks& batch) {
  static const auto best = BEST_FUNCTION(read, <T>);
  const auto blocks = std::make_shared<Blocks<T>>();
  Blocks<T>& s = *blocks;
  static_cast<TransformerBlocks&>(s) = batch;
  s.columns.assign(s.wanted, s.wanted + s.R * s.n);
  for (int64_t& column : s.columns) column = std::clamp<int64_t>(column, 0, s.N - 1);
  const int64_t S = s.key_mask ? s.N : 0;
  s.rows.resize(s.R);
  for (int64_t r = 0; r < s.R; ++r) s.rows[r].set(s.N, s.N, s.key_mask + r * S, S, nullptr, kTaskQueries, 0);
  const int64_t M = s.R * s.N;
  s.memory.resize(Team::threads_for(M * s.L * (s.layer_matrices() + 2 * s.N * s.E), kThreadWork));
  for (Memory<T>& memory : s.memory) {
    memory.rows.resize(kTaskRows * s.E);
    memory.hidden.resize(kTaskRows * s.F);
    memory.y.resize(kTaskRows * std::max(round_up(3 * s.E, kPanel), round_up(s.F, kPanel)));
    memory.queries.resize(kTaskQueries * s.E / s.H);
  }
  s.stream.resize(M * s.E);
  s.qkv.resize(M * 3 * s.E);
  s.attended.resize(s.R * std::max(s.N, s.n) * s.E);
  for (int64_t i = 0; i < M * s.E; ++i) s.stream[i] = to_float(static_cast<const T*>(s.x)[i]);
  Team::run(std::make_shared<Team>(2 * s.L + 1), s.memory.size(),
            [blocks](Team::Member member) { best(*blocks, member); });
}

}  // namespace

void transformer_blocks_cpu(const TransformerBlocks& batch) {
  (batch.type == FloatType::float32 ? run<float> : run<c10::BFloat16>)(batch);
}

}  // namespace specvis
