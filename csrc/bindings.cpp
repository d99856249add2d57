// The kernels as ops of torch. A function for each op checks the arguments, allocates the results, fills the op's
// struct and runs the kernel. This file is compiled three times: for the CPU, for CUDA (SPECVIS_CUDA), and for the CUDA
// kernels that tests/cuda_on_cpu runs on CPU tensors (SPECVIS_EMULATED too). Nothing of libtorch_cuda is linked, so
// that one library loads beside any build of torch.
#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"

#ifdef SPECVIS_EMULATED
#define LIBRARY specvis_kernels_emulated
#else
#define LIBRARY specvis_kernels
#endif
#if defined(SPECVIS_CUDA) && !defined(SPECVIS_EMULATED)
#define DEVICE CUDA
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#else
#define DEVICE CPU
#endif

#ifdef SPECVIS_CUDA
#define RUN(op, arguments, batch)                      \
  arguments.run([&] {                                  \
    const Device device(arguments.first());            \
    check(specvis::op##_cuda(batch, device.stream())); \
  })
#define RUN_WITH_SCRATCH(op, arguments, batch)                      \
  arguments.run([&] {                                               \
    const Device device(arguments.first());                         \
    int64_t bytes = 0;                                              \
    check(specvis::op##_scratch(batch, &bytes));                    \
    const Tensor scratch = arguments.make({bytes}, &batch.scratch); \
    check(specvis::op##_cuda(batch, device.stream()));              \
  })
#else
#define RUN(op, arguments, batch) arguments.run([&] { specvis::op##_cpu(batch); })
#define RUN_WITH_SCRATCH RUN
#endif

namespace {

using specvis::Arguments;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
template <size_t n>
using Tensors = decltype(std::tuple_cat(std::array<Tensor, n>()));

#ifdef SPECVIS_CUDA
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
#endif

// Rows of logits. `n` is the letter of how many rows a request has.
specvis::LogitRows read_rows(Arguments& a, char n, const Tensor& logits, const MaybeTensor& uncond,
                             const Tensor& guidance, const Tensor& temperature, const Tensor& top_k,
                             const Tensor& top_p, const MaybeTensor& id_range, int64_t first_id, int64_t last_id,
                             const std::string& filters) {
  const char sizes[] = {'B', n, 'V', 0}, range_sizes[] = {'B', n, '2', 0};
  specvis::LogitRows rows = {};
  rows.type = a.read_floats("logits", logits, sizes, &rows.logits);
  if (uncond) rows.uncond = a.read("uncond", *uncond, sizes, logits.scalar_type());
  a.read("guidance", guidance, "B", &rows.guidance);
  a.read("temperature", temperature, "B", &rows.temperature);
  a.read("top_k", top_k, "B", &rows.top_k);
  a.read("top_p", top_p, "B", &rows.top_p);
  a.read("id_range", id_range, range_sizes, &rows.id_range);
  rows.top_p_first = a.name<int>("filters", filters, {"k_then_p", "p_then_k"});
  a.sizes(sizes, rows.B, rows.N, rows.V);
  a.require(0 <= first_id && first_id < last_id && last_id <= rows.V, "first_id and last_id must be a range of ids");
  rows.first_id = first_id;
  rows.last_id = last_id;
  return rows;
}

template <class Batch>
void read_neighbors(Arguments& a, Batch& batch, const MaybeTensor& neighbors, const MaybeTensor& delta,
                    const std::string& cutoff, int64_t offset, const std::string& residual) {
  a.require(neighbors.has_value() == delta.has_value(), "neighbors and delta must be given together");
  if (neighbors) batch.neighbors = a.read_neighbors(*neighbors, offset);
  a.read("delta", delta, "B", &batch.delta);
  batch.cutoff = a.name<specvis::Cutoff>("cutoff", cutoff, {"tvd", "ratio", "jsd"});
  batch.residual = a.name<specvis::ResidualRule>("residual", residual, {"optimal", "relaxed", "released"});
}

specvis::Empty empty_of(const Arguments& a, const std::string& empty) {
  return a.name<specvis::Empty>("empty", empty, {"target", "uniform"});
}

// Uniform numbers of these sizes, or else seeds and positions.
template <class Batch>
void read_randomness(Arguments& a, Batch& batch, const MaybeTensor& uniforms, const char* sizes,
                     const MaybeTensor& seeds, const MaybeTensor& positions, const char* position_sizes) {
  a.require(uniforms.has_value() != seeds.has_value(), "exactly one of uniforms and seeds must be given");
  a.require(seeds.has_value() == positions.has_value(), "seeds and positions must be given together");
  a.read("uniforms", uniforms, sizes, &batch.uniforms);
  a.read("seeds", seeds, "B", &batch.seeds);
  a.read("positions", positions, position_sizes, &batch.positions);
}

// accepted_nodes, num_accepted, next_token, tv_excess, status
using Verified = Tensors<5>;

// Reads the tree and makes the results of verify_logits and verify_tree, whose rows have been read.
Verified read_tree(Arguments& a, specvis::VerifyParams& batch, const Tensor& tokens, const Tensor& first_child,
                   const Tensor& next_sibling, const MaybeTensor& draft_probs, const MaybeTensor& draft_row,
                   const MaybeTensor& omega, int64_t max_depth) {
  a.read("tokens", tokens, "BN", &batch.tokens);
  a.read("first_child", first_child, "BN", &batch.first_child);
  a.read("next_sibling", next_sibling, "BN", &batch.next_sibling);
  a.require(draft_probs.has_value() == draft_row.has_value(), "draft_probs and draft_row must be given together");
  a.read("draft_probs", draft_probs, "BMV", &batch.draft_probs);
  a.read("draft_row", draft_row, "BN", &batch.draft_row);
  a.size("max_depth", max_depth, 'P');
  a.read("omega", omega, "BP", &batch.omega);
  const int64_t B = batch.B = a.size('B');
  a.sizes("NV", batch.N, batch.V);
  batch.num_draft_rows = draft_probs ? a.size('M') : 0;
  batch.max_depth = max_depth;
  return {a.make({B, max_depth}, &batch.accepted_nodes), a.make({B}, &batch.num_accepted),
          a.make({B}, &batch.next_token), a.make({B}, &batch.tv_excess), a.make({B}, &batch.status)};
}

Tensor commit_kv(const std::vector<Tensor>& caches, const Tensor& accepted_nodes, const Tensor& num_accepted,
                 const Tensor& lengths, const MaybeTensor& start, const MaybeTensor& slots, int64_t row_dim,
                 int64_t column_dim) {
  Arguments a("commit_kv", "T");
  a.require(!caches.empty(), "caches", "must be at least one tensor");
  const Tensor& first = caches[0];
  std::vector<char*> data;
  for (const Tensor& cache : caches) {
    const auto sizes = cache.sizes(), first_sizes = first.sizes();
    a.require(cache.scalar_type() == first.scalar_type() && sizes.size() == first_sizes.size() &&
                  std::equal(sizes.begin(), sizes.end(), first_sizes.begin()),
              "caches", "must have one shape and dtype");
    data.push_back(static_cast<char*>(a.write("caches", cache)));
  }
  specvis::CommitKv batch = {};
  specvis::Moves& moves = batch.moves;
  a.read("accepted_nodes", accepted_nodes, "BP", &moves.accepted_nodes);
  a.read("num_accepted", num_accepted, "B", &moves.num_accepted);
  a.read("lengths", lengths, "B", &moves.lengths);
  a.read("start", start, "B", &moves.start);
  a.read("slots", slots, "RT", &moves.slots);
  if (!start) moves.start = moves.lengths;
  const auto bytes = static_cast<int64_t>(first.element_size());
  a.require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, "caches must have 1, 2, 4 or 8 bytes an element");
  a.require(row_dim >= -1 && row_dim < column_dim && column_dim < first.dim() && first.size(column_dim) >= 1,
            "row_dim and column_dim are no dimensions of the caches, in this order");
  a.require(slots.has_value() == (row_dim == -1), "row_dim must be -1 with slots, and only then");
  moves.B = a.size('B');
  moves.P = a.size('P');
  moves.R = slots ? a.size('R') : first.size(row_dim);
  moves.T = slots ? a.size('T') : first.size(column_dim);
  a.require_rows_of_requests(moves.R);
  specvis::set_layout(moves, [&](int64_t d) { return first.size(d); }, first.dim(), row_dim, column_dim, bytes);
  Tensor new_lengths = a.make({moves.B}, &batch.new_lengths);
  for (char* cache : data) {
    batch.caches[batch.num_caches++] = cache;
    if (batch.num_caches < specvis::kCachesALaunch && cache != data.back()) continue;
    RUN(commit_kv, a, batch);
    batch.num_caches = 0;
    batch.new_lengths = nullptr;
  }
  return new_lengths;
}

Tensors<3> commit_tokens(const Tensor& tokens, const Tensor& counts, const Tensor& failed,
                         const Tensor& target_forwards, const Tensor& num_accepted_at, const Tensor& num_drafted_at,
                         const Tensor& tv_excess, const Tensor& node_tokens, const Tensor& accepted_nodes,
                         const Tensor& num_accepted, const Tensor& next_token, const MaybeTensor& step_excess,
                         const Tensor& status, const Tensor& depth) {
  Arguments a("commit_tokens", "LN");
  specvis::CommitTokens batch = {};
  a.write("tokens", tokens, "BC", &batch.tokens);
  a.write("counts", counts, "B", &batch.counts);
  a.write("failed", failed, "B", &batch.failed);
  a.write("target_forwards", target_forwards, "B", &batch.target_forwards);
  a.write("num_accepted_at", num_accepted_at, "BL", &batch.num_accepted_at);
  a.write("num_drafted_at", num_drafted_at, "BL", &batch.num_drafted_at);
  a.write("tv_excess", tv_excess, "B", &batch.tv_excess);
  a.read("node_tokens", node_tokens, "BN", &batch.node_tokens);
  a.read("accepted_nodes", accepted_nodes, "BP", &batch.accepted_nodes);
  a.read("num_accepted", num_accepted, "B", &batch.num_accepted);
  a.read("next_token", next_token, "B", &batch.next_token);
  a.read("step_excess", step_excess, "B", &batch.step_excess);
  a.read("status", status, "B", &batch.status);
  a.read("depth", depth, "B", &batch.depth);
  const int64_t B = batch.B = a.size('B'), P = batch.P = a.size('P');
  a.sizes("CLN", batch.C, batch.L, batch.N);
  a.require(batch.C >= batch.L, "tokens has too few columns");
  Tensor new_tokens = a.make({B, P + 1}, &batch.new_tokens), nodes = a.make({B, P + 1}, &batch.nodes);
  Tensor num_new = a.make({B}, &batch.num_new);
  RUN(commit_tokens, a, batch);
  return {new_tokens, nodes, num_new};
}

Tensors<5> couple_tokens(const Tensor& target_probs, const Tensor& draft_probs, const Tensor& tokens,
                         const Tensor& uniforms, const MaybeTensor& omega, const MaybeTensor& neighbors,
                         const MaybeTensor& delta, const MaybeTensor& groups, const std::string& cutoff, int64_t offset,
                         const std::string& residual) {
  Arguments a("couple_tokens", "WVCk");
  specvis::CoupleTokens batch = {};
  a.read("target_probs", target_probs, "BWV", &batch.target_probs);
  a.read("draft_probs", draft_probs, "BWV", &batch.draft_probs);
  a.read("tokens", tokens, "BW", &batch.tokens);
  a.read("uniforms", uniforms, "BW2", &batch.uniforms);
  a.read("omega", omega, "BW", &batch.omega);
  a.read("groups", groups, "BWg", &batch.groups);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  const int64_t B = batch.B = a.size('B'), W = batch.W = a.size('W');
  batch.V = a.size('V');
  batch.group_size = groups ? a.size('g') : 0;
  batch.is_relaxed = neighbors || groups;
  Tensor new_tokens = a.make({B, W}, &batch.new_tokens), is_kept = a.make({B, W}, &batch.is_kept);
  Tensor num_kept = a.make({B}, &batch.num_kept);
  Tensor tv_excess = a.make({B, W}, &batch.tv_excess), status = a.make({B, W}, &batch.status);
  RUN(couple_tokens, a, batch);
  return {new_tokens, is_kept, num_kept, tv_excess, status};
}

Tensors<3> draft_children(const Tensor& logits, const MaybeTensor& uncond, const MaybeTensor& uniforms,
                          const Tensor& guidance, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                          const MaybeTensor& seeds, const MaybeTensor& positions, const MaybeTensor& id_range,
                          int64_t first_id, int64_t last_id, const std::string& filters, int64_t num_children) {
  Arguments a("draft_children", "FVK");
  specvis::DraftChildren batch = {};
  batch.rows =
      read_rows(a, 'F', logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  a.size("num_children", num_children, 'K');
  read_randomness(a, batch, uniforms, "BFK", seeds, positions, "BF");
  const int64_t B = a.size('B'), F = a.size('F'), K = batch.K = num_children;
  a.require(F * K <= specvis::kMost, "there are too many candidates");
  Tensor tokens = a.make({B, F, K}, &batch.tokens), probs = a.make({B, F, a.size('V')}, &batch.probs);
  Tensor status = a.make({B, F}, &batch.status);
  RUN(draft_children, a, batch);
  return {tokens, probs, status};
}

Tensors<9> draft_frontier(const Tensor& logits, const MaybeTensor& uncond, const Tensor& scores,
                          const Tensor& ancestors, const Tensor& candidates, const Tensor& width, const Tensor& depth,
                          const Tensor& guidance, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                          const MaybeTensor& id_range, int64_t first_id, int64_t last_id, const std::string& filters,
                          int64_t num_children, int64_t level, int64_t first_node, int64_t first_candidate) {
  Arguments a("draft_frontier", "FVWK");
  specvis::DraftFrontier batch = {};
  batch.rows =
      read_rows(a, 'F', logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  a.read("scores", scores, "BF", &batch.scores);
  a.read("ancestors", ancestors, "BFW", &batch.ancestors);
  a.read("candidates", candidates, "BF", &batch.candidates);
  a.read("width", width, "B", &batch.width);
  a.read("depth", depth, "B", &batch.depth);
  a.size("num_children", num_children, 'K');
  a.count("level", level, 1);
  a.count("first_node", first_node, 1);
  a.count("first_candidate", first_candidate, 0);
  const int64_t B = a.size('B'), F = a.size('F'), K = batch.K = num_children, W = batch.W = a.size('W');
  a.require(F * K + first_candidate <= specvis::kMost, "there are too many candidates");
  a.require(first_node + K <= 64 * W, "ancestors must have a word for each 64 nodes");
  batch.level = level;
  batch.first_node = first_node;
  batch.first_candidate = first_candidate;
  Tensor child_tokens = a.make({B, F * K}, &batch.child_tokens), child_scores = a.make({B, F * K}, &batch.child_scores);
  Tensor child_parents = a.make({B, F * K}, &batch.child_parents), tokens = a.make({B, K}, &batch.tokens);
  Tensor frontier_scores = a.make({B, K}, &batch.frontier_scores), rows = a.make({B, K}, &batch.parent_rows);
  Tensor frontier_ancestors = a.make({B, K, W}, &batch.frontier_ancestors);
  Tensor frontier_candidates = a.make({B, K}, &batch.frontier_candidates), status = a.make({B, F}, &batch.status);
  RUN(draft_frontier, a, batch);
  return {child_tokens, child_scores,       child_parents,       tokens, frontier_scores,
          rows,         frontier_ancestors, frontier_candidates, status};
}

Tensors<3> draw_children(const Tensor& draft_probs, const MaybeTensor& uniforms, const MaybeTensor& seeds,
                         const MaybeTensor& positions, int64_t num_children) {
  Arguments a("draw_children", "FVK");
  specvis::DrawChildren batch = {};
  a.read("draft_probs", draft_probs, "BFV", &batch.draft_probs);
  a.size("num_children", num_children, 'K');
  read_randomness(a, batch, uniforms, "BFK", seeds, positions, "BF");
  const int64_t B = a.size('B'), F = batch.F = a.size('F'), K = batch.K = num_children;
  a.require(F * K <= specvis::kMost, "there are too many candidates");
  batch.R = B * F;
  batch.V = a.size('V');
  Tensor tokens = a.make({B, F, K}, &batch.tokens), found = a.make({B, F}, &batch.num_children);
  Tensor status = a.make({B, F}, &batch.status);
  RUN(draw_children, a, batch);
  return {tokens, found, status};
}

Tensors<4> draw_tokens(const Tensor& logits, const MaybeTensor& uncond, const Tensor& guidance,
                       const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& seeds,
                       const Tensor& positions, const MaybeTensor& id_range, int64_t first_id, int64_t last_id,
                       const std::string& filters, const MaybeTensor& guesses, int64_t ahead) {
  Arguments a("draw_tokens", "NV");
  specvis::DrawTokens batch = {};
  batch.rows =
      read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  a.read("seeds", seeds, "B", &batch.seeds);
  a.read("positions", positions, "BN", &batch.positions);
  a.read("guesses", guesses, "BN", &batch.guesses);
  a.count("ahead", ahead, 0);
  batch.ahead = ahead;
  const int64_t B = a.size('B'), N = a.size('N');
  Tensor tokens = a.make({B, N}, &batch.tokens), num_accepted = a.make({B}, &batch.num_accepted);
  Tensor ahead_tokens = a.make({B, N}, &batch.ahead_tokens), status = a.make({B, N}, &batch.status);
  RUN(draw_tokens, a, batch);
  return {tokens, num_accepted, ahead_tokens, status};
}

Tensors<4> expand_tree(const Tensor& draft_probs, const Tensor& scores, const Tensor& width, int64_t num_children) {
  Arguments a("expand_tree", "FVK");
  specvis::ExpandTree batch = {};
  a.read("draft_probs", draft_probs, "BFV", &batch.draft_probs);
  a.read("scores", scores, "BF", &batch.scores);
  a.read("width", width, "B", &batch.width);
  a.size("num_children", num_children, 'K');
  const int64_t B = batch.B = a.size('B'), F = batch.F = a.size('F'), K = batch.num_children = num_children;
  a.require(F * K <= specvis::kMost, "there are too many candidates");
  batch.V = a.size('V');
  Tensor tokens = a.make({B, F, K}, &batch.tokens), child_scores = a.make({B, F, K}, &batch.child_scores);
  Tensor frontier = a.make({B, K}, &batch.frontier), status = a.make({B, F}, &batch.status);
  RUN(expand_tree, a, batch);
  return {tokens, child_scores, frontier, status};
}

Tensors<2> guided_probs(const Tensor& logits, const MaybeTensor& uncond, const Tensor& guidance,
                        const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                        const MaybeTensor& id_range, int64_t first_id, int64_t last_id, const std::string& filters) {
  Arguments a("guided_probs", "V");
  specvis::GuidedProbs batch = {};
  batch.rows =
      read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  const int64_t B = a.size('B'), N = a.size('N');
  Tensor probs = a.make({B, N, a.size('V')}, &batch.probs), status = a.make({B, N}, &batch.status);
  RUN(guided_probs, a, batch);
  return {probs, status};
}

Tensors<3> neighborhood_sum(const Tensor& probs, const Tensor& tokens, const Tensor& neighbors, const Tensor& delta,
                            const std::string& cutoff, int64_t offset) {
  Arguments a("neighborhood_sum", "VCk");
  specvis::NeighborhoodSum batch = {};
  a.read("probs", probs, "RV", &batch.probs);
  a.read("tokens", tokens, "R", &batch.tokens);
  batch.neighbors = a.read_neighbors(neighbors, offset);
  a.read("delta", delta, "R", &batch.delta);
  batch.cutoff = a.name<specvis::Cutoff>("cutoff", cutoff, {"tvd", "ratio", "jsd"});
  const int64_t R = batch.R = a.size('R');
  batch.V = a.size('V');
  Tensor relaxed_mass = a.make({R}, &batch.relaxed_mass), num_neighbors = a.make({R}, &batch.num_neighbors);
  Tensor status = a.make({R}, &batch.status);
  RUN(neighborhood_sum, a, batch);
  return {relaxed_mass, num_neighbors, status};
}

Tensors<2> sample_residual(const Tensor& target_probs, const MaybeTensor& draft_probs, const Tensor& uniforms,
                           const MaybeTensor& omega) {
  Arguments a("sample_residual", "V");
  specvis::SampleResidual batch = {};
  a.read("target_probs", target_probs, "RV", &batch.target_probs);
  a.read("draft_probs", draft_probs, "RV", &batch.draft_probs);
  a.read("uniforms", uniforms, "R", &batch.uniforms);
  a.read("omega", omega, "R", &batch.omega);
  const int64_t R = batch.R = a.size('R');
  batch.V = a.size('V');
  Tensor tokens = a.make({R}, &batch.tokens), status = a.make({R}, &batch.status);
  RUN(sample_residual, a, batch);
  return {tokens, status};
}

Tensors<4> select_tree(const Tensor& tokens, const Tensor& scores, const Tensor& parents, const Tensor& root,
                       const Tensor& size, int64_t num_nodes) {
  Arguments a("select_tree", "N");
  specvis::SelectTree batch = {};
  a.read("tokens", tokens, "BM", &batch.tokens);
  a.read("scores", scores, "BM", &batch.scores);
  a.read("parents", parents, "BM", &batch.parents);
  a.read("root", root, "B", &batch.root);
  a.read("size", size, "B", &batch.size);
  a.size("num_nodes", num_nodes, 'N');
  const int64_t B = batch.B = a.size('B'), N = batch.num_nodes = num_nodes;
  batch.M = a.size('M');
  Tensor node_tokens = a.make({B, N}, &batch.node_tokens), node_parents = a.make({B, N}, &batch.node_parents);
  Tensor source = a.make({B, N}, &batch.source), status = a.make({B}, &batch.status);
  RUN(select_tree, a, batch);
  return {node_tokens, node_parents, source, status};
}

Tensor tree_from_mask(const Tensor& mask) {
  Arguments a("tree_from_mask", "N");
  specvis::TreeFromMask batch = {};
  a.read("mask", mask, "BNN", &batch.mask);
  a.sizes("BN", batch.B, batch.N);
  Tensor parents = a.make({batch.B, batch.N}, &batch.parents);
  RUN(tree_from_mask, a, batch);
  return parents;
}

Tensor tree_from_paths(const Tensor& paths, int64_t num_nodes) {
  Arguments a("tree_from_paths", "N");
  specvis::TreeFromPaths batch = {};
  a.read("paths", paths, "BLD", &batch.paths);
  a.size("num_nodes", num_nodes, 'N');
  a.sizes("BLD", batch.B, batch.L, batch.D);
  batch.N = num_nodes;
  Tensor parents = a.make({batch.B, num_nodes}, &batch.parents);
  RUN(tree_from_paths, a, batch);
  return parents;
}

Tensors<5> tree_links(const Tensor& parents) {
  Arguments a("tree_links", "N");
  specvis::TreeLinks batch = {};
  a.read("parents", parents, "BN", &batch.parents);
  const int64_t B = batch.B = a.size('B'), N = batch.N = a.size('N');
  Tensor ancestors = a.make({B, N, (N + 63) / 64}, &batch.ancestors), depth = a.make({B, N}, &batch.depth);
  Tensor first_child = a.make({B, N}, &batch.first_child), next_sibling = a.make({B, N}, &batch.next_sibling);
  Tensor status = a.make({B}, &batch.status);
  RUN(tree_links, a, batch);
  return {ancestors, depth, first_child, next_sibling, status};
}

Tensor tree_mask(const Tensor& ancestors, const MaybeTensor& lengths, const MaybeTensor& start, const std::string& form,
                 int64_t columns, ScalarType dtype) {
  using specvis::Form;
  Arguments a("tree_mask", "NC");
  specvis::TreeMask batch = {};
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("start", start, "B", &batch.start);
  a.size("columns", columns, 'C');
  const int number = a.name<int>("form", form, {"bool", "additive", "packed", "packed_rows"});
  const bool additive = number == 1, packed = number >= 2, rows = number == 3;
  const int64_t B = batch.B = a.size('B'), N = batch.N = a.size('N');
  a.require(a.size('W') == (N + 63) / 64, "ancestors", "must have a word for each 64 nodes");
  a.require(!additive || dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
            "dtype", "is no type of floats");
  batch.columns = columns;
  batch.row_bits = rows ? (columns + 7) / 8 * 8 : columns;
  batch.form = packed                       ? Form::bits
               : !additive                  ? Form::bytes
               : dtype == ScalarType::Float ? Form::float32
               : dtype == ScalarType::Half  ? Form::float16
                                            : Form::bfloat16;
  Tensor mask = rows     ? a.make({B, N, (columns + 7) / 8}, ScalarType::Byte)
                : packed ? a.make({B, (N * columns + 7) / 8}, ScalarType::Byte)
                         : a.make({B, N, columns}, additive ? dtype : ScalarType::Bool);
  batch.mask = mask.mutable_data_ptr();
  RUN(tree_mask, a, batch);
  return mask;
}

Tensor tree_paths(const Tensor& parents, int64_t max_depth) {
  Arguments a("tree_paths", "N");
  specvis::TreePaths batch = {};
  a.read("parents", parents, "BN", &batch.parents);
  a.size("max_depth", max_depth, 'P');
  const int64_t B = batch.B = a.size('B'), N = batch.N = a.size('N');
  batch.max_depth = max_depth;
#ifdef SPECVIS_CUDA
  const auto links = tree_links(parents);
  batch.ancestors = std::get<0>(links).const_data_ptr<int64_t>();
  batch.depth = std::get<1>(links).const_data_ptr<int32_t>();
  batch.first_child = std::get<2>(links).const_data_ptr<int32_t>();
#endif
  Tensor paths = a.make({B, N, max_depth + 1}, &batch.paths);
  RUN(tree_paths, a, batch);
  return paths;
}

Tensors<4> verify_chain(const Tensor& target_probs, const Tensor& draft_tokens, const Tensor& cu_num_draft_tokens,
                        const Tensor& uniforms, const MaybeTensor& bonus_tokens, const MaybeTensor& draft_probs,
                        const MaybeTensor& neighbors, const MaybeTensor& delta, const MaybeTensor& omega,
                        const MaybeTensor& greedy, const std::string& cutoff, int64_t offset,
                        const std::string& residual, const std::string& empty) {
  Arguments a("verify_chain", "VCk");
  specvis::VerifyChain batch = {};
  a.read("target_probs", target_probs, "TV", &batch.target_probs);
  batch.draft_tokens = a.read_integers("draft_tokens", draft_tokens, "D");
  batch.ends = a.read_integers("cu_num_draft_tokens", cu_num_draft_tokens, "B");
  a.read("uniforms", uniforms, "U", &batch.uniforms);
  a.read("bonus_tokens", bonus_tokens, "B", &batch.bonus_tokens);
  a.read("draft_probs", draft_probs, "DV", &batch.draft_probs);
  a.read("omega", omega, "B", &batch.omega);
  a.read("greedy", greedy, "B", &batch.greedy);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  const int64_t B = batch.B = a.size('B'), D = batch.D = a.size('D');
  batch.V = a.size('V');
  a.require(a.size('U') == D + B && a.size('T') == (bonus_tokens ? D : D + B),
            "there must be a row for each draft and request");
  Tensor num_accepted = a.make({B}, &batch.num_accepted), next_token = a.make({B}, &batch.next_token);
  Tensor tv_excess = a.make({B}, &batch.tv_excess), status = a.make({B}, &batch.status);
  RUN_WITH_SCRATCH(verify_chain, a, batch);
  return {num_accepted, next_token, tv_excess, status};
}

Tensors<4> verify_greedy(const Tensor& target_tokens, const Tensor& tokens, const Tensor& first_child,
                         const Tensor& next_sibling, int64_t max_depth) {
  Arguments a("verify_greedy", "N");
  specvis::VerifyGreedy batch = {};
  a.read("target_tokens", target_tokens, "BN", &batch.target_tokens);
  a.read("tokens", tokens, "BN", &batch.tokens);
  a.read("first_child", first_child, "BN", &batch.first_child);
  a.read("next_sibling", next_sibling, "BN", &batch.next_sibling);
  a.size("max_depth", max_depth, 'P');
  const int64_t B = batch.B = a.size('B');
  batch.N = a.size('N');
  batch.max_depth = max_depth;
  Tensor accepted_nodes = a.make({B, max_depth}, &batch.accepted_nodes),
         num_accepted = a.make({B}, &batch.num_accepted);
  Tensor next_token = a.make({B}, &batch.next_token), status = a.make({B}, &batch.status);
  RUN(verify_greedy, a, batch);
  return {accepted_nodes, num_accepted, next_token, status};
}

Verified verify_logits(const Tensor& logits, const MaybeTensor& uncond, const Tensor& tokens, const Tensor& first_child,
                       const Tensor& next_sibling, const MaybeTensor& uniforms, const Tensor& guidance,
                       const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const MaybeTensor& id_range,
                       const MaybeTensor& draft_probs, const MaybeTensor& draft_row, const MaybeTensor& neighbors,
                       const MaybeTensor& delta, const MaybeTensor& omega, const MaybeTensor& seeds,
                       const MaybeTensor& positions, int64_t first_id, int64_t last_id, const std::string& filters,
                       const std::string& cutoff, int64_t offset, const std::string& residual, const std::string& empty,
                       int64_t max_depth) {
  Arguments a("verify_logits", "NVMCk");
  specvis::VerifyLogits batch = {};
  batch.rows =
      read_rows(a, 'N', logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters);
  read_randomness(a, batch, uniforms, "BN", seeds, positions, "BN");
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  Verified results = read_tree(a, batch, tokens, first_child, next_sibling, draft_probs, draft_row, omega, max_depth);
  RUN_WITH_SCRATCH(verify_logits, a, batch);
  return results;
}

Verified verify_tree(const Tensor& target_probs, const Tensor& tokens, const Tensor& first_child,
                     const Tensor& next_sibling, const Tensor& uniforms, const MaybeTensor& draft_probs,
                     const MaybeTensor& draft_row, const MaybeTensor& neighbors, const MaybeTensor& delta,
                     const MaybeTensor& omega, const MaybeTensor& greedy, const std::string& cutoff, int64_t offset,
                     const std::string& residual, const std::string& empty, int64_t max_depth) {
  Arguments a("verify_tree", "NVMCk");
  specvis::VerifyTree batch = {};
  a.read("target_probs", target_probs, "BNV", &batch.target_probs);
  a.read("uniforms", uniforms, "BN", &batch.uniforms);
  a.read("greedy", greedy, "B", &batch.greedy);
  read_neighbors(a, batch, neighbors, delta, cutoff, offset, residual);
  batch.empty = empty_of(a, empty);
  Verified results = read_tree(a, batch, tokens, first_child, next_sibling, draft_probs, draft_row, omega, max_depth);
  RUN_WITH_SCRATCH(verify_tree, a, batch);
  return results;
}

#ifndef SPECVIS_CUDA
// The ops that have a kernel for the CPU alone.

// The last denoising step of both models. Returns whether it is given.
bool read_last_step(Arguments& a, specvis::LastStepParams& step, const MaybeTensor& target_means,
                    const MaybeTensor& target_log_sigmas, const MaybeTensor& draft_means,
                    const MaybeTensor& draft_log_sigmas) {
  const bool is_given = target_means.has_value();
  a.require(target_log_sigmas.has_value() == is_given && draft_means.has_value() == is_given &&
                draft_log_sigmas.has_value() == is_given,
            "target_means, target_log_sigmas, draft_means and draft_log_sigmas must be given together");
  a.read("target_means", target_means, "BGC", &step.target_means);
  a.read("target_log_sigmas", target_log_sigmas, "BGC", &step.target_log_sigmas);
  a.read("draft_means", draft_means, "BGC", &step.draft_means);
  a.read("draft_log_sigmas", draft_log_sigmas, "BGC", &step.draft_log_sigmas);
  return is_given;
}

Tensors<5> accept_gaussian(const Tensor& tokens, const Tensor& log_ratio, const Tensor& uniforms,
                           const MaybeTensor& target_means, const MaybeTensor& target_log_sigmas,
                           const MaybeTensor& draft_means, const MaybeTensor& draft_log_sigmas,
                           const MaybeTensor& temperature, const MaybeTensor& num_drafted, bool truncate) {
  Arguments a("accept_gaussian", "GC");
  specvis::AcceptGaussian batch = {};
  a.read("tokens", tokens, "BGC", &batch.tokens);
  a.read("log_ratio", log_ratio, "BG", &batch.log_ratio);
  a.read("uniforms", uniforms, "BG", &batch.uniforms);
  read_last_step(a, batch.last_step, target_means, target_log_sigmas, draft_means, draft_log_sigmas);
  a.read("temperature", temperature, "B", &batch.temperature);
  a.read("num_drafted", num_drafted, "B", &batch.num_drafted);
  batch.truncate = truncate;
  const int64_t B = batch.B = a.size('B'), G = batch.G = a.size('G');
  batch.C = a.size('C');
  Tensor num_accepted = a.make({B}, &batch.num_accepted), is_accepted = a.make({B, G}, &batch.is_accepted);
  Tensor is_rejected = a.make({B, G}, &batch.is_rejected), log_r = a.make({B, G}, &batch.log_r);
  Tensor status = a.make({B}, &batch.status);
  RUN(accept_gaussian, a, batch);
  return {num_accepted, is_accepted, is_rejected, log_r, status};
}

Tensor decoder_layers(const Tensor& x, const Tensor& matrices, const Tensor& vectors, const MaybeTensor& last_norm,
                      const Tensor& kv_cache, const Tensor& lengths, const Tensor& ancestors, const Tensor& positions,
                      const Tensor& rotations, const MaybeTensor& key_mask, int64_t heads, int64_t ffn_dim,
                      int64_t first_node, double eps, double head_eps, bool has_first_norm, bool has_head_norms,
                      bool rotates_halves) {
  Arguments a("decoder_layers", "NELTGDWPY");
  specvis::DecoderLayers batch = {};
  batch.kv_cache = a.write("kv_cache", kv_cache, "LRT2GD", x.scalar_type());
  batch.type = a.read_floats("x", x, "RNE", &batch.x);
  a.require(batch.type != specvis::FloatType::float16, "x must be float32 or bfloat16");
  batch.matrices = a.read("matrices", matrices, "Lm", x.scalar_type());
  a.read("vectors", vectors, "Lv", &batch.vectors);
  a.read("last_norm", last_norm, "E", &batch.last_norm);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("positions", positions, "YN", &batch.positions);
  a.read("rotations", rotations, "Pd2", &batch.rotations);
  a.read("key_mask", key_mask, "RS", &batch.key_mask);
  a.size("heads", heads, 'H');
  a.size("ffn_dim", ffn_dim, 'F');
  a.count("first_node", first_node, 0);
  const int64_t R = a.size('R'), N = a.size('N'), E = a.size('E');
  a.sizes("RNEBLTGDPYW", batch.R, batch.N, batch.E, batch.B, batch.L, batch.cache_len, batch.G, batch.D, batch.P,
          batch.Y, batch.W);
  batch.H = heads;
  batch.F = ffn_dim;
  batch.S = key_mask ? a.size('S') : 0;
  batch.first_node = first_node;
  batch.eps = static_cast<float>(eps);
  batch.head_eps = static_cast<float>(head_eps);
  batch.has_first_norm = has_first_norm;
  batch.has_head_norms = has_head_norms;
  batch.has_halves = rotates_halves;
  a.require_rows_of_requests(R);
  a.require(heads % batch.G == 0 && batch.D <= 256, "heads do not fit kv_cache");
  a.require(E % 16 == 0 && batch.D % 16 == 0, "x and kv_cache must have multiples of 16 entries");
  a.require(a.size('d') * 2 == batch.D, "rotations must be of D / 2 pairs");
  a.require(R % batch.Y == 0, "the rows must be a multiple of the rows of positions");
  a.require(a.size('m') == batch.layer_matrices() && a.size('v') == batch.layer_vectors(),
            "matrices and vectors must be packed for these sizes");
  a.require(first_node + N <= 64 * batch.W, "ancestors must have a word for each 64 nodes");
  Tensor hidden = a.make({R, N, E}, x.scalar_type());
  batch.hidden = hidden.mutable_data_ptr();
  RUN(decoder_layers, a, batch);
  return hidden;
}

Tensors<3> denoise_tokens(const Tensor& noise, const Tensor& z, const Tensor& time, const Tensor& matrices,
                          const Tensor& vectors, const Tensor& schedule, const Tensor& guidance, int64_t num_blocks,
                          double eps, double log_temperature, double clip_range) {
  Arguments a("denoise_tokens", "TCPW");
  specvis::DenoiseTokens batch = {};
  a.read("noise", noise, "RTC", &batch.noise);
  a.read("z", z, "RPW", &batch.z);
  a.read("time", time, "TW", &batch.time);
  a.read("matrices", matrices, "m", &batch.matrices);
  a.read("vectors", vectors, "v", &batch.vectors);
  a.read("schedule", schedule, "T7", &batch.schedule);
  a.read("guidance", guidance, "R", &batch.guidance);
  a.count("num_blocks", num_blocks, 0);
  const int64_t R = batch.R = a.size('R'), T = batch.T = a.size('T'), C = batch.C = a.size('C');
  a.sizes("PW", batch.P, batch.W);
  batch.blocks = num_blocks;
  batch.eps = static_cast<float>(eps);
  batch.log_temperature = static_cast<float>(log_temperature);
  batch.clip_range = static_cast<float>(clip_range);
  a.require(batch.P <= 2 && batch.W % 16 == 0 && C % 2 == 0, "z or noise has another size");
  a.require(a.size('m') == batch.num_matrices() && a.size('v') == batch.num_vectors(),
            "matrices and vectors must be packed for these sizes");
  Tensor states = a.make({R, T + 1, C}, &batch.states), log_sigma = a.make({R, C}, &batch.log_sigma);
  Tensor log_sigma_sum = a.make({R}, &batch.log_sigma_sum);
  RUN(denoise_tokens, a, batch);
  return {states, log_sigma, log_sigma_sum};
}

Tensor packed_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t out_features) {
  Arguments a("packed_linear", "Kpnq");
  specvis::PackedLinear batch = {};
  batch.type = a.read_floats("x", x, "MK", &batch.x);
  a.require(batch.type != specvis::FloatType::float16, "x must be float32 or bfloat16");
  batch.weight = a.read("weight", weight, "pn", x.scalar_type());
  a.read("bias", bias, "q", &batch.bias);
  a.size("out_features", out_features, 'q');
  a.sizes("MKp", batch.M, batch.K, batch.panels);
  batch.outputs = out_features;
  a.require(a.size('n') == batch.K * specvis::kPanel &&
                (batch.type == specvis::FloatType::float32 || batch.K % 2 == 0) &&
                batch.panels == specvis::round_up(out_features, specvis::kPanel) / specvis::kPanel,
            "weight and bias must be for these inputs and outputs");
  Tensor y = a.make({batch.M, out_features}, &batch.y);
  RUN(packed_linear, a, batch);
  return y;
}

Tensors<3> resample_gaussian(const Tensor& tokens, const Tensor& is_accepted, const Tensor& is_rejected,
                             const Tensor& proposals, const Tensor& log_ratio, const Tensor& uniforms,
                             const Tensor& fallback, const MaybeTensor& target_means,
                             const MaybeTensor& target_log_sigmas, const MaybeTensor& draft_means,
                             const MaybeTensor& draft_log_sigmas, const MaybeTensor& temperature) {
  Arguments a("resample_gaussian", "GCM");
  specvis::ResampleGaussian batch = {};
  a.read("tokens", tokens, "BGC", &batch.tokens);
  a.read("is_accepted", is_accepted, "BG", &batch.is_accepted);
  a.read("is_rejected", is_rejected, "BG", &batch.is_rejected);
  a.read("proposals", proposals, "BGMC", &batch.proposals);
  a.read("uniforms", uniforms, "BGM", &batch.uniforms);
  a.read("fallback", fallback, "BGC", &batch.fallback);
  const bool has_last_step =
      read_last_step(a, batch.last_step, target_means, target_log_sigmas, draft_means, draft_log_sigmas);
  a.read("log_ratio", log_ratio, has_last_step ? "BG" : "BGM", &batch.log_ratio);
  a.read("temperature", temperature, "B", &batch.temperature);
  const int64_t B = batch.B = a.size('B'), G = batch.G = a.size('G'), C = batch.C = a.size('C');
  batch.M = a.size('M');
  Tensor new_tokens = a.make({B, G, C}, &batch.new_tokens), num_tries = a.make({B, G}, &batch.num_tries);
  Tensor status = a.make({B, G}, &batch.status);
  RUN(resample_gaussian, a, batch);
  return {new_tokens, num_tries, status};
}

Tensor transformer_blocks(const Tensor& x, const Tensor& matrices, const Tensor& vectors, const MaybeTensor& last_norm,
                          const MaybeTensor& key_mask, const Tensor& wanted, int64_t heads, int64_t ffn_dim,
                          double eps) {
  Arguments a("transformer_blocks", "NELHFn");
  specvis::TransformerBlocks batch = {};
  batch.type = a.read_floats("x", x, "RNE", &batch.x);
  a.require(batch.type != specvis::FloatType::float16, "x must be float32 or bfloat16");
  batch.matrices = a.read("matrices", matrices, "Lm", x.scalar_type());
  a.read("vectors", vectors, "Lv", &batch.vectors);
  a.read("last_norm", last_norm, "p", &batch.last_norm);
  a.read("key_mask", key_mask, "RN", &batch.key_mask);
  a.read("wanted", wanted, "Rn", &batch.wanted);
  a.size("heads", heads, 'H');
  a.size("ffn_dim", ffn_dim, 'F');
  const int64_t R = batch.R = a.size('R'), E = batch.E = a.size('E'), n = batch.n = a.size('n');
  a.sizes("NL", batch.N, batch.L);
  batch.H = heads;
  batch.F = ffn_dim;
  batch.eps = static_cast<float>(eps);
  a.require(E % 16 == 0 && ffn_dim % 16 == 0 && E % heads == 0 && E / heads <= 256, "x has another size");
  a.require(a.size('m') == batch.layer_matrices() && a.size('v') == batch.layer_vectors() &&
                (!last_norm || a.size('p') == 2 * E),
            "the blocks must be packed for these sizes");
  Tensor out = a.make({R, n, E}, x.scalar_type());
  batch.out = out.mutable_data_ptr();
  if (R > 0) RUN(transformer_blocks, a, batch);
  return out;
}

Tensor tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, const Tensor& lengths, const Tensor& ancestors,
                      const MaybeTensor& key_mask, double scale) {
  Arguments a("tree_attention", "NHDTGW");
  specvis::TreeAttention batch = {};
  const ScalarType type = q.scalar_type();
  batch.type = a.read_strided("q", q, "RNHD", &batch.q, batch.q_strides);
  a.read_strided("k_cache", k_cache, "RTGD", &batch.k, batch.k_strides);
  a.read_strided("v_cache", v_cache, "RTGD", &batch.v, batch.v_strides);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("key_mask", key_mask, "RS", &batch.key_mask);
  const int64_t R = batch.R = a.size('R'), N = batch.N = a.size('N'), H = batch.H = a.size('H');
  const int64_t D = batch.D = a.size('D');
  a.sizes("TGBW", batch.T, batch.G, batch.B, batch.W);
  batch.S = key_mask ? a.size('S') : 0;
  batch.scale = static_cast<float>(scale);
  a.require_rows_of_requests(R);
  a.require(H % batch.G == 0 && D <= 256, "the heads of q and k_cache do not fit");
  a.require(k_cache.scalar_type() == type && v_cache.scalar_type() == type, "k_cache and v_cache",
            "must have the dtype of q");
  Tensor attended = a.make({R, N, H, D}, type);
  batch.attended = attended.mutable_data_ptr();
  RUN(tree_attention, a, batch);
  return attended;
}
#endif

}  // namespace

#define OP(name) m.impl(#name, TORCH_BOX(&name))
STABLE_TORCH_LIBRARY_IMPL(LIBRARY, DEVICE, m) {
  OP(commit_kv);
  OP(commit_tokens);
  OP(couple_tokens);
  OP(draft_children);
  OP(draft_frontier);
  OP(draw_children);
  OP(draw_tokens);
  OP(expand_tree);
  OP(guided_probs);
  OP(neighborhood_sum);
  OP(sample_residual);
  OP(select_tree);
  OP(tree_from_mask);
  OP(tree_from_paths);
  OP(tree_links);
  OP(tree_mask);
  OP(tree_paths);
  OP(verify_chain);
  OP(verify_greedy);
  OP(verify_logits);
  OP(verify_tree);
#ifndef SPECVIS_CUDA
  OP(accept_gaussian);
  OP(decoder_layers);
  OP(denoise_tokens);
  OP(packed_linear);
  OP(resample_gaussian);
  OP(transformer_blocks);
  OP(tree_attention);
#endif
}
