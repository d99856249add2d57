// couple_tokens on the CPU: one position per task. Only a position whose guess is not kept looks at its rows again: one
// pass sums the residual by blocks, and the token is searched for among these sums.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "rows.h"
#include "team.h"

namespace {

using specvis::Candidate;
using specvis::ResidualRule;
using specvis::to_fixed_point;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// The rules, and the size of a row.
struct Rules {
  int64_t V;
  specvis::Neighbors neighbors;
  int64_t num_considered;  // how many neighbors of a token the cutoff looks at; 0 without neighbors
  specvis::Cutoff cutoff;
  ResidualRule residual;
  bool is_relaxed;     // whether there are neighbors or groups
  int64_t group_size;  // ids that count with a guess; 0 without groups
};

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
  std::vector<double> sums;        // of blocks of the residual
  std::vector<TokenMass> changed;  // the tokens whose residual a relaxed rule changes, in vocabulary order
};

// Fills `changed` after the rejection of x, of whose neighbors the cutoff had kept num_kept: "relaxed" moves their mass
// to x, "released" takes nothing from any neighbor in the table as soon as one was kept.
void change_neighbors(const Rules& rules, const specvis::ResidualRow& row, const Candidate& candidate, int64_t x,
                      int64_t num_kept, std::vector<TokenMass>& changed) {
  const bool relaxed = rules.residual == ResidualRule::relaxed;
  const int64_t count = relaxed ? num_kept : num_kept > 0 ? rules.neighbors.k() : 0;
  const auto add = [&](int64_t v, int64_t mass, int64_t draft_mass) {
    const double left = specvis::residual_mass(static_cast<double>(mass), row.unit, static_cast<double>(draft_mass),
                                               row.draft_unit, row.slack);
    changed.push_back({v, std::floor(left)});
  };
  for (int64_t j = 0; j < count; ++j) {
    const int64_t id = rules.neighbors(x, j);
    if (id < 0 || id >= rules.V || (relaxed && id == x)) continue;
    const int64_t mass = relaxed ? 0 : to_fixed_point(row.target[id]);
    add(id, mass, relaxed ? to_fixed_point(row.draft[id]) : 0);
  }
  if (relaxed) add(x, candidate.relaxed_mass, candidate.draft_mass);
  const auto before = [](const TokenMass& a, const TokenMass& b) { return a.token < b.token; };
  const auto same = [](const TokenMass& a, const TokenMass& b) { return a.token == b.token; };
  std::sort(changed.begin(), changed.end(), before);
  changed.erase(std::unique(changed.begin(), changed.end(), same), changed.end());
}

// A token from what is left of the target after the guess was rejected; -1 if that is nothing.
int64_t draw_residual(const Rules& rules, const Position& position, const Candidate& candidate, int64_t num_kept,
                      Scratch& scratch) {
  const bool optimal = rules.residual == ResidualRule::optimal;
  const specvis::ResidualRow row = {position.target, position.draft, 1 / static_cast<double>(candidate.total),
                                    1 / static_cast<double>(candidate.draft_total),
                                    optimal ? specvis::slack_of(candidate.omega) : 0.0};
  double total = specvis::sum_blocks(row, rules.V, scratch.sums.data());
  std::vector<TokenMass>& changed = scratch.changed;
  changed.clear();
  if (!optimal) change_neighbors(rules, row, candidate, position.guess, num_kept, changed);
  for (const TokenMass& entry : changed) {
    const double difference = entry.mass - row(entry.token);
    scratch.sums[entry.token / specvis::kResidualBlock] += difference;
    total += difference;
  }
  if (total == 0) return -1;
  const auto mass = [&](int64_t v) {
    const auto before = [](const TokenMass& entry, int64_t token) { return entry.token < token; };
    const auto entry = std::lower_bound(changed.begin(), changed.end(), v, before);
    return entry != changed.end() && entry->token == v ? entry->mass : row(v);
  };
  return specvis::draw(mass, scratch.sums.data(), total, position.uniforms[1]);
}

