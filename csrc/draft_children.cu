// draft_children on CUDA: one block per row writes its probabilities, see filters.cuh, and draws from them, see
// children.cuh.
#include "children.cuh"
#include "filters.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;             // at most
constexpr int64_t kReserved = 32 * 1024;  // bytes of shared memory for the arrays that the functions declare

// The K most probable tokens, 0 where there is none.
__device__ void find_likeliest(Team& block, const float* row, int64_t V, int64_t K, int64_t* tokens) {
  clear_tokens(0, K, tokens);
  const auto for_each = [=](auto f) { for_each_entry(row, V, f); };
  float largest = 0;
  for_each([&](int64_t, float p) { largest = p > largest ? p : largest; });
  BestOf best(block);
  best.find_bound(order_of(largest, 0), K);
  best.rank(for_each, for_each, 0, [=](unsigned rank, int64_t id, float) { tokens[rank] = id; });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) draft_children_kernel(DraftChildren batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  const LogitRows& rows = batch.rows;
  const int64_t r = blockIdx.x, b = r / rows.N, V = rows.V, K = batch.K;
  float* const probs = batch.probs + r * V;
  int64_t* const tokens = batch.tokens + r * K;
  const IdRange range = id_range_of(rows, r);
  const bool valid = range.count <= capacity ? write_probs<T, true>(rows, r, range, probs, histogram)
                                             : write_probs<T, false>(rows, r, range, probs, histogram);
  if (threadIdx.x == 0) batch.status[r] = valid ? 0 : kInvalidRow;
  __syncthreads();  // the row is complete
  Team block = Team().alone();
  if (rows.temperature[b] == 0) {
    find_likeliest(block, probs, V, K, tokens);
  } else if (batch.uniforms) {
    draw_by_uniforms(probs, V, batch.uniforms + r * K, K, tokens);
  } else {
    draw_by_noise(block, probs, V, Noise(batch.seeds[b], batch.positions[r]), K, tokens, nullptr);
  }
}

template <class T>
cudaError_t launch(const DraftChildren& batch, cudaStream_t stream) {
  return launch_rows(draft_children_kernel<T>, batch, batch.rows.B * batch.rows.N, stream, kThreads, kReserved);
}

}  // namespace

cudaError_t draft_children_cuda(const DraftChildren& batch, cudaStream_t stream) {
  if (batch.rows.B == 0) return cudaSuccess;
  switch (batch.rows.type) {
    case LogitType::float16: return launch<__half>(batch, stream);
    case LogitType::bfloat16: return launch<__nv_bfloat16>(batch, stream);
    default: return launch<float>(batch, stream);
  }
}

}  // namespace specvis
