// verify_logits on CUDA: one block per request. With uniform numbers it is verified as in verify.cuh: the row of each
// node that it visits is filtered, see filters.cuh, and its probabilities are written where every thread can read them.
// With seeds the block draws a token at each node that it visits, see gumbel.cuh.
#include "filters.cuh"
#include "gumbel.cuh"
#include "verify.cuh"

namespace specvis {
namespace {

// The rows of request b.
template <class T>
struct FilteredRows {
  const LogitRows& rows;
  int64_t b;
  Histogram* histogram;
  float* probs;                        // (V), of the current row; its logits stand there before
  uint32_t first_id = 0, num_ids = 0;  // the range of the current row

  template <class F>
  __device__ bool read(int32_t node, bool, uint32_t begin, uint32_t end, F f) {
    const int64_t r = b * rows.N + node;
    const IdRange range = id_range_of(rows, r);
    first_id = static_cast<uint32_t>(range.first);
    num_ids = static_cast<uint32_t>(range.count);
    const Logits<T, true> logits = {row_of<T>(rows, r, range.first), probs + range.first};
    const Filtered filtered = filter(rows, b, logits, range.count, *histogram);
    if (!filtered.valid || !range.valid) return false;
    const float sum = sum_exponentials(filtered, logits, range.count);
#pragma unroll 1
    for (uint32_t v = begin + lane(); v < end; v += kWarp) {
      const float p = allows(v) ? filtered.probability(probs[v], sum) : 0.0f;
      probs[v] = p;
      f(v, p);
    }
    return true;
  }
  template <class F>
  __device__ void reread(uint32_t begin, uint32_t end, F f) const {
    for_each_in_stride(probs, begin, end, f);
  }
  __device__ float operator()(uint32_t v) const { return probs[v]; }
  __device__ bool allows(uint32_t id) const { return id - first_id < num_ids; }  // wraps before the first id
};

template <class T, bool kHasDrafts>
__global__ void __launch_bounds__(kVerifyThreads) verify_logits_kernel(VerifyLogits batch, Layout layout) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x / team.size();
  char* const row = (layout.row.shared ? shared : batch.scratch + blockIdx.x * layout.scratch) + layout.row.offset;
  FilteredRows<T> rows = {batch.rows, b, reinterpret_cast<Histogram*>(shared), reinterpret_cast<float*>(row)};
  verify<kHasDrafts>(team, batch, b, rows, batch.rows.temperature[b] == 0, layout, shared);
}

constexpr int kSeedThreads = 512;  // at most

template <class Entries>
__global__ void __launch_bounds__(kSeedThreads, 1) verify_by_seeds_kernel(VerifyLogits batch, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(RowShared, row_shared);
  const int64_t b = blockIdx.x / team.size(), N = batch.N, max_depth = batch.max_depth;
  const Siblings siblings = {N, batch.tokens + b * N, batch.next_sibling + b * N};
  int32_t* const accepted_nodes = batch.accepted_nodes + b * max_depth;
  int64_t node = 0, token = 0, depth = 0;
  int32_t status = 0;
  while (true) {
    const int64_t r = b * N + node;
    const auto noise = [&] { return Noise(batch.seeds[b], batch.positions[r]); };
    const Drawn drawn = draw_row<Entries>(team, row_shared, capacity, batch.rows, r, noise, 0);
    token = drawn.token;
    if (!drawn.valid) status |= kInvalidRow;
    if (!drawn.valid || depth == max_depth) break;
    const int64_t child = siblings.find(token, node, batch.first_child[r], &status);
    if (child < 0) break;
    node = child;
    if (team.thread() == 0) accepted_nodes[depth] = static_cast<int32_t>(node);
    ++depth;
  }
  for (int64_t d = depth + team.thread(); d < max_depth; d += team.threads()) accepted_nodes[d] = -1;
  if (team.thread() != 0) return;
  batch.num_accepted[b] = static_cast<int32_t>(depth);
  batch.next_token[b] = token;
  batch.tv_excess[b] = 0;
  batch.status[b] = status;
}

template <class T>
cudaError_t launch_by_seeds(const VerifyLogits& batch, cudaStream_t stream) {
  return launch_rows<T>(verify_by_seeds_kernel<Held<T>>, verify_by_seeds_kernel<Streamed<T>>, batch, batch.B, stream,
                        kSeedThreads);
}

using Kernel = void(VerifyLogits, Layout);

template <class T>
Kernel* kernel_for(const VerifyLogits& batch) {
  return batch.draft_probs ? verify_logits_kernel<T, true> : verify_logits_kernel<T, false>;
}
Kernel* kernel_for(const VerifyLogits& batch) {
  switch (batch.rows.type) {
    case LogitType::float16: return kernel_for<__half>(batch);
    case LogitType::bfloat16: return kernel_for<__nv_bfloat16>(batch);
    default: return kernel_for<float>(batch);
  }
}

}  // namespace

cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes) {
  *bytes = 0;
  if (batch.seeds) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error == cudaSuccess) *bytes = Layout(batch, device, sizeof(Histogram), true).scratch_of(batch.B);
  return error;
}

cudaError_t verify_logits_cuda(const VerifyLogits& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  if (batch.seeds) {
    switch (batch.rows.type) {
      case LogitType::float16: return launch_by_seeds<__half>(batch, stream);
      case LogitType::bfloat16: return launch_by_seeds<__nv_bfloat16>(batch, stream);
      default: return launch_by_seeds<float>(batch, stream);
    }
  }
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, device, sizeof(Histogram), true);
  return LAUNCH_CLUSTERS(kernel_for(batch), layout.cluster * static_cast<unsigned>(batch.B), layout.cluster,
                         layout.threads, layout.shared, stream, batch, layout);
}

}  // namespace specvis
