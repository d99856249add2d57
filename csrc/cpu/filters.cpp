#include "filters.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "pack.h"

namespace specvis {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = FilteredRow::kChunk, kGroups = FilteredRow::kGroups;

int64_t padded(int64_t n) { return (n + kChunk - 1) / kChunk * kChunk; }

// x / temperature. A product with the inverse has the same bits where both are powers of two.
struct Divisor {
  float temperature, inverse;
  bool is_power;
  explicit Divisor(float t) : temperature(t), inverse(1 / t) {
    int exponent;
    is_power = std::frexp(t, &exponent) == 0.5f && exponent > -100 && exponent < 100;
  }
};

template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}

inline uint32_t magnitude(
    float x) {  // its bits without the sign: they are in the order of |x|, and NaN is above infinity
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffffu;
}

constexpr uint32_t kInfiniteMagnitude = 0x7f800000u;

inline __attribute__((always_inline)) uint32_t largest_magnitude(const float* x) {  // x: a chunk
  uint32_t largest = 0;
  for (int64_t v = 0; v < kChunk; ++v) largest = larger(largest, magnitude(x[v]));
  return largest;
}

inline __attribute__((always_inline)) void find_maxima(const float* x,
                                                       float* maxima) {  // maxima: one for each of the chunk's groups
  float m[kChunk / 2];
  for (int64_t i = 0; i < kChunk / 2; ++i) m[i] = larger(x[i], x[i + kChunk / 2]);
  for (int64_t i = 0; i < kChunk / 4; ++i) m[i] = larger(m[i], m[i + kChunk / 4]);
  for (int64_t i = 0; i < kGroups; ++i) maxima[i] = larger(m[i], m[i + kGroups]);
}

enum class Scale { none, product, division };  // what the temperature takes

template <Scale kScale>
inline float divided(float y, Divisor divisor) {
  return kScale == Scale::division ? y / divisor.temperature : kScale == Scale::product ? y * divisor.inverse : y;
}

// Guidance where a chunk may hold -inf, which it must not change. (Inline, its vectors would spill the others.)
template <Scale kScale, class T>
__attribute__((noinline)) void guide_infinite(const T* logits, const T* uncond, float guidance, Divisor divisor,
                                              float* x) {
  for (int64_t v = 0; v < kChunk; ++v) {
    const float y = logits[v], u = uncond[v], guided = u + guidance * (y - u);
    x[v] = divided<kScale>(y == -kInf && u < kInf ? -kInf : guided, divisor);
  }
}

// Reads the chunks [begin, end) of a row. Returns whether none of the logits is NaN.
template <class T, bool kGuided, Scale kScale>
WIDEST_VECTORS bool read_chunks(const T* __restrict logits, const T* __restrict uncond, float guidance, Divisor divisor,
                                int64_t begin, int64_t end, float* __restrict x, float* __restrict maxima) {
  bool is_nan = false;
  for (int64_t c = begin; c < end; ++c) {
    const T* __restrict const cond_chunk = logits + c * kChunk;
    const T* __restrict const uncond_chunk = kGuided ? uncond + c * kChunk : nullptr;
    float* __restrict const out = x + c * kChunk;
    for (int64_t v = 0; v < kChunk; ++v) {
      const float y = cond_chunk[v], u = kGuided ? static_cast<float>(uncond_chunk[v]) : 0.f;
      out[v] = divided<kScale>(kGuided ? u + guidance * (y - u) : y, divisor);
    }
    if (largest_magnitude(out) >= kInfiniteMagnitude) {
      if (kGuided) guide_infinite<kScale>(cond_chunk, uncond_chunk, guidance, divisor, out);
      is_nan |= largest_magnitude(out) > kInfiniteMagnitude;
    }
    find_maxima(out, maxima + c * kGroups);
  }
  return !is_nan;
}

WIDEST_VECTORS float largest_of(const float* x, int64_t n) {  // n: a multiple of kGroups
  float lanes[kGroups];
  for (int64_t lane = 0; lane < kGroups; ++lane) lanes[lane] = x[lane];
  for (int64_t i = kGroups; i < n; i += kGroups)
    for (int64_t lane = 0; lane < kGroups; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  return *std::max_element(lanes, lanes + kGroups);
}

WIDEST_VECTORS int64_t count_greater(const float* x, int64_t n, float bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] > bound;
  return count;
}

WIDEST_VECTORS int64_t count_from(const float* x, int64_t n, float bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] >= bound;
  return count;
}

// The sum of the masses of x > bound; n is a multiple of kGroups. Doubles are exact as long as a lane adds up to 2^13
// masses of at most 2^40.
WIDEST_VECTORS int64_t sum_greater(const float* x, const float* masses, int64_t n, float bound) {
  constexpr int64_t kBlock = kGroups << 12;
  int64_t sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    double lanes[kGroups] = {};
    for (int64_t i = begin; i < end; i += kGroups)
      for (int64_t lane = 0; lane < kGroups; ++lane) {
        const float mass = x[i + lane] > bound ? masses[i + lane] : 0.f;
        lanes[lane] += mass;
      }
    for (double lane : lanes) sum += static_cast<int64_t>(lane);
  }
  return sum;
}

