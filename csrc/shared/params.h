// The parameters that the bindings give to the kernels: one struct and one launcher per op. Plain C++, without
// torch. Pointers are to the device's memory. A batch of size 0 launches nothing.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "commit_tokens.h"
#include "moves.h"
#include "rules.h"

namespace specvis {

enum class LogitType { float32, float16, bfloat16 };

// Rows of logits, and what each request makes of its own. The ids of a row are id_range's, or [first_id, last_id)
// without it.
struct LogitRows {
  int64_t B, N, V;
  LogitType type;
  const void *logits, *uncond;          // (B, N, V); uncond may be null
  const float *guidance, *temperature;  // (B)
  const int32_t* top_k;                 // (B)
  const float* top_p;                   // (B)
  const int64_t* id_range;              // (B, N, 2) or null
  int64_t first_id, last_id;            // of every row; with id_range, all ids
  bool top_p_first;                     // whether top-p looks at all ids, not at those that top-k keeps
};

constexpr int64_t kCachesALaunch = 256;  // a kernel's parameters may have 4 KB

struct CommitKv {
  Moves moves;
  int64_t num_caches;
  char* caches[kCachesALaunch];
  int64_t* new_lengths;  // (B); null: an earlier launch writes them
};
cudaError_t commit_kv_cuda(const CommitKv& batch, cudaStream_t stream);

cudaError_t commit_tokens_cuda(const CommitTokens& batch, cudaStream_t stream);

struct CoupleTokens {
  int64_t B, W, V, group_size;  // group_size is k of groups
  const float* target_probs;    // (B, W, V)
  const float* draft_probs;     // (B, W, V)
  const int64_t* tokens;        // (B, W)
  const float* uniforms;        // (B, W, 2)
  const float* omega;           // (B, W) or null
  Neighbors neighbors;          // empty if there are none
  const float* delta;           // (B) or null
  const int64_t* groups;        // (B, W, k) or null
  bool is_relaxed;              // whether there are neighbors or groups
  Cutoff cutoff;
  ResidualRule residual;
  int64_t* new_tokens;  // (B, W)
  bool* is_kept;        // (B, W)
  int32_t* num_kept;    // (B)
  float* tv_excess;     // (B, W)
  int32_t* status;      // (B, W)
};
cudaError_t couple_tokens_cuda(const CoupleTokens& batch, cudaStream_t stream);

struct DraftChildren {
  LogitRows rows;  // N is F below
  int64_t K;
  const float* uniforms;     // (B, F, K); null: by noise
  const int64_t* seeds;      // (B) or null
  const int64_t* positions;  // (B, F) or null
  int64_t* tokens;           // (B, F, K)
  float* probs;              // (B, F, V)
  int32_t* status;           // (B, F)
};
cudaError_t draft_children_cuda(const DraftChildren& batch, cudaStream_t stream);

struct DraftFrontier {
  LogitRows rows;  // N is F below
  int64_t K, W, level, first_node, first_candidate;
  const float* scores;           // (B, F)
  const int64_t* ancestors;      // (B, F, W)
  const int32_t* candidates;     // (B, F)
  const int32_t* width;          // (B)
  const int64_t* depth;          // (B)
  int64_t* child_tokens;         // (B, F K)
  float* child_scores;           // (B, F K)
  int32_t* child_parents;        // (B, F K)
  int64_t* tokens;               // (B, K)
  float* frontier_scores;        // (B, K)
  int64_t* parent_rows;          // (B, K)
  int64_t* frontier_ancestors;   // (B, K, W)
  int32_t* frontier_candidates;  // (B, K)
  int32_t* status;               // (B, F)
};
cudaError_t draft_frontier_cuda(const DraftFrontier& batch, cudaStream_t stream);

struct DrawChildren {
  int64_t R, F, V, K;        // R is B F
  const float* draft_probs;  // (R, V)
  const float* uniforms;     // (R, K); null: by noise
  const int64_t* seeds;      // (B) or null
  const int64_t* positions;  // (R) or null
  int64_t* tokens;           // (R, K)
  int32_t* num_children;     // (R)
  int32_t* status;           // (R)
};
cudaError_t draw_children_cuda(const DrawChildren& batch, cudaStream_t stream);

struct DrawTokens {
  LogitRows rows;
  const int64_t* seeds;      // (B)
  const int64_t* positions;  // (B, N)
  const int64_t* guesses;    // (B, N) or null
  int64_t ahead;
  int64_t* tokens;        // (B, N)
  int32_t* num_accepted;  // (B)
  int64_t* ahead_tokens;  // (B, N)
  int32_t* status;        // (B, N)
};
cudaError_t draw_tokens_cuda(const DrawTokens& batch, cudaStream_t stream);

struct ExpandTree {
  int64_t B, F, V, num_children;  // num_children is K below
  const float* draft_probs;       // (B, F, V)
  const float* scores;            // (B, F)
  const int32_t* width;           // (B)
  int64_t* tokens;                // (B, F, K)
  float* child_scores;            // (B, F, K)
  int32_t* frontier;              // (B, K)
  int32_t* status;                // (B, F)
};
cudaError_t expand_tree_cuda(const ExpandTree& batch, cudaStream_t stream);

struct GuidedProbs {
  LogitRows rows;
  float* probs;     // (B, N, V)
  int32_t* status;  // (B, N)
};
cudaError_t guided_probs_cuda(const GuidedProbs& batch, cudaStream_t stream);

struct NeighborhoodSum {
  int64_t R, V;
  const float* probs;     // (R, V)
  const int64_t* tokens;  // (R)
  Neighbors neighbors;
  const float* delta;  // (R)
  Cutoff cutoff;
  float* relaxed_mass;     // (R)
  int32_t* num_neighbors;  // (R)
  int32_t* status;         // (R)
};
cudaError_t neighborhood_sum_cuda(const NeighborhoodSum& batch, cudaStream_t stream);

struct SampleResidual {
  int64_t R, V;
  const float* target_probs;  // (R, V)
  const float* draft_probs;   // (R, V) or null
  const float* uniforms;      // (R)
  const float* omega;         // (R) or null
  int64_t* tokens;            // (R)
  int32_t* status;            // (R)
};
cudaError_t sample_residual_cuda(const SampleResidual& batch, cudaStream_t stream);

struct SelectTree {
  int64_t B, M, num_nodes;         // num_nodes is N below
  const int64_t* tokens;           // (B, M)
  const float* scores;             // (B, M)
  const int32_t* parents;          // (B, M)
  const int64_t* root;             // (B)
  const int32_t* size;             // (B)
  int64_t* node_tokens;            // (B, N)
  int32_t *node_parents, *source;  // (B, N)
  int32_t* status;                 // (B)
};
cudaError_t select_tree_cuda(const SelectTree& batch, cudaStream_t stream);

struct TreeFromMask {
  int64_t B, N;
  const bool* mask;  // (B, N, N)
  int32_t* parents;  // (B, N)
};
cudaError_t tree_from_mask_cuda(const TreeFromMask& batch, cudaStream_t stream);

struct TreeFromPaths {
  int64_t B, L, D, N;
  const int64_t* paths;  // (B, L, D)
  int32_t* parents;      // (B, N)
};
cudaError_t tree_from_paths_cuda(const TreeFromPaths& batch, cudaStream_t stream);

struct TreeLinks {
  int64_t B, N;
  const int32_t* parents;                       // (B, N)
  int64_t* ancestors;                           // (B, N, ceil(N / 64))
  int32_t *depth, *first_child, *next_sibling;  // (B, N)
  int32_t* status;                              // (B)
};
cudaError_t tree_links_cuda(const TreeLinks& batch, cudaStream_t stream);

// The entries of a mask: bytes 0 and 1, or 0 and -inf in a float type, or bits.
enum class Form { bytes, float32, float16, bfloat16, bits };

struct TreeMask {
  int64_t B, N, columns;
  const int64_t* ancestors;  // (B, N, ceil(N / 64))
  const int32_t* lengths;    // (B) or null
  const int64_t* start;      // (B) or null: lengths
  Form form;
  int64_t row_bits;  // of bits: how many a row has, its padding counted
  void* mask;        // (B, N, columns), or bits (B, ceil(N * row_bits / 8))
};
cudaError_t tree_mask_cuda(const TreeMask& batch, cudaStream_t stream);

struct TreePaths {
  int64_t B, N, max_depth;
  const int32_t* parents;              // (B, N)
  const int64_t* ancestors;            // (B, N, ceil(N / 64)) from tree_links, as what follows
  const int32_t *depth, *first_child;  // (B, N)
  int64_t* paths;                      // (B, N, max_depth + 1)
};
cudaError_t tree_paths_cuda(const TreePaths& batch, cudaStream_t stream);

struct VerifyGreedy {
  int64_t B, N, max_depth;       // max_depth is P below
  const int64_t* target_tokens;  // (B, N)
  const int64_t* tokens;         // (B, N)
  const int32_t* first_child;    // (B, N)
  const int32_t* next_sibling;   // (B, N)
  int32_t* accepted_nodes;       // (B, P)
  int32_t* num_accepted;         // (B)
  int64_t* next_token;           // (B)
  int32_t* status;               // (B)
};
cudaError_t verify_greedy_cuda(const VerifyGreedy& batch, cudaStream_t stream);

// What verify_chain, verify_logits and verify_tree take beside the target's rows, and what they return.
struct Verification {
  int64_t B, N, V, num_draft_rows, max_depth;  // the last two are M and P below
  const int64_t* tokens;                       // (B, N)
  const int32_t* first_child;                  // (B, N)
  const int32_t* next_sibling;                 // (B, N)
  const float* uniforms;                       // (B, N)
  const float* draft_probs;                    // (B, M, V) or null
  const int32_t* draft_row;                    // (B, N) or null
  Neighbors neighbors;                         // empty if there are none
  const float* delta;                          // (B) or null
  const float* omega;                          // (B, P) or null
  Cutoff cutoff;
  ResidualRule residual;
  Empty empty;
  char* scratch;            // of as many bytes as the op's function says, aligned to 16
  int32_t* accepted_nodes;  // (B, P)
  int32_t* num_accepted;    // (B)
  int64_t* next_token;      // (B)
  float* tv_excess;         // (B)
  int32_t* status;          // (B)
};

// Of its base, the sizes N, M and P are 0 and the arrays of the tree are null; omega has one number a request.
struct VerifyChain : Verification {
  int64_t D;
  Integers draft_tokens;        // (D)
  Integers ends;                // (B): the first draft behind each request's own
  const float* target_probs;    // (T, V)
  const int64_t* bonus_tokens;  // (B) or null
  const bool* greedy;           // (B) or null
};
// How many bytes of scratch memory verify_chain_cuda needs.
cudaError_t verify_chain_scratch(const VerifyChain& batch, int64_t* bytes);
cudaError_t verify_chain_cuda(const VerifyChain& batch, cudaStream_t stream);

struct VerifyLogits : Verification {
  LogitRows rows;
  const int64_t* seeds;      // (B), or null: by uniforms
  const int64_t* positions;  // (B, N) or null
};
// How many bytes of scratch memory verify_logits_cuda needs.
cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes);
cudaError_t verify_logits_cuda(const VerifyLogits& batch, cudaStream_t stream);

struct VerifyTree : Verification {
  const float* target_probs;  // (B, N, V)
  const bool* greedy;         // (B) or null
};
// How many bytes of scratch memory verify_tree_cuda needs.
cudaError_t verify_tree_scratch(const VerifyTree& batch, int64_t* bytes);
cudaError_t verify_tree_cuda(const VerifyTree& batch, cudaStream_t stream);

}  // namespace specvis
