"""guided_probs in Triton: one program per row, all ids in one block."""
import torch
import triton
import triton.language as tl

from ._filters import filter_logits, load_logits, num_warps
from ._keys import floats_of
from ._noise import exp
from ._rows import INVALID_ROW


@triton.jit
def guided_probs_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        probs,                                 # (B, N, V)
        status,                                # (B, N)
        N, V, first_id, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    b = row // N
    i = tl.arange(0, BLOCK)
    mask = i < num_ids
    t = tl.load(temperature + b)
    start = row * V + first_id
    x = load_logits(logits + start, None if uncond is None else uncond + start, tl.load(guidance + b), t, i, mask)
    keys, best, lowest_kept, is_valid = filter_logits(x, mask, num_ids, t, tl.load(top_k + b), tl.load(top_p + b))
    e = tl.where((keys >= lowest_kept) & is_valid, exp(floats_of(keys) - best), 0.0)
    total = tl.sum(e.to(tl.float64), axis=0).to(tl.float32)
    tl.store(probs + start + i, tl.div_rn(e, tl.where(is_valid, total, 1.0)), mask=mask)
    tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))

    begin = tl.full((), 0, tl.int64)
    while (begin < V) & (num_ids < V):                   # the ids outside the range
        v = begin + i
        tl.store(probs + row * V + v, tl.zeros((BLOCK,), tl.float32),
                 mask=(v < V) & ((v < first_id) | (v >= first_id + num_ids)))
        begin += BLOCK


def guided_probs(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id):
    B, N, V = logits.shape
    probs = torch.empty_like(logits, dtype=torch.float32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B * N > 0:
        block = triton.next_power_of_2(last_id - first_id)
        guided_probs_kernel[(B * N,)](
            logits, uncond, guidance, temperature, top_k, top_p, probs, status, N, V, first_id,
            last_id - first_id, BLOCK=block, num_warps=num_warps(block), enable_fp_fusion=False)
    return probs, status
