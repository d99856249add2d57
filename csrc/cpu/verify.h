// How a request's tree is verified on the CPU, for verify_tree, verify_chain and verify_logits: from the root
// downwards. These ops pass classes that say what a row is, and how a rejection changes it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "../shared/params.h"
#include "rows.h"

namespace specvis {

// One request of a batch: its slices of the arrays. Without links it is a chain: node n's only child is n + 1, whose
// draft row is n, down to the last node at depth N - 1.
struct VerifyRequest : VerifyParams {
  int64_t num_considered = 0;         // how many neighbors of a token the cutoff looks at; 0 without neighbors
  const int64_t* id_range = nullptr;  // (N, 2): each node's ids; null: then [first_id, last_id) for all nodes
  int64_t first_id = 0, last_id;      // a child's token outside of its parent's ids keeps no neighbors
  const int64_t* bonus = nullptr;     // unless null, node N - 1 has no row: this token follows it

  // Request b. Of a chain, the rest is to be set by its own sizes.
  VerifyRequest(const VerifyParams& batch, int64_t b) : VerifyParams(batch), last_id(batch.V) {
    if (neighbors.k() > 0) num_considered = neighbors.k() - (residual == ResidualRule::released);
    if (delta) delta += b;
    if (!first_child) return;
    tokens += b * N;
    first_child += b * N;
    next_sibling += b * N;
    if (uniforms) uniforms += b * N;
    if (draft_probs) {
      draft_probs += b * num_draft_rows * V;
      draft_row += b * N;
    }
    if (omega) omega += b * max_depth;
  }

  // The last node of a chain has none either; its depth says so.
  int64_t child_of(int64_t node) const { return first_child ? first_child[node] : node + 1; }
  int64_t sibling_of(int64_t node) const { return next_sibling ? next_sibling[node] : -1; }
  int64_t draft_row_of(int64_t node) const { return draft_row ? draft_row[node] : node; }
  double omega_at(int64_t depth) const { return omega ? omega[first_child ? depth : 0] : 1.0; }
  bool ends_in_bonus(int64_t node) const { return bonus && node == N - 1; }
  // Is `child` a later node than `previous`, with a token in the vocabulary?
  bool is_valid(int64_t child, int64_t previous) const {
    return child > previous && child < N && tokens[child] >= 0 && tokens[child] < V;
  }
  Budget budget(int64_t token_mass, int64_t total) const {
    return Budget(cutoff, delta ? *delta : 0.f, token_mass, total);
  }
  bool is_undefined() const {
    for (int64_t d = 0; omega && d < max_depth; ++d) {
      if (specvis::is_undefined(omega_at(d), num_considered > 0, residual)) return true;
    }
    return false;
  }
  // How many neighbors of x the cutoff looks at where x is tried as a child of `node`.
  int64_t num_considered_at(int64_t node, int64_t x) const {
    const int64_t first = id_range ? id_range[2 * node] : first_id, last = id_range ? id_range[2 * node + 1] : last_id;
    return neighbors.has(x) && x >= first && x < last ? num_considered : 0;
  }
};

struct VerifyResult {
  int32_t* accepted_nodes;  // (P), filled with -1
  int32_t num_accepted = 0;
  int64_t next_token = 0;
  double tv_excess = 0;
  int32_t status = 0;

  void write(const VerifyParams& batch, int64_t b) const {
    batch.num_accepted[b] = num_accepted;
    batch.next_token[b] = next_token;
    batch.tv_excess[b] = static_cast<float>(tv_excess);
    batch.status[b] = status;
  }
};

// The result of request b of a batch of trees, with nothing accepted yet.
inline VerifyResult new_result(const VerifyParams& batch, int64_t b) {
  VerifyResult result = {batch.accepted_nodes + b * batch.max_depth};
  std::fill_n(result.accepted_nodes, batch.max_depth, -1);
  return result;
}

// Scratch memory of one thread for rows of V and trees of N. Nothing is filled.
struct Scratch {
  std::unique_ptr<int64_t[]> fixed_probs, draft;     // (V)
  std::unique_ptr<int32_t[]> depth, parent, argmax;  // (N)
  std::unique_ptr<int32_t[]> num_non_argmax;         // (N)

