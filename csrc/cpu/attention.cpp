#include "attention.h"

#include <limits>
#include <type_traits>

#include "../shared/params.h"
#include "vectors.h"

namespace specvis {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 64;        // values that are looked at at once
constexpr int64_t kReadInPlace = 8;  // up to that many queries read values where they are

// Scores are sums of products of words. A word is a float, or a pair of bfloat16 where the machine multiplies these
// (kHasPairs). Words are kept as floats; only bits are copied.
template <int kLanes, bool kHasPairs>
INLINE void add_words(Vec<kLanes>& sums, Vec<kLanes> a, Vec<kLanes> b) {
  if constexpr (kHasPairs) {
    typename Vector<kLanes>::Ints x, y;
    std::memcpy(&x, &a, sizeof x);
    std::memcpy(&y, &b, sizeof y);
    add_pairs<kLanes>(sums, x, y);
  } else {
    sums += a * b;
  }
}

// A word in all lanes.
template <int kLanes>
INLINE Vec<kLanes> repeated(const float* word) {
  int32_t bits;
  std::memcpy(&bits, word, sizeof bits);
  return bits_as_lanes<kLanes>(typename Vector<kLanes>::Ints{} + bits);
}

// The scores of kLanes keys of `width` words, a multiple of kLanes. kBlocks is width / kLanes, or 0 if that is not
// known beforehand.
template <int kLanes, bool kHasPairs, int kBlocks>
INLINE Vec<kLanes> scores_of(const float* q, const float* const (&keys)[kLanes], int64_t width) {
  return sums_of_lanes<kLanes>([&](int i) INLINED {
    Vec<kLanes> sums = {};
    const int64_t end = kBlocks ? kBlocks * kLanes : width;
#pragma GCC unroll 4
    for (int64_t d = 0; d < end; d += kLanes)
      add_words<kLanes, kHasPairs>(sums, load<kLanes>(keys[i] + d), load<kLanes>(q + d));
    return sums;
  });
}

template <int kLanes, bool kHasPairs>
INLINE Vec<kLanes> scores_of(const float* q, const float* const (&keys)[kLanes], int64_t width) {
  return width == 2 * kLanes   ? scores_of<kLanes, kHasPairs, 2>(q, keys, width)
         : width == 4 * kLanes ? scores_of<kLanes, kHasPairs, 4>(q, keys, width)
                               : scores_of<kLanes, kHasPairs, 0>(q, keys, width);
}

// The scores of kQueries queries, with the bits of scores_of. The keys lie across: word d of kLanes keys is one vector,
// so that the sums over lanes are sums of whole vectors. kBlocks is width / kLanes, or 0 if that is not known
// beforehand.
template <int kLanes, bool kHasPairs, int kQueries, int kBlocks>
struct Across {
  const float *q, *keys;
  int64_t width;

  template <int kGroups, int kFirst>  // sums the lanes kFirst + i * kGroups
  INLINE void sum(Vec<kLanes> (&sums)[kQueries]) const {
    if constexpr (kGroups == kLanes) {
      for (int m = 0; m < kQueries; ++m) sums[m] = Vec<kLanes>{};
      const int64_t blocks = kBlocks ? kBlocks : width / kLanes;
#pragma GCC unroll 4
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t d = j * kLanes + kFirst;
        const Vec<kLanes> key = load<kLanes>(keys + d * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kQueries; ++m)
          add_words<kLanes, kHasPairs>(sums[m], key, repeated<kLanes>(q + m * width + d));
      }
    } else {
      Vec<kLanes> others[kQueries];
      sum<2 * kGroups, kFirst>(sums);
      sum<2 * kGroups, kFirst + kGroups>(others);
      for (int m = 0; m < kQueries; ++m) sums[m] += others[m];
    }
  }
};

