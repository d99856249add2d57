// The bindings: the CUDA kernels as ops of torch. They allocate the outputs, launch on PyTorch's current stream and
// check every launch. Nothing of libtorch_cuda is linked, so that one library loads beside any build of torch. With
// SPECVIS_EMULATED the same functions are ops of another library, on CPU tensors, whose kernels tests/cuda_on_cpu
// runs.
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "shared/params.h"

#ifdef SPECVIS_EMULATED
#define LIBRARY specvis_kernels_emulated
#define DEVICE CPU
#else
#define LIBRARY specvis_kernels
#define DEVICE CUDA
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As long as this object exists, the tensor's device is the current one. stream() is PyTorch's current stream there.
class Device {
#ifdef SPECVIS_EMULATED
 public:
  explicit Device(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
#else
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}
  cudaStream_t stream() const {
    using Get = int32_t (*)(int32_t, void**);
    static const Get get = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return reinterpret_cast<Get>(dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }();
    void* stream = nullptr;
    STD_TORCH_CHECK(get, "specvis_kernels: this build of torch has no CUDA streams");
    STD_TORCH_CHECK(!get(index_, &stream), "specvis_kernels: no current stream on CUDA device ", index_);
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "specvis_kernels: CUDA error: ", cudaGetErrorString(error));
}

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

specvis::LogitRows logit_rows(const Tensor& logits,                   // (B, N, V)
                              const std::optional<Tensor>& uncond,    // (B, N, V)
                              const Tensor& guidance,                 // (B)
                              const Tensor& temperature,              // (B)
                              const Tensor& top_k,                    // (B)
                              const Tensor& top_p,                    // (B)
                              const std::optional<Tensor>& id_range,  // (B, N, 2)
                              int64_t first_id, int64_t last_id, const std::string& filters) {
  using specvis::LogitType;
  const ScalarType type = logits.scalar_type();
  specvis::LogitRows rows = {};
  rows.B = logits.size(0);
  rows.N = logits.size(1);
  rows.V = logits.size(2);
  rows.type = type == ScalarType::Half       ? LogitType::float16
              : type == ScalarType::BFloat16 ? LogitType::bfloat16
                                             : LogitType::float32;
  rows.logits = logits.const_data_ptr();
  rows.uncond = uncond ? uncond->const_data_ptr() : nullptr;
  rows.guidance = guidance.const_data_ptr<float>();
  rows.temperature = temperature.const_data_ptr<float>();
  rows.top_k = top_k.const_data_ptr<int32_t>();
  rows.top_p = top_p.const_data_ptr<float>();
  rows.id_range = data<int64_t>(id_range);
  rows.first_id = first_id;
  rows.last_id = last_id;
  rows.top_p_first = filters == "p_then_k";
  return rows;
}

specvis::Neighbors neighbors_of(const std::optional<Tensor>& table, int64_t offset) {  // (C, k)
  return table ? specvis::neighbors_of(*table, offset) : specvis::Neighbors();
}

// What verify_logits and verify_tree return: accepted_nodes, num_accepted, next_token, tv_excess, status.
using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Allocates these outputs, and fills in what both ops take.
Verified verification(specvis::Verification& batch,
                      const Tensor& tokens,                      // (B, N)
                      const Tensor& first_child,                 // (B, N)
                      const Tensor& next_sibling,                // (B, N)
                      const std::optional<Tensor>& uniforms,     // (B, N)
                      const std::optional<Tensor>& draft_probs,  // (B, M, V)
                      const std::optional<Tensor>& draft_row,    // (B, N)
                      const std::optional<Tensor>& neighbors,    // (C, k)
                      const std::optional<Tensor>& delta,        // (B)
                      const std::optional<Tensor>& omega,        // (B, P)
                      const std::string& cutoff, int64_t offset, const std::string& residual, const std::string& empty,
                      int64_t max_depth, int64_t V) {
  const int64_t B = tokens.size(0);
  Tensor accepted_nodes = specvis::new_empty(tokens, {B, max_depth}, ScalarType::Int);
  Tensor num_accepted = specvis::new_empty(tokens, {B}, ScalarType::Int);
  Tensor next_token = specvis::new_empty(tokens, {B});
  Tensor tv_excess = specvis::new_empty(tokens, {B}, ScalarType::Float);
  Tensor status = specvis::new_empty(tokens, {B}, ScalarType::Int);
  batch.B = B;
  batch.N = tokens.size(1);
  batch.V = V;
  batch.num_draft_rows = draft_probs ? draft_probs->size(1) : 0;
  batch.max_depth = max_depth;
  batch.tokens = tokens.const_data_ptr<int64_t>();
  batch.first_child = first_child.const_data_ptr<int32_t>();
  batch.next_sibling = next_sibling.const_data_ptr<int32_t>();
  batch.uniforms = data<float>(uniforms);
  batch.draft_probs = data<float>(draft_probs);
  batch.draft_row = data<int32_t>(draft_row);
  batch.neighbors = neighbors_of(neighbors, offset);
  batch.delta = data<float>(delta);
  batch.omega = data<float>(omega);
  batch.cutoff = specvis::cutoff_named(cutoff);
  batch.residual = specvis::residual_named(residual);
  batch.empty = specvis::empty_named(empty);
  batch.accepted_nodes = accepted_nodes.mutable_data_ptr<int32_t>();
  batch.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  batch.next_token = next_token.mutable_data_ptr<int64_t>();
  batch.tv_excess = tv_excess.mutable_data_ptr<float>();
  batch.status = status.mutable_data_ptr<int32_t>();
  return {accepted_nodes, num_accepted, next_token, tv_excess, status};
}

