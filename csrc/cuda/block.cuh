// What the CUDA kernels share: launches, what the lanes of a warp do together, and rows that threads read together. A
// block has one dimension and whole warps.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../shared/floats.h"
#include "../shared/rules.h"

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
// Launches clusters of `cluster` blocks; the grid is a multiple of `cluster`. Returns the error.
#define LAUNCH_CLUSTERS(kernel, grid, cluster, block, shared_bytes, stream, ...) \
  cudaLaunchKernelEx(ClusterLaunch(grid, cluster, block, shared_bytes, stream).config(), kernel, __VA_ARGS__)
#define DYNAMIC_SHARED(T, name)                                           \
  extern __shared__ __align__(16) unsigned char specvis_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(specvis_dynamic_shared)
#else  // tests/cuda_on_cpu
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  cuda_on_cpu::launch(#kernel, kernel, grid, 1, block, shared_bytes, stream, __VA_ARGS__)
#define LAUNCH_CLUSTERS(kernel, grid, cluster, block, shared_bytes, stream, ...) \
  cuda_on_cpu::launch(#kernel, kernel, grid, cluster, block, shared_bytes, stream, __VA_ARGS__)
#define DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(cuda_on_cpu::dynamic_shared.get())
#endif

namespace specvis {
namespace {  // each kernel file has its own copies

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;  // of one block

// How clusters of `cluster` blocks are launched.
class ClusterLaunch {
 public:
  ClusterLaunch(unsigned grid, unsigned cluster, unsigned block, size_t shared_bytes, cudaStream_t stream) {
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim.x = cluster;
    attribute_.val.clusterDim.y = attribute_.val.clusterDim.z = 1;
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = &attribute_;
    config_.numAttrs = cluster > 1;
  }

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};

// The number of blocks of a grid. A launch of more than a grid can have is refused by CUDA.
inline unsigned blocks_for(int64_t count) { return static_cast<unsigned>(count <= INT32_MAX ? count : UINT32_MAX); }

// The number of threads for a number of items: whole warps, and at most max_threads.
inline unsigned threads_for(int64_t items, int64_t max_threads) {
  const int64_t whole = (items + kWarp - 1) / kWarp * kWarp;
  return static_cast<unsigned>(whole < kWarp ? kWarp : whole < max_threads ? whole : max_threads);
}

__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }
__device__ inline unsigned warps() { return blockDim.x / kWarp; }

// Of 64 bits, modulo 2^64: three additions of 27 of them, each of one instruction for the whole warp.
template <class T>
__device__ T warp_sum(T value) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 8, "a warp adds 32 bits by __reduce_add_sync");
  constexpr unsigned kBits = 27, kMask = (1u << kBits) - 1;
  const uint64_t bits = static_cast<uint64_t>(value);
  const uint64_t low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits) & kMask);
  const uint64_t middle = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> kBits) & kMask);
  const uint64_t high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> 2 * kBits));
  return static_cast<T>(low + (middle << kBits) + (high << 2 * kBits));
}

// The sum of the values of the lanes up to this one, which is one of the first `lanes`.
__device__ inline int64_t warp_scan(int64_t value, unsigned lanes = kWarp) {
  for (unsigned distance = 1; distance < lanes; distance *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, value, distance);
    if (lane() >= distance) value += lower;
  }
  return value;
}

__device__ inline uint64_t warp_max(uint64_t value) {
  const unsigned own = static_cast<unsigned>(value >> 32), high = __reduce_max_sync(kAllLanes, own);
  const unsigned low = __reduce_max_sync(kAllLanes, own == high ? static_cast<unsigned>(value) : 0);
  return uint64_t{high} << 32 | low;
}

// The first of n values at which their running sum, with `before`, reaches the limit; n if it never does. `before`
// becomes the sum of those before it. By one warp.
template <class Value>
__device__ unsigned first_reaching(unsigned n, const Value& value, int64_t limit, int64_t* before) {
#pragma unroll 1
  for (unsigned start = 0; start < n; start += kWarp) {
    const int64_t own = start + lane() < n ? value(start + lane()) : 0, sum = warp_scan(own);
    const unsigned reached = __ballot_sync(kAllLanes, *before + sum >= limit);
    const int at = reached ? __ffs(static_cast<int>(reached)) - 1 : kWarp - 1;
    *before += __shfl_sync(kAllLanes, reached ? sum - own : sum, at);
    if (reached) return start + static_cast<unsigned>(at);
  }
  return n;
}

struct Scan {
  int64_t before, total;  // the sum of the lower threads' values, and of all threads' values
};

// An entry of a row as an integer, ordered by value and then by falling id; 0 if the value is not above `floor`.
__device__ inline uint32_t order_of(float x, float floor) { return x > floor ? ordered(x) : 0; }
__device__ inline float value_of(uint32_t order) { return float_of(static_cast<int32_t>(order ^ 0x80000000u)); }
__device__ inline uint64_t entry(uint32_t order, int64_t id) {
  return order ? uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(id)) : 0;
}
__device__ inline int64_t id_of(uint64_t entry) { return 0xffffffffu - static_cast<uint32_t>(entry); }

// Calls f(v, p) for every entry of a row. `threads` threads share the entries, of which this is number `thread`. They
// load 16 aligned bytes at a time, and kInFlight times so before the first is used: the compiler would not, since a
// load cannot cross the exit of a loop.
template <class F>
__device__ void for_each_entry(const float* row, int64_t V, unsigned thread, unsigned threads, F f) {
  constexpr int kInFlight = 4;
  const int64_t ahead = (16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(float);
  const int64_t head = ahead < V ? ahead : V, fours = (V - head) / 4, tail = head + fours * 4;
  const float4* aligned = reinterpret_cast<const float4*>(row + head);
  const auto use = [&](int64_t i, const float4& p) {
    const int64_t v = head + i * 4;
    f(v, p.x);
    f(v + 1, p.y);
    f(v + 2, p.z);
    f(v + 3, p.w);
  };
  int64_t i = thread;
#pragma unroll 1  // to unroll them the compiler would count their turns, by a division
  for (; i + (kInFlight - 1) * int64_t{threads} < fours; i += kInFlight * int64_t{threads}) {
    float4 p[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) p[j] = aligned[i + j * int64_t{threads}];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) use(i + j * int64_t{threads}, p[j]);
  }
#pragma unroll 1
  for (; i < fours; i += threads) use(i, aligned[i]);
  if (thread < head) f(int64_t{thread}, row[thread]);
  if (tail + thread < V) f(tail + thread, row[tail + thread]);
}
}  // namespace
}  // namespace specvis
