// The parameters that the bindings give to the kernels: one struct for each op, and the kernel's declaration. Plain
// C++, without torch. Pointers are to the device's memory. A CUDA kernel launches nothing for a batch of size 0.
#pragma once
#include <cstdint>

#include "commit_tokens.h"
#include "moves.h"
#include "rules.h"

#ifdef SPECVIS_CUDA
#include <cuda_runtime_api.h>
#define KERNEL(op, Params) cudaError_t op##_cuda(const Params& batch, cudaStream_t stream)
#else
#define KERNEL(op, Params) void op##_cpu(const Params& batch)
#endif

namespace specvis {

enum class FloatType { float32, float16, bfloat16 };

// The number by which a model masks an id: the least finite one of the type. A float32 may have been a bfloat16.
HOST_DEVICE inline float mask_of(FloatType type) { return type == FloatType::float16 ? -65504.f : -0x1.fep+127f; }

// The ids of each row: given by id_range, or without it [first_id, last_id).
struct RowIds {
  const int64_t* id_range;    // (B, N, 2) or null
  int64_t first_id, last_id;  // the ids of every row; with id_range, all ids

  HOST_DEVICE int64_t first(int64_t row) const { return id_range ? id_range[2 * row] : first_id; }
  HOST_DEVICE int64_t last(int64_t row) const { return id_range ? id_range[2 * row + 1] : last_id; }
};

// Rows of logits, and how each request turns its rows into probabilities.
struct LogitRows : RowIds {
  int64_t B, N, V;
  FloatType type;
  const void *logits, *uncond;          // (B, N, V); uncond may be null
  const float *guidance, *temperature;  // (B)
  const int32_t* top_k;                 // (B)
  const float* top_p;                   // (B)
  const float* min_p;                   // (B) or null
  bool top_p_first;                     // top_p is a share of the mass of all ids, not of those that top-k keeps
};

constexpr int64_t kCachesALaunch = 256;  // a kernel's parameters may have 4 KB

struct CommitKv {
  Moves moves;
  int64_t num_caches;
  char* caches[kCachesALaunch];
  int64_t* new_lengths;  // (B); null: an earlier launch writes them
};
KERNEL(commit_kv, CommitKv);

KERNEL(commit_tokens, CommitTokens);

struct CoupleTokens {
  int64_t B, W, V, group_size;  // group_size is k of groups
  const float* target_probs;    // (B, W, V)
  const float* draft_probs;     // (B, W, V)
  const int64_t* tokens;        // (B, W)
  const float* uniforms;        // (B, W, 2)
  const float* omega;           // (B, W) or null
  Neighbors neighbors;          // empty if none are given
  const float* delta;           // (B) or null
  const int64_t* groups;        // (B, W, k) or null
  bool is_relaxed;              // whether neighbors or groups are given
  Cutoff cutoff;
  ResidualRule residual;
  int64_t* new_tokens;  // (B, W)
  bool* is_kept;        // (B, W)
  int32_t* num_kept;    // (B)
  float* tv_excess;     // (B, W)
  int32_t* status;      // (B, W)
};
KERNEL(couple_tokens, CoupleTokens);

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
KERNEL(draft_children, DraftChildren);

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
KERNEL(draft_frontier, DraftFrontier);

struct DrawChildren {
  int64_t R, F, V, K;        // R is B F
  const float* draft_probs;  // (R, V)
  const float* uniforms;     // (R, K); null: by noise
  const int64_t* seeds;      // (B) or null
  const int64_t* positions;  // (R) or null
  int64_t* tokens;           // (R, K)
  int32_t* num_children;     // (R); null in draft_children, and so is status
  int32_t* status;           // (R)
  const float* temperature;  // CUDA's, for draft_children: (B); where it is 0, the likeliest tokens are the children
};
KERNEL(draw_children, DrawChildren);

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
KERNEL(draw_tokens, DrawTokens);

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
KERNEL(expand_tree, ExpandTree);

struct GuidedProbs {
  LogitRows rows;
  float* probs;       // (B, N, V)
  int32_t* status;    // (B, N); null in verify_logits
  int64_t first_row;  // CUDA's, for verify_logits: how many rows come before these B N, in `rows` and in no result
};
KERNEL(guided_probs, GuidedProbs);

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
KERNEL(neighborhood_sum, NeighborhoodSum);

struct PhiloxUniforms {
  int64_t B, L, n;
  uint32_t stream, turn;
  const int64_t *seeds, *positions;  // (B), (B, L)
  float* uniforms;                   // (B, L, n)
};
KERNEL(philox_uniforms, PhiloxUniforms);

struct SampleResidual {
  int64_t R, V;
  const float* target_probs;  // (R, V)
  const float* draft_probs;   // (R, V) or null
  const float* uniforms;      // (R)
  const float* omega;         // (R) or null
  int64_t* tokens;            // (R)
  int32_t* status;            // (R)
};
KERNEL(sample_residual, SampleResidual);

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
KERNEL(select_tree, SelectTree);

struct TokenLogProbs {
  LogitRows rows;
  int64_t K;
  const int64_t* tokens;       // (B, K)
  const int64_t* row_numbers;  // (B, K), negative: there is no token; null: token k is predicted by row k
  float *sampled, *full;       // (B, K)
  int32_t* status;             // (B, K)
};
KERNEL(token_log_probs, TokenLogProbs);

struct TreeLinks {
  int64_t B, N;
  const int32_t* parents;                       // (B, N)
  int64_t* ancestors;                           // (B, N, ceil(N / 64))
  int32_t *depth, *first_child, *next_sibling;  // (B, N)
  int32_t* status;                              // (B)
};
KERNEL(tree_links, TreeLinks);

// The entries of a mask: bytes 0 and 1, or 0 and -inf in a float type, or bits.
enum class Form { bytes, float32, float16, bfloat16, bits };

struct TreeMask {
  int64_t B, N, columns;
  const int64_t* ancestors;  // (B, N, ceil(N / 64))
  const int32_t* lengths;    // (B) or null
  const int64_t* start;      // (B) or null: lengths
  Form form;
  int64_t row_bits;  // for bits: how many a row has, with its padding
  void* mask;        // (B, N, columns), or bits (B, ceil(N * row_bits / 8))
};
KERNEL(tree_mask, TreeMask);

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
  const int32_t* row_status;     // CUDA's, for verify_logits: (B, N); a row with a status ends the path
  float* tv_excess;              // as well: (B), becomes 0
};
KERNEL(verify_greedy, VerifyGreedy);

