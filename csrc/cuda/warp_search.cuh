// How the threads of one block read a row, search in it and exchange numbers, while other blocks of the team do so too.
#pragma once
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kRowLoads = 8, kMassLoads = 4;  // loads in flight per thread

// Calls f(v, p) for the ids [begin, end) of a row; a warp's lanes take ids that follow each other.
template <class F>
__device__ void for_each_in_stride(const float* row, uint32_t begin, uint32_t end, F f) {
#pragma unroll 1
  for (uint32_t start = begin + lane(); start < end; start += kRowLoads * kWarp) {
    float p[kRowLoads];
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j) p[j] = start + j * kWarp < end ? row[start + j * kWarp] : 0.0f;
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j)
      if (start + j * kWarp < end) f(start + j * kWarp, p[j]);
  }
}

// What one warp searches for: the first of `count` masses at which their running sum exceeds the threshold, and the sum
// before it.
struct Found {
  uint32_t index;
  int64_t before;
};

template <class Mass>
__device__ Found search_in_warp(uint32_t count, int64_t threshold, const Mass& mass) {
  if (count == 1) return {0, 0};
  int64_t before = 0;
#pragma unroll 1
  for (uint32_t start = 0; start < count; start += kWarp) {
    const int64_t own_mass = start + lane() < count ? mass(start + lane()) : 0;
    const int64_t sum = before + warp_scan(own_mass);
    const unsigned votes = __ballot_sync(kAllLanes, sum > threshold);
    if (votes) {
      const int found = __ffs(votes) - 1;
      return {start + found, __shfl_sync(kAllLanes, sum - own_mass, found)};
    }
    before = __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return {count - 1, before};
}

// An exchange between the threads of one block. The threads of other blocks may be at theirs.
class Block {
 public:
  // As Team::exchange.
  __device__ const uint64_t* exchange(uint64_t value) {
    __shared__ uint64_t values[2][kMaxWarps];
    turn_ ^= 1;
    if (lane() == 0) values[turn_][warp()] = value;
    __syncthreads();
    return values[turn_];
  }
  __device__ Scan scan(int64_t value) {
    const int64_t sum = warp_scan(value);
    const uint64_t* const sums = exchange(__shfl_sync(kAllLanes, sum, kWarp - 1));
    const int64_t of_warp = lane() < warps() ? static_cast<int64_t>(sums[lane()]) : 0;
    return {warp_sum(lane() < warp() ? of_warp : 0) + sum - value, warp_sum(of_warp)};
  }
  // The lowest thread for which the condition holds, or blockDim.x if it holds for no thread.
  __device__ unsigned first(bool condition) {
    const unsigned votes = __ballot_sync(kAllLanes, condition);
    const uint64_t* const firsts = exchange(votes ? warp() * kWarp + __ffs(votes) - 1 : blockDim.x);
    return __reduce_min_sync(kAllLanes, lane() < warps() ? static_cast<unsigned>(firsts[lane()]) : blockDim.x);
  }

 private:
  unsigned turn_ = 0;
};

}  // namespace
}  // namespace specvis
