"""guided_probs in Triton: each program takes one row after the other, see _filters.py."""
import torch
import triton.language as tl

from ._filters import filter_and_sum, load_probs, programs_and_scratch, tiles
from ._kernel import kernel
from ._rows import INVALID_ROW


@kernel("logits", "uncond", "scratch", "probs", "V")
def guided_probs_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        min_p,                                 # (B) or None
        id_range,                              # (B, N, 2) or None
        scratch,                               # (programs, 2, V)
        probs, status,                         # (B, N, V), (B, N)
        num_rows, N, V, first_id, last_id, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    scratch += tl.program_id(0).to(tl.int64) * 2 * V
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:                      # row = b * N + n
        b = row // N
        _, _, is_valid, begin, end, best, lowest_kept, total = filter_and_sum(
            logits, uncond, scratch, id_range, row, V, first_id, last_id, tl.load(guidance + b),
            tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), None if min_p is None else min_p + b,
            FILTERS, TILE, BITS)
        tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))
        start = 0
        while start < V:
            v = start + tl.arange(0, TILE)
            tl.store(probs + row * V + v, load_probs(scratch, start, V, begin, end, best, lowest_kept, total, TILE),
                     mask=v < V)
            start += TILE
        row += tl.num_programs(0)


def guided_probs(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id, last_id, filters):
    B, N, V = logits.shape
    probs = torch.empty_like(logits, dtype=torch.float32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B * N > 0:
        programs, scratch = programs_and_scratch(B * N, V, logits.device)
        guided_probs_kernel[(programs,)](
            logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, scratch, probs, status, B * N, N, V,
            first_id, last_id, FILTERS=filters, **tiles(V), enable_fp_fusion=False)
    return probs, status
