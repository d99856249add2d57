// verify_tree on CUDA: one block per request, walking from the root. The tree, the visited row in fixed point
// and the draft's row live in shared memory, or where that is too small in scratch. Every thread follows the
// walk and decides alike; only the passes over rows are shared out.
#include "cuda.h"
#include "launch.h"
#include "rules.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;        // at most
constexpr int64_t kKeptBack = 4096;  // bytes of shared memory for what the kernel itself declares

struct Node {
  int64_t token;
  int32_t first_child, next_sibling, draft_row;
  float uniform;
  int32_t depth, parent, departures;  // greedy, of an accepted node; until then the depth is -1
};

// A block's arrays, each in shared memory if it still fits, else in the request's part of scratch.
struct Layout {
  struct Place {
    bool shared;
    int64_t offset;  // bytes
  };
  Place nodes, weights, draft;
  int64_t shared = 0, scratch = 0;  // bytes in all

  Layout(const VerifyTree& batch, int64_t limit) {
    const auto place = [&](int64_t bytes) {
      bytes = (bytes + 15) / 16 * 16;
      const bool fits = shared + bytes <= limit;
      int64_t& end = fits ? shared : scratch;
      end += bytes;
      return Place{fits, end - bytes};
    };
    nodes = place(batch.N * sizeof(Node));
    weights = place(batch.V * sizeof(int64_t));
    draft = place(batch.draft_probs ? batch.V * sizeof(float) : 0);
  }
};

// One request, as its block sees it.
struct Request {
  const VerifyTree& batch;
  int64_t b;
  Node* nodes;       // (N)
  int64_t* weights;  // (V)
  bool stages;       // are the weights in shared memory? Then every visited row is copied there
  float* draft;      // (V)
  int64_t columns;   // how many neighbors the cutoff looks at; 0 without

  __device__ const float* target(int64_t node) const {
    return batch.target_probs + (b * batch.N + node) * batch.V;
  }
  // Is `child` a later node than `previous`, with a token in the vocabulary?
  __device__ bool sound(int64_t child, int64_t previous) const {
    return child > previous && child < batch.N && nodes[child].token >= 0 && nodes[child].token < batch.V;
  }
  __device__ Budget budget(int64_t own, int64_t total) const {
    return Budget(batch.kind, batch.cutoff ? batch.cutoff[b] : -1.0f, own, total);
  }
  __device__ double omega(int64_t depth) const {
    return batch.omega ? batch.omega[b * batch.P + depth] : 1.0;
  }
  __device__ bool refused() const {
    for (int64_t d = 0; batch.omega && d < batch.P; ++d) {
      if (!(omega(d) >= 0)) return true;
      if (omega(d) < 1 && columns > 0 && batch.residual == Residual::optimal) return true;
    }
    return false;
  }
};

struct Verdict {
  int32_t* path;  // (P), filled with -1
  int32_t accepted = 0;
  int64_t next_token = 0;
  double excess = 0;  // thread 0 alone knows it
  int32_t status = 0;
};

// The residual target at one node: the row of probabilities, or a copy in fixed point. All threads hold it
// alike and call its methods together; a method that writes leaves the weights ready for every thread.
class Rest {
 public:
  __device__ Rest(const Request& request, int64_t node)
      : row_(request.target(node)), V_(request.batch.V), weights_(request.weights), copied_(request.stages) {
    __syncthreads();  // every thread is done with the node before
    whole_ = weigh(row_, V_, copied_ ? weights_ : nullptr);
    total_ = whole_.weight;
  }

  __device__ bool valid() const { return whole_.valid; }
  __device__ int64_t total() const { return total_; }
  __device__ int64_t operator()(int64_t v) const { return copied_ ? weights_[v] : to_fixed(row_[v]); }

  __device__ void set(int64_t v, int64_t before, int64_t after) {
    copy();
    if (threadIdx.x == 0) weights_[v] = after;
    total_ += after - before;
    __syncthreads();
  }
  // The weights of x's first `count` neighbors become 0; one that is listed twice counts once.
  __device__ void clear(const Neighbors& neighbors, int64_t x, int64_t count) {
    if (count == 0) return;
    copy();
    int64_t gone = 0;
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
      const int64_t id = neighbors(x, j);
      if (id < 0 || id >= V_) continue;
      gone += static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(weights_ + id), 0ull));
    }
    total_ -= block_sum(gone);
  }
  // The residual after a sampled proposal. Negative draft entries are spared once; x leaves the draft.
  __device__ void subtract(float* draft, int64_t draft_total, int64_t total, double slack, int64_t x) {
    constexpr int kAhead = 4;  // loads in flight per thread, for rows in scratch
    const double unit = 1 / static_cast<double>(total), draft_unit = 1 / static_cast<double>(draft_total);
    int64_t sum = 0;
    for (int64_t start = threadIdx.x; start < V_; start += kAhead * blockDim.x) {
      int64_t weights[kAhead];
      float drafts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t v = start + i * blockDim.x;
        weights[i] = v < V_ ? (*this)(v) : 0;
        drafts[i] = v < V_ ? draft[v] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t v = start + i * blockDim.x;
        if (v >= V_) break;
        const int64_t drafted = drafts[i] > 0 ? to_fixed(drafts[i]) : 0;
        int64_t weight = weights[i];
        if (weight > 0) {
          weight = static_cast<int64_t>(residual_weight(static_cast<double>(weight), unit,
                                                        static_cast<double>(drafted), draft_unit, slack));
        }
        weights_[v] = weight;
        sum += weight;
        if (drafts[i] < 0 || v == x) draft[v] = v == x ? 0.0f : -drafts[i];
      }
    }
    copied_ = true;
    total_ = block_sum(sum);
  }
  __device__ void restore() {
    copied_ = false;
    total_ = whole_.weight;
  }
  __device__ int64_t draw(float uniform) const { return specvis::draw(*this, V_, total_, uniform); }

 private:
  __device__ void copy() {
    if (!copied_) weigh(row_, V_, weights_);
    copied_ = true;
  }

  const float* row_;
  int64_t V_;
  int64_t* weights_;
  bool copied_;
  Total whole_;
  int64_t total_;
};

