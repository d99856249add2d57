// verify_logits on CUDA: a team of threads per request. With uniform numbers it is verified as in verify.cuh: the row
// of each node that it visits is filtered, see guided_row.cuh, and its probabilities are written where every thread can
// read them. With seeds the team draws a token at each node that it visits, see gumbel.cuh.
#include <optional>

#include "guided_row.cuh"
#include "gumbel.cuh"
#include "verify.cuh"

namespace specvis {
namespace {

// The rows of request b.
template <class Entries>
struct FilteredRows {
  const LogitRows& rows;
  int64_t b;
  Team& team;
  RowShared* shared;
  int64_t capacity;
  Slices<float> probs;                 // the current row's, by id; outside of its range they mean nothing
  uint32_t first_id = 0, num_ids = 0;  // the range

  template <class F>
  __device__ bool read(int32_t node, bool, uint32_t begin, uint32_t end, F f) {
    const int64_t r = b * rows.N + node;
    const IdRange range = id_range_of(rows, r);
    first_id = static_cast<uint32_t>(range.first);
    num_ids = static_cast<uint32_t>(range.count);
    GuidedRow<Entries> row(team, shared, capacity, rows, r, range);
    if (!row.valid()) return false;
    row.to_probs();  // it has barriers: every thread is done with the row before
    row.write_to([&](int id) { return probs.at(static_cast<uint32_t>(id)); });
    team.sync();
    reread(begin, end, f);
    return true;
  }
  template <class F>
  __device__ void reread(uint32_t begin, uint32_t end, F f) const {
#pragma unroll 1
    for (uint32_t v = begin + lane(); v < end; v += kWarp) f(v, allows(v) ? probs.here(v) : 0.0f);
  }
  __device__ float operator()(uint32_t v) const { return allows(v) ? probs(v) : 0.0f; }
  __device__ bool allows(uint32_t id) const { return id - first_id < num_ids; }  // wraps before the first id
};

constexpr int kLogitThreads = 256;  // at most: a thread has its entries of the row in registers beside all else

// One kernel with draft rows and without: a block has its multiprocessor to itself by either's registers.
template <class Entries>
__global__ void __launch_bounds__(kLogitThreads, 1)
    verify_logits_kernel(VerifyLogits batch, Layout layout, int64_t capacity) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x / team.size();
  char* const scratch = batch.scratch + blockIdx.x * layout.scratch;
  FilteredRows<Entries> rows = {batch.rows, b,
                                team,       reinterpret_cast<RowShared*>(shared),
                                capacity,   Slices<float>(shared, scratch, layout, layout.row, team)};
  verify<true>(team, batch, b, rows, batch.rows.temperature[b] == 0, layout, shared);
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
  team.end();
  for (int64_t d = depth + team.thread(); d < max_depth; d += team.threads()) accepted_nodes[d] = -1;
  if (team.thread() != 0) return;
  batch.num_accepted[b] = static_cast<int32_t>(depth);
  batch.next_token[b] = token;
  batch.tv_excess[b] = 0;
  batch.status[b] = status;
}

using Kernel = void(VerifyLogits, Layout, int64_t);

// How a batch is launched.
struct Launch {
  Kernel* kernel;
  Layout layout;
  int64_t capacity;  // the capacity of Streamed
};

cudaError_t launch_of(const VerifyLogits& batch, std::optional<Launch>* result) {
  Kernel* kernel = verify_logits_kernel<Held>;
  Device device;
  cudaError_t error = device_for(kernel, &device);
  if (error != cudaSuccess) return error;
  const int64_t packs = packs_of(batch.rows), own = kLogitThreads * kHeldPacks, blocks = (packs + own - 1) / own;
  const int64_t most_blocks = device.has_clusters ? kMaxCluster : 1;
  const bool is_held = blocks <= most_blocks;
  if (!is_held) {
    kernel = verify_logits_kernel<Streamed>;
    error = device_for(kernel, &device);
    if (error != cudaSuccess) return error;
  }
  unsigned cluster = cluster_for(device, batch.B), threads = kWarp;
  while (cluster < blocks && cluster < most_blocks) cluster *= 2;
  while (threads < batch.V && threads < kLogitThreads) threads *= 2;

  const int64_t base = offsetof(RowShared, copy);
  const auto layout_with = [&](int64_t capacity) {
    return Layout(batch, cluster, threads, device.shared, base + capacity * threads * kPackBytes, true);
  };
  const int64_t team = int64_t{cluster} * threads;
  int64_t capacity = is_held ? 0 : (packs + team - 1) / team;
  if (!layout_with(capacity).row.shared) capacity = 0;  // a row is read again rather than its probabilities in scratch
  *result = Launch{kernel, layout_with(capacity), capacity};
  return cudaSuccess;
}

}  // namespace

cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes) {
  *bytes = 0;
  if (batch.seeds) return cudaSuccess;
  std::optional<Launch> launch;
  const cudaError_t error = launch_of(batch, &launch);
  if (error == cudaSuccess) *bytes = launch->layout.scratch_of(batch.B);
  return error;
}

cudaError_t verify_logits_cuda(const VerifyLogits& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  if (batch.seeds) {
    return launch_rows(verify_by_seeds_kernel<Held>, verify_by_seeds_kernel<Streamed>, batch, batch.B, stream,
                       kSeedThreads);
  }
  std::optional<Launch> launch;
  const cudaError_t error = launch_of(batch, &launch);
  if (error != cudaSuccess) return error;
  const Layout& layout = launch->layout;
  return LAUNCH_CLUSTERS(launch->kernel, blocks_for(layout.cluster * batch.B), layout.cluster, layout.threads,
                         layout.shared, stream, batch, layout, launch->capacity);
}

}  // namespace specvis
