// How K children are drawn from a row of probabilities without replacement, or the likeliest are found. Only the
// children are stored, and 0 where no child exists.
#pragma once
#include "../shared/noise.h"
#include "best_of.cuh"
#include "fours.cuh"

namespace specvis {
namespace {

struct Children {
  int64_t count;
  bool valid;  // whether the row is valid
};

__device__ inline void clear_tokens(int64_t first, int64_t K, int64_t* tokens) {
  for (int64_t k = first + threadIdx.x; k < K; k += blockDim.x) tokens[k] = 0;
}

__device__ inline int64_t mass_of_four(const float4& p) {
  return (to_fixed_point(p.x) + to_fixed_point(p.y)) + (to_fixed_point(p.z) + to_fixed_point(p.w));
}

// The row's running sum at three scales: of 32 spans, of 32 segments in each span, and of the fours in each segment. So
// one warp finds a token in three steps of 32 lanes.
constexpr unsigned kSegments = kWarp * kWarp;

struct Segments {
  int64_t masses[kSegments];  // the mass of each and of all before it in its span, once the spans are summed
  int64_t spans[kWarp];
  unsigned fours;  // how many a segment has: a power of two

  // The sum of a row, by a block that calls this with all of its threads.
  __device__ Total sum(const Fours& row) {
    unsigned size = 4;
    while (size * kSegments < row.count()) size *= 2;
    const bool is_split = size > kWarp;  // among warps
    if (is_split) {
      for (unsigned s = threadIdx.x; s < kSegments; s += blockDim.x) masses[s] = 0;
      __syncthreads();
    }
    bool entries_valid = true;  // this thread's
    for (uint32_t first = threadIdx.x; first - lane() < row.count(); first += kFoursInFlight * blockDim.x) {
      float4 p[kFoursInFlight];
      row.load(first, blockDim.x, p);
#pragma unroll
      for (int j = 0; j < kFoursInFlight; ++j) {
        const float4 q = p[j];
        const uint32_t i = first + j * blockDim.x;
        const bool ok = is_probability(q.x) & is_probability(q.y) & is_probability(q.z) & is_probability(q.w);
        entries_valid &= ok;
        int64_t mass = ok ? mass_of_four(q) : 0;
        for (unsigned distance = 1; distance < size && distance < kWarp; distance *= 2) {
          mass += __shfl_xor_sync(kAllLanes, mass, distance);
        }
        if (i >= row.count()) continue;
        if (!is_split && i % size == 0) masses[i / size] = mass;
        if (is_split && lane() == 0) {
          atomicAdd(reinterpret_cast<unsigned long long*>(masses + i / size), static_cast<unsigned long long>(mass));
        }
      }
    }
    if (threadIdx.x == 0) fours = size;
    const bool valid = !__syncthreads_or(!entries_valid);
    for (unsigned span = warp(); span < kWarp; span += warps()) {
      const unsigned s = span * kWarp + lane();
      const int64_t sum = warp_scan(s * size < row.count() ? masses[s] : 0);
      masses[s] = sum;
      if (lane() == kWarp - 1) spans[span] = sum;
    }
    __syncthreads();
    const int64_t total = warp_sum(spans[lane()]);
    return {total, valid && total > 0};
  }
};

// Draws child after child from the segments, by one warp. Returns how many there are.
class SegmentWarp {
 public:
  __device__ SegmentWarp(const Fours& row, Segments& segments, int64_t* tokens)
      : row_(row), masses_(segments.masses), tokens_(tokens), sum_(warp_scan(segments.spans[lane()])),
        fours_(segments.fours), lanes_(fours_ < kWarp ? fours_ : kWarp) {}

  __device__ uint32_t draw(const float* uniforms, int64_t K) {
    float own_uniform = 0;
    uint32_t n = 0;
    for (; n < K; ++n) {
      if (n % kWarp == 0 && n + lane() < K) own_uniform = uniforms[n + lane()];
      const int64_t remaining = __shfl_sync(kAllLanes, sum_, kWarp - 1);
      if (remaining == 0) break;
      draw(draw_threshold(__shfl_sync(kAllLanes, own_uniform, n % kWarp), remaining), n);
    }
    return n;
  }

 private:
  // The first lane whose sum exceeds the rest of the threshold; the sum of the lanes before it is taken from that rest.
  __device__ static unsigned step(int64_t sum, int64_t* left) {
    const unsigned before = __popc(__ballot_sync(kAllLanes, sum <= *left));
    const int64_t sum_before = __shfl_sync(kAllLanes, sum, (before + kWarp - 1) % kWarp);
    *left -= before > 0 ? sum_before : 0;
    return before;
  }

