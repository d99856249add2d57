// IEEE half precision as stored, and its value.
#pragma once
#include <math.h>

#include <cstdint>

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half half) {
  const int exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf(1024 + fraction, exponent - 25)
                                    : ldexpf(fraction, -24);
  return half.bits >> 15 ? -size : size;
}
