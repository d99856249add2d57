"""A draw from a row of logits by Gumbel noise. All ids are filtered in one block. Then the row is read again, TILE ids
at a time, since the noise of all ids would not fit into registers beside their keys.
"""
import triton
import triton.language as tl

from ._filters import filter_logits, load_logits, num_warps, row_range
from ._keys import NONE, entries_of, id_of, keys_of
from ._noise import gumbel_noise


def blocks(num_ids):
    """BLOCK, TILE and the warps of a kernel that draws from rows of at most so many ids."""
    block = triton.next_power_of_2(num_ids)
    warps = num_warps(block)
    return {"BLOCK": block, "TILE": min(max(4, block), 128 * warps), "num_warps": warps}


@triton.jit
def draw_row(logits, uncond, id_range, row, V, first_id, last_id, s, t, top_k, top_p, seed, position, ahead,
             FILTERS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The token of a row of (.., V) logits, a second one with the noise `ahead` further, and whether the row is valid.
    Both are 0 if it is not, and the same if `ahead` is 0.
    """
    logits += row * V
    if uncond is not None:
        uncond += row * V
    first, last, is_range = row_range(id_range, row, first_id, last_id, V)
    i = tl.arange(0, BLOCK)
    num_ids = (last - first).to(tl.int32)
    mask = i < num_ids
    x = load_logits(logits, uncond, s, t, first + i, mask)
    keys, best, lowest_kept, is_valid = filter_logits(x, mask, num_ids, t, top_k, top_p, FILTERS)
    is_valid = is_valid & is_range
    token = tl.full((), 0, tl.int64)
    ahead_token = token
    if is_valid & (t == 0):
        token = first + tl.argmax(keys, axis=0, tie_break_left=True)
        ahead_token = token
    if is_valid & (t > 0):
        largest = tl.full([TILE], NONE, tl.int64)
        ahead_largest = largest
        begin = first & -4                               # the noise is made for four ids at once
        while begin < last:
            v = begin + tl.arange(0, TILE)
            is_inside = (v >= first) & (v < last)
            tile = load_logits(logits, uncond, s, t, v, is_inside)
            margins = tl.where(is_inside & (keys_of(tile) >= lowest_kept), tile - best, -float("inf"))
            score = margins + gumbel_noise(seed, position, begin, TILE)
            largest = tl.maximum(largest, entries_of(score, v, -float("inf")))
            if ahead > 0:
                score = margins + gumbel_noise(seed, position + ahead, begin, TILE)
                ahead_largest = tl.maximum(ahead_largest, entries_of(score, v, -float("inf")))
            begin += TILE
        token = id_of(tl.max(largest, axis=0))
        ahead_token = token
        if ahead > 0:
            ahead_token = id_of(tl.max(ahead_largest, axis=0))
    return token, ahead_token, is_valid
