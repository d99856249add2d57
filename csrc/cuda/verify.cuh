// How a team verifies a request's tree from the root downwards, by sampling or greedily, and writes the results.
#pragma once
#include "verifier.cuh"

namespace specvis {
namespace {

template <bool kHasDrafts, class Links>
__device__ void Verifier<kHasDrafts, Links>::verify_sampled() {
  const bool is_undefined = this->is_undefined();
  if (is_undefined) state_.status |= kInvalidRule;
  int64_t next_token = 0;
  int32_t node = 0, num_accepted = 0;
  bool draws = false;
  while (true) {
    if (ends_in_bonus(node)) {
      next_token = bonus();
      break;
    }
    const bool is_leaf = is_undefined || num_accepted == links_.max_depth();
    int32_t child = is_leaf ? -1 : nodes_[node].first_child;
    const int32_t from = nodes_[node].draft_row;
    const bool sampled = kHasDrafts && child >= 0 && from >= 0;
    if (!read(node, sampled)) {
      state_.status |= kInvalidRow;
      break;
    }
    if constexpr (kHasDrafts) {
      if (sampled && (from >= links_.num_draft_rows() || !read_draft(from))) {
        state_.status |= from < links_.num_draft_rows() ? kInvalidDraft : kInvalidTree;
        child = -1;
      }
    }
    if (child >= 0) {
      const double omega = links_.omega(num_accepted);
      slack_ = batch_.residual == ResidualRule::optimal ? slack_of(omega) : 0.0;
      if (!sampled) {
        try_point_masses(node, child, omega);
      } else if constexpr (kHasDrafts) {
        try_samples(node, child, omega);
      }
    }
    draws = state_.next < 0;
    if (draws) {
      draw(sampled);
      break;
    }
    node = state_.next;
    if (is_first_thread() && links_.accepted_nodes()) links_.accepted_nodes()[num_accepted] = node;
    ++num_accepted;
  }
  if (team_.thread() >= kWarp) return;
  const double tv_excess = this->tv_excess();
  if (lane() != 0) return;
  if (!draws) batch_.next_token[b_] = next_token;
  write(batch_, b_, num_accepted, tv_excess, state_.status);
}

// A greedy request: the nodes in order. Each accepted node verifies the chain of its children. At last the row at the
// end of the path is read.
template <bool kHasDrafts, class Links>
__device__ void Verifier<kHasDrafts, Links>::verify_greedy() {
  const int64_t N = links_.num_nodes(), max_depth = links_.max_depth();
  int64_t next_token = 0;
  int32_t best = 0;
  for (int32_t n = 0; n <= N; ++n) {
    const bool at_end = n == N;
    if (!at_end && nodes_[n].depth > nodes_[best].depth) best = n;
    if (!at_end && (nodes_[n].depth < 0 || nodes_[n].depth >= max_depth || nodes_[n].first_child < 0)) continue;
    if (at_end && ends_in_bonus(best)) {
      next_token = bonus();
      break;
    }
    uint32_t argmax;
    if (!read(at_end ? best : n, false, &argmax)) {
      if (at_end) state_.status |= kInvalidRow;
      continue;
    }
    if (at_end) {
      next_token = argmax;
      break;
    }
    if (num_considered_ > 0 || warp() == 0) try_greedily(n, argmax);
    __syncthreads();
  }
  if (!is_first_thread()) return;
  const int32_t num_accepted = nodes_[best].depth;
  batch_.next_token[b_] = next_token;
  write(batch_, b_, num_accepted, nodes_[best].num_non_argmax, state_.status);
  int32_t* const accepted_nodes = links_.accepted_nodes();
  for (int32_t d = num_accepted; d > 0 && accepted_nodes; --d) {
    accepted_nodes[d - 1] = best;
    best = nodes_[best].parent;
  }
}

// Verifies request b and writes its outputs. The block's nodes are at `nodes`, or if that is null where the layout
// says; node_at(n) is the n-th node.
template <bool kHasDrafts, class Links, class NodeAt>
__device__ void verify(Team& team, const VerifyParams& batch, int64_t b, const Links& links, NodeAt node_at,
                       bool greedy, const Layout& layout, char* shared, Node* nodes = nullptr) {
  char* const scratch = batch.scratch + blockIdx.x * layout.scratch;
  if (!nodes) nodes = layout.nodes.in<Node>(shared, scratch);
  for (int64_t n = threadIdx.x; n < links.num_nodes(); n += blockDim.x) nodes[n] = node_at(n);
  if (links.accepted_nodes() && team.rank() == 0) {
    for (int64_t d = threadIdx.x; d < links.max_depth(); d += blockDim.x) links.accepted_nodes()[d] = -1;
  }
  __syncthreads();
  Verifier<kHasDrafts, Links> verifier(batch, b, links, team, nodes, layout, shared, scratch);
  if (greedy) {
    verifier.verify_greedy();
  } else {
    verifier.verify_sampled();
  }
  team.end();
}

}  // namespace
}  // namespace specvis
