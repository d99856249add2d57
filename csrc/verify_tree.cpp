// verify_tree on the CPU: one request per task, walking from the root; a row is copied into fixed point only
// when a rejection first changes it.
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
using specvis::Kept;
using specvis::Residual;
using specvis::to_fixed;
using specvis::Total;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// One request: its slices of the arguments, and the rules.
struct Request {
  int64_t N, V, M, P;
  const float* target;          // (N, V)
  const int64_t* tokens;        // (N)
  const int32_t* first_child;   // (N)
  const int32_t* next_sibling;  // (N)
  const float* uniforms;        // (N)
  const float* draft;           // (M, V) or null
  const int32_t* draft_row;     // (N)
  const float* omega;           // (P) or null
  specvis::Neighbors neighbors;
  int64_t columns;              // how many of them the cutoff looks at; 0 without neighbors
  float cutoff;
  specvis::Cutoff kind;
  Residual residual;

  // Is `child` a later node than `previous`, with a token in the vocabulary?
  bool sound(int64_t child, int64_t previous) const {
    return child > previous && child < N && tokens[child] >= 0 && tokens[child] < V;
  }
  Budget budget(int64_t own, int64_t total) const { return Budget(kind, cutoff, own, total); }
  bool refused() const {
    for (int64_t d = 0; omega && d < P; ++d) {
      if (!(omega[d] >= 0)) return true;
      if (omega[d] < 1 && columns > 0 && residual == Residual::optimal) return true;
    }
    return false;
  }
};

struct Verdict {
  int32_t* path;  // (P), filled with -1
  int32_t accepted = 0;
  int64_t next_token = 0;
  double excess = 0;
  int32_t status = 0;
};

// Scratch of one thread.
struct Scratch {
  std::unique_ptr<int64_t[]> weights, draft;            // (V)
  std::unique_ptr<int32_t[]> depth, parent, departures;  // (N)
};

// The residual target at one node: the row of probabilities, or once changed a copy in fixed point.
class Rest {
 public:
  Rest(const float* row, int64_t V, int64_t total, int64_t* scratch)
      : row_(row), V_(V), total_(total), scratch_(scratch) {}

  int64_t total() const { return total_; }
  int64_t operator()(int64_t v) const { return changed_ ? scratch_[v] : to_fixed(row_[v]); }

  int64_t* copy() {
    if (!changed_) specvis::weigh(row_, V_, scratch_);
    changed_ = true;
    return scratch_;
  }
  void set(int64_t v, int64_t weight) {
    int64_t* weights = copy();
    total_ += weight - weights[v];
    weights[v] = weight;
  }
  void set_total(int64_t total) { total_ = total; }
  void restore() {
    changed_ = false;
    total_ = specvis::weigh(row_, V_).weight;
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

// The weights of x's first `count` neighbors become 0.
void clear_neighbors(const Request& request, Rest& rest, int64_t x, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = request.neighbors(x, j);
    if (id >= 0 && id < request.V) rest.set(id, 0);
  }
}

// `draft` spares x's first `count` neighbors once: their weights' bits are inverted, which subtract() undoes.
void spare_neighbors(const Request& request, int64_t* draft, int64_t x, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = request.neighbors(x, j);
    if (id >= 0 && id < request.V && draft[id] >= 0) draft[id] = ~draft[id];
  }
}

// Conversions of whole numbers below 2^62, and of numbers below 2^55, in operations that vectorize.
inline double as_double(int64_t x) {
  return static_cast<double>(static_cast<int32_t>(x >> 31)) * 2147483648.0 +
         static_cast<double>(static_cast<int32_t>(x & 0x7fffffff));
}
inline int64_t as_int64(double x) {
  const int32_t high = static_cast<int32_t>(x / 16777216.0);
  return (int64_t{high} << 24) + static_cast<int32_t>(x - static_cast<double>(high) * 16777216.0);
}

// What a sampled proposal leaves of the weights; returns their sum. The draft's inverted bits are undone.
WIDEST_VECTORS int64_t subtract(int64_t* weights, int64_t V, double total, int64_t* draft, double draft_total,
                                double slack) {
  const double unit = 1 / total, draft_unit = 1 / draft_total;
  int64_t sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    const bool spared = draft[v] < 0;
    draft[v] = spared ? ~draft[v] : draft[v];
    const double drafted = spared ? 0.0 : as_double(draft[v]);
    weights[v] = as_int64(
        specvis::residual_weight(as_double(weights[v]), unit, drafted, draft_unit, slack));
    sum += weights[v];
  }
  return sum;
}

