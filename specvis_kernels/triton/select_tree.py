"""select_tree in Triton: one program per request takes BLOCK candidates at a time; the threshold by bitwise search.

The nodes' numbers are kept in scratch of this program, where a later candidate finds its parent's number.
"""
import triton.language as tl

from ._kernel import kernel
from ._keys import keys_of
from ._rows import INVALID_TREE, fill

NONE = tl.constexpr(-(2**31))  # below every score's key


@kernel()
def select_tree_kernel(
        tokens, scores, parents,             # (B, M)
        root, size,                          # (B)
        nodes,                               # (B, M) scratch
        node_tokens, node_parents, source,   # (B, N)
        status,                              # (B)
        M, N, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    budget = tl.minimum(tl.maximum(tl.load(size + b), 1), N) - 1

    # The largest key that `budget` candidates reach, found one bit at a time; NONE if there are fewer candidates.
    threshold = tl.full([], NONE, tl.int64)
    num_above = budget * 0
    step = tl.full([], 2**31, tl.int64)
    while step > 0:
        count = tl.zeros([BLOCK], tl.int32)
        start = 0
        while start < M:
            m = start + i
            score = tl.load(scores + b * M + m, mask=m < M, other=float("-inf"))
            keys = tl.where(score > float("-inf"), keys_of(score), NONE)
            count += (keys >= (threshold + step).to(tl.int32)).to(tl.int32)
            start += BLOCK
        num = tl.sum(count, axis=0)
        is_reached = num >= budget
        threshold = tl.where(is_reached, threshold + step, threshold)
        num_above = tl.where(is_reached, num_above, num)
        step = step >> 1
    threshold = threshold.to(tl.int32)

    max_ties = budget - num_above
    num_ties = budget * 0
    num_kept = budget * 0
    num_wrong = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < M:
        m = start + i
        score = tl.load(scores + b * M + m, mask=m < M, other=float("-inf"))
        keys = tl.where(score > float("-inf"), keys_of(score), NONE)
        is_tie = (keys == threshold) & (keys > NONE)
        ties = num_ties + tl.cumsum(is_tie.to(tl.int32), axis=0)
        is_kept = (keys > threshold) | (is_tie & (ties <= max_ties))
        node = tl.where(is_kept, num_kept + tl.cumsum(is_kept.to(tl.int32), axis=0), -2)
        num_ties += tl.sum(is_tie.to(tl.int32), axis=0)
        num_kept += tl.sum(is_kept.to(tl.int32), axis=0)
        tl.store(nodes + b * M + m, node, mask=m < M)
        tl.debug_barrier()

        parent_candidate = tl.load(parents + b * M + m, mask=m < M, other=-2)
        is_before = (parent_candidate >= 0) & (parent_candidate < m)
        parent = tl.load(nodes + b * M + parent_candidate, mask=is_before, other=-2)
        parent = tl.where(parent_candidate == -1, 0, parent)
        is_valid = parent >= 0
        token = tl.load(tokens + b * M + m, mask=is_kept & is_valid, other=0)
        tl.store(node_tokens + b * N + node, token, mask=is_kept)
        tl.store(node_parents + b * N + node, parent, mask=is_kept)
        tl.store(source + b * N + node, tl.where(is_valid, m, -1), mask=is_kept)
        num_wrong += (is_kept & (parent < 0)).to(tl.int32)
        start += BLOCK
    tl.store(status + b, tl.where(tl.sum(num_wrong, axis=0) > 0, INVALID_TREE, 0))

    tl.store(node_tokens + b * N, tl.load(root + b))
    tl.store(node_parents + b * N, -1)
    tl.store(source + b * N, -1)
    fill(node_tokens + b * N, 0, num_kept + 1, N)         # the unused slots
    fill(node_parents + b * N, -2, num_kept + 1, N)
    fill(source + b * N, -1, num_kept + 1, N)


def select_tree(tokens, scores, parents, root, size, num_nodes):
    (B, M), N = tokens.shape, num_nodes
    out = tokens.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty((B, N)), parents.new_empty(B)
    if B > 0:
        select_tree_kernel[(B,)](tokens, scores, parents, root, size, parents.new_empty((B, M)), *out, M, N, BLOCK=512)
    return out
