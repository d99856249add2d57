// Random words and Gumbel noise that a seed, a position and an id decide, with the bits of specvis_kernels/noise.py.
#pragma once
#include <cstdint>

#include "floats.h"

namespace specvis {

constexpr uint32_t kGumbelStream = 9;  // the stream for draws of tokens, as in noise.py

// One round of Philox4x32: the counter is replaced.
HOST_DEVICE inline void philox_round(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
  const uint64_t left = uint64_t{counter[0]} * 0xd2511f53u, right = uint64_t{counter[2]} * 0xcd9e8d57u;
  counter[0] = static_cast<uint32_t>(right >> 32) ^ counter[1] ^ key0;
  counter[1] = static_cast<uint32_t>(right);
  counter[2] = static_cast<uint32_t>(left >> 32) ^ counter[3] ^ key1;
  counter[3] = static_cast<uint32_t>(left);
}

// A word of 32 bits -> uniform in [0, 1).
HOST_DEVICE inline float to_uniform(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// A word of 32 bits -> standard Gumbel noise.
HOST_DEVICE inline float to_gumbel(uint32_t word) {
  constexpr float kLargest = 1 - 0x1p-24f;
  const float v = (static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f) * 0x1p-31f;
  return -log_of(-log1p_of_negative(v < kLargest ? v : kLargest));
}

// The noise of the ids at one position of one request.
struct Noise {
  uint32_t key[2], position;

  HOST_DEVICE Noise(int64_t seed, int64_t position)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
        position(static_cast<uint32_t>(position)) {}

  // The noise at the position `count` further. (Of a position the low 32 bits count.)
  HOST_DEVICE Noise ahead_by(int64_t count) const {
    Noise other = *this;
    other.position += static_cast<uint32_t>(count);
    return other;
  }

  // The words of the ids 4 block to 4 block + 3: Philox4x32-10 (Salmon et al., SC 2011).
  HOST_DEVICE void words(uint32_t block, uint32_t (&words)[4], uint32_t stream = kGumbelStream,
                         uint32_t turn = 0) const {
    words[0] = block, words[1] = position, words[2] = stream, words[3] = turn;
    uint32_t key0 = key[0], key1 = key[1];
#ifdef __CUDA_ARCH__
#pragma unroll 5  // all ten at once would keep twenty keys in registers
#endif
    for (int round = 0; round < 10; ++round) {
      philox_round(words, key0, key1);
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
  }

  // The word of one id. (No array is indexed by the id: on a GPU it would leave the registers.)
  HOST_DEVICE uint32_t word(uint32_t id) const {
    uint32_t w[4];
    words(id >> 2, w);
    const uint32_t even = id & 2 ? w[2] : w[0], odd = id & 2 ? w[3] : w[1];
    return id & 1 ? odd : even;
  }
};

}  // namespace specvis
