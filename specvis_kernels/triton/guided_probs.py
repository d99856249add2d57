"""guided_probs in Triton: one program per row, all ids in one block; thresholds by bitwise search."""
import torch
import triton
import triton.language as tl

from ._rows import INVALID_ROW, MAX_WARPS


@triton.jit
def flip(bits):
    """A float's bits -> an integer in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
def guided_probs_kernel(
        logits, uncond,                        # (B, N, V)
        guidance, temperature, top_k, top_p,   # (B)
        probs,                                 # (B, N, V)
        status,                                # (B, N)
        N, V, first_id, num_ids, GUIDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    b = row // N
    i = tl.arange(0, BLOCK)
    mask = i < num_ids
    infinity = float("inf")
    x = tl.load(logits + row * V + first_id + i, mask=mask, other=0.0).to(tl.float32)
    if GUIDED:
        u = tl.load(uncond + row * V + first_id + i, mask=mask, other=0.0).to(tl.float32)
        guided = u + tl.load(guidance + b) * (x - u)
        x = tl.where((x == -infinity) & (u < infinity), -infinity, guided)
    t = tl.load(temperature + b)
    is_sampled = t != 0
    x = tl.div_rn(x, tl.where(is_sampled, t, 1.0))

    # As integers the two zeros are one, and every NaN lies outside -inf .. inf.
    keys = flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))
    highest = tl.max(tl.where(mask, keys, -(2**31)), axis=0)
    lowest = tl.min(tl.where(mask, keys, 2**31 - 1), axis=0)
    is_valid = (lowest >= -0x7F800001) & (highest != -0x7F800001) & (highest < 0x7F800000) & (t >= 0)
    keys = tl.where(mask, keys, -(2**31))
    best = flip(highest).to(tl.float32, bitcast=True)

    k = tl.load(top_k + b)
    lowest_kept = tl.full((), -(2**31) + 1, tl.int32)
    if is_sampled & (k > 0) & (k < num_ids):
        lowest_kept = threshold(keys, mask.to(tl.int32), k)
    e = tl.where((keys >= lowest_kept) & is_valid, tl.exp(x - best), 0.0)
    p = tl.load(top_p + b)
    if is_sampled & (p > 0) & (p < 1) & is_valid:
        mass = (e * 1099511627776.0).to(tl.int64)        # 2^40
        limit = tl.ceil(p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        e = tl.where(keys >= threshold(keys, mass, limit), e, 0.0)
    total = tl.sum(e.to(tl.float64), axis=0).to(tl.float32)
    tl.store(probs + row * V + first_id + i, tl.div_rn(e, tl.where(is_valid, total, 1.0)), mask=mask)
    tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))

    start = tl.full((), 0, tl.int64)
    while (start < V) & (num_ids < V):                   # the ids outside the range
        v = start + i
        tl.store(probs + row * V + v, tl.zeros((BLOCK,), tl.float32),
                 mask=(v < V) & ((v < first_id) | (v >= first_id + num_ids)))
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
