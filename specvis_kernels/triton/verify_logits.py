"""verify_logits in Triton: one program per request. With uniform numbers it verifies as in _verify.py; with seeds it
draws a token at each node that it visits, as in _draws.py.
"""
import torch
import triton.language as tl

from ._draws import draw_row
from ._filters import tiles
from ._kernel import kernel
from ._rows import INVALID_ROW, block, fill
from ._verify import verify_request
from .verify_greedy import find_child


@kernel("logits", "uncond", "draft_probs", "scratch", "mass", "draft_mass", "V")
def verify_logits_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        tokens,                                # (B, N)
        first_child, next_sibling,             # (B, N)
        uniforms,                              # (B, N)
        guidance, temperature, top_k, top_p,   # (B)
        id_range,                              # (B, N, 2) or None
        draft_probs,                           # (B, M, V) or None
        draft_row,                             # (B, N)
        neighbors,                             # (C, k) or None
        delta,                                 # (B)
        omega,                                 # (B, P) or None
        scratch,                               # (B, 2, V)
        mass, draft_mass,                      # (B, V) scratch
        greedy_scratch,                        # (B, 3, N)
        accepted_nodes,                        # (B, P)
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        N, V, M, P, C, k, offset, first_id, last_id, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr,
        EMPTY: tl.constexpr, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    logits += b * N * V
    if uncond is not None:
        uncond += b * N * V
    if id_range is not None:
        id_range += b * N * 2
    t = tl.load(temperature + b)
    rows = (None, logits, uncond, tl.load(guidance + b), t, tl.load(top_k + b), tl.load(top_p + b), id_range, first_id,
            last_id, scratch + b * 2 * V)
    verify_request(
        rows, t == 0, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta, omega,
        mass, draft_mass, greedy_scratch, accepted_nodes, num_accepted_out, next_token_out, tv_excess_out, status_out,
        N, V, M, P, C, k, offset, CUTOFF, RESIDUAL, EMPTY, FILTERS, False, TILE, BITS, BLOCK_K)


@kernel("logits", "uncond", "scratch", "V")
def verify_by_seeds_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        tokens,                                # (B, N)
        first_child, next_sibling,             # (B, N)
        guidance, temperature, top_k, top_p,   # (B)
        id_range,                              # (B, N, 2) or None
        seeds,                                 # (B)
        positions,                             # (B, N)
        scratch,                               # (B, 2, V)
        accepted_nodes,                        # (B, P)
        num_accepted, next_token, status_out,  # (B)
        N, V, P, first_id, last_id, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    accepted_nodes += b * P
    scratch += b * 2 * V
    fill(accepted_nodes, -1, 0, P)
    tl.debug_barrier()
    s = tl.load(guidance + b)
    t = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    seed = tl.load(seeds + b)

    node = b * 0
    depth = node.to(tl.int32)
    status = depth
    token = node
    descends = b >= 0
    while descends:
        row = b * N + node
        token, _, is_valid = draw_row(logits, uncond, scratch, id_range, row, V, first_id, last_id, s, t, k, p, seed,
                                      tl.load(positions + row), 0, FILTERS, TILE, BITS)
        status |= tl.where(is_valid, 0, INVALID_ROW)
        descends = is_valid & (depth < P)
        if descends:
            child = tl.load(first_child + row).to(tl.int64)
            found, found_status = find_child(tokens + b * N, next_sibling + b * N, token, node, child, N)
            status |= found_status
            descends = found >= 0
            if descends:
                tl.store(accepted_nodes + depth, found.to(tl.int32))
                node = found
                depth += 1
    tl.store(num_accepted + b, depth)
    tl.store(next_token + b, token)
    tl.store(status_out + b, status)


def verify_logits(logits, uncond, tokens, first_child, next_sibling, uniforms, guidance, temperature, top_k, top_p,
                  id_range, draft_probs, draft_row, neighbors, delta, omega, seeds, positions, first_id, last_id,
                  filters, cutoff, offset, residual, empty, max_depth):
    B, N, V = logits.shape
    M = 0 if draft_probs is None else draft_probs.shape[1]
    C, k = (0, 0) if neighbors is None else neighbors.shape
    accepted_nodes = tokens.new_empty(B, max_depth, dtype=torch.int32)
    num_accepted, next_token = tokens.new_empty(B, dtype=torch.int32), tokens.new_empty(B)
    tv_excess, status = guidance.new_zeros(B), tokens.new_empty(B, dtype=torch.int32)
    scratch = tokens.new_empty(B, 2, V, dtype=torch.int32)
    if B > 0 and seeds is not None:
        verify_by_seeds_kernel[(B,)](
            logits, uncond, tokens, first_child, next_sibling, guidance, temperature, top_k, top_p, id_range, seeds,
            positions, scratch, accepted_nodes, num_accepted, next_token, status, N, V, max_depth, first_id, last_id,
            FILTERS=filters, **tiles(V), enable_fp_fusion=False)
    elif B > 0:
        mass = tokens.new_empty(B, V)
        draft_mass = None if draft_probs is None else tokens.new_empty(B, V)
        greedy_scratch = tokens.new_empty(B, 3, N, dtype=torch.int32)
        verify_logits_kernel[(B,)](
            logits, uncond, tokens, first_child, next_sibling, uniforms, guidance, temperature, top_k, top_p, id_range,
            draft_probs, draft_row, neighbors, delta, omega, scratch, mass, draft_mass, greedy_scratch, accepted_nodes,
            num_accepted, next_token, tv_excess, status, N, V, M, max_depth, C, k, offset, first_id, last_id,
            CUTOFF=cutoff, RESIDUAL=residual, EMPTY=empty, FILTERS=filters, BLOCK_K=block("k", max(k, 1)),
            **tiles(V, 2), enable_fp_fusion=False)
    return accepted_nodes, num_accepted, next_token, tv_excess, status
