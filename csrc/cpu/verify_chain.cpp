// verify_chain on the CPU: one request per task. By the strict rule it is a tree in which node n's only child is n + 1,
// see verify.h; the other rules are in shared/chain_rules.h.
#include <array>
#include <utility>
#include <vector>

#include "../shared/chain_rules.h"
#include "../shared/floats.h"
#include "team.h"
#include "verify.h"

namespace specvis {
namespace {

// A request's rows for chain_rules.h, one at a time.
class Rows : public ChainRequest {
 public:
  Rows(const VerifyChain& batch, int64_t b) : ChainRequest(batch, b) {}

  bool is_first_thread() const { return true; }
  int32_t read(int64_t i) {
    row_ = i;
    const float* const of_draft = draft_row(i);
    return check(i, sum_row(target_row(i), batch.V), of_draft ? sum_row(of_draft, batch.V) : Total{0, true});
  }
  int64_t argmax() const { return specvis::argmax(target_row(row_), batch.V); }
  float entropy() const {  // of the three likeliest tokens
    std::array<int64_t, 3> largest = {0, 0, 0};
    const float* const row = target_row(row_);
    for (int64_t v = 0; v < batch.V; ++v) {
      int64_t mass = to_fixed_point(row[v]);
      for (int64_t& other : largest) {
        if (mass > other) std::swap(mass, other);
      }
    }
    float entropy = 0;
    for (const int64_t mass : largest) {
      entropy += entropy_of(static_cast<double>(mass), static_cast<double>(draft.total));
    }
    return entropy;
  }
  // A token from the row, or (is_rejected) from max(p P - Q, 0), and the mass of what it is drawn from; of P - Q / p.
  Drawn draw(bool is_rejected, double p, int64_t* total) {
    const float* const row = target_row(row_);
    *total = draft.total;
    if (!is_rejected) return {specvis::draw(row, batch.V, *total, uniform(0)), true};
    if (!draft.sampled) {
      masses_.resize(batch.V);
      sum_row(row, batch.V, masses_.data());
      masses_[token(row_)] = 0;
      *total -= draft.token_mass;
      return {*total > 0 ? specvis::draw(masses_.data(), batch.V, *total, uniform(0)) : 0, true};
    }
    const ResidualRow residual = {row, draft_row(row_), 1 / static_cast<double>(draft.total),
                                  1 / (p * static_cast<double>(draft.draft_total)), 0.0};
    sums_.resize((batch.V + kResidualBlock - 1) / kResidualBlock);
    const double sum = sum_blocks(residual, batch.V, sums_.data());
    *total = static_cast<int64_t>(sum);
    return {sum > 0 ? specvis::draw(residual, sums_.data(), sum, uniform(0)) : 0, true};
  }

 private:
  int64_t row_ = 0;
  std::vector<int64_t> masses_;
  std::vector<double> sums_;
};

void verify_by_rule(const VerifyChain& batch, int64_t b, VerifyResult& result) {
  Rows rows(batch, b);
  std::vector<double> excess(rows.num_drafts);
  const ChainResult out = verify_by_rule(rows, excess.data());
  result.num_accepted = static_cast<int32_t>(out.num_accepted);
  result.next_token = out.next.token;
  result.tv_excess = out.tv_excess;
  result.status = out.status;
}

}  // namespace

void verify_chain_cpu(const VerifyChain& batch) {
  const int64_t B = batch.B, D = batch.D, V = batch.V;
  const Integers ends = batch.ends;
  int64_t num_valid = 0, before = 0;  // requests whose drafts are where they must be
  for (; num_valid < B && ends[num_valid] >= before && ends[num_valid] <= D; ++num_valid) before = ends[num_valid];

  parallel_for(B, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.fixed_probs.reset(new int64_t[V]);
    if (batch.draft_probs) scratch.draft.reset(new int64_t[V]);
    std::vector<int64_t> tokens;
    std::vector<int32_t> accepted_nodes;
    for (int64_t b = begin; b < end; ++b) {
      VerifyResult result = {};
      if (b < num_valid && batch.rule != ChainRule::strict) {
        verify_by_rule(batch, b, result);
      } else if (b < num_valid) {
        VerifyRequest request(batch, b);
        const int64_t first = b > 0 ? ends[b - 1] : 0;
        request.num_draft_rows = request.max_depth = ends[b] - first;
        request.N = request.max_depth + 1;
        tokens.resize(request.N);
        for (int64_t n = 1; n < request.N; ++n) tokens[n] = batch.draft_tokens[first + n - 1];
        request.tokens = tokens.data();
        request.uniforms += first + b;
        if (request.draft_probs) request.draft_probs += first * V;
        if (request.omega) request.omega += b;
        if (batch.bonus_tokens) request.bonus = batch.bonus_tokens + b;
        const bool is_greedy = batch.greedy && batch.greedy[b];
        if (is_greedy) scratch.allocate_nodes(request.N);
        accepted_nodes.resize(request.N);
        result.accepted_nodes = accepted_nodes.data();
        const ProbRows rows = {batch.target_probs + (request.bonus ? first : first + b) * V, V, scratch};
        rows.verify(request, is_greedy, result);
      } else {
        result.status = kInvalidTree;
      }
      result.write(batch, b);
    }
  });
}

}  // namespace specvis
