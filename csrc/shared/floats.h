// Floats as integers of the same order; exp and log with the bits of specvis_kernels/_numbers.py on every backend: the
// tokens that top-p keeps, and those that noise draws, depend on them.
#pragma once
#include <cstdint>
#include <cstring>

#include "rules.h"

namespace specvis {

// Integers in the order of the floats. Both zeros are equal, and every NaN is outside of -inf .. inf.
HOST_DEVICE inline int32_t key_of(float x) {
  x += 0.f;
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

HOST_DEVICE inline float float_of(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The float's place in that order, as an unsigned integer.
HOST_DEVICE inline uint32_t ordered(float x) { return static_cast<uint32_t>(key_of(x)) ^ 0x80000000u; }

// exp for x <= 0, to about one unit in the last place, in operations that vectorize; 0 below exp(-87).
HOST_DEVICE inline float exp_of(float x) {
  const float clamped = x < -100.f ? -100.f : x;
  const float shifted = clamped * 1.44269504f + 12582912.f;  // 1.5 * 2^23
  const float n = shifted - 12582912.f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * r) * r + r + 1.f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000u + 127u) << 23;  // 2^n; wraps below 2^-127
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.f ? 0.f : y * scale;
}

// x = mantissa * 2^exponent, with the mantissa within [sqrt(1/2), sqrt(2)), of a positive, normal x.
HOST_DEVICE inline int32_t exponent_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits - 0x3f3504f3) >> 23;
}

HOST_DEVICE inline float mantissa_of(float x, int32_t exponent) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits -= static_cast<uint32_t>(exponent) << 23;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// log((1 + r) 2^exponent), by a polynomial in r (Cephes, logf).
HOST_DEVICE inline float log_of_parts(int32_t exponent, float r) {
  float y = r * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * r + 1.1676998740e-1f;
  y = y * r + -1.2420140846e-1f;
  y = y * r + 1.4249322787e-1f;
  y = y * r + -1.6668057665e-1f;
  y = y * r + 2.0000714765e-1f;
  y = y * r + -2.4999993993e-1f;
  y = y * r + 3.3333331174e-1f;
  const float n = static_cast<float>(exponent), z = r * r;
  y = (y * r) * z;
  y = y + n * -2.12194440e-4f;
  y = y - z * 0.5f;
  return (r + y) + n * 0.693359375f;
}

// log of a positive, normal x, to about one unit in the last place.
HOST_DEVICE inline float log_of(float x) {
  const int32_t exponent = exponent_of(x);
  return log_of_parts(exponent, mantissa_of(x, exponent) - 1.f);
}

// The lowest x that min_p keeps: exp_of(x - best) >= min_p, which is in (0, 1]. exp_of() never falls where x grows, so
// a bisection finds it; the logarithm says about where.
HOST_DEVICE inline float lowest_by_min_p(float best, float min_p) {
  const auto is_kept = [&](float x) { return exp_of(x - best) >= min_p; };
  const float margin = log_of(min_p > 0x1p-126f ? min_p : 0x1p-126f), about = best + margin;
  const float reach = 1e-6f * (1.f - margin + (best < 0 ? -best : best));
  uint32_t low = ordered(is_kept(about - reach) ? -0x1.fffffep+127f : about - reach);
  uint32_t high = ordered(about + reach < best && is_kept(about + reach) ? about + reach : best);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (is_kept(float_of(static_cast<int32_t>(middle ^ 0x80000000u)))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return float_of(static_cast<int32_t>(high ^ 0x80000000u));
}

// What a token adds to the entropy of its row, in nats.
HOST_DEVICE inline float entropy_of(double mass, double total) {
  const float p = static_cast<float>(mass / total);
  return p > 0 ? -(p * log_of(p)) : 0.f;
}

// log(1 - v) of v in (0, 1 - 2^-24], as exact where v is small.
HOST_DEVICE inline float log1p_of_negative(float v) {
  const float x = 1.f - v;
  const int32_t exponent = exponent_of(x);
  return log_of_parts(exponent, exponent == 0 ? -v : mantissa_of(x, exponent) - 1.f);
}

// a * b + c, rounded once.
HOST_DEVICE inline float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Division by one number: a product with its inverse, corrected by the remainder. It gives the bits of x / divisor
// if can_correct() and |x| is above kLeast and below kMost.
struct Divider {
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p+100f;
  float divisor, inverse;

  HOST_DEVICE explicit Divider(float d) : divisor(d), inverse(1 / d) {}
  HOST_DEVICE bool can_correct() const { return divisor >= 0x1p-20f && divisor <= 0x1p+22f; }
  HOST_DEVICE float corrected(float x) const {
    const float quotient = x * inverse;
    return fused(fused(-quotient, divisor, x), inverse, quotient);
  }
};

constexpr float kMassOne = 1099511627776.f;  // 2^40: the mass of exp(0)
HOST_DEVICE inline int64_t mass_of(float e) { return static_cast<int64_t>(e * kMassOne); }

}  // namespace specvis
