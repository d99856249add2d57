// How a team draws from a row of logits that it has filtered. Each block lists the ids of its own that the filters
// keep, so that every thread makes noise for one that counts. Where they are too many for the list, a thread makes
// noise for its own ids; four neighboring ids share a block of random words.
#pragma once
#include "../shared/noise.h"
#include "guided_row.cuh"

namespace specvis {
namespace {

constexpr unsigned kMaxListed = kBins;

// Lists the logits of this block that are kept, in any order: ids in the memory of a histogram's low halves, and logits
// in the memory of its high halves. Returns how many there are; no more than kMaxListed are written.
template <class Entries>
__device__ unsigned list_kept(const GuidedRow<Entries>& row, RowShared* shared) {
  unsigned own = 0;
  row.for_each_logit([&](float x) { own += x >= row.lowest(); });
  unsigned at = warp_scan(own);
  unsigned before = 0;
  if (lane() == kWarp - 1) before = atomicAdd(&shared->num_kept, at);
  at += __shfl_sync(kAllLanes, before, kWarp - 1) - own;
  if (own > 0)
    row.for_each_logits([&](int id, const float (&x)[kWide]) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        if (x[j] < row.lowest()) continue;
        if (at < kMaxListed) {
          shared->low[at] = static_cast<unsigned>(id + j);
          shared->high[at] = __float_as_uint(x[j]);
        }
        ++at;
      }
    });
  __syncthreads();
  return shared->num_kept;
}

// The words of four neighboring ids.
__device__ inline void words_from(const Noise& noise, int id, uint32_t (&words)[kWide]) {
  const int block = id >> 2, ahead = id & 3;
  noise.words(static_cast<uint32_t>(block), words);
  if (ahead == 0) return;
  uint32_t next[4];
  noise.words(static_cast<uint32_t>(block + 1), next);
  const uint32_t all[7] = {words[0], words[1], words[2], words[3], next[0], next[1], next[2]};
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = ahead == 1 ? all[j + 1] : ahead == 2 ? all[j + 2] : all[j + 3];
}

// The id of the largest logit plus noise, the lowest one if several are largest.
template <class Entries>
__device__ int64_t best_score(Team& team, const GuidedRow<Entries>& row, const RowShared* shared, unsigned num_kept,
                              const Noise& noise) {
  const bool sampling = row.is_sampled();
  uint64_t largest = 0;
  const auto offer = [&](unsigned id, float x, uint32_t word) {
    const float score = (x - row.best()) + (sampling ? to_gumbel(word) : 0.0f);
    const uint64_t candidate = entry(order_of(score, -INFINITY), id);
    largest = candidate > largest ? candidate : largest;
  };
  if (num_kept <= kMaxListed) {
#pragma unroll 1
    for (unsigned j = threadIdx.x; j < num_kept; j += blockDim.x)
      offer(shared->low[j], __uint_as_float(shared->high[j]), noise.word(shared->low[j]));
  } else {
    row.for_each_logits([&](int id, const float (&x)[kWide]) {
      bool any = false;
#pragma unroll
      for (int j = 0; j < kWide; ++j) any |= x[j] >= row.lowest();
      if (!any) return;
      uint32_t words[kWide];
      words_from(noise, id, words);
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        if (x[j] >= row.lowest()) offer(static_cast<unsigned>(id + j), x[j], words[j]);
    });
  }
  return id_of(team.max(largest));
}

struct Drawn {
  int64_t token, ahead_token;  // 0 if the row is not valid
  bool valid;
};

// Filters row r of the batch and draws from it, with noise_of() and, if `ahead` is positive, with that of the position
// so many further.
template <class Entries, class NoiseOf>
__device__ Drawn draw_row(Team& team, RowShared* shared, int64_t capacity, const LogitRows& rows, int64_t r,
                          const NoiseOf& noise_of, int64_t ahead) {
  GuidedRow<Entries> row(team, shared, capacity, rows, r);
  if (!row.valid()) return {0, 0, false};
  if (!row.is_sampled()) row.keep_best();
  const unsigned num_kept = row.lowest() > -INFINITY ? list_kept(row, shared) : UINT32_MAX;
  Noise noise = noise_of();
  Drawn drawn = {0, 0, true};
#pragma unroll 1
  for (int draw = 0; draw < (ahead > 0 ? 2 : 1); ++draw) {
    drawn.ahead_token = best_score(team, row, shared, num_kept, noise);
    if (draw == 0) drawn.token = drawn.ahead_token;
    noise = noise.ahead_by(ahead);
  }
  return drawn;
}

}  // namespace
}  // namespace specvis
