// How a team draws from a row of logits that it has filtered. Each block lists those of its ids that the filters keep,
// so that every thread makes noise for one that counts. Where they are too many for the list, a thread makes it for its
// own ids, of which four neighbors share a block of random words.
#pragma once
#include "guided_row.cuh"
#include "noise.h"

namespace specvis {
namespace {

constexpr unsigned kMaxListed = kBins;

// Lists the logits of this block that are kept, in any order: ids where the low halves of a histogram stand, and logits
// where the high ones do. Returns how many there are; no more than kMaxListed are written.
template <class Entries>
__device__ unsigned list_kept(const GuidedRow<Entries>& row, RowShared* shared) {
  unsigned own = 0;
  row.for_each_logit([&](float x) { own += x >= row.lowest(); });
  unsigned at = warp_scan(own);
  unsigned before = 0;
  if (lane() == kWarp - 1) before = atomicAdd(&shared->num_kept, at);
  at += __shfl_sync(kAllLanes, before, kWarp - 1) - own;
  if (own > 0)
    row.for_each_logits([&](int id, const float (&x)[Entries::kWide]) {
#pragma unroll
      for (int j = 0; j < Entries::kWide; ++j) {
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

// The words of kWide neighboring ids.
template <int kWide>
__device__ void words_from(const Noise& noise, int id, uint32_t (&words)[kWide]) {
  if constexpr (kWide % 4 != 0) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) words[j] = noise.word(static_cast<uint32_t>(id + j));
  } else {
    uint32_t fours[kWide + 4] = {};
    const int ahead = id & 3;
#pragma unroll
    for (int j = 0; j <= kWide; j += 4) {
      if (j == kWide && ahead == 0) break;
      uint32_t four[4];
      noise.words(static_cast<uint32_t>((id >> 2) + j / 4), four);
#pragma unroll
      for (int i = 0; i < 4; ++i) fours[j + i] = four[i];
    }
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const uint32_t even = ahead & 2 ? fours[j + 2] : fours[j], odd = ahead & 2 ? fours[j + 3] : fours[j + 1];
      words[j] = ahead & 1 ? odd : even;
    }
  }
}

// The id of the largest logit plus noise, the lowest one if several are largest.
template <class Entries>
__device__ int64_t best_score(Team& team, const GuidedRow<Entries>& row, const RowShared* shared, unsigned num_kept,
                              const Noise& noise, bool sampling) {
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
    row.for_each_logits([&](int id, const float (&x)[Entries::kWide]) {
      bool any = false;
#pragma unroll
      for (int j = 0; j < Entries::kWide; ++j) any |= x[j] >= row.lowest();
      if (!any) return;
      uint32_t words[Entries::kWide];
      words_from(noise, id, words);
#pragma unroll
      for (int j = 0; j < Entries::kWide; ++j)
        if (x[j] >= row.lowest()) offer(static_cast<unsigned>(id + j), x[j], words[j]);
    });
  }
  return id_of(team.max(largest));
}

struct Drawn {
  int64_t token, ahead_token;  // 0 if the row is not valid
  bool valid;
};

// Filters row r of the batch and draws from it, with the noise of a position and, if `ahead` is positive, of the
// position that many further.
template <class Entries>
__device__ Drawn draw_row(Team& team, RowShared* shared, int64_t capacity, const LogitRows& rows, int64_t r,
                          const int64_t* seed, const int64_t* position, int64_t ahead) {
  GuidedRow<Entries> row(team, shared, capacity, rows, r);
  if (!row.valid()) return {0, 0, false};
  const bool sampling = rows.temperature[request_of(rows, r)] != 0;
  if (!sampling) row.keep_best();
  const unsigned num_kept = row.lowest() > -INFINITY ? list_kept(row, shared) : UINT32_MAX;
  Noise noise(*seed, *position);
  Drawn drawn = {0, 0, true};
#pragma unroll 1
  for (int draw = 0; draw < (ahead > 0 ? 2 : 1); ++draw) {
    drawn.ahead_token = best_score(team, row, shared, num_kept, noise, sampling);
    if (draw == 0) drawn.token = drawn.ahead_token;
    noise = noise.ahead_by(ahead);
  }
  return drawn;
}

}  // namespace
}  // namespace specvis
