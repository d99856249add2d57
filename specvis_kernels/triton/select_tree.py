"""select_tree in Triton: one program per request, all candidates in a block; the threshold by bitwise search."""
import triton
import triton.language as tl

from ._rows import INVALID_TREE, MAX_WARPS

MAX_CANDIDATES = 32768  # the nodes' numbers are exchanged in shared memory
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
    budget = tl.minimum(tl.maximum(tl.load(size + b), 1), N) - 1

    # The largest key that `budget` candidates reach, found one bit at a time; NONE if there are fewer.
    threshold = tl.full([], NONE, tl.int64)
    step = tl.full([], 2**31, tl.int64)
    while step > 0:
        num_reaching = tl.sum((keys >= (threshold + step).to(tl.int32)).to(tl.int32), axis=0)
        threshold = tl.where(num_reaching >= budget, threshold + step, threshold)
        step = step >> 1
    threshold = threshold.to(tl.int32)
    is_above = keys > threshold
    is_tie = (keys == threshold) & (keys > NONE)
    max_ties = budget - tl.sum(is_above.to(tl.int32), axis=0)
    is_kept = is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= max_ties))
    node = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32), axis=0), -2)

    parent_candidate = tl.load(parents + b * M + m, mask=m < M, other=-2)
    is_before = (parent_candidate >= 0) & (parent_candidate < m)
    parent = tl.where(is_before, tl.gather(node, tl.where(is_before, parent_candidate, 0), axis=0), -2)
    parent = tl.where(parent_candidate == -1, 0, parent)
    is_valid = parent >= 0
    token = tl.load(tokens + b * M + m, mask=is_kept & is_valid, other=0)
    tl.store(node_tokens + b * N + node, token, mask=is_kept)
    tl.store(node_parents + b * N + node, parent, mask=is_kept)
    tl.store(source + b * N + node, tl.where(is_valid, m, -1), mask=is_kept)
    is_wrong = is_kept & (parent < 0)
    tl.store(status + b, tl.max(is_wrong.to(tl.int32), axis=0) * INVALID_TREE)

    n = tl.arange(0, BLOCK_N)
    mask = (n < N) & ((n == 0) | (n > tl.sum(is_kept.to(tl.int32), axis=0)))  # the root and the unused slots
    tl.store(node_tokens + b * N + n, tl.where(n == 0, tl.load(root + b), 0), mask=mask)
    tl.store(node_parents + b * N + n, tl.where(n == 0, -1, -2), mask=mask)
    tl.store(source + b * N + n, tl.full([BLOCK_N], -1, tl.int32), mask=mask)


def select_tree(tokens, scores, parents, root, size, num_nodes):
    (B, M), N = tokens.shape, num_nodes
    if M > MAX_CANDIDATES:
        raise ValueError(f"tokens must have at most {MAX_CANDIDATES} candidates for select_tree in Triton, got M={M}")
    out = tokens.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty(B)
    if B > 0:
        block = max(triton.next_power_of_2(M), 16)
        select_tree_kernel[(B,)](tokens, scores, parents, root, size, *out, M, N, BLOCK_M=block,
                                 BLOCK_N=triton.next_power_of_2(N),
                                 num_warps=min(MAX_WARPS, max(4, block // 512)))
    return out