// What verify_chain, verify_logits and verify_tree are given beside the target's rows, and what they return.
struct VerifyParams {
  int64_t B, N, V, num_draft_rows, max_depth;  // the last two are M and P below
  const int64_t* tokens;                       // (B, N)
  const int32_t* first_child;                  // (B, N)
  const int32_t* next_sibling;                 // (B, N)
  const float* uniforms;                       // (B, N)
  const float* draft_probs;                    // (B, M, V) or null
  const int32_t* draft_row;                    // (B, N) or null
  Neighbors neighbors;                         // empty if none are given
  const float* delta;                          // (B) or null
  const float* omega;                          // (B, P) or null
  Cutoff cutoff;
  ResidualRule residual;
  Empty empty;
  char* scratch;            // CUDA's: as many bytes as verify_.._scratch says, aligned to 16
  int32_t* accepted_nodes;  // (B, P)
  int32_t* num_accepted;    // (B)
  int64_t* next_token;      // (B)
  float* tv_excess;         // (B)
  int32_t* status;          // (B)
};

// In the base the sizes N, M and P are 0 and the arrays of the tree are null; omega has one number for each request.
struct VerifyChain : VerifyParams {
  int64_t D;
  Integers draft_tokens;        // (D)
  Integers ends;                // (B): the first draft after each request's own
  const float* target_probs;    // (T, V)
  const int64_t* bonus_tokens;  // (B) or null
  const bool* greedy;           // (B) or null
  ChainRule rule;
  int64_t window;  // fly's
  float entropy;   // fly's threshold
};
KERNEL(verify_chain, VerifyChain);

