// Vectors of kLanes floats by the compiler's own vector types, and numbers of two bytes as floats: for code that is
// compiled for several kinds of machines, of which the running one's is chosen.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

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

namespace specvis {
namespace {

// Vectors have 4, 8, 16 and 16 lanes. The last kind multiplies pairs of bfloat16.
enum class Machine { portable, avx2, avx512, avx512_bf16 };

#if defined(__x86_64__) && defined(__GNUC__)
#define FOR_AVX2 __attribute__((target("avx2,fma")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define FOR_AVX512_BF16 __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#else
#define FOR_AVX2
#define FOR_AVX512
#define FOR_AVX512_BF16
#endif

// Functions of the name with these parameters (in parentheses), one for each number of lanes kLanes, that run the code
// in the last argument. BEST_FUNCTION is the one for this machine; `arguments` are its template arguments in < >.
#define FOR_EACH_MACHINE(prefix, name, parameters, ...) \
  prefix FOR_AVX512 void name##_avx512 parameters {     \
    constexpr int kLanes = 16;                          \
    __VA_ARGS__;                                        \
  }                                                     \
  prefix FOR_AVX2 void name##_avx2 parameters {         \
    constexpr int kLanes = 8;                           \
    __VA_ARGS__;                                        \
  }                                                     \
  prefix void name##_portable parameters {              \
    constexpr int kLanes = 4;                           \
    __VA_ARGS__;                                        \
  }
#define BEST_FUNCTION(name, arguments)                     \
  (machine() >= Machine::avx512 ? &name##_avx512 arguments \
   : machine() == Machine::avx2 ? &name##_avx2 arguments   \
                                : &name##_portable arguments)

// The best kind that the processor is. PyTorch's variable ATEN_CPU_CAPABILITY (default, avx2, avx512) forbids better.
inline Machine machine() {
  Machine best = Machine::portable;
#if defined(__x86_64__) && defined(__GNUC__)
  const char* const asked = std::getenv("ATEN_CPU_CAPABILITY");
  const auto allows = [&](const char* name) { return !asked || !std::strcmp(asked, name); };
  const bool is_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool is_avx512 = is_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (is_avx2 && (allows("avx2") || allows("avx512"))) best = Machine::avx2;
  if (is_avx512 && allows("avx512")) best = Machine::avx512;
  if (is_avx512 && !asked && __builtin_cpu_supports("avx512bf16")) best = Machine::avx512_bf16;
#endif
  return best;
}

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

// The sum of the lanes of each of kLanes vectors, vector(0) and so on: lane l and l + kLanes / 2 first, and so on.
template <int kLanes, int kFirst = 0, int kCount = kLanes, class Vectors>
INLINE Vec<kLanes> sums_of_lanes(Vectors vector) {
  if constexpr (kCount == 1) {
    return vector(kFirst);
  } else {
    return fold<kLanes, 2 * kLanes / kCount>(sums_of_lanes<kLanes, kFirst, kCount / 2>(vector),
                                             sums_of_lanes<kLanes, kFirst + kCount / 2, kCount / 2>(vector));
  }
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

template <int kLanes>
INLINE Vec<kLanes> silu(Vec<kLanes> x) {
  const Vec<kLanes> e = exp_of_lanes<kLanes>(x < 0 ? x : -x);
  return x * (x < 0 ? e : 1.f + Vec<kLanes>{}) / (1.f + e);
}

struct Moments {
  float mean, factor;  // the latter is 1 / sqrt(variance + eps)
};

// Of n numbers, a multiple of kLanes, as LayerNorm takes them.
template <int kLanes>
INLINE Moments moments(const float* x, int64_t n, float eps) {
  Vec<kLanes> sums = {}, squares = {};
  for (int64_t i = 0; i < n; i += kLanes) sums += load<kLanes>(x + i);
  const float mean = sum_of_lanes<kLanes>(sums) / n;
  for (int64_t i = 0; i < n; i += kLanes) squares += (load<kLanes>(x + i) - mean) * (load<kLanes>(x + i) - mean);
  return {mean, 1.f / std::sqrt(sum_of_lanes<kLanes>(squares) / n + eps)};
}

INLINE float bits_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <int kLanes>
INLINE Vec<kLanes> bits_as_lanes(typename Vector<kLanes>::Ints bits) {
  Vec<kLanes> x;
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

// sums[l] += a[l] * b[l], where each lane is a pair of bfloat16. Only where machine() is avx512_bf16.
template <int kLanes>
INLINE void add_pairs(Vec<kLanes>& sums, typename Vector<kLanes>::Ints a, typename Vector<kLanes>::Ints b) {
#if defined(__x86_64__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
#endif
}

// kLanes entries as floats, and floats as entries, rounded to the nearest.
template <int kLanes>
INLINE Vec<kLanes> load(const c10::BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const auto bits = __builtin_convertvector(halves, typename Vector<kLanes>::Ints) << 16;
  return bits_as_lanes<kLanes>(bits);
}

// The bits of bfloat16 in the upper halves of lanes; below them is what was rounded away.
template <int kLanes>
INLINE typename Vector<kLanes>::Ints rounded(Vec<kLanes> x) {
  typename Vector<kLanes>::Ints bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : 0x7fc00000 + typename Vector<kLanes>::Ints{};
}

template <int kLanes>
INLINE void store(c10::BFloat16* to, Vec<kLanes> x) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  const Halves halves = __builtin_convertvector(rounded<kLanes>(x) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// 2 kLanes entries, those with even numbers and those with odd ones.
template <int kLanes>
INLINE void load_pairs(const c10::BFloat16* from, Vec<kLanes>& even, Vec<kLanes>& odd) {
  typename Vector<kLanes>::Ints pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  even = bits_as_lanes<kLanes>(pairs << 16);
  odd = bits_as_lanes<kLanes>(pairs & int32_t(0xffff0000));
}

template <int kLanes>
INLINE void store_pairs(c10::BFloat16* to, Vec<kLanes> even, Vec<kLanes> odd) {
  const auto pairs = (rounded<kLanes>(even) >> 16 & 0xffff) | (rounded<kLanes>(odd) & int32_t(0xffff0000));
  std::memcpy(to, &pairs, sizeof pairs);
}

template <class T>
INLINE void convert(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

}  // namespace
}  // namespace specvis