  void allocate_nodes(int64_t N) {
    for (auto* array : {&depth, &parent, &argmax, &num_non_argmax}) array->reset(new int32_t[N]);
  }
};

// The residual of the target at one node, and the draft row of its children. It is the row of probabilities until a
// rejection changes it; then it is a copy in fixed point.
class DenseResidual {
 public:
  DenseResidual(const float* row, int64_t V, int64_t total, Scratch& scratch)
      : row_(row), V_(V), total_(total), fixed_probs_(scratch.fixed_probs.get()), draft_(scratch.draft.get()) {}

  int64_t total() const { return total_; }
  int64_t operator()(int64_t v) const { return changed_ ? fixed_probs_[v] : to_fixed_point(row_[v]); }
  void set(int64_t v, int64_t mass) {
    int64_t* fixed_probs = copy();
    total_ += mass - fixed_probs[v];
    fixed_probs[v] = mass;
  }
  void restore() {
    changed_ = false;
    total_ = sum_row(row_, V_).mass;
  }
  void fill(int64_t mass) {
    changed_ = true;
    std::fill_n(fixed_probs_, V_, mass);
    total_ = V_ * mass;
  }
  int64_t draw(float uniform) const {
    return changed_ ? specvis::draw(fixed_probs_, V_, total_, uniform) : specvis::draw(row_, V_, total_, uniform);
  }

  // The neighbors among x's first `count` that fit the budget.
  NeighborPrefix prefix(const Neighbors& neighbors, int64_t x, int64_t count, const Budget& budget) const {
    if (count == 0) return {0, 0};
    const auto changed = [fixed_probs = fixed_probs_](int64_t v) { return fixed_probs[v]; };
    const auto unchanged = [row = row_](int64_t v) { return to_fixed_point(row[v]); };
    return changed_ ? neighbor_prefix(changed, V_, neighbors, count, x, budget)
                    : neighbor_prefix(unchanged, V_, neighbors, count, x, budget);
  }
  // Sets the residual of x's first `count` neighbors to 0.
  void clear_neighbors(const Neighbors& neighbors, int64_t x, int64_t count) {
    if (count == 0) return;
    int64_t* const fixed_probs = copy();
    int64_t cleared = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t id = neighbors(x, j);
      if (id < 0 || id >= V_) continue;
      cleared += fixed_probs[id];
      fixed_probs[id] = 0;
    }
    total_ -= cleared;
  }

  Total read_draft(const float* row) { return sum_row(row, V_, draft_); }
  int64_t draft_mass(int64_t v) const { return draft_[v]; }
  void remove_from_draft(int64_t v) { draft_[v] = 0; }
  // The next subtract() will take nothing from x's first `count` neighbors. The bits of their draft masses are inverted
  // as a mark, which it removes.
  void protect_neighbors(const Neighbors& neighbors, int64_t x, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t id = neighbors(x, j);
      if (id >= 0 && id < V_ && draft_[id] >= 0) draft_[id] = ~draft_[id];
    }
  }
  void subtract(const Candidate& candidate, double slack);

 private:
  int64_t* copy() {
    if (!changed_) sum_row(row_, V_, fixed_probs_);
    changed_ = true;
    return fixed_probs_;
  }

  const float* row_;
  int64_t V_, total_;
  int64_t *fixed_probs_, *draft_;
  bool changed_ = false;
};