Coupled couple(const Rules& rules, const Position& position, Scratch& scratch) {
  Coupled out;
  const int64_t V = rules.V, x = position.guess;
  const bool has_rule = !specvis::is_undefined(position.omega, rules.is_relaxed, rules.residual);
  if (!has_rule) out.status |= specvis::kInvalidRule;
  const specvis::Total target_sum = specvis::sum_row(position.target, V);
  if (!target_sum.valid) {
    out.status |= specvis::kInvalidRow;
    return out;
  }
  const auto from_target = [&](int32_t status) {
    out.status |= status;
    out.token = specvis::draw(position.target, V, target_sum.mass, position.uniforms[1]);
    return out;
  };
  if (!has_rule) return from_target(0);
  const specvis::Total draft_sum = specvis::sum_row(position.draft, V);
  if (!draft_sum.valid) return from_target(specvis::kInvalidDraft);
  if (x < 0 || x >= V) return from_target(specvis::kInvalidTree);

  const auto mass = [&](int64_t v) { return to_fixed_point(position.target[v]); };
  const int64_t token_mass = mass(x);
  const specvis::NeighborPrefix prefix =
      specvis::neighbor_prefix(mass, V, rules.neighbors, rules.num_considered, x,
                               specvis::Budget(rules.cutoff, position.delta, token_mass, target_sum.mass));
  const Candidate own = {
      true,           token_mass,    token_mass + prefix.mass, target_sum.mass, to_fixed_point(position.draft[x]),
      draft_sum.mass, position.omega};
  Candidate candidate = own;
  for (int64_t j = 0; j < rules.group_size; ++j) {
    const int64_t id = position.group[j];
    if (id < 0 || id >= V || id == x) continue;
    candidate.relaxed_mass += mass(id);
    candidate.draft_mass += to_fixed_point(position.draft[id]);
  }
  out.tv_excess = std::max(candidate.accept_prob(false) - own.accept_prob(true), 0.0);
  out.is_kept = candidate.accepts(position.uniforms[0]);
  out.token = out.is_kept ? x : draw_residual(rules, position, own, prefix.num_kept, scratch);
  return out.token < 0 ? from_target(specvis::kEmptyResidual) : out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> couple_tokens_cpu(const Tensor& target_probs,          // (B, W, V)
                                                                     const Tensor& draft_probs,           // (B, W, V)
                                                                     const Tensor& tokens,                // (B, W)
                                                                     const Tensor& uniforms,              // (B, W, 2)
                                                                     const std::optional<Tensor>& omega,  // (B, W)
                                                                     const std::optional<Tensor>& neighbors,  // (C, k)
                                                                     const std::optional<Tensor>& delta,      // (B)
                                                                     const std::optional<Tensor>& groups,  // (B, W, k)
                                                                     std::string cutoff, int64_t offset,
                                                                     std::string residual) {
  const int64_t B = target_probs.size(0), W = target_probs.size(1), V = target_probs.size(2);
  Tensor new_tokens = specvis::new_empty(tokens, {B, W});
  Tensor is_kept = specvis::new_empty(tokens, {B, W}, ScalarType::Bool);
  Tensor num_kept = specvis::new_empty(tokens, {B}, ScalarType::Int);
  Tensor tv_excess = specvis::new_empty(target_probs, {B, W});
  Tensor status = specvis::new_empty(tokens, {B, W}, ScalarType::Int);

  Rules rules = {V,
                 {},
                 0,
                 specvis::cutoff_named(cutoff),
                 specvis::residual_named(residual),
                 neighbors || groups,
                 groups ? groups->size(2) : 0};
  if (neighbors) {
    rules.neighbors = specvis::neighbors_of(*neighbors, offset);
    rules.num_considered = neighbors->size(1) - (rules.residual == ResidualRule::released);
  }
  const float *target = target_probs.const_data_ptr<float>(), *draft = draft_probs.const_data_ptr<float>();
  const int64_t* guesses = tokens.const_data_ptr<int64_t>();
  const float* each_uniform = uniforms.const_data_ptr<float>();
  const float *omegas = data<float>(omega), *deltas = data<float>(delta);
  const int64_t* ids = data<int64_t>(groups);
  int64_t* token_out = new_tokens.mutable_data_ptr<int64_t>();
  bool* is_kept_out = is_kept.mutable_data_ptr<bool>();
  int32_t* num_kept_out = num_kept.mutable_data_ptr<int32_t>();
  float* tv_excess_out = tv_excess.mutable_data_ptr<float>();
  int32_t* status_out = status.mutable_data_ptr<int32_t>();

  specvis::parallel_for(0, B * W, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.sums.resize((V + specvis::kResidualBlock - 1) / specvis::kResidualBlock);
    for (int64_t r = begin; r < end; ++r) {
      const Position position = {target + r * V,
                                 draft + r * V,
                                 guesses[r],
                                 each_uniform + r * 2,
                                 omegas ? omegas[r] : 1.0,
                                 deltas ? deltas[r / W] : -1.0f,
                                 ids + r * rules.group_size};
      const Coupled out = couple(rules, position, scratch);
      token_out[r] = out.token;
      is_kept_out[r] = out.is_kept;
      tv_excess_out[r] = static_cast<float>(out.tv_excess);
      status_out[r] = out.status;
    }
  });
  for (int64_t b = 0; b < B; ++b) {
    const bool* row = is_kept_out + b * W;
    num_kept_out[b] = static_cast<int32_t>(std::find(row, row + W, false) - row);
  }
  return {new_tokens, is_kept, num_kept, tv_excess, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) {
  m.impl("couple_tokens", SPECVIS_BOX(couple_tokens, &couple_tokens_cpu));
}
