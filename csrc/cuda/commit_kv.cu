// commit_kv on CUDA: one thread per place in a column of a run of a cache, which is blockIdx.y. It moves what stands
// there, column after column, so no thread touches what another one does.
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // columns that a thread reads before it writes them

template <class Unit>
__global__ void __launch_bounds__(kThreads) commit_kv_kernel(CommitKv batch, uint32_t units, uint32_t total) {
  const Moves& moves = batch.moves;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= total) {  // the threads after them
    const int64_t b = i - total;
    if (batch.new_lengths && blockIdx.y == 0 && b < moves.B) batch.new_lengths[b] = moves.new_length(b);
    return;
  }
  const uint32_t run = i / units, row = moves.row(run), b = row % static_cast<uint32_t>(moves.B);
  if (!moves.is_valid(b)) return;
  char* const first = batch.caches[blockIdx.y] + moves.begin(run) * moves.inner + (i - run * units) * sizeof(Unit);
  const auto at = [&](int64_t column) {
    return reinterpret_cast<Unit*>(first + moves.place(row, column) * moves.inner);
  };
  const int64_t last = moves.num_accepted[b];
  for (int64_t n = moves.source(b, 0) == moves.target(b, 0); n <= last; n += kInFlight) {
    Unit held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (n + k <= last) held[k] = *at(moves.source(b, n + k));
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (n + k <= last) *at(moves.target(b, n + k)) = held[k];
    }
  }
}

template <class Unit>
cudaError_t launch(const CommitKv& batch, cudaStream_t stream) {
  const int64_t units = batch.moves.inner / static_cast<int64_t>(sizeof(Unit)), total = batch.moves.num_runs() * units;
  const int64_t blocks = (total + batch.moves.B + kThreads - 1) / kThreads;
  const bool fits = blocks * kThreads <= UINT32_MAX;  // else CUDA refuses the launch
  LAUNCH(commit_kv_kernel<Unit>, dim3(blocks_for(fits ? blocks : INT64_MAX), static_cast<unsigned>(batch.num_caches)),
         kThreads, 0, stream, batch, static_cast<uint32_t>(units), static_cast<uint32_t>(total));
  return cudaGetLastError();
}

}  // namespace

cudaError_t commit_kv_cuda(const CommitKv& batch, cudaStream_t stream) {
  if (batch.moves.B == 0) return cudaSuccess;
  uint64_t alignment = static_cast<uint64_t>(batch.moves.inner);
  for (int64_t c = 0; c < batch.num_caches; ++c) alignment |= reinterpret_cast<uintptr_t>(batch.caches[c]);
  if (alignment % 16 == 0) return launch<float4>(batch, stream);
  if (alignment % 8 == 0) return launch<uint64_t>(batch, stream);
  if (alignment % 4 == 0) return launch<uint32_t>(batch, stream);
  if (alignment % 2 == 0) return launch<uint16_t>(batch, stream);
  return launch<uint8_t>(batch, stream);
}

}  // namespace specvis
