"""couple_tokens in Triton: one program per position; a pass for each total, and two over the residual.

A relaxed rule has another residual at the guess and at its neighbors: these are marked in scratch of this program, a
byte for each token.
"""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._rows import (
    EMPTY_RESIDUAL,
    INVALID_DRAFT,
    INVALID_ROW,
    INVALID_RULE,
    INVALID_TREE,
    accept_prob,
    accepts,
    block,
    draw,
    draw_residual,
    load_mass,
    to_fixed_point,
)
from ._verify import relax


@triton.jit
def mark_neighbors(is_treated, V, token_neighbors, count, offset, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sets is_treated to 1 at the first `count` neighbors, to 0 elsewhere."""
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        tl.store(is_treated + v, tl.zeros([BLOCK], tl.uint8), mask=v < V)
        start += BLOCK
    tl.debug_barrier()
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(token_neighbors + j, mask=j < count, other=0).to(tl.int64) + offset
        tl.store(is_treated + ids, tl.full([BLOCK_K], 1, tl.uint8), mask=(j < count) & (ids >= 0) & (ids < V))
        start += BLOCK_K
    tl.debug_barrier()


@triton.jit
def group_masses(target_row, draft_row, V, group, num_ids, guess, BLOCK_K: tl.constexpr):
    """The masses of target and draft on the ids of a group, without the guess."""
    masses = tl.zeros([BLOCK_K], tl.int64)
    draft_masses = tl.zeros([BLOCK_K], tl.int64)
    start = num_ids * 0
    while start < num_ids:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(group + j, mask=j < num_ids, other=-1)
        counts = (ids >= 0) & (ids < V) & (ids != guess)
        masses += load_mass(target_row, ids, counts, True)
        draft_masses += load_mass(draft_row, ids, counts, True)
        start += BLOCK_K
    return tl.sum(masses, axis=0), tl.sum(draft_masses, axis=0)


@kernel("target_probs", "draft_probs", "is_treated", "V")
def couple_tokens_kernel(
        target_probs, draft_probs,            # (B, W, V)
        tokens,                               # (B, W)
        uniforms,                             # (B, W, 2)
        omega,                                # (B, W) or None
        neighbors,                            # (C, k) or None
        delta,                                # (B) or None
        groups,                               # (B, W, group_size) or None
        is_treated,                           # (B, W, V) scratch, or None
        new_tokens, is_kept,                  # (B, W)
        num_kept,                             # (B), W everywhere
        tv_excess_out, status_out,            # (B, W)
        W, V, C, k, offset, group_size, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    target_row = target_probs + r * V
    draft_row = draft_probs + r * V
    total, is_valid = to_fixed_point(target_row, V, None, 0, BLOCK)
    draft_total, draft_is_valid = to_fixed_point(draft_row, V, None, 0, BLOCK)
    guess = tl.load(tokens + r)
    redraw = tl.load(uniforms + r * 2 + 1)
    if neighbors is not None:
        delta += r // W

    one = tl.full([], 1.0, tl.float64)
    omega_r = one
    has_rule = total == total
    if omega is not None:
        omega_r = tl.load(omega + r).to(tl.float64)
        has_rule = omega_r >= 0.0
        if (neighbors is not None or groups is not None) and RESIDUAL == "optimal":
            has_rule = omega_r >= 1.0
    status = tl.where(has_rule, 0, INVALID_RULE) | tl.where(is_valid, 0, INVALID_ROW)
    is_tried = has_rule & is_valid
    status |= tl.where(is_tried & (draft_is_valid == 0), INVALID_DRAFT, 0)
    is_tried = is_tried & draft_is_valid
    in_vocabulary = (guess >= 0) & (guess < V)
    status |= tl.where(is_tried & (in_vocabulary == 0), INVALID_TREE, 0)
    is_tried = is_tried & in_vocabulary
    token_draft_mass = load_mass(draft_row, guess, is_tried, True)
    if neighbors is None and groups is None:
        status |= tl.where(is_tried & (token_draft_mass == 0), INVALID_DRAFT, 0)
        is_tried = is_tried & (token_draft_mass > 0)

    accepts_guess = total != total
    tv_excess = one * 0.0
    draws_from_target = is_valid
    token = total * 0
    if is_tried:
        token_mass = load_mass(target_row, guess, is_tried, True)
        strict_prob = accept_prob(True, token_mass, total, token_draft_mass, draft_total, one)
        relaxed_mass, num_neighbors = relax(
            target_row, V, neighbors, C, k, offset, (None, 0, V), 0, guess, token_mass, total, delta, CUTOFF, RESIDUAL,
            True, BLOCK_K)
        if groups is not None:
            group_mass, group_draft_mass = group_masses(
                target_row, draft_row, V, groups + r * group_size, group_size, guess, BLOCK_K)
            relaxed_mass += group_mass
            token_draft_mass += group_draft_mass

        accepts_guess = accepts(True, tl.load(uniforms + r * 2), relaxed_mass, total, token_draft_mass, draft_total,
                                omega_r)
        relaxed_prob = accept_prob(True, relaxed_mass, total, token_draft_mass, draft_total, omega_r)
        tv_excess = tl.maximum(relaxed_prob - strict_prob, 0.0)
        token = guess
        draws_from_target = accepts_guess != accepts_guess
        if accepts_guess == 0:
            slack = tl.where(omega_r < 1.0, 1.0 - omega_r, 0.0)  # the share of P that stays at least
            if RESIDUAL != "optimal":
                slack = slack * 0.0
            if is_treated is not None:
                is_treated += r * V
                count = num_neighbors
                if RESIDUAL == "released":
                    count = tl.where(num_neighbors > 0, k, 0)
                mark_neighbors(is_treated, V, neighbors + (guess - offset) * k, count, offset, BLOCK, BLOCK_K)
            token, residual_total = draw_residual(
                target_row, draft_row, V, total, draft_total, slack, redraw, is_treated, guess, relaxed_mass,
                RESIDUAL == "relaxed", BLOCK)
            draws_from_target = residual_total == 0
            if residual_total == 0:
                status |= EMPTY_RESIDUAL
    if draws_from_target:
        token = draw(target_row, V, total, redraw, True, BLOCK)
    tl.store(new_tokens + r, token)
    tl.store(is_kept + r, accepts_guess.to(tl.uint8))
    tl.store(tv_excess_out + r, tv_excess.to(tl.float32))
    tl.store(status_out + r, status)
    tl.atomic_min(num_kept + r // W, tl.where(accepts_guess, W, r % W).to(tl.int32))


def couple_tokens(target_probs, draft_probs, tokens, uniforms, omega, neighbors, delta, groups, cutoff, offset,
                  residual):
    B, W, V = target_probs.shape
    C, k = (0, 0) if neighbors is None else neighbors.shape
    group_size = 0 if groups is None else groups.shape[2]
    new_tokens, is_kept = torch.empty_like(tokens), torch.empty_like(tokens, dtype=torch.bool)
    num_kept = torch.full((B,), W, dtype=torch.int32, device=tokens.device)
    tv_excess, status = target_probs.new_empty(B, W), torch.empty_like(tokens, dtype=torch.int32)
    if B > 0:
        treats_neighbors = neighbors is not None and residual != "optimal"
        is_treated = tokens.new_empty(B, W, V, dtype=torch.uint8) if treats_neighbors else None
        couple_tokens_kernel[(B * W,)](
            target_probs, draft_probs, tokens, uniforms, omega, neighbors, delta, groups, is_treated, new_tokens,
            is_kept.view(torch.uint8), num_kept, tv_excess, status, W, V, C, k, offset, group_size, CUTOFF=cutoff,
            RESIDUAL=residual, BLOCK=block("V", V), BLOCK_K=block("k", max(k, group_size, 1)), num_warps=8,
            enable_fp_fusion=False)
    return new_tokens, is_kept, num_kept, tv_excess, status
