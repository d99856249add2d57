// How a step's tokens enter one image, written once for the CPU and for CUDA. Plain C++, without torch.
#pragma once
#include <cstdint>

#include "rules.h"

namespace specvis {

struct CommitTokens {
  int64_t B, C, L, N, P;
  int64_t* tokens;                // (B, C)
  int64_t* counts;                // (B)
  const int64_t* node_tokens;     // (B, N)
  const int32_t* accepted_nodes;  // (B, P)
  const int32_t* num_accepted;    // (B)
  const int64_t* next_token;      // (B)
  bool* failed;                   // (B), or null: then there are no accounts, down to depth
  int64_t* target_forwards;       // (B)
  int64_t* num_accepted_at;       // (B, L)
  int64_t* num_drafted_at;        // (B, L)
  float* tv_excess;               // (B)
  const float* step_excess;       // (B)
  const int32_t* status;          // (B)
  const int64_t* depth;           // (B)
  int64_t* new_tokens;            // (B, P + 1)
  int64_t* nodes;                 // (B, P + 1)
  int64_t* num_new;               // (B)

  HOST_DEVICE int64_t last_new(int64_t b) const {
    const int64_t a = num_accepted[b];
    return a < 0 ? 0 : a < P ? a : P;
  }
  HOST_DEVICE int64_t accepted_node(int64_t b, int64_t i) const {
    const int64_t node = accepted_nodes[b * P + i];
    return node >= 0 && node < N ? node : 0;
  }
  HOST_DEVICE bool is_active(int64_t count) const { return count >= 0 && count < L; }

  // Writes new token i of P + 1, also to the image, which has `count` tokens.
  HOST_DEVICE void write(int64_t b, int64_t i, int64_t count) const {
    const int64_t last = last_new(b), at = b * (P + 1) + i;
    nodes[at] = i > 0 && i <= last ? accepted_node(b, i - 1) : 0;
    const int64_t token = i < last ? node_tokens[b * N + accepted_node(b, i)] : i == last ? next_token[b] : 0;
    new_tokens[at] = token;
    if (is_active(count) && i <= last && i < L - count) tokens[b * C + count + i] = token;
  }

  // Accounts for the step, and counts. Nothing reads the image's count after that.
  HOST_DEVICE void account(int64_t b, int64_t count) const {
    const int64_t last = last_new(b);
    num_new[b] = last + 1;
    if (!is_active(count)) return;
    const int64_t room = L - 1 - count;
    counts[b] = last >= room ? L : count + last + 1;
    if (!failed) return;
    num_accepted_at[b * L + count] = last;
    num_drafted_at[b * L + count] = depth[b] < room ? depth[b] : room;
    target_forwards[b] = static_cast<int64_t>(static_cast<uint64_t>(target_forwards[b]) + 1);  // wraps, as torch's
    tv_excess[b] += step_excess[b];
    if (!(status[b] & kInvalidRow)) return;
    failed[b] = true;
    counts[b] = L;
  }
};

}  // namespace specvis
