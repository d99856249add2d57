// How one block verifies a request's tree, from the root downwards, whatever the target's rows are made of. The tree,
// the visited row in fixed point and the draft's row are in shared memory, or in scratch memory where that is too
// small. Every thread takes the same decisions; only the passes over rows are divided among the threads.
//
// Rows is the target's rows of one request: at(node) is a row, which has
//     sum(copy)   its sum; unless null, `copy` receives the entries, in fixed point
//     mass(v)     an entry in fixed point, or kIsStored is false: then every row is copied
//     allows(v)   whether an id is in the row's range; outside of it a token has no neighbors
#pragma once
#include "block.cuh"
#include "params.h"
#include "rules.h"

namespace specvis {
namespace {

constexpr int kVerifyThreads = 512;        // at most
constexpr int64_t kVerifyReserved = 4096;  // bytes of shared memory for the arrays that these functions declare

struct Node {
  int64_t token;
  int32_t first_child, next_sibling, draft_row;
  float uniform;
  int32_t depth, parent, num_non_argmax;  // of an accepted node of a greedy request; until then, depth is -1
};

// Where a block's arrays are: each is in shared memory if it still fits there, else in the request's part of scratch.
struct Layout {
  struct Region {
    bool shared;
    int64_t offset;  // bytes
  };
  Region nodes, fixed_probs, draft;
  int64_t shared, scratch = 0;  // bytes of each in all

  // `taken` bytes at the front of shared memory hold something else.
  Layout(const Verification& batch, int64_t taken, int64_t limit) : shared(taken) {
    const auto reserve = [&](int64_t bytes) {
      bytes = (bytes + 15) / 16 * 16;
      const bool fits = shared + bytes <= limit;
      int64_t& end = fits ? shared : scratch;
      end += bytes;
      return Region{fits, end - bytes};
    };
    nodes = reserve(batch.N * sizeof(Node));
    fixed_probs = reserve(batch.V * sizeof(int64_t));
    draft = reserve(batch.draft_probs ? batch.V * sizeof(float) : 0);
  }
};

// A request's slices of a batch of trees: of N nodes, with num_draft_rows rows of the draft.
struct Tree {
  static constexpr bool kHasBonus = false;
  const Verification& batch;
  int64_t b;

  __device__ int64_t num_nodes() const { return batch.N; }
  __device__ int64_t max_depth() const { return batch.max_depth; }
  __device__ int64_t num_draft_rows() const { return batch.num_draft_rows; }
  __device__ const float* draft_probs() const { return batch.draft_probs + b * batch.num_draft_rows * batch.V; }
  __device__ double omega(int64_t depth) const { return batch.omega ? batch.omega[b * batch.max_depth + depth] : 1.0; }
  __device__ int32_t* accepted_nodes() const { return batch.accepted_nodes + b * batch.max_depth; }
};

// One request: its arrays, and the rules. Links is Tree, or a class with the same members.
template <class Rows, class Links>
struct Request {
  const Verification& batch;
  Rows rows;  // the target's
  Links links;
  int64_t b;
  Node* nodes;             // (N)
  int64_t* fixed_probs;    // (V)
  bool copies_rows;        // whether every visited row is copied to fixed_probs: it is if those are in shared memory
  float* draft;            // (V)
  int64_t num_considered;  // how many neighbors of a token the cutoff looks at; 0 without neighbors

