"""verify_tree in Triton: one program per request, see _verify.py."""
import torch
import triton.language as tl

from ._kernel import kernel
from ._rows import block
from ._verify import verify_request


@kernel("target_probs", "draft_probs", "mass", "draft_mass", "V")
def verify_tree_kernel(
        target_probs,               # (B, N, V)
        tokens,                     # (B, N)
        first_child, next_sibling,  # (B, N)
        uniforms,                   # (B, N)
        draft_probs,                # (B, M, V) or None
        draft_row,                  # (B, N)
        neighbors,                  # (C, k) or None
        delta,                      # (B)
        omega,                      # (B, P) or None
        greedy,                     # (B) or None
        mass, draft_mass,           # (B, V) scratch
        greedy_scratch,             # (B, 3, N)
        accepted_nodes,             # (B, P)
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        N, V, M, P, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, EMPTY: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    rows = (target_probs + b * N * V, None, None, None, None, None, None, None, None, None, None)
    verify_request(
        rows, None if greedy is None else tl.load(greedy + b) != 0, tokens, first_child, next_sibling, uniforms,
        draft_probs, draft_row, neighbors, delta, omega, mass, draft_mass, greedy_scratch, accepted_nodes,
        num_accepted_out, next_token_out, tv_excess_out, status_out, N, V, M, P, C, k, offset, CUTOFF, RESIDUAL, EMPTY,
        None, True, BLOCK, None, BLOCK_K)


def verify_tree(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
                omega, greedy, cutoff, offset, residual, empty, max_depth):
    B, N, V = target_probs.shape
    M = 0 if draft_probs is None else draft_probs.shape[1]
    C, k = (0, 0) if neighbors is None else neighbors.shape
    accepted_nodes = tokens.new_empty(B, max_depth, dtype=torch.int32)
    num_accepted, next_token = tokens.new_empty(B, dtype=torch.int32), tokens.new_empty(B)
    tv_excess, status = target_probs.new_empty(B), tokens.new_empty(B, dtype=torch.int32)
    if B > 0:
        mass = tokens.new_empty(B, V)
        draft_mass = None if draft_probs is None else tokens.new_empty(B, V)
        greedy_scratch = None if greedy is None else tokens.new_empty(B, 3, N, dtype=torch.int32)
        verify_tree_kernel[(B,)](
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
            omega, None if greedy is None else greedy.view(torch.uint8), mass, draft_mass, greedy_scratch,
            accepted_nodes, num_accepted, next_token, tv_excess, status, N, V, M, max_depth, C, k, offset,
            CUTOFF=cutoff, RESIDUAL=residual, EMPTY=empty, BLOCK=block("V", V), BLOCK_K=block("k", max(k, 1)),
            num_warps=8, enable_fp_fusion=False)
    return accepted_nodes, num_accepted, next_token, tv_excess, status
