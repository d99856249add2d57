// Kernels right and wrong, to test what runs them: see test_cuda_on_cpu.py.
#include <cstring>

#include "../../csrc/cuda/team.cuh"

namespace specvis {
namespace {

__global__ void warp_operations(int64_t* data) {
  const int64_t value = data[threadIdx.x];
  int64_t* mine = data + blockDim.x + threadIdx.x * 7;
  mine[0] = __shfl_up_sync(kAllLanes, value, 3u, 8);
  mine[1] = __shfl_sync(kAllLanes, value, 5, 16);
  mine[2] = __ballot_sync(kAllLanes, value % 3 == 0);
  mine[3] = __match_any_sync(kAllLanes, value % 5);
  mine[4] = __reduce_max_sync(kAllLanes, static_cast<int>(value));
  mine[5] = lane() % 2 ? __shfl_xor_sync(0xaaaaaaaau, value, 2) : __shfl_xor_sync(0x55555555u, value, 4);
  mine[6] = atomicAdd(reinterpret_cast<unsigned long long*>(data + blockDim.x * 8), 1ull) < blockDim.x;
}

__global__ void dynamic_shared_memory(int64_t* data, int64_t count) {
  Team team;
  DYNAMIC_SHARED(int64_t, shared);
  if (threadIdx.x == 0) data[0] = shared[0];
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) shared[i] = i;
  __syncthreads();
  const int64_t sum = team.sum(shared[threadIdx.x]);
  if (threadIdx.x == 0) data[1] = sum;
}

__noinline__ __device__ void clear(int64_t* entry) { *entry = 0; }

// What each block finds, and then clears, an entry per thread.
__global__ void static_shared_memory(int64_t* data) {
  __shared__ int64_t values[64];
  data[blockIdx.x] = values[5];
  __syncthreads();
  clear(values + threadIdx.x);
}

// An array in a template, an array in a member function of a class template, and an array in a lambda.
template <class T>
struct Arrays {
  __device__ T* member() {
    __shared__ T values[2];
    return values;
  }
};
template <class T>
__device__ T found() {
  __shared__ T value;
  const auto in_lambda = [](auto) -> T* {
    __shared__ T values[2];
    return values;
  };
  T* const places[] = {&value, Arrays<T>().member(), in_lambda(0)};
  T sum = 0;
  for (T* place : places) sum += *place;
  __syncthreads();
  for (T* place : places) *place = 0;
  return sum;
}
__global__ void shared_memory_of_templates(int64_t* data) { data[blockIdx.x] = found<int64_t>() + found<int>(); }

// An entry of another block's array in a template for each thread.
template <class T>
__device__ T* of_last_block() {
  __shared__ T values[64];
  return in_block(values, cluster_size() - 1);
}
__global__ void arrays_of_the_last_block(int64_t*) {
  Team team;
  team.sync();
  clear(of_last_block<int64_t>() + threadIdx.x);
  team.sync();
}

// data: 7 numbers for each thread of each team, of which the first is its value
__global__ void teams(int64_t* data) {
  Team team;
  const int64_t at = int64_t{blockIdx.x} / team.size() * team.threads() + team.thread();
  int64_t* const mine = data + at * 7;
  const int64_t value = mine[0];
  mine[0] = team.sum(value);
  const Total total = team.total(value, value >= 0), all = team.total(1, true), none = team.total(0, true);
  mine[1] = total.mass;
  mine[2] = total.valid;
  const Scan scan = team.scan(value);
  mine[3] = scan.before;
  mine[4] = team.max(static_cast<uint64_t>(value));
  mine[5] = team.any(value < 0) + 2 * team.any(false);
  mine[6] = scan.total == mine[0] && all.valid && all.mass == int64_t{team.threads()} && !none.valid &&
            team.sum(-value) == -mine[0];
  team.sync();
}

// Each block gives its values to the next of its cluster, through a variable and through dynamic memory, and adds up
// the words of two others. Without a barrier, or the last one, what it reads may be there or not.
template <bool kBarrier, bool kLast>
__global__ void passes_on(int64_t* data) {
  Team team;
  DYNAMIC_SHARED(int64_t, dynamic);
  __shared__ int64_t values[64];
  int64_t* const mine = data + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const unsigned next = (team.rank() + 1) % team.size(), last = (team.rank() + team.size() - 1) % team.size();
  team.sync();  // the next block runs
  in_block(dynamic, next)[threadIdx.x] = *mine;
  values[threadIdx.x] = *mine;
  if (kBarrier) team.sync();
  *mine = dynamic[threadIdx.x] * 1000 + in_block(values, last)[threadIdx.x];
  if (kLast) team.sync();
}

// Each block writes to its own shared memory, or to that of the next block of its cluster, and then the other writes.
template <bool kToOwn>
__global__ void over_a_relaxed_barrier(int64_t*) {
  Team team;
  __shared__ int64_t values[64];
  team.sync();
  int64_t* const next = in_block(values, (team.rank() + 1) % team.size());
  clear((kToOwn ? values : next) + threadIdx.x);
  team.sync_shared();
  clear((kToOwn ? next : values) + threadIdx.x);
  team.sync();
}

__global__ void a_cluster_barrier_for_some(int64_t*) {
  if (cluster_rank() == 0) cluster_barrier();
}
__global__ void a_cluster_barrier_for_some_threads(int64_t*) {
  if (threadIdx.x < 32) cluster_barrier();
}
__global__ void two_cluster_barriers(int64_t*) {
  if (cluster_rank() == 0) {
    __cluster_barrier_arrive();
  } else {
    __cluster_barrier_arrive();
  }
  __cluster_barrier_wait();
}
__global__ void arrives_twice(int64_t*) {
  __cluster_barrier_arrive();
  __cluster_barrier_arrive();
}
__global__ void waits_alone(int64_t*) { __cluster_barrier_wait(); }
__global__ void block_that_left(int64_t* data) {
  __shared__ int64_t value;
  Team team;
  __cluster_barrier_arrive();
  if (team.rank() == 1) return;
  __cluster_barrier_wait();
  data[0] = *in_block(&value, 1);
}
__global__ void maps_a_local(int64_t* data) {
  int64_t value = 0;
  data[0] = *in_block(&value, 1);
}
__global__ void maps_too_far(int64_t* data) {
  __shared__ int64_t value;
  data[0] = *in_block(&value, cluster_size());
}
// Every block does something between arriving and waiting.
__global__ void arrives_early(int64_t* data) {
  __shared__ int64_t value;
  if (threadIdx.x == 0) {
    value = blockIdx.x;
    data[blockIdx.x] = 100;
  }
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  if (threadIdx.x == 0) data[blockIdx.x] += *in_block(&value, cluster_size() - 1 - cluster_rank());
  cluster_barrier();
}

__global__ void a_barrier_for_some(int64_t*) {
  if (threadIdx.x < 32) __syncthreads();
}

__global__ void two_barriers(int64_t* data) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    data[0] = 1;
    __syncthreads();
  }
}

