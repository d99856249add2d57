// How one block draws from a row of logits that it has filtered. The ids that the filters keep are listed, so that
// every thread makes noise for one that counts. Where they are too many for the list, a thread makes it for four
// neighboring ids at once.
#pragma once
#include "filters.cuh"
#include "noise.h"

namespace specvis {
namespace {

constexpr unsigned kMaxListed = sizeof(Histogram) / sizeof(uint32_t);

// Lists which of the ids the filters keep, in any order, and returns how many these are. No more than kMaxListed are
// written.
template <class Logits>
__device__ unsigned list_kept(const Filtered& filtered, const Logits& logits, int64_t ids, uint32_t* list) {
  __shared__ unsigned num_listed;
  if (threadIdx.x == 0) num_listed = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < ids; i += blockDim.x) {
    if (!filtered.keeps(logits(i))) continue;
    const unsigned at = atomicAdd(&num_listed, 1u);
    if (at < kMaxListed) list[at] = static_cast<uint32_t>(i);
  }
  __syncthreads();
  return num_listed;
}

// The id of the largest logit plus noise, the lowest one if several are largest. Ids fit into 32 bits.
template <class Logits>
__device__ int64_t best_score(const Filtered& filtered, const Logits& logits, uint32_t first_id, uint32_t ids,
                              const Noise& noise, bool sampling, const uint32_t* list, unsigned num_kept) {
  uint64_t largest = 0;
  const auto offer = [&](uint32_t i, float x, uint32_t word) {
    const float score = (x - filtered.best) + (sampling ? to_gumbel(word) : 0.0f);
    const uint64_t candidate = entry(order_of(score, -INFINITY), first_id + i);
    largest = candidate > largest ? candidate : largest;
  };
  if (num_kept <= kMaxListed) {
#pragma unroll 1
    for (unsigned j = threadIdx.x; j < num_kept; j += blockDim.x)
      offer(list[j], logits(list[j]), noise.word(first_id + list[j]));
  } else {
#pragma unroll 1
    for (uint32_t four = first_id / 4 + threadIdx.x; four * 4 < first_id + ids; four += blockDim.x) {
      uint32_t words[4];
      noise.words(four, words);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t i = four * 4 + j - first_id;  // wraps before the first id
        if (i >= ids) continue;
        const float x = logits(i);
        if (filtered.keeps(x)) offer(i, x, words[j]);
      }
    }
  }
  return id_of(block_max(largest));
}

struct Drawn {
  int64_t token, ahead_token;  // 0 if the row is not valid
  bool valid;
};

// Filters row r of the batch and draws from it, with the noise of a position and, if `ahead` is positive, of the
// position that many further.
template <class T, bool kInShared>
__device__ Drawn draw_row(const LogitRows& rows, int64_t r, const IdRange& range, int64_t seed, int64_t position,
                          int64_t ahead, Histogram* histogram) {
  const int64_t b = r / rows.N;
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, range.first), reinterpret_cast<float*>(histogram + 1)};
  Filtered filtered = filter(rows, b, logits, range.count, *histogram);
  const bool valid = filtered.valid && range.valid, sampling = rows.temperature[b] != 0;
  if (!valid) return {0, 0, false};
  if (!sampling) filtered.lowest = key_of(filtered.best);
  uint32_t* const list = reinterpret_cast<uint32_t*>(histogram);  // which is not needed any more
  const unsigned num_kept = filtered.lowest > INT32_MIN ? list_kept(filtered, logits, range.count, list) : UINT32_MAX;
  const auto draw_with = [&](const Noise& noise) {
    return best_score(filtered, logits, static_cast<uint32_t>(range.first), static_cast<uint32_t>(range.count), noise,
                      sampling, list, num_kept);
  };
  const Noise noise(seed, position);
  const int64_t token = draw_with(noise);
  return {token, ahead > 0 ? draw_with(noise.ahead_by(ahead)) : token, true};
}

}  // namespace
}  // namespace specvis
