"""draw_children in Triton: one program per row. It sums the blocks in one pass, then reads one block for each child.

The sums of the blocks stay as they were at first. Instead, the threshold to draw at moves past what was drawn before:
`removed_at` says at which running sum of the remaining mass each drawn token was removed.
"""
import torch
import triton
import triton.language as tl

from ._rows import INVALID_ROW, block, draw_threshold, load_mass


@triton.jit
def draw_children_kernel(
        draft_probs,           # (R, V)
        uniforms,              # (R, K)
        tokens,                # (R, K)
        num_children, status,  # (R)
        V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = draft_probs + r * V
    v = tl.arange(0, BLOCK)
    b = tl.arange(0, BLOCKS)
    block_totals = tl.zeros([BLOCKS], tl.int64)
    num_invalid = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < V:
        p = tl.load(row + start + v, mask=start + v < V, other=0.0)
        num_invalid += tl.where((p >= 0.0) & (p <= 2.0), 0, 1)
        block_total = tl.sum(load_mass(row, start + v, start + v < V, True), axis=0)
        block_totals += tl.where(b == start // BLOCK, block_total, 0)
        start += BLOCK
    remaining = tl.sum(block_totals, axis=0)
    is_valid = (tl.sum(num_invalid, axis=0) == 0) & (remaining > 0)
    block_ends = tl.cumsum(block_totals, axis=0)

    k = tl.arange(0, BLOCK_K)
    drawn_tokens = tl.zeros([BLOCK_K], tl.int64)
    drawn_mass = tl.zeros([BLOCK_K], tl.int64)
    removed_at = tl.zeros([BLOCK_K], tl.int64)
    n = 0
    while is_valid & (n < K) & (remaining > 0):
        threshold = draw_threshold(tl.load(uniforms + r * K + n), remaining)
        skipped = tl.sum(tl.where(removed_at <= threshold, drawn_mass, 0), axis=0)
        threshold += skipped
        start_v = tl.sum((block_ends <= threshold).to(tl.int64), axis=0) * BLOCK
        sum_before = tl.sum(tl.where(block_ends <= threshold, block_totals, 0), axis=0)
        mass = load_mass(row, start_v + v, start_v + v < V, True)
        is_before = sum_before + tl.cumsum(mass, axis=0) <= threshold
        token = start_v + tl.sum(is_before.to(tl.int64), axis=0)
        position = sum_before + tl.sum(tl.where(is_before, mass, 0), axis=0) - skipped
        token_mass = tl.sum(tl.where(start_v + v == token, mass, 0), axis=0)
        removed_at = tl.where(removed_at > position, removed_at - token_mass, removed_at)
        drawn_tokens = tl.where(k == n, token, drawn_tokens)
        drawn_mass = tl.where(k == n, token_mass, drawn_mass)
        removed_at = tl.where(k == n, position, removed_at)
        remaining -= token_mass
        n += 1
    tl.store(tokens + r * K + k, drawn_tokens, mask=k < K)
    tl.store(num_children + r, n)
    tl.store(status + r, tl.where(is_valid, 0, INVALID_ROW))


def draw_children(draft_probs, uniforms, seeds, positions, K):
    B, F, V = draft_probs.shape
    tokens = draft_probs.new_empty((B, F, K), dtype=torch.int64)
    num_children, status = (draft_probs.new_empty((B, F), dtype=torch.int32) for _ in range(2))
    if B > 0:
        size = block("V", V)
        draw_children_kernel[(B * F,)](draft_probs, uniforms, tokens, num_children, status, V, K, BLOCK=size,
                                       BLOCKS=triton.next_power_of_2(triton.cdiv(V, size)),
                                       BLOCK_K=triton.next_power_of_2(K), num_warps=8, enable_fp_fusion=False)
    return tokens, num_children, status