  // Child n, the first token whose running sum exceeds the threshold.
  __device__ void draw(int64_t left, uint32_t n) {
    const unsigned span = step(sum_, &left);
    int64_t* const own_segment = masses_ + span * kWarp + lane();
    const int64_t segment_sum = *own_segment;
    const unsigned in_span = step(segment_sum, &left);
    const uint32_t begin = (span * kWarp + in_span) * fours_, end = begin + fours_;
    uint32_t token = 0;
    int64_t token_mass = 0;
    for (uint32_t first = begin; first < end; first += kWarp) {
      const uint32_t four = first + lane();
      int64_t masses[4] = {};
      if (four < end) masses_of(four, masses);
      remove_drawn(first, n, masses);
      const int64_t own = (masses[0] + masses[1]) + (masses[2] + masses[3]), sum = warp_scan(own, lanes_);
      const unsigned before = step(lane() < lanes_ ? sum : INT64_MAX, &left);
      if (before == kWarp) continue;
      int64_t sum_in_four = 0;
      unsigned j = 0;
      while (j < 3 && sum_in_four + masses[j] <= left) sum_in_four += masses[j++];
      const int64_t own_mass = j == 0 ? masses[0] : j == 1 ? masses[1] : j == 2 ? masses[2] : masses[3];
      token = __shfl_sync(kAllLanes, four * 4 + j, before);
      token_mass = __shfl_sync(kAllLanes, own_mass, before);
      break;
    }
    if (lane() >= span) sum_ -= token_mass;
    if (lane() >= in_span) *own_segment = segment_sum - token_mass;
    if (lane() == n % kWarp) own_drawn_ = token;
    if (lane() == 0) tokens_[n] = token;
    __syncwarp();
  }

  __device__ void masses_of(uint32_t four, int64_t (&masses)[4]) const {
    const float4 p = row_[four];
    masses[0] = to_fixed_point(p.x);
    masses[1] = to_fixed_point(p.y);
    masses[2] = to_fixed_point(p.z);
    masses[3] = to_fixed_point(p.w);
  }

  // Of the n children drawn so far, the children in the lanes' fours count as 0. The last of them are in registers.
  __device__ void remove_drawn(uint32_t first, uint32_t n, int64_t (&masses)[4]) const {
    for (uint32_t start = 0; start < n; start += kWarp) {
      uint32_t drawn = own_drawn_;
      if (start + kWarp <= n) drawn = static_cast<uint32_t>(tokens_[start + lane()]);
      unsigned hits = __ballot_sync(kAllLanes, start + lane() < n && drawn / 4 - first < kWarp);
      for (; hits != 0; hits &= hits - 1) {
        const uint32_t gone = __shfl_sync(kAllLanes, drawn, __ffs(hits) - 1);
        if (gone / 4 != first + lane()) continue;
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) masses[j] = gone % 4 == j ? 0 : masses[j];
      }
    }
  }

