// What the kernels share: sums over a block, and rows of probabilities read by a block. Blocks are whole
// warps in one dimension. All threads call these functions together, and each gets the result.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "rules.h"

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(T, name)                                            \
  extern __shared__ __align__(16) unsigned char specvis_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(specvis_dynamic_shared)
#else  // tests/cuda_on_cpu
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  cuda_on_cpu::launch(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(cuda_on_cpu::dynamic_shared.get())
#endif

namespace specvis {
namespace {  // of each kernel file its own, as are the kernels

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kMostWarps = 32;  // in a block

// As many threads as there are things to do, in whole warps, but at most `most`.
inline unsigned threads_for(int64_t things, int64_t most) {
  const int64_t whole = (things + kWarp - 1) / kWarp * kWarp;
  return static_cast<unsigned>(whole < kWarp ? kWarp : whole < most ? whole : most);
}

__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }
__device__ inline unsigned warps() { return blockDim.x / kWarp; }

template <class T>
__device__ T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__device__ inline int64_t block_sum(int64_t value) {
  __shared__ int64_t sums[kMostWarps];
  value = warp_sum(value);
  __syncthreads();  // everyone has read the sums of the call before
  if (lane() == 0) sums[warp()] = value;
  __syncthreads();
  int64_t total = 0;
  for (unsigned w = 0; w < warps(); ++w) total += sums[w];
  return total;
}

__device__ inline bool block_any(bool condition) { return __syncthreads_or(condition); }

// The lowest thread of which the condition holds, or blockDim.x.
__device__ inline unsigned block_first(bool condition) {
  __shared__ unsigned firsts[kMostWarps];
  const unsigned votes = __ballot_sync(kAllLanes, condition);
  __syncthreads();
  if (lane() == 0) firsts[warp()] = votes ? threadIdx.x + __ffs(votes) - 1 : blockDim.x;
  __syncthreads();
  unsigned first = blockDim.x;
  for (unsigned w = 0; w < warps(); ++w) first = min(first, firsts[w]);
  return first;
}

struct Scan {
  int64_t before, total;  // the sum of the lower threads' values, and of all
};

__device__ inline Scan block_scan(int64_t value) {
  __shared__ int64_t sums[kMostWarps];
  int64_t sum = value;
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane() >= distance) sum += lower;
  }
  __syncthreads();
  if (lane() == kWarp - 1) sums[warp()] = sum;
  __syncthreads();
  Scan scan = {sum - value, 0};
  for (unsigned w = 0; w < warps(); ++w) {
    if (w < warp()) scan.before += sums[w];
    scan.total += sums[w];
  }
  return scan;
}

// f(v, p) for every entry of a row, shared out among the threads; 16 bytes in a load where they are aligned.
template <class F>
__device__ void for_each_entry(const float* row, int64_t V, F f) {
  const int64_t ahead = (16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(float);
  const int64_t head = ahead < V ? ahead : V, fours = (V - head) / 4, tail = head + fours * 4;
  if (threadIdx.x < head) f(int64_t{threadIdx.x}, row[threadIdx.x]);
  const float4* aligned = reinterpret_cast<const float4*>(row + head);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < fours; i += blockDim.x) {
    const float4 p = aligned[i];
    const int64_t v = head + i * 4;
    f(v, p.x);
    f(v + 1, p.y);
    f(v + 2, p.z);
    f(v + 3, p.w);
  }
  if (tail + threadIdx.x < V) f(tail + threadIdx.x, row[tail + threadIdx.x]);
}

__device__ inline void put(int64_t* copy, float, int64_t weight) { *copy = weight; }
__device__ inline void put(float* copy, float p, int64_t) { *copy = p; }

// The row's total in fixed point. `copy`, if not null, receives its entries, as weights or as they are, with
// 0 for what is no probability; all of it is there when this returns.
template <class T = float>
__device__ Total weigh(const float* row, int64_t V, T* copy = nullptr) {
  int64_t sum = 0;
  bool sound = true;
  for_each_entry(row, V, [&](int64_t v, float p) {
    const bool ok = is_probability(p);
    const float probability = ok ? p : 0.0f;
    const int64_t weight = to_fixed(probability);
    if (copy) put(copy + v, probability, weight);
    sound &= ok;
    sum += weight;
  });
  const bool broken = block_any(!sound);
  sum = block_sum(sum);
  return {sum, !broken && sum > 0};
}

// The longest prefix of the first `columns` neighbors that the budget allows, a neighbor per thread at a
// time, up to the first that does not fit. weight(v) gives the row.
template <class Weight>
__device__ Kept kept_prefix(const Weight& weight, int64_t V, const Neighbors& neighbors, int64_t columns,
                            int64_t token, const Budget& budget) {
  __shared__ int64_t mass;
  Kept kept = {0, 0};
  if (!budget.any || !neighbors.has(token)) return kept;
  for (int64_t start = 0; start < columns; start += blockDim.x) {
    const int64_t j = start + threadIdx.x;
    const int64_t id = j < columns ? neighbors(token, j) : -1;
    const int64_t own = id >= 0 && id < V ? weight(id) : 0;
    const Scan scan = block_scan(own);
    const unsigned first = block_first(j >= columns || !budget.fits(kept.mass + scan.before + own));
    kept.count += first;
    if (first == blockDim.x) {
      kept.mass += scan.total;
      continue;
    }
    if (threadIdx.x == first) mass = scan.before;
    __syncthreads();
    kept.mass += mass;
    break;
  }
  return kept;
}

// Inverse CDF in vocabulary order, in two steps: sums[w] receives what warp w's share of the row weighs, ...
template <class Weight>
__device__ int64_t sum_shares(const Weight& weight, int64_t V, int64_t* sums) {
  const int64_t share = (V + warps() - 1) / warps(), begin = warp() * share;
  const int64_t end = begin + share < V ? begin + share : V;
  int64_t sum = 0;
#pragma unroll 4
  for (int64_t v = begin + lane(); v < end; v += kWarp) sum += weight(v);
  sum = warp_sum(sum);
  __syncthreads();
  if (lane() == 0) sums[warp()] = sum;
  __syncthreads();
  int64_t total = 0;
  for (unsigned w = 0; w < warps(); ++w) total += sums[w];
  return total;
}

// ... and the first token whose running sum exceeds `aim` is looked for in one of those shares.
template <class Weight>
__device__ int64_t search(const Weight& weight, int64_t V, const int64_t* sums, int64_t aim) {
  __shared__ int64_t token;
  int64_t before = 0;
  unsigned w = 0;
  while (w + 1 < warps() && before + sums[w] <= aim) before += sums[w++];
  __syncthreads();
  if (threadIdx.x == 0) token = V - 1;
  for (int64_t start = w * ((V + warps() - 1) / warps()); start < V && before <= aim; start += blockDim.x) {
    const int64_t v = start + threadIdx.x, own = v < V ? weight(v) : 0;
    const Scan scan = block_scan(own);
    const int64_t sum = before + scan.before;
    if (sum <= aim && sum + own > aim) token = v;
    before += scan.total;
  }
  __syncthreads();
  return token;
}

template <class Weight>
__device__ int64_t draw(const Weight& weight, int64_t V, int64_t total, float uniform) {
  __shared__ int64_t sums[kMostWarps];
  sum_shares(weight, V, sums);
  return search(weight, V, sums, draw_at(uniform, total));
}

}  // namespace
}  // namespace specvis
