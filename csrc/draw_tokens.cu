// draw_tokens on CUDA: one block per row, see filters.cuh. The ids that the filters keep are listed, so that every
// thread makes noise for one that counts. Where they are too many for the list, a thread makes it for four neighboring
// ids at once.
#include "filters.cuh"
#include "noise.h"

namespace specvis {
namespace {

constexpr unsigned kMaxListed = sizeof(Histogram) / sizeof(uint32_t);

// Lists which of the ids the filters keep, in any order, and returns how many these are. No more than kMaxListed are
// written.
template <class Logits>
__device__ unsigned list_kept(const Filtered& filtered, const Logits& logits, int64_t ids, uint32_t* list) {
  __shared__ unsigned num_listed;
  if (threadIdx.x == 0) num_listed = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < ids; i += blockDim.x) {
    if (!filtered.keeps(logits(i))) continue;
    const unsigned at = atomicAdd(&num_listed, 1u);
    if (at < kMaxListed) list[at] = static_cast<uint32_t>(i);
  }
  __syncthreads();
  return num_listed;
}

// The id of the largest logit plus noise, the lowest one if several are largest. Ids fit into 32 bits.
template <class Logits>
__device__ int64_t draw(const Filtered& filtered, const Logits& logits, uint32_t first_id, uint32_t ids,
                        const Noise& noise, bool sampling, const uint32_t* list, unsigned num_kept) {
  uint64_t largest = 0;
  const auto offer = [&](uint32_t i, float x, uint32_t word) {
    const float score = (x - filtered.best) + (sampling ? to_gumbel(word) : 0.0f);
    const uint64_t candidate = entry(order_of(score, -INFINITY), first_id + i);
    largest = candidate > largest ? candidate : largest;
  };
  if (num_kept <= kMaxListed) {
#pragma unroll 1
    for (unsigned j = threadIdx.x; j < num_kept; j += blockDim.x)
      offer(list[j], logits(list[j]), noise.word(first_id + list[j]));
  } else {
#pragma unroll 1
    for (uint32_t four = first_id / 4 + threadIdx.x; four * 4 < first_id + ids; four += blockDim.x) {
      uint32_t words[4];
      noise.words(four, words);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t i = four * 4 + j - first_id;  // wraps before the first id
        if (i >= ids) continue;
        const float x = logits(i);
        if (filtered.keeps(x)) offer(i, x, words[j]);
      }
    }
  }
  return id_of(block_max(largest));
}

template <class T, bool kInShared>
__device__ void draw_row(const DrawTokens& batch, int64_t first_id, int64_t ids, bool range_valid,
                         Histogram* histogram) {
  const LogitRows& rows = batch.rows;
  const int64_t r = blockIdx.x, b = r / rows.N;
  const Logits<T, kInShared> logits = {row_of<T>(rows, r, first_id), reinterpret_cast<float*>(histogram + 1)};
  Filtered filtered = filter(rows, b, logits, ids, *histogram);
  const bool valid = filtered.valid && range_valid, sampling = rows.temperature[b] != 0;
  if (valid && !sampling) filtered.lowest = key_of(filtered.best);
  uint32_t* const list = reinterpret_cast<uint32_t*>(histogram);  // which is not needed any more
  const unsigned num_kept = valid && filtered.lowest > INT32_MIN ? list_kept(filtered, logits, ids, list) : UINT32_MAX;
  const auto draw_with = [&](const Noise& noise) {
    return draw(filtered, logits, static_cast<uint32_t>(first_id), static_cast<uint32_t>(ids), noise, sampling, list,
                num_kept);
  };
  const Noise noise(batch.seeds[b], batch.positions[r]);
  const int64_t token = valid ? draw_with(noise) : 0;
  const int64_t ahead_token = valid && batch.ahead > 0 ? draw_with(noise.ahead_by(batch.ahead)) : token;
  if (threadIdx.x != 0) return;
  batch.tokens[r] = token;
  batch.ahead_tokens[r] = ahead_token;
  batch.status[r] = valid ? 0 : kInvalidRow;
  if (!batch.guesses) return;
  const bool stands = valid && batch.guesses[r] == token;
  const int64_t num_leading = stands ? rows.N : r % rows.N;  // as far as this row knows
  atomicMin(reinterpret_cast<unsigned*>(batch.num_accepted + b), static_cast<unsigned>(num_leading));
}

template <class T>
__global__ void __launch_bounds__(kThreads) draw_tokens_kernel(DrawTokens batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  int64_t first = 0, last = batch.rows.V;
  if (batch.id_range) {
    first = batch.id_range[int64_t{blockIdx.x} * 2];
    last = batch.id_range[int64_t{blockIdx.x} * 2 + 1];
  }
  const bool valid = first >= 0 && first < last && last <= batch.rows.V;
  if (!valid) first = 0, last = 1;
  if (last - first <= capacity)
    draw_row<T, true>(batch, first, last - first, valid, histogram);
  else
    draw_row<T, false>(batch, first, last - first, valid, histogram);
}

}  // namespace

cudaError_t draw_tokens_cuda(const DrawTokens& batch, cudaStream_t stream) {
  if (batch.rows.B * batch.rows.N == 0) return cudaSuccess;
  // With guesses the rows of a request lower its count, as an unsigned integer, to the first of them that differs.
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.rows.B);
  const cudaError_t error = cudaMemsetAsync(batch.num_accepted, batch.guesses ? 0xff : 0, bytes, stream);
  if (error != cudaSuccess) return error;
  const bool ranges = batch.id_range != nullptr;
  switch (batch.rows.type) {
    case LogitType::float16: return launch_rows(draw_tokens_kernel<__half>, batch, batch.rows.V, ranges, stream);
    case LogitType::bfloat16:
      return launch_rows(draw_tokens_kernel<__nv_bfloat16>, batch, batch.rows.V, ranges, stream);
    default: return launch_rows(draw_tokens_kernel<float>, batch, batch.rows.V, ranges, stream);
  }
}

}  // namespace specvis
