"""guided_probs in Triton: one program per row, all ids in one block."""
import torch
import triton
import triton.language as tl

from ._filters import num_warps, row_probs
from ._rows import INVALID_ROW


@triton.jit(do_not_specialize=["N"])  # it changes from step to step
def guided_probs_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        id_range,                              # (B, N, 2) or None
        probs,                                 # (B, N, V)
        status,                                # (B, N)
        N, V, first_id, last_id, FILTERS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    b = row // N
    p, first, last, is_valid = row_probs(
        logits, uncond, id_range, row, V, first_id, last_id, tl.load(guidance + b), tl.load(temperature + b),
        tl.load(top_k + b), tl.load(top_p + b), FILTERS, BLOCK)
    i = tl.arange(0, BLOCK)
    tl.store(probs + row * V + first + i, p, mask=first + i < last)
    tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))

    begin = tl.full((), 0, tl.int64)
    while (begin < V) & (last - first < V):                  # the ids outside the range
        v = begin + i
        tl.store(probs + row * V + v, tl.zeros((BLOCK,), tl.float32), mask=(v < V) & ((v < first) | (v >= last)))
        begin += BLOCK


def guided_probs(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, filters):
    B, N, V = logits.shape
    probs = torch.empty_like(logits, dtype=torch.float32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B * N > 0:
        block = triton.next_power_of_2(last_id - first_id)
        guided_probs_kernel[(B * N,)](
            logits, uncond, guidance, temperature, top_k, top_p, id_range, probs, status, N, V, first_id, last_id,
            FILTERS=filters, BLOCK=block, num_warps=num_warps(block), enable_fp_fusion=False)
    return probs, status