struct VerifyLogits : VerifyParams {
  LogitRows rows;
  const int64_t* seeds;      // (B), or null: by uniforms
  const int64_t* positions;  // (B, N) or null
};
KERNEL(verify_logits, VerifyLogits);

struct VerifyTree : VerifyParams {
  const float* target_probs;  // (B, N, V)
  const bool* greedy;         // (B) or null
  // CUDA's, for verify_logits: how many requests come before these B, in all arrays but target_probs; greedy is where
  // the temperature is 0; outside of the ids of its row a token has no neighbors.
  int64_t first_request;
  const float* temperature;  // (B) or null
  RowIds ids;
};
KERNEL(verify_tree, VerifyTree);

#ifdef SPECVIS_CUDA
// How many bytes of scratch memory the kernel needs.
cudaError_t verify_chain_scratch(const VerifyChain& batch, int64_t* bytes);
cudaError_t verify_logits_scratch(const VerifyLogits& batch, int64_t* bytes);
cudaError_t verify_tree_scratch(const VerifyTree& batch, int64_t* bytes);
#else
// The ops that have a kernel for the CPU alone.

// The last denoising step of both models, at each position.
struct LastStepParams {
  const float *target_means, *target_log_sigmas, *draft_means, *draft_log_sigmas;  // (B, G, C), or all null
};

struct AcceptGaussian {
  int64_t B, G, C;
  const float* tokens;                // (B, G, C)
  const float *log_ratio, *uniforms;  // (B, G)
  LastStepParams last_step;
  const float* temperature;    // (B) or null
  const int32_t* num_drafted;  // (B) or null
  bool truncate;
  int32_t* num_accepted;            // (B)
  bool *is_accepted, *is_rejected;  // (B, G)
  float* log_r;                     // (B, G)
  int32_t* status;                  // (B)
};
KERNEL(accept_gaussian, AcceptGaussian);

struct ResampleGaussian {
  int64_t B, G, C, M;
  const float* tokens;                    // (B, G, C)
  const bool *is_accepted, *is_rejected;  // (B, G)
  const float* proposals;                 // (B, G, M, C)
  const float* log_ratio;                 // (B, G, M); with a last step (B, G)
  const float* uniforms;                  // (B, G, M)
  const float* fallback;                  // (B, G, C)
  LastStepParams last_step;
  const float* temperature;     // (B) or null
  float* new_tokens;            // (B, G, C)
  int32_t *num_tries, *status;  // (B, G)
};
KERNEL(resample_gaussian, ResampleGaussian);

struct TreeAttention {
  int64_t R, N, H, D, T, G, B, W, S;  // G heads of keys and values; S is 0 without a mask
  FloatType type;
  const void *q, *k, *v;                             // (R, N, H, D), (R, T, G, D), (R, T, G, D)
  int64_t q_strides[3], k_strides[3], v_strides[3];  // without the last dimension
  const int64_t* lengths;                            // (B)
  const int64_t* ancestors;                          // (B, N, W)
  const bool* key_mask;                              // (R, S) or null
  float scale;
  void* attended;  // (R, N, H, D)
};
KERNEL(tree_attention, TreeAttention);

struct RmsNorm {
  int64_t M, E;
  float eps;
  FloatType type;
  const void *x, *weight, *residual;  // (M, E), (E), (M, E) or null
  void *normed, *stream;              // (M, E); (M, E), used with a residual
};
KERNEL(rms_norm, RmsNorm);

struct Swiglu {
  int64_t M, F, gate_strides[1], up_strides[1];
  FloatType type;
  const void *gate, *up;  // (M, F)
  void* gated;            // (M, F)
};
KERNEL(swiglu, Swiglu);

