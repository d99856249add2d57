"""draft_frontier in Triton: one program per node filters its row and finds its children; then one per request finds the
next level, as in expand_tree, and one writes its slots. No row of probabilities is stored.
"""
import triton.language as tl

from ._filters import filter_and_sum, load_probs, programs_and_scratch, tiles
from ._kernel import kernel
from ._keys import NONE, entries_of, id_of
from ._rows import INVALID_ROW, fill
from .expand_tree import frontier_kernel, score_of, without


@kernel("logits", "uncond", "scratch", "V")
def level_children_kernel(
        logits, uncond,                       # (B, F, V); uncond may be None
        guidance, temperature, top_k, top_p,  # (B)
        min_p,                                # (B) or None
        id_range,                             # (B, F, 2) or None
        scores, candidates, width,            # (B, F), (B, F), (B)
        scratch,                              # (programs, 2, V)
        tokens, child_scores, parents,        # (B, F, K)
        status,                               # (B, F)
        num_rows, F, V, K, first_id, last_id, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    scratch += tl.program_id(0).to(tl.int64) * 2 * V
    probs = (scratch + V).to(tl.pointer_type(tl.float32))
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:                     # row = b * F + f
        b = row // F
        score = tl.load(scores + row)
        count = 0
        status_bits = 0
        if score > float("-inf"):
            max_count = tl.minimum(tl.maximum(tl.load(width + b), 1), K)
            _, _, is_valid, begin, end, best_logit, lowest_kept, total = filter_and_sum(
                logits, uncond, scratch, id_range, row, V, first_id, last_id, tl.load(guidance + b),
                tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), None if min_p is None else min_p + b,
                FILTERS, TILE, BITS)
            status_bits = tl.where(is_valid, 0, INVALID_ROW)
            keys = tl.full([TILE], NONE, tl.int64)
            start = begin
            while start < end:
                v = start + tl.arange(0, TILE)
                p = load_probs(scratch, start, V, begin, end, best_logit, lowest_kept, total, TILE)
                tl.store(probs + v, p, mask=v < V)
                keys = tl.maximum(keys, entries_of(p, v, 0.0))
                start += TILE
            tl.debug_barrier()
            best = tl.max(keys, axis=0)
            while (count < max_count) & (best > NONE):
                child = score_of(best, score)
                tl.store(tokens + row * K + count, tl.where(child > float("-inf"), id_of(best), 0))
                tl.store(child_scores + row * K + count, child)
                keys = without(keys, best, probs, begin, end, 0.0, TILE)
                best = tl.max(keys, axis=0)
                count += 1
        tl.store(status + row, status_bits)
        fill(tokens + row * K, 0, count, K)
        fill(child_scores + row * K, float("-inf"), count, K)
        fill(parents + row * K, tl.load(candidates + row), 0, K)
        row += tl.num_programs(0)


@kernel()
def slots_kernel(
        frontier, depth, ancestors,  # (B, K), (B), (B, F, W)
        child_tokens, child_scores,  # (B, F, K)
        tokens, scores, rows,        # (B, K)
        new_ancestors, candidates,   # (B, K, W), (B, K)
        F, K, W, level, first_node, first_candidate, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    bit = tl.full([BLOCK], 1, tl.int64) << (node % 64)
    w = b * 0
    while w < W:
        words = tl.load(ancestors + (b * F + row) * W + w, mask=mask, other=0)
        words = words | tl.where(node // 64 == w, bit, 0)
        tl.store(new_ancestors + slot * W + w, tl.where(is_used, words, 0), mask=mask)
        w += 1


def draft_frontier(logits, uncond, scores, ancestors, candidates, width, depth, guidance, temperature, top_k, top_p,
                   min_p, id_range, first_id, last_id, filters, num_children, level, first_node, first_candidate):
    (B, F, V), K, W = logits.shape, num_children, ancestors.shape[2]
    child_tokens, child_scores = depth.new_empty(B, F * K), scores.new_empty(B, F * K)
    child_parents, status = width.new_empty(B, F * K), width.new_empty(B, F)
    tokens, frontier_scores, rows = depth.new_empty(B, K), scores.new_empty(B, K), depth.new_empty(B, K)
    new_ancestors, new_candidates = depth.new_empty(B, K, W), width.new_empty(B, K)
    if B > 0:
        programs, scratch = programs_and_scratch(B * F, V, logits.device)
        level_children_kernel[(programs,)](
            logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, scores, candidates, width, scratch,
            child_tokens, child_scores, child_parents, status, B * F, F, V, K, first_id, last_id, FILTERS=filters,
            **tiles(V), enable_fp_fusion=False)
        frontier = width.new_empty(B, K)
        frontier_kernel[(B,)](child_scores, width, frontier, F * K, K, CHUNKS=512)
        slots_kernel[(B, -(-K // 32))](frontier, depth, ancestors, child_tokens, child_scores, tokens, frontier_scores,
                                       rows, new_ancestors, new_candidates, F, K, W, level, first_node,
                                       first_candidate, BLOCK=32, num_warps=1)
    return (child_tokens, child_scores, child_parents, tokens, frontier_scores, rows, new_ancestors, new_candidates,
            status)