  // Is `child` a later node than `previous`, with a token in the vocabulary?
  __device__ bool is_valid(int64_t child, int64_t previous) const {
    return child > previous && child < links.num_nodes() && nodes[child].token >= 0 && nodes[child].token < batch.V;
  }
  __device__ Budget budget(int64_t token_mass, int64_t total) const {
    return Budget(batch.cutoff, batch.delta ? batch.delta[b] : -1.0f, token_mass, total);
  }
  __device__ bool is_undefined() const {
    for (int64_t d = 0; batch.omega && d < links.max_depth(); ++d) {
      if (specvis::is_undefined(links.omega(d), num_considered > 0, batch.residual)) return true;
    }
    return false;
  }
  // Has the node no row, because the token after it is drawn already?
  __device__ bool ends_in_bonus(int64_t node) const {
    if constexpr (Links::kHasBonus) return links.bonus && node == links.num_nodes() - 1;
    return false;
  }
  __device__ int64_t bonus() const {
    if constexpr (Links::kHasBonus) return *links.bonus;
    return 0;
  }
};

struct VerifyResult {
  int32_t* accepted_nodes;  // (P), filled with -1; null: nobody asks
  int32_t num_accepted = 0;
  int64_t next_token = 0;
  double tv_excess = 0;  // in thread 0 only
  int32_t status = 0;
};

// The residual of the target at one node: its row, or a copy in fixed point. Every thread has the same object and
// calls its methods together with the others. After a method that writes, every thread may read.
template <class Rows, class Links>
class Residual {
 public:
  __device__ explicit Residual(const Request<Rows, Links>& request) : request_(request), V_(request.batch.V) {}

  // The target's row at a node, as it is.
  __device__ void read(int64_t node) {
    __syncthreads();  // every thread is done with what was here
    row_ = request_.rows.at(node);
    is_copy_ = request_.copies_rows;
    const Total sum = row_.sum(is_copy_ ? request_.fixed_probs : nullptr);
    valid_ = sum.valid;
    total_ = sum.mass;
  }

  // The uniform distribution.
  __device__ void fill() {
    __syncthreads();
    const int64_t mass = uniform_mass(V_);
    for (int64_t v = threadIdx.x; v < V_; v += blockDim.x) request_.fixed_probs[v] = mass;
    is_copy_ = true;
    total_ = V_ * mass;
    __syncthreads();
  }

  __device__ bool valid() const { return valid_; }
  __device__ int64_t total() const { return total_; }
  __device__ int64_t operator()(int64_t v) const {
    if constexpr (Row::kIsStored)
      if (!is_copy_) return row_.mass(v);
    return request_.fixed_probs[v];
  }
  // The neighbors of x that the cutoff keeps.
  __device__ NeighborPrefix neighbors_of(int64_t x, int64_t token_mass) const {
    if (!row_.allows(x)) return {0, 0};
    return neighbor_prefix(*this, V_, request_.batch.neighbors, request_.num_considered, x,
                           request_.budget(token_mass, total_));
  }

  __device__ void set(int64_t v, int64_t before, int64_t after) {
    copy();
    if (threadIdx.x == 0) request_.fixed_probs[v] = after;
    total_ += after - before;
    __syncthreads();
  }
  // Sets the residual of x's first `count` neighbors to 0. A neighbor that is listed twice counts once.
  __device__ void clear(const Neighbors& neighbors, int64_t x, int64_t count) {
    if (count == 0) return;
    copy();
    int64_t cleared = 0;
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
      const int64_t id = neighbors(x, j);
      if (id < 0 || id >= V_) continue;
      cleared +=
          static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(request_.fixed_probs + id), 0ull));
    }
    total_ -= block_sum(cleared);
  }
  // Subtracts the draft after a sampled candidate x was rejected, and takes x out of the draft. Nothing is taken from a
  // protected token: its draft entry is negative, and becomes positive again.
  __device__ void subtract(float* draft, int64_t draft_total, int64_t total, double slack, int64_t x) {
    constexpr int kAhead = 4;  // loads in flight per thread, for rows in scratch memory
    const double unit = 1 / static_cast<double>(total), draft_unit = 1 / static_cast<double>(draft_total);
    int64_t sum = 0;
    for (int64_t start = threadIdx.x; start < V_; start += kAhead * blockDim.x) {
      int64_t masses[kAhead];
      float draft_probs[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t v = start + i * blockDim.x;
        masses[i] = v < V_ ? (*this)(v) : 0;
        draft_probs[i] = v < V_ ? draft[v] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t v = start + i * blockDim.x;
        if (v >= V_) break;
        const int64_t draft_mass = draft_probs[i] > 0 ? to_fixed_point(draft_probs[i]) : 0;
        int64_t mass = masses[i];
        if (mass > 0) {
          mass = static_cast<int64_t>(
              residual_mass(static_cast<double>(mass), unit, static_cast<double>(draft_mass), draft_unit, slack));
        }
        request_.fixed_probs[v] = mass;
        sum += mass;
        if (draft_probs[i] < 0 || v == x) draft[v] = v == x ? 0.0f : -draft_probs[i];
      }
    }
    is_copy_ = true;
    total_ = block_sum(sum);
  }
  __device__ int64_t draw(float uniform) const { return specvis::draw(*this, V_, total_, uniform); }

 private:
  using Row = typename Rows::Row;

  __device__ void copy() {
    if (!is_copy_) row_.sum(request_.fixed_probs);
    is_copy_ = true;
  }

  const Request<Rows, Links>& request_;
  int64_t V_;
  Row row_;
  bool is_copy_, valid_;
  int64_t total_;
};

