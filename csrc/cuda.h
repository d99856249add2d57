// What the kernels share: launching, and what the threads of a block do together with a row of probabilities.
// Every function here is called by all threads of a block alike and returns the same to each of them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "rules.h"

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(T, name)                                 \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared)
#endif  // else tests/cuda_on_cpu says what they are

namespace specvis {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

// The sum of the values of this lane and those below it.
__device__ inline int64_t warp_scan(int64_t value) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (static_cast<int>(threadIdx.x % kWarp) >= distance) value += below;
  }
  return value;
}

// The sum of the values of all warps below, and of all in `total`: `sum` is this warp's. blockDim.x is a
// multiple of 32.
__device__ inline int64_t warps_before(int64_t sum, int64_t* total) {
  __shared__ int64_t sums[kWarp];
  const unsigned warp = threadIdx.x / kWarp;
  __syncthreads();  // an earlier call's sums have been read
  if (threadIdx.x % kWarp == 0) sums[warp] = sum;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  *total = all;
  return before;
}

__device__ inline int64_t warp_sum(int64_t value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__device__ inline int64_t block_sum(int64_t value) {
  int64_t total;
  warps_before(warp_sum(value), &total);
  return total;
}

__device__ inline void keep(float probability, int64_t, float* place) { *place = probability; }
__device__ inline void keep(float, int64_t weight, int64_t* place) { *place = weight; }

// The row's total in fixed point. `copy`, if not null, receives the probabilities (T = float) or the weights;
// it may be read once this has returned.
template <class T>
__device__ Total weigh(const float* probs, int64_t V, T* copy) {
  int64_t total = 0;
  bool sound = true;
  const auto take = [&](float p, int64_t v) {
    const bool ok = is_probability(p);
    const int64_t weight = to_fixed(ok ? p : 0.0f);
    if (copy) keep(p, weight, copy + v);
    sound &= ok;
    total += weight;
  };
  // 16 bytes at a time between the first and the last aligned address.
  const int64_t head = (16 - reinterpret_cast<uintptr_t>(probs) % 16) % 16 / sizeof(float);
  const int64_t quads = V > head ? (V - head) / 4 : 0, tail = head + 4 * quads;
  for (int64_t v = threadIdx.x; v < head && v < V; v += blockDim.x) take(probs[v], v);
#pragma unroll 4
  for (int64_t q = threadIdx.x; q < quads; q += blockDim.x) {
    const float4 p = reinterpret_cast<const float4*>(probs + head)[q];
    const int64_t v = head + 4 * q;
    take(p.x, v), take(p.y, v + 1), take(p.z, v + 2), take(p.w, v + 3);
  }
  for (int64_t v = tail + threadIdx.x; v < V; v += blockDim.x) take(probs[v], v);
  sound = __syncthreads_and(sound);
  total = block_sum(total);
  return {total, sound && total > 0};
}

// The longest prefix of the first `columns` neighbors that the budget allows, a neighbor per thread at a time:
// sums only grow, so the first that overflows ends it. weight(v) gives the row.
template <class Weight>
__device__ Kept kept_prefix(const Weight& weight, int64_t V, const Neighbors& neighbors, int64_t columns,
                            int64_t token, const Budget& budget) {
  Kept kept = {0, 0};
  if (!budget.any || !neighbors.has(token)) return kept;
  for (int64_t start = 0; start < columns; start += blockDim.x) {
    const int64_t j = start + threadIdx.x, id = j < columns ? neighbors(token, j) : -1;
    const int64_t own = id >= 0 && id < V ? weight(id) : 0;
    const int64_t running = warp_scan(own);
    int64_t all;
    const int64_t before = warps_before(__shfl_sync(kAllLanes, running, kWarp - 1), &all);
    const bool fits = j < columns && budget.fits(kept.mass + before + running);
    const int count = __syncthreads_count(fits);
    kept.count += count;
    if (count < static_cast<int>(blockDim.x)) {
      kept.mass += block_sum(fits ? own : 0);
      break;
    }
    kept.mass += all;
  }
  return kept;
}

// Inverse CDF over V weights in the vocabulary's order; weight(v) gives them. Each warp owns a run of them.
template <class Weight>
__device__ int64_t draw(const Weight& weight, int64_t V, int64_t total, float uniform) {
  __shared__ int64_t found;
  const int64_t aim = draw_at(uniform, total);
  const int lane = threadIdx.x % kWarp;
  const int64_t each = (V + blockDim.x - 1) / blockDim.x * kWarp, first = threadIdx.x / kWarp * each;
  const int64_t end = first + each < V ? first + each : V;
  int64_t own = 0, all;
  for (int64_t v = first + lane; v < end; v += kWarp) own += weight(v);
  own = warp_sum(own);
  int64_t sum = warps_before(own, &all);  // its barriers end an earlier call's reading of `found`
  if (threadIdx.x == 0) found = V - 1;
  __syncthreads();
  if (sum <= aim && aim < sum + own) {    // one warp
    for (int64_t start = first;; start += kWarp) {
      const int64_t running = sum + warp_scan(start + lane < end ? weight(start + lane) : 0);
      const unsigned beyond = __ballot_sync(kAllLanes, running > aim);
      if (beyond) {
        if (lane == 0) found = start + __ffs(beyond) - 1;
        break;
      }
      sum = __shfl_sync(kAllLanes, running, kWarp - 1);
    }
  }
  __syncthreads();
  return found;
}

}  // namespace specvis