// What the rejection of x leaves of the target.
void reject(const Request& request, Rest& rest, int64_t* draft, const Candidate& candidate, int64_t x,
            int64_t kept) {
  const int64_t all = request.neighbors.columns();
  const double slack = specvis::slack_of(candidate.omega);
  if (!candidate.sampled) {
    rest.set(x, request.residual == Residual::optimal
                    ? static_cast<int64_t>(slack * static_cast<double>(candidate.own)) : 0);
    if (request.residual == Residual::relaxed) clear_neighbors(request, rest, x, kept);
    if (request.residual == Residual::released && kept > 0) clear_neighbors(request, rest, x, all);
    return;
  }
  if (request.residual == Residual::relaxed) {
    clear_neighbors(request, rest, x, kept);
    rest.set(x, candidate.rho);
  }
  if (request.residual == Residual::released && kept > 0) spare_neighbors(request, draft, x, all);
  rest.set_total(subtract(rest.copy(), request.V, static_cast<double>(candidate.total), draft,
                          static_cast<double>(candidate.draft_total),
                          request.residual == Residual::optimal ? slack : 0.0));
}

void walk(const Request& request, const Scratch& scratch, Verdict& out) {
  const int64_t V = request.V;
  const bool refused = request.refused();
  if (refused) out.status |= specvis::kInvalidRule;
  int64_t node = 0;
  while (true) {
    const float* row = request.target + node * V;
    const Total whole = specvis::weigh(row, V);
    if (!whole.valid) {
      out.status |= specvis::kInvalidRow;
      return;
    }
    Rest rest(row, V, whole.weight, scratch.weights.get());

    int64_t child = refused || out.accepted == request.P ? -1 : request.first_child[node];
    int64_t* draft = scratch.draft.get();
    int64_t draft_total = 0;
    const bool sampled = child >= 0 && request.draft && request.draft_row[node] >= 0;
    if (sampled) {
      const int64_t from = request.draft_row[node];
      Total drafts = {0, false};
      if (from < request.M) drafts = specvis::weigh(request.draft + from * V, V, draft);
      if (!drafts.valid) {
        out.status |= from < request.M ? specvis::kInvalidRow : specvis::kInvalidTree;
        child = -1;
      }
      draft_total = drafts.weight;
    }

    int64_t previous = node, next = -1;
    double reach = 1;
    for (; child >= 0; previous = child, child = request.next_sibling[child]) {
      if (!request.sound(child, previous)) {
        out.status |= specvis::kInvalidTree;
        break;
      }
      if (sampled && draft_total == 0) continue;
      const int64_t x = request.tokens[child];
      const int64_t own = rest(x);
      const Kept kept = specvis::kept_prefix(rest, V, request.neighbors, request.columns, x,
                                             request.budget(own, rest.total()));
      const Candidate candidate = {sampled, own, own + kept.mass, rest.total(), sampled ? draft[x] : 0,
                                   draft_total, request.omega ? request.omega[out.accepted] : 1.0};
      const double probability = candidate.probability(false);
      out.excess += reach * candidate.excess();
      reach *= 1 - probability;
      if (candidate.accepted(request.uniforms[child])) {
        next = child;
        break;
      }
      reject(request, rest, draft, candidate, x, kept.count);
      if (sampled) {
        draft_total -= draft[x];
        draft[x] = 0;
      }
      if (rest.total() == 0) {
        out.status |= specvis::kEmptyResidual;
        rest.restore();
      }
    }
    if (next < 0) {
      out.next_token = rest.draw(request.uniforms[0]);
      return;
    }
    out.path[out.accepted++] = static_cast<int32_t>(next);
    node = next;
  }
}

