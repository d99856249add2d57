// tree_attention on the CPU: each task takes rows and heads of keys. A key's score and a sum over keys are computed in
// an order that depends on the query and its own keys alone, so that it does not matter what is read beside it.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "arguments.h"

// What is compiled for several machines must be inlined: only the outermost function names the machine.
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

// A product and the sum that it is added to are rounded once where the machine can do that. Every path below does so
// alike.
#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#pragma GCC diagnostic ignored "-Wpsabi"  // the functions that vectors are passed to are inlined
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 64;           // keys that are converted at once
constexpr int64_t kReadInPlace = 2;     // so many queries read float32 keys where they are
constexpr int64_t kTaskWork = 1 << 16;  // products; less is not worth another thread

template <int kLanes>
struct Vector;
#define VECTOR(lanes)                                             \
  template <>                                                     \
  struct Vector<lanes> {                                          \
    typedef float Of __attribute__((vector_size(lanes * 4)));     \
    typedef int32_t Ints __attribute__((vector_size(lanes * 4))); \
  }
VECTOR(4);
VECTOR(8);
VECTOR(16);
#undef VECTOR

template <int kLanes>
using Vec = typename Vector<kLanes>::Of;

template <int kLanes>
INLINE Vec<kLanes> load(const float* from) {
  Vec<kLanes> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <int kLanes>
INLINE void store(float* to, Vec<kLanes> x) {
  std::memcpy(to, &x, sizeof x);
}

// The entries of a and b, counted through, that these indices name.
template <int kLanes>
INLINE Vec<kLanes> shuffle(Vec<kLanes> a, Vec<kLanes> b, typename Vector<kLanes>::Ints indices) {
#ifdef __clang__
  Vec<kLanes> x;
  for (int i = 0; i < kLanes; ++i) x[i] = indices[i] < kLanes ? a[indices[i]] : b[indices[i] - kLanes];
  return x;
#else
  return __builtin_shuffle(a, b, indices);
#endif
}

// The sums of pairs of lanes that are kWidth / 2 apart, of two vectors.
template <int kLanes, int kWidth>
INLINE Vec<kLanes> fold(Vec<kLanes> a, Vec<kLanes> b) {
  typename Vector<kLanes>::Ints low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / (kWidth / 2) * kWidth + i % (kWidth / 2);
    high[i] = low[i] + kWidth / 2;
  }
  return shuffle<kLanes>(a, b, low) + shuffle<kLanes>(a, b, high);
}

// The sum of the lanes of each of kLanes vectors: lane l and l + kLanes / 2 first, and so on.
template <int kLanes>
INLINE Vec<kLanes> sums_of_lanes(Vec<kLanes> (&x)[kLanes]) {
  constexpr int kHalf = kLanes / 2, kQuarter = kLanes / 4;
  for (int i = 0; i < kHalf; ++i) x[i] = fold<kLanes, kLanes>(x[2 * i], x[2 * i + 1]);
  for (int i = 0; i < kQuarter; ++i) x[i] = fold<kLanes, kLanes / 2>(x[2 * i], x[2 * i + 1]);
  if constexpr (kLanes >= 8) {
    for (int i = 0; i < kLanes / 8; ++i) x[i] = fold<kLanes, kLanes / 4>(x[2 * i], x[2 * i + 1]);
  }
  if constexpr (kLanes >= 16) x[0] = fold<kLanes, kLanes / 8>(x[0], x[1]);
  return x[0];
}

template <int kLanes>
INLINE float sum_of_lanes(Vec<kLanes> x) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

// exp of each lane, as exp_of of floats.h.
template <int kLanes>
INLINE Vec<kLanes> exp_of_lanes(Vec<kLanes> x) {
  using Ints = typename Vector<kLanes>::Ints;
  const Vec<kLanes> clamped = x < -100.f ? Vec<kLanes>{} - 100.f : x;
  const Vec<kLanes> shifted = clamped * 1.44269504f + 12582912.f;
  const Vec<kLanes> n = shifted - 12582912.f;
  const Vec<kLanes> r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<kLanes> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * r) * r + r + 1.f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  Vec<kLanes> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.f ? Vec<kLanes>{} : y * scale;
}

