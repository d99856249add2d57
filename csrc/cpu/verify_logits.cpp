// verify_logits on the CPU: one request per task. A row is read, filtered and normalized when verification comes to it.
// Where filters left few candidates, their masses are scattered into a row that is zero elsewhere, and removed after.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "draws.h"
#include "filters.h"
#include "team.h"
#include "verify.h"

namespace {

using specvis::Budget;
using specvis::Candidate;
using specvis::FilteredRow;
using specvis::Filters;
using specvis::kInvalidRow;
using specvis::NeighborPrefix;
using specvis::Neighbors;
using specvis::Request;
using specvis::ResidualRule;
using specvis::Scratch;
using specvis::to_fixed_point;
using specvis::Total;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

WIDEST_VECTORS void divide(const float* x, int64_t n, float divisor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] / divisor;
}

WIDEST_VECTORS void masses_of(const float* e, int64_t n, float total, int64_t* masses) {
  for (int64_t i = 0; i < n; ++i) masses[i] = to_fixed_point(e[i] / total);
}

// Writes the numbers of those of n neighbors that are candidates, and returns how many they are.
template <class Code>
int64_t find_candidates(const Code* codes, int64_t n, const uint8_t* is_candidate, uint64_t V, int64_t offset,
                        int32_t* found) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t id = specvis::id_of_code(codes[j], offset);  // a negative one is large
    found[count] = static_cast<int32_t>(j);
    count += is_candidate[id < V ? id : V];
  }
  return count;
}

// The residual of a row of few candidates, and the draft row of its children. It has the methods of DenseResidual. Of a
// token's neighbors few are candidates, and only these are looked at.
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
    for (int64_t i = 0; i < n; ++i) {  // those without mass are none any more
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
    int64_t remaining = specvis::draw_threshold(uniform, total_);
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
      prefix.num_kept = j;  // those before it without mass fit
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
    return specvis::sum_row(row, V_);
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
    for (const int32_t id : ids_) {  // nothing is left of what had no mass
      const int64_t mass = masses_[id] < 0 ? ~masses_[id] : masses_[id];
      const int64_t draft_mass = masses_[id] < 0 ? 0 : to_fixed_point(draft_[id]);
      masses_[id] = static_cast<int64_t>(
          specvis::residual_mass(static_cast<double>(mass), unit, static_cast<double>(draft_mass), draft_unit, slack));
      total_ += masses_[id];
    }
  }

 private:
  // The next subtract() will take nothing from v. The bits of its mass are inverted as a mark, which it removes.
  void protect(int64_t v) {
    if (masses_[v] > 0) masses_[v] = ~masses_[v];
  }
  // f(j, id) of those of x's first `count` neighbors that are candidates, the j-th first, until it is false.
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
  std::vector<int64_t> masses_;        // (V): what is left of the candidates; 0 elsewhere
  std::vector<uint8_t> is_candidate_;  // (V + 1), the last is 0
  std::vector<int32_t> ids_;           // of the candidates, ascending
  std::vector<int64_t> row_masses_;    // theirs before any rejection
  int64_t total_ = 0, row_total_ = 0;
  const float* draft_ = nullptr;
  std::vector<int64_t> removed_;  // tokens of earlier siblings
};

// What one thread needs for rows of V. It is kept between calls.
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

// The logits of one request.
template <class T>
struct Rows {
  const Request& request;
  const T *logits, *uncond;  // (N, V); uncond may be null
  float guidance, temperature;
  int32_t top_k;
  float top_p;
  bool p_first;
  RowScratch& scratch;

  // Reads and filters a row. Returns whether it is valid.
  bool read(int64_t node) const {
    const int64_t V = request.V, first = request.first(node), last = request.last(node);
    if (!(first >= 0 && first < last && last <= V)) return false;
    FilteredRow& row = scratch.row;
    if (!row.read(logits + node * V, uncond ? uncond + node * V : nullptr, guidance, temperature, first, last)) {
      return false;
    }
    row.apply(Filters::of(temperature, top_k, top_p, last - first, p_first));
    return true;
  }
  // The probabilities of the row that was read, of which all ids are candidates.
  const float* dense_probs(int64_t node) const {
    const int64_t first = request.first(node), last = request.last(node);
    float* const probs = scratch.probs.get();
    std::fill(probs, probs + first, 0.f);
    divide(scratch.row.exponentials() + first - scratch.row.base(), last - first, scratch.row.total(), probs + first);
    std::fill(probs + last, probs + request.V, 0.f);
    return probs;
  }
  const float* probs(int64_t node, int64_t& total) const {  // of a greedy request: without filters
    if (!read(node)) return nullptr;
    const float* const row = dense_probs(node);
    total = specvis::sum_row(row, request.V).mass;
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
    specvis::DenseResidual residual(row, request.V, specvis::sum_row(row, request.V).mass, scratch.dense);
    return f(residual);
  }
  // The target's own draw at a node, or -1 with a bit of the status.
  int64_t draw(int64_t node, int64_t seed, int64_t position, int32_t& status) const {
    const int64_t V = request.V;
    const specvis::DrawRow settings = {guidance,           temperature, top_k,    top_p, p_first, request.first(node),
                                       request.last(node), seed,        position, 0};
    int64_t token, ahead;
    const int32_t bits = specvis::draw_row(logits + node * V, uncond ? uncond + node * V : nullptr, V, settings,
                                           scratch.row, token, ahead);
    status |= bits;
    return bits ? -1 : token;
  }
};

