"""guided_probs in Triton: one program per row, all ids in one block; thresholds by bitwise search."""
import torch
import triton
import triton.language as tl

from ._rows import MAX_WARPS


@triton.jit
def flip(bits):
    """A float's bits -> an integer in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def threshold(keys, weights, limit):
    """The largest key such that it and the larger ones weigh at least `limit`, one bit at a time."""
    found = tl.full((), -(2**31), tl.int64)
    step = tl.full((), 2**31, tl.int64)
    while step > 0:
        reached = tl.sum(tl.where(keys >= (found + step).to(tl.int32), weights, 0), axis=0) >= limit
        found = tl.where(reached, found + step, found)
        step = step >> 1
    return found.to(tl.int32)


@triton.jit
def guided_probs_kernel(logits, uncond, guidance, temperature, top_k, top_p, probs, status, N, V, first_id,
                        ids, GUIDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    b = row // N
    at = tl.arange(0, BLOCK)
    inside = at < ids
    infinity = float("inf")
    x = tl.load(logits + row * V + first_id + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        u = tl.load(uncond + row * V + first_id + at, mask=inside, other=0.0).to(tl.float32)
        guided = u + tl.load(guidance + b) * (x - u)
        x = tl.where((x == -infinity) & (u < infinity), -infinity, guided)
    heat = tl.load(temperature + b)
    sampling = heat != 0
    x = tl.div_rn(x, tl.where(sampling, heat, 1.0))

    # As integers the two zeros are one, and every NaN lies outside -inf .. inf.
    keys = flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))
    highest = tl.max(tl.where(inside, keys, -(2**31)), axis=0)
    lowest = tl.min(tl.where(inside, keys, 2**31 - 1), axis=0)
    invalid = (lowest < -0x7F800001) | (highest == -0x7F800001) | (highest >= 0x7F800000) | ~(heat >= 0)
    keys = tl.where(inside, keys, -(2**31))
    best = flip(highest).to(tl.float32, bitcast=True)

    k = tl.load(top_k + b)
    lowest_kept = tl.full((), -(2**31) + 1, tl.int32)
    if sampling & (k > 0) & (k < ids):
        lowest_kept = threshold(keys, inside.to(tl.int32), k)
    e = tl.where((keys >= lowest_kept) & ~invalid, tl.exp(x - best), 0.0)
    p = tl.load(top_p + b)
    if sampling & (p > 0) & (p < 1) & ~invalid:
        mass = (e * 1099511627776.0).to(tl.int64)        # 2^40
        limit = tl.ceil(p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        e = tl.where(keys >= threshold(keys, mass, limit), e, 0.0)
    total = tl.sum(e.to(tl.float64), axis=0).to(tl.float32)
    tl.store(probs + row * V + first_id + at, tl.div_rn(e, tl.where(invalid, 1.0, total)), mask=inside)
    tl.store(status + row, tl.where(invalid, 2, 0))

    start = tl.full((), 0, tl.int64)
    while (start < V) & (ids < V):                       # the ids outside the range
        v = start + at
        tl.store(probs + row * V + v, tl.zeros((BLOCK,), tl.float32),
                 mask=(v < V) & ((v < first_id) | (v >= first_id + ids)))
        start += BLOCK


def guided_probs(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id):
    B, N, V = logits.shape
    probs = torch.empty_like(logits, dtype=torch.float32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B * N > 0:
        block = triton.next_power_of_2(last_id - first_id)
        guided_probs_kernel[(B * N,)](
            logits, uncond, guidance, temperature, top_k, top_p, probs, status, N, V, first_id,
            last_id - first_id, GUIDED=uncond is not None, BLOCK=block,
            num_warps=min(MAX_WARPS, max(4, block // 1024)), enable_fp_fusion=False)
    return probs, status
