// verify_logits on the CPU: one request per task. A row is read, filtered and normalized when verification reaches it.
// Where filters left few candidates, their masses are scattered into a row that is zero elsewhere, and removed after.
#include <algorithm>
#include <numeric>
#include <vector>

#include "draws.h"
#include "filters.h"
#include "team.h"
#include "verify.h"

namespace specvis {
namespace {

WIDEST_VECTORS void masses_of(const float* e, int64_t n, float total, int64_t* masses) {
  for (int64_t i = 0; i < n; ++i) masses[i] = to_fixed_point(e[i] / total);
}

// Writes which of n neighbors are candidates, and returns how many are.
template <class Code>
int64_t find_candidates(const Code* codes, int64_t n, const uint8_t* is_candidate, uint64_t V, int64_t offset,
                        int32_t* found) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t id = id_of_code(codes[j], offset);  // a negative one is large
    found[count] = static_cast<int32_t>(j);
    count += is_candidate[id < V ? id : V];
  }
  return count;
}

// The residual of a row of few candidates, and the draft row of its children. It has the methods of DenseResidual. Few
// of a token's neighbors are candidates, and only these are looked at.
class SparseResidual {
 public:
  // For rows of up to V. The memory is used again for each row.
  explicit SparseResidual(int64_t V) : V_(V), masses_(V, 0), is_candidate_(V + 1, 0) {}

  // Takes the candidates that a row's filters left.
  void fill(const FilteredRow& row) {
    const int64_t n = row.size();
    ids_.resize(n);
    row_masses_.resize(n);
    masses_of(row.exponentials(), n, row.total(), row_masses_.data());
    int64_t size = 0;
    total_ = 0;
    for (int64_t i = 0; i < n; ++i) {  // an id without mass is no candidate any more
      const int64_t mass = row_masses_[i];
      ids_[size] = static_cast<int32_t>(row.id(i));
      row_masses_[size] = mass;
      total_ += mass;
      size += mass > 0;
    }
    ids_.resize(size);
    row_masses_.resize(size);
    for (int64_t i = 0; i < size; ++i) masses_[ids_[i]] = row_masses_[i];
    for (int64_t i = 0; i < size; ++i) is_candidate_[ids_[i]] = 1;
    row_total_ = total_;
  }
  void clear() {
    for (const int32_t id : ids_) masses_[id] = is_candidate_[id] = 0;
  }

  int64_t total() const { return total_; }
  int64_t operator()(int64_t v) const { return masses_[v]; }
  void set(int64_t v, int64_t mass) {
    total_ += mass - masses_[v];
    if (mass > 0 && !is_candidate_[v]) add_candidate(v);
    masses_[v] = mass;
  }
  void restore() {
    for (size_t i = 0; i < ids_.size(); ++i) masses_[ids_[i]] = row_masses_[i];
    total_ = row_total_;
  }
  void fill(int64_t mass) {  // from now on every id is a candidate
    ids_.resize(V_);
    std::iota(ids_.begin(), ids_.end(), 0);
    row_masses_.resize(V_);
    std::fill(masses_.begin(), masses_.end(), mass);
    std::fill(is_candidate_.begin(), is_candidate_.end() - 1, 1);
    total_ = V_ * mass;
  }
  int64_t draw(float uniform) const {
    int64_t remaining = draw_threshold(uniform, total_);
    size_t i = 0;
    while ((remaining -= masses_[ids_[i]]) >= 0) ++i;  // the total is positive, and larger than the threshold
    return ids_[i];
  }