// The scores of kLanes keys. key(i) is where the i-th begins; both have `width` entries, a multiple of kLanes.
template <int kLanes, class Key>
INLINE Vec<kLanes> scores_of(const float* q, Key key, int64_t width) {
  Vec<kLanes> sums[kLanes] = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec<kLanes> x = load<kLanes>(q + d);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] += x * load<kLanes>(key(i) + d);
  }
  return sums_of_lanes<kLanes>(sums);
}

// The same scores, bit for bit, of kQueries queries. The keys lie across: entry d of kLanes keys is one vector, so that
// the sums over lanes are sums of whole vectors. kBlocks is width / kLanes, or 0 if that is not known beforehand.
template <int kLanes, int kQueries, int kBlocks>
struct Across {
  const float *q, *keys;
  int64_t width;

  template <int kGroups, int kFirst>  // of the lanes kFirst + i * kGroups
  INLINE void sum(Vec<kLanes> (&sums)[kQueries]) const {
    if constexpr (kGroups == kLanes) {
      for (int m = 0; m < kQueries; ++m) sums[m] = Vec<kLanes>{};
      const int64_t blocks = kBlocks ? kBlocks : width / kLanes;
#pragma GCC unroll 4
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t d = j * kLanes + kFirst;
        const Vec<kLanes> key = load<kLanes>(keys + d * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kQueries; ++m) sums[m] += key * q[m * width + d];
      }
    } else {
      Vec<kLanes> others[kQueries];
      sum<2 * kGroups, kFirst>(sums);
      sum<2 * kGroups, kFirst + kGroups>(others);
      for (int m = 0; m < kQueries; ++m) sums[m] += others[m];
    }
  }
};

template <int kLanes, int kQueries>
INLINE void scores_across(const float* q, const float* keys, int64_t width, float* scores, int64_t score_stride) {
  Vec<kLanes> sums[kQueries];
  if (width == 2 * kLanes) {
    Across<kLanes, kQueries, 2>{q, keys, width}.template sum<1, 0>(sums);
  } else if (width == 4 * kLanes) {
    Across<kLanes, kQueries, 4>{q, keys, width}.template sum<1, 0>(sums);
  } else {
    Across<kLanes, kQueries, 0>{q, keys, width}.template sum<1, 0>(sums);
  }
  for (int m = 0; m < kQueries; ++m) store<kLanes>(scores + m * score_stride, sums[m]);
}

// Lays kLanes keys across, kLanes entries at a time.
template <int kLanes>
INLINE void lay_across(const float* keys, int64_t stride, int64_t width, float* to) {
  typename Vector<kLanes>::Ints low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 2 + i % 2 * kLanes;
    high[i] = low[i] + kLanes / 2;
  }
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec<kLanes> x[kLanes], y[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = load<kLanes>(keys + i * stride + d);
#pragma GCC unroll 4
    for (int step = 1; step < kLanes; step *= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes / 2; ++i) {
        y[2 * i] = shuffle<kLanes>(x[i], x[i + kLanes / 2], low);
        y[2 * i + 1] = shuffle<kLanes>(x[i], x[i + kLanes / 2], high);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store<kLanes>(to + (d + i) * kLanes, x[i]);
  }
}

// Adds values, each times its share, to kVectors vectors of the sums of kQueries queries, key after key.
template <int kLanes, int kVectors, int kQueries>
INLINE void add_values(const float* values, int64_t value_stride, int64_t num_keys, const float* shares,
                       int64_t share_stride, float* sums, int64_t sum_stride) {
  Vec<kLanes> x[kQueries][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) x[m][c] = load<kLanes>(sums + m * sum_stride + c * kLanes);
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    Vec<kLanes> value[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) value[c] = load<kLanes>(values + i * value_stride + c * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kQueries; ++m) {
      const float share = shares[m * share_stride + i];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) x[m][c] += value[c] * share;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store<kLanes>(sums + m * sum_stride + c * kLanes, x[m][c]);
  }
}

