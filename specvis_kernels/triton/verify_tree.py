"""verify_tree in Triton: one program per request, see _verify.py."""
import torch
import triton
import triton.language as tl

from ._rows import block
from ._verify import fill, store_outputs, verify_greedy, verify_sampled


@triton.jit(do_not_specialize=["N", "M", "P", "C", "k", "offset"])  # they change from step to step
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
    tokens += b * N
    first_child += b * N
    next_sibling += b * N
    uniforms += b * N
    mass += b * V
    accepted_nodes += b * P
    if draft_probs is not None:
        draft_probs += b * M * V
        draft_row += b * N
        draft_mass += b * V
    if neighbors is not None:
        delta += b
    if omega is not None:
        omega += b * P

    rows = (target_probs + b * N * V, None, None, None, None, None, None, None, None, None)
    fill(accepted_nodes, -1, P)
    is_sampling = b >= 0
    if greedy is not None:
        is_sampling = tl.load(greedy + b) == 0
    if is_sampling:
        num_accepted, next_token, tv_excess, status = verify_sampled(
            rows, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta, omega, None,
            mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset, CUTOFF, RESIDUAL, EMPTY, None, True, BLOCK,
            BLOCK_K, None)
        store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                      tv_excess, status)
    if greedy is not None:
        if is_sampling == 0:
            num_accepted, next_token, tv_excess, status = verify_greedy(
                rows, tokens, first_child, next_sibling, neighbors, delta, None, mass, greedy_scratch + b * 3 * N,
                accepted_nodes, N, V, P, C, k, offset, CUTOFF, RESIDUAL, None, True, BLOCK, BLOCK_K, None)
            store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                          tv_excess, status)


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
