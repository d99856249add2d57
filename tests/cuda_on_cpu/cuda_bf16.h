// bfloat16 as stored, and its value: the upper half of a float.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 half) {
  const uint32_t bits = uint32_t{half.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