template <int kLanes, int kQueries>
INLINE void add_values(const float* values, int64_t value_stride, int64_t num_keys, const float* shares,
                       int64_t share_stride, float* sums, int64_t width) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    add_values<kLanes, 4, kQueries>(values + d, value_stride, num_keys, shares, share_stride, sums + d, width);
  for (; d + 2 * kLanes <= width; d += 2 * kLanes)
    add_values<kLanes, 2, kQueries>(values + d, value_stride, num_keys, shares, share_stride, sums + d, width);
  for (; d < width; d += kLanes)
    add_values<kLanes, 1, kQueries>(values + d, value_stride, num_keys, shares, share_stride, sums + d, width);
}

INLINE float bits_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(c10::BFloat16 x) { return bits_as_float(uint32_t{x.x} << 16); }
INLINE float to_float(c10::Half x) {
  const uint32_t magnitude = uint32_t{x.x} & 0x7fff;
  const float finite = bits_as_float(magnitude << 13) * 5.192296858534828e33f;  // 2^112; exact for subnormals too
  uint32_t bits;
  std::memcpy(&bits, &finite, sizeof bits);
  bits = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000 : bits;
  return bits_as_float(bits | (uint32_t{x.x} & 0x8000) << 16);
}

template <class T>
INLINE void convert(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// Memory of a thread, in which it computes a head of a row after another.
struct Scratch {
  std::unique_ptr<float[]> memory;
  int64_t size = 0;

  float* floats(int64_t n) {
    if (n > size) {
      memory.reset(new float[n]);
      size = n;
    }
    return memory.get();
  }
};

// One row: what each of its queries sees.
struct Row {
  const int32_t* columns;  // the cached columns that are seen, rising
  int64_t num_columns;
  int64_t first_node, num_nodes;  // the columns of the nodes
  const int32_t* ancestors;       // of each query, one after the other, rising
  const int64_t* ancestor_ends;   // of N + 1: those of query n are within [ends[n], ends[n + 1])
  int64_t most_ancestors;
};

// One row and one head of keys, with the N * G queries that look at it.
template <class T>
struct Head {
  const T *q, *k, *v;
  int64_t query_stride, query_head_stride, k_stride, v_stride;
  int64_t N, G, D;
  float scale;
  T* out;  // (N, heads, D)
  int64_t out_stride;
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Entries of kTile columns from `begin` on, as floats; zeros fill up a row.
template <class T>
INLINE void stage(const T* cache, int64_t stride, const int32_t* columns, int64_t count, int64_t D, int64_t width,
                  float* to) {
  for (int64_t i = 0; i < count; ++i) {
    convert(cache + columns[i] * stride, D, to + i * width);
    for (int64_t d = D; d < width; ++d) to[i * width + d] = 0;
  }
}

template <int kLanes, class T>
INLINE void attend(const Head<T>& head, const Row& row, Scratch& scratch) {
  constexpr int kQueries = kLanes == 16 ? 4 : 2;
  const int64_t M = head.N * head.G, D = head.D, width = round_up(D, kLanes);
  const int64_t score_stride = round_up(row.num_columns + row.most_ancestors, kLanes) + kLanes;
  float* const queries =
      scratch.floats(2 * M * width + M + M * score_stride + kTile * width + kLanes * width + 2 * row.num_nodes * width);
  float* const sums = queries + M * width;
  float* const scores = sums + M * width;
  float* const tile = scores + M * score_stride;
  float* const across = tile + kTile * width;
  float* const node_keys = across + kLanes * width;
  float* const node_values = node_keys + row.num_nodes * width;
  float* const inverses = node_values + row.num_nodes * width;

  for (int64_t m = 0; m < M; ++m) {
    float* const q = queries + m * width;
    convert(head.q + m / head.G * head.query_stride + m % head.G * head.query_head_stride, D, q);
    for (int64_t d = 0; d < D; ++d) q[d] *= head.scale;
    for (int64_t d = D; d < width; ++d) q[d] = 0;
  }
  for (int64_t j = 0; j < row.num_nodes; ++j) {
    const int32_t column = static_cast<int32_t>(row.first_node + j);
    stage(head.k, head.k_stride, &column, 1, D, width, node_keys + j * width);
    stage(head.v, head.v_stride, &column, 1, D, width, node_values + j * width);
  }
  std::fill(sums, sums + M * width, 0.f);

  const bool is_across = M * 8 >= width;  // so many queries are worth laying the keys across

  // Calls use(begin, count, entries, stride) for tiles of the cached columns.
  const auto for_each_tile = [&](const T* cache, int64_t stride, bool in_place, auto use) INLINED {
    for (int64_t begin = 0; begin < row.num_columns; begin += kTile) {
      const int32_t* const columns = row.columns + begin;
      const int64_t count = std::min(kTile, row.num_columns - begin);
      if constexpr (std::is_same_v<T, float>) {
        if (in_place && width == D && columns[count - 1] - columns[0] == count - 1 && count % kLanes == 0) {
          use(begin, count, cache + columns[0] * stride, stride);
          continue;
        }
      }
      stage(cache, stride, columns, count, D, width, tile);
      use(begin, count, static_cast<const float*>(tile), width);
    }
  };

  for_each_tile(
      head.k, head.k_stride, is_across || M <= kReadInPlace,
      [&](int64_t begin, int64_t count, const float* keys, int64_t stride) INLINED {
        for (int64_t i = 0; i < count; i += kLanes) {
          const float* const first = keys + i * stride;
          float* const to = scores + begin + i;
          int64_t m = 0;
          if (is_across) {
            lay_across<kLanes>(first, stride, width, across);
            for (; m + 4 <= M; m += 4)
              scores_across<kLanes, 4>(queries + m * width, across, width, to + m * score_stride, score_stride);
            for (; m < M; ++m)
              scores_across<kLanes, 1>(queries + m * width, across, width, to + m * score_stride, score_stride);
          }
          for (; m < M; ++m)
            store<kLanes>(
                to + m * score_stride,
                scores_of<kLanes>(queries + m * width, [&](int j) INLINED { return first + j * stride; }, width));
        }
      });

  for (int64_t m = 0; m < M; ++m) {
    float* const x = scores + m * score_stride;
    const int32_t* const ancestors = row.ancestors + row.ancestor_ends[m / head.G];
    const int64_t num_ancestors = row.ancestor_ends[m / head.G + 1] - row.ancestor_ends[m / head.G];
    for (int64_t i = 0; i < num_ancestors; i += kLanes) {
      const float* key[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) key[j] = node_keys + ancestors[std::min(i + j, num_ancestors - 1)] * width;
      store<kLanes>(x + row.num_columns + i,
                    scores_of<kLanes>(queries + m * width, [&](int j) INLINED { return key[j]; }, width));
    }
    const int64_t seen = row.num_columns + num_ancestors, end = round_up(seen, kLanes);
    for (int64_t i = seen; i < end; ++i) x[i] = -kInf;
    Vec<kLanes> maxima = Vec<kLanes>{} - kInf;
    for (int64_t i = 0; i < end; i += kLanes) {
      const Vec<kLanes> y = load<kLanes>(x + i);
      maxima = y > maxima ? y : maxima;
    }
    float best = maxima[0];
    for (int i = 1; i < kLanes; ++i) best = maxima[i] > best ? maxima[i] : best;
    Vec<kLanes> totals = {};
    for (int64_t i = 0; i < end; i += kLanes) {
      const Vec<kLanes> shares = exp_of_lanes<kLanes>(load<kLanes>(x + i) - best);
      store<kLanes>(x + i, shares);
      totals += shares;
    }
    inverses[m] = seen > 0 ? 1.f / sum_of_lanes<kLanes>(totals) : 0.f;
  }

  for_each_tile(head.v, head.v_stride, M <= kReadInPlace,
                [&](int64_t begin, int64_t count, const float* values, int64_t stride) INLINED {
                  int64_t m = 0;
                  for (; m + kQueries <= M; m += kQueries)
                    add_values<kLanes, kQueries>(values, stride, count, scores + m * score_stride + begin, score_stride,
                                                 sums + m * width, width);
                  for (; m < M; ++m)
                    add_values<kLanes, 1>(values, stride, count, scores + m * score_stride + begin, score_stride,
                                          sums + m * width, width);
                });

  for (int64_t m = 0; m < M; ++m) {
    const int64_t n = m / head.G;
    float* const sum = sums + m * width;
    const float* share = scores + m * score_stride + row.num_columns;
    for (int64_t a = row.ancestor_ends[n]; a < row.ancestor_ends[n + 1]; ++a)
      add_values<kLanes, 1>(node_values + row.ancestors[a] * width, width, 1, share++, 0, sum, width);
    T* const out = head.out + n * head.out_stride + m % head.G * D;
    for (int64_t d = 0; d < D; ++d) out[d] = static_cast<T>(sum[d] * inverses[m]);
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
template <class T>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))) void attend_avx512(const Head<T>& head,
                                                                                          const Row& row, Scratch& s) {
  attend<16>(head, row, s);
}
template <class T>
__attribute__((target("avx2,fma"))) void attend_avx2(const Head<T>& head, const Row& row, Scratch& s) {
  attend<8>(head, row, s);
}
#endif
template <class T>
void attend_portable(const Head<T>& head, const Row& row, Scratch& s) {
  attend<4>(head, row, s);
}

template <class T>
using Attend = void (*)(const Head<T>&, const Row&, Scratch&);

template <class T>
Attend<T> best_attend() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return attend_avx512<T>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return attend_avx2<T>;
#endif
  return attend_portable<T>;
}

