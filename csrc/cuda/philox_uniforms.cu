// philox_uniforms on CUDA: a thread makes the four words of a block of Philox.
#include "../shared/noise.h"
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) philox_uniforms_kernel(PhiloxUniforms batch, int64_t blocks) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = i / blocks, first = i % blocks * 4;
  if (row >= batch.B * batch.L) return;
  uint32_t words[4];
  const Noise noise(batch.seeds[row / batch.L], batch.positions[row]);
  noise.words(static_cast<uint32_t>(first / 4), words, batch.stream, batch.turn);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + j < batch.n) batch.uniforms[row * batch.n + first + j] = to_uniform(words[j]);
  }
}

}  // namespace

cudaError_t philox_uniforms_cuda(const PhiloxUniforms& batch, cudaStream_t stream) {
  const int64_t blocks = (batch.n + 3) / 4, count = batch.B * batch.L * blocks;
  if (count == 0) return cudaSuccess;
  LAUNCH(philox_uniforms_kernel, blocks_for((count + kThreads - 1) / kThreads), kThreads, 0, stream, batch, blocks);
  return cudaGetLastError();
}

}  // namespace specvis
