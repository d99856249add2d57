// What docs/gpu.md and the clock of tests/cuda_on_cpu/trace.cpp assume of a GPU with clusters, measured:
//   nvcc -O3 -std=c++17 -arch=sm_90 benchmarks/probe.cu -o build/probe && build/probe
// Cycles are of one multiprocessor's clock, read by the first thread of the first block.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kTurns = 200;
constexpr unsigned kThreads = 512;

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

enum class What {
  block_barrier,
  barrier,
  relaxed_barrier,
  shared_barrier,
  exchange,
  pull,
  async_exchange,
  load,
  atomic
};

template <class T>
__device__ T* in_block(T* shared, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}
__device__ uint32_t address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
__device__ uint32_t address_in_block(uint32_t address, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Does one thing kTurns times, each after the one before.
template <What what>
__global__ void __launch_bounds__(kThreads) repeat(long long* cycles) {
  __shared__ uint64_t values[2][128], mbarriers[2];
  __shared__ unsigned chain[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  if (threadIdx.x < 32) chain[threadIdx.x] = 0;
  if (threadIdx.x < 2) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&mbarriers[threadIdx.x])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  uint64_t sum = threadIdx.x;
  unsigned at = 0;
  const long long start = clock64();
  for (int turn = 0; turn < kTurns; ++turn) {
    uint64_t* const to = values[turn & 1];
    if (what == What::block_barrier) __syncthreads();
    if (what == What::exchange && lane < size) in_block(to, lane)[rank * warps + warp] = sum;
    if (what == What::relaxed_barrier) __cluster_barrier_arrive_relaxed();
    if (what == What::barrier || what == What::exchange) __cluster_barrier_arrive();
    if (what == What::barrier || what == What::exchange || what == What::relaxed_barrier) __cluster_barrier_wait();
    if (what == What::pull && lane == 0) to[warp] = sum;
    if (what == What::shared_barrier || what == What::pull) {  // for what blocks write to their own shared memory alone
      asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
      __cluster_barrier_arrive_relaxed();
      __cluster_barrier_wait();
    }
    if (what == What::pull) {
#pragma unroll 4
      for (unsigned w = lane; w < size * warps; w += 32) sum += in_block(to, w / warps)[w % warps];
    }
    if (what == What::async_exchange) {
      const uint32_t mbarrier = address(&mbarriers[turn & 1]), own = address(&to[rank * warps + warp]);
      if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(size * warps * 8));
      if (lane < size)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                         address_in_block(own, lane)),
                     "l"(sum), "r"(address_in_block(mbarrier, lane))
                     : "memory");
      asm volatile(
          "{ .reg .pred done;\n"
          "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
          "@!done bra again; }" ::"r"(mbarrier),
          "r"(turn >> 1 & 1)
          : "memory");
    }
    if (what == What::exchange || what == What::async_exchange) sum += to[lane];
    if (what == What::load) at = *const_cast<volatile unsigned*>(&in_block(chain, (rank + 1) % size)[at]);
    if (what == What::atomic) at = atomicAdd(&in_block(chain, (rank + 1) % size)[at], 0u);
  }
  const long long end = clock64();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();  // no block ends while others read its memory
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    cycles[0] = end - start;
    cycles[1] = static_cast<long long>(sum + at);
  }
}

template <What what>
void measure(const char* name, unsigned cluster, long long* cycles) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = cluster;
  config.blockDim = kThreads;
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (int i = 0; i < 3; ++i) CHECK(cudaLaunchKernelEx(&config, repeat<what>, cycles));
  CHECK(cudaDeviceSynchronize());
  std::printf("%-45s cluster of %u: %6.0f cycles\n", name, cluster, static_cast<double>(cycles[0]) / kTurns);
  for (const unsigned kilobytes : {20u, 100u, 200u}) {
    if (what != What::exchange) break;
    config.gridDim = 1024;
    config.dynamicSmemBytes = kilobytes << 10;
    CHECK(cudaFuncSetAttribute(repeat<what>, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10));
    int clusters = 0;
    CHECK(cudaOccupancyMaxActiveClusters(&clusters, repeat<what>, &config));
    std::printf("    %u threads, %3u KB each: %d clusters at once\n", kThreads, kilobytes, clusters);
  }
}

// kCount instructions in a row, three times: the first time they must be fetched.
template <int kCount>
__global__ void __launch_bounds__(128) straight(long long* cycles, float x) {
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = x + j + threadIdx.x;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    __syncthreads();
    const long long start = clock64();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(a[i % 8]) : "f"(x), "f"(a[(i + 3) % 8]));
    __syncthreads();
    if (threadIdx.x == 0) cycles[pass] = clock64() - start;
  }
  float sum = 0;
  for (const float each : a) sum += each;
  if (threadIdx.x == 0) cycles[3] = static_cast<long long>(sum);
}

template <int kCount>
void fetch(long long* cycles) {
  straight<kCount><<<1, 128>>>(cycles, 1.0f);
  CHECK(cudaDeviceSynchronize());
  std::printf("%6d instructions in a row: %lld cycles at first, then %lld, %lld\n", kCount, cycles[0], cycles[1],
              cycles[2]);
}

}  // namespace

int main() {
  long long* cycles = nullptr;
  CHECK(cudaMallocHost(&cycles, 4 * sizeof *cycles));
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors, %d KB of L2\n", device.name, device.multiProcessorCount,
              device.l2CacheSize >> 10);
  for (const unsigned cluster : {1u, 2u, 4u, 8u}) {
    measure<What::block_barrier>("__syncthreads", cluster, cycles);
    measure<What::barrier>("barrier of the cluster", cluster, cycles);
    measure<What::relaxed_barrier>("barrier of the cluster, arrive.relaxed", cluster, cycles);
    measure<What::shared_barrier>("barrier of the cluster, for shared memory", cluster, cycles);
    measure<What::exchange>("exchange by stores to all blocks", cluster, cycles);
    measure<What::pull>("exchange by loads from all blocks", cluster, cycles);
    measure<What::async_exchange>("exchange by st.async and mbarriers", cluster, cycles);
    measure<What::load>("load of another block's shared memory", cluster, cycles);
    measure<What::atomic>("atomicAdd there, with its result", cluster, cycles);
  }
  fetch<500>(cycles);
  fetch<2000>(cycles);
  fetch<4000>(cycles);
  fetch<8000>(cycles);
  fetch<16000>(cycles);
}
