"""What guidance, temperature, top-k and top-p make of a row of logits: all ids in one block, thresholds by bitwise
search.
"""
import triton
import triton.language as tl

from ._keys import floats_of, keys_of
from ._noise import exp
from ._rows import MAX_WARPS

LOWEST = tl.constexpr(-(2**31))           # below the key of every logit
MASS_ONE = tl.constexpr(1099511627776.0)  # 2**40


@triton.jit
def threshold(keys, mass, limit):
    """The largest key such that the keys from it upwards hold a mass of at least `limit`, found one bit at a time."""
    found = tl.full((), -(2**31), tl.int64)
    step = tl.full((), 2**31, tl.int64)
    while step > 0:
        is_reached = tl.sum(tl.where(keys >= (found + step).to(tl.int32), mass, 0), axis=0) >= limit
        found = tl.where(is_reached, found + step, found)
        step = step >> 1
    return found.to(tl.int32)


@triton.jit
def load_logits(logits, uncond, guidance, temperature, i, mask):
    """Logits of a row after guidance and temperature; `uncond` may be None. Temperature 0 counts as 1."""
    x = tl.load(logits + i, mask=mask, other=0.0).to(tl.float32)
    if uncond is not None:
        u = tl.load(uncond + i, mask=mask, other=0.0).to(tl.float32)
        guided = u + guidance * (x - u)
        x = tl.where((x == -float("inf")) & (u < float("inf")), -float("inf"), guided)
    return tl.div_rn(x, tl.where(temperature != 0, temperature, 1.0))


@triton.jit
def filter_logits(x, mask, num_ids, temperature, top_k, top_p):
    """Of a row in one block: its keys (LOWEST where not `mask`), the best logit, the lowest key that the filters keep,
    and whether the row is valid. Of an invalid row the other results mean nothing.

    After this the keys stand for the logits: both would not fit into registers.
    """
    keys = keys_of(x)
    highest = tl.max(tl.where(mask, keys, LOWEST), axis=0)
    lowest = tl.min(tl.where(mask, keys, 2**31 - 1), axis=0)
    is_valid = (lowest >= -0x7F800001) & (highest != -0x7F800001) & (highest < 0x7F800000) & (temperature >= 0)
    keys = tl.where(mask, keys, LOWEST)
    best = floats_of(highest)

    is_sampled = temperature != 0
    lowest_kept = tl.full((), LOWEST + 1, tl.int32)
    if is_sampled & (top_k > 0) & (top_k < num_ids):
        lowest_kept = threshold(keys, mask.to(tl.int32), top_k)
    if is_sampled & (top_p > 0) & (top_p < 1) & is_valid:
        mass = (tl.where(keys >= lowest_kept, exp(floats_of(keys) - best), 0.0) * MASS_ONE).to(tl.int64)
        limit = tl.ceil(top_p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        lowest_kept = threshold(keys, mass, limit)
    return keys, best, lowest_kept, is_valid


def num_warps(block):
    """Warps for a block of so many ids."""
    return min(MAX_WARPS, max(4, block // 512))
