"""expand_tree in Triton: one program per node for its children, then one per request for the next level.

A program keeps the best entry of each chunk of its row (entries c, c + CHUNKS, c + 2 CHUNKS, ...) as a key
that orders by value, then by lower id. The best of the keys is the next child, and its chunk's next one takes
its place: the row is read once, and each child costs one reduction and one short load, however many tie.
"""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._keys import NONE, entries_of, id_of
from ._rows import INVALID_ROW, block, fill

NO_PROB = tl.constexpr(2**63 - 1)  # the key of an invalid probability, above all others
LENGTH = tl.constexpr(8)           # entries of a chunk that are read together


@triton.jit
def without(keys, best, row, first, end, FLOOR: tl.constexpr, CHUNKS: tl.constexpr):
    """The keys of the entries first .. end - 1 after `best` was taken: the next one of its chunk takes its place.

    `first` is a multiple of CHUNKS.
    """
    chunk = id_of(best) % CHUNKS
    following = tl.full([LENGTH], NONE, tl.int64)
    start = first + chunk
    while start < end:
        ids = start + CHUNKS * tl.arange(0, LENGTH).to(tl.int64)
        chunk_keys = entries_of(tl.load(row + ids, mask=ids < end, other=FLOOR), ids, FLOOR)
        following = tl.maximum(following, tl.where(chunk_keys < best, chunk_keys, NONE))
        start += CHUNKS * LENGTH
    return tl.where(tl.arange(0, CHUNKS) == chunk, tl.max(following, axis=0), keys)


@triton.jit
def score_of(best, score):
    """The score of the child that is the entry `best` of a node's row."""
    value = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    log_prob = tl.log(value.to(tl.float64)).to(tl.float32)
    return score + tl.where(log_prob < 0.0, log_prob, 0.0)


@kernel("draft_probs", "V")
def children_kernel(
        draft_probs, scores, width,     # (B, F, V), (B, F), (B)
        tokens, child_scores, status,   # (B, F, K), (B, F, K), (B, F)
        F, V, K, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * F + f
    probs = draft_probs + row * V
    score = tl.load(scores + row)
    exists = score > float("-inf")
    count = 0
    status_bits = 0
    if exists:
        max_count = tl.minimum(tl.maximum(tl.load(width + row // F), 1), K)
        keys = tl.full([CHUNKS], NONE, tl.int64)
        start = tl.full([], 0, tl.int64)
        while start < V:
            ids = start + tl.arange(0, CHUNKS)
            p = tl.load(probs + ids, mask=ids < V, other=0.0)
            is_prob = (p >= 0.0) & (p <= 2.0)
            keys = tl.maximum(keys, tl.where(is_prob, entries_of(p, ids, 0.0), NO_PROB))
            start += CHUNKS
        best = tl.max(keys, axis=0)
        value = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        has_mass = value * 4398046511104.0 >= 1.0        # 2^42: in fixed point
        if (best == NONE) | (best == NO_PROB) | (has_mass == 0):
            status_bits = INVALID_ROW
            best = tl.full([], NONE, tl.int64)
        while (count < max_count) & (best > NONE):
            child = score_of(best, score)
            tl.store(tokens + row * K + count, tl.where(child > float("-inf"), id_of(best), 0))
            tl.store(child_scores + row * K + count, child)
            keys = without(keys, best, probs, 0, V, 0.0, CHUNKS)
            best = tl.max(keys, axis=0)
            count += 1
    tl.store(status + row, status_bits)
    fill(tokens + row * K, 0, count, K)
    fill(child_scores + row * K, float("-inf"), count, K)


@kernel()
def frontier_kernel(
        child_scores, width, frontier,  # (B, F, K), (B), (B, K)
        size, K, CHUNKS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    scores = child_scores + b * size
    max_count = tl.minimum(tl.maximum(tl.load(width + b), 1), K)
    keys = tl.full([CHUNKS], NONE, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < size:
        ids = start + tl.arange(0, CHUNKS)
        score = tl.load(scores + ids, mask=ids < size, other=float("-inf"))
        keys = tl.maximum(keys, entries_of(score, ids, float("-inf")))
        start += CHUNKS
    best = tl.max(keys, axis=0)
    count = 0
    while (count < max_count) & (best > NONE):
        tl.store(frontier + b * K + count, id_of(best).to(tl.int32))
        keys = without(keys, best, scores, 0, size, float("-inf"), CHUNKS)
        best = tl.max(keys, axis=0)
        count += 1
    fill(frontier + b * K, -1, count, K)


def expand_tree(draft_probs, scores, width, num_children):
    (B, F, V), K = draft_probs.shape, num_children
    tokens = draft_probs.new_empty((B, F, K), dtype=torch.int64)
    child_scores = draft_probs.new_empty((B, F, K))
    frontier, status = width.new_empty((B, K)), width.new_empty((B, F))
    if B > 0:
        children_kernel[(B * F,)](draft_probs, scores, width, tokens, child_scores, status, F, V, K,
                                  CHUNKS=block("V", V), num_warps=8, enable_fp_fusion=False)
        frontier_kernel[(B,)](child_scores, width, frontier, F * K, K, CHUNKS=512)
    return tokens, child_scores, frontier, status