  const Fours row_;
  int64_t* const masses_;
  int64_t* const tokens_;
  int64_t sum_;  // the mass of the thread's span and of all spans before it
  const unsigned fours_, lanes_;
  uint32_t own_drawn_ = 0;
};

// With uniforms. A block reads the row once, into the sums of its segments; then one warp draws. For each child it
// reads one segment again, in which the children drawn before count as 0.
__device__ inline Children draw_by_uniforms(const float* probs, int64_t V, const float* uniforms, int64_t K,
                                            int64_t* tokens) {
  __shared__ Segments segments;
  __shared__ uint32_t count;
  const Fours row(probs, V);
  const bool valid = segments.sum(row).valid;
  if (valid && warp() == 0) {
    const uint32_t n = SegmentWarp(row, segments, tokens).draw(uniforms, K);
    if (lane() == 0) count = n;
  }
  __syncthreads();
  const int64_t n = valid ? count : 0;
  clear_tokens(n, K, tokens);
  return {n, valid};
}

// With seeds. Each thread makes the noise of its fours, and the largest scores are the children. The row is in
// `copy` between the passes, if that has room for all fours of the block's threads; else it is read for each. A cluster
// must end with a barrier.
__device__ inline Children draw_by_noise(Team& team, const float* probs, int64_t V, const Noise& noise, int64_t K,
                                         int64_t* tokens, float4* copy, int64_t capacity) {
  const Fours row(probs, V);
  const uint32_t threads = team.threads();
  const bool is_copied = (row.count() + threads - 1) / threads * int64_t{blockDim.x} <= capacity;
  bool entries_valid = true;  // this thread's
  float max_prob = 0;
  unsigned num_positive = 0;
  float4* to = copy + threadIdx.x;
  for (uint32_t first = team.thread(); first < row.count(); first += kFoursInFlight * threads) {
    float4 p[kFoursInFlight];
    row.load(first, threads, p);
#pragma unroll
    for (int j = 0; j < kFoursInFlight; ++j, to += blockDim.x) {
      if (is_copied && first + j * threads < row.count()) *to = p[j];
      for (const float q : {p[j].x, p[j].y, p[j].z, p[j].w}) {
        entries_valid &= is_probability(q);
        max_prob = q > max_prob ? q : max_prob;
        num_positive += is_probability(q) && to_fixed_point(q) > 0;
      }
    }
  }
  const uint64_t max_order = __reduce_max_sync(kAllLanes, order_of(max_prob, 0));
  num_positive = __reduce_add_sync(kAllLanes, num_positive);
  const bool all_valid = __ballot_sync(kAllLanes, !entries_valid) == 0;
  const uint64_t* const warps_have = team.exchange(all_valid ? max_order << 32 | num_positive : UINT64_MAX);
  uint32_t highest = 0;
  int64_t total = 0;
  for (unsigned w = lane(); w < team.size() * warps(); w += kWarp) {
    highest = ::max(highest, static_cast<uint32_t>(warps_have[w] >> 32));
    total += static_cast<uint32_t>(warps_have[w]);
  }
  highest = __reduce_max_sync(kAllLanes, highest);
  total = warp_sum(total);
  const int64_t n = highest == UINT32_MAX ? 0 : total < K ? total : K;

  if (n > 0) {
    const float best_log = log_of(value_of(highest));
    const auto scores_of = [&](uint32_t i, float4 p) {
      uint32_t words[4];
      noise.words(i, words);
      const auto score = [&](float q, uint32_t word) {
        return to_fixed_point(q) > 0 ? (log_of(q) - best_log) + to_gumbel(word) : -INFINITY;
      };
      return float4{score(p.x, words[0]), score(p.y, words[1]), score(p.z, words[2]), score(p.w, words[3])};
    };
    const auto for_each_four = [&](auto f) {
      uint32_t slot = threadIdx.x;
#pragma unroll 1
      for (uint32_t i = team.thread(); i < row.count(); i += threads, slot += blockDim.x) f(i, slot);
    };
    float largest = -INFINITY;
    const auto offer = [&](const float4& s) { largest = fmaxf(fmaxf(largest, fmaxf(s.x, s.y)), fmaxf(s.z, s.w)); };
    for_each_four([&](uint32_t i, uint32_t slot) {
      const float4 s = scores_of(i, is_copied ? copy[slot] : row[i]);
      if (is_copied) copy[slot] = s;
      offer(s);
    });
    const auto for_each = [&](auto f) {
      for_each_four([&](uint32_t i, uint32_t slot) {
        const float4 s = is_copied ? copy[slot] : scores_of(i, row[i]);
        f(i * 4, s.x);
        f(i * 4 + 1, s.y);
        f(i * 4 + 2, s.z);
        f(i * 4 + 3, s.w);
      });
    };
    BestOf best(team);
    best.find_bound(order_of(largest, -INFINITY), n);
    best.rank(for_each, for_each, -INFINITY, [=](unsigned rank, int64_t id, float) { tokens[rank] = id; });
  }
  if (team.rank() == 0) clear_tokens(n, K, tokens);
  return {n, n > 0};
}

// The most probable tokens of a row, which has no mass if it is not valid. A cluster must end with a barrier.
__device__ inline void find_likeliest(Team& team, const float* probs, int64_t V, int64_t K, int64_t* tokens) {
  if (team.rank() == 0) clear_tokens(0, K, tokens);
  const ThreadRow<false> row(probs, V, team.thread(), team.threads());
  const auto for_each = [&](auto f) { row.for_each(f); };
  float largest = 0;
  for_each([&](int64_t, float p) { largest = p > largest ? p : largest; });
  BestOf best(team);
  best.find_bound(order_of(largest, 0), K);
  best.rank(for_each, for_each, 0, [=](unsigned rank, int64_t id, float) { tokens[rank] = id; });
}

}  // namespace
}  // namespace specvis
