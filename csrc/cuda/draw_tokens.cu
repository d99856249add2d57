// draw_tokens on CUDA: one team of threads per row, see gumbel.cuh.
#include "gumbel.cuh"

namespace specvis {
namespace {

template <class Entries>
__global__ void __launch_bounds__(Entries::kMaxThreads, 1) draw_tokens_kernel(DrawTokens batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, shared);
  const auto row = [&] { return static_cast<int64_t>(__shfl_sync(kAllLanes, blockIdx.x, 0) / team.size()); };
  const auto noise = [&] {
    const int64_t r = row();  // a shuffle makes the compiler find it again, not keep it
    return Noise(batch.seeds[request_of(batch.rows, r)], batch.positions[r]);
  };
  const Drawn drawn = draw_row<Entries>(team, shared, capacity, batch.rows, row(), noise, batch.ahead);
  team.end();
  const int64_t r = row();
  const unsigned b = request_of(batch.rows, r), n = static_cast<unsigned>(r) - b * static_cast<unsigned>(batch.rows.N);
  if (team.thread() != 0) return;
  batch.tokens[r] = drawn.token;
  batch.ahead_tokens[r] = drawn.ahead_token;
  batch.status[r] = drawn.valid ? 0 : kInvalidRow;
  if (!batch.guesses) {
    if (n == 0) batch.num_accepted[b] = 0;
    return;
  }
  const bool stands = drawn.valid && batch.guesses[r] == drawn.token;
  const unsigned num_leading =
      stands ? static_cast<unsigned>(batch.rows.N) : n;  // if it were decided by this row alone
  atomicMin(reinterpret_cast<unsigned*>(batch.num_accepted + b), num_leading);
}

}  // namespace

cudaError_t draw_tokens_cuda(const DrawTokens& batch, cudaStream_t stream) {
  if (batch.rows.B * batch.rows.N == 0) return cudaSuccess;
  if (batch.guesses) {  // the rows of a request lower its count, as an unsigned integer, to the first that differs
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(batch.rows.B);
    const cudaError_t error = cudaMemsetAsync(batch.num_accepted, 0xff, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_rows(draw_tokens_kernel<Held>, draw_tokens_kernel<Streamed>, batch, batch.rows.B * batch.rows.N,
                     stream);
}

}  // namespace specvis
