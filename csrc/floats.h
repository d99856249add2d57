// Floats as integers of the same order, and an exp that gives the same bits on the CPU and in CUDA: the tokens that
// top-p keeps depend on it.
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

// The same order in unsigned integers.
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

constexpr float kMassOne = 1099511627776.f;  // 2^40: the mass of exp(0)
HOST_DEVICE inline int64_t mass_of(float e) { return static_cast<int64_t>(e * kMassOne); }

}  // namespace specvis
