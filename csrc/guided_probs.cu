// guided_probs on CUDA: one block per row. The logits are read once, and the guided ones stay in shared memory; a row
// that does not fit there is read again in every pass. Thresholds are found digit by digit, without sorting.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block.cuh"
#include "floats.h"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 1024;  // at most
constexpr int kBins = 2048;
constexpr int64_t kReserved = 1024;  // bytes of shared memory, more than the small arrays below take

__device__ inline float value(float x) { return x; }
__device__ inline float value(__half x) { return __half2float(x); }
__device__ inline float value(__nv_bfloat16 x) { return __bfloat162float(x); }

// A row of logits after guidance and temperature.
template <class T>
struct Row {
  const T *cond, *uncond;  // uncond may be null
  float guidance, temperature;

  __device__ float of(T conditional, T unconditional) const {
    constexpr float infinity = INFINITY;
    float x = value(conditional);
    if (uncond) {
      const float u = value(unconditional), guided = u + guidance * (x - u);
      x = x == -infinity && u < infinity ? -infinity : guided;
    }
    return x / temperature;
  }
  __device__ float operator()(int64_t v) const { return of(cond[v], uncond ? uncond[v] : cond[v]); }

  // Calls f(v, x) for every entry. The threads share the entries, and load 16 bytes at a time if cond and uncond are
  // both aligned.
  template <class F>
  __device__ void for_each(int64_t ids, F f) const {
    constexpr int kWide = 16 / sizeof(T);
    struct alignas(16) Pack {
      T values[kWide];
    };
    const uintptr_t c = reinterpret_cast<uintptr_t>(cond), u = reinterpret_cast<uintptr_t>(uncond);
    const int64_t ahead = uncond && (c - u) % 16 ? ids : (16 - c % 16) % 16 / sizeof(T);
    const int64_t head = ahead < ids ? ahead : ids, packs = (ids - head) / kWide;
    for (int64_t v = threadIdx.x; v < head; v += blockDim.x) f(v, (*this)(v));
    const Pack* const cond_packs = reinterpret_cast<const Pack*>(cond + head);
    const Pack* const uncond_packs = reinterpret_cast<const Pack*>(uncond + (uncond ? head : 0));
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
      const Pack a = cond_packs[i], b = uncond ? uncond_packs[i] : a;
#pragma unroll
      for (int j = 0; j < kWide; ++j) f(head + i * kWide + j, of(a.values[j], b.values[j]));
    }
    for (int64_t v = head + packs * kWide + threadIdx.x; v < ids; v += blockDim.x) f(v, (*this)(v));
  }
};

// 64-bit sums made with 32-bit atomics, which shared memory has in hardware.
struct Histogram {
  unsigned low[kBins], high[kBins];

  __device__ void clear() {
    for (int d = threadIdx.x; d < kBins; d += blockDim.x) low[d] = high[d] = 0;
  }
  __device__ void add(unsigned d, int64_t mass) {
    const unsigned low_part = static_cast<unsigned>(mass);
    const unsigned high_part = static_cast<unsigned>(mass >> 32) + (atomicAdd(&low[d], low_part) + low_part < low_part);
    if (high_part) atomicAdd(&high[d], high_part);
  }
  __device__ int64_t operator[](int d) const { return static_cast<int64_t>(uint64_t{high[d]} << 32 | low[d]); }
};

// The lowest key such that the mass of all greater keys is less than `limit`, which is positive and at most the mass of
// all keys. It is found digit by digit from the highest, each time among the keys that share the digits found so far.
template <class Logit, class Mass>
__device__ int32_t threshold(Histogram& histogram, int64_t ids, int64_t limit, const Logit& logit, const Mass& mass) {
  __shared__ unsigned digit;
  __shared__ int64_t greater;
  int64_t above = 0;
  uint32_t found = 0;
  for (int shift = 32; shift > 0;) {
    const int known = shift;  // the bits from this one upwards are known
    shift = shift > 10 ? shift - 11 : 0;
    const uint32_t mask = (1u << (known - shift)) - 1;
    histogram.clear();
    __syncthreads();
    for (int64_t v = threadIdx.x; v < ids; v += blockDim.x) {
      const float x = logit(v);
      const uint32_t key = ordered(x);
      if (uint64_t{key ^ found} >> known == 0) histogram.add(key >> shift & mask, mass(x));
    }
    __syncthreads();
    const int share = (kBins + blockDim.x - 1) / blockDim.x;  // of the digits, from the highest downwards
    const int first = kBins - 1 - static_cast<int>(threadIdx.x) * share;
    int64_t own_mass = 0;
    for (int d = first; d > first - share && d >= 0; --d) own_mass += histogram[d];
    int64_t sum = above + block_scan(own_mass).before;
    if (sum < limit && sum + own_mass >= limit) {  // one thread
      int d = first;
      while (sum + histogram[d] < limit) sum += histogram[d--];
      digit = d;
      greater = sum;
    }
    __syncthreads();
    found |= digit << shift;
    above = greater;
  }
  return static_cast<int32_t>(found ^ 0x80000000u);
}