  NeighborPrefix prefix(const Neighbors& neighbors, int64_t x, int64_t count, const Budget& budget) const {
    NeighborPrefix prefix = {0, budget.any ? count : 0};
    find_neighbors(neighbors, x, prefix.num_kept, [&](int64_t j, int64_t id) {
      const int64_t sum = prefix.mass + masses_[id];
      if (budget.fits(sum)) {
        prefix.mass = sum;
        return true;
      }
      prefix.num_kept = j;  // neighbors without mass before it fit
      return false;
    });
    return prefix;
  }
  void clear_neighbors(const Neighbors& neighbors, int64_t x, int64_t count) {
    find_neighbors(neighbors, x, count, [&](int64_t, int64_t id) {
      total_ -= masses_[id];
      masses_[id] = 0;
      return true;
    });
  }
  void protect_neighbors(const Neighbors& neighbors, int64_t x, int64_t count) {
    find_neighbors(neighbors, x, count, [&](int64_t, int64_t id) {
      protect(id);
      return true;
    });
  }

  Total read_draft(const float* row) {
    draft_ = row;
    removed_.clear();
    return sum_row(row, V_);
  }
  int64_t draft_mass(int64_t v) const {
    return std::find(removed_.begin(), removed_.end(), v) == removed_.end() ? to_fixed_point(draft_[v]) : 0;
  }
  void remove_from_draft(int64_t v) { removed_.push_back(v); }
  void subtract(const Candidate& candidate, double slack) {
    const double unit = 1 / static_cast<double>(candidate.total);
    const double draft_unit = 1 / static_cast<double>(candidate.draft_total);
    for (const int64_t v : removed_) protect(v);
    total_ = 0;
    for (const int32_t id : ids_) {  // an id without mass stays without
      const int64_t mass = masses_[id] < 0 ? ~masses_[id] : masses_[id];
      const int64_t draft_mass = masses_[id] < 0 ? 0 : to_fixed_point(draft_[id]);
      masses_[id] = static_cast<int64_t>(
          residual_mass(static_cast<double>(mass), unit, static_cast<double>(draft_mass), draft_unit, slack));
      total_ += masses_[id];
    }
  }

 private:
  // The next subtract() will take nothing from v. The bits of its mass are inverted as a mark, which it removes.
  void protect(int64_t v) {
    if (masses_[v] > 0) masses_[v] = ~masses_[v];
  }
  // Calls f(j, id) for each of x's first `count` neighbors that is a candidate, in their order, until it returns false.
  template <class F>
  void find_neighbors(const Neighbors& neighbors, int64_t x, int64_t count, F f) const {
    constexpr int64_t kBlock = 128;
    int32_t found[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t n = std::min(kBlock, count - begin);
      const int64_t num_found = neighbors.visit_codes(x, begin, [&](const auto* codes) {
        return find_candidates(codes, n, is_candidate_.data(), V_, neighbors.offset(), found);
      });
      for (int64_t i = 0; i < num_found; ++i) {
        if (!f(begin + found[i], neighbors(x, begin + found[i]))) return;
      }
    }
  }
  void add_candidate(int64_t v) {
    is_candidate_[v] = 1;
    const auto at = std::lower_bound(ids_.begin(), ids_.end(), v);
    row_masses_.insert(row_masses_.begin() + (at - ids_.begin()), 0);
    ids_.insert(at, static_cast<int32_t>(v));
  }

  int64_t V_;
  std::vector<int64_t> masses_;        // (V): the remaining mass of candidates; 0 elsewhere
  std::vector<uint8_t> is_candidate_;  // (V + 1), the last is 0
  std::vector<int32_t> ids_;           // the candidates, ascending
  std::vector<int64_t> row_masses_;    // the candidates' masses before any rejection
  int64_t total_ = 0, row_total_ = 0;
  const float* draft_ = nullptr;
  std::vector<int64_t> removed_;  // tokens of earlier siblings
};

// The memory of one thread for rows of V. It is kept between calls.
struct RowScratch {
  explicit RowScratch(int64_t V) : V(V), row(V), sparse(V), probs(new float[V]) {
    dense.fixed_probs.reset(new int64_t[V]);
    dense.draft.reset(new int64_t[V]);
  }
  int64_t V;
  FilteredRow row;
  SparseResidual sparse;
  std::unique_ptr<float[]> probs;  // (V)
  Scratch dense;

