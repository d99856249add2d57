// verify_tree on the CPU: one request per task, verified from the root downwards. A row is copied into fixed point
// only when a rejection first changes it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "rows.h"

namespace {

using specvis::Budget;
using specvis::Candidate;
using specvis::NeighborPrefix;
using specvis::ResidualRule;
using specvis::to_fixed_point;
using specvis::Total;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// One request: its slices of the arguments, and the rules.
struct Request {
  int64_t N, V, num_draft_rows, max_depth;  // the last two are M and P below
  const float* target;                      // (N, V)
  const int64_t* tokens;                    // (N)
  const int32_t* first_child;               // (N)
  const int32_t* next_sibling;              // (N)
  const float* uniforms;                    // (N)
  const float* draft;                       // (M, V) or null
  const int32_t* draft_row;                 // (N)
  const float* omega;                       // (P) or null
  specvis::Neighbors neighbors;
  int64_t num_considered;  // how many neighbors of a token the cutoff looks at; 0 without neighbors
  float delta;
  specvis::Cutoff cutoff;
  ResidualRule residual;

  // Is `child` a later node than `previous`, with a token in the vocabulary?
  bool is_valid(int64_t child, int64_t previous) const {
    return child > previous && child < N && tokens[child] >= 0 && tokens[child] < V;
  }
  Budget budget(int64_t token_mass, int64_t total) const { return Budget(cutoff, delta, token_mass, total); }
  bool is_undefined() const {
    for (int64_t d = 0; omega && d < max_depth; ++d) {
      if (specvis::is_undefined(omega[d], num_considered > 0, residual)) return true;
    }
    return false;
  }
};

struct VerifyResult {
  int32_t* accepted_nodes;  // (P), filled with -1
  int32_t num_accepted = 0;
  int64_t next_token = 0;
  double tv_excess = 0;
  int32_t status = 0;
};

// Scratch memory of one thread.
struct Scratch {
  std::unique_ptr<int64_t[]> fixed_probs, draft;             // (V)
  std::unique_ptr<int32_t[]> depth, parent, num_non_argmax;  // (N)
};

// The residual of the target at one node. At first it is the row of probabilities; once a rejection changes it, it is
// a copy in fixed point.
class Residual {
 public:
  Residual(const float* row, int64_t V, int64_t total, int64_t* scratch)
      : row_(row), V_(V), total_(total), scratch_(scratch) {}

  int64_t total() const { return total_; }
  int64_t operator()(int64_t v) const { return changed_ ? scratch_[v] : to_fixed_point(row_[v]); }

  int64_t* copy() {
    if (!changed_) specvis::sum_row(row_, V_, scratch_);
    changed_ = true;
    return scratch_;
  }
  void set(int64_t v, int64_t mass) {
    int64_t* fixed_probs = copy();
    total_ += mass - fixed_probs[v];
    fixed_probs[v] = mass;
  }
  void set_total(int64_t total) { total_ = total; }
  void restore() {
    changed_ = false;
    total_ = specvis::sum_row(row_, V_).mass;
  }
  int64_t draw(float uniform) const {
    return changed_ ? specvis::draw(scratch_, V_, total_, uniform) : specvis::draw(row_, V_, total_, uniform);
  }

 private:
  const float* row_;
  int64_t V_, total_;
  int64_t* scratch_;
  bool changed_ = false;
};

// Sets the residual of x's first `count` neighbors to 0.
void clear_neighbors(const Request& request, Residual& residual, int64_t x, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = request.neighbors(x, j);
    if (id >= 0 && id < request.V) residual.set(id, 0);
  }
}

// Protects x's first `count` neighbors: subtract() will take nothing from them. The bits of their draft masses are
// inverted as a mark, which subtract() removes.
void protect_neighbors(const Request& request, int64_t* draft, int64_t x, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = request.neighbors(x, j);
    if (id >= 0 && id < request.V && draft[id] >= 0) draft[id] = ~draft[id];
  }
}

