// Kernels right and wrong, to test what runs them: see test_cuda_on_cpu.py.
#include <cstring>

#include "block.cuh"

namespace specvis {
namespace {

// data: a value per thread -> the block's sum, the sum of the values before, the first negative one, and how
// often a second call at once said the same
__global__ void collectives(int64_t* data) {
  int64_t* mine = data + (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4;
  const int64_t value = mine[0];
  mine[0] = block_sum(value);
  mine[3] = block_sum(-value) == -mine[0];
  const Scan scan = block_scan(value), negative = block_scan(-value);
  mine[1] = scan.before;
  mine[3] += scan.total == mine[0] && negative.before == -scan.before && negative.total == -scan.total;
  const bool any = block_any(value < 0);
  const unsigned first = block_first(value < 0), again = block_first(value < 0 || threadIdx.x == 1);
  mine[2] = any ? int64_t{first} : -1;
  mine[3] += again == min(first, 1u);
}

__global__ void warp_operations(int64_t* data) {
  const int64_t value = data[threadIdx.x];
  int64_t* mine = data + blockDim.x + threadIdx.x * 8;
  mine[0] = __shfl_up_sync(kAllLanes, value, 3u, 8);
  mine[1] = __shfl_down_sync(kAllLanes, value, 3u, 8);
  mine[2] = __shfl_sync(kAllLanes, value, 5, 16);
  mine[3] = __ballot_sync(kAllLanes, value % 3 == 0);
  mine[4] = __match_any_sync(kAllLanes, value % 5);
  mine[5] = __reduce_max_sync(kAllLanes, static_cast<int>(value));
  mine[6] = lane() % 2 ? __shfl_xor_sync(0xaaaaaaaau, value, 2) : __shfl_xor_sync(0x55555555u, value, 4);
  mine[7] = atomicAdd(reinterpret_cast<unsigned long long*>(data + blockDim.x * 9), 1ull) < blockDim.x;
}

__global__ void dynamic_shared_memory(int64_t* data, int64_t count) {
  DYNAMIC_SHARED(int64_t, shared);
  if (threadIdx.x == 0) data[0] = shared[0];
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) shared[i] = i;
  __syncthreads();
  const int64_t sum = block_sum(shared[threadIdx.x]);
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

}  // namespace
}  // namespace specvis

// What became of the kernel of this name, as cudaGetErrorString() says it.
extern "C" __attribute__((visibility("default"))) const char* run(const char* name, unsigned blocks, unsigned threads,
                                                                  int shared, int64_t* data) {
  using namespace specvis;
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("dynamic_shared_memory")) {
    LAUNCH(dynamic_shared_memory, blocks, threads, shared, nullptr, data, data[0]);
  } else if (is("more_shared_memory")) {
    cudaFuncSetAttribute(dynamic_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    LAUNCH(dynamic_shared_memory, blocks, threads, shared, nullptr, data, data[0]);
  } else {
    const auto kernel = is("collectives")               ? collectives
                        : is("warp_operations")         ? warp_operations
                        : is("static_shared_memory")    ? static_shared_memory
                        : is("a_barrier_for_some")      ? a_barrier_for_some
                        : is("two_barriers")            ? two_barriers
                        : is("a_missing_lane")          ? a_missing_lane
                        : is("a_lane_that_left")        ? a_lane_that_left
                        : is("a_lane_outside_its_mask") ? a_lane_outside_its_mask
                        : is("reverse")                 ? reverse<true>
                                                        : reverse<false>;
    LAUNCH(kernel, blocks, threads, shared, nullptr, data);
  }
  return cudaGetErrorString(cudaGetLastError());
}