// Updates the residual and the draft after the rejection of x, of whose neighbors the cutoff had kept num_kept. The
// rule "released" is that of LANTERN's released code: as soon as one neighbor was kept, it clears or protects all
// neighbors of x in the table.
template <class Rows, class Links>
__device__ void reject(const Request<Rows, Links>& request, Residual<Rows, Links>& residual, const Candidate& candidate,
                       int64_t x, int64_t num_kept) {
  const ResidualRule rule = request.batch.residual;
  const double slack = rule == ResidualRule::optimal ? slack_of(candidate.omega) : 0.0;
  const int64_t count = rule == ResidualRule::optimal   ? 0
                        : rule == ResidualRule::relaxed ? num_kept
                        : num_kept > 0                  ? request.batch.neighbors.k()
                                                        : 0;
  __syncthreads();  // every thread has rejected x
  if (!candidate.sampled) {
    residual.set(x, candidate.token_mass, static_cast<int64_t>(slack * static_cast<double>(candidate.token_mass)));
    residual.clear(request.batch.neighbors, x, count);
    return;
  }
  if (rule == ResidualRule::relaxed) {
    residual.clear(request.batch.neighbors, x, count);
    residual.set(x, candidate.token_mass, candidate.relaxed_mass);
  } else {
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
      const int64_t id = request.batch.neighbors(x, j);
      if (id >= 0 && id < request.batch.V) {
        atomicOr(reinterpret_cast<unsigned*>(request.draft + id), 0x80000000u);  // the sign marks it as protected
      }
    }
    __syncthreads();
  }
  residual.subtract(request.draft, candidate.draft_total, candidate.total, slack, x);
}

template <class Rows, class Links>
__device__ void verify_sampled(const Request<Rows, Links>& request, VerifyResult& out) {
  const Verification& batch = request.batch;
  const Links& links = request.links;
  const Node* nodes = request.nodes;
  const bool is_undefined = request.is_undefined();
  if (is_undefined) out.status |= kInvalidRule;
  Residual residual(request);
  int64_t node = 0, previous = 0, child = -1, draft_total = 0;
  double reach_prob = 1;
  bool enters = true, sampled = false;  // else nothing was left of the node's row
  while (true) {
    if (request.ends_in_bonus(node)) {
      out.next_token = request.bonus();
      return;
    }
    if (enters || batch.empty == Empty::target) {
      residual.read(node);
    } else {
      residual.fill();
    }
    if (enters) {
      if (!residual.valid()) {
        out.status |= kInvalidRow;
        return;
      }
      child = is_undefined || out.num_accepted == links.max_depth() ? -1 : nodes[node].first_child;
      const int64_t from = nodes[node].draft_row;
      sampled = child >= 0 && from >= 0;
      draft_total = 0;
      if (sampled) {
        Total draft_row_sum = {0, false};
        if (from < links.num_draft_rows()) {
          draft_row_sum = sum_row(links.draft_probs() + from * batch.V, batch.V, request.draft);
        }
        if (!draft_row_sum.valid) {
          out.status |= from < links.num_draft_rows() ? kInvalidDraft : kInvalidTree;
          child = -1;
        }
        draft_total = draft_row_sum.mass;
      }
      previous = node;
      reach_prob = 1;
    }

    int64_t next = -1;
    bool is_empty = false;
    while (child >= 0 && !is_empty) {
      if (!request.is_valid(child, previous)) {
        out.status |= kInvalidTree;
        break;
      }
      if (!sampled || draft_total > 0) {
        const int64_t x = nodes[child].token, token_mass = residual(x);
        const NeighborPrefix prefix = residual.neighbors_of(x, token_mass);
        const Candidate candidate = {sampled,
                                     token_mass,
                                     token_mass + prefix.mass,
                                     residual.total(),
                                     sampled ? to_fixed_point(request.draft[x]) : 0,
                                     draft_total,
                                     links.omega(out.num_accepted)};
        if (threadIdx.x == 0) {
          const double accept_prob = candidate.accept_prob(false);
          out.tv_excess += reach_prob * candidate.tv_excess();
          reach_prob *= 1 - accept_prob;
        }
        if (candidate.accepts(nodes[child].uniform)) {
          next = child;
          break;
        }
        reject(request, residual, candidate, x, prefix.num_kept);
        draft_total -= candidate.draft_mass;
        is_empty = residual.total() == 0;
      }
      previous = child;
      child = nodes[child].next_sibling;
    }
    enters = !is_empty;
    if (is_empty) {
      out.status |= kEmptyResidual;
      continue;
    }
    if (next < 0) {
      out.next_token = residual.draw(nodes[0].uniform);
      return;
    }
    if (threadIdx.x == 0 && out.accepted_nodes) out.accepted_nodes[out.num_accepted] = static_cast<int32_t>(next);
    ++out.num_accepted;
    node = next;
  }
}