// Conversions of integers below 2^62 to double, and of doubles below 2^55 to integers, in operations that vectorize.
inline double as_double(int64_t x) {
  return static_cast<double>(static_cast<int32_t>(x >> 31)) * 2147483648.0 +
         static_cast<double>(static_cast<int32_t>(x & 0x7fffffff));
}
inline int64_t as_int64(double x) {
  const int32_t high = static_cast<int32_t>(x / 16777216.0);
  return (int64_t{high} << 24) + static_cast<int32_t>(x - static_cast<double>(high) * 16777216.0);
}

// Subtracts the draft from the residual after a sampled candidate was rejected, and returns the residual's sum. The
// marks of protected tokens are removed.
WIDEST_VECTORS int64_t subtract(int64_t* fixed_probs, int64_t V, double total, int64_t* draft, double draft_total,
                                double slack) {
  const double unit = 1 / total, draft_unit = 1 / draft_total;
  int64_t sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    const bool is_protected = draft[v] < 0;
    draft[v] = is_protected ? ~draft[v] : draft[v];
    const double draft_mass = is_protected ? 0.0 : as_double(draft[v]);
    fixed_probs[v] = as_int64(specvis::residual_mass(as_double(fixed_probs[v]), unit, draft_mass, draft_unit, slack));
    sum += fixed_probs[v];
  }
  return sum;
}

// Updates the residual after the rejection of x, of whose neighbors the cutoff had kept num_kept. The rule "released"
// is that of LANTERN's released code: as soon as one neighbor was kept, it clears or protects all neighbors of x in
// the table.
void reject(const Request& request, Residual& residual, int64_t* draft, const Candidate& candidate, int64_t x,
            int64_t num_kept) {
  const int64_t num_all = request.neighbors.k();
  const double slack = specvis::slack_of(candidate.omega);
  if (!candidate.sampled) {
    residual.set(x, request.residual == ResidualRule::optimal
                        ? static_cast<int64_t>(slack * static_cast<double>(candidate.token_mass))
                        : 0);
    if (request.residual == ResidualRule::relaxed) clear_neighbors(request, residual, x, num_kept);
    if (request.residual == ResidualRule::released && num_kept > 0) clear_neighbors(request, residual, x, num_all);
    return;
  }
  if (request.residual == ResidualRule::relaxed) {
    clear_neighbors(request, residual, x, num_kept);
    residual.set(x, candidate.relaxed_mass);
  }
  if (request.residual == ResidualRule::released && num_kept > 0) protect_neighbors(request, draft, x, num_all);
  residual.set_total(subtract(residual.copy(), request.V, static_cast<double>(candidate.total), draft,
                              static_cast<double>(candidate.draft_total),
                              request.residual == ResidualRule::optimal ? slack : 0.0));
}