// A greedy request: nodes in order, each judging its chain of children.
void judge(const Request& request, const Scratch& scratch, Verdict& out) {
  const int64_t N = request.N, V = request.V;
  int32_t *depth = scratch.depth.get(), *parent = scratch.parent.get();
  int32_t* departures = scratch.departures.get();
  for (int64_t n = 0; n < N; ++n) depth[n] = -1;
  depth[0] = departures[0] = 0;

  int64_t best = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (depth[n] > depth[best]) best = n;
    if (depth[n] < 0 || depth[n] >= request.P || request.first_child[n] < 0) continue;
    const float* row = request.target + n * V;
    const Total whole = specvis::weigh(row, V);
    if (!whole.valid) continue;
    const auto weight = [row](int64_t v) { return to_fixed(row[v]); };
    const int64_t top = specvis::argmax(row, V);
    int64_t previous = n;
    for (int64_t child = request.first_child[n]; child >= 0;
         previous = child, child = request.next_sibling[child]) {
      if (!request.sound(child, previous)) {
        out.status |= specvis::kInvalidTree;
        break;
      }
      const int64_t x = request.tokens[child], own = weight(x);
      const Kept kept = specvis::kept_prefix(weight, V, request.neighbors, request.columns, x,
                                             request.budget(own, whole.weight));
      if (!specvis::is_argmax(x, own + kept.mass, top, weight(top))) continue;
      depth[child] = depth[n] + 1;
      parent[child] = static_cast<int32_t>(n);
      departures[child] = departures[n] + (x != top);
    }
  }
  out.accepted = depth[best];
  out.excess = departures[best];
  const float* row = request.target + best * V;
  if (specvis::weigh(row, V).valid) {
    out.next_token = specvis::argmax(row, V);
  } else {
    out.status |= specvis::kInvalidRow;
  }
  for (int64_t d = out.accepted; d > 0; --d) {
    out.path[d - 1] = static_cast<int32_t>(best);
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
    const std::optional<Tensor>& cutoff,       // (B)
    const std::optional<Tensor>& omega,        // (B, P)
    const std::optional<Tensor>& greedy,       // (B)
    std::string kind, int64_t offset, std::string residual, int64_t P) {
  const int64_t B = target_probs.size(0), N = target_probs.size(1), V = target_probs.size(2);
  Tensor path = torch::stable::new_empty(tokens, {B, P}, ScalarType::Int);
  Tensor accepted = torch::stable::new_empty(tokens, {B}, ScalarType::Int);
  Tensor next_token = torch::stable::new_empty(tokens, {B});
  Tensor excess = torch::stable::new_empty(target_probs, {B});
  Tensor status = torch::stable::new_empty(tokens, {B}, ScalarType::Int);

  Request first = {N, V, draft_probs ? draft_probs->size(1) : 0, P,
                   target_probs.const_data_ptr<float>(), tokens.const_data_ptr<int64_t>(),
                   first_child.const_data_ptr<int32_t>(), next_sibling.const_data_ptr<int32_t>(),
                   uniforms.const_data_ptr<float>(), data<float>(draft_probs), data<int32_t>(draft_row),
                   data<float>(omega), {}, 0, 0, specvis::cutoff_named(kind),
                   specvis::residual_named(residual)};
  if (neighbors) {
    first.neighbors = specvis::Neighbors(
        neighbors->const_data_ptr(), neighbors->scalar_type() == ScalarType::UInt16, neighbors->size(0),
        neighbors->size(1), offset);
    first.columns = neighbors->size(1) - (first.residual == Residual::released);
  }
  const float* cutoffs = data<float>(cutoff);
  const bool* is_greedy = data<bool>(greedy);
  int32_t* path_out = path.mutable_data_ptr<int32_t>();
  int32_t* accepted_out = accepted.mutable_data_ptr<int32_t>();
  int64_t* next_out = next_token.mutable_data_ptr<int64_t>();
  float* excess_out = excess.mutable_data_ptr<float>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  torch::stable::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.weights.reset(new int64_t[V]);
    if (draft_probs) scratch.draft.reset(new int64_t[V]);
    if (greedy) {
      scratch.depth.reset(new int32_t[N]);
      scratch.parent.reset(new int32_t[N]);
      scratch.departures.reset(new int32_t[N]);
    }
    for (int64_t b = begin; b < end; ++b) {
      Request request = first;
      request.target += b * N * V;
      request.tokens += b * N;
      request.first_child += b * N;
      request.next_sibling += b * N;
      request.uniforms += b * N;
      if (request.draft) {
        request.draft += b * request.M * V;
        request.draft_row += b * N;
      }
      if (request.omega) request.omega += b * P;
      if (cutoffs) request.cutoff = cutoffs[b];

      Verdict out = {path_out + b * P};
      for (int64_t d = 0; d < P; ++d) out.path[d] = -1;
      if (is_greedy && is_greedy[b]) {
        judge(request, scratch, out);
      } else {
        walk(request, scratch, out);
      }
      accepted_out[b] = out.accepted;
      next_out[b] = out.next_token;
      excess_out[b] = static_cast<float>(out.excess);
      status_out[b] = out.status;
    }
  });
  return {path, accepted, next_token, excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("verify_tree", TORCH_BOX(&verify_tree_cpu)); }
