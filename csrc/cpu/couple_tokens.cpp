// couple_tokens on the CPU: one position per task. Only a position whose guess is not kept looks at its rows again: one
// pass sums the residual by blocks, and the token is searched for among these sums.
#include <algorithm>
#include <vector>

#include "../shared/params.h"
#include "rows.h"
#include "team.h"

namespace specvis {
namespace {

// One position: its slices of the arguments.
struct Position {
  const float *target, *draft;  // (V)
  int64_t guess;
  const float* uniforms;  // two: one decides, one draws
  double omega;
  float delta;
  const int64_t* group;  // (group_size)
};

struct Coupled {
  int64_t token = 0;
  bool is_kept = false;
  double tv_excess = 0;
  int32_t status = 0;
};

struct TokenMass {
  int64_t token;
  double mass;
};

// Scratch memory of one thread.
struct Scratch {
  std::vector<double> sums;        // the sums of blocks of the residual
  std::vector<TokenMass> changed;  // the tokens whose residual a relaxed rule changes, in vocabulary order
};

// Fills `changed` after the rejection of x; the cutoff had kept num_kept of its neighbors. "relaxed" moves their mass
// to x, "released" takes nothing from any neighbor in the table as soon as one was kept.
void change_neighbors(const CoupleTokens& batch, const ResidualRow& row, const Candidate& candidate, int64_t x,
                      int64_t num_kept, std::vector<TokenMass>& changed) {
  const bool relaxed = batch.residual == ResidualRule::relaxed;
  const int64_t count = relaxed ? num_kept : num_kept > 0 ? batch.neighbors.k() : 0;
  const auto add = [&](int64_t v, int64_t mass, int64_t draft_mass) {
    const double left =
        residual_mass(static_cast<double>(mass), row.unit, static_cast<double>(draft_mass), row.draft_unit, row.slack);
    changed.push_back({v, std::floor(left)});
  };
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = batch.neighbors(x, j);
    if (id < 0 || id >= batch.V || (relaxed && id == x)) continue;
    const int64_t mass = relaxed ? 0 : to_fixed_point(row.target[id]);
    add(id, mass, relaxed ? to_fixed_point(row.draft[id]) : 0);
  }
  if (relaxed) add(x, candidate.relaxed_mass, candidate.draft_mass);
  const auto before = [](const TokenMass& a, const TokenMass& b) { return a.token < b.token; };
  const auto same = [](const TokenMass& a, const TokenMass& b) { return a.token == b.token; };
  std::sort(changed.begin(), changed.end(), before);
  changed.erase(std::unique(changed.begin(), changed.end(), same), changed.end());
}

// A token from the target's residual after the guess was rejected; -1 if the residual is empty.
int64_t draw_residual(const CoupleTokens& batch, const Position& position, const Candidate& candidate, int64_t num_kept,
                      Scratch& scratch) {
  const bool optimal = batch.residual == ResidualRule::optimal;
  const ResidualRow row = {position.target, position.draft, 1 / static_cast<double>(candidate.total),
                           1 / static_cast<double>(candidate.draft_total), optimal ? slack_of(candidate.omega) : 0.0};
  double total = sum_blocks(row, batch.V, scratch.sums.data());
  std::vector<TokenMass>& changed = scratch.changed;
  changed.clear();
  if (!optimal) change_neighbors(batch, row, candidate, position.guess, num_kept, changed);
  for (const TokenMass& entry : changed) {
    const double difference = entry.mass - row(entry.token);
    scratch.sums[entry.token / kResidualBlock] += difference;
    total += difference;
  }
  if (total == 0) return -1;
  const auto mass = [&](int64_t v) {
    const auto before = [](const TokenMass& entry, int64_t token) { return entry.token < token; };
    const auto entry = std::lower_bound(changed.begin(), changed.end(), v, before);
    return entry != changed.end() && entry->token == v ? entry->mass : row(v);
  };
  return draw(mass, scratch.sums.data(), total, position.uniforms[1]);
}

Coupled couple(const CoupleTokens& batch, const Position& position, Scratch& scratch) {
  Coupled out;
  const int64_t V = batch.V, x = position.guess;
  const bool has_rule = !is_undefined(position.omega, batch.is_relaxed, batch.residual);
  if (!has_rule) out.status |= kInvalidRule;
  const Total target_sum = sum_row(position.target, V);
  if (!target_sum.valid) {
    out.status |= kInvalidRow;
    return out;
  }
  const auto from_target = [&](int32_t status) {
    out.status |= status;
    out.token = draw(position.target, V, target_sum.mass, position.uniforms[1]);
    return out;
  };
  if (!has_rule) return from_target(0);
  const Total draft_sum = sum_row(position.draft, V);
  if (!draft_sum.valid) return from_target(kInvalidDraft);
  if (x < 0 || x >= V) return from_target(kInvalidTree);
  const int64_t draft_mass = to_fixed_point(position.draft[x]);
  if (draft_mass == 0 && !batch.is_relaxed) return from_target(kInvalidDraft);

  const auto mass = [&](int64_t v) { return to_fixed_point(position.target[v]); };
  const int64_t token_mass = mass(x), k = batch.neighbors.k();
  const int64_t num_considered = k > 0 ? k - (batch.residual == ResidualRule::released) : 0;
  const NeighborPrefix prefix = neighbor_prefix(mass, V, batch.neighbors, num_considered, x,
                                                Budget(batch.cutoff, position.delta, token_mass, target_sum.mass));
  const Candidate own = {true,           token_mass,    token_mass + prefix.mass, target_sum.mass, draft_mass,
                         draft_sum.mass, position.omega};
  Candidate candidate = own;
  for (int64_t j = 0; j < batch.group_size; ++j) {
    const int64_t id = position.group[j];
    if (id < 0 || id >= V || id == x) continue;
    candidate.relaxed_mass += mass(id);
    candidate.draft_mass += to_fixed_point(position.draft[id]);
  }
  out.tv_excess = std::max(candidate.accept_prob(false) - own.accept_prob(true), 0.0);
  out.is_kept = candidate.accepts(position.uniforms[0]);
  out.token = out.is_kept ? x : draw_residual(batch, position, own, prefix.num_kept, scratch);
  return out.token < 0 ? from_target(kEmptyResidual) : out;
}

}  // namespace

void couple_tokens_cpu(const CoupleTokens& batch) {
  const int64_t W = batch.W, V = batch.V;
  parallel_for(batch.B * W, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.sums.resize((V + kResidualBlock - 1) / kResidualBlock);
    for (int64_t r = begin; r < end; ++r) {
      const Position position = {batch.target_probs + r * V,
                                 batch.draft_probs + r * V,
                                 batch.tokens[r],
                                 batch.uniforms + r * 2,
                                 batch.omega ? batch.omega[r] : 1.0,
                                 batch.delta ? batch.delta[r / W] : -1.0f,
                                 batch.groups + r * batch.group_size};
      const Coupled out = couple(batch, position, scratch);
      batch.new_tokens[r] = out.token;
      batch.is_kept[r] = out.is_kept;
      batch.tv_excess[r] = static_cast<float>(out.tv_excess);
      batch.status[r] = out.status;
    }
  });
  for (int64_t b = 0; b < batch.B; ++b) {
    const bool* const row = batch.is_kept + b * W;
    batch.num_kept[b] = static_cast<int32_t>(std::find(row, row + W, false) - row);
  }
}

}  // namespace specvis
