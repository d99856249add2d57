// couple_tokens on CUDA: a team per position keeps target and draft in registers and sums both. If the guess is not
// kept, it sums the residual, and the warp in whose share the token falls searches for it there. The residual is never
// stored: a relaxed rule changes it at the guess and at those neighbors that have a bit in shared memory.
#include "../shared/params.h"
#include "kept_neighbors.cuh"
#include "row_pair.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 512;  // at most

// What a token is drawn from: the mass of each one in the target, or in the residual of one position.
struct Residual {
  bool from_target;
  double unit, draft_unit, slack;
  bool moves_mass;  // relaxed: the neighbors' mass moves to the guess; else nothing is taken from them
  int64_t guess;
  double guess_mass;           // what the guess has after that
  const unsigned* is_treated;  // a bit for each token, or null if no neighbor is treated

  __device__ double operator()(int64_t v, float p, float q) const {
    double mass = whole_mass(p), draft_mass = whole_mass(q);
    if (from_target) return mass;
    if (is_treated) {
      const bool treated = is_treated[v / kWarp] >> (v % kWarp) & 1;
      if (moves_mass && v == guess) {
        mass = guess_mass;
      } else if (treated) {
        mass = moves_mass ? 0.0 : mass;
        draft_mass = moves_mass ? draft_mass : 0.0;
      }
    }
    return whole_part(residual_mass(mass, unit, draft_mass, draft_unit, slack));
  }
};

// Sets the bits of the first `count` neighbors of the guess.
__device__ void mark_neighbors(const Neighbors& neighbors, int64_t guess, int64_t count, int64_t V, unsigned* bits) {
  for (int64_t i = threadIdx.x; i * kWarp < V; i += blockDim.x) bits[i] = 0;
  __syncthreads();
  for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    const int64_t id = neighbors(guess, j);
    if (id >= 0 && id < V) atomicOr(bits + id / kWarp, 1u << (id % kWarp));
  }
  __syncthreads();
}

struct Coupled {
  int64_t token = -1;  // known to the thread that writes it
  bool is_kept = false;
  double tv_excess = 0;
  int32_t status = 0;
};

__device__ Coupled couple(Team& team, const CoupleTokens& batch, int64_t r, int64_t share, unsigned* bits) {
  const int64_t V = batch.V, guess = batch.tokens[r];
  const float *target = batch.target_probs + r * V, *draft = batch.draft_probs + r * V;
  const double omega = batch.omega ? batch.omega[r] : 1.0;
  RowPair rows(team, target, draft, V, share);
  Total target_sum, draft_sum;
  rows.sum(team, &target_sum, &draft_sum);
  const auto mass = [=](int64_t v) { return to_fixed_point(target[v]); };

  Coupled out;
  const bool is_tried = !is_undefined(omega, batch.is_relaxed, batch.residual);
  if (!is_tried) out.status |= kInvalidRule;
  if (!target_sum.valid) {
    out.status |= kInvalidRow;
    out.token = team.thread() == 0 ? 0 : -1;
    return out;
  }
  Residual residual = {true};
  if (is_tried && !draft_sum.valid) {
    out.status |= kInvalidDraft;
  } else if (is_tried && (guess < 0 || guess >= V)) {
    out.status |= kInvalidTree;
  } else if (is_tried && !batch.is_relaxed && to_fixed_point(draft[guess]) == 0) {
    out.status |= kInvalidDraft;
  } else if (is_tried) {
    const int64_t k = batch.neighbors.k(), num_considered = k > 0 ? k - (batch.residual == ResidualRule::released) : 0;
    const int64_t token_mass = mass(guess);
    const Budget budget(batch.cutoff, batch.delta ? batch.delta[r / batch.W] : -1.0f, token_mass, target_sum.mass);
    const NeighborPrefix prefix = neighbor_prefix(team, mass, V, batch.neighbors, num_considered, guess, budget);
    Candidate candidate = {
        true,           token_mass, token_mass + prefix.mass, target_sum.mass, to_fixed_point(draft[guess]),
        draft_sum.mass, omega};
    const double strict_prob = candidate.accept_prob(true);
    if (batch.group_size > 0) {
      int64_t group_mass = 0, group_draft_mass = 0;
      for (int64_t j = team.thread(); j < batch.group_size; j += team.threads()) {
        const int64_t id = batch.groups[r * batch.group_size + j];
        if (id < 0 || id >= V || id == guess) continue;
        group_mass += mass(id);
        group_draft_mass += to_fixed_point(draft[id]);
      }
      candidate.relaxed_mass += team.sum(group_mass);
      candidate.draft_mass += team.sum(group_draft_mass);
    }
    const double excess = candidate.accept_prob(false) - strict_prob;
    out.tv_excess = excess > 0 ? excess : 0.0;
    out.is_kept = candidate.accepts(batch.uniforms[r * 2]);
    if (out.is_kept) {
      out.token = team.thread() == 0 ? guess : -1;
      return out;
    }

    const bool optimal = batch.residual == ResidualRule::optimal, relaxed = batch.residual == ResidualRule::relaxed;
    if (!optimal && k > 0)
      mark_neighbors(batch.neighbors, guess, relaxed ? prefix.num_kept : prefix.num_kept > 0 ? k : 0, V, bits);
    residual = {false,
                1 / static_cast<double>(target_sum.mass),
                1 / static_cast<double>(draft_sum.mass),
                optimal ? slack_of(omega) : 0.0,
                relaxed,
                guess,
                static_cast<double>(candidate.relaxed_mass),
                optimal || k == 0 ? nullptr : bits};
  }
  for (int64_t total = 0; true; residual.from_target = true) {
    out.token = rows.draw(team, residual, batch.uniforms[r * 2 + 1], &total);
    if (total > 0) return out;
    out.status |= kEmptyResidual;
  }
}

__global__ void __launch_bounds__(kThreads, 1) couple_tokens_kernel(CoupleTokens batch, int64_t share) {
  DYNAMIC_SHARED(unsigned, bits);
  Team team;
  const int64_t r = blockIdx.x / team.size();
  const Coupled out = couple(team, batch, r, share, bits);
  team.end();
  if (out.token >= 0) batch.new_tokens[r] = out.token;
  if (team.thread() != 0) return;
  batch.is_kept[r] = out.is_kept;
  batch.tv_excess[r] = static_cast<float>(out.tv_excess);
  batch.status[r] = out.status;
  atomicMin(batch.num_kept + r / batch.W, static_cast<int32_t>(out.is_kept ? batch.W : r % batch.W));
}

}  // namespace

cudaError_t couple_tokens_cuda(const CoupleTokens& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  cudaError_t error = cudaMemsetAsync(batch.num_kept, 0x7f, batch.B * sizeof(int32_t), stream);  // above any W
  if (error != cudaSuccess) return error;
  const bool treats_neighbors = batch.residual != ResidualRule::optimal && batch.neighbors.k() > 0;
  const int64_t bytes = treats_neighbors ? (batch.V + kWarp - 1) / kWarp * sizeof(unsigned) : 0;
  Device device;
  error = device_for(couple_tokens_kernel, &device);
  if (error != cudaSuccess) return error;
  const PairTeam team(device, batch.B * batch.W, batch.V, kThreads);
  return LAUNCH_CLUSTERS(couple_tokens_kernel, blocks_for(batch.B * batch.W * team.cluster), team.cluster, team.threads,
                         bytes, stream, batch, team.share);
}

}  // namespace specvis