// Verification by equality.
template <class T>
void verify_draws(const Request& request, const Rows<T>& rows, int64_t seed, const int64_t* positions,
                  specvis::VerifyResult& out) {
  const specvis::Siblings siblings = {request.N, request.tokens, request.next_sibling};
  for (int64_t node = 0;;) {
    const int64_t token = rows.draw(node, seed, positions[node], out.status);
    if (token < 0) return;
    out.next_token = token;
    if (out.num_accepted == request.max_depth) return;
    const int64_t child = siblings.find(token, node, request.first_child[node], &out.status);
    if (child < 0) return;
    out.accepted_nodes[out.num_accepted++] = static_cast<int32_t>(child);
    out.next_token = 0;
    node = child;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_logits_cpu(
    const Tensor& logits,                      // (B, N, V)
    const std::optional<Tensor>& uncond,       // (B, N, V)
    const Tensor& tokens,                      // (B, N)
    const Tensor& first_child,                 // (B, N)
    const Tensor& next_sibling,                // (B, N)
    const std::optional<Tensor>& uniforms,     // (B, N)
    const Tensor& guidance,                    // (B)
    const Tensor& temperature,                 // (B)
    const Tensor& top_k,                       // (B)
    const Tensor& top_p,                       // (B)
    const std::optional<Tensor>& id_range,     // (B, N, 2)
    const std::optional<Tensor>& draft_probs,  // (B, M, V)
    const std::optional<Tensor>& draft_row,    // (B, N)
    const std::optional<Tensor>& neighbors,    // (C, k)
    const std::optional<Tensor>& delta,        // (B)
    const std::optional<Tensor>& omega,        // (B, P)
    const std::optional<Tensor>& seeds,        // (B)
    const std::optional<Tensor>& positions,    // (B, N)
    int64_t first_id, int64_t last_id, std::string filters, std::string cutoff, int64_t offset, std::string residual,
    std::string empty, int64_t max_depth) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  Tensor accepted_nodes = specvis::new_empty(tokens, {B, max_depth}, ScalarType::Int);
  Tensor num_accepted = specvis::new_empty(tokens, {B}, ScalarType::Int);
  Tensor next_token = specvis::new_empty(tokens, {B});
  Tensor tv_excess = specvis::new_empty(guidance, {B});
  Tensor status = specvis::new_empty(tokens, {B}, ScalarType::Int);
  const specvis::VerifyOutputs outputs = {
      accepted_nodes.mutable_data_ptr<int32_t>(), num_accepted.mutable_data_ptr<int32_t>(),
      next_token.mutable_data_ptr<int64_t>(), tv_excess.mutable_data_ptr<float>(), status.mutable_data_ptr<int32_t>()};

  Request request_0 = {N,
                       V,
                       draft_probs ? draft_probs->size(1) : 0,
                       max_depth,
                       tokens.const_data_ptr<int64_t>(),
                       first_child.const_data_ptr<int32_t>(),
                       next_sibling.const_data_ptr<int32_t>(),
                       data<float>(uniforms),
                       data<float>(draft_probs),
                       data<int32_t>(draft_row),
                       data<float>(omega),
                       {},
                       0,
                       0,
                       specvis::cutoff_named(cutoff),
                       specvis::residual_named(residual),
                       specvis::empty_named(empty),
                       data<int64_t>(id_range),
                       first_id,
                       last_id};
  request_0.take_neighbors(neighbors, offset);
  const float *const g = guidance.const_data_ptr<float>(), *const t = temperature.const_data_ptr<float>();
  const int32_t* const k = top_k.const_data_ptr<int32_t>();
  const float* const p = top_p.const_data_ptr<float>();
  const float* const deltas = data<float>(delta);
  const int64_t *const seed = data<int64_t>(seeds), *const position = data<int64_t>(positions);
  const bool p_first = Filters::is_p_first(filters);

  const auto run = [&](auto type) {
    using T = decltype(type);
    const T* const x = static_cast<const T*>(logits.const_data_ptr());
    const T* const u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
    specvis::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
      RowScratch& scratch = RowScratch::of_this_thread(V);
      for (int64_t b = begin; b < end; ++b) {
        const Request request = specvis::request_at(request_0, b, deltas);
        const int64_t at = b * N * V;
        const Rows<T> rows = {request, x + at, u ? u + at : nullptr, g[b], t[b], k[b], p[b], p_first, scratch};
        outputs.write(b, max_depth, [&](specvis::VerifyResult& out) {
          if (seed) {
            verify_draws(request, rows, seed[b], position + b * N, out);
          } else if (t[b] == 0) {
            scratch.dense.allocate_nodes(N);
            specvis::verify_greedy(request, rows, scratch.dense, out);
          } else {
            specvis::verify_sampled(request, rows, out);
          }
        });
      }
    });
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  return {accepted_nodes, num_accepted, next_token, tv_excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("verify_logits", SPECVIS_BOX(verify_logits, &verify_logits_cpu));
}