struct RotateIntoCache {
  int64_t R, N, B, T, H, G, D, P, Y, pairs, first_node;  // G heads of keys and values
  bool has_halves;
  float eps;
  FloatType type;
  const void* qkv;                     // (R, N, (H + 2 G) D)
  const void *scale, *shift;           // (H + G, D) or null: of the LayerNorms of queries and keys
  const int64_t *lengths, *positions;  // (B), (Y, N)
  const float* rotations;              // (P, pairs, 2)
  void *kv_cache, *q;                  // (R, T, 2, G, D), (R, N, H, D)
};
KERNEL(rotate_into_cache, RotateIntoCache);

// A weight (O, K) is packed as panels of kPanel outputs: (panels, K, kPanel), or of numbers of two bytes (panels, K /
// 2, kPanel, 2). Zeros fill up the last panel.
constexpr int64_t kPanel = 32;
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct PackedLinear {
  int64_t M, K, panels, outputs;
  FloatType type;
  const void *x, *weight;  // (M, K), (panels, K * kPanel)
  const float* bias;       // (outputs) or null
  float* y;                // (M, outputs)
};
KERNEL(packed_linear, PackedLinear);

struct DenoiseTokens {
  int64_t R, T, C, P, W, blocks;
  float eps, log_temperature, clip_range;
  const float *noise, *z, *time;     // (R, T, C), (R, P, W), (T, W)
  const float *matrices, *vectors;   // packed
  const float *schedule, *guidance;  // (T, 7), (R)
  float *states, *log_sigma;         // (R, T + 1, C), (R, C)
  double* log_sigma_sum;             // (R)

  int64_t modulations() const { return (3 * blocks + 2) * W; }
  int64_t num_matrices() const {
    const int64_t padded_W = round_up(W, kPanel);
    return (round_up(modulations(), kPanel) + 2 * blocks * padded_W + round_up(2 * C, kPanel)) * W + padded_W * C;
  }
  int64_t num_vectors() const { return modulations() + (1 + 4 * blocks) * W + 2 * C; }
};
KERNEL(denoise_tokens, DenoiseTokens);

struct TransformerBlocks {
  int64_t R, N, E, L, H, F, n;  // n rows of the output for each of R
  float eps;
  FloatType type;
  const void *x, *matrices;          // (R, N, E), (L, m)
  const float *vectors, *last_norm;  // (L, v); (2 E) or null
  const bool* key_mask;              // (R, N) or null
  const int64_t* wanted;             // (R, n)
  void* out;                         // (R, n, E)

  int64_t layer_matrices() const {
    return (round_up(3 * E, kPanel) + round_up(E, kPanel) + round_up(F, kPanel)) * E + round_up(E, kPanel) * F;
  }
  int64_t layer_vectors() const { return 9 * E + F; }
};
KERNEL(transformer_blocks, TransformerBlocks);

struct DecoderLayers {
  int64_t R, N, B, E, L, cache_len, H, G, D, F, P, Y, W, S, first_node;  // cache_len is T; S is 0 without a mask
  float eps, head_eps;
  bool has_first_norm, has_head_norms, has_halves;
  FloatType type;
  const void *x, *matrices;            // (R, N, E), (L, m)
  const float *vectors, *last_norm;    // (L, v); (E) or null
  const float* rotations;              // (P, D / 2, 2)
  const int64_t *lengths, *positions;  // (B), (Y, N)
  const int64_t* ancestors;            // (B, N, W)
  const bool* key_mask;                // (R, S) or null
  void *kv_cache, *hidden;             // (L, R, T, 2, G, D), (R, N, E)

  int64_t width_qkv() const { return round_up((H + 2 * G) * D, kPanel); }
  int64_t width_out() const { return round_up(E, kPanel); }
  int64_t width_gate() const { return round_up(F, kPanel); }
  int64_t layer_matrices() const {
    return width_qkv() * E + width_out() * H * D + 2 * width_gate() * E + width_out() * width_gate();
  }
  int64_t layer_vectors() const { return 2 * E + (H + 2 * G) * D + E + (has_head_norms ? 2 * (H + G) * D : 0); }
};
KERNEL(decoder_layers, DecoderLayers);
#endif

}  // namespace specvis
