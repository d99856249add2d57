// verify_chain on CUDA: a team of threads per request. By the strict rule it is a tree in which node n's only child is
// n + 1, see verify.cuh. By the other rules, see chain_rules.h, the team keeps one pair of rows in registers.
#include "../shared/chain_rules.h"
#include "row_pair.cuh"
#include "verify.cuh"

namespace specvis {
namespace {

// A request's slices of a batch of chains.
struct Chain {
  static constexpr bool kHasBonus = true;
  const VerifyChain& batch;
  int64_t b, first, num_drafts;  // the first draft, and how many there are
  const int64_t* bonus;          // or null

  __device__ int64_t num_nodes() const { return num_drafts + 1; }
  __device__ int64_t max_depth() const { return num_drafts; }
  __device__ int64_t num_draft_rows() const { return num_drafts; }
  __device__ const float* target_probs() const { return batch.target_probs + (bonus ? first : first + b) * batch.V; }
  __device__ bool allows(int32_t, uint32_t) const { return true; }
  __device__ const float* draft_probs() const { return batch.draft_probs + first * batch.V; }
  __device__ double omega(int64_t) const { return batch.omega ? batch.omega[b] : 1.0; }
  __device__ int32_t* accepted_nodes() const { return nullptr; }
};

// Do the drafts of requests 0 to b follow each other, the last of them within D? So no two such requests share a row,
// a node or a uniform number.
__device__ bool is_in_place(const VerifyChain& batch, int64_t b) {
  bool falls = false;
  for (int64_t i = threadIdx.x; i <= b; i += blockDim.x) {
    const int64_t first = i > 0 ? batch.ends[i - 1] : 0, end = batch.ends[i];
    falls |= end < first || end > batch.D;
  }
  return !__syncthreads_or(falls);
}

constexpr int kRuleThreads = 256;  // at most: with more there are not enough registers for both rows and the rule

__device__ void write_nothing(const VerifyChain& batch, int64_t b) {
  batch.next_token[b] = 0;
  write(batch, b, 0, 0, kInvalidTree);
}

// A request's rows for chain_rules.h, one at a time.
class RuleRows : public ChainRequest {
 public:
  __device__ RuleRows(Team& team, const VerifyChain& batch, int64_t b, int64_t share)
      : ChainRequest(batch, b), team_(team), share_(share) {}

  __device__ bool is_first_thread() const { return team_.thread() == 0; }
  __device__ int32_t read(int64_t i) {
    Total target_sum, draft_sum;
    pair_ = RowPair(team_, target_row(i), draft_row(i), batch.V, share_);
    pair_.sum(team_, &target_sum, &draft_sum);
    row_ = i;
    return check(i, target_sum, draft_sum);
  }
  __device__ int64_t argmax() { return id_of(pair_.largest(team_, UINT64_MAX)); }
  __device__ float entropy() {  // of the three likeliest tokens
    float entropy = 0;
    uint64_t last = UINT64_MAX;
    for (int rank = 0; rank < 3 && last > 0; ++rank) {
      last = pair_.largest(team_, last);
      const double mass = last > 0 ? value_of(static_cast<uint32_t>(last >> 32)) : 0;
      entropy += entropy_of(mass, static_cast<double>(draft.total));
    }
    return entropy;
  }
  // A token from the row, or (is_rejected) from max(p P - Q, 0), and the mass of what it is drawn from; of P - Q / p.
  __device__ Drawn draw(bool is_rejected, double p, int64_t* total) {
    const double unit = 1 / static_cast<double>(draft.total);
    const double draft_unit = 1 / (p * static_cast<double>(draft.draft_total));
    const int64_t x = is_rejected ? token(row_) : -1;
    const auto mass = [&](int64_t v, float target, float draft_prob) {
      const double of_target = whole_mass(target);
      if (!is_rejected) return of_target;
      if (!draft.sampled) return v == x ? 0.0 : of_target;
      return whole_part(residual_mass(of_target, unit, whole_mass(draft_prob), draft_unit, 0.0));
    };
    const int64_t drawn = pair_.draw(team_, mass, uniform(0), total);
    return {drawn, drawn >= 0};
  }

