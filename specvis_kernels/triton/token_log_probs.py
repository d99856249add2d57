"""token_log_probs in Triton: each program takes one token after the other, see _filters.py."""
import torch
import triton.language as tl

from ._filters import LOWEST, filter_and_sum, programs_and_scratch, sum_of_shares, tiles
from ._kernel import kernel
from ._keys import floats_of
from ._noise import log
from ._rows import INVALID_ROW


@kernel("logits", "uncond", "scratch", "V")
def token_log_probs_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        min_p,                                 # (B) or None
        tokens, rows,                          # (B, K); rows may be None
        id_range,                              # (B, N, 2) or None
        scratch,                               # (programs, 2, V)
        sampled, full, status,                 # (B, K)
        num_tokens, N, K, V, first_id, last_id, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    scratch += tl.program_id(0).to(tl.int64) * 2 * V
    i = tl.program_id(0).to(tl.int64)
    while i < num_tokens:                      # i = b * K + k
        b = i // K
        n = i - b * K
        if rows is not None:
            n = tl.load(rows + i)
        sampled_i = tl.where(n < 0, 0.0, -float("inf"))
        full_i = sampled_i
        status_i = tl.where(n < N, 0, INVALID_ROW)
        if (n >= 0) & (n < N):
            is_greedy = tl.load(temperature + b) == 0
            first, last, is_valid, begin, end, best, lowest_kept, total = filter_and_sum(
                logits, uncond, scratch, id_range, b * N + n, V, first_id, last_id, tl.load(guidance + b),
                tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), None if min_p is None else min_p + b,
                FILTERS, TILE, BITS)
            total_of_all = sum_of_shares(scratch, begin, end, V, best, LOWEST + 1, TILE)
            token = tl.load(tokens + i)
            is_id = is_valid & (token >= first) & (token < last)
            key = tl.load(scratch + tl.where(is_id, token, begin))
            margin = tl.where(is_id, floats_of(key) - best, -float("inf"))
            full_i = margin - log(tl.where(is_valid, total_of_all, 1.0))
            sampled_i = tl.where(is_greedy, tl.where(margin == 0, 0.0, -float("inf")),
                                 tl.where(key >= lowest_kept, margin - log(total), -float("inf")))
            status_i = tl.where(is_valid, 0, INVALID_ROW)
        tl.store(sampled + i, sampled_i)
        tl.store(full + i, full_i)
        tl.store(status + i, status_i)
        i += tl.num_programs(0)


def token_log_probs(logits, uncond, guidance, temperature, top_k, top_p, min_p, tokens, rows, id_range, first_id,
                    last_id, filters):
    (_, N, V), (B, K) = logits.shape, tokens.shape
    sampled, full = (tokens.new_empty(B, K, dtype=torch.float32) for _ in range(2))
    status = tokens.new_empty(B, K, dtype=torch.int32)
    if B * K > 0:
        programs, scratch = programs_and_scratch(B * K, V, logits.device)
        token_log_probs_kernel[(programs,)](
            logits, uncond, guidance, temperature, top_k, top_p, min_p, tokens, rows, id_range, scratch, sampled, full,
            status, B * K, N, K, V, first_id, last_id, FILTERS=filters, **tiles(V), enable_fp_fusion=False)
    return sampled, full, status
