"""A draw from a row of logits by Gumbel noise, TILE ids at a time."""
import triton
import triton.language as tl

from ._filters import filter_row, load_keys, row_range
from ._keys import NONE, entries_of, floats_of, id_of
from ._noise import gumbel_noise


@triton.jit
def draw_row(logits, uncond, scratch, id_range, row, V, first_id, last_id, s, t, top_k, top_p, min_p, seed, position,
             ahead, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """Draws from a row of (.., V) logits. Returns the token, a second token with the noise of `ahead` positions later,
    and whether the row is valid. Both tokens are 0 if it is not, and they are equal if `ahead` is 0.
    """
    first, last, is_range = row_range(id_range, row, first_id, last_id, V)
    begin, best, lowest_kept, is_valid = filter_row(
        logits + row * V, None if uncond is None else uncond + row * V, scratch, first, last, V, s, t, top_k, top_p,
        min_p, FILTERS, TILE, BITS)
    is_valid = is_valid & is_range
    token = tl.full((), 0, tl.int64)
    ahead_token = token
    if is_valid:
        largest = tl.full([TILE], NONE, tl.int64)
        ahead_largest = largest
        start = begin                                    # a multiple of four: four ids share a block of Philox
        while start < last:
            v = start + tl.arange(0, TILE)
            keys = load_keys(scratch, v, V)
            if t == 0:
                largest = tl.maximum(largest, (keys.to(tl.int64) << 32) + (0x7FFFFFFF - v))
            else:
                margins = tl.where(keys >= lowest_kept, floats_of(keys) - best, -float("inf"))
                score = margins + gumbel_noise(seed, position, start, TILE)
                largest = tl.maximum(largest, entries_of(score, v, -float("inf")))
                if ahead > 0:
                    score = margins + gumbel_noise(seed, position + ahead, start, TILE)
                    ahead_largest = tl.maximum(ahead_largest, entries_of(score, v, -float("inf")))
            start += TILE
        token = id_of(tl.max(largest, axis=0))
        ahead_token = token
        if (ahead > 0) & (t > 0):
            ahead_token = id_of(tl.max(ahead_largest, axis=0))
    return token, ahead_token, is_valid
