"""verify_tree in Triton: one program per request, see _verify.py."""
import torch
import triton.language as tl

from ._kernel import kernel
from ._rows import block, fill
from ._verify import store_outputs
from ._verify_greedy import verify_greedy
from ._verify_sampled import verify_sampled


@kernel("target_probs", "draft_probs", "mass", "draft_mass", "V")
def verify_tree_kernel(
        target_probs, tokens, first_child, next_sibling, uniforms,    # (B, N, V), then (B, N)
        draft_probs, draft_row,                                       # (B, M, V) or None, (B, N)
        neighbors, delta, omega, greedy,                              # (C, k), (B), (B, P) and (B); or None
        id_range,                                                     # (B, N, 2) or None
        mass, draft_mass, greedy_scratch,                             # scratch: (B, V), (B, V), (B, 3, N)
        accepted_nodes,                                               # (B, P)
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        N, V, M, P, C, k, offset, first_id, last_id, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, EMPTY: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    target_probs += b * N * V
    tokens += b * N
    first_child += b * N
    next_sibling += b * N
    accepted_nodes += b * P
    if id_range is not None:
        id_range += b * N * 2
    if neighbors is not None:
        delta += b
    ids = (id_range, first_id, last_id)
    fill(accepted_nodes, -1, 0, P)
    tl.debug_barrier()
    is_sampling = b >= 0
    if greedy is not None:
        is_sampling = tl.load(greedy + b) == 0
    if is_sampling:
        if draft_probs is not None:
            draft_probs += b * M * V
            draft_row += b * N
            draft_mass += b * V
        if omega is not None:
            omega += b * P
        num_accepted, next_token, tv_excess, status = verify_sampled(
            target_probs, ids, tokens, first_child, next_sibling, uniforms + b * N, draft_probs, draft_row, neighbors,
            delta, omega, None, mass + b * V, draft_mass, accepted_nodes, N, V, M, P, C, k, offset, CUTOFF, RESIDUAL,
            EMPTY, BLOCK, BLOCK_K)
        store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                      tv_excess, status)
    if greedy is not None:
        if is_sampling == 0:
            num_accepted, next_token, tv_excess, status = verify_greedy(
                target_probs, ids, tokens, first_child, next_sibling, neighbors, delta, None,
                greedy_scratch + b * 3 * N, accepted_nodes, N, V, P, C, k, offset, CUTOFF, RESIDUAL, BLOCK, BLOCK_K)
            store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                          tv_excess, status)


def verify_tree(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
                omega, greedy, cutoff, offset, residual, empty, max_depth, id_range=None, first_id=0, last_id=None):
    """Outside of the ids of its row a token has no neighbors; verify_logits alone says which ids these are."""
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
        warps = 8 if greedy is None else 16  # 8 would spill registers, with code for both kinds of requests
        verify_tree_kernel[(B,)](
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
            omega, None if greedy is None else greedy.view(torch.uint8), id_range, mass, draft_mass, greedy_scratch,
            accepted_nodes, num_accepted, next_token, tv_excess, status, N, V, M, max_depth, C, k, offset, first_id,
            V if last_id is None else last_id, CUTOFF=cutoff, RESIDUAL=residual, EMPTY=empty, BLOCK=block("V", V),
            BLOCK_K=block("k", max(k, 1)), num_warps=warps, enable_fp_fusion=False)
    return accepted_nodes, num_accepted, next_token, tv_excess, status