Tensor commit_kv(std::vector<Tensor> caches, const Tensor& accepted_nodes, const Tensor& num_accepted,
                 const Tensor& lengths, const std::optional<Tensor>& start, const std::optional<Tensor>& slots,
                 int64_t row_dim, int64_t column_dim) {
  const Device device(lengths);
  const Tensor& first = caches[0];
  Tensor new_lengths = specvis::new_empty(lengths, {accepted_nodes.size(0)});
  specvis::CommitKv batch = {};
  batch.moves.B = accepted_nodes.size(0);
  batch.moves.P = accepted_nodes.size(1);
  batch.moves.R = slots ? slots->size(0) : first.size(row_dim);
  batch.moves.T = slots ? slots->size(1) : first.size(column_dim);
  batch.moves.accepted_nodes = accepted_nodes.const_data_ptr<int32_t>();
  batch.moves.num_accepted = num_accepted.const_data_ptr<int32_t>();
  batch.moves.lengths = lengths.const_data_ptr<int64_t>();
  batch.moves.start = start ? start->const_data_ptr<int64_t>() : batch.moves.lengths;
  batch.moves.slots = data<int64_t>(slots);
  specvis::set_layout(
      batch.moves, [&](int64_t d) { return first.size(d); }, first.dim(), row_dim, column_dim,
      static_cast<int64_t>(first.element_size()));
  batch.new_lengths = new_lengths.mutable_data_ptr<int64_t>();
  for (const Tensor& cache : caches) {
    batch.caches[batch.num_caches++] = static_cast<char*>(cache.mutable_data_ptr());
    if (batch.num_caches < specvis::kCachesALaunch && &cache != &caches.back()) continue;
    check(specvis::commit_kv_cuda(batch, device.stream()));
    batch.num_caches = 0;
    batch.new_lengths = nullptr;
  }
  return new_lengths;
}