template <int kLanes, bool kHasPairs, int kQueries>
INLINE void scores_across(const float* q, const float* keys, int64_t width, float scale, float* scores,
                          int64_t score_stride) {
  Vec<kLanes> sums[kQueries];
  if (width == 2 * kLanes) {
    Across<kLanes, kHasPairs, kQueries, 2>{q, keys, width}.template sum<1, 0>(sums);
  } else if (width == 4 * kLanes) {
    Across<kLanes, kHasPairs, kQueries, 4>{q, keys, width}.template sum<1, 0>(sums);
  } else {
    Across<kLanes, kHasPairs, kQueries, 0>{q, keys, width}.template sum<1, 0>(sums);
  }
  for (int m = 0; m < kQueries; ++m) store<kLanes>(scores + m * score_stride, sums[m] * scale);
}

// Lays kLanes keys across, kLanes words at a time.
template <int kLanes>
INLINE void lay_across(const float* const (&keys)[kLanes], int64_t width, float* to) {
  typename Vector<kLanes>::Ints low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 2 + i % 2 * kLanes;
    high[i] = low[i] + kLanes / 2;
  }
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec<kLanes> x[kLanes], y[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = load<kLanes>(keys[i] + d);
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

// Values and their sums are vectors of floats; of bfloat16, entries with even numbers and entries with odd ones take
// turns. Where entry d is:
template <int kLanes, class T>
constexpr int64_t place_of(int64_t d) {
  return std::is_same_v<T, c10::BFloat16> ? d / (2 * kLanes) * 2 * kLanes + d % 2 * kLanes + d % (2 * kLanes) / 2 : d;
}

template <int kLanes, int kVectors>
INLINE void load_value(const float* from, Vec<kLanes> (&to)[kVectors]) {
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) to[c] = load<kLanes>(from + c * kLanes);
}
template <int kLanes, int kVectors>
INLINE void load_value(const c10::BFloat16* from, Vec<kLanes> (&to)[kVectors]) {
#pragma GCC unroll 8
  for (int c = 0; c + 1 < kVectors; c += 2) load_pairs<kLanes>(from + c * kLanes, to[c], to[c + 1]);
}

// Adds values, each times its share, to kVectors vectors of the sums of kQueries queries, value after value.
template <int kLanes, int kVectors, int kQueries, class V>
INLINE void add_values(const V* const* values, int64_t begin, int64_t count, const float* shares, int64_t share_stride,
                       float* sums, int64_t width) {
  Vec<kLanes> x[kQueries][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) x[m][c] = load<kLanes>(sums + m * width + begin + c * kLanes);
  }
  for (int64_t i = 0; i < count; ++i) {
    Vec<kLanes> value[kVectors];
    load_value<kLanes, kVectors>(values[i] + begin, value);
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
    for (int c = 0; c < kVectors; ++c) store<kLanes>(sums + m * width + begin + c * kLanes, x[m][c]);
  }
}

template <int kLanes, int kQueries, class V>
INLINE void add_values(const V* const* values, int64_t count, const float* shares, int64_t share_stride, float* sums,
                       int64_t width) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    add_values<kLanes, 4, kQueries>(values, d, count, shares, share_stride, sums, width);
  for (; d + 2 * kLanes <= width; d += 2 * kLanes)
    add_values<kLanes, 2, kQueries>(values, d, count, shares, share_stride, sums, width);
  if constexpr (!std::is_same_v<V, c10::BFloat16>) {
    for (; d < width; d += kLanes) add_values<kLanes, 1, kQueries>(values, d, count, shares, share_stride, sums, width);
  }
}

// Entries as words; zeros fill them up.
template <bool kHasPairs, class T>
INLINE void stage_words(const T* from, int64_t D, int64_t width, float* to) {
  std::memset(to, 0, width * sizeof *to);
  if constexpr (kHasPairs)
    std::memcpy(to, from, D * sizeof *from);
  else
    convert(from, D, to);
}

// Entries as vectors of floats; zeros fill them up.
template <int kLanes, class T>
INLINE void stage_value(const T* from, int64_t D, int64_t width, float* to) {
  int64_t d = 0;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    for (; d + 2 * kLanes <= D; d += 2 * kLanes) {
      Vec<kLanes> even, odd;
      load_pairs<kLanes>(from + d, even, odd);
      store<kLanes>(to + d, even);
      store<kLanes>(to + d + kLanes, odd);
    }
  }
  for (; d < width; ++d) to[place_of<kLanes, T>(d)] = d < D ? to_float(from[d]) : 0.f;
}

