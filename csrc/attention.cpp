#include "attention.h"

#include <limits>
#include <type_traits>

#include "vectors.h"

namespace specvis {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 64;        // keys that are converted at once
constexpr int64_t kReadInPlace = 2;  // so many queries read float32 keys where they are

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
INLINE void attend_by(const Head<T>& head, const Row& row, Scratch& scratch) {
  constexpr int kQueries = kLanes == 16 ? 4 : 2;
  const int64_t M = head.N * head.G, D = head.D, width = round_up(D, kLanes), num_columns = row.columns.size();
  const int64_t score_stride = round_up(num_columns + row.most_ancestors, kLanes) + kLanes;
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
    for (int64_t begin = 0; begin < num_columns; begin += kTile) {
      const int32_t* const columns = row.columns.data() + begin;
      const int64_t count = std::min(kTile, num_columns - begin);
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
    const int32_t* const ancestors = row.ancestors.data() + row.ends[m / head.G];
    const int64_t num_ancestors = row.ends[m / head.G + 1] - row.ends[m / head.G];
    for (int64_t i = 0; i < num_ancestors; i += kLanes) {
      const float* key[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) key[j] = node_keys + ancestors[std::min(i + j, num_ancestors - 1)] * width;
      store<kLanes>(x + num_columns + i,
                    scores_of<kLanes>(queries + m * width, [&](int j) INLINED { return key[j]; }, width));
    }
    const int64_t seen = num_columns + num_ancestors, end = round_up(seen, kLanes);
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
    const float* share = scores + m * score_stride + num_columns;
    for (int64_t a = row.ends[n]; a < row.ends[n + 1]; ++a)
      add_values<kLanes, 1>(node_values + row.ancestors[a] * width, width, 1, share++, 0, sum, width);
    T* const out = head.out + n * head.out_stride + m % head.G * D;
    for (int64_t d = 0; d < D; ++d) out[d] = static_cast<T>(sum[d] * inverses[m]);
  }
}

template <class T>
FOR_AVX512 void attend_avx512(const Head<T>& head, const Row& row, Scratch& scratch) {
  attend_by<16>(head, row, scratch);
}
template <class T>
FOR_AVX2 void attend_avx2(const Head<T>& head, const Row& row, Scratch& scratch) {
  attend_by<8>(head, row, scratch);
}
template <class T>
void attend_portable(const Head<T>& head, const Row& row, Scratch& scratch) {
  attend_by<4>(head, row, scratch);
}

}  // namespace

template <class T>
void attend(const Head<T>& head, const Row& row, Scratch& scratch) {
  static const auto best = machine() >= Machine::avx512 ? attend_avx512<T>
                           : machine() == Machine::avx2 ? attend_avx2<T>
                                                        : attend_portable<T>;
  best(head, row, scratch);
}
template void attend(const Head<float>&, const Row&, Scratch&);
template void attend(const Head<c10::Half>&, const Row&, Scratch&);
template void attend(const Head<c10::BFloat16>&, const Row&, Scratch&);

}  // namespace specvis