// The id of the row's largest entry, the lowest id on ties.
template <class Rows, class Links>
__device__ int64_t row_argmax(const Residual<Rows, Links>& row, int64_t V) {
  int64_t max_mass = -1, argmax = V;
  const auto offer = [&](int64_t mass, int64_t id) {
    if (mass > max_mass || (mass == max_mass && id < argmax)) max_mass = mass, argmax = id;
  };
  for (int64_t v = threadIdx.x; v < V; v += blockDim.x) offer(row(v), v);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const int64_t mass = __shfl_xor_sync(kAllLanes, max_mass, distance);
    offer(mass, __shfl_xor_sync(kAllLanes, argmax, distance));
  }
  __shared__ int64_t masses[kMaxWarps], ids[kMaxWarps];
  __syncthreads();  // every thread has read those of the previous call
  if (lane() == 0) {
    masses[warp()] = max_mass;
    ids[warp()] = argmax;
  }
  __syncthreads();
  for (unsigned w = 0; w < warps(); ++w) offer(masses[w], ids[w]);
  return argmax;
}

// A greedy request: the nodes in order. Each accepted node verifies the chain of its children. At last the row at the
// end of the path is read.
template <class Rows, class Links>
__device__ void verify_greedy(const Request<Rows, Links>& request, VerifyResult& out) {
  const Verification& batch = request.batch;
  const int64_t N = request.links.num_nodes(), max_depth = request.links.max_depth();
  Node* nodes = request.nodes;
  Residual row(request);
  int64_t best = 0;
  for (int64_t n = 0; n <= N; ++n) {
    const bool at_end = n == N;
    if (!at_end && nodes[n].depth > nodes[best].depth) best = n;
    if (!at_end && (nodes[n].depth < 0 || nodes[n].depth >= max_depth || nodes[n].first_child < 0)) continue;
    if (at_end && request.ends_in_bonus(best)) {
      out.next_token = request.bonus();
      break;
    }
    row.read(at_end ? best : n);
    if (!row.valid()) {
      if (at_end) out.status |= kInvalidRow;
      continue;
    }
    const int64_t argmax = row_argmax(row, batch.V);
    if (at_end) {
      out.next_token = argmax;
      break;
    }
    int64_t previous = n;
    for (int64_t child = nodes[n].first_child; child >= 0; previous = child, child = nodes[child].next_sibling) {
      if (!request.is_valid(child, previous)) {
        out.status |= kInvalidTree;
        break;
      }
      const int64_t x = nodes[child].token, token_mass = row(x);
      const NeighborPrefix prefix = row.neighbors_of(x, token_mass);
      if (threadIdx.x != 0 || !is_argmax(x, token_mass + prefix.mass, argmax, row(argmax))) continue;
      nodes[child].depth = nodes[n].depth + 1;
      nodes[child].parent = static_cast<int32_t>(n);
      nodes[child].num_non_argmax = nodes[n].num_non_argmax + (x != argmax);
    }
    __syncthreads();
  }
  out.num_accepted = nodes[best].depth;
  out.tv_excess = nodes[best].num_non_argmax;
  if (threadIdx.x != 0 || !out.accepted_nodes) return;
  for (int64_t d = out.num_accepted; d > 0; --d) {
    out.accepted_nodes[d - 1] = static_cast<int32_t>(best);
    best = nodes[best].parent;
  }
}

