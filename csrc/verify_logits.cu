// verify_logits on CUDA: one block per request. With uniform numbers it is verified as in verify.cuh: the row of each
// node that it visits is filtered where its masses will stand, see filters.cuh. With seeds the block draws a token at
// each node that it visits, see gumbel.cuh.
#include <cstring>

#include "gumbel.cuh"
#include "verify.cuh"

namespace specvis {
namespace {

// The logits of a row, each in the first half of the entry that its mass will take.
template <class T>
struct LogitsInPlace {
  Row<T> row;
  int64_t* entries;
  __device__ void store(int64_t v, float x) const { std::memcpy(entries + v, &x, sizeof x); }
  __device__ float operator()(int64_t v) const {
    float x;
    std::memcpy(&x, entries + v, sizeof x);
    return x;
  }
};

template <class T>
struct LogitRow {
  static constexpr bool kIsStored = false;
  const LogitRows* rows;
  int64_t r;
  IdRange range;
  Histogram* histogram;

  __device__ Total sum(int64_t* entries) const {
    const LogitsInPlace<T> logits = {row_of<T>(*rows, r, range.first), entries + range.first};
    const Filtered filtered = filter(*rows, r / rows->N, logits, range.count, *histogram);
    if (!filtered.valid || !range.valid) return {0, false};
    const float sum = sum_exponentials(filtered, logits, range.count);
    int64_t total = 0;
    for (int64_t v = threadIdx.x; v < rows->V; v += blockDim.x) {
      const float p = range.has(v) ? filtered.probability(logits(v - range.first), sum) : 0.0f;
      entries[v] = to_fixed_point(p);
      total += entries[v];
    }
    return {block_sum(total), true};
  }
  __device__ bool allows(int64_t id) const { return range.has(id); }
};

// The rows of request b.
template <class T>
struct RowsOf {
  using Row = LogitRow<T>;
  const LogitRows* rows;
  int64_t b;
  Histogram* histogram;

  __device__ Row at(int64_t node) const {
    const int64_t r = b * rows->N + node;
    return {rows, r, id_range_of(*rows, r), histogram};
  }
};

template <class T>
__global__ void __launch_bounds__(kVerifyThreads) verify_logits_kernel(VerifyLogits batch, Layout layout) {
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x;
  const RowsOf<T> rows = {&batch.rows, b, reinterpret_cast<Histogram*>(shared)};
  verify(batch, b, rows, batch.rows.temperature[b] == 0, layout, shared);
}

template <class T>
__global__ void __launch_bounds__(kVerifyThreads, 1) verify_by_seeds_kernel(VerifyLogits batch, int64_t capacity) {
  DYNAMIC_SHARED(Histogram, histogram);
  const int64_t b = blockIdx.x, N = batch.N, max_depth = batch.max_depth;
  const Siblings siblings = {N, batch.tokens + b * N, batch.next_sibling + b * N};
  int32_t* const accepted_nodes = batch.accepted_nodes + b * max_depth;
  for (int64_t d = threadIdx.x; d < max_depth; d += blockDim.x) accepted_nodes[d] = -1;
  int64_t node = 0, token = 0, depth = 0;
  int32_t status = 0;
  while (true) {
    const int64_t r = b * N + node;
    const IdRange range = id_range_of(batch.rows, r);
    const Drawn drawn =
        range.count <= capacity
            ? draw_row<T, true>(batch.rows, r, range, batch.seeds[b], batch.positions[r], 0, histogram)
            : draw_row<T, false>(batch.rows, r, range, batch.seeds[b], batch.positions[r], 0, histogram);
    token = drawn.token;
    if (!drawn.valid) status |= kInvalidRow;
    if (!drawn.valid || depth == max_depth) break;
    const int64_t child = siblings.find(token, node, batch.first_child[r], &status);
    if (child < 0) break;
    node = child;
    if (threadIdx.x == 0) accepted_nodes[depth] = static_cast<int32_t>(node);
    ++depth;
  }
  if (threadIdx.x != 0) return;
  batch.num_accepted[b] = static_cast<int32_t>(depth);
  batch.next_token[b] = token;
  batch.tv_excess[b] = 0;
  batch.status[b] = status;
}

template <class T>
cudaError_t launch(const VerifyLogits& batch, cudaStream_t stream) {
  if (batch.seeds) return launch_rows(verify_by_seeds_kernel<T>, batch, batch.B, stream, kVerifyThreads);
  int64_t limit;
  cudaError_t error = shared_limit(kVerifyReserved, &limit);
  if (error == cudaSuccess) error = allow_shared(verify_logits_kernel<T>, limit);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, sizeof(Histogram), limit);
  LAUNCH(verify_logits_kernel<T>, static_cast<unsigned>(batch.B), threads_for(batch.V, kVerifyThreads), layout.shared,
         stream, batch, layout);
  return cudaGetLastError();
}

}  // namespace

cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes) {
  int64_t limit;
  const cudaError_t error = shared_limit(kVerifyReserved, &limit);
  *bytes = batch.seeds ? 0 : batch.B * Layout(batch, sizeof(Histogram), limit).scratch;
  return error;
}

cudaError_t verify_logits_cuda(const VerifyLogits& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  switch (batch.rows.type) {
    case LogitType::float16: return launch<__half>(batch, stream);
    case LogitType::bfloat16: return launch<__nv_bfloat16>(batch, stream);
    default: return launch<float>(batch, stream);
  }
}

}  // namespace specvis