template <class T, bool kInShared>
__global__ void __launch_bounds__(kThreads) guided_probs_kernel(GuidedProbs batch) {
  DYNAMIC_SHARED(Histogram, histogram);
  float* const copy = reinterpret_cast<float*>(histogram + 1);
  __shared__ int32_t lowest, highest;
  const int64_t r = blockIdx.x, b = r / batch.N, ids = batch.num_ids, start = r * batch.V + batch.first_id;
  const float temperature = batch.temperature[b], top_p = batch.top_p[b];
  const bool sampling = temperature != 0;
  const T* uncond = static_cast<const T*>(batch.uncond);
  const Row<T> row = {static_cast<const T*>(batch.logits) + start, uncond ? uncond + start : nullptr, batch.guidance[b],
                      sampling ? temperature : 1.0f};

  if (threadIdx.x == 0) {
    lowest = INT32_MAX;
    highest = INT32_MIN;
  }
  __syncthreads();
  int32_t min_key = INT32_MAX, max_key = INT32_MIN;
  row.for_each(ids, [&](int64_t v, float x) {
    const int32_t key = key_of(x);
    if (kInShared) copy[v] = x;
    min_key = key < min_key ? key : min_key;
    max_key = key > max_key ? key : max_key;
  });
  min_key = __reduce_min_sync(kAllLanes, min_key);
  max_key = __reduce_max_sync(kAllLanes, max_key);
  if (lane() == 0) {
    atomicMin(&lowest, min_key);
    atomicMax(&highest, max_key);
  }
  __syncthreads();
  const bool valid = lowest >= key_of(-INFINITY) && highest < key_of(INFINITY) && highest > key_of(-INFINITY) &&
                     (temperature > 0 || !sampling);

  const float best = float_of(highest);
  const auto logit = [=](int64_t v) { return kInShared ? copy[v] : row(v); };
  int32_t lowest_kept = INT32_MIN;  // the lowest key that is kept
  const auto mass = [&](float x) { return key_of(x) >= lowest_kept ? mass_of(exp_of(x - best)) : 0; };
  const auto sum_masses = [&] {
    int64_t sum = 0;
    for (int64_t v = threadIdx.x; v < ids; v += blockDim.x) sum += mass(logit(v));
    return block_sum(sum);
  };
  int64_t total = 0;
  if (valid) {
    const int32_t k = batch.top_k[b];
    if (sampling && k > 0 && k < ids)
      lowest_kept = threshold(*histogram, ids, k, logit, [](float) { return int64_t{1}; });
    total = sum_masses();
    if (sampling && top_p > 0 && top_p < 1) {
      const double limit = ceil(static_cast<double>(top_p) * static_cast<double>(total));
      lowest_kept = threshold(*histogram, ids, static_cast<int64_t>(limit), logit, mass);
      total = sum_masses();
    }
  }

  const float sum = static_cast<float>(static_cast<double>(total) / static_cast<double>(kMassOne));
  float* const probs = batch.probs + r * batch.V;
  for (int64_t v = threadIdx.x; v < batch.V; v += blockDim.x) {
    const int64_t i = v - batch.first_id;
    float p = 0;
    if (valid && i >= 0 && i < ids) {
      const float x = logit(i);
      if (key_of(x) >= lowest_kept) p = exp_of(x - best) / sum;
    }
    probs[v] = p;
  }
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;
}

template <class T, bool kInShared>
cudaError_t launch(const GuidedProbs& batch, int64_t shared, cudaStream_t stream) {
  const auto kernel = guided_probs_kernel<T, kInShared>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  LAUNCH(kernel, static_cast<unsigned>(batch.B * batch.N), threads_for(batch.num_ids, kThreads), shared, stream, batch);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const GuidedProbs& batch, cudaStream_t stream) {
  int device = 0, limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int64_t histogram = sizeof(Histogram), row = batch.num_ids * static_cast<int64_t>(sizeof(float));
  return histogram + row + kReserved <= limit ? launch<T, true>(batch, histogram + row, stream)
                                              : launch<T, false>(batch, histogram, stream);
}

}  // namespace

cudaError_t guided_probs_cuda(const GuidedProbs& batch, cudaStream_t stream) {
  if (batch.B * batch.N == 0) return cudaSuccess;
  switch (batch.type) {
    case LogitType::float16: return launch<__half>(batch, stream);
    case LogitType::bfloat16: return launch<__nv_bfloat16>(batch, stream);
    default: return launch<float>(batch, stream);
  }
}

}  // namespace specvis