// Writes the outputs of request b, apart from accepted_nodes.
__device__ inline void write(const Verification& batch, int64_t b, const VerifyResult& out) {
  if (threadIdx.x != 0) return;
  batch.num_accepted[b] = out.num_accepted;
  batch.next_token[b] = out.next_token;
  batch.tv_excess[b] = static_cast<float>(out.tv_excess);
  batch.status[b] = out.status;
}

// Verifies request b and writes its outputs. The nodes are `nodes`, or where the layout says if that is null;
// node_at(n) is the n-th.
template <class Rows, class Links, class NodeAt>
__device__ void verify(const Verification& batch, int64_t b, const Rows& rows, const Links& links, NodeAt node_at,
                       bool greedy, const Layout& layout, char* shared, Node* nodes = nullptr) {
  const int64_t k = batch.neighbors.k();
  char* scratch = batch.scratch + b * layout.scratch;
  const auto at = [&](Layout::Region region) { return (region.shared ? shared : scratch) + region.offset; };

  const Request<Rows, Links> request = {batch,
                                        rows,
                                        links,
                                        b,
                                        nodes ? nodes : reinterpret_cast<Node*>(at(layout.nodes)),
                                        reinterpret_cast<int64_t*>(at(layout.fixed_probs)),
                                        layout.fixed_probs.shared || !Rows::Row::kIsStored,
                                        reinterpret_cast<float*>(at(layout.draft)),
                                        k > 0 ? k - (batch.residual == ResidualRule::released) : 0};
  for (int64_t n = threadIdx.x; n < links.num_nodes(); n += blockDim.x) request.nodes[n] = node_at(n);
  VerifyResult out = {links.accepted_nodes()};
  for (int64_t d = threadIdx.x; out.accepted_nodes && d < links.max_depth(); d += blockDim.x) {
    out.accepted_nodes[d] = -1;
  }
  __syncthreads();

  if (greedy) {
    verify_greedy(request, out);
  } else {
    verify_sampled(request, out);
  }
  write(batch, b, out);
}

// The same of a request of a batch of trees.
template <class Rows>
__device__ void verify(const Verification& batch, int64_t b, const Rows& rows, bool greedy, const Layout& layout,
                       char* shared) {
  const auto node_at = [&](int64_t n) {
    const int64_t i = b * batch.N + n;
    return Node{batch.tokens[i],
                batch.first_child[i],
                batch.next_sibling[i],
                batch.draft_row ? batch.draft_row[i] : -1,
                batch.uniforms[i],
                n == 0 ? 0 : -1,
                0,
                0};
  };
  verify(batch, b, rows, Tree{batch, b}, node_at, greedy, layout, shared);
}

// A row of probabilities.
struct ProbRow {
  static constexpr bool kIsStored = true;
  const float* probs;
  int64_t V;

  __device__ Total sum(int64_t* copy) const { return sum_row(probs, V, copy); }
  __device__ int64_t mass(int64_t v) const { return to_fixed_point(probs[v]); }
  __device__ bool allows(int64_t) const { return true; }
};

struct ProbRows {
  using Row = ProbRow;
  const float* probs;
  int64_t V;

  __device__ Row at(int64_t node) const { return {probs + node * V, V}; }
};

}  // namespace
}  // namespace specvis
