"""What guidance, temperature, top-k, top-p and min-p make of a row of logits, TILE ids at a time.

The ids' keys, which order them as their logits do, are kept in the program's scratch, (2, V) int32. Each pass reads
them again, since the keys of a whole row would not fit into registers. After the keys come the masses that top-p sums.
"""
import os

import torch
import triton
import triton.language as tl

from ._kernel import next_power_of_2
from ._keys import floats_of, keys_of
from ._noise import exp

LOWEST = tl.constexpr(-(2**31))           # below the key of every logit
HIGHEST = tl.constexpr(2**31 - 1)
MASS_ONE = tl.constexpr(1099511627776.0)  # 2**40
MASK, HALF_MASK = tl.constexpr(-3.3895313892515355e38), tl.constexpr(-65504.0)  # as in specvis_kernels/_filters.py

# The interpreter takes equally long for an operation on few numbers and on many.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_TILE, MAX_BITS = (2**18, 4) if IS_INTERPRETED else (4096, 2)


def tiles(V, share=1):
    """TILE, the BITS of a threshold that are found at a time, and the warps of a kernel that filters rows of V ids.

    share: 2 for a kernel that needs half of the registers for other things
    """
    tile = min(max(4, next_power_of_2(V)), MAX_TILE // share)
    return {"TILE": tile, "BITS": MAX_BITS, "num_warps": min(16, max(4, tile // 128))}


def programs_and_scratch(rows, V, device):
    """How many programs share the rows, as many as run at a time, and their scratch."""
    count = 4
    if device.type == "cuda":
        count = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    count = min(rows, count)
    return count, torch.empty(count, 2, V, dtype=torch.int32, device=device)


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
    """first_id, last_id and is_valid of a row: from id_range, if not None. An invalid range gives readable ids."""
    first = tl.full((), 0, tl.int64) + first_id
    last = tl.full((), 0, tl.int64) + last_id
    if id_range is not None:
        first = tl.load(id_range + row * 2)
        last = tl.load(id_range + row * 2 + 1)
    is_valid = (first >= 0) & (first < last) & (last <= V)
    return tl.where(is_valid, first, 0).to(tl.int32), tl.where(is_valid, last, 1).to(tl.int32), is_valid


@triton.jit
def load_keys(scratch, v, V):
    return tl.load(scratch + v, mask=v < V, other=LOWEST)


@triton.jit
def load_mass(scratch, v, V, IS_MASS: tl.constexpr):
    """The weight of each of the ids v: one, or its mass, which is stored after the keys."""
    if IS_MASS:
        e = tl.load(scratch + V + v, mask=v < V, other=0).to(tl.float32, bitcast=True)
        return (e * MASS_ONE).to(tl.int64)
    else:
        return (v >= 0).to(tl.int32)


@triton.jit
def sums_of_three(scratch, begin, last, V, first, second, third, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """The weights of the keys at or above each of three bounds, (2, 2), the last one twice: one reduction for all."""
    one = tl.zeros([TILE], tl.int64 if IS_MASS else tl.int32)
    two = one
    three = one
    start = begin
    while start < last:
        v = start + tl.arange(0, TILE)
        keys = load_keys(scratch, v, V)
        mass = load_mass(scratch, v, V, IS_MASS)
        one += tl.where(keys >= first, mass, 0)
        two += tl.where(keys >= second, mass, 0)
        three += tl.where(keys >= third, mass, 0)
        start += TILE
    return tl.sum(tl.join(tl.join(one, two), tl.join(three, three)), axis=0)


@triton.jit
def threshold(scratch, begin, last, V, limit, IS_MASS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """The largest key such that the keys at or above it weigh at least `limit`, found 2 or 4 bits at a time.

    A search for a number of ids may end at a lower key that exactly this number reaches: the filters keep equal ids.
    """
    found = tl.full((), LOWEST, tl.int32)
    step = tl.full((), 1, tl.int32) << (32 - BITS)
    while step > 0:
        if BITS == 2:
            first = found + step
            second = first + step
            third = second + step
            sums = sums_of_three(scratch, begin, last, V, first, second, third, IS_MASS, TILE)
            num_reached = tl.sum(tl.sum((sums >= limit).to(tl.int32), axis=1), axis=0)
            is_exact = tl.max(tl.max((sums == limit).to(tl.int32), axis=1), axis=0)
            found = tl.where(num_reached >= 1, first, found)
            found = tl.where(num_reached >= 2, second, found)
            found = tl.where(num_reached >= 3, third, found)
        else:                                            # for the interpreter: fewer operations, on more numbers
            candidates = found + step * tl.arange(0, 16)
            sums = tl.zeros([16], tl.int64 if IS_MASS else tl.int32)
            start = begin
            while start < last:
                v = start + tl.arange(0, TILE)
                is_reached = load_keys(scratch, v, V)[:, None] >= candidates[None, :]
                sums += tl.sum(tl.where(is_reached, load_mass(scratch, v, V, IS_MASS)[:, None], 0), axis=0)
                start += TILE
            num_reached = tl.sum((sums >= limit).to(tl.int32), axis=0)
            is_exact = tl.max((sums == limit).to(tl.int32), axis=0)
            found += (num_reached - 1) * step
        step = step >> BITS
        if not IS_MASS:
            step = tl.where(is_exact != 0, 0, step)
    return found


@triton.jit
def filter_row(logits, uncond, scratch, first, last, V, guidance, temperature, top_k, top_p, min_p,
               FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """Filters the ids first .. last - 1 of a row, and puts their keys into scratch, LOWEST for other ids of the tiles.

    Returns the multiple of TILE where the tiles begin, the best logit, the lowest key that the filters keep, and
    whether the row is valid. For an invalid row the other results mean nothing. All filters keep the ids from some
    logit upwards, so the order of top-k and top-p only changes the mass of which top-p is a share. `min_p` points to
    the request's number, or is None.
    """
    begin = first // TILE * TILE
    highest = tl.full([TILE], LOWEST, tl.int32)
    lowest = tl.full([TILE], HIGHEST, tl.int32)
    tl.debug_barrier()                        # all threads have read the last row's keys
    start = begin
    while start < last:
        v = start + tl.arange(0, TILE)
        keys = keys_of(load_logits(logits, uncond, guidance, temperature, v, v < V))
        is_inside = (v >= first) & (v < last)
        lowest = tl.minimum(lowest, tl.where(is_inside, keys, HIGHEST))
        keys = tl.where(is_inside, keys, LOWEST)
        highest = tl.maximum(highest, keys)
        tl.store(scratch + v, keys, mask=v < V)
        start += TILE
    max_key = tl.max(highest, axis=0)
    min_key = tl.min(lowest, axis=0)
    is_valid = (min_key >= -0x7F800001) & (max_key != -0x7F800001) & (max_key < 0x7F800000) & (temperature >= 0)
    best = floats_of(max_key)
    masked = HALF_MASK if logits.dtype.element_ty == tl.float16 else MASK
    is_masked = tl.load(logits + first).to(tl.float32) <= masked
    start = begin
    while is_masked & (start < last):         # for few rows: a model leaves an id unmasked, mostly the first
        v = start + tl.arange(0, TILE)
        logit = tl.load(logits + v, mask=(v >= first) & (v < last), other=-float("inf")).to(tl.float32)
        is_masked = tl.max(logit, axis=0) <= masked
        start += TILE
    tl.debug_barrier()

    is_sampled = temperature != 0
    lowest_kept = tl.full((), LOWEST + 1, tl.int32)
    if is_sampled & (top_k > 0) & (top_k < last - first) & is_valid:
        lowest_kept = threshold(scratch, begin, last, V, top_k, False, TILE, BITS)
    kth_largest = lowest_kept
    if FILTERS == "p_then_k":
        lowest_kept = tl.full((), LOWEST + 1, tl.int32)
    if is_sampled & (top_p > 0) & (top_p < 1) & is_valid:
        sums = tl.zeros([TILE], tl.int64)
        start = begin
        while start < last:
            v = start + tl.arange(0, TILE)
            keys = load_keys(scratch, v, V)
            e = tl.where(keys >= lowest_kept, exp(floats_of(keys) - best), 0.0)
            tl.store(scratch + V + v, e.to(tl.int32, bitcast=True), mask=v < V)
            sums += (e * MASS_ONE).to(tl.int64)
            start += TILE
        tl.debug_barrier()
        limit = tl.ceil(top_p.to(tl.float64) * tl.sum(sums, axis=0).to(tl.float64)).to(tl.int64)
        lowest_kept = threshold(scratch, begin, last, V, limit, True, TILE, BITS)
    lowest_kept = tl.maximum(lowest_kept, kth_largest)
    if min_p is not None:
        share = tl.load(min_p)
        if is_sampled & (share > 0) & is_valid:
            lowest = tl.full([TILE], HIGHEST, tl.int32)
            start = begin
            while start < last:
                keys = load_keys(scratch, start + tl.arange(0, TILE), V)
                is_kept = exp(floats_of(keys) - best) >= tl.minimum(share, 1.0)
                lowest = tl.minimum(lowest, tl.where(is_kept, keys, HIGHEST))
                start += TILE
            lowest_kept = tl.maximum(lowest_kept, tl.min(lowest, axis=0))
    return begin, best, lowest_kept, is_valid & (is_masked == 0)


@triton.jit
def shares(keys, best, lowest_kept):
    """exp(logit - best) of the ids that the filters keep, 0 for the others."""
    return tl.where(keys >= lowest_kept, exp(floats_of(keys) - best), 0.0)


@triton.jit
def sum_of_shares(scratch, begin, end, V, best, lowest_kept, TILE: tl.constexpr):
    """The sum of shares() from the tile at `begin` up to `end`, equal in any order of summation."""
    sums = tl.zeros([TILE], tl.int64)
    start = begin
    while start < end:
        keys = load_keys(scratch, start + tl.arange(0, TILE), V)
        sums += (shares(keys, best, lowest_kept) * MASS_ONE).to(tl.int64)
        start += TILE
    return (tl.sum(sums, axis=0).to(tl.float64) / MASS_ONE).to(tl.float32)


@triton.jit
def filter_and_sum(logits, uncond, scratch, id_range, row, V, first_id, last_id, guidance, temperature, top_k, top_p,
                   min_p, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """Filters a row of (.., V) logits. Returns its ids, from the first to one past the last, whether it is valid, and
    the arguments of load_probs(): where the tiles begin and end, the best logit, the lowest kept key, the shares' sum.
    """
    first, last, is_range = row_range(id_range, row, first_id, last_id, V)
    begin, best, lowest_kept, is_valid = filter_row(
        logits + row * V, None if uncond is None else uncond + row * V, scratch, first, last, V, guidance, temperature,
        top_k, top_p, min_p, FILTERS, TILE, BITS)
    is_valid = is_valid & is_range
    end = tl.where(is_valid, last, begin)     # the probabilities of an invalid row are zeros
    total = sum_of_shares(scratch, begin, end, V, best, lowest_kept, TILE)
    return first, last, is_valid, begin, end, best, lowest_kept, tl.where(is_valid, total, 1.0)


@triton.jit
def load_probs(scratch, start, V, begin, end, best, lowest_kept, total, TILE: tl.constexpr):
    """The probabilities of a tile's ids; zeros for ids that are in no tile of the row."""
    size = tl.where((start >= begin) & (start < end), V, 0)
    keys = load_keys(scratch, start + tl.arange(0, TILE), size)
    return tl.div_rn(shares(keys, best, lowest_kept), total)
