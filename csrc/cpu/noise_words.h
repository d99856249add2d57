// The words of many ids at once, on the CPU.
#pragma once
#include <cstdint>

#include "../shared/noise.h"
#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace specvis {

constexpr int64_t kWords = 64;  // words that are made at once

#if defined(__x86_64__) && defined(__GNUC__)
// Philox4x32-10 of two times eight blocks, each number in the low half of 64 bits: there a product of 32-bit numbers is
// one instruction. Two at a time, since one would wait for its own products.
__attribute__((target("avx512f"))) inline void philox_of_sixteen(const Noise& noise, const __m512i (&blocks)[2],
                                                                 __m512i (&words)[2][4]) {
  const __m512i right = _mm512_set1_epi64(0xcd9e8d57u), left = _mm512_set1_epi64(0xd2511f53u);
  const __m512i step0 = _mm512_set1_epi64(0x9e3779b9u), step1 = _mm512_set1_epi64(0xbb67ae85u);
  __m512i key0 = _mm512_set1_epi64(noise.key[0]), key1 = _mm512_set1_epi64(noise.key[1]);
  for (int i = 0; i < 2; ++i) {
    words[i][0] = blocks[i], words[i][1] = _mm512_set1_epi64(noise.position);
    words[i][2] = _mm512_set1_epi64(kGumbelStream), words[i][3] = _mm512_setzero_si512();
  }
  for (int round = 0; round < 10; ++round) {
    for (auto& w : words) {
      const __m512i l = _mm512_mul_epu32(w[0], left), r = _mm512_mul_epu32(w[2], right);
      w[0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(r, 32), w[1], key0, 0x96);  // exclusive or
      w[2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(l, 32), w[3], key1, 0x96);
      w[1] = r, w[3] = l;
    }
    key0 = _mm512_add_epi32(key0, step0);
    key1 = _mm512_add_epi32(key1, step1);
  }
}

__attribute__((target("avx512f"))) inline void words_of_avx512(const Noise& noise, int64_t base, const int32_t* slots,
                                                               uint32_t* words) {
  const __m512i one = _mm512_set1_epi64(1), two = _mm512_set1_epi64(2), first = _mm512_set1_epi64(base);
  for (int64_t i = 0; i < kWords; i += 16) {
    __m512i ids[2], blocks[2], w[2][4];
    for (int j = 0; j < 2; ++j) {
      const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(slots + i + 8 * j));
      ids[j] = _mm512_add_epi64(_mm512_cvtepu32_epi64(eight), first);
      blocks[j] = _mm512_srli_epi64(ids[j], 2);
    }
    philox_of_sixteen(noise, blocks, w);
    for (int j = 0; j < 2; ++j) {
      const __mmask8 is_odd = _mm512_test_epi64_mask(ids[j], one), is_high = _mm512_test_epi64_mask(ids[j], two);
      const __m512i low = _mm512_mask_blend_epi64(is_odd, w[j][0], w[j][1]);
      const __m512i high = _mm512_mask_blend_epi64(is_odd, w[j][2], w[j][3]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i + 8 * j),
                          _mm512_cvtepi64_epi32(_mm512_mask_blend_epi64(is_high, low, high)));
    }
  }
}

__attribute__((target("avx512f"))) inline void words_from_avx512(const Noise& noise, int64_t first, uint32_t* words) {
  const __m512i low_half = _mm512_set1_epi64(0xffffffffu);
  const __m512i front = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i back = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  const __m512i block = _mm512_add_epi64(_mm512_set1_epi64(first / 4), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  const __m512i blocks[2] = {block, _mm512_add_epi64(block, _mm512_set1_epi64(8))};
  __m512i w[2][4];
  philox_of_sixteen(noise, blocks, w);
  for (int j = 0; j < 2; ++j) {  // words 0 and 1 of a block side by side, and 2 and 3 (a ? b : c is 0xca)
    const __m512i low = _mm512_ternarylogic_epi64(low_half, w[j][0], _mm512_slli_epi64(w[j][1], 32), 0xca);
    const __m512i high = _mm512_ternarylogic_epi64(low_half, w[j][2], _mm512_slli_epi64(w[j][3], 32), 0xca);
    _mm512_storeu_si512(words + 32 * j, _mm512_permutex2var_epi64(low, front, high));
    _mm512_storeu_si512(words + 32 * j + 16, _mm512_permutex2var_epi64(low, back, high));
  }
}
#endif

inline bool has_avx512() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has = __builtin_cpu_supports("avx512f");
  return has;
#else
  return false;
#endif
}

WIDEST_VECTORS static void words_of_portably(const Noise& noise, int64_t base, const int32_t* slots, uint32_t* words) {
  const Noise copy = noise;  // `words` cannot overlap the copy
  for (int64_t i = 0; i < kWords; ++i) words[i] = copy.word(static_cast<uint32_t>(base + slots[i]));
}

// words[i]: the word of id base + slots[i], of kWords ids.
inline void words_of(const Noise& noise, int64_t base, const int32_t* slots, uint32_t* words) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (has_avx512()) return words_of_avx512(noise, base, slots, words);
#endif
  words_of_portably(noise, base, slots, words);
}

// words[i]: the word of id first + i, of kWords ids. first is a multiple of 4.
inline void words_from(const Noise& noise, int64_t first, uint32_t* words) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (has_avx512()) return words_from_avx512(noise, first, words);
#endif
  for (int64_t i = 0; i < kWords; i += 4) {
    uint32_t w[4];
    noise.words(static_cast<uint32_t>((first + i) / 4), w);
    for (int64_t j = 0; j < 4; ++j) words[i + j] = w[j];
  }
}

}  // namespace specvis
