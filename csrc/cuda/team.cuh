// The threads that share a row: the threads of a block, or of all blocks of a cluster where the GPU has clusters (sm_90
// and later). All of them call a method of their team together, and each gets the result. Blocks write to their own
// shared memory and read the others': then the barrier between the two is a cheap one.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "block.cuh"

namespace specvis {
namespace {

constexpr int64_t kMaxCluster = 8;       // blocks: as many as every GPU with clusters takes
constexpr unsigned kMaxTeamWarps = 128;  // in all blocks together

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ inline unsigned cluster_rank() { return 0; }
__device__ inline unsigned cluster_size() { return 1; }
__device__ inline void cluster_barrier() {}
__device__ inline void cluster_barrier_for_shared() {}
template <class T>
__device__ T* in_block(T* shared, unsigned) {
  return shared;
}
#else
__device__ inline unsigned cluster_rank() { return __clusterRelativeBlockRank(); }
__device__ inline unsigned cluster_size() { return __clusterSizeInBlocks(); }
__device__ inline void cluster_barrier() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
// As cluster_barrier(), but only for what threads wrote to the shared memory of their own blocks. On an H100 this takes
// 200 cycles, and the other 1300: it waits until all writes to global memory can be seen on the whole GPU.
__device__ inline void cluster_barrier_for_shared() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
#endif
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208 || !defined(__CUDACC__)
  __cluster_barrier_arrive_relaxed();
#else
  __cluster_barrier_arrive();
#endif
  __cluster_barrier_wait();
}
// What another block of the cluster has where this one has `shared`.
template <class T>
__device__ T* in_block(T* shared, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}
#endif

class Team {
 public:
  __device__ Team() : rank_(cluster_rank()), size_(cluster_size()) {}

  __device__ unsigned rank() const { return rank_; }  // this block's number
  __device__ unsigned size() const { return size_; }  // blocks
  __device__ unsigned thread() const { return rank_ * blockDim.x + threadIdx.x; }
  __device__ unsigned threads() const { return size_ * blockDim.x; }