template <class T>
void run(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths, const Tensor& ancestors,
         const std::optional<Tensor>& key_mask, float scale, Tensor& attended) {
  static const Attend<T> attend_head = best_attend<T>();
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
  torch::stable::parallel_for(0, R * Hkv, kTaskWork / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    std::vector<int32_t> columns, nodes;
    std::vector<int64_t> ends;
    Row row = {};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / Hkv, h = i % Hkv, b = r % B;
      if (i == begin || h == 0) {  // another row
        const int64_t length = std::clamp<int64_t>(length_of[b], 0, T_);
        columns.clear();
        for (int64_t t = 0; t < length; ++t)
          if (t >= S || mask[r * S + t]) columns.push_back(static_cast<int32_t>(t));
        nodes.clear();
        ends.assign(1, 0);
        row = {};
        row.first_node = length;
        for (int64_t n = 0; n < N; ++n) {
          for (int64_t w = 0; w < W; ++w)
            for (uint64_t bits = words[(b * N + n) * W + w]; bits; bits &= bits - 1) {
              const int64_t node = w * 64 + __builtin_ctzll(bits);
              if (length_of[b] < 0 || length_of[b] >= T_ - node) continue;
              nodes.push_back(static_cast<int32_t>(node));
              row.num_nodes = std::max(row.num_nodes, node + 1);
            }
          row.most_ancestors = std::max<int64_t>(row.most_ancestors, nodes.size() - ends.back());
          ends.push_back(nodes.size());
        }
        row.columns = columns.data();
        row.num_columns = columns.size();
        row.ancestors = nodes.data();
        row.ancestor_ends = ends.data();
      }
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
      attend_head(head, row, scratch);
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
