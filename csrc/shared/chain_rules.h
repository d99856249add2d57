// The rules of verify_chain that look at more than one draft: block verification (arXiv:2403.10444) and
// FLy's (arXiv:2511.22972), written once for the CPU and for CUDA. There all threads of a request's team run them.
#pragma once
#include "params.h"

#ifdef __CUDACC__
#define TEAM_DEVICE __device__
#else
#define TEAM_DEVICE
#endif

namespace specvis {

// One request. A class of its backend adds how its rows are read.
struct ChainRequest {
  const VerifyChain& batch;
  int64_t b, first, num_drafts;  // the first draft, and how many there are
  bool greedy;
  Candidate draft = {};  // the one that read() found

  HOST_DEVICE ChainRequest(const VerifyChain& batch, int64_t b)
      : batch(batch), b(b), first(b > 0 ? batch.ends[b - 1] : 0), num_drafts(batch.ends[b] - first),
        greedy(batch.greedy && batch.greedy[b]) {}

  HOST_DEVICE bool ends_in_bonus(int64_t i) const { return batch.bonus_tokens && i == num_drafts; }
  HOST_DEVICE const float* target_row(int64_t i) const {
    return batch.target_probs + (first + i + (batch.bonus_tokens ? 0 : b)) * batch.V;
  }
  HOST_DEVICE const float* draft_row(int64_t i) const {  // or null
    return batch.draft_probs && !greedy && i < num_drafts ? batch.draft_probs + (first + i) * batch.V : nullptr;
  }
  HOST_DEVICE int64_t token(int64_t i) const { return batch.draft_tokens[first + i]; }
  HOST_DEVICE float uniform(int64_t i) const {
    return batch.uniforms[first + b + i];
  }  // 0 draws, i + 1 decides draft i

  // Sets `draft` to draft i, of which rows with these sums were read; the bits say why it cannot be tried.
  HOST_DEVICE int32_t check(int64_t i, const Total& target, const Total& draft_sum) {
    const float* const row = draft_row(i);
    draft = {row != nullptr, 0, 0, target.mass, 0, draft_sum.mass, 1.0};
    if (!target.valid) return kInvalidRow;
    if (i == num_drafts) return 0;
    if (row && !draft_sum.valid) return kInvalidDraft;
    const int64_t x = token(i);
    if (x < 0 || x >= batch.V) return kInvalidTree;
    draft.token_mass = draft.relaxed_mass = to_fixed_point(target_row(i)[x]);
    if (!row) return 0;
    draft.draft_mass = to_fixed_point(row[x]);
    return draft.draft_mass > 0 ? 0 : kInvalidDraft;
  }
};

struct Drawn {
  int64_t token;
  bool is_known;  // to this thread of the team: one of them has the token
};

struct ChainResult {
  int64_t num_accepted = 0;
  Drawn next = {0, false};
  double tv_excess = 0;  // of the team's first thread
  int32_t status = 0;
};

// The token after i drafts whose rows have been read: from the residual of a rejected draft, or from the row.
template <class Rows>
TEAM_DEVICE void end_after(Rows& rows, int64_t i, int32_t bits, bool is_rejected, ChainResult& out) {
  out.num_accepted = i;
  out.status = bits;
  out.next = {0, rows.is_first_thread()};
  if (bits & kInvalidRow) return;
  if (rows.greedy) {
    out.next.token = rows.argmax();
    return;
  }
  for (int64_t total = 0; true; is_rejected = false) {
    out.next = rows.draw(is_rejected, 1.0, &total);
    if (total > 0) return;
    out.status |= kEmptyResidual;
  }
}

// The longest prefix that its own uniform accepts. Prefix i has the ratio p = min(1, p P(x) / Q(x)), and before the
// last one is accepted with probability s / (s + 1 - p), where s is the sum of max(p P - Q, 0) in the rows after it.
template <class Rows>
TEAM_DEVICE ChainResult verify_block(Rows& rows) {
  ChainResult out;
  int32_t found = 0;
  Candidate last = {};  // its omega is the ratio of the drafts before it
  double p = 1;
  for (int64_t i = 0; p * kFixedOne >= 1; ++i) {
    if (rows.ends_in_bonus(i)) {
      if (i == 0 || last.accepts(rows.uniform(i))) out = {i, {rows.batch.bonus_tokens[rows.b], rows.is_first_thread()}};
      break;
    }
    found = rows.read(i);
    const bool is_last = found != 0 || i == rows.num_drafts;
    if (i == 0 || is_last) {
      if (i == 0 || last.accepts(rows.uniform(i))) end_after(rows, i, found, !is_last, out);
    } else {
      int64_t total = 0;
      const Drawn next = rows.draw(true, p, &total);
      const double s = p * (static_cast<double>(total) / kFixedOne);
      if (rows.uniform(i) * (s + (1 - p)) < s) out = {i, next};
    }
    if (is_last) break;
    last = rows.draft;
    last.omega = p;
    p = last.accept_prob(false);
  }
  out.status |= found;
  return out;
}

// The strict rule, but draft i is kept although it is rejected if the entropy of its row's three likeliest tokens
// reaches the threshold and the next `window` drafts are accepted. excess[i] is the probability of that if they are.
template <class Rows>
TEAM_DEVICE ChainResult verify_fly(Rows& rows, int64_t window, double* excess) {
  ChainResult out;
  double tv_excess = 0;
  int64_t num_in_row = 0;  // drafts accepted since the last rejection
  bool is_deferred = false;
  for (int64_t i = 0;; ++i) {
    if (rows.ends_in_bonus(i)) {
      out = {i, {rows.batch.bonus_tokens[rows.b], rows.is_first_thread()}};
      break;
    }
    const int32_t bits = rows.read(i);
    const bool is_tried = bits == 0 && i < rows.num_drafts;
    if (!is_tried && is_deferred) break;
    bool is_accepted = false, may_defer = false;
    if (is_tried) {
      is_accepted = rows.greedy ? rows.argmax() == rows.token(i) : rows.draft.accepts(rows.uniform(i + 1));
      const double accept_prob = rows.greedy ? is_accepted : rows.draft.accept_prob(false);
      may_defer = !is_deferred && rows.draft.token_mass > 0 && i + window < rows.num_drafts &&
                  (!is_accepted || accept_prob < 1) && rows.entropy() >= rows.batch.entropy;
      if (rows.is_first_thread()) excess[i] = may_defer ? 1 - accept_prob : 0;
    }
    if (is_accepted) {
      ++num_in_row;
      if (num_in_row >= window && i >= window && rows.is_first_thread()) tv_excess += excess[i - window];
      is_deferred = is_deferred && num_in_row < window;
      continue;
    }
    if (is_deferred) break;
    end_after(rows, i, bits, is_tried, out);
    if (!may_defer) break;
    is_deferred = true;
    num_in_row = 0;
  }
  out.tv_excess = tv_excess;
  return out;
}

// A greedy request of block verification has the strict rule: nothing is as long as the window.
template <class Rows>
TEAM_DEVICE ChainResult verify_by_rule(Rows& rows, double* excess) {
  if (rows.batch.rule == ChainRule::block && !rows.greedy) return verify_block(rows);
  return verify_fly(rows, rows.batch.rule == ChainRule::fly ? rows.batch.window : rows.num_drafts + 1, excess);
}

}  // namespace specvis
