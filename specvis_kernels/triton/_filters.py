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
def row_range(id_range, row, first_id, last_id, V):
    """first_id, last_id and is_valid of a row: from id_range, if not None. Of no valid range, ids that may be read."""
    first = tl.full((), 0, tl.int64) + first_id
    last = tl.full((), 0, tl.int64) + last_id
    if id_range is not None:
        first = tl.load(id_range + row * 2)
        last = tl.load(id_range + row * 2 + 1)
    is_valid = (first >= 0) & (first < last) & (last <= V)
    return tl.where(is_valid, first, 0), tl.where(is_valid, last, 1), is_valid


@triton.jit
def filter_logits(x, mask, num_ids, temperature, top_k, top_p, FILTERS: tl.constexpr):
    """Of a row in one block: its keys (LOWEST where not `mask`), the best logit, the lowest key that the filters keep,
    and whether the row is valid. Of an invalid row the other results mean nothing.

    After this the keys stand for the logits: both would not fit into registers. Both filters keep the ids from some
    logit upwards, so their order matters for the mass alone of which top-p is a share.
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
    kth_largest = lowest_kept
    if FILTERS == "p_then_k":
        lowest_kept = tl.full((), LOWEST + 1, tl.int32)
    if is_sampled & (top_p > 0) & (top_p < 1) & is_valid:
        mass = (tl.where(keys >= lowest_kept, exp(floats_of(keys) - best), 0.0) * MASS_ONE).to(tl.int64)
        limit = tl.ceil(top_p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        lowest_kept = threshold(keys, mass, limit)
    return keys, best, tl.maximum(lowest_kept, kth_largest), is_valid


@triton.jit
def probabilities(keys, best, lowest_kept, is_valid):
    """What filter_logits() returned -> the row's probabilities; zeros if it is invalid."""
    e = tl.where((keys >= lowest_kept) & is_valid, exp(floats_of(keys) - best), 0.0)
    total = (tl.sum((e * MASS_ONE).to(tl.int64), axis=0).to(tl.float64) / MASS_ONE).to(tl.float32)
    return tl.div_rn(e, tl.where(is_valid, total, 1.0))


@triton.jit
def row_probs(logits, uncond, id_range, row, V, first_id, last_id, guidance, temperature, top_k, top_p,
              FILTERS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row of (.., V) logits: the probabilities of its ids, zeros if it is invalid; its ids, from the first to one
    past the last; and whether it is valid.
    """
    first, last, is_range = row_range(id_range, row, first_id, last_id, V)
    i = tl.arange(0, BLOCK)
    num_ids = (last - first).to(tl.int32)
    mask = i < num_ids
    start = row * V + first
    x = load_logits(logits + start, None if uncond is None else uncond + start, guidance, temperature, i, mask)
    keys, best, lowest_kept, is_valid = filter_logits(x, mask, num_ids, temperature, top_k, top_p, FILTERS)
    is_valid = is_valid & is_range
    return probabilities(keys, best, lowest_kept, is_valid), first, last, is_valid


def num_warps(block):
    """Warps for a block of so many ids."""
    return min(MAX_WARPS, max(4, block // 512))