  // What any thread wrote before, every thread may read.
  __device__ void sync() const {
    if (size_ > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }
  // What any thread wrote before to its own block's shared memory, every thread may read; and what threads read before,
  // and have used, may be written.
  __device__ void sync_shared() const {
    if (size_ > 1) {
      cluster_barrier_for_shared();
    } else {
      __syncthreads();
    }
  }
  // The last that a team does together, for the others may still read this block's shared memory: needed after every
  // other method but sync().
  __device__ void end() const {
    if (size_ > 1) cluster_barrier_for_shared();
  }
  // This block by itself: a team that exchanges while the other blocks may still read what this one gave to them.
  __device__ Team alone() const {
    Team block = *this;
    block.rank_ = 0;
    block.size_ = 1;
    block.turn_ = 2;
    return block;
  }

  // What block `rank` of the team has where this one has `shared`.
  template <class T>
  __device__ T* shared_of(unsigned rank, T* shared) const {
    return size_ > 1 ? in_block(shared, rank) : shared;
  }

  // The values of all warps in their order, which each lane of a warp brings. They stand until the exchange after the
  // next: the barrier of that one in between says that everyone has read them. What threads wrote to the shared memory
  // of their own blocks, every thread may read.
  template <class T = uint64_t>
  __device__ const T* exchange(const std::common_type_t<T>& value) {
    __shared__ T own[4][kMaxWarps], values[2][kMaxTeamWarps];  // of a team by turns, and of alone()
    turn_ ^= 1;
    if (lane() == 0) own[turn_][warp()] = value;
    sync_shared();
    if (size_ == 1) return own[turn_];
    const unsigned i = threadIdx.x;  // a block has at least as many threads as the team has warps
    if (i < num_warps()) values[turn_][i] = in_block(own[turn_], i / warps())[i % warps()];
    __syncthreads();
    return values[turn_];
  }

  __device__ int64_t sum(int64_t value) {
    const uint64_t* const sums = exchange(static_cast<uint64_t>(warp_sum(value)));
    int64_t total = 0;
    for (unsigned w = lane(); w < num_warps(); w += kWarp) total += static_cast<int64_t>(sums[w]);
    return warp_sum(total);
  }

  // The sum of a row of which each thread has summed a part, and said whether that is valid. `of_warps`, in shared
  // memory, becomes what each warp has, after the block's next barrier.
  __device__ Total total(int64_t mass, bool valid, int64_t* of_warps = nullptr) {
    const bool all_valid = __ballot_sync(kAllLanes, !valid) == 0;
    const uint64_t* const sums = exchange(all_valid ? static_cast<uint64_t>(warp_sum(mass)) : UINT64_MAX);
    int64_t total = 0;
    bool is_valid = true;
    for (unsigned w = lane(); w < num_warps(); w += kWarp) {
      is_valid &= sums[w] != UINT64_MAX;
      total += static_cast<int64_t>(sums[w]);
    }
    for (unsigned w = warp(); of_warps && w < num_warps(); w += warps()) {
      if (lane() == 0) of_warps[w] = static_cast<int64_t>(sums[w]);
    }
    is_valid = __ballot_sync(kAllLanes, !is_valid) == 0;
    total = warp_sum(total);
    return {total, is_valid && total > 0};
  }

  __device__ Scan scan(int64_t value) {
    const int64_t sum = warp_scan(value);
    const uint64_t* const sums = exchange(static_cast<uint64_t>(__shfl_sync(kAllLanes, sum, kWarp - 1)));
    const unsigned own = rank_ * warps() + warp();
    Scan scan = {0, 0};
    for (unsigned w = lane(); w < num_warps(); w += kWarp) {
      const int64_t of_warp = static_cast<int64_t>(sums[w]);
      if (w < own) scan.before += of_warp;
      scan.total += of_warp;
    }
    return {warp_sum(scan.before) + sum - value, warp_sum(scan.total)};
  }

  __device__ uint64_t max(uint64_t value) {
    const uint64_t* const maxima = exchange(warp_max(value));
    uint64_t largest = 0;
    for (unsigned w = lane(); w < num_warps(); w += kWarp) largest = maxima[w] > largest ? maxima[w] : largest;
    return warp_max(largest);
  }

  __device__ bool any(bool condition) {
    const uint64_t* const votes = exchange(__ballot_sync(kAllLanes, condition));
    bool is_any = false;
    for (unsigned w = lane(); w < num_warps(); w += kWarp) is_any |= votes[w] != 0;
    return __ballot_sync(kAllLanes, is_any) != 0;
  }

 private:
  __device__ unsigned num_warps() const { return size_ * warps(); }

  unsigned rank_, size_, turn_ = 0;
};

// What a device gives to a kernel, asked once for each of both.
struct Device {
  int64_t shared;  // bytes of dynamic shared memory that it may be launched with, beside what the kernel declares
  int64_t multiprocessors;
  bool has_clusters;    // the device has them, and the kernel is compiled for them
  int64_t clusters[4];  // how many of 2^i blocks run at once, with one block on a multiprocessor; 0 without clusters
};

template <class Kernel>
cudaError_t device_for(Kernel* kernel, Device* result) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Device> known;
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(reinterpret_cast<const void*>(kernel), id);
  const auto found = known.find(key);
  if (found != known.end()) {
    *result = found->second;
    return cudaSuccess;
  }
  int shared = 0, multiprocessors = 0, capability = 0;
  cudaFuncAttributes attributes = {};
  error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, id);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  shared -= std::min(shared, static_cast<int>(attributes.sharedSizeBytes));
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  Device device = {shared, multiprocessors, capability >= 9 && attributes.ptxVersion >= 90, {}};
  for (int i = 1; device.has_clusters && i < 4; ++i) {  // not all multiprocessors: a cluster is in one part of the GPU
    int clusters = 0;
    const ClusterLaunch launch(kMaxCluster, 1 << i, kWarp, static_cast<size_t>(shared), nullptr);
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, launch.config());
    if (error != cudaSuccess) return error;
    device.clusters[i] = clusters;
  }
  *result = known[key] = device;
  return cudaSuccess;
}

// How many blocks share each of `rows` rows, so that every multiprocessor has work and all clusters run at once: a
// power of two, at most `max_size` and kMaxCluster.
inline unsigned cluster_for(const Device& device, int64_t rows, int64_t max_size = kMaxCluster) {
  int i = 0;
  while (i < 3 && 2 << i <= max_size && rows <= device.clusters[i + 1]) ++i;
  return 1u << i;
}

}  // namespace
}  // namespace specvis