WIDEST_VECTORS void exponentials_of(const float* x, int64_t n, float best, float* e, float* masses) {
  for (int64_t i = 0; i < n; ++i) {
    e[i] = exp_of(x[i] - best);
    masses[i] = std::floor(e[i] * kMassOne);
  }
}

}  // namespace

template <class T>
FilteredRow::Array<T> FilteredRow::allocate(int64_t n) {
  return Array<T>(new (kLine) T[n]);
}

FilteredRow::FilteredRow(int64_t V) {
  const int64_t packed = padded(V + 3) + kChunk;  // pack() writes beyond what it returns
  for (auto* array : {&x_, &maxima_, &packed_, &e_, &masses_, &some_, &some_masses_}) *array = allocate<float>(packed);
  slots_ = allocate<int32_t>(packed);
}

bool FilteredRow::read(const LogitRows& rows, int64_t r) {
  if (!(rows.first(r) >= 0 && rows.first(r) < rows.last(r) && rows.last(r) <= rows.V)) return false;
  switch (rows.type) {
    case FloatType::float16: return read_as<c10::Half>(rows, r);
    case FloatType::bfloat16: return read_as<c10::BFloat16>(rows, r);
    default: return read_as<float>(rows, r);
  }
}

template <class T>
bool FilteredRow::read_as(const LogitRows& rows, int64_t r) {
  const T* const logits = static_cast<const T*>(rows.logits) + r * rows.V;
  const T* const uncond = rows.uncond ? static_cast<const T*>(rows.uncond) + r * rows.V : nullptr;
  const float guidance = rows.guidance[r / rows.N], temperature = rows.temperature[r / rows.N];
  const int64_t first = rows.first(r), last = rows.last(r);
  base_ = first & ~int64_t{3};
  num_chunks_ = padded(last - base_) / kChunk;
  n_ = num_chunks_ * kChunk;
  is_packed_ = false;
  lowest_ = -kInf;
  const Divisor divisor(temperature == 0 ? 1.f : temperature);
  if (!(divisor.temperature > 0)) return false;
  const auto is_masked = [mask = mask_of(rows.type)](T logit) { return static_cast<float>(logit) <= mask; };
  if (std::all_of(logits + first, logits + last, is_masked)) return false;  // most rows are done with the first id

  const auto chunks = [&](const T* cond, const T* unc, int64_t begin, int64_t end, float* x, float* maxima) {
    const auto function =
        divisor.temperature == 1 ? uncond ? read_chunks<T, true, Scale::none> : read_chunks<T, false, Scale::none>
        : divisor.is_power       ? uncond ? read_chunks<T, true, Scale::product> : read_chunks<T, false, Scale::product>
        : uncond                 ? read_chunks<T, true, Scale::division>
                                 : read_chunks<T, false, Scale::division>;
    return function(cond, unc, guidance, divisor, begin, end, x, maxima);
  };
  bool is_valid = true;
  const auto partial = [&](int64_t c) {  // a chunk that is not all inside: what lies outside must not make it invalid
    const int64_t chunk_id = base_ + c * kChunk;
    T cond[kChunk], unc[kChunk];
    for (int64_t v = 0; v < kChunk; ++v) {
      const int64_t id = std::clamp(chunk_id + v, first, last - 1);
      cond[v] = logits[id];
      unc[v] = uncond ? uncond[id] : static_cast<T>(0.f);
    }
    float* const x = x_.get() + c * kChunk;
    float* const maxima = maxima_.get() + c * kGroups;
    is_valid &= chunks(cond, unc, 0, 1, x, maxima);
    for (int64_t v = 0; v < kChunk; ++v)
      if (chunk_id + v < first || chunk_id + v >= last) x[v] = -kInf;
    find_maxima(x, maxima);
  };
  const int64_t begin = base_ < first, end = std::max(begin, (last - base_) / kChunk);
  if (begin) partial(0);
  is_valid &= chunks(logits + base_, uncond ? uncond + base_ : nullptr, begin, end, x_.get(), maxima_.get());
  for (int64_t c = end; c < num_chunks_; ++c) partial(c);
  best_ = largest_of(maxima_.get(), num_chunks_ * kGroups);
  return is_valid && best_ > -kInf && best_ < kInf;
}

int64_t FilteredRow::id_of_best() const {
  int64_t c = 0;
  const auto has_best = [&](int64_t c) {
    const float* const maxima = maxima_.get() + c * kGroups;
    return std::find(maxima, maxima + kGroups, best_) != maxima + kGroups;
  };
  while (!has_best(c)) ++c;
  return base_ + (std::find(x_.get() + c * kChunk, x_.get() + n_, best_) - x_.get());
}

int64_t FilteredRow::count_above(float x) const { return count_greater(values(), n_, x); }