 private:
  Team& team_;
  int64_t share_, row_ = 0;
  RowPair pair_;
};

__global__ void __launch_bounds__(kRuleThreads, 1) verify_by_rule_kernel(VerifyChain batch, int64_t share) {
  Team team;
  const int64_t b = blockIdx.x / team.size();
  if (!is_in_place(batch, b)) {
    if (team.thread() == 0) write_nothing(batch, b);
    return;
  }
  RuleRows rows(team, batch, b, share);
  const ChainResult out = verify_by_rule(rows, reinterpret_cast<double*>(batch.scratch) + rows.first);
  team.end();
  if (out.next.is_known) batch.next_token[b] = out.next.token;
  if (team.thread() == 0) write(batch, b, static_cast<int32_t>(out.num_accepted), out.tv_excess, out.status);
}

// After the layout's part, scratch memory holds the nodes of all requests, for each block of a cluster.
template <bool kHasDrafts>
__global__ void __launch_bounds__(kVerifyThreads) verify_chain_kernel(VerifyChain batch, Layout layout) {
  Team team;
  DYNAMIC_SHARED(char, shared);
  const int64_t b = blockIdx.x / team.size();
  if (!is_in_place(batch, b)) {
    if (team.thread() == 0) write_nothing(batch, b);
    return;
  }
  const int64_t first = b > 0 ? batch.ends[b - 1] : 0, num_drafts = batch.ends[b] - first;
  const int64_t* const bonus = batch.bonus_tokens ? batch.bonus_tokens + b : nullptr;
  const auto node_at = [&](int64_t n) {
    const int32_t node = static_cast<int32_t>(n);
    return Node{n > 0 ? batch.draft_tokens[first + n - 1] : 0,
                n < num_drafts ? node + 1 : -1,
                -1,
                batch.draft_probs ? node : -1,
                batch.uniforms[first + b + n],
                n == 0 ? 0 : -1,
                0,
                0,
                {}};
  };
  Node* const nodes = reinterpret_cast<Node*>(batch.scratch + layout.scratch_of(batch.B)) +
                      team.rank() * (batch.D + batch.B) + first + b;
  verify<kHasDrafts>(team, batch, b, Chain{batch, b, first, num_drafts, bonus}, node_at,
                     batch.greedy && batch.greedy[b], layout, shared, nodes);
}

using Kernel = void(VerifyChain, Layout);

Kernel* kernel_for(const VerifyChain& batch) {
  return batch.draft_probs ? verify_chain_kernel<true> : verify_chain_kernel<false>;
}

}  // namespace

cudaError_t verify_chain_scratch(const VerifyChain& batch, int64_t* bytes) {
  *bytes = batch.D * static_cast<int64_t>(sizeof(double));
  if (batch.rule != ChainRule::strict) return cudaSuccess;
  Device device;
  const cudaError_t error = device_for(kernel_for(batch), &device);
  if (error != cudaSuccess) return error;
  const Layout layout(batch, device);
  *bytes = layout.scratch_of(batch.B) + layout.cluster * (batch.D + batch.B) * static_cast<int64_t>(sizeof(Node));
  return error;
}

cudaError_t verify_chain_cuda(const VerifyChain& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  Device device;
  const bool is_strict = batch.rule == ChainRule::strict;
  const cudaError_t error =
      is_strict ? device_for(kernel_for(batch), &device) : device_for(verify_by_rule_kernel, &device);
  if (error != cudaSuccess) return error;
  if (!is_strict) {
    const PairTeam team(device, batch.B, batch.V, kRuleThreads);
    return LAUNCH_CLUSTERS(verify_by_rule_kernel, blocks_for(batch.B * team.cluster), team.cluster, team.threads, 0,
                           stream, batch, team.share);
  }
  const Layout layout(batch, device);
  return LAUNCH_CLUSTERS(kernel_for(batch), blocks_for(layout.cluster * batch.B), layout.cluster, layout.threads,
                         layout.shared, stream, batch, layout);
}

}  // namespace specvis