__global__ void a_missing_lane(int64_t* data) {
  if (lane() != 5) data[0] = __shfl_sync(kAllLanes, 1, 0);
  __syncthreads();
}

__global__ void a_lane_that_left(int64_t* data) {
  if (lane() == 5) return;
  data[0] = __shfl_sync(kAllLanes, 1, 0);
}

__global__ void a_lane_outside_its_mask(int64_t* data) { data[0] = __shfl_sync(0xffffu, 1, 0); }

// The values of a block in reverse order.
template <bool kBarrier>
__global__ void reverse(int64_t* data) {
  __shared__ int64_t values[1024];
  for (int twice = 0; twice < 2; ++twice) {
    values[threadIdx.x] = data[threadIdx.x];
    if (kBarrier) __syncthreads();
    data[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
    if (kBarrier) __syncthreads();
  }
}

// A counter to which all add is read then, or while others may add to it.
template <bool kBarrier>
__global__ void reads_a_counter(int64_t* data) {
  atomicAdd(data, 1);
  if (kBarrier) __syncthreads();
  data[1 + threadIdx.x] = data[0];
}

// The first lane of each half warp passes a number on to the half, or to the whole warp; the half alone waits.
template <bool kWhole>
__global__ void tells_half_a_warp(int64_t* data) {
  __shared__ int64_t told[2];
  const unsigned half = threadIdx.x / 16;
  if (threadIdx.x % 16 == 0) told[half] = data[threadIdx.x];
  __syncwarp(half ? 0xffff0000u : 0xffffu);
  data[threadIdx.x] = told[kWhole ? 0 : half];
}

const struct {
  const char* name;
  void (*kernel)(int64_t*);
} kNamed[] = {
    {"reads_a_counter", reads_a_counter<true>},
    {"looks_at_an_atomic", reads_a_counter<false>},
    {"tells_half_a_warp", tells_half_a_warp<false>},
    {"tells_the_other_half_too", tells_half_a_warp<true>},
    {"warp_operations", warp_operations},
    {"static_shared_memory", static_shared_memory},
    {"shared_memory_of_templates", shared_memory_of_templates},
    {"arrays_of_the_last_block", arrays_of_the_last_block},
    {"teams", teams},
    {"passes_on", passes_on<true, true>},
    {"passes_on_without_a_barrier", passes_on<false, true>},
    {"passes_on_without_the_last_barrier", passes_on<true, false>},
    {"own_memory_over_a_relaxed_barrier", over_a_relaxed_barrier<true>},
    {"other_memory_over_a_relaxed_barrier", over_a_relaxed_barrier<false>},
    {"a_cluster_barrier_for_some", a_cluster_barrier_for_some},
    {"a_cluster_barrier_for_some_threads", a_cluster_barrier_for_some_threads},
    {"two_cluster_barriers", two_cluster_barriers},
    {"arrives_twice", arrives_twice},
    {"waits_alone", waits_alone},
    {"block_that_left", block_that_left},
    {"maps_a_local", maps_a_local},
    {"maps_too_far", maps_too_far},
    {"arrives_early", arrives_early},
    {"a_barrier_for_some", a_barrier_for_some},
    {"two_barriers", two_barriers},
    {"a_missing_lane", a_missing_lane},
    {"a_lane_that_left", a_lane_that_left},
    {"a_lane_outside_its_mask", a_lane_outside_its_mask},
    {"reverse", reverse<true>},
    {"without_a_barrier", reverse<false>},
};

}  // namespace
}  // namespace specvis

// What became of the kernel of this name, as cudaGetErrorString() says it.
extern "C" __attribute__((visibility("default"))) const char* run(const char* name, unsigned blocks, unsigned threads,
                                                                  int shared, int64_t* data, unsigned cluster) {
  using namespace specvis;
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("cluster_for")) {
    Device device = {};
    cudaError_t error = device_for(static_shared_memory, &device);
    for (int64_t i = 1; i <= data[0]; ++i) data[i] = cluster_for(device, data[i]);
    return cudaGetErrorString(error);
  } else if (is("dynamic_shared_memory")) {
    LAUNCH(dynamic_shared_memory, blocks, threads, shared, nullptr, data, data[0]);
  } else if (is("more_shared_memory")) {
    cudaFuncSetAttribute(dynamic_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    LAUNCH(dynamic_shared_memory, blocks, threads, shared, nullptr, data, data[0]);
  } else {
    for (const auto& [known, kernel] : kNamed)
      if (is(known))
        return cudaGetErrorString(LAUNCH_CLUSTERS(kernel, blocks, cluster, threads, shared, nullptr, data));
    return "no such kernel";
  }
  return cudaGetErrorString(cudaGetLastError());
}