// What the rejection of x leaves of the target, and of the draft.
__device__ void reject(const Request& request, Rest& rest, const Candidate& candidate, int64_t x,
                       int64_t kept) {
  const Residual residual = request.batch.residual;
  const double slack = residual == Residual::optimal ? slack_of(candidate.omega) : 0.0;
  const int64_t near = residual == Residual::optimal   ? 0
                       : residual == Residual::relaxed ? kept
                       : kept > 0                      ? request.batch.neighbors.columns()
                                                       : 0;
  __syncthreads();  // every thread has judged x
  if (!candidate.sampled) {
    rest.set(x, candidate.own, static_cast<int64_t>(slack * static_cast<double>(candidate.own)));
    rest.clear(request.batch.neighbors, x, near);
    return;
  }
  if (residual == Residual::relaxed) {
    rest.clear(request.batch.neighbors, x, near);
    rest.set(x, candidate.own, candidate.rho);
  } else {
    for (int64_t j = threadIdx.x; j < near; j += blockDim.x) {
      const int64_t id = request.batch.neighbors(x, j);
      if (id >= 0 && id < request.batch.V) {
        atomicOr(reinterpret_cast<unsigned*>(request.draft + id), 0x80000000u);  // the sign: spared
      }
    }
    __syncthreads();
  }
  rest.subtract(request.draft, candidate.draft_total, candidate.total, slack, x);
}

__device__ void walk(const Request& request, Verdict& out) {
  const VerifyTree& batch = request.batch;
  const Node* nodes = request.nodes;
  const bool refused = request.refused();
  if (refused) out.status |= kInvalidRule;
  int64_t node = 0;
  while (true) {
    Rest rest(request, node);
    if (!rest.valid()) {
      out.status |= kInvalidRow;
      return;
    }

    int64_t child = refused || out.accepted == batch.P ? -1 : nodes[node].first_child;
    const int64_t from = nodes[node].draft_row;
    const bool sampled = child >= 0 && from >= 0;
    int64_t draft_total = 0;
    if (sampled) {
      Total drafts = {0, false};
      if (from < batch.M) {
        drafts = weigh(batch.draft_probs + (request.b * batch.M + from) * batch.V, batch.V, request.draft);
      }
      if (!drafts.valid) {
        out.status |= from < batch.M ? kInvalidRow : kInvalidTree;
        child = -1;
      }
      draft_total = drafts.weight;
    }

    int64_t previous = node, next = -1;
    double reach = 1;
    for (; child >= 0; previous = child, child = nodes[child].next_sibling) {
      if (!request.sound(child, previous)) {
        out.status |= kInvalidTree;
        break;
      }
      if (sampled && draft_total == 0) continue;
      const int64_t x = nodes[child].token, own = rest(x);
      const Kept kept = kept_prefix(rest, batch.V, request.batch.neighbors, request.columns, x,
                                    request.budget(own, rest.total()));
      const Candidate candidate = {sampled, own, own + kept.mass, rest.total(),
                                   sampled ? to_fixed(request.draft[x]) : 0, draft_total,
                                   request.omega(out.accepted)};
      if (threadIdx.x == 0) {
        const double probability = candidate.probability(false);
        out.excess += reach * candidate.excess();
        reach *= 1 - probability;
      }
      if (candidate.accepted(nodes[child].uniform)) {
        next = child;
        break;
      }
      reject(request, rest, candidate, x, kept.count);
      draft_total -= candidate.drafted;
      if (rest.total() == 0) {
        out.status |= kEmptyResidual;
        rest.restore();
      }
    }
    if (next < 0) {
      out.next_token = rest.draw(nodes[0].uniform);
      return;
    }
    if (threadIdx.x == 0) out.path[out.accepted] = static_cast<int32_t>(next);
    ++out.accepted;
    node = next;
  }
}

