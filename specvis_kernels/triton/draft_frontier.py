"""draft_frontier in Triton: one program per node filters its row and finds its children; then one per request finds the
next level, as in expand_tree, and one writes its slots. No row of probabilities is stored.
"""
import triton
import triton.language as tl

from ._filters import num_warps, row_probs
from ._keys import NONE, entries_of, id_of
from ._rows import INVALID_ROW
from .expand_tree import chunks, frontier_kernel, score_of


@triton.jit(do_not_specialize=["F", "K"])  # they change from step to step
def level_children_kernel(
        logits, uncond,                       # (B, F, V); uncond may be None
        guidance, temperature, top_k, top_p,  # (B)
        id_range,                             # (B, F, 2) or None
        scores, candidates,                   # (B, F)
        width,                                # (B)
        tokens, child_scores, parents,        # (B, F, K)
        status,                               # (B, F)
        F, V, K, first_id, last_id, FILTERS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)       # row = b * F + f
    b = row // F
    score = tl.load(scores + row)
    count = 0
    status_bits = 0
    if score > float("-inf"):
        max_count = tl.minimum(tl.maximum(tl.load(width + b), 1), K)
        p, first, last, is_valid = row_probs(
            logits, uncond, id_range, row, V, first_id, last_id, tl.load(guidance + b), tl.load(temperature + b),
            tl.load(top_k + b), tl.load(top_p + b), FILTERS, BLOCK)
        status_bits = tl.where(is_valid, 0, INVALID_ROW)
        keys = entries_of(p, first + tl.arange(0, BLOCK), 0.0)
        best = tl.max(keys, axis=0)
        while (count < max_count) & (best > NONE):
            child = score_of(best, score)
            tl.store(tokens + row * K + count, tl.where(child > float("-inf"), id_of(best), 0))
            tl.store(child_scores + row * K + count, child)
            keys = tl.where(keys == best, NONE, keys)
            best = tl.max(keys, axis=0)
            count += 1
    tl.store(status + row, status_bits)
    k = tl.arange(0, BLOCK_K)
    unused = (k >= count) & (k < K)
    tl.store(tokens + row * K + k, tl.zeros([BLOCK_K], tl.int64), mask=unused)
    tl.store(child_scores + row * K + k, tl.full([BLOCK_K], float("-inf"), tl.float32), mask=unused)
    tl.store(parents + row * K + k, tl.zeros([BLOCK_K], tl.int32) + tl.load(candidates + row), mask=k < K)


@triton.jit(do_not_specialize=["F", "K", "W", "level", "first_node", "first_candidate"])
def slots_kernel(
        frontier,                    # (B, K)
        depth,                       # (B)
        ancestors,                   # (B, F, W)
        child_tokens, child_scores,  # (B, F, K)
        tokens, scores, rows,        # (B, K)
        new_ancestors,               # (B, K, W)
        candidates,                  # (B, K)
        F, K, W, level, first_node, first_candidate, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    mask = k < K
    child = tl.load(frontier + b * K + k, mask=mask, other=-1)
    is_used = (child >= 0) & (tl.load(depth + b) > level)
    chosen = tl.maximum(child, 0).to(tl.int64)
    row = chosen // K
    slot = b * K + k
    score = tl.load(child_scores + b * F * K + chosen, mask=mask)
    tl.store(tokens + slot, tl.load(child_tokens + b * F * K + chosen, mask=mask), mask=mask)
    tl.store(scores + slot, tl.where(is_used, score, float("-inf")), mask=mask)
    tl.store(rows + slot, row, mask=mask)
    tl.store(candidates + slot, tl.where(is_used, first_candidate + child, -1).to(tl.int32), mask=mask)
    node = (first_node + k).to(tl.int64)
    bit = tl.full([BLOCK_K], 1, tl.int64) << (node % 64)
    w = b * 0
    while w < W:
        words = tl.load(ancestors + (b * F + row) * W + w, mask=mask, other=0)
        words = words | tl.where(node // 64 == w, bit, 0)
        tl.store(new_ancestors + slot * W + w, tl.where(is_used, words, 0), mask=mask)
        w += 1


def draft_frontier(logits, uncond, scores, ancestors, candidates, width, depth, guidance, temperature, top_k, top_p,
                   id_range, first_id, last_id, filters, num_children, level, first_node, first_candidate):
    (B, F, V), K, W = logits.shape, num_children, ancestors.shape[2]
    child_tokens, child_scores = depth.new_empty(B, F * K), scores.new_empty(B, F * K)
    child_parents, status = width.new_empty(B, F * K), width.new_empty(B, F)
    tokens, frontier_scores, rows = depth.new_empty(B, K), scores.new_empty(B, K), depth.new_empty(B, K)
    new_ancestors, new_candidates = depth.new_empty(B, K, W), width.new_empty(B, K)
    if B > 0:
        block, block_k = triton.next_power_of_2(last_id - first_id), triton.next_power_of_2(K)
        level_children_kernel[(B * F,)](
            logits, uncond, guidance, temperature, top_k, top_p, id_range, scores, candidates, width, child_tokens,
            child_scores, child_parents, status, F, V, K, first_id, last_id, FILTERS=filters, BLOCK=block,
            BLOCK_K=block_k, num_warps=num_warps(block), enable_fp_fusion=False)
        frontier = width.new_empty(B, K)
        frontier_kernel[(B,)](child_scores, width, frontier, F * K, K, BLOCK_K=block_k, **chunks(F * K))
        slots_kernel[(B,)](frontier, depth, ancestors, child_tokens, child_scores, tokens, frontier_scores, rows,
                           new_ancestors, new_candidates, F, K, W, level, first_node, first_candidate,
                           BLOCK_K=block_k)
    return (child_tokens, child_scores, child_parents, tokens, frontier_scores, rows, new_ancestors, new_candidates,
            status)
