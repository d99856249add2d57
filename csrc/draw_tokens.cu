// draw_tokens on CUDA: one block per row, see gumbel.cuh.
#include "gumbel.cuh"

namespace specvis {
namespace {

template <class T, bool kInShared>
__device__ void write_draws(const DrawTokens& batch, const IdRange& range, Histogram* histogram) {
  const int64_t r = blockIdx.x, N = batch.rows.N, b = r / N;
  const Drawn drawn =
      draw_row<T, kInShared>(batch.rows, r, range, batch.seeds[b], batch.positions[r], batch.ahead, histogram);
  if (threadIdx.x != 0) return;
  batch.tokens[r] = drawn.token;
  batch.ahead_tokens[r] = drawn.ahead_token;
  batch.status[r] = drawn.valid ? 0 : kInvalidRow;
  if (!batch.guesses) return;
  const bool stands = drawn.valid && batch.guesses[r] == drawn.token;
  const int64_t num_leading = stands ? N : r % N;  // as far as this row knows
  atomicMin(reinterpret_cast<unsigned*>(batch.num_accepted + b), static_cast<unsigned>(num_leading));
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) draw_tokens_kernel(DrawTokens batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  const IdRange range = id_range_of(batch.rows, blockIdx.x);
  if (range.count <= capacity)
    write_draws<T, true>(batch, range, histogram);
  else
    write_draws<T, false>(batch, range, histogram);
}

}  // namespace

cudaError_t draw_tokens_cuda(const DrawTokens& batch, cudaStream_t stream) {
  const int64_t num_rows = batch.rows.B * batch.rows.N;
  if (num_rows == 0) return cudaSuccess;
  // With guesses the rows of a request lower its count, as an unsigned integer, to the first of them that differs.
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.rows.B);
  const cudaError_t error = cudaMemsetAsync(batch.num_accepted, batch.guesses ? 0xff : 0, bytes, stream);
  if (error != cudaSuccess) return error;
  switch (batch.rows.type) {
    case LogitType::float16: return launch_rows(draw_tokens_kernel<__half>, batch, num_rows, stream);
    case LogitType::bfloat16: return launch_rows(draw_tokens_kernel<__nv_bfloat16>, batch, num_rows, stream);
    default: return launch_rows(draw_tokens_kernel<float>, batch, num_rows, stream);
  }
}

}  // namespace specvis
