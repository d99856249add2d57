"""select_tree in Triton: one program per request, all candidates in a block; the threshold by bitwise search."""
import triton
import triton.language as tl

from ._rows import MAX_WARPS

WIDEST = 32768  # the nodes' numbers are exchanged in shared memory
NONE = tl.constexpr(-(2**31))  # below every score's key


@triton.jit
def select_tree_kernel(
        tokens, scores, parents,             # (B, M)
        root, size,                          # (B)
        node_tokens, node_parents, source,   # (B, N)
        status,                              # (B)
        M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    score = tl.load(scores + b * M + m, mask=m < M, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    keys = tl.where(score > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), NONE)  # in the scores' order
    room = tl.minimum(tl.maximum(tl.load(size + b), 1), N) - 1

    # The largest key that `room` candidates reach, one bit at a time; NONE if there are not as many.
    worst = tl.full([], NONE, tl.int64)
    step = tl.full([], 2**31, tl.int64)
    while step > 0:
        reach = tl.sum((keys >= (worst + step).to(tl.int32)).to(tl.int32), axis=0)
        worst = tl.where(reach >= room, worst + step, worst)
        step = step >> 1
    worst = worst.to(tl.int32)
    above = keys > worst
    ties = (keys == worst) & (keys > NONE)
    left = room - tl.sum(above.to(tl.int32), axis=0)
    kept = above | (ties & (tl.cumsum(ties.to(tl.int32), axis=0) <= left))
    node = tl.where(kept, tl.cumsum(kept.to(tl.int32), axis=0), -2)

    parent = tl.load(parents + b * M + m, mask=m < M, other=-2)
    before = (parent >= 0) & (parent < m)
    mother = tl.where(before, tl.gather(node, tl.where(before, parent, 0), axis=0), -2)
    mother = tl.where(parent == -1, 0, mother)
    good = mother >= 0
    token = tl.load(tokens + b * M + m, mask=kept & good, other=0)
    tl.store(node_tokens + b * N + node, token, mask=kept)
    tl.store(node_parents + b * N + node, mother, mask=kept)
    tl.store(source + b * N + node, tl.where(good, m, -1), mask=kept)
    wrong = kept & (mother < 0)
    tl.store(status + b, tl.max(wrong.to(tl.int32), axis=0) * 4)  # INVALID_TREE

    n = tl.arange(0, BLOCK_N)
    rest = (n < N) & ((n == 0) | (n > tl.sum(kept.to(tl.int32), axis=0)))
    tl.store(node_tokens + b * N + n, tl.where(n == 0, tl.load(root + b), 0), mask=rest)
    tl.store(node_parents + b * N + n, tl.where(n == 0, -1, -2), mask=rest)
    tl.store(source + b * N + n, tl.full([BLOCK_N], -1, tl.int32), mask=rest)


def select_tree(tokens, scores, parents, root, size, N):
    B, M = tokens.shape
    if M > WIDEST:
        raise ValueError(f"tokens must have at most {WIDEST} candidates for select_tree in Triton, got M={M}")
    out = tokens.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty(B)
    if B > 0:
        block = max(triton.next_power_of_2(M), 16)
        select_tree_kernel[(B,)](tokens, scores, parents, root, size, *out, M, N, BLOCK_M=block,
                                 BLOCK_N=triton.next_power_of_2(N),
                                 num_warps=min(MAX_WARPS, max(4, block // 512)))
    return out