// The row's largest weight's id, the lowest on ties.
__device__ int64_t argmax(const Rest& rest, int64_t V) {
  int64_t most = -1, top = V;
  const auto challenge = [&](int64_t weight, int64_t id) {
    if (weight > most || (weight == most && id < top)) most = weight, top = id;
  };
  for (int64_t v = threadIdx.x; v < V; v += blockDim.x) challenge(rest(v), v);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const int64_t weight = __shfl_xor_sync(kAllLanes, most, distance);
    challenge(weight, __shfl_xor_sync(kAllLanes, top, distance));
  }
  __shared__ int64_t weights[kMostWarps], ids[kMostWarps];
  __syncthreads();  // of an earlier call
  if (lane() == 0) {
    weights[warp()] = most;
    ids[warp()] = top;
  }
  __syncthreads();
  for (unsigned w = 0; w < warps(); ++w) challenge(weights[w], ids[w]);
  return top;
}

// A greedy request: nodes in order, each judging its chain of children.
__device__ void judge(const Request& request, Verdict& out) {
  const VerifyTree& batch = request.batch;
  Node* nodes = request.nodes;
  int64_t best = 0;
  for (int64_t n = 0; n < batch.N; ++n) {
    if (nodes[n].depth > nodes[best].depth) best = n;
    if (nodes[n].depth < 0 || nodes[n].depth >= batch.P || nodes[n].first_child < 0) continue;
    const Rest row(request, n);
    if (!row.valid()) continue;
    const int64_t top = argmax(row, batch.V);
    int64_t previous = n;
    for (int64_t child = nodes[n].first_child; child >= 0;
         previous = child, child = nodes[child].next_sibling) {
      if (!request.sound(child, previous)) {
        out.status |= kInvalidTree;
        break;
      }
      const int64_t x = nodes[child].token, own = row(x);
      const Kept kept = kept_prefix(row, batch.V, request.batch.neighbors, request.columns, x,
                                    request.budget(own, row.total()));
      if (threadIdx.x != 0 || !is_argmax(x, own + kept.mass, top, row(top))) continue;
      nodes[child].depth = nodes[n].depth + 1;
      nodes[child].parent = static_cast<int32_t>(n);
      nodes[child].departures = nodes[n].departures + (x != top);
    }
    __syncthreads();
  }
  out.accepted = nodes[best].depth;
  out.excess = nodes[best].departures;
  const Rest row(request, best);
  if (row.valid()) {
    out.next_token = argmax(row, batch.V);
  } else {
    out.status |= kInvalidRow;
  }
  if (threadIdx.x != 0) return;
  for (int64_t d = out.accepted; d > 0; --d) {
    out.path[d - 1] = static_cast<int32_t>(best);
    best = nodes[best].parent;
  }
}

__global__ void __launch_bounds__(kThreads) verify_tree_kernel(VerifyTree batch, Layout layout) {
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x, N = batch.N, P = batch.P, columns = batch.neighbors.columns();
  char* scratch = batch.scratch + b * layout.scratch;
  const auto at = [&](Layout::Place place) { return (place.shared ? shared : scratch) + place.offset; };

  const Request request = {
      batch, b, reinterpret_cast<Node*>(at(layout.nodes)), reinterpret_cast<int64_t*>(at(layout.weights)),
      layout.weights.shared, reinterpret_cast<float*>(at(layout.draft)),
      columns > 0 ? columns - (batch.residual == Residual::released) : 0};
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const int64_t i = b * N + n;
    request.nodes[n] = {batch.tokens[i], batch.first_child[i], batch.next_sibling[i],
                        batch.draft_row ? batch.draft_row[i] : -1, batch.uniforms[i], n == 0 ? 0 : -1, 0, 0};
  }
  Verdict out = {batch.path + b * P};
  for (int64_t d = threadIdx.x; d < P; d += blockDim.x) out.path[d] = -1;
  __syncthreads();

  if (batch.greedy && batch.greedy[b]) {
    judge(request, out);
  } else {
    walk(request, out);
  }
  if (threadIdx.x != 0) return;
  batch.accepted[b] = out.accepted;
  batch.next_token[b] = out.next_token;
  batch.excess[b] = static_cast<float>(out.excess);
  batch.status[b] = out.status;
}

// Bytes of shared memory that a block may ask for.
cudaError_t shared_limit(int64_t* bytes) {
  int device = 0, limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  *bytes = limit - kKeptBack;
  return error;
}

}  // namespace

cudaError_t verify_tree_scratch(const VerifyTree& batch, int64_t* bytes) {
  int64_t limit;
  const cudaError_t error = shared_limit(&limit);
  *bytes = batch.B * Layout(batch, limit).scratch;
  return error;
}

cudaError_t verify_tree_cuda(const VerifyTree& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  int64_t limit;
  cudaError_t error = shared_limit(&limit);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, limit);
  error = cudaFuncSetAttribute(verify_tree_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(layout.shared));
  if (error != cudaSuccess) return error;
  LAUNCH(verify_tree_kernel, batch.B, threads_for(batch.V, kThreads), layout.shared, stream, batch, layout);
  return cudaGetLastError();
}

}  // namespace specvis