std::tuple<Tensor, Tensor, Tensor> commit_tokens(Tensor tokens,                             // (B, C)
                                                 Tensor counts,                             // (B)
                                                 Tensor failed,                             // (B)
                                                 Tensor target_forwards,                    // (B)
                                                 Tensor num_accepted_at,                    // (B, L)
                                                 Tensor num_drafted_at,                     // (B, L)
                                                 Tensor tv_excess,                          // (B)
                                                 const Tensor& node_tokens,                 // (B, N)
                                                 const Tensor& accepted_nodes,              // (B, P)
                                                 const Tensor& num_accepted,                // (B)
                                                 const Tensor& next_token,                  // (B)
                                                 const std::optional<Tensor>& step_excess,  // (B)
                                                 const Tensor& status,                      // (B)
                                                 const Tensor& depth) {                     // (B)
  const Device device(tokens);
  specvis::CommitTokens batch = {};
  batch.B = tokens.size(0);
  batch.C = tokens.size(1);
  batch.L = num_accepted_at.size(1);
  batch.N = node_tokens.size(1);
  batch.P = accepted_nodes.size(1);
  Tensor new_tokens = specvis::new_empty(tokens, {batch.B, batch.P + 1});
  Tensor nodes = specvis::new_empty(tokens, {batch.B, batch.P + 1});
  Tensor num_new = specvis::new_empty(tokens, {batch.B});
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.counts = counts.mutable_data_ptr<int64_t>();
  batch.failed = failed.mutable_data_ptr<bool>();
  batch.target_forwards = target_forwards.mutable_data_ptr<int64_t>();
  batch.num_accepted_at = num_accepted_at.mutable_data_ptr<int64_t>();
  batch.num_drafted_at = num_drafted_at.mutable_data_ptr<int64_t>();
  batch.tv_excess = tv_excess.mutable_data_ptr<float>();
  batch.node_tokens = node_tokens.const_data_ptr<int64_t>();
  batch.accepted_nodes = accepted_nodes.const_data_ptr<int32_t>();
  batch.num_accepted = num_accepted.const_data_ptr<int32_t>();
  batch.next_token = next_token.const_data_ptr<int64_t>();
  batch.step_excess = data<float>(step_excess);
  batch.status = status.const_data_ptr<int32_t>();
  batch.depth = depth.const_data_ptr<int64_t>();
  batch.new_tokens = new_tokens.mutable_data_ptr<int64_t>();
  batch.nodes = nodes.mutable_data_ptr<int64_t>();
  batch.num_new = num_new.mutable_data_ptr<int64_t>();
  check(specvis::commit_tokens_cuda(batch, device.stream()));
  return {new_tokens, nodes, num_new};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> couple_tokens(const Tensor& target_probs,              // (B, W, V)
                                                                 const Tensor& draft_probs,               // (B, W, V)
                                                                 const Tensor& tokens,                    // (B, W)
                                                                 const Tensor& uniforms,                  // (B, W, 2)
                                                                 const std::optional<Tensor>& omega,      // (B, W)
                                                                 const std::optional<Tensor>& neighbors,  // (C, k)
                                                                 const std::optional<Tensor>& delta,      // (B)
                                                                 const std::optional<Tensor>& groups,     // (B, W, k)
                                                                 std::string cutoff, int64_t offset,
                                                                 std::string residual) {
  const int64_t B = target_probs.size(0), W = target_probs.size(1);
  const Device device(target_probs);
  Tensor new_tokens = specvis::new_empty(tokens, {B, W});
  Tensor is_kept = specvis::new_empty(tokens, {B, W}, ScalarType::Bool);
  Tensor num_kept = specvis::new_empty(tokens, {B}, ScalarType::Int);
  Tensor tv_excess = specvis::new_empty(target_probs, {B, W});
  Tensor status = specvis::new_empty(tokens, {B, W}, ScalarType::Int);
  specvis::CoupleTokens batch = {};
  batch.B = B;
  batch.W = W;
  batch.V = target_probs.size(2);
  batch.group_size = groups ? groups->size(2) : 0;
  batch.target_probs = target_probs.const_data_ptr<float>();
  batch.draft_probs = draft_probs.const_data_ptr<float>();
  batch.tokens = tokens.const_data_ptr<int64_t>();
  batch.uniforms = uniforms.const_data_ptr<float>();
  batch.omega = data<float>(omega);
  batch.neighbors = neighbors_of(neighbors, offset);
  batch.delta = data<float>(delta);
  batch.groups = data<int64_t>(groups);
  batch.is_relaxed = neighbors || groups;
  batch.cutoff = specvis::cutoff_named(cutoff);
  batch.residual = specvis::residual_named(residual);
  batch.new_tokens = new_tokens.mutable_data_ptr<int64_t>();
  batch.is_kept = is_kept.mutable_data_ptr<bool>();
  batch.num_kept = num_kept.mutable_data_ptr<int32_t>();
  batch.tv_excess = tv_excess.mutable_data_ptr<float>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::couple_tokens_cuda(batch, device.stream()));
  return {new_tokens, is_kept, num_kept, tv_excess, status};
}