// A bound of which it is known that at least k candidates reach it, since k of the groups' maxima do (or k of the
// logits themselves, if k is large). Its search ends as soon as few more than k do.
void FilteredRow::pack_for_top_k(int64_t k) {
  const int64_t groups = num_chunks_ * kGroups;
  const bool by_groups = groups >= 2 * k;
  const float* const x = by_groups ? maxima_.get() : x_.get();
  const int64_t n = by_groups ? groups : n_, enough = k + k / 16;
  float low = -kInf, high = best_;
  for (int pass = 0; pass < 16; ++pass) {
    const float middle = low == -kInf ? best_ - reach_ : low + (high - low) / 2;
    const int64_t count = count_from(x, n, middle);
    if (count >= k)
      low = middle;
    else
      high = middle;
    if (count >= k && count <= enough) break;
    if (low == -kInf) reach_ *= 2;
  }
  lowest_ = low;
  if (!(low > -kInf)) {
    reach_ = 8;
    return;
  }
  reach_ = std::max(best_ - low, 1e-3f);
  n_ = pack<int32_t>(x_.get(), nullptr, n_, low, kInf, packed_.get(), slots_.get());
  std::fill_n(packed_.get() + n_, padded(n_) - n_, -kInf);
  std::fill_n(slots_.get() + n_, padded(n_) - n_, 0);
  is_packed_ = true;
}

void FilteredRow::keep_top_k(int64_t k) { keep_from(threshold(nullptr, k, lowest_)); }

void FilteredRow::keep_from(float lowest) {
  lowest = std::max({lowest, lowest_, std::numeric_limits<float>::lowest()});  // the padding is -inf
  n_ = pack(values(), is_packed_ ? slots_.get() : nullptr, n_, lowest, kInf, packed_.get(), slots_.get());
  std::fill_n(packed_.get() + n_, padded(n_) - n_, -kInf);
  std::fill_n(slots_.get() + n_, padded(n_) - n_, 0);
  is_packed_ = true;
  lowest_ = lowest;
}

void FilteredRow::keep_min_p(float min_p) {
  if (min_p > 0) keep_from(lowest_by_min_p(best_, min_p));
}

void FilteredRow::apply(const Filters& filters) {
  const auto keep_top_p = [&] {
    if (!(filters.top_p > 0)) return;
    compute_masses();
    keep_from(top_p_threshold(limit_of(filters.top_p)));
  };
  if (filters.p_first) keep_top_p();
  if (filters.top_k > 0 && !is_packed_) pack_for_top_k(filters.top_k);
  if (filters.top_k > 0 && filters.top_k < n_) keep_top_k(filters.top_k);
  if (!filters.p_first) keep_top_p();
  keep_min_p(filters.min_p);
  compute_masses();
}

void FilteredRow::compute_masses() { exponentials_of(values(), padded(n_), best_, e_.get(), masses_.get()); }

int64_t FilteredRow::mass_above(float x) const { return sum_greater(values(), masses_.get(), padded(n_), x); }

float FilteredRow::total() const {
  return static_cast<float>(static_cast<double>(mass_above(-kInf)) / static_cast<double>(kMassOne));
}

int64_t FilteredRow::limit_of(float top_p) const {
  return static_cast<int64_t>(std::ceil(double{top_p} * static_cast<double>(mass_above(-kInf))));
}

float FilteredRow::top_p_threshold(int64_t limit) const {
  return threshold(masses_.get(), limit, std::max(lowest_, best_ - 28));  // what lies further below has mass 0
}

// The lowest float such that the mass of all greater candidates is less than `limit`, which is positive and at most the
// mass of all; or a float between the next lower candidate and that one. A mass is 1 unless there are `masses`. It is
// known to be at least `lowest`. It is found by bisection, in passes without a branch; every few of them, the
// candidates that are still in question are packed.
float FilteredRow::threshold(const float* masses, int64_t limit, float lowest) const {
  const float* x = values();
  int64_t n = n_, low = key_of(lowest), high = key_of(best_);
  for (int pass = 1; low < high; ++pass) {
    int64_t middle = low + (high - low) / 2;
    if (pass <= 6 && lowest > -kInf)  // logits are spread evenly rather than their bits
      middle = std::clamp<int64_t>(key_of(float_of(low) / 2 + float_of(high) / 2), low, high - 1);
    const float bound = float_of(static_cast<int32_t>(middle));
    if ((masses ? sum_greater(x, masses, padded(n), bound) : count_greater(x, n, bound)) < limit)
      high = middle;
    else
      low = middle + 1;
    if (pass % 4 == 0 && n > 512) {
      const float top = float_of(static_cast<int32_t>(high)), bottom = float_of(static_cast<int32_t>(low));
      limit -= masses ? sum_greater(x, masses, padded(n), top) : count_greater(x, n, top);
      n = pack(x, masses, n, bottom, top, some_.get(), some_masses_.get());
      std::fill_n(some_.get() + n, padded(n) - n, -kInf);
      x = some_.get();
      masses = masses ? some_masses_.get() : nullptr;
    }
  }
  return float_of(static_cast<int32_t>(low));
}

}  // namespace specvis