// Updates the residual after the rejection of x; the cutoff had kept num_kept of its neighbors. The rule "released" is
// the rule of LANTERN's released code: as soon as one neighbor was kept, it clears or protects all neighbors of x in
// the table.
template <class Residual>
void reject(const VerifyRequest& request, Residual& residual, const Candidate& candidate, int64_t x, int64_t num_kept) {
  const ResidualRule rule = request.residual;
  const int64_t num_treated = rule == ResidualRule::relaxed                    ? num_kept
                              : rule == ResidualRule::released && num_kept > 0 ? request.neighbors.k()
                                                                               : 0;
  const double slack = slack_of(candidate.omega);
  if (!candidate.sampled) {
    residual.set(
        x, rule == ResidualRule::optimal ? static_cast<int64_t>(slack * static_cast<double>(candidate.token_mass)) : 0);
    residual.clear_neighbors(request.neighbors, x, num_treated);
    return;
  }
  if (rule == ResidualRule::relaxed) {
    residual.clear_neighbors(request.neighbors, x, num_treated);
    residual.set(x, candidate.relaxed_mass);
  }
  if (rule == ResidualRule::released) residual.protect_neighbors(request.neighbors, x, num_treated);
  residual.subtract(candidate, rule == ResidualRule::optimal ? slack : 0.0);
}

// Tries the children of a node against the residual of its row. Returns the one that was accepted; or -1, and then
// out.next_token is drawn.
template <class Residual>
int64_t try_children(const VerifyRequest& request, int64_t node, bool is_leaf, Residual& residual, VerifyResult& out) {
  int64_t child = is_leaf ? -1 : request.child_of(node);
  int64_t draft_total = 0;
  const bool sampled = child >= 0 && request.draft_probs && request.draft_row_of(node) >= 0;
  if (sampled) {
    const int64_t from = request.draft_row_of(node);
    Total draft_row_sum = {0, false};
    if (from < request.num_draft_rows) draft_row_sum = residual.read_draft(request.draft_probs + from * request.V);
    if (!draft_row_sum.valid) {
      out.status |= from < request.num_draft_rows ? kInvalidDraft : kInvalidTree;
      child = -1;
    }
    draft_total = draft_row_sum.mass;
  }

  double reach_prob = 1;
  for (int64_t previous = node; child >= 0; previous = child, child = request.sibling_of(child)) {
    if (!request.is_valid(child, previous)) {
      out.status |= kInvalidTree;
      break;
    }
    const int64_t x = request.tokens[child], draft_mass = sampled ? residual.draft_mass(x) : 0;
    if (sampled && draft_mass == 0) {  // not drawn from the row; if that is used up, it is known to be none
      if (draft_total > 0) out.status |= kInvalidDraft;
      continue;
    }
    const int64_t token_mass = residual(x);
    const NeighborPrefix prefix = residual.prefix(request.neighbors, x, request.num_considered_at(node, x),
                                                  request.budget(token_mass, residual.total()));
    const Candidate candidate = {sampled,    token_mass,  token_mass + prefix.mass,          residual.total(),
                                 draft_mass, draft_total, request.omega_at(out.num_accepted)};
    const double accept_prob = candidate.accept_prob(false);
    out.tv_excess += reach_prob * candidate.tv_excess();
    reach_prob *= 1 - accept_prob;
    if (candidate.accepts(request.uniforms[child])) return child;
    reject(request, residual, candidate, x, prefix.num_kept);
    if (sampled) {
      draft_total -= draft_mass;
      residual.remove_from_draft(x);
    }
    if (residual.total() == 0) {
      out.status |= kEmptyResidual;
      if (request.empty == Empty::target) {
        residual.restore();
      } else {
        residual.fill(uniform_mass(request.V));
      }
    }
  }
  out.next_token = residual.draw(request.uniforms[0]);
  return -1;
}

// A request that samples. rows.visit(node, f) is f(residual of the node's row), or -1 with a bit of the status if the
// row is invalid.
template <class Rows>
void verify_sampled(const VerifyRequest& request, Rows& rows, VerifyResult& out) {
  const bool is_undefined = request.is_undefined();
  if (is_undefined) out.status |= kInvalidRule;
  for (int64_t node = 0; node >= 0;) {
    if (request.ends_in_bonus(node)) {
      out.next_token = *request.bonus;
      return;
    }
    const bool is_leaf = is_undefined || out.num_accepted == request.max_depth;
    const int64_t next = rows.visit(
        node, [&](auto& residual) { return try_children(request, node, is_leaf, residual, out); }, out.status);
    if (next >= 0) out.accepted_nodes[out.num_accepted++] = static_cast<int32_t>(next);
    node = next;
  }
}