  static RowScratch& of_this_thread(int64_t V) {
    thread_local std::unique_ptr<RowScratch> scratch;
    if (!scratch || scratch->V != V) scratch.reset(new RowScratch(V));
    return *scratch;
  }
};

// The logits of request b.
struct Rows {
  const LogitRows& rows;
  int64_t b;
  RowScratch& scratch;

  int64_t row_of(int64_t node) const { return b * rows.N + node; }
  // Reads and filters a row. Returns whether it is valid.
  bool read(int64_t node) const {
    if (!scratch.row.read(rows, row_of(node))) return false;
    scratch.row.apply(Filters(rows, row_of(node)));
    return true;
  }
  // The probabilities of the row that was read, where all ids are candidates.
  const float* dense_probs(int64_t node) const {
    const int64_t first = rows.first(row_of(node)), last = rows.last(row_of(node));
    float* const probs = scratch.probs.get();
    std::fill(probs, probs + first, 0.f);
    divide(scratch.row.exponentials() + first - scratch.row.base(), last - first, scratch.row.total(), probs + first);
    std::fill(probs + last, probs + rows.V, 0.f);
    return probs;
  }
  const float* probs(int64_t node, int64_t& total) const {  // for a greedy request: without filters
    if (!read(node)) return nullptr;
    const float* const row = dense_probs(node);
    total = sum_row(row, rows.V).mass;
    return row;
  }
  template <class F>
  int64_t visit(int64_t node, F f, int32_t& status) const {
    if (!read(node)) {
      status |= kInvalidRow;
      return -1;
    }
    if (scratch.row.is_packed()) {
      scratch.sparse.fill(scratch.row);
      const int64_t next = f(scratch.sparse);
      scratch.sparse.clear();
      return next;
    }
    const float* const row = dense_probs(node);
    DenseResidual residual(row, rows.V, sum_row(row, rows.V).mass, scratch.dense);
    return f(residual);
  }
};

// Verification by equality with the target's own draws.
void verify_draws(const VerifyLogits& batch, const VerifyRequest& request, int64_t b, RowScratch& scratch,
                  VerifyResult& out) {
  const Siblings siblings = {request.N, request.tokens, request.next_sibling};
  for (int64_t node = 0;;) {
    const int64_t r = b * request.N + node;
    int64_t token, ahead;
    const int32_t bits = draw_row(batch.rows, r, batch.seeds[b], batch.positions[r], 0, scratch.row, token, ahead);
    out.status |= bits;
    if (bits) return;
    out.next_token = token;
    if (out.num_accepted == request.max_depth) return;
    const int64_t child = siblings.find(token, node, request.first_child[node], &out.status);
    if (child < 0) return;
    out.accepted_nodes[out.num_accepted++] = static_cast<int32_t>(child);
    out.next_token = 0;
    node = child;
  }
}

}  // namespace

void verify_logits_cpu(const VerifyLogits& batch) {
  const LogitRows& logits = batch.rows;
  parallel_for(batch.B, 1, [&](int64_t begin, int64_t end) {
    RowScratch& scratch = RowScratch::of_this_thread(batch.V);
    for (int64_t b = begin; b < end; ++b) {
      VerifyRequest request(batch, b);
      if (logits.id_range) request.id_range = logits.id_range + 2 * b * batch.N;
      request.first_id = logits.first_id;
      request.last_id = logits.last_id;
      const Rows rows = {logits, b, scratch};
      VerifyResult result = new_result(batch, b);
      if (batch.seeds) {
        verify_draws(batch, request, b, scratch, result);
      } else if (logits.temperature[b] == 0) {
        scratch.dense.allocate_nodes(batch.N);
        verify_greedy(request, rows, scratch.dense, result);
      } else {
        verify_sampled(request, rows, result);
      }
      result.write(batch, b);
    }
  });
}

}  // namespace specvis