void verify_sampled(const Request& request, const Scratch& scratch, VerifyResult& out) {
  const int64_t V = request.V;
  const bool is_undefined = request.is_undefined();
  if (is_undefined) out.status |= specvis::kInvalidRule;
  int64_t node = 0;
  while (true) {
    const float* row = request.target + node * V;
    const Total row_sum = specvis::sum_row(row, V);
    if (!row_sum.valid) {
      out.status |= specvis::kInvalidRow;
      return;
    }
    Residual residual(row, V, row_sum.mass, scratch.fixed_probs.get());

    int64_t child = is_undefined || out.num_accepted == request.max_depth ? -1 : request.first_child[node];
    int64_t* draft = scratch.draft.get();
    int64_t draft_total = 0;
    const bool sampled = child >= 0 && request.draft && request.draft_row[node] >= 0;
    if (sampled) {
      const int64_t from = request.draft_row[node];
      Total draft_row_sum = {0, false};
      if (from < request.num_draft_rows) draft_row_sum = specvis::sum_row(request.draft + from * V, V, draft);
      if (!draft_row_sum.valid) {
        out.status |= from < request.num_draft_rows ? specvis::kInvalidRow : specvis::kInvalidTree;
        child = -1;
      }
      draft_total = draft_row_sum.mass;
    }

    int64_t previous = node, next = -1;
    double reach_prob = 1;
    for (; child >= 0; previous = child, child = request.next_sibling[child]) {
      if (!request.is_valid(child, previous)) {
        out.status |= specvis::kInvalidTree;
        break;
      }
      if (sampled && draft_total == 0) continue;
      const int64_t x = request.tokens[child];
      const int64_t token_mass = residual(x);
      const NeighborPrefix prefix = specvis::neighbor_prefix(residual, V, request.neighbors, request.num_considered, x,
                                                             request.budget(token_mass, residual.total()));
      const Candidate candidate = {sampled,
                                   token_mass,
                                   token_mass + prefix.mass,
                                   residual.total(),
                                   sampled ? draft[x] : 0,
                                   draft_total,
                                   request.omega ? request.omega[out.num_accepted] : 1.0};
      const double accept_prob = candidate.accept_prob(false);
      out.tv_excess += reach_prob * candidate.tv_excess();
      reach_prob *= 1 - accept_prob;
      if (candidate.accepts(request.uniforms[child])) {
        next = child;
        break;
      }
      reject(request, residual, draft, candidate, x, prefix.num_kept);
      if (sampled) {
        draft_total -= draft[x];
        draft[x] = 0;
      }
      if (residual.total() == 0) {
        out.status |= specvis::kEmptyResidual;
        residual.restore();
      }
    }
    if (next < 0) {
      out.next_token = residual.draw(request.uniforms[0]);
      return;
    }
    out.accepted_nodes[out.num_accepted++] = static_cast<int32_t>(next);
    node = next;
  }
}

