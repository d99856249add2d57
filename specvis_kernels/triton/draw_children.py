"""draw_children in Triton: one program per row; a pass for the sums of its blocks, then a block for each child.

Blocks keep the sums that they had: the aim goes past what was drawn instead. `places` says where among the
weights that are left each drawn token was taken away.
"""
import torch
import triton
import triton.language as tl

from ._rows import INVALID_ROW, block, draw_threshold, load_mass


@triton.jit
def draw_children_kernel(
        draft_probs,    # (R, V)
        uniforms,       # (R, K)
        tokens,         # (R, K)
        count, status,  # (R)
        V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = draft_probs + r * V
    v = tl.arange(0, BLOCK)
    b = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < V:
        p = tl.load(row + start + v, mask=start + v < V, other=0.0)
        bad += tl.where((p >= 0.0) & (p <= 2.0), 0, 1)
        mass = tl.sum(load_mass(row, start + v, start + v < V, True), axis=0)
        sums += tl.where(b == start // BLOCK, mass, 0)
        start += BLOCK
    left = tl.sum(sums, axis=0)
    valid = (tl.sum(bad, axis=0) == 0) & (left > 0)
    ends = tl.cumsum(sums, axis=0)

    k = tl.arange(0, BLOCK_K)
    drawn = tl.zeros([BLOCK_K], tl.int64)
    weights = tl.zeros([BLOCK_K], tl.int64)
    places = tl.zeros([BLOCK_K], tl.int64)
    n = 0
    while valid & (n < K) & (left > 0):
        at = draw_threshold(tl.load(uniforms + r * K + n), left)
        passed = tl.sum(tl.where(places <= at, weights, 0), axis=0)
        at += passed
        begin = tl.sum((ends <= at).to(tl.int64), axis=0) * BLOCK
        below = tl.sum(tl.where(ends <= at, sums, 0), axis=0)
        weight = load_mass(row, begin + v, begin + v < V, True)
        before = below + tl.cumsum(weight, axis=0) <= at
        token = begin + tl.sum(before.to(tl.int64), axis=0)
        place = below + tl.sum(tl.where(before, weight, 0), axis=0) - passed
        own = tl.sum(tl.where(begin + v == token, weight, 0), axis=0)
        places = tl.where(places > place, places - own, places)
        drawn = tl.where(k == n, token, drawn)
        weights = tl.where(k == n, own, weights)
        places = tl.where(k == n, place, places)
        left -= own
        n += 1
    tl.store(tokens + r * K + k, drawn, mask=k < K)
    tl.store(count + r, n)
    tl.store(status + r, tl.where(valid, 0, INVALID_ROW))


def draw_children(draft_probs, uniforms):
    B, F, V = draft_probs.shape
    K = uniforms.shape[2]
    tokens = torch.empty_like(uniforms, dtype=torch.int64)
    count, status = (uniforms.new_empty((B, F), dtype=torch.int32) for _ in range(2))
    if B > 0:
        size = block("V", V)
        draw_children_kernel[(B * F,)](draft_probs, uniforms, tokens, count, status, V, K, BLOCK=size,
                                       BLOCKS=triton.next_power_of_2(triton.cdiv(V, size)),
                                       BLOCK_K=triton.next_power_of_2(K), num_warps=8, enable_fp_fusion=False)
    return tokens, count, status