std::tuple<Tensor, Tensor, Tensor> draft_children(const Tensor& logits,                    // (B, F, V)
                                                  const std::optional<Tensor>& uncond,     // (B, F, V)
                                                  const std::optional<Tensor>& uniforms,   // (B, F, K)
                                                  const Tensor& guidance,                  // (B)
                                                  const Tensor& temperature,               // (B)
                                                  const Tensor& top_k,                     // (B)
                                                  const Tensor& top_p,                     // (B)
                                                  const std::optional<Tensor>& seeds,      // (B)
                                                  const std::optional<Tensor>& positions,  // (B, F)
                                                  const std::optional<Tensor>& id_range,   // (B, F, 2)
                                                  int64_t first_id, int64_t last_id, std::string filters, int64_t K) {
  const int64_t B = logits.size(0), F = logits.size(1);
  const Device device(logits);
  Tensor tokens = specvis::new_empty(logits, {B, F, K}, ScalarType::Long);
  Tensor probs = specvis::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = specvis::new_empty(logits, {B, F}, ScalarType::Int);
  specvis::DraftChildren batch = {};
  batch.rows = logit_rows(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  batch.K = K;
  batch.uniforms = data<float>(uniforms);
  batch.seeds = data<int64_t>(seeds);
  batch.positions = data<int64_t>(positions);
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.probs = probs.mutable_data_ptr<float>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::draft_children_cuda(batch, device.stream()));
  return {tokens, probs, status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> draft_frontier(
    const Tensor& logits,                   // (B, F, V)
    const std::optional<Tensor>& uncond,    // (B, F, V)
    const Tensor& scores,                   // (B, F)
    const Tensor& ancestors,                // (B, F, W)
    const Tensor& candidates,               // (B, F)
    const Tensor& width,                    // (B)
    const Tensor& depth,                    // (B)
    const Tensor& guidance,                 // (B)
    const Tensor& temperature,              // (B)
    const Tensor& top_k,                    // (B)
    const Tensor& top_p,                    // (B)
    const std::optional<Tensor>& id_range,  // (B, F, 2)
    int64_t first_id, int64_t last_id, std::string filters, int64_t K, int64_t level, int64_t first_node,
    int64_t first_candidate) {
  const int64_t B = logits.size(0), F = logits.size(1), W = ancestors.size(2);
  const Device device(logits);
  Tensor child_tokens = specvis::new_empty(depth, {B, F * K});
  Tensor child_scores = specvis::new_empty(scores, {B, F * K});
  Tensor child_parents = specvis::new_empty(width, {B, F * K});
  Tensor tokens = specvis::new_empty(depth, {B, K});
  Tensor frontier_scores = specvis::new_empty(scores, {B, K});
  Tensor rows = specvis::new_empty(depth, {B, K});
  Tensor frontier_ancestors = specvis::new_empty(depth, {B, K, W});
  Tensor frontier_candidates = specvis::new_empty(width, {B, K});
  Tensor status = specvis::new_empty(width, {B, F});
  specvis::DraftFrontier batch = {};
  batch.rows = logit_rows(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  batch.K = K;
  batch.W = W;
  batch.level = level;
  batch.first_node = first_node;
  batch.first_candidate = first_candidate;
  batch.scores = scores.const_data_ptr<float>();
  batch.ancestors = ancestors.const_data_ptr<int64_t>();
  batch.candidates = candidates.const_data_ptr<int32_t>();
  batch.width = width.const_data_ptr<int32_t>();
  batch.depth = depth.const_data_ptr<int64_t>();
  batch.child_tokens = child_tokens.mutable_data_ptr<int64_t>();
  batch.child_scores = child_scores.mutable_data_ptr<float>();
  batch.child_parents = child_parents.mutable_data_ptr<int32_t>();
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.frontier_scores = frontier_scores.mutable_data_ptr<float>();
  batch.parent_rows = rows.mutable_data_ptr<int64_t>();
  batch.frontier_ancestors = frontier_ancestors.mutable_data_ptr<int64_t>();
  batch.frontier_candidates = frontier_candidates.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::draft_frontier_cuda(batch, device.stream()));
  return {child_tokens, child_scores,       child_parents,       tokens, frontier_scores,
          rows,         frontier_ancestors, frontier_candidates, status};
}

std::tuple<Tensor, Tensor, Tensor> draw_children(const Tensor& draft_probs,               // (B, F, V)
                                                 const std::optional<Tensor>& uniforms,   // (B, F, K)
                                                 const std::optional<Tensor>& seeds,      // (B)
                                                 const std::optional<Tensor>& positions,  // (B, F)
                                                 int64_t K) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1);
  const Device device(draft_probs);
  Tensor tokens = specvis::new_empty(draft_probs, {B, F, K}, ScalarType::Long);
  Tensor num_children = specvis::new_empty(draft_probs, {B, F}, ScalarType::Int);
  Tensor status = specvis::new_empty(draft_probs, {B, F}, ScalarType::Int);
  specvis::DrawChildren batch = {};
  batch.R = B * F;
  batch.F = F;
  batch.V = draft_probs.size(2);
  batch.K = K;
  batch.draft_probs = draft_probs.const_data_ptr<float>();
  batch.uniforms = data<float>(uniforms);
  batch.seeds = data<int64_t>(seeds);
  batch.positions = data<int64_t>(positions);
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.num_children = num_children.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::draw_children_cuda(batch, device.stream()));
  return {tokens, num_children, status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> draw_tokens(const Tensor& logits,                   // (B, N, V)
                                                       const std::optional<Tensor>& uncond,    // (B, N, V)
                                                       const Tensor& guidance,                 // (B)
                                                       const Tensor& temperature,              // (B)
                                                       const Tensor& top_k,                    // (B)
                                                       const Tensor& top_p,                    // (B)
                                                       const Tensor& seeds,                    // (B)
                                                       const Tensor& positions,                // (B, N)
                                                       const std::optional<Tensor>& id_range,  // (B, N, 2)
                                                       int64_t first_id, int64_t last_id, std::string filters,
                                                       const std::optional<Tensor>& guesses,  // (B, N)
                                                       int64_t ahead) {
  const Device device(logits);
  Tensor tokens = specvis::new_empty(positions, positions.sizes());
  Tensor num_accepted = specvis::new_empty(seeds, seeds.sizes(), ScalarType::Int);
  Tensor ahead_tokens = specvis::new_empty(positions, positions.sizes());
  Tensor status = specvis::new_empty(positions, positions.sizes(), ScalarType::Int);
  specvis::DrawTokens batch = {};
  batch.rows = logit_rows(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  batch.seeds = seeds.const_data_ptr<int64_t>();
  batch.positions = positions.const_data_ptr<int64_t>();
  batch.guesses = data<int64_t>(guesses);
  batch.ahead = ahead;
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  batch.ahead_tokens = ahead_tokens.mutable_data_ptr<int64_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::draw_tokens_cuda(batch, device.stream()));
  return {tokens, num_accepted, ahead_tokens, status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expand_tree(const Tensor& draft_probs,  // (B, F, V)
                                                       const Tensor& scores,       // (B, F)
                                                       const Tensor& width,        // (B)
                                                       int64_t num_children) {
  const int64_t B = draft_probs.size(0), F = draft_probs.size(1);
  const Device device(draft_probs);
  Tensor tokens = specvis::new_empty(draft_probs, {B, F, num_children}, ScalarType::Long);
  Tensor child_scores = specvis::new_empty(draft_probs, {B, F, num_children});
  Tensor frontier = specvis::new_empty(width, {B, num_children});
  Tensor status = specvis::new_empty(width, {B, F});
  specvis::ExpandTree batch = {};
  batch.B = B;
  batch.F = F;
  batch.V = draft_probs.size(2);
  batch.num_children = num_children;
  batch.draft_probs = draft_probs.const_data_ptr<float>();
  batch.scores = scores.const_data_ptr<float>();
  batch.width = width.const_data_ptr<int32_t>();
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.child_scores = child_scores.mutable_data_ptr<float>();
  batch.frontier = frontier.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::expand_tree_cuda(batch, device.stream()));
  return {tokens, child_scores, frontier, status};
}

std::tuple<Tensor, Tensor> guided_probs(const Tensor& logits,                   // (B, N, V)
                                        const std::optional<Tensor>& uncond,    // (B, N, V)
                                        const Tensor& guidance,                 // (B)
                                        const Tensor& temperature,              // (B)
                                        const Tensor& top_k,                    // (B)
                                        const Tensor& top_p,                    // (B)
                                        const std::optional<Tensor>& id_range,  // (B, N, 2)
                                        int64_t first_id, int64_t last_id, std::string filters) {
  const Device device(logits);
  Tensor probs = specvis::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = specvis::new_empty(logits, {logits.size(0), logits.size(1)}, ScalarType::Int);
  specvis::GuidedProbs batch = {};
  batch.rows = logit_rows(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  batch.probs = probs.mutable_data_ptr<float>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::guided_probs_cuda(batch, device.stream()));
  return {probs, status};
}

std::tuple<Tensor, Tensor, Tensor> neighborhood_sum(const Tensor& probs,      // (R, V)
                                                    const Tensor& tokens,     // (R)
                                                    const Tensor& neighbors,  // (C, k)
                                                    const Tensor& delta,      // (R)
                                                    std::string cutoff, int64_t offset) {
  const int64_t R = probs.size(0);
  const Device device(probs);
  Tensor relaxed_mass = specvis::new_empty(probs, {R});
  Tensor num_neighbors = specvis::new_empty(probs, {R}, ScalarType::Int);
  Tensor status = specvis::new_empty(probs, {R}, ScalarType::Int);
  specvis::NeighborhoodSum batch = {};
  batch.R = R;
  batch.V = probs.size(1);
  batch.probs = probs.const_data_ptr<float>();
  batch.tokens = tokens.const_data_ptr<int64_t>();
  batch.neighbors = neighbors_of(neighbors, offset);
  batch.delta = delta.const_data_ptr<float>();
  batch.cutoff = specvis::cutoff_named(cutoff);
  batch.relaxed_mass = relaxed_mass.mutable_data_ptr<float>();
  batch.num_neighbors = num_neighbors.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::neighborhood_sum_cuda(batch, device.stream()));
  return {relaxed_mass, num_neighbors, status};
}

std::tuple<Tensor, Tensor> sample_residual(const Tensor& target_probs,                // (R, V)
                                           const std::optional<Tensor>& draft_probs,  // (R, V)
                                           const Tensor& uniforms,                    // (R)
                                           const std::optional<Tensor>& omega) {      // (R)
  const int64_t R = target_probs.size(0);
  const Device device(target_probs);
  Tensor tokens = specvis::new_empty(uniforms, {R}, ScalarType::Long);
  Tensor status = specvis::new_empty(uniforms, {R}, ScalarType::Int);
  specvis::SampleResidual batch = {};
  batch.R = R;
  batch.V = target_probs.size(1);
  batch.target_probs = target_probs.const_data_ptr<float>();
  batch.draft_probs = data<float>(draft_probs);
  batch.uniforms = uniforms.const_data_ptr<float>();
  batch.omega = data<float>(omega);
  batch.tokens = tokens.mutable_data_ptr<int64_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::sample_residual_cuda(batch, device.stream()));
  return {tokens, status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> select_tree(const Tensor& tokens,   // (B, M)
                                                       const Tensor& scores,   // (B, M)
                                                       const Tensor& parents,  // (B, M)
                                                       const Tensor& root,     // (B)
                                                       const Tensor& size,     // (B)
                                                       int64_t num_nodes) {
  const int64_t B = tokens.size(0);
  const Device device(tokens);
  Tensor node_tokens = specvis::new_empty(tokens, {B, num_nodes});
  Tensor node_parents = specvis::new_empty(parents, {B, num_nodes});
  Tensor source = specvis::new_empty(parents, {B, num_nodes});
  Tensor status = specvis::new_empty(parents, {B});
  specvis::SelectTree batch = {};
  batch.B = B;
  batch.M = tokens.size(1);
  batch.num_nodes = num_nodes;
  batch.tokens = tokens.const_data_ptr<int64_t>();
  batch.scores = scores.const_data_ptr<float>();
  batch.parents = parents.const_data_ptr<int32_t>();
  batch.root = root.const_data_ptr<int64_t>();
  batch.size = size.const_data_ptr<int32_t>();
  batch.node_tokens = node_tokens.mutable_data_ptr<int64_t>();
  batch.node_parents = node_parents.mutable_data_ptr<int32_t>();
  batch.source = source.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::select_tree_cuda(batch, device.stream()));
  return {node_tokens, node_parents, source, status};
}

Tensor tree_from_mask(const Tensor& mask) {  // (B, N, N)
  const int64_t B = mask.size(0), N = mask.size(1);
  const Device device(mask);
  Tensor parents = specvis::new_empty(mask, {B, N}, ScalarType::Int);
  specvis::TreeFromMask batch = {};
  batch.B = B;
  batch.N = N;
  batch.mask = mask.const_data_ptr<bool>();
  batch.parents = parents.mutable_data_ptr<int32_t>();
  check(specvis::tree_from_mask_cuda(batch, device.stream()));
  return parents;
}

Tensor tree_from_paths(const Tensor& paths,  // (B, L, D)
                       int64_t num_nodes) {
  const int64_t B = paths.size(0);
  const Device device(paths);
  Tensor parents = specvis::new_empty(paths, {B, num_nodes}, ScalarType::Int);
  specvis::TreeFromPaths batch = {};
  batch.B = B;
  batch.L = paths.size(1);
  batch.D = paths.size(2);
  batch.N = num_nodes;
  batch.paths = paths.const_data_ptr<int64_t>();
  batch.parents = parents.mutable_data_ptr<int32_t>();
  check(specvis::tree_from_paths_cuda(batch, device.stream()));
  return parents;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_links(const Tensor& parents) {  // (B, N)
  const int64_t B = parents.size(0), N = parents.size(1);
  const Device device(parents);
  Tensor ancestors = specvis::new_empty(parents, {B, N, (N + 63) / 64}, ScalarType::Long);
  Tensor depth = specvis::new_empty(parents, {B, N});
  Tensor first_child = specvis::new_empty(parents, {B, N});
  Tensor next_sibling = specvis::new_empty(parents, {B, N});
  Tensor status = specvis::new_empty(parents, {B});
  specvis::TreeLinks batch = {};
  batch.B = B;
  batch.N = N;
  batch.parents = parents.const_data_ptr<int32_t>();
  batch.ancestors = ancestors.mutable_data_ptr<int64_t>();
  batch.depth = depth.mutable_data_ptr<int32_t>();
  batch.first_child = first_child.mutable_data_ptr<int32_t>();
  batch.next_sibling = next_sibling.mutable_data_ptr<int32_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::tree_links_cuda(batch, device.stream()));
  return {ancestors, depth, first_child, next_sibling, status};
}

Tensor tree_mask(const Tensor& ancestors,               // (B, N, W)
                 const std::optional<Tensor>& lengths,  // (B)
                 const std::optional<Tensor>& start,    // (B)
                 std::string form, int64_t columns, ScalarType dtype) {
  using specvis::Form;
  const int64_t B = ancestors.size(0), N = ancestors.size(1);
  const bool rows = form == "packed_rows", packed = rows || form == "packed", additive = form == "additive";
  const ScalarType type = packed ? ScalarType::Byte : additive ? dtype : ScalarType::Bool;
  const Device device(ancestors);
  Tensor mask = rows     ? specvis::new_empty(ancestors, {B, N, (columns + 7) / 8}, type)
                : packed ? specvis::new_empty(ancestors, {B, (N * columns + 7) / 8}, type)
                         : specvis::new_empty(ancestors, {B, N, columns}, type);
  specvis::TreeMask batch = {};
  batch.B = B;
  batch.N = N;
  batch.columns = columns;
  batch.ancestors = ancestors.const_data_ptr<int64_t>();
  batch.lengths = data<int32_t>(lengths);
  batch.start = data<int64_t>(start);
  batch.row_bits = rows ? (columns + 7) / 8 * 8 : columns;
  batch.form = packed                       ? Form::bits
               : !additive                  ? Form::bytes
               : dtype == ScalarType::Float ? Form::float32
               : dtype == ScalarType::Half  ? Form::float16
                                            : Form::bfloat16;
  batch.mask = mask.mutable_data_ptr();
  check(specvis::tree_mask_cuda(batch, device.stream()));
  return mask;
}

Tensor tree_paths(const Tensor& parents,  // (B, N)
                  int64_t max_depth) {
  const int64_t B = parents.size(0), N = parents.size(1);
  const Device device(parents);
  const auto links = tree_links(parents);
  Tensor paths = specvis::new_empty(parents, {B, N, max_depth + 1}, ScalarType::Long);
  specvis::TreePaths batch = {};
  batch.B = B;
  batch.N = N;
  batch.max_depth = max_depth;
  batch.parents = parents.const_data_ptr<int32_t>();
  batch.ancestors = std::get<0>(links).const_data_ptr<int64_t>();
  batch.depth = std::get<1>(links).const_data_ptr<int32_t>();
  batch.first_child = std::get<2>(links).const_data_ptr<int32_t>();
  batch.paths = paths.mutable_data_ptr<int64_t>();
  check(specvis::tree_paths_cuda(batch, device.stream()));
  return paths;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_chain(const Tensor& target_probs,                 // (T, V)
                                                        const Tensor& draft_tokens,                 // (D)
                                                        const Tensor& cu_num_draft_tokens,          // (B)
                                                        const Tensor& uniforms,                     // (D + B)
                                                        const std::optional<Tensor>& bonus_tokens,  // (B)
                                                        const std::optional<Tensor>& draft_probs,   // (D, V)
                                                        const std::optional<Tensor>& neighbors,     // (C, k)
                                                        const std::optional<Tensor>& delta,         // (B)
                                                        const std::optional<Tensor>& omega,         // (B)
                                                        const std::optional<Tensor>& greedy,        // (B)
                                                        std::string cutoff, int64_t offset, std::string residual,
                                                        std::string empty) {
  const int64_t B = cu_num_draft_tokens.size(0);
  const Device device(target_probs);
  Tensor num_accepted = specvis::new_empty(target_probs, {B}, ScalarType::Int);
  Tensor next_token = specvis::new_empty(target_probs, {B}, ScalarType::Long);
  Tensor tv_excess = specvis::new_empty(target_probs, {B});
  Tensor status = specvis::new_empty(target_probs, {B}, ScalarType::Int);
  specvis::VerifyChain batch = {};
  batch.B = B;
  batch.V = target_probs.size(1);
  batch.D = draft_tokens.size(0);
  batch.draft_tokens = specvis::integers_of(draft_tokens);
  batch.ends = specvis::integers_of(cu_num_draft_tokens);
  batch.target_probs = target_probs.const_data_ptr<float>();
  batch.bonus_tokens = data<int64_t>(bonus_tokens);
  batch.greedy = data<bool>(greedy);
  batch.uniforms = uniforms.const_data_ptr<float>();
  batch.draft_probs = data<float>(draft_probs);
  batch.neighbors = neighbors_of(neighbors, offset);
  batch.delta = data<float>(delta);
  batch.omega = data<float>(omega);
  batch.cutoff = specvis::cutoff_named(cutoff);
  batch.residual = specvis::residual_named(residual);
  batch.empty = specvis::empty_named(empty);
  batch.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  batch.next_token = next_token.mutable_data_ptr<int64_t>();
  batch.tv_excess = tv_excess.mutable_data_ptr<float>();
  batch.status = status.mutable_data_ptr<int32_t>();
  int64_t bytes = 0;
  check(specvis::verify_chain_scratch(batch, &bytes));
  Tensor scratch = specvis::new_empty(target_probs, {bytes}, ScalarType::Char);
  batch.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  check(specvis::verify_chain_cuda(batch, device.stream()));
  return {num_accepted, next_token, tv_excess, status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_greedy(const Tensor& target_tokens,  // (B, N)
                                                         const Tensor& tokens,         // (B, N)
                                                         const Tensor& first_child,    // (B, N)
                                                         const Tensor& next_sibling,   // (B, N)
                                                         int64_t max_depth) {
  const int64_t B = tokens.size(0);
  const Device device(tokens);
  Tensor accepted_nodes = specvis::new_empty(first_child, {B, max_depth});
  Tensor num_accepted = specvis::new_empty(first_child, {B});
  Tensor next_token = specvis::new_empty(tokens, {B});
  Tensor status = specvis::new_empty(first_child, {B});
  specvis::VerifyGreedy batch = {};
  batch.B = B;
  batch.N = tokens.size(1);
  batch.max_depth = max_depth;
  batch.target_tokens = target_tokens.const_data_ptr<int64_t>();
  batch.tokens = tokens.const_data_ptr<int64_t>();
  batch.first_child = first_child.const_data_ptr<int32_t>();
  batch.next_sibling = next_sibling.const_data_ptr<int32_t>();
  batch.accepted_nodes = accepted_nodes.mutable_data_ptr<int32_t>();
  batch.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  batch.next_token = next_token.mutable_data_ptr<int64_t>();
  batch.status = status.mutable_data_ptr<int32_t>();
  check(specvis::verify_greedy_cuda(batch, device.stream()));
  return {accepted_nodes, num_accepted, next_token, status};
}

Verified verify_logits(const Tensor& logits,                      // (B, N, V)
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
                       int64_t first_id, int64_t last_id, std::string filters, std::string cutoff, int64_t offset,
                       std::string residual, std::string empty, int64_t max_depth) {
  const Device device(logits);
  specvis::VerifyLogits batch = {};
  Verified outputs = verification(batch, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                                  delta, omega, cutoff, offset, residual, empty, max_depth, logits.size(2));
  batch.rows = logit_rows(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  batch.seeds = data<int64_t>(seeds);
  batch.positions = data<int64_t>(positions);
  int64_t bytes = 0;
  check(specvis::verify_logits_scratch(batch, &bytes));
  Tensor scratch = specvis::new_empty(tokens, {bytes}, ScalarType::Char);
  batch.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  check(specvis::verify_logits_cuda(batch, device.stream()));
  return outputs;
}

Verified verify_tree(const Tensor& target_probs,                // (B, N, V)
                     const Tensor& tokens,                      // (B, N)
                     const Tensor& first_child,                 // (B, N)
                     const Tensor& next_sibling,                // (B, N)
                     const Tensor& uniforms,                    // (B, N)
                     const std::optional<Tensor>& draft_probs,  // (B, M, V)
                     const std::optional<Tensor>& draft_row,    // (B, N)
                     const std::optional<Tensor>& neighbors,    // (C, k)
                     const std::optional<Tensor>& delta,        // (B)
                     const std::optional<Tensor>& omega,        // (B, P)
                     const std::optional<Tensor>& greedy,       // (B)
                     std::string cutoff, int64_t offset, std::string residual, std::string empty, int64_t max_depth) {
  const Device device(target_probs);
  specvis::VerifyTree batch = {};
  Verified outputs = verification(batch, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                                  delta, omega, cutoff, offset, residual, empty, max_depth, target_probs.size(2));
  batch.target_probs = target_probs.const_data_ptr<float>();
  batch.greedy = data<bool>(greedy);
  int64_t bytes = 0;
  check(specvis::verify_tree_scratch(batch, &bytes));
  Tensor scratch = specvis::new_empty(tokens, {bytes}, ScalarType::Char);
  batch.scratch = static_cast<char*>(scratch.mutable_data_ptr());
  check(specvis::verify_tree_cuda(batch, device.stream()));
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(LIBRARY, DEVICE, m) {
  m.impl("commit_kv", SPECVIS_BOX(commit_kv, &commit_kv));
  m.impl("commit_tokens", SPECVIS_BOX(commit_tokens, &commit_tokens));
  m.impl("couple_tokens", SPECVIS_BOX(couple_tokens, &couple_tokens));
  m.impl("draft_children", SPECVIS_BOX(draft_children, &draft_children));
  m.impl("draft_frontier", SPECVIS_BOX(draft_frontier, &draft_frontier));
  m.impl("draw_children", SPECVIS_BOX(draw_children, &draw_children));
  m.impl("draw_tokens", SPECVIS_BOX(draw_tokens, &draw_tokens));
  m.impl("expand_tree", SPECVIS_BOX(expand_tree, &expand_tree));
  m.impl("guided_probs", SPECVIS_BOX(guided_probs, &guided_probs));
  m.impl("neighborhood_sum", SPECVIS_BOX(neighborhood_sum, &neighborhood_sum));
  m.impl("sample_residual", SPECVIS_BOX(sample_residual, &sample_residual));
  m.impl("select_tree", SPECVIS_BOX(select_tree, &select_tree));
  m.impl("tree_from_mask", SPECVIS_BOX(tree_from_mask, &tree_from_mask));
  m.impl("tree_from_paths", SPECVIS_BOX(tree_from_paths, &tree_from_paths));
  m.impl("tree_links", SPECVIS_BOX(tree_links, &tree_links));
  m.impl("tree_mask", SPECVIS_BOX(tree_mask, &tree_mask));
  m.impl("tree_paths", SPECVIS_BOX(tree_paths, &tree_paths));
  m.impl("verify_chain", SPECVIS_BOX(verify_chain, &verify_chain));
  m.impl("verify_greedy", SPECVIS_BOX(verify_greedy, &verify_greedy));
  m.impl("verify_logits", SPECVIS_BOX(verify_logits, &verify_logits));
  m.impl("verify_tree", SPECVIS_BOX(verify_tree, &verify_tree));
}
