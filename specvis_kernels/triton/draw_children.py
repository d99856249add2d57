"""draw_children in Triton: one program per row.

With uniforms it sums the blocks in one pass, then reads one block for each child. The sums of the blocks stay as they
were at first. Instead, the threshold to draw at moves past what was drawn before: `removed_at` says at which running
sum of the remaining mass each drawn token was removed.

With seeds it keeps the highest score of each chunk of the row (tokens c, c + BLOCK, c + 2 BLOCK, ...). The highest of
these is the next child, and the next score of its chunk, made again, takes its place.
"""
import torch
import triton
import triton.language as tl

from ._kernel import cdiv, kernel, next_power_of_2
from ._keys import NONE, entries_of, id_of
from ._noise import GUMBEL_STREAM, gumbel_noise, log, to_gumbel
from ._rows import FIXED_ONE, INVALID_ROW, block, draw_threshold, fill, load_mass
from .expand_tree import without


@triton.jit
def scores_of(p, best, noise, ids):
    """Entries of the scores; NONE for tokens without mass."""
    has_mass = p * FIXED_ONE >= 1.0
    score = (log(tl.where(has_mass, p, 1.0)) - best) + noise
    return entries_of(tl.where(has_mass, score, float("-inf")), ids, float("-inf"))


@triton.jit
def draw_by_noise(row, seed, position, tokens, V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The children of one row, stored; returns how many there are, and whether the row is valid."""
    v = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    num_invalid = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < V:
        p = tl.load(row + start + v, mask=start + v < V, other=0.0)
        is_prob = (p >= 0.0) & (p <= 2.0)
        num_invalid += tl.where(is_prob, 0, 1)
        largest = tl.maximum(largest, tl.where(is_prob, p, 0.0))
        start += BLOCK
    max_prob = tl.max(largest, axis=0)
    is_valid = (tl.sum(num_invalid, axis=0) == 0) & (max_prob * FIXED_ONE >= 1.0)
    n = 0
    if is_valid:
        best = log(max_prob)
        scores = tl.full([BLOCK], NONE, tl.int64)
        first = 0
        while first < V:
            p = tl.load(row + first + v, mask=first + v < V, other=0.0)
            scores = tl.maximum(scores, scores_of(p, best, gumbel_noise(seed, position, first, BLOCK), first + v))
            first += BLOCK
        highest = tl.max(scores, axis=0)
        while (n < K) & (highest > NONE):
            token = id_of(highest)
            tl.store(tokens + n, token)
            chunk = (token % BLOCK).to(tl.int32)
            ids = chunk + BLOCK * tl.arange(0, BLOCKS)
            p = tl.load(row + ids, mask=ids < V, other=0.0)
            blocks = (ids // 4).to(tl.uint32)
            zero = blocks * 0
            w0, w1, w2, w3 = tl.philox(seed, blocks, zero + position.to(tl.uint32), zero + GUMBEL_STREAM, zero)
            word = tl.where(chunk % 4 < 2, tl.where(chunk % 4 == 0, w0, w1), tl.where(chunk % 4 == 2, w2, w3))
            others = scores_of(p, best, to_gumbel(word), ids)
            following = tl.max(tl.where(others < highest, others, NONE), axis=0)
            scores = tl.where(v == chunk, following, scores)
            highest = tl.max(scores, axis=0)
            n += 1
    fill(tokens, 0, n, K)
    return n, is_valid


@triton.jit
def draw_by_uniforms(row, uniforms, tokens, V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The children of one row, stored; returns how many there are, and whether the row is valid."""
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
        threshold = draw_threshold(tl.load(uniforms + n), remaining)
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
    tl.store(tokens + k, drawn_tokens, mask=k < K)
    return n, is_valid


@triton.jit
def find_likeliest(row, tokens, V, K, BLOCK: tl.constexpr):
    """Stores the K most probable tokens, 0 for a missing one."""
    keys = tl.full([BLOCK], NONE, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < V:
        ids = start + tl.arange(0, BLOCK)
        keys = tl.maximum(keys, entries_of(tl.load(row + ids, mask=ids < V, other=0.0), ids, 0.0))
        start += BLOCK
    best = tl.max(keys, axis=0)
    n = 0
    while (n < K) & (best > NONE):
        tl.store(tokens + n, id_of(best))
        keys = without(keys, best, row, 0, V, 0.0, BLOCK)
        best = tl.max(keys, axis=0)
        n += 1
    fill(tokens, 0, n, K)


@kernel("draft_probs", "V")
def draw_children_kernel(
        draft_probs,           # (R, V)
        uniforms,              # (R, K) or None: by noise
        seeds, positions,      # (B) and (R), R = B * F, or None
        temperature,           # (B) or None; where it is 0, the likeliest tokens
        tokens,                # (R, K)
        num_children, status,  # (R), or None with a temperature
        F, V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = draft_probs + r * V
    tokens += r * K
    draws = r >= 0
    if temperature is not None:
        draws = tl.load(temperature + r // F) != 0
        if draws == 0:
            find_likeliest(row, tokens, V, K, BLOCK)
    if draws:
        if uniforms is not None:
            n, is_valid = draw_by_uniforms(row, uniforms + r * K, tokens, V, K, BLOCK, BLOCKS, BLOCK_K)
        else:
            n, is_valid = draw_by_noise(row, tl.load(seeds + r // F), tl.load(positions + r), tokens, V, K, BLOCK,
                                        BLOCKS)
        if num_children is not None:
            tl.store(num_children + r, n)
            tl.store(status + r, tl.where(is_valid, 0, INVALID_ROW))


def sizes_of(V, K):
    """What a kernel that draws is compiled for: one size for up to 64 children, whatever their number."""
    size = max(block("V", V), 4)  # the noise comes by fours
    return dict(BLOCK=size, BLOCKS=next_power_of_2(cdiv(V, size)),
                BLOCK_K=max(next_power_of_2(K), 64), num_warps=8, enable_fp_fusion=False)


def draw_children(draft_probs, uniforms, seeds, positions, K):
    B, F, V = draft_probs.shape
    tokens = draft_probs.new_empty((B, F, K), dtype=torch.int64)
    num_children, status = (draft_probs.new_empty((B, F), dtype=torch.int32) for _ in range(2))
    if B > 0:
        draw_children_kernel[(B * F,)](draft_probs, uniforms, seeds, positions, None, tokens, num_children, status, F,
                                       V, K, **sizes_of(V, K))
    return tokens, num_children, status
