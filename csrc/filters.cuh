// What guidance, temperature, top-k and top-p make of a row of logits, by one block of threads. The logits are read
// once, and the guided ones stay in shared memory; a row that does not fit there is read again in every pass.
// Thresholds are found digit by digit, without sorting.
#pragma once
#include "guided_row.cuh"

namespace specvis {
namespace {

constexpr int kRowThreads = 1024;       // at most
constexpr int64_t kRowReserved = 1024;  // bytes of shared memory, more than the small arrays of a kernel take

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

// The ids of row r from first_id on. Temperature 0 counts as 1.
template <class T>
__device__ Row<T> row_of(const LogitRows& rows, int64_t r, int64_t first_id) {
  const int64_t b = r / rows.N, start = r * rows.V + first_id;
  const float temperature = rows.temperature[b];
  const T* const uncond = static_cast<const T*>(rows.uncond);
  return {static_cast<const T*>(rows.logits) + start, uncond ? uncond + start : nullptr, rows.guidance[b],
          temperature != 0 ? temperature : 1.0f};
}

// The same logits once filter() has run: copied to shared memory, or computed again.
template <class T, bool kInShared>
struct Logits {
  Row<T> row;
  float* copy;
  __device__ void store(int64_t v, float x) const {
    if (kInShared) copy[v] = x;
  }
  __device__ float operator()(int64_t v) const { return kInShared ? copy[v] : row(v); }
};

// What the filters keep of a row. If it is not valid, the other fields mean nothing.
struct Filtered {
  bool valid;
  float best;      // the largest logit
  int32_t lowest;  // the lowest key that is kept

  __device__ bool keeps(float x) const { return key_of(x) >= lowest; }
  __device__ int64_t mass(float x) const { return keeps(x) ? mass_of(exp_of(x - best)) : 0; }
  // The probability of an id, if `sum` is sum_exponentials().
  __device__ float probability(float x, float sum) const { return keeps(x) ? exp_of(x - best) / sum : 0.0f; }
};

template <class Logits>
__device__ int64_t sum_masses(const Filtered& filtered, const Logits& logits, int64_t ids) {
  int64_t sum = 0;
  for (int64_t v = threadIdx.x; v < ids; v += blockDim.x) sum += filtered.mass(logits(v));
  return block_sum(sum);
}

// The sum of exp(logit - best) over the ids that are kept.
template <class Logits>
__device__ float sum_exponentials(const Filtered& filtered, const Logits& logits, int64_t ids) {
  const int64_t mass = sum_masses(filtered, logits, ids);
  return static_cast<float>(static_cast<double>(mass) / static_cast<double>(kMassOne));
}

// Reads a row, which `logits` keeps for later passes, and finds what request b keeps of it. Both filters keep the ids
// from some logit upwards, so their order matters for the mass alone of which top-p is a share.
template <class Logits>
__device__ Filtered filter(const LogitRows& rows, int64_t b, const Logits& logits, int64_t ids, Histogram& histogram) {
  __shared__ int32_t lowest, highest;
  if (threadIdx.x == 0) {
    lowest = INT32_MAX;
    highest = INT32_MIN;
  }
  __syncthreads();
  int32_t min_key = INT32_MAX, max_key = INT32_MIN;
  logits.row.for_each(ids, [&](int64_t v, float x) {
    const int32_t key = key_of(x);
    logits.store(v, x);
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
  const float temperature = rows.temperature[b], top_p = rows.top_p[b];
  Filtered filtered = {
      lowest >= key_of(-INFINITY) && highest < key_of(INFINITY) && highest > key_of(-INFINITY) && temperature >= 0,
      float_of(highest), INT32_MIN};
  if (!filtered.valid || temperature == 0) return filtered;
  const int32_t k = rows.top_k[b];
  int32_t kth_largest = INT32_MIN;
  if (k > 0 && k < ids) kth_largest = threshold(histogram, ids, k, logits, [](float) { return int64_t{1}; });
  if (!rows.top_p_first) filtered.lowest = kth_largest;
  if (top_p > 0 && top_p < 1) {
    const double limit = ceil(static_cast<double>(top_p) * static_cast<double>(sum_masses(filtered, logits, ids)));
    filtered.lowest =
        threshold(histogram, ids, static_cast<int64_t>(limit), logits, [=](float x) { return filtered.mass(x); });
  }
  if (filtered.lowest < kth_largest) filtered.lowest = kth_largest;
  return filtered;
}

// Writes the probabilities of row r, zeros if it is invalid. Returns whether it is valid.
template <class T, bool kInShared>
__device__ bool write_probs(const LogitRows& rows, int64_t r, const IdRange& range, float* probs,
                            Histogram* histogram) {
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, range.first), reinterpret_cast<float*>(histogram + 1)};
  const Filtered filtered = filter(rows, r / rows.N, logits, range.count, *histogram);
  const bool valid = filtered.valid && range.valid;
  const float sum = valid ? sum_exponentials(filtered, logits, range.count) : 1.0f;
  for (int64_t v = threadIdx.x; v < rows.V; v += blockDim.x) {
    probs[v] = valid && range.has(v) ? filtered.probability(logits(v - range.first), sum) : 0.0f;
  }
  return valid;
}

// Launches this many blocks, of at most max_threads, for rows of logits. Beside the histogram a block's shared memory
// holds a copy of a row. Where the longest does not fit, it holds none, or as many logits as fit if some rows may be
// shorter. The kernel is told how many.
template <class Batch>
cudaError_t launch_rows(void (*kernel)(Batch, int64_t), const Batch& batch, int64_t blocks, cudaStream_t stream,
                        int64_t max_threads = kRowThreads, int64_t reserved = kRowReserved) {
  int64_t limit;
  cudaError_t error = shared_limit(reserved, &limit);
  if (error == cudaSuccess) error = allow_shared(kernel, limit);
  if (error != cudaSuccess) return error;
  const int64_t ids = batch.rows.last_id - batch.rows.first_id;
  const int64_t histogram = sizeof(Histogram), logit = sizeof(float), free = limit - histogram;
  const int64_t most = free > 0 ? free / logit : 0;
  const int64_t capacity = ids <= most ? ids : batch.rows.id_range ? most : 0, shared = histogram + capacity * logit;
  LAUNCH(kernel, static_cast<unsigned>(blocks), threads_for(ids, max_threads), shared, stream, batch, capacity);
  return cudaGetLastError();
}

}  // namespace
}  // namespace specvis
