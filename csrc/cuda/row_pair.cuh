// A target's row and a draft's, which a team reads once: sums over both, and draws from what is made of them.
#pragma once
#include "team.cuh"

namespace specvis {
namespace {

// Each warp of the team has a share of neighbouring entries of both rows, and of these a lane has every 32nd. A thread
// keeps kHeld entries of each row in registers. If it has more, each pass reads those again.
class RowPair {
 public:
  static constexpr int kHeld = 16;

  RowPair() = default;  // to be assigned

  // `share` is that of each warp: a multiple of kWarp, so that all together have the row. Without a draft all of its
  // entries are 0.
  __device__ RowPair(const Team& team, const float* target, const float* draft, int64_t V, int64_t share)
      : target_(target), draft_(draft), begin_(team.thread() / kWarp * share),
        end_(begin_ + share < V ? begin_ + share : V) {
    load(begin_ + lane());
  }

  // The sums of both rows. An entry that is no probability counts as 0.
  __device__ void sum(Team& team, Total* target, Total* draft) {
    int64_t masses = 0, draft_masses = 0;
    bool is_valid = true, is_draft_valid = true;
    for_each_group([&](int64_t, int) {
      masses += sum_of(target_probs_, &is_valid);
      draft_masses += sum_of(draft_probs_, &is_draft_valid);
    });
    *target = team.total(masses, is_valid);
    *draft = team.total(draft_masses, is_draft_valid);
  }

  // The target's largest entry before `before` in the order of entry(), as a whole number; 0 if no entry is before it.
  __device__ uint64_t largest(Team& team, uint64_t before) {
    uint64_t own = 0;
    for_each_group([&](int64_t first, int count) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const float mass = truncf(target_probs_[i] * static_cast<float>(kFixedOne));
        const uint64_t candidate = i < count ? entry(order_of(mass, 0.0f), first + i * kWarp) : 0;
        if (candidate < before && candidate > own) own = candidate;
      }
    });
    return team.max(own);
  }

  // The token drawn by inverse CDF, in the one thread that finds it, and -1 in the others. mass(v, p, q) is a whole
  // number, a double; p and q are the entries of target and draft. *sum becomes that of all tokens; if it is 0, none is
  // found.
  template <class Mass>
  __device__ int64_t draw(Team& team, const Mass& mass, float uniform, int64_t* sum) {
    int64_t own = 0;
    for_each_group([&](int64_t first, int count) {
      double of_group = 0;  // below 2^53, so that it is exact
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i >= count) continue;
        const double of_token = mass(first + i * kWarp, target_probs_[i], draft_probs_[i]);
        if (of_token < 0x1p48) {
          of_group += of_token;
        } else {
          own += static_cast<int64_t>(of_token);
        }
      }
      own += static_cast<int64_t>(of_group);
    });
    const Scan scan = team.scan(own);
    *sum = scan.total;
    const int64_t threshold = draw_threshold(uniform, scan.total);
    int64_t before = __shfl_sync(kAllLanes, scan.before, 0);
    const int64_t behind = __shfl_sync(kAllLanes, scan.before + own, kWarp - 1);
    if (threshold < before || threshold >= behind) return -1;  // it is in another warp's share

    int64_t token = -1;
    bool is_found = false;
    for_each_group([&](int64_t first, int count) {
      if (is_found) return;
      int64_t masses[kHeld], of_lane = 0;  // the sum of all lanes' masses whose number is this lane's
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        masses[i] = i < count ? static_cast<int64_t>(mass(first + i * kWarp, target_probs_[i], draft_probs_[i])) : 0;
        const int64_t of_lanes = warp_sum(masses[i]);
        if (static_cast<int>(lane()) == i) of_lane = of_lanes;
      }
      const int64_t up_to = warp_scan(of_lane);
      const unsigned ends = __ballot_sync(kAllLanes, before + up_to > threshold);
      if (ends == 0) {
        before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
        return;
      }
      const int number = __ffs(ends) - 1;
      before += __shfl_sync(kAllLanes, up_to - of_lane, number);
      int64_t own_mass = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) own_mass = i == number ? masses[i] : own_mass;
      const int64_t own_up_to = before + warp_scan(own_mass);
      if (own_up_to > threshold && own_up_to - own_mass <= threshold) token = first + number * kWarp;
      is_found = true;
    });
    return token;
  }

 private:
  static constexpr int64_t kGroup = kHeld * kWarp;

  // f(first, count) for one group of entries after another: target_probs_[i] and draft_probs_[i] are those of token
  // first + i * kWarp, for each i below count.
  template <class F>
  __device__ void for_each_group(const F& f) {
#pragma unroll 1
    for (int64_t start = begin_; start == begin_ || start < end_; start += kGroup) {
      if (start + lane() != held_) load(start + lane());
      f(held_, count_);
    }
  }

  __device__ void load(int64_t first) {
    held_ = first;
    const int64_t count = (end_ - first + kWarp - 1) / kWarp;
    count_ = count < 0 ? 0 : count < kHeld ? static_cast<int>(count) : kHeld;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) target_probs_[i] = i < count_ ? target_[first + i * kWarp] : 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) draft_probs_[i] = draft_ && i < count_ ? draft_[first + i * kWarp] : 0.0f;
  }

  __device__ static int64_t sum_of(const float (&probs)[kHeld], bool* is_valid) {
    double sum = 0;  // below 2^53, so that it is exact
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const bool ok = is_probability(probs[i]);
      *is_valid &= ok;
      sum += whole_mass(ok ? probs[i] : 0.0f);
    }
    return static_cast<int64_t>(sum);
  }

  const float *target_, *draft_;
  int64_t begin_, end_;  // the bounds of this warp's share
  int64_t held_;         // the first of those in registers
  int count_;            // how many there are
  float target_probs_[kHeld], draft_probs_[kHeld];
};

// How many threads and blocks share each pair: their registers hold it if they can, and every
// multiprocessor has work. But a thread has kLeast entries: a barrier of a cluster takes as long as to read a few.
struct PairTeam {
  static constexpr int64_t kLeast = 4;
  unsigned threads, cluster;  // threads of a block
  int64_t share;              // how many entries a warp takes

  PairTeam(const Device& device, int64_t rows, int64_t V, int64_t max_threads)
      : threads(threads_for(V / kLeast, max_threads)), cluster(cluster_for(device, rows, V / (threads * kLeast))) {
    while (device.has_clusters && cluster < kMaxCluster && cluster * int64_t{threads} * RowPair::kHeld < V) {
      cluster *= 2;
    }
    const int64_t all = cluster * int64_t{threads};
    share = (V + all - 1) / all * kWarp;
  }
};

}  // namespace
}  // namespace specvis