// A greedy request: the nodes in order. Each accepted node verifies the chain of its children. rows.probs(node, total)
// is the node's row of probabilities, or null if it is invalid.
template <class Rows>
void verify_greedy(const VerifyRequest& request, Rows& rows, const Scratch& scratch, VerifyResult& out) {
  constexpr int32_t kUnread = -1, kInvalid = -2;  // these are no argmaxes
  const int64_t N = request.N, V = request.V;
  int32_t *depth = scratch.depth.get(), *parent = scratch.parent.get(), *argmaxes = scratch.argmax.get();
  int32_t* num_non_argmax = scratch.num_non_argmax.get();
  for (int64_t n = 0; n < N; ++n) depth[n] = argmaxes[n] = -1;
  depth[0] = num_non_argmax[0] = 0;

  int64_t total = 0, best = 0;
  const auto read = [&](int64_t n) {
    const float* const row = rows.probs(n, total);
    argmaxes[n] = row ? static_cast<int32_t>(argmax(row, V)) : kInvalid;
    return row;
  };
  for (int64_t n = 0; n < N; ++n) {
    if (depth[n] > depth[best]) best = n;
    if (depth[n] < 0 || depth[n] >= request.max_depth || request.child_of(n) < 0) continue;
    const float* const row = read(n);
    if (!row) continue;
    const auto mass = [row](int64_t v) { return to_fixed_point(row[v]); };
    int64_t previous = n;
    for (int64_t child = request.child_of(n); child >= 0; previous = child, child = request.sibling_of(child)) {
      if (!request.is_valid(child, previous)) {
        out.status |= kInvalidTree;
        break;
      }
      const int64_t x = request.tokens[child], token_mass = mass(x);
      const NeighborPrefix prefix = neighbor_prefix(mass, V, request.neighbors, request.num_considered_at(n, x), x,
                                                    request.budget(token_mass, total));
      if (!is_argmax(x, token_mass + prefix.mass, argmaxes[n], mass(argmaxes[n]))) continue;
      depth[child] = depth[n] + 1;
      parent[child] = static_cast<int32_t>(n);
      num_non_argmax[child] = num_non_argmax[n] + (x != argmaxes[n]);
    }
  }
  out.num_accepted = depth[best];
  out.tv_excess = num_non_argmax[best];
  const bool has_row = !request.ends_in_bonus(best);
  if (has_row && argmaxes[best] == kUnread) read(best);
  if (!has_row) {
    out.next_token = *request.bonus;
  } else if (argmaxes[best] == kInvalid) {
    out.status |= kInvalidRow;
  } else {
    out.next_token = argmaxes[best];
  }
  for (int64_t d = out.num_accepted; d > 0; --d) {
    out.accepted_nodes[d - 1] = static_cast<int32_t>(best);
    best = parent[best];
  }
}

// The target's rows of one request where they are probabilities.
struct ProbRows {
  const float* target;  // (N, V)
  int64_t V;
  Scratch& scratch;

  const float* probs(int64_t node, int64_t& total) const {
    const Total sum = sum_row(target + node * V, V);
    total = sum.mass;
    return sum.valid ? target + node * V : nullptr;
  }
  template <class F>
  int64_t visit(int64_t node, F f, int32_t& status) const {
    int64_t total;
    const float* const row = probs(node, total);
    if (!row) {
      status |= kInvalidRow;
      return -1;
    }
    DenseResidual residual(row, V, total, scratch);
    return f(residual);
  }
  void verify(const VerifyRequest& request, bool greedy, VerifyResult& out) const {
    if (greedy) {
      verify_greedy(request, *this, scratch, out);
    } else {
      verify_sampled(request, *this, out);
    }
  }
};

}  // namespace specvis
