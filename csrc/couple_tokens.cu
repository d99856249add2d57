// couple_tokens on CUDA: one block per position. One pass sums target and draft. If the guess is not kept, another lets
// each warp sum a share of the residual, and the token is searched for in a single share. The residual is never stored:
// a relaxed rule changes it at the guess and at those neighbors that have a bit in shared memory.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 512;        // at most
constexpr int64_t kReserved = 2048;  // bytes of shared memory for the arrays that the kernel itself declares

// The residual of one position: its mass at each token.
struct Residual {
  const float *target, *draft;
  double unit, draft_unit, slack;
  bool moves_mass;             // relaxed: the neighbors' mass stands at the guess; else nothing is taken from them
  int64_t guess, guess_mass;   // what the guess has after that
  const unsigned* is_treated;  // a bit for each token, or null if no neighbor is treated

  __device__ int64_t operator()(int64_t v) const {
    int64_t mass = to_fixed_point(target[v]), draft_mass = to_fixed_point(draft[v]);
    if (is_treated) {
      const bool treated = is_treated[v / kWarp] >> (v % kWarp) & 1;
      if (moves_mass && v == guess) {
        mass = guess_mass;
      } else if (treated) {
        mass = moves_mass ? 0 : mass;
        draft_mass = moves_mass ? draft_mass : 0;
      }
    }
    if (mass == 0) return 0;
    return static_cast<int64_t>(
        residual_mass(static_cast<double>(mass), unit, static_cast<double>(draft_mass), draft_unit, slack));
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
  int64_t token = 0;
  bool is_kept = false;
  double tv_excess = 0;
  int32_t status = 0;
};

__device__ Coupled couple(const CoupleTokens& batch, int64_t r, unsigned* bits) {
  __shared__ int64_t sums[kMaxWarps];
  const int64_t V = batch.V, guess = batch.tokens[r];
  const float *target = batch.target_probs + r * V, *draft = batch.draft_probs + r * V;
  const double omega = batch.omega ? batch.omega[r] : 1.0;
  const Total target_sum = sum_row(target, V), draft_sum = sum_row(draft, V);
  const auto mass = [=](int64_t v) { return to_fixed_point(target[v]); };

  Coupled out;
  const bool is_tried = !is_undefined(omega, batch.is_relaxed, batch.residual);
  if (!is_tried) out.status |= kInvalidRule;
  if (!target_sum.valid) {
    out.status |= kInvalidRow;
    return out;
  }
  if (is_tried && !draft_sum.valid) {
    out.status |= kInvalidDraft;
  } else if (is_tried && (guess < 0 || guess >= V)) {
    out.status |= kInvalidTree;
  } else if (is_tried) {
    const int64_t k = batch.neighbors.k(), num_considered = k > 0 ? k - (batch.residual == ResidualRule::released) : 0;
    const int64_t token_mass = mass(guess);
    const Budget budget(batch.cutoff, batch.delta ? batch.delta[r / batch.W] : -1.0f, token_mass, target_sum.mass);
    const NeighborPrefix prefix = neighbor_prefix(mass, V, batch.neighbors, num_considered, guess, budget);
    Candidate candidate = {
        true,           token_mass, token_mass + prefix.mass, target_sum.mass, to_fixed_point(draft[guess]),
        draft_sum.mass, omega};
    const double strict_prob = candidate.accept_prob(true);
    if (batch.group_size > 0) {
      int64_t group_mass = 0, group_draft_mass = 0;
      for (int64_t j = threadIdx.x; j < batch.group_size; j += blockDim.x) {
        const int64_t id = batch.groups[r * batch.group_size + j];
        if (id < 0 || id >= V || id == guess) continue;
        group_mass += mass(id);
        group_draft_mass += to_fixed_point(draft[id]);
      }
      candidate.relaxed_mass += block_sum(group_mass);
      candidate.draft_mass += block_sum(group_draft_mass);
    }
    const double excess = candidate.accept_prob(false) - strict_prob;
    out.tv_excess = excess > 0 ? excess : 0.0;
    out.is_kept = candidate.accepts(batch.uniforms[r * 2]);
    out.token = guess;
    if (out.is_kept) return out;

    const bool optimal = batch.residual == ResidualRule::optimal, relaxed = batch.residual == ResidualRule::relaxed;
    if (!optimal && k > 0)
      mark_neighbors(batch.neighbors, guess, relaxed ? prefix.num_kept : prefix.num_kept > 0 ? k : 0, V, bits);
    const Residual residual = {target,
                               draft,
                               1 / static_cast<double>(target_sum.mass),
                               1 / static_cast<double>(draft_sum.mass),
                               optimal ? slack_of(omega) : 0.0,
                               relaxed,
                               guess,
                               candidate.relaxed_mass,
                               optimal || k == 0 ? nullptr : bits};
    const int64_t total = sum_shares(residual, V, sums);
    if (total > 0) {
      out.token = search(residual, V, sums, draw_threshold(batch.uniforms[r * 2 + 1], total));
      return out;
    }
    out.status |= kEmptyResidual;
  }
  out.token = draw(mass, V, target_sum.mass, batch.uniforms[r * 2 + 1]);
  return out;
}

__global__ void __launch_bounds__(kThreads, 1) couple_tokens_kernel(CoupleTokens batch) {
  DYNAMIC_SHARED(unsigned, bits);
  const int64_t r = blockIdx.x;
  const Coupled out = couple(batch, r, bits);
  if (threadIdx.x != 0) return;
  batch.new_tokens[r] = out.token;
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
  int64_t limit;
  error = shared_limit(kReserved, &limit);
  if (error == cudaSuccess) error = allow_shared(couple_tokens_kernel, limit);
  if (error != cudaSuccess) return error;
  LAUNCH(couple_tokens_kernel, static_cast<unsigned>(batch.B * batch.W), threads_for(batch.V, kThreads), bytes, stream,
         batch);
  return cudaGetLastError();
}

}  // namespace specvis