// A greedy request: the nodes in order. Each accepted node verifies the chain of its children.
void verify_greedy(const Request& request, const Scratch& scratch, VerifyResult& out) {
  const int64_t N = request.N, V = request.V;
  int32_t *depth = scratch.depth.get(), *parent = scratch.parent.get();
  int32_t* num_non_argmax = scratch.num_non_argmax.get();
  for (int64_t n = 0; n < N; ++n) depth[n] = -1;
  depth[0] = num_non_argmax[0] = 0;

  int64_t best = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (depth[n] > depth[best]) best = n;
    if (depth[n] < 0 || depth[n] >= request.max_depth || request.first_child[n] < 0) continue;
    const float* row = request.target + n * V;
    const Total row_sum = specvis::sum_row(row, V);
    if (!row_sum.valid) continue;
    const auto mass = [row](int64_t v) { return to_fixed_point(row[v]); };
    const int64_t argmax = specvis::argmax(row, V);
    int64_t previous = n;
    for (int64_t child = request.first_child[n]; child >= 0; previous = child, child = request.next_sibling[child]) {
      if (!request.is_valid(child, previous)) {
        out.status |= specvis::kInvalidTree;
        break;
      }
      const int64_t x = request.tokens[child], token_mass = mass(x);
      const NeighborPrefix prefix = specvis::neighbor_prefix(mass, V, request.neighbors, request.num_considered, x,
                                                             request.budget(token_mass, row_sum.mass));
      if (!specvis::is_argmax(x, token_mass + prefix.mass, argmax, mass(argmax))) continue;
      depth[child] = depth[n] + 1;
      parent[child] = static_cast<int32_t>(n);
      num_non_argmax[child] = num_non_argmax[n] + (x != argmax);
    }
  }
  out.num_accepted = depth[best];
  out.tv_excess = num_non_argmax[best];
  const float* row = request.target + best * V;
  if (specvis::sum_row(row, V).valid) {
    out.next_token = specvis::argmax(row, V);
  } else {
    out.status |= specvis::kInvalidRow;
  }
  for (int64_t d = out.num_accepted; d > 0; --d) {
    out.accepted_nodes[d - 1] = static_cast<int32_t>(best);
    best = parent[best];
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree_cpu(
    const Tensor& target_probs,                // (B, N, V)
    const Tensor& tokens,                      // (B, N)
    const Tensor& first_child,                 // (B, N)
    const Tensor& next_sibling,                // (B, N)
    const Tensor& uniforms,                    // (B, N)
    const std::optional<Tensor>& draft_probs,  // (B, M, V)
    const std::optional<Tensor>& draft_row,    // (B, N)
    const std::optional<Tensor>& neighbors,    // (C, k)
    const std::optional<Tensor>& delta,        // (B)
    const std::optional<Tensor>& omega,        // (B, P)
    const std::optional<Tensor>& greedy,       // (B)
    std::string cutoff, int64_t offset, std::string residual, int64_t max_depth) {
  const int64_t B = target_probs.size(0), N = target_probs.size(1), V = target_probs.size(2);
  Tensor accepted_nodes = torch::stable::new_empty(tokens, {B, max_depth}, ScalarType::Int);
  Tensor num_accepted = torch::stable::new_empty(tokens, {B}, ScalarType::Int);
  Tensor next_token = torch::stable::new_empty(tokens, {B});
  Tensor tv_excess = torch::stable::new_empty(target_probs, {B});
  Tensor status = torch::stable::new_empty(tokens, {B}, ScalarType::Int);

  Request first = {N,
                   V,
                   draft_probs ? draft_probs->size(1) : 0,
                   max_depth,
                   target_probs.const_data_ptr<float>(),
                   tokens.const_data_ptr<int64_t>(),
                   first_child.const_data_ptr<int32_t>(),
                   next_sibling.const_data_ptr<int32_t>(),
                   uniforms.const_data_ptr<float>(),
                   data<float>(draft_probs),
                   data<int32_t>(draft_row),
                   data<float>(omega),
                   {},
                   0,
                   0,
                   specvis::cutoff_named(cutoff),
                   specvis::residual_named(residual)};
  if (neighbors) {
    first.neighbors = specvis::Neighbors(neighbors->const_data_ptr(), neighbors->scalar_type() == ScalarType::UInt16,
                                         neighbors->size(0), neighbors->size(1), offset);
    first.num_considered = neighbors->size(1) - (first.residual == ResidualRule::released);
  }
  const float* deltas = data<float>(delta);
  const bool* is_greedy = data<bool>(greedy);
  int32_t* node_out = accepted_nodes.mutable_data_ptr<int32_t>();
  int32_t* num_accepted_out = num_accepted.mutable_data_ptr<int32_t>();
  int64_t* next_out = next_token.mutable_data_ptr<int64_t>();
  float* tv_excess_out = tv_excess.mutable_data_ptr<float>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (draft_probs) scratch.draft.reset(new int64_t[V]);
    if (greedy) {
      scratch.depth.reset(new int32_t[N]);
      scratch.parent.reset(new int32_t[N]);
      scratch.num_non_argmax.reset(new int32_t[N]);
    }
    for (int64_t b = begin; b < end; ++b) {
      Request request = first;
      request.target += b * N * V;
      request.tokens += b * N;
      request.first_child += b * N;
      request.next_sibling += b * N;
      request.uniforms += b * N;
      if (request.draft) {
        request.draft += b * request.num_draft_rows * V;
        request.draft_row += b * N;
      }
      if (request.omega) request.omega += b * max_depth;
      if (deltas) request.delta = deltas[b];

      VerifyResult out = {node_out + b * max_depth};
      for (int64_t d = 0; d < max_depth; ++d) out.accepted_nodes[d] = -1;
      if (is_greedy && is_greedy[b]) {
        verify_greedy(request, scratch, out);
      } else {
        verify_sampled(request, scratch, out);
      }
      num_accepted_out[b] = out.num_accepted;
      next_out[b] = out.next_token;
      tv_excess_out[b] = static_cast<float>(out.tv_excess);
      status_out[b] = out.status;
    }
  });
  return {accepted_nodes, num_accepted, next_token, tv_excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("verify_tree", TORCH_BOX(&verify_tree_cpu)); }