template <int kLanes, bool kHasPairs, class T>
INLINE void attend_by(const Head<T>& head, const Row& row, AttentionScratch& scratch) {
  constexpr int kQueries = kLanes == 16 ? 4 : 2;
  constexpr bool kHasWords = kHasPairs || std::is_same_v<T, float>, kIsHalf = std::is_same_v<T, c10::Half>;
  constexpr bool kIsInPairs = std::is_same_v<T, c10::BFloat16>;
  using Value = std::conditional_t<kIsHalf, float, T>;
  const int64_t M = head.N * head.G, D = head.D, num_columns = row.columns.size();
  const int64_t words = round_up(kHasPairs ? (D + 1) / 2 : D, kLanes),
                width = round_up(D, kIsInPairs ? 2 * kLanes : kLanes);
  const int64_t score_stride = round_up(num_columns + row.most_ancestors, kLanes) + kLanes;
  const bool keys_in_place = kHasWords && D * sizeof(T) == words * sizeof(float);
  const bool values_in_place = !kIsHalf && M <= kReadInPlace && D == width;
  const bool is_across = M * 8 >= words;  // with fewer queries, laying the keys across would take longer

  float* const queries = scratch.floats(M * (words + width + score_stride + 1) + 2 * kLanes * words +
                                        std::max(kTile, row.num_nodes) * width);
  float* const sums = queries + M * words;
  float* const scores = sums + M * width;
  float* const inverses = scores + M * score_stride;
  float* const staged_keys = inverses + M;
  float* const across = staged_keys + kLanes * words;
  float* const staged_values = across + kLanes * words;

  for (int64_t m = 0; m < M; ++m)
    stage_words<kHasPairs>(head.q + m / head.G * head.query_stride + m % head.G * head.query_head_stride, D, words,
                           queries + m * words);
  std::fill(sums, sums + M * width, 0.f);

  const float* keys[kLanes];
  const auto take_key = [&](int i, int64_t column) INLINED {
    const T* const key = head.k + column * head.k_stride;
    keys[i] = keys_in_place ? static_cast<const float*>(static_cast<const void*>(key)) : staged_keys + i * words;
    if (!keys_in_place) stage_words<kHasPairs>(key, D, words, staged_keys + i * words);
  };
  for (int64_t begin = 0; begin < num_columns; begin += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const int64_t column = row.columns[std::min(begin + i, num_columns - 1)];
      const int64_t later = row.columns[std::min(begin + 2 * kLanes + i, num_columns - 1)];
      for (int64_t d = 0; d < D; d += 64 / sizeof(T)) {
        __builtin_prefetch(head.k + later * head.k_stride + d);
        __builtin_prefetch(head.v + column * head.v_stride + d);
      }
      take_key(i, column);
    }
    int64_t m = 0;
    if (is_across) {
      lay_across<kLanes>(keys, words, across);
      for (; m + 4 <= M; m += 4)
        scores_across<kLanes, kHasPairs, 4>(queries + m * words, across, words, head.scale,
                                            scores + m * score_stride + begin, score_stride);
    }
    for (; m < M; ++m)
      store<kLanes>(scores + m * score_stride + begin,
                    scores_of<kLanes, kHasPairs>(queries + m * words, keys, words) * head.scale);
  }

  for (int64_t m = 0; m < M; ++m) {
    float* const x = scores + m * score_stride;
    const int32_t* const ancestors = row.ancestors.data() + row.ends[m / head.G];
    const int64_t num_ancestors = row.ends[m / head.G + 1] - row.ends[m / head.G];
    for (int64_t begin = 0; begin < num_ancestors; begin += kLanes) {
      for (int i = 0; i < kLanes; ++i)
        take_key(i, row.first_node + ancestors[std::min<int64_t>(begin + i, num_ancestors - 1)]);
      store<kLanes>(x + num_columns + begin,
                    scores_of<kLanes, kHasPairs>(queries + m * words, keys, words) * head.scale);
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

  // Adds the values of some queries, which share the columns.
  const auto add = [&](const auto* const* values, int64_t count, int64_t column, int64_t m, int64_t end) INLINED {
    const float* const shares = scores + column;
    for (; m + kQueries <= end; m += kQueries)
      add_values<kLanes, kQueries>(values, count, shares + m * score_stride, score_stride, sums + m * width, width);
    for (; m < end; ++m)
      add_values<kLanes, 1>(values, count, shares + m * score_stride, score_stride, sums + m * width, width);
  };
  const Value* values[kTile];
  const float* floats[kTile];
  const auto stage = [&](int64_t i, int64_t column) INLINED {
    stage_value<kLanes>(head.v + column * head.v_stride, D, width, staged_values + i * width);
  };
  for (int64_t begin = 0; begin < num_columns; begin += kTile) {
    const int64_t count = std::min(kTile, num_columns - begin);
    if constexpr (!kIsHalf) {
      if (values_in_place) {
        for (int64_t i = 0; i < count; ++i) values[i] = head.v + row.columns[begin + i] * head.v_stride;
        add(values, count, begin, 0, M);
        continue;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      stage(i, row.columns[begin + i]);
      floats[i] = staged_values + i * width;
    }
    add(floats, count, begin, 0, M);
  }

  for (int64_t j = 0; j < row.num_nodes && !values_in_place; ++j) stage(j, row.first_node + j);
  for (int64_t m = 0; m < M; ++m) {
    const int64_t n = m / head.G, first = row.ends[n], end = row.ends[n + 1];
    for (int64_t begin = first; begin < end; begin += kTile) {
      const int64_t count = std::min(kTile, end - begin), column = num_columns + begin - first;
      if constexpr (!kIsHalf) {
        if (values_in_place) {
          for (int64_t i = 0; i < count; ++i)
            values[i] = head.v + (row.first_node + row.ancestors[begin + i]) * head.v_stride;
          add(values, count, column, m, m + 1);
          continue;
        }
      }
      for (int64_t i = 0; i < count; ++i) floats[i] = staged_values + row.ancestors[begin + i] * width;
      add(floats, count, column, m, m + 1);
    }
    T* const out = head.out + n * head.out_stride + m % head.G * D;
    int64_t d = 0;
    const auto scaled = [&](int64_t at) INLINED { return load<kLanes>(sums + m * width + at) * inverses[m]; };
    if constexpr (kIsInPairs) {
      for (; d + 2 * kLanes <= D; d += 2 * kLanes) store_pairs<kLanes>(out + d, scaled(d), scaled(d + kLanes));
    } else if constexpr (!kIsHalf) {
      for (; d + kLanes <= D; d += kLanes) store<kLanes>(out + d, scaled(d));
    }
    for (; d < D; ++d) out[d] = static_cast<T>(sums[m * width + place_of<kLanes, T>(d)] * inverses[m]);
  }
}

FOR_AVX512_BF16 void attend_avx512_bf16(const Head<c10::BFloat16>& head, const Row& row, AttentionScratch& scratch) {
  attend_by<16, true>(head, row, scratch);
}
FOR_EACH_MACHINE(template <class T>, attend, (const Head<T>& head, const Row& row, AttentionScratch& scratch),
                 attend_by<kLanes, false>(head, row, scratch))

template <class T>
auto best_attend() {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (machine() == Machine::avx512_bf16) return &attend_avx512_bf16;
  }
  return BEST_FUNCTION(attend, <T>);
}

}  // namespace

template <class T>
void attend(const Head<T>& head, const Row& row, AttentionScratch& scratch) {
  static const auto best = best_attend<T>();
  best(head, row, scratch);
}
template void attend(const Head<float>&, const Row&, AttentionScratch&);
template void attend(const Head<c10::Half>&, const Row&, AttentionScratch&);
template void attend(const Head<c10::BFloat16>&, const Row&, AttentionScratch&);

}  // namespace specvis
