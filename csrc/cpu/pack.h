// Entries of an array, moved together, on the CPU.
#pragma once
#include <cstdint>

#include "../shared/rules.h"
#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace specvis {

// Packs the entries of x within [bottom, top], and with each one its index or, if there are `others`, its number there.
// Returns how many they are. The outputs may be the inputs, and are written up to 16 entries further.
template <class Other>
int64_t pack_portably(const float* x, const Other* others, int64_t n, float bottom, float top, float* packed,
                      Other* packed_others) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    packed_others[count] = others ? others[i] : static_cast<Other>(i);
    packed[count] = value;
    count += (value >= bottom) & (value <= top);
  }
  return count;
}

#if defined(__x86_64__) && defined(__GNUC__)
template <class Other>
__attribute__((target("avx512f,popcnt"))) int64_t pack_by_masks(const float* x, const Other* others, int64_t n,
                                                                float bottom, float top, float* packed,
                                                                Other* packed_others) {
  static_assert(sizeof(Other) == sizeof(int32_t), "they are moved as integers");
  const __m512 low = _mm512_set1_ps(bottom), high = _mm512_set1_ps(top);
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 inside = n - i < 16 ? (1u << (n - i)) - 1 : 0xffff;
    const __m512 value = _mm512_maskz_loadu_ps(inside, x + i);
    const __m512i other = others ? _mm512_maskz_loadu_epi32(inside, others + i) : index;
    const __mmask16 is_large = _mm512_mask_cmp_ps_mask(inside, value, low, _CMP_GE_OQ);
    const __mmask16 is_kept = _mm512_mask_cmp_ps_mask(is_large, value, high, _CMP_LE_OQ);
    const __m512 values = _mm512_maskz_compress_ps(is_kept, value);
    const __m512i numbers = _mm512_maskz_compress_epi32(is_kept, other);
    const int kept = __builtin_popcount(is_kept);
    if (kept <= 8) {  // a shorter store crosses fewer lines of the cache
      _mm256_storeu_ps(packed + count, _mm512_castps512_ps256(values));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed_others + count), _mm512_castsi512_si256(numbers));
    } else {
      _mm512_storeu_ps(packed + count, values);
      _mm512_storeu_si512(packed_others + count, numbers);
    }
    count += kept;
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
  return count;
}
#endif

template <class Other>
int64_t pack(const float* x, const Other* others, int64_t n, float bottom, float top, float* packed,
             Other* packed_others) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has_masks = __builtin_cpu_supports("avx512f");
  if (has_masks) return pack_by_masks(x, others, n, bottom, top, packed, packed_others);
#endif
  return pack_portably(x, others, n, bottom, top, packed, packed_others);
}

}  // namespace specvis
